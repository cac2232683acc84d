//! The libp2p protocols that peers find each other with, and their limits.

use std::time::Duration;

use libp2p::connection_limits::{self, ConnectionLimits};
use libp2p::identity::Keypair;
use libp2p::swarm::NetworkBehaviour;
use libp2p::swarm::behaviour::toggle::Toggle;
use libp2p::{PeerId, StreamProtocol};
use libp2p::{Swarm, SwarmBuilder, identify, kad, mdns, tcp, yamux};

use super::DiscoveryError;
use super::door::Door;
use super::guard::Guard;
use super::store::ProviderStore;
use crate::net::admission::Gate;

/// Our own network, apart from every other libp2p one.
pub(super) const KAD: StreamProtocol = StreamProtocol::new("/shoal/kad/1");

/// What identify says we speak.
pub(super) const IDENTIFY: &str = "/shoal/id/1";

/// A provider that has not been heard of for this long is forgotten.
const PROVIDER_LIFE: Duration = Duration::from_secs(180);

/// One question to the network.
const QUERY: Duration = Duration::from_secs(30);

/// From the first packet of a connection until both ends have let each other in.
const GREETING: Duration = Duration::from_secs(10);

/// A connection that nothing uses is closed, but not soon: it tells at once when the process at its
/// other end dies.
const IDLE: Duration = Duration::from_secs(24 * 60 * 60);

/// Messages of Kademlia: twenty peers with their addresses fit.
const LARGEST_PACKET: usize = 16 << 10;

#[derive(NetworkBehaviour)]
pub(super) struct Behaviour {
    pub(super) kad: kad::Behaviour<ProviderStore>,
    pub(super) identify: identify::Behaviour,
    pub(super) mdns: Toggle<mdns::tokio::Behaviour>,
    /// Before `limits`: who finds no room here takes none there.
    door: Door,
    limits: connection_limits::Behaviour,
}

impl Behaviour {
    fn new(keypair: &Keypair, with_mdns: bool, gate: Gate) -> Self {
        let own = keypair.public().to_peer_id();
        let identify = identify::Config::new(IDENTIFY.to_owned(), keypair.public())
            .with_agent_version(concat!("shoal/", env!("CARGO_PKG_VERSION")).to_owned());
        Self {
            kad: kademlia(own),
            identify: identify::Behaviour::new(identify),
            mdns: with_mdns.then(|| multicast(own)).flatten().into(),
            door: Door::new(gate),
            limits: connection_limits::Behaviour::new(
                ConnectionLimits::default()
                    .with_max_pending_incoming(Some(128))
                    .with_max_pending_outgoing(Some(64))
                    .with_max_established_incoming(Some(256))
                    .with_max_established_outgoing(Some(128))
                    .with_max_established_per_peer(Some(4)),
            ),
        }
    }
}

fn kademlia(own: PeerId) -> kad::Behaviour<ProviderStore> {
    let mut config = kad::Config::new(KAD);
    config
        .set_query_timeout(QUERY)
        .set_provider_record_ttl(Some(PROVIDER_LIFE))
        // The shell publishes when it is time, so that it can do so early when peers appear.
        .set_provider_publication_interval(None)
        .set_replication_interval(None)
        .set_publication_interval(None)
        .set_max_packet_size(LARGEST_PACKET);
    let mut kad = kad::Behaviour::with_config(own, ProviderStore::new(own), config);
    // Every peer answers: otherwise a swarm without confirmed public addresses knows nothing.
    kad.set_mode(Some(kad::Mode::Server));
    kad
}

fn multicast(own: PeerId) -> Option<mdns::tokio::Behaviour> {
    match mdns::tokio::Behaviour::new(mdns::Config::default(), own) {
        Ok(behaviour) => Some(behaviour),
        Err(error) => {
            tracing::warn!(%error, "no multicast here: peers on this network are not found by it");
            None
        }
    }
}

/// Everything put together, listening nowhere yet.
pub(super) fn swarm(
    keypair: &Keypair,
    mdns: bool,
    gate: Gate,
) -> Result<Swarm<Behaviour>, DiscoveryError> {
    let failed = |reason: String| DiscoveryError::Setup { reason };
    let guard = |keypair: &Keypair| Guard::new(keypair, gate.clone());
    let swarm = SwarmBuilder::with_existing_identity(keypair.clone())
        .with_tokio()
        .with_tcp(tcp::Config::default().nodelay(true), guard, yamux::Config::default)
        .map_err(|error| failed(error.to_string()))?
        .with_behaviour(|keypair| Behaviour::new(keypair, mdns, gate.clone()))
        .map_err(|error| failed(error.to_string()))?
        .with_swarm_config(|config| config.with_idle_connection_timeout(IDLE))
        // Who says nothing holds one of the places of `limits` for so long.
        .with_connection_timeout(GREETING)
        .build();
    Ok(swarm)
}
