//! One HTTP connection: one request, within limits.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::places::{Place, Room};

/// The most bytes of a request's head.
pub(super) const HEAD_BYTES: usize = 16 << 10;

/// The most lines of a request's head.
const HEAD_LINES: usize = 64;

/// Time for open requests to finish when the node ends.
const GRACE: Duration = Duration::from_secs(1);

/// Limits on the server's clients.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Concurrent connections.
    pub(super) room: Room,
    /// Timeout from the connection to the end of the request's head.
    pub(super) head: Duration,
    /// Timeout from the connection to the end of the answer.
    pub(super) whole: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            room: Room { connections: 128, of_address: 16 },
            head: Duration::from_secs(1),
            whole: Duration::from_secs(10),
        }
    }
}

/// Answers one request, unless the connection gives way to another. Its body is not read.
pub(super) async fn answer(
    stream: TcpStream,
    place: Place,
    router: Router,
    limits: Limits,
    stop: CancellationToken,
) {
    let give_way = place.give_way.clone();
    let place = Arc::new(place);
    let router = TowerToHyperService::new(router);
    let service = service_fn({
        let place = place.clone();
        move |request| {
            place.is_asked();
            router.call(request)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEAD_LINES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    let stopped = async {
        stop.cancelled().await;
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        answered = tokio::time::timeout(limits.whole, connection) => match answered {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "an HTTP request failed"),
            Err(_) => tracing::debug!("an HTTP client did not read the answer in time"),
        },
        () = give_way.cancelled() => tracing::debug!("a slow HTTP client gave way to another"),
        () = stopped => {}
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use axum::routing::get;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::super::places::Places;
    use super::*;

    #[tokio::test]
    async fn a_client_that_does_not_read_the_answer_is_disconnected() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let asked = async {
            let mut stream = TcpStream::connect(address).await.expect("it listens");
            stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.expect("sent");
            stream
        };
        let (accepted, asking) = tokio::join!(listener.accept(), asked);
        // More than the system buffers for a slow reader.
        let router = Router::new().route("/", get(|| async { vec![0u8; 64 << 20] }));
        let limits = Limits { whole: Duration::from_millis(300), ..Limits::default() };
        let (stream, _) = accepted.expect("it came");
        let begun = tokio::time::Instant::now();
        let place = Places::new(limits.room).take(address.ip());
        answer(stream, place, router, limits, CancellationToken::new()).await;
        assert!(begun.elapsed() >= limits.whole, "the client did not read");
        drop(asking);
    }
}
