//! The task that owns the libp2p node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use futures::StreamExt;
use libp2p::core::ConnectedPoint;
use libp2p::swarm::dial_opts::{DialOpts, PeerCondition};
use libp2p::swarm::{ConnectionError, ConnectionId, DialError, SwarmEvent};
use libp2p::{Swarm, identify, kad, mdns};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::DiscoveryEvent;
use super::address::{PeerAddress, multiaddr, socket_address};
use super::behaviour::{Behaviour, BehaviourEvent, IDENTIFY, KAD};
use super::schedule::Schedule;
use crate::ids::RunId;
use crate::limits;
use crate::net::admission::{Gate, UnixTime};
use crate::net::identity::{libp2p_peer_of, peer_of};

/// Maximum number of peers of a run that one search dials.
const DIALS: usize = 64;

/// Maximum number of addresses stored per peer.
const ADDRESSES: usize = 8;

/// Maximum number of addresses for joining the network.
const ENTRANCES: usize = 64;

/// Commands from the handle.
pub(super) enum Command {
    /// Join the network through this peer.
    Bootstrap(PeerAddress),
    /// Search for peers of this run from now on.
    Join(RunId),
    /// A router forwards connections to this address to this peer.
    OpenAt(SocketAddr),
}

/// The result of a name lookup.
type Resolved = (PeerAddress, std::io::Result<Vec<SocketAddr>>);

/// The libp2p node and the known peers.
pub(super) struct Actor {
    swarm: Swarm<Behaviour>,
    gate: Gate,
    events: mpsc::Sender<DiscoveryEvent>,
    run: Option<RunId>,
    entrances: BTreeSet<PeerAddress>,
    /// Dials of given addresses that are under way.
    dials: BTreeMap<ConnectionId, PeerAddress>,
    lookups: JoinSet<Resolved>,
    /// Peers to report to the owner.
    wanted: BTreeSet<libp2p::PeerId>,
    /// Remote addresses of the connections to peers.
    remote: BTreeMap<libp2p::PeerId, SocketAddr>,
    /// The addresses reported to the owner.
    found: BTreeMap<libp2p::PeerId, Vec<SocketAddr>>,
    /// The addresses that peers announced through identify.
    identified: BTreeMap<libp2p::PeerId, Vec<SocketAddr>>,
    /// The address that a router forwards to this peer.
    opened: Option<SocketAddr>,
    schedule: Schedule,
}

impl Actor {
    pub(super) fn new(
        swarm: Swarm<Behaviour>,
        events: mpsc::Sender<DiscoveryEvent>,
        gate: Gate,
    ) -> Self {
        Self {
            swarm,
            gate,
            events,
            run: None,
            entrances: BTreeSet::new(),
            dials: BTreeMap::new(),
            lookups: JoinSet::new(),
            wanted: BTreeSet::new(),
            remote: BTreeMap::new(),
            found: BTreeMap::new(),
            identified: BTreeMap::new(),
            opened: None,
            schedule: Schedule::default(),
        }
    }

    /// Runs until it is stopped or the owner drops the receiver.
    pub(super) async fn run(mut self, mut inbox: mpsc::Receiver<Command>, stop: CancellationToken) {
        let mut changes = self.gate.changes();
        loop {
            let events = tokio::select! {
                () = stop.cancelled() => break,
                command = inbox.recv() => match command {
                    Some(command) => self.handle_command(command),
                    None => break,
                },
                Some(resolved) = self.lookups.join_next() => match resolved {
                    Ok(resolved) => self.dial_resolved(resolved),
                    Err(error) => {
                        tracing::error!(%error, "a name lookup failed");
                        Vec::new()
                    }
                },
                _ = changes.changed() => { self.disconnect_denied(); Vec::new() }
                () = self.schedule.due() => { self.start_round(); Vec::new() }
                event = self.swarm.select_next_some() => self.handle(event),
            };
            for event in events {
                tokio::select! {
                    () = stop.cancelled() => return,
                    sent = self.events.send(event) => if sent.is_err() { return },
                }
            }
        }
    }

    fn handle_command(&mut self, command: Command) -> Vec<DiscoveryEvent> {
        match command {
            Command::Bootstrap(address) => {
                if self.entrances.len() < ENTRANCES {
                    self.entrances.insert(address.clone());
                }
                self.enter(address);
            }
            Command::Join(run) => {
                self.run = Some(run);
                self.schedule.plan_now();
            }
            Command::OpenAt(address) => self.open_at(address),
        }
        Vec::new()
    }

    /// Adds the address to those that identify announces, in place of the former one.
    fn open_at(&mut self, address: SocketAddr) {
        let former = self.opened.replace(address).filter(|former| *former != address);
        if let Some(former) = former {
            self.swarm.remove_external_address(&multiaddr(former));
        }
        self.swarm.add_external_address(multiaddr(address));
    }

    fn enter(&mut self, address: PeerAddress) {
        if let Some(peer) = libp2p_peer_of(address.peer) {
            self.wanted.insert(peer);
        }
        self.schedule.plan();
        self.lookups.spawn(async move {
            let resolved = address.resolve().await;
            (address, resolved)
        });
    }

    fn dial_resolved(&mut self, (address, resolved): Resolved) -> Vec<DiscoveryEvent> {
        let unreachable =
            |reason: String| vec![DiscoveryEvent::Unreachable { address: address.clone(), reason }];
        let Some(peer) = libp2p_peer_of(address.peer) else {
            return unreachable("its peer id is malformed".to_owned());
        };
        if peer == *self.swarm.local_peer_id() {
            return unreachable("it is this process's own address".to_owned());
        }
        let addresses = match resolved {
            Ok(resolved) => resolved.into_iter().map(multiaddr).collect(),
            Err(error) => return unreachable(error.to_string()),
        };
        let dial =
            DialOpts::peer_id(peer).condition(PeerCondition::Always).addresses(addresses).build();
        let connection = dial.connection_id();
        match self.swarm.dial(dial) {
            Ok(()) => {
                self.dials.insert(connection, address);
                Vec::new()
            }
            Err(error) => unreachable(error.to_string()),
        }
    }

    /// Ends the connections of peers that are no longer admitted.
    fn disconnect_denied(&mut self) {
        let now = UnixTime::now();
        let peers: Vec<libp2p::PeerId> = self.swarm.connected_peers().copied().collect();
        for peer in peers {
            let admitted = peer_of(&peer).is_some_and(|id| self.gate.stands(id, now).is_ok());
            if !admitted {
                let _ = self.swarm.disconnect_peer_id(peer);
            }
        }
    }

    /// Publishes this peer and searches for others. Joins the network again if no connection is
    /// left.
    fn start_round(&mut self) {
        // Certificates expire without any change at the gate.
        self.disconnect_denied();
        self.schedule.begin();
        if self.swarm.connected_peers().next().is_none() && self.dials.is_empty() {
            for address in self.entrances.clone() {
                self.enter(address);
            }
        }
        if let Some(run) = self.run {
            let key = kad::RecordKey::new(&run.0);
            let kad = &mut self.swarm.behaviour_mut().kad;
            if self.schedule.count_search()
                && let Err(error) = kad.start_providing(key.clone())
            {
                tracing::warn!(%error, "cannot publish this run in the network");
            }
            kad.get_providers(key);
        }
    }

    fn handle(&mut self, event: SwarmEvent<BehaviourEvent>) -> Vec<DiscoveryEvent> {
        match event {
            SwarmEvent::ConnectionEstablished { peer_id, connection_id, endpoint, .. } => {
                self.dials.remove(&connection_id);
                self.note_remote(peer_id, &endpoint);
                self.report(peer_id)
            }
            SwarmEvent::ConnectionClosed { peer_id, num_established: 0, cause, .. } => {
                self.remote.remove(&peer_id);
                self.identified.remove(&peer_id);
                let broken = matches!(cause, Some(ConnectionError::IO(_)));
                let peer = peer_of(&peer_id).filter(|_| broken);
                peer.map(|peer| DiscoveryEvent::Broken { peer }).into_iter().collect()
            }
            SwarmEvent::OutgoingConnectionError { connection_id, error, .. } => {
                let address = self.dials.remove(&connection_id);
                address.map(|address| failure(address, &error)).into_iter().collect()
            }
            SwarmEvent::ListenerError { error, .. } => {
                tracing::warn!(%error, "a listening socket of peer discovery failed");
                Vec::new()
            }
            SwarmEvent::Behaviour(BehaviourEvent::Identify(identify::Event::Received {
                peer_id,
                info,
                ..
            })) => self.identify(peer_id, &info),
            SwarmEvent::Behaviour(BehaviourEvent::Mdns(mdns::Event::Discovered(peers))) => {
                for (peer, address) in peers {
                    self.dial_if_new(peer, vec![address]);
                }
                Vec::new()
            }
            SwarmEvent::Behaviour(BehaviourEvent::Kad(event)) => self.handle_kademlia(event),
            _ => Vec::new(),
        }
    }

    fn note_remote(&mut self, peer: libp2p::PeerId, endpoint: &ConnectedPoint) {
        let remote = match endpoint {
            ConnectedPoint::Dialer { address, .. } => address,
            ConnectedPoint::Listener { send_back_addr, .. } => send_back_addr,
        };
        if let Some(remote) = socket_address(remote) {
            self.remote.insert(peer, remote);
        }
    }

    /// Stores the listen addresses that a peer announced.
    fn identify(&mut self, peer: libp2p::PeerId, info: &identify::Info) -> Vec<DiscoveryEvent> {
        if info.protocol_version != IDENTIFY || !info.protocols.contains(&KAD) {
            // Another libp2p program on the same network.
            let _ = self.swarm.disconnect_peer_id(peer);
            return Vec::new();
        }
        let Some(&remote) = self.remote.get(&peer) else { return Vec::new() };
        let listens = info.listen_addrs.iter().filter_map(socket_address);
        let addresses = likely(remote, listens);
        let kad = &mut self.swarm.behaviour_mut().kad;
        for &address in &addresses {
            kad.add_address(&peer, multiaddr(address));
        }
        self.identified.insert(peer, addresses);
        self.report(peer)
    }

    fn handle_kademlia(&mut self, event: kad::Event) -> Vec<DiscoveryEvent> {
        match event {
            kad::Event::RoutingUpdated { is_new_peer: true, .. } => {
                self.schedule.plan_early();
                Vec::new()
            }
            kad::Event::OutboundQueryProgressed {
                result:
                    kad::QueryResult::GetProviders(Ok(kad::GetProvidersOk::FoundProviders {
                        providers,
                        ..
                    })),
                ..
            } => {
                // Sorted, so that the order does not depend on the library's collection.
                let providers: BTreeSet<libp2p::PeerId> = providers.into_iter().collect();
                let own = *self.swarm.local_peer_id();
                let mut events = Vec::new();
                for peer in providers.into_iter().filter(|peer| *peer != own).take(DIALS) {
                    if self.wanted.len() < limits::MEMBERS {
                        self.wanted.insert(peer);
                    }
                    self.dial_if_new(peer, Vec::new());
                    events.extend(self.report(peer));
                }
                events
            }
            _ => Vec::new(),
        }
    }

    /// Dials a peer that is neither found nor identified yet. Kademlia may know further addresses.
    fn dial_if_new(&mut self, peer: libp2p::PeerId, addresses: Vec<libp2p::Multiaddr>) {
        if self.found.contains_key(&peer) || self.identified.contains_key(&peer) {
            return;
        }
        let dial = DialOpts::peer_id(peer)
            .condition(PeerCondition::DisconnectedAndNotDialing)
            .addresses(addresses)
            .extend_addresses_through_behaviour()
            .build();
        if let Err(error) = self.swarm.dial(dial) {
            tracing::debug!(%peer, %error, "not dialled");
        }
    }

    /// Reports a wanted peer to the owner once it is identified, and again when its addresses
    /// change.
    fn report(&mut self, peer: libp2p::PeerId) -> Vec<DiscoveryEvent> {
        let (Some(addresses), Some(id)) = (self.identified.get(&peer), peer_of(&peer)) else {
            return Vec::new();
        };
        let known = self.found.get(&peer) == Some(addresses);
        let room = self.found.len() < limits::MEMBERS || self.found.contains_key(&peer);
        if known || !room || !self.wanted.contains(&peer) {
            return Vec::new();
        }
        self.found.insert(peer, addresses.clone());
        vec![DiscoveryEvent::Found { peer: id, addresses: addresses.clone() }]
    }
}

/// The event for a given address that could not be dialled.
fn failure(address: PeerAddress, error: &DialError) -> DiscoveryEvent {
    let reason = match error {
        DialError::WrongPeerId { obtained, .. } => match peer_of(obtained) {
            Some(found) => return DiscoveryEvent::WrongPeer { address, found },
            None => "a peer with another kind of identity answers".to_owned(),
        },
        DialError::Transport(failures) => {
            // The innermost errors are those of the operating system or the other end.
            let reasons: BTreeSet<String> =
                failures.iter().map(|(_, error)| innermost(error)).collect();
            reasons.into_iter().collect::<Vec<_>>().join("; ")
        }
        other => other.to_string(),
    };
    DiscoveryEvent::Unreachable { address, reason }
}

fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// The probable addresses of a peer's transport, the likeliest first: the observed IP address with
/// the ports that it listens on, then its other announced addresses. Loopback addresses are used
/// only within one machine.
fn likely(remote: SocketAddr, listens: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let listens: Vec<SocketAddr> = listens.take(4 * ADDRESSES).collect();
    let seen = listens
        .iter()
        .filter(|listen| listen.is_ipv4() == remote.is_ipv4())
        .map(|listen| SocketAddr::new(remote.ip(), listen.port()));
    let announced = listens.iter().copied().filter(|listen| {
        !listen.ip().is_unspecified() && (!listen.ip().is_loopback() || remote.ip().is_loopback())
    });
    let mut addresses = Vec::new();
    for address in seen.chain(announced) {
        if !addresses.contains(&address) && addresses.len() < ADDRESSES {
            addresses.push(address);
        }
    }
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_observed_address_comes_first() {
        let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let announced = ["127.0.0.1:7", "10.0.0.5:7", "[::1]:7", "0.0.0.0:7"].map(address);
        assert_eq!(
            likely(address("192.0.2.1:50000"), announced.into_iter()),
            [address("192.0.2.1:7"), address("10.0.0.5:7")]
        );
        let local = likely(address("127.0.0.1:50000"), announced.into_iter());
        assert_eq!(local, ["127.0.0.1:7", "10.0.0.5:7", "[::1]:7"].map(address));
        let many = (1..100).map(|port| SocketAddr::from(([10, 0, 0, 1], port)));
        assert_eq!(likely(address("10.0.0.1:1"), many).len(), ADDRESSES);
    }
}
