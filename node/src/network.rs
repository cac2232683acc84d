//! Opens this peer's links: discovery over TCP and the data plane over UDP, on the same ports.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;

use shoal_protocol::ids::Incarnation;
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
use crate::cli::{Congestion, PeerOptions};
use crate::driver::home::Files;
use crate::exit::{Exit, ExitWith};
use crate::port_map::{PortMap, behind_router};

/// How often the system may choose another port.
const PORT_ATTEMPTS: u32 = 16;

/// The search for other peers.
pub struct Search {
    /// Finds them, and is found.
    pub discovery: Discovery,
    /// The port that a router passes on.
    pub(crate) port_map: PortMap,
    tracker: TaskTracker,
    stop: CancellationToken,
    /// Where peers that are met are remembered, once the run is known.
    met: watch::Sender<Option<PathBuf>>,
}

impl Search {
    /// Keeps the folder of the run's admission from now on, and remembers in it whom it meets.
    pub(crate) fn keep(&self, gate: &Gate, folder: &Store) {
        let _ = self.met.send(Some(folder.peers()));
        self.tracker.spawn(admission::keep(gate.clone(), folder.clone(), self.stop.clone()));
    }

    /// Where others join through this peer: at its router's port if that is known, and at its own address.
    pub(crate) fn join_addresses(&self, transport: &Transport) -> Vec<PeerAddress> {
        let own = transport.local_addresses().into_iter().next().map(|mut address| {
            if address.ip().is_unspecified() {
                address.set_ip(outward_ip());
            }
            address
        });
        let places = self.port_map.address().into_iter().chain(own);
        places.map(|address| PeerAddress::new(address, transport.peer_id())).collect()
    }

    /// Ends the search, and gives back the router's port. Whoever opened links owes them this, however what
    /// they were for has ended.
    pub async fn close(self) {
        self.stop.cancel();
        self.tracker.close();
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
        tracker.spawn(remember(transport.clone(), found, folder));
        let port_map = match mappable(&transport).filter(|_| options.upnp) {
            None => PortMap::none(),
            Some(local) => {
                let (map, kept) = PortMap::keep(local, discovery.clone(), stop.clone());
                tracker.spawn(kept);
                map
            }
        };
        Ok(Self { transport, events, search: Search { discovery, port_map, tracker, stop, met } })
    }
}

/// What a router between this machine and the rest would pass packets on to.
fn mappable(transport: &Transport) -> Option<SocketAddr> {
    let inner = behind_router()?;
    let reached = |address: &SocketAddr| address.ip().is_unspecified() || address.ip() == inner;
    let address = transport.local_addresses().into_iter().find(reached)?;
    Some(SocketAddr::new(inner, address.port()))
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
        let (mdns, gate) = (options.mdns, config.gate.clone());
        let discovery = &DiscoveryConfig { listen, mdns, gate };
        match Discovery::start(identity, discovery) {
            Ok((discovery, found)) => return Ok((transport, events, discovery, found)),
            Err(DiscoveryError::AddressInUse { .. }) if attempts > 0 => {}
            Err(error) => return Err(error).exit_with(Exit::Usage),
        }
    }
}

/// Notes where found peers are, until discovery ends.
async fn remember(
    transport: Transport,
    mut found: mpsc::Receiver<DiscoveryEvent>,
    folder: watch::Receiver<Option<PathBuf>>,
) {
    let mut known: Option<KnownPeers> = None;
    while let Some(event) = found.recv().await {
        match event {
            DiscoveryEvent::Found { peer, addresses, .. } => {
                transport.remember(peer, &addresses);
                let path = folder.borrow().clone();
                known = known.or_else(|| path.map(KnownPeers::open));
                if let Some(known) = &mut known
                    && let Err(error) = known.meet(peer, &addresses)
                {
                    tracing::warn!(%error, "a peer is not remembered");
                }
            }
            DiscoveryEvent::Broken { peer } => transport.suspect(peer),
            DiscoveryEvent::Unreachable { address, reason } => {
                tracing::info!(%address, %reason, "a peer cannot be found at this address");
            }
            other => tracing::info!(?other, "discovery"),
        }
    }
}

/// Where this machine's packets to the outside come from. Nothing is sent: connecting a UDP socket
/// only looks up the route. The address is one set aside for documents (RFC 5737).
pub(crate) fn outward_ip() -> IpAddr {
    UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))
        .and_then(|socket| {
            socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
            socket.local_addr()
        })
        .map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |address: SocketAddr| address.ip())
}
