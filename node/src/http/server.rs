//! The HTTP server of a node.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use shoal_metrics::Metrics;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::connection::{self, Limits};
use super::hosts::Hosts;
use super::machine::Machine;
use super::places::Places;
use super::routes::router;
use crate::exit::{Exit, ExitWith};
use crate::status::StatusWatch;

/// Pause after the system fails to accept a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// The sources of a node's answers.
#[derive(Debug, Clone)]
pub struct Shown {
    /// The metrics, for Prometheus.
    pub metrics: Metrics,
    /// The machine's figures, read for the metrics.
    pub machine: Machine,
    /// The status, for everything else.
    pub status: StatusWatch,
}

/// A server that is bound to its address and does not answer yet.
#[derive(Debug)]
pub struct HttpServer {
    listener: TcpListener,
    hosts: Vec<String>,
}

impl HttpServer {
    /// Binds the address.
    ///
    /// # Errors
    /// If it is in use, or not an address of this machine.
    pub async fn bind(address: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| {
                format!("cannot serve HTTP at {address}: choose another --http, or none")
            })
            .exit_with(Exit::Usage)?;
        Ok(Self { listener, hosts: Vec::new() })
    }

    /// Allows further names by which the node may be asked.
    #[must_use]
    pub fn with_hosts(self, hosts: Vec<String>) -> Self {
        Self { hosts, ..self }
    }

    /// The bound address.
    ///
    /// # Errors
    /// If the system cannot report it.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers requests until it is stopped, and finishes the ones that are open.
    pub async fn serve(self, shown: Shown, stop: CancellationToken) {
        self.serve_within(Limits::default(), shown, stop).await;
    }

    async fn serve_within(self, limits: Limits, shown: Shown, stop: CancellationToken) {
        let only_here = self.address().is_ok_and(|address| address.ip().is_loopback());
        let router = router(shown, Hosts { only_here, allowed: self.hosts.clone() });
        let (places, tracker) = (Places::new(limits.room), TaskTracker::new());
        loop {
            let (stream, from) = tokio::select! {
                () = stop.cancelled() => break,
                next = self.next() => next,
            };
            let place = places.take(from.ip());
            tracker.spawn(connection::answer(stream, place, router.clone(), limits, stop.clone()));
        }
        tracker.close();
        tracker.wait().await;
    }

    /// The next connection, and its address.
    async fn next(&self) -> (TcpStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok(accepted) => return accepted,
                Err(error) => {
                    tracing::debug!(%error, "cannot accept an HTTP connection");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
