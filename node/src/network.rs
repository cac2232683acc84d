//! Opens this peer's links: discovery over TCP and the data plane over UDP, on the same ports.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;

use anyhow::Context;
use shoal_protocol::ids::{Incarnation, PeerId};
use shoal_protocol::net::discovery::{
    Discovery, DiscoveryConfig, DiscoveryError, DiscoveryEvent, PeerAddress,
};
use shoal_protocol::net::identity::Identity;
use shoal_protocol::net::transport::{self, Run, Transport, TransportConfig, TransportEvent};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use crate::cli::{Congestion, PeerOptions};
use crate::driver::home::Files;
use crate::exit::{Exit, ExitWith};

/// How often the system may choose another port.
const PORT_ATTEMPTS: u32 = 16;

/// The search for other peers.
pub struct Search {
    /// Finds them, and is found.
    pub discovery: Discovery,
    tracker: TaskTracker,
}

impl Search {
    /// Ends the search.
    pub async fn close(self) {
        self.discovery.close().await;
        self.tracker.wait().await;
    }
}

/// A peer's open links.
pub struct Links {
    /// The data plane.
    pub transport: Transport,
    /// What happens on it.
    pub events: mpsc::Receiver<TransportEvent>,
    /// Who finds others and is found.
    pub search: Search,
}

impl Links {
    /// Listens where the options say.
    ///
    /// # Errors
    /// When an address is in use or cannot be listened on.
    pub fn open(
        identity: &Identity,
        incarnation: Incarnation,
        run: Option<Run>,
        options: &PeerOptions,
        files: &Files,
    ) -> anyhow::Result<Self> {
        let config = TransportConfig {
            incarnation,
            run,
            congestion: match options.congestion {
                Congestion::Tolerant => transport::Congestion::Tolerant,
                Congestion::Cubic => transport::Congestion::Cubic,
                Congestion::Bbr => transport::Congestion::Bbr,
            },
            blobs: Arc::new(files.clone()),
        };
        let (transport, events, discovery, found) = bind(identity, &config, options)?;
        let tracker = TaskTracker::new();
        tracker.spawn(remember(transport.clone(), found));
        tracker.close();
        Ok(Self { transport, events, search: Search { discovery, tracker } })
    }

    /// What others type after `shoal join`.
    #[must_use]
    pub fn join_address(&self, peer: PeerId) -> Option<PeerAddress> {
        let mut address = *self.transport.local_addresses().first()?;
        if address.ip().is_unspecified() {
            address.set_ip(outward_ip());
        }
        Some(PeerAddress::new(address, peer))
    }
}

/// What listens for both planes, and what comes of it.
type Bound = (Transport, mpsc::Receiver<TransportEvent>, Discovery, mpsc::Receiver<DiscoveryEvent>);

/// Listens for both planes on the same ports. A port that the system chose for one may be taken for
/// the other; then the system chooses again.
fn bind(
    identity: &Identity,
    config: &TransportConfig,
    options: &PeerOptions,
) -> anyhow::Result<Bound> {
    let chosen = options.listen.iter().all(|address| address.port() != 0);
    let mut attempts = if chosen { 1 } else { PORT_ATTEMPTS };
    loop {
        attempts -= 1;
        let (transport, events) =
            Transport::bind(identity, &options.listen, config.clone()).exit_with(Exit::Usage)?;
        let listen = transport.local_addresses();
        match Discovery::start(identity, &DiscoveryConfig { listen, mdns: options.mdns }) {
            Ok((discovery, found)) => return Ok((transport, events, discovery, found)),
            Err(DiscoveryError::AddressInUse { .. }) if attempts > 0 => {}
            Err(error) => return Err(error).exit_with(Exit::Usage),
        }
    }
}

/// Notes where found peers are, until discovery ends.
async fn remember(transport: Transport, mut found: mpsc::Receiver<DiscoveryEvent>) {
    while let Some(event) = found.recv().await {
        match event {
            DiscoveryEvent::Found { peer, addresses, .. } => transport.remember(peer, &addresses),
            DiscoveryEvent::Broken { peer } => transport.suspect(peer),
            other => tracing::info!(?other, "discovery"),
        }
    }
}

/// Where this machine's packets to the outside come from. Nothing is sent: connecting a UDP socket
/// only looks up the route. The address is one set aside for documents (RFC 5737).
fn outward_ip() -> IpAddr {
    UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))
        .and_then(|socket| {
            socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
            socket.local_addr()
        })
        .map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |address: SocketAddr| address.ip())
}

/// Reads an address to join at and finds its host.
///
/// # Errors
/// When it is none, or its host has no address.
pub async fn resolve(text: &str) -> anyhow::Result<(PeerAddress, Vec<SocketAddr>)> {
    let address: PeerAddress = text.parse().exit_with(Exit::Usage)?;
    let resolved = address
        .resolve()
        .await
        .with_context(|| format!("the host of {text} is not known"))
        .exit_with(Exit::NotAdmitted)?;
    Ok((address, resolved))
}
