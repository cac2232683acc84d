//! The HTTP server of a node.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use shoal_metrics::Metrics;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::connection::{self, Limits};
use super::machine::Machine;
use super::routes::router;
use crate::exit::{Exit, ExitWith};
use crate::status::StatusWatch;

/// After how long it is tried again where the system hands over no connection.
const PAUSE: Duration = Duration::from_millis(100);

/// What is shown of a node.
#[derive(Debug, Clone)]
pub struct Shown {
    /// To Prometheus.
    pub metrics: Metrics,
    /// Looked at for it.
    pub machine: Machine,
    /// To everybody else.
    pub board: StatusWatch,
}

/// A server that has its address and does not answer yet.
#[derive(Debug)]
pub struct HttpServer {
    listener: TcpListener,
}

impl HttpServer {
    /// Takes the address.
    ///
    /// # Errors
    /// When it is in use, or not one of this machine's.
    pub async fn bind(address: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| {
                format!(
                    "nothing can be served over HTTP at {address}: give another --http, or none"
                )
            })
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

    /// Answers until it is told to stop, and then what was asked before.
    pub async fn serve(self, shown: Shown, stop: CancellationToken) {
        self.serve_within(Limits::default(), shown, stop).await;
    }

    async fn serve_within(self, limits: Limits, shown: Shown, stop: CancellationToken) {
        let only_here = self.address().is_ok_and(|address| address.ip().is_loopback());
        let router = router(shown, only_here);
        let (slots, tracker) = (Arc::new(Semaphore::new(limits.connections)), TaskTracker::new());
        loop {
            let (stream, slot) = tokio::select! {
                () = stop.cancelled() => break,
                next = self.next(&slots) => next,
            };
            let answer = connection::answer(stream, router.clone(), limits, stop.clone());
            tracker.spawn(async move {
                answer.await;
                drop(slot);
            });
        }
        tracker.close();
        tracker.wait().await;
    }

    /// The next connection, once there is room for it.
    async fn next(&self, slots: &Arc<Semaphore>) -> (TcpStream, OwnedSemaphorePermit) {
        let slot = slots.clone().acquire_owned().await.expect("it is never closed");
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => return (stream, slot),
                Err(error) => {
                    tracing::debug!(%error, "a connection for HTTP was not handed over");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
