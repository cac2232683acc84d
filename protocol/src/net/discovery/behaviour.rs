//! The libp2p protocols of discovery, and their limits.

use std::time::Duration;

use libp2p::connection_limits::{self, ConnectionLimits};
use libp2p::identity::Keypair;
use libp2p::swarm::NetworkBehaviour;
use libp2p::swarm::behaviour::toggle::Toggle;
use libp2p::{PeerId, StreamProtocol};
use libp2p::{Swarm, SwarmBuilder, identify, kad, mdns, tcp, yamux};

use super::DiscoveryError;
use super::guard::Guard;
use super::handshake_limit::HandshakeLimit;
use super::store::ProviderStore;
use crate::net::admission::Gate;

/// The Kademlia protocol of Shoal, which separates its network from all other libp2p networks.
pub(super) const KAD: StreamProtocol = StreamProtocol::new("/shoal/kad/1");

/// The protocol version that identify announces.
pub(super) const IDENTIFY: &str = "/shoal/id/1";

/// Lifetime of a provider record that is not renewed.
const PROVIDER_LIFE: Duration = Duration::from_secs(180);

/// Time limit of one Kademlia query.
const QUERY: Duration = Duration::from_secs(30);

/// Time limit from the first packet of a connection until both ends have admitted each other.
const GREETING: Duration = Duration::from_secs(10);

/// Time after which an unused connection closes. It is long because a connection reports the death
/// of the process at its other end at once.
const IDLE: Duration = Duration::from_secs(24 * 60 * 60);

/// Maximum size of a Kademlia message; twenty peers with their addresses fit.
const LARGEST_PACKET: usize = 16 << 10;

#[derive(NetworkBehaviour)]
pub(super) struct Behaviour {
    pub(super) kad: kad::Behaviour<ProviderStore>,
    pub(super) identify: identify::Behaviour,
    pub(super) mdns: Toggle<mdns::tokio::Behaviour>,
    /// Comes before `limits`, so that a connection that it rejects takes no place there.
    handshake_limit: HandshakeLimit,
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
            handshake_limit: HandshakeLimit::new(gate),
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
        // The actor publishes at its own times, so that it can publish early when new peers appear.
        .set_provider_publication_interval(None)
        .set_replication_interval(None)
        .set_publication_interval(None)
        .set_max_packet_size(LARGEST_PACKET);
    let mut kad = kad::Behaviour::with_config(own, ProviderStore::new(own), config);
    // Every peer answers queries: otherwise a swarm without confirmed public addresses has no
    // records.
    kad.set_mode(Some(kad::Mode::Server));
    kad
}

fn multicast(own: PeerId) -> Option<mdns::tokio::Behaviour> {
    match mdns::tokio::Behaviour::new(mdns::Config::default(), own) {
        Ok(behaviour) => Some(behaviour),
        Err(error) => {
            tracing::warn!(%error, "multicast is unavailable: it finds no peers on the local network");
            None
        }
    }
}

/// Assembles the swarm, without listen addresses.
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
        // A silent connection holds a place of `limits` for at most this time.
        .with_connection_timeout(GREETING)
        .build();
    Ok(swarm)
}
