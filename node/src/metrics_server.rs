//! The HTTP server that Prometheus asks.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use shoal_metrics::Metrics;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::exit::{Exit, ExitWith};

/// A server that has its address and does not answer yet.
#[derive(Debug)]
pub struct MetricsServer {
    listener: TcpListener,
}

impl MetricsServer {
    /// Takes the address.
    ///
    /// # Errors
    /// When it is in use, or not one of this machine's.
    pub async fn bind(address: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("metrics cannot be served at {address}"))
            .exit_with(Exit::Usage)?;
        Ok(Self { listener })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers `GET /metrics` until it is told to stop.
    ///
    /// # Errors
    /// When the socket fails.
    pub async fn serve(self, metrics: Arc<Metrics>, stop: CancellationToken) -> anyhow::Result<()> {
        let router = Router::new().route("/metrics", get(exposition)).with_state(metrics);
        axum::serve(self.listener, router)
            .with_graceful_shutdown(stop.cancelled_owned())
            .await
            .context("the metrics server failed")
    }
}

async fn exposition(State(metrics): State<Arc<Metrics>>) -> Response {
    match metrics.encode() {
        Ok(text) => ([(header::CONTENT_TYPE, Metrics::CONTENT_TYPE)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    const ANY_PORT: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 0);

    async fn get(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.expect("it listens");
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("answered");
        answer
    }

    #[tokio::test]
    async fn metrics_are_served_until_the_end() {
        let server = MetricsServer::bind(ANY_PORT.into()).await.expect("a free port");
        let address = server.address().expect("bound");
        let metrics = Arc::new(Metrics::new().expect("registered"));
        let stop = CancellationToken::new();
        let asked = async {
            let answer = get(address, "/metrics").await;
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
            assert!(answer.contains(Metrics::CONTENT_TYPE), "{answer}");
            assert!(answer.contains("\n# TYPE shoal_"), "{answer}");
            let answer = get(address, "/").await;
            assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
            stop.cancel();
        };
        let (served, ()) = tokio::join!(server.serve(metrics, stop.clone()), asked);
        served.expect("stopped in good order");
    }

    #[tokio::test]
    async fn a_port_in_use_is_named() {
        let held = MetricsServer::bind(ANY_PORT.into()).await.expect("a free port");
        let address = held.address().expect("bound");
        let error = MetricsServer::bind(address).await.expect_err("in use");
        assert_eq!(Exit::of(&error), Exit::Usage);
        let text = crate::exit::one_line(&error);
        assert!(text.contains(&address.to_string()) && text.contains("in use"), "{text}");
    }
}
