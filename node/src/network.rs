//! The links of this peer: discovery over TCP and the data plane over UDP, on the same ports.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use clap::ValueEnum;
use shoal_protocol::ids::{Incarnation, PeerId};
use shoal_protocol::net::admission::Gate;
use shoal_protocol::net::discovery::{
    Discovery, DiscoveryConfig, DiscoveryError, DiscoveryEvent, PeerAddress,
};
use shoal_protocol::net::identity::Identity;
use shoal_protocol::net::transport::{self, Run, Transport, TransportConfig, TransportEvent};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admission::{self, KnownPeers, Store};
use crate::data_dir::Files;
use crate::exit::{Exit, ExitWith};
use crate::outward_ip::outward_ips_of;
use crate::port_map::{PortMap, behind_router};

/// Addresses of connected peers that wait to be remembered.
const SEEN: usize = 64;

/// Attempts to find a port that is free for both planes.
const PORT_ATTEMPTS: u32 = 16;

/// The congestion control of the data plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Congestion {
    /// Fair beside other traffic, and fast where packets are lost by chance.
    Tolerant,
    /// Fair beside other traffic; slow on lines that lose packets.
    Cubic,
    /// Fast on lines that lose packets; sends much twice.
    Bbr,
}

/// How a peer's links are opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkOptions {
    /// The addresses to listen at; never empty.
    pub listen: Vec<SocketAddr>,
    /// The congestion control of the data plane.
    pub congestion: Congestion,
    /// Whether to look for peers by multicast.
    pub mdns: bool,
    /// Whether to ask a router to forward a port.
    pub upnp: bool,
}

/// The search for other peers.
pub struct Search {
    /// Discovery.
    pub discovery: Discovery,
    /// The port that a router forwards.
    pub(crate) port_map: PortMap,
    tracker: TaskTracker,
    stop: CancellationToken,
    /// Takes the addresses from which peers called, to remember them.
    pub(crate) seen: mpsc::Sender<(PeerId, SocketAddr)>,
    /// The file of known peers, once the run is known.
    met: watch::Sender<Option<PathBuf>>,
}

impl Search {
    /// Watches the folder of the run's admission, and remembers found peers in it.
    pub(crate) fn keep(&self, gate: &Gate, folder: &Store) {
        let _ = self.met.send(Some(folder.peers()));
        self.tracker.spawn(admission::keep(gate.clone(), folder.clone(), self.stop.clone()));
    }

    /// Returns the addresses at which others join through this peer: its router's port, if known, and
    /// its own address in each network.
    pub(crate) fn join_addresses(&self, transport: &Transport) -> Vec<PeerAddress> {
        let own = transport.local_addresses().into_iter().next().into_iter().flat_map(specified);
        let places = self.port_map.address().into_iter().chain(own);
        places.map(|address| PeerAddress::new(address, transport.peer_id())).collect()
    }

    /// Ends the search and releases the router's port. Every user of links must call it, after an error
    /// too.
    pub async fn close(self) {
        self.stop.cancel();
        self.tracker.close();
        self.discovery.close().await;
        self.tracker.wait().await;
    }
}

/// The addresses that a listener's address stands for.
fn specified(listens: SocketAddr) -> Vec<SocketAddr> {
    if !listens.ip().is_unspecified() {
        return vec![listens];
    }
    let mut all = outward_ips_of(listens.ip());
    if all.is_empty() {
        // A machine without such a network is reached by itself alone.
        all.push(match listens {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    all.into_iter().map(|ip| SocketAddr::new(ip, listens.port())).collect()
}

/// A peer's open links.
pub struct Links {
    /// The data plane.
    pub transport: Transport,
    /// Its events.
    pub events: mpsc::Receiver<TransportEvent>,
    /// The search for other peers.
    pub search: Search,
}

impl Links {
    /// Listens at the addresses of the options.
    ///
    /// # Errors
    /// When an address is in use or cannot be listened on.
    pub fn open(
        identity: &Identity,
        incarnation: Incarnation,
        run: Option<Run>,
        options: &LinkOptions,
        files: &Files,
        gate: &Gate,
    ) -> anyhow::Result<Self> {
        let config = TransportConfig {
            incarnation,
            run,
            congestion: match options.congestion {
                Congestion::Tolerant => transport::Congestion::Tolerant,
                Congestion::Cubic => transport::Congestion::Cubic,
                Congestion::Bbr => transport::Congestion::Bbr,
            },
            files: Arc::new(files.clone()),
            gate: gate.clone(),
        };
        let (transport, events, discovery, found) = bind(identity, &config, options)?;
        let (tracker, stop) = (TaskTracker::new(), CancellationToken::new());
        let (met, folder) = watch::channel(None);
        let (seen, calls) = mpsc::channel(SEEN);
        tracker.spawn(remember(transport.clone(), found, calls, folder));
        let port_map = match mappable(&transport).filter(|_| options.upnp) {
            None => PortMap::none(),
            Some(local) => {
                let (map, kept) = PortMap::keep(local, discovery.clone(), stop.clone());
                tracker.spawn(kept);
                map
            }
        };
        Ok(Self {
            transport,
            events,
            search: Search { discovery, port_map, tracker, stop, seen, met },
        })
    }
}

/// Returns the local address to which a router would forward packets.
fn mappable(transport: &Transport) -> Option<SocketAddr> {
    let inner = behind_router()?;
    let reached = |address: &SocketAddr| address.ip().is_unspecified() || address.ip() == inner;
    let address = transport.local_addresses().into_iter().find(reached)?;
    Some(SocketAddr::new(inner, address.port()))
}

/// The listeners of both planes, and their events.
type Bound = (Transport, mpsc::Receiver<TransportEvent>, Discovery, mpsc::Receiver<DiscoveryEvent>);

/// Listens for both planes on the same ports. Another process may use a port that the system chose
/// for one plane; then the system chooses again.
fn bind(
    identity: &Identity,
    config: &TransportConfig,
    options: &LinkOptions,
) -> anyhow::Result<Bound> {
    let chosen = options.listen.iter().all(|address| address.port() != 0);
    let mut attempts = if chosen { 1 } else { PORT_ATTEMPTS };
    loop {
        attempts -= 1;
        let (transport, events) =
            Transport::bind(identity, &options.listen, config.clone()).exit_with(Exit::Usage)?;
        let listen = transport.local_addresses();
        let (mdns, gate) = (options.mdns, config.gate.clone());
        let discovery = &DiscoveryConfig { listen, mdns, gate };
        match Discovery::start(identity, discovery) {
            Ok((discovery, found)) => return Ok((transport, events, discovery, found)),
            Err(DiscoveryError::AddressInUse { .. }) if attempts > 0 => {}
            Err(error) => return Err(error).exit_with(Exit::Usage),
        }
    }
}

/// Remembers the addresses of peers that are found or that called, until discovery ends. A peer whose address changes
/// calls from the new one, and a later life of this peer finds it there.
async fn remember(
    transport: Transport,
    mut found: mpsc::Receiver<DiscoveryEvent>,
    mut calls: mpsc::Receiver<(PeerId, SocketAddr)>,
    folder: watch::Receiver<Option<PathBuf>>,
) {
    let mut known: Option<KnownPeers> = None;
    let mut meet = |peer: PeerId, addresses: &[SocketAddr]| {
        if known.is_none() {
            known = folder.borrow().clone().map(KnownPeers::open);
        }
        if let Some(known) = &mut known
            && let Err(error) = known.meet(peer, addresses)
        {
            tracing::warn!(%error, "a peer is not remembered");
        }
    };
    loop {
        let event = tokio::select! {
            event = found.recv() => event,
            Some((peer, address)) = calls.recv() => {
                meet(peer, &[address]);
                continue;
            }
        };
        let Some(event) = event else { break };
        match event {
            DiscoveryEvent::Found { peer, addresses, .. } => {
                transport.remember(peer, &addresses);
                meet(peer, &addresses);
            }
            DiscoveryEvent::Broken { peer } => transport.suspect(peer),
            DiscoveryEvent::Unreachable { address, reason } => {
                tracing::info!(%address, %reason, "a peer cannot be found at this address");
            }
            other => tracing::info!(?other, "discovery"),
        }
    }
}
