//! A port at the router of this machine's network (UPnP), so that peers elsewhere can dial in.

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

/// How long a router may take to say that it is there, and to answer anything it is asked.
const PATIENCE: Duration = Duration::from_secs(3);

/// How long giving a port back may take: the process waits for it when it leaves.
const CLOSING: Duration = Duration::from_secs(2);

/// What is opened is closed by the router after so long, unless it is asked for again.
const LEASE: Duration = Duration::from_secs(60 * 60);

/// From asking for it to asking again, and to looking for a router anew where there was none.
const RENEWAL: Duration = Duration::from_secs(20 * 60);

/// Ports of the router that are tried, from the peer's own on: another machine may have the first.
const PORTS: u16 = 8;

/// What the router's own page shows.
const NAME: &str = "shoal";

/// Both planes have one port number.
const BOTH: [PortMappingProtocol; 2] = [PortMappingProtocol::TCP, PortMappingProtocol::UDP];

/// Why no port is open.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PortMapError {
    /// Nobody answers.
    #[error("no router that opens ports (UPnP) answers: forward the port there by hand")]
    NoRouter,
    /// It answers, and not to this.
    #[error("the router does not answer in time: forward the port there by hand")]
    TimedOut,
    /// It has no address to the outside.
    #[error("the router does not say what its own address is: {0}")]
    NoAddress(String),
    /// It does not want to.
    #[error("the router opens no port: {0}; allow UPnP there, or forward the port by hand")]
    Refused(String),
    /// Others have them.
    #[error("the router's ports {first} to {last} are other machines': give another --listen")]
    Taken {
        /// The first that was tried.
        first: u16,
        /// The last one.
        last: u16,
    },
}

/// A router that opens ports.
pub(crate) struct Router(Gateway<Tokio>);

impl Router {
    /// Looks for it in this machine's network.
    ///
    /// # Errors
    /// When none answers.
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

    /// What the outside sees it as.
    ///
    /// # Errors
    /// When it does not say.
    pub(crate) async fn address(&self) -> Result<IpAddr, PortMapError> {
        match timeout(PATIENCE, self.0.get_external_ip()).await {
            Ok(Ok(address)) => Ok(address),
            Ok(Err(error)) => Err(PortMapError::NoAddress(error.to_string())),
            Err(_) => Err(PortMapError::TimedOut),
        }
    }

    /// Opens one port for both planes, the peer's own one if it is free. Asked again it is held for longer.
    ///
    /// # Errors
    /// When the router does not.
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

    /// Whether it did: the port may be another machine's for either plane.
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
            // Some routers know no end of it: then it ends with this process, if that ends in order.
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
            tracing::info!(port, ?asked, "the router keeps the port open until its time is over");
        }
    }
}

/// Where this machine's network has a router between it and the rest, the address in it.
pub(crate) fn behind_router() -> Option<IpAddr> {
    let ip = outward_ip();
    matches!(ip, IpAddr::V4(v4) if v4.is_private()).then_some(ip)
}

/// How the asking stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Asking,
    Closed,
    Open(SocketAddr),
}

impl Standing {
    fn address(self) -> Option<SocketAddr> {
        match self {
            Self::Open(address) => Some(address),
            Self::Asking | Self::Closed => None,
        }
    }
}

/// The port at the router, as far as there is one.
#[derive(Debug, Clone)]
pub(crate) struct PortMap(watch::Receiver<Standing>);

impl PortMap {
    /// Where there is nobody to be asked, and who was not to ask.
    pub(crate) fn none() -> Self {
        Self(watch::channel(Standing::Closed).1)
    }

    /// Where others reach this peer by it, as far as is known now.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.0.borrow().address()
    }

    /// Waits until a router has answered or has had its time.
    pub(crate) async fn settled(&mut self) {
        // Whoever asks no more has told nothing newer.
        let _ = self.0.wait_for(|standing| *standing != Standing::Asking).await;
    }

    /// Waits until it is another one than this. May be given up and called again.
    pub(crate) async fn other_than(&mut self, known: Option<SocketAddr>) {
        if self.0.wait_for(|standing| standing.address() != known).await.is_err() {
            // Whoever asks no more changes nothing.
            std::future::pending().await
        }
    }

    /// A port for this address, and what keeps it open until it is stopped.
    pub(crate) fn keep(
        local: SocketAddr,
        discovery: Discovery,
        stop: CancellationToken,
    ) -> (Self, impl Future<Output = ()>) {
        let (tell, told) = watch::channel(Standing::Asking);
        (Self(told), keep(local, discovery, tell, stop))
    }
}

async fn keep(
    local: SocketAddr,
    discovery: Discovery,
    tell: watch::Sender<Standing>,
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
        // What was asked for must be known, to be given back.
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
                if tell.send_replace(Standing::Open(address)) != Standing::Open(address) {
                    tracing::info!(%address, "the router opened a port");
                    discovery.open_at(address).await;
                }
            }
            Err(error) => {
                // Most peers do without one.
                tracing::debug!(%error, "no port at a router");
                tell.send_replace(Standing::Closed);
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
