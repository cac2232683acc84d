//! Opens a port at this network's router (UPnP), so that peers elsewhere can dial in.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures::future::join_all;
use igd_next::aio::Gateway;
use igd_next::aio::tokio::{Tokio, search_gateway};
use igd_next::{AddPortError, PortMappingProtocol, SearchOptions};
use shoal_protocol::net::discovery::Discovery;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::outward_ip::outward_ip;

/// Timeout of the search for a router, and of each request to it.
const PATIENCE: Duration = Duration::from_secs(3);

/// Timeout of closing the port; the process waits for it when it ends.
const CLOSING: Duration = Duration::from_secs(2);

/// The router closes the port after this time unless the mapping is renewed.
const LEASE: Duration = Duration::from_secs(60 * 60);

/// Interval at which the mapping is renewed, or the search for a router is repeated.
const RENEWAL: Duration = Duration::from_secs(20 * 60);

/// Ports of the router to try, from the peer's own on: another machine may hold the first.
const PORTS: u16 = 8;

/// The name of the mapping on the router's configuration page.
const NAME: &str = "shoal";

/// Both planes use the same port number.
const BOTH: [PortMappingProtocol; 2] = [PortMappingProtocol::TCP, PortMappingProtocol::UDP];

/// Why the router opened no port.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PortMapError {
    /// No router answers.
    #[error("no router that opens ports (UPnP) answers: forward the port at the router by hand")]
    NoRouter,
    /// The router does not answer a request.
    #[error("the router does not answer in time: forward the port by hand")]
    TimedOut,
    /// The router has no outside address.
    #[error("the router does not report its outside address: {0}")]
    NoAddress(String),
    /// The router refused the request.
    #[error(
        "the router refused to open a port: {0}; enable UPnP there, or forward the port by hand"
    )]
    Refused(String),
    /// Other machines hold the ports.
    #[error("other machines use the router's ports {first} to {last}: choose another --listen")]
    Taken {
        /// The first port tried.
        first: u16,
        /// The last port tried.
        last: u16,
    },
}

/// A router that opens ports.
pub(crate) struct Router(Gateway<Tokio>);

impl Router {
    /// Searches for the router of this machine's network.
    ///
    /// # Errors
    /// If none answers.
    pub(crate) async fn find() -> Result<Self, PortMapError> {
        let options = SearchOptions { timeout: Some(PATIENCE), ..SearchOptions::default() };
        match search_gateway(options).await {
            Ok(gateway) => Ok(Self(gateway)),
            Err(error) => {
                tracing::debug!(%error, "no router that opens ports");
                Err(PortMapError::NoRouter)
            }
        }
    }

    /// The router's outside address.
    ///
    /// # Errors
    /// If the router does not report it.
    pub(crate) async fn address(&self) -> Result<IpAddr, PortMapError> {
        match timeout(PATIENCE, self.0.get_external_ip()).await {
            Ok(Ok(address)) => Ok(address),
            Ok(Err(error)) => Err(PortMapError::NoAddress(error.to_string())),
            Err(_) => Err(PortMapError::TimedOut),
        }
    }

    /// Opens one port for both planes, if possible the peer's own. A repeated call renews the
    /// mapping.
    ///
    /// # Errors
    /// If the router opens none.
    async fn open(&self, local: SocketAddr) -> Result<SocketAddr, PortMapError> {
        let ip = self.address().await?;
        let (first, last) = (local.port(), local.port().saturating_add(PORTS - 1));
        for port in first..=last {
            if self.open_both(port, local).await? {
                return Ok(SocketAddr::new(ip, port));
            }
        }
        Err(PortMapError::Taken { first, last })
    }

    /// Whether the port was opened for both planes: another machine may hold it for one of them.
    async fn open_both(&self, port: u16, local: SocketAddr) -> Result<bool, PortMapError> {
        for protocol in BOTH {
            match self.add(protocol, port, local).await {
                Ok(()) => {}
                Err(AddPortError::PortInUse) => {
                    self.close(port, &BOTH[..usize::from(protocol == BOTH[1])]).await;
                    return Ok(false);
                }
                Err(error) => return Err(PortMapError::Refused(error.to_string())),
            }
        }
        Ok(true)
    }

    async fn add(
        &self,
        protocol: PortMappingProtocol,
        port: u16,
        local: SocketAddr,
    ) -> Result<(), AddPortError> {
        match self.add_for(LEASE, protocol, port, local).await {
            // Some routers support permanent mappings only. Then the mapping ends when this process
            // closes it.
            Err(AddPortError::OnlyPermanentLeasesSupported) => {
                self.add_for(Duration::ZERO, protocol, port, local).await
            }
            done => done,
        }
    }

    async fn add_for(
        &self,
        lease: Duration,
        protocol: PortMappingProtocol,
        port: u16,
        local: SocketAddr,
    ) -> Result<(), AddPortError> {
        let seconds = u32::try_from(lease.as_secs()).unwrap_or(u32::MAX);
        let asked = timeout(PATIENCE, self.0.add_port(protocol, port, local, seconds, NAME)).await;
        asked.unwrap_or_else(|_| {
            Err(AddPortError::RequestError(io::Error::from(ErrorKind::TimedOut).into()))
        })
    }

    async fn close(&self, port: u16, protocols: &[PortMappingProtocol]) {
        let closed = protocols.iter().map(|&protocol| self.0.remove_port(protocol, port));
        let asked = timeout(CLOSING, join_all(closed)).await;
        if !asked.as_ref().is_ok_and(|asked| asked.iter().all(Result::is_ok)) {
            tracing::info!(port, ?asked, "the router keeps the port open until the lease expires");
        }
    }
}

/// This machine's private address, if a router stands between it and the internet.
pub(crate) fn behind_router() -> Option<IpAddr> {
    let ip = outward_ip();
    matches!(ip, IpAddr::V4(v4) if v4.is_private()).then_some(ip)
}

/// The state of the mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mapping {
    Asking,
    Closed,
    Open(SocketAddr),
}

impl Mapping {
    fn address(self) -> Option<SocketAddr> {
        match self {
            Self::Open(address) => Some(address),
            Self::Asking | Self::Closed => None,
        }
    }
}

/// The port at the router, once there is one.
#[derive(Debug, Clone)]
pub(crate) struct PortMap(watch::Receiver<Mapping>);

impl PortMap {
    /// Without a router, or if none is to be asked.
    pub(crate) fn none() -> Self {
        Self(watch::channel(Mapping::Closed).1)
    }

    /// The outside address at which other peers reach this one, if it is known.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.0.borrow().address()
    }

    /// Waits until a router has answered or the search timed out.
    pub(crate) async fn settled(&mut self) {
        // If the task has ended, its last state stands.
        let _ = self.0.wait_for(|mapping| *mapping != Mapping::Asking).await;
    }

    /// Waits until the address differs from this one. The call may be cancelled and repeated.
    pub(crate) async fn other_than(&mut self, known: Option<SocketAddr>) {
        if self.0.wait_for(|mapping| mapping.address() != known).await.is_err() {
            // The task has ended: the address does not change any more.
            std::future::pending().await
        }
    }

    /// Opens a port for this address. The returned task renews the mapping until it is stopped.
    pub(crate) fn keep(
        local: SocketAddr,
        discovery: Discovery,
        stop: CancellationToken,
    ) -> (Self, impl Future<Output = ()>) {
        let (sender, mapping) = watch::channel(Mapping::Asking);
        (Self(mapping), keep(local, discovery, sender, stop))
    }
}

async fn keep(
    local: SocketAddr,
    discovery: Discovery,
    sender: watch::Sender<Mapping>,
    stop: CancellationToken,
) {
    let mut opened: Option<(Router, u16)> = None;
    loop {
        let found = tokio::select! {
            () = stop.cancelled() => break,
            found = Router::find() => found,
        };
        let opening = async {
            let router = found?;
            let address = router.open(local).await?;
            Ok::<_, PortMapError>((router, address))
        };
        // Waits for the answer, so that a port that was opened can be closed.
        let hurried = async {
            stop.cancelled().await;
            tokio::time::sleep(CLOSING).await;
        };
        let asked = tokio::select! {
            asked = opening => asked,
            () = hurried => break,
        };
        match asked {
            Ok((router, address)) => {
                opened = Some((router, address.port()));
                if sender.send_replace(Mapping::Open(address)) != Mapping::Open(address) {
                    tracing::info!(%address, "the router opened a port");
                    discovery.open_at(address).await;
                }
            }
            Err(error) => {
                // Most peers work without one.
                tracing::debug!(%error, "the router opened no port");
                sender.send_replace(Mapping::Closed);
            }
        }
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::time::sleep(RENEWAL) => {}
        }
    }
    if let Some((router, port)) = opened {
        router.close(port, &BOTH).await;
    }
}
