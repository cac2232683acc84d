//! The network and its connections: arrival times of messages, tensors and files.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use shoal_protocol::ids::{Era, Member, PeerId, Step, Term};
use shoal_protocol::message::{LinkEstimate, SnapshotPart, TensorTag, ToCoordinator};
use shoal_protocol::units::{Bytes, Moment, Rate};
use shoal_protocol::wire;

use super::event::{Cargo, Event};
use super::nodes::Nodes;
use super::observation::Observation;
use super::peer_index::{index_of, peer_id};
use super::queue::EventQueue;
use crate::sim::integer_model::Weights;
use crate::sim::network::Network;
use crate::sim::scenario::Scenario;
use crate::sim::watch::{Seen, Sort};

/// Maximum time until a peer learns that a file has no reachable holder.
const NO_HOLDER: Duration = Duration::from_millis(100);

/// Maximum time until the second arrival of a registration.
const STRAY_REGISTRATION: Duration = Duration::from_secs(5);

/// The links of all peers.
#[derive(Debug)]
pub(super) struct Traffic<'a> {
    scenario: &'a Scenario,
    pub(super) network: Network,
    /// Number of reconnections of two peers: data sent over an earlier connection is lost.
    connections: BTreeMap<(usize, usize), u64>,
}

impl<'a> Traffic<'a> {
    pub(super) fn new(scenario: &'a Scenario) -> Self {
        Self { scenario, network: Network::new(scenario), connections: BTreeMap::new() }
    }

    /// Number of reconnections of two peers.
    pub(super) fn connection(&self, one: usize, other: usize) -> u64 {
        self.connections.get(&(one.min(other), one.max(other))).copied().unwrap_or(0)
    }

    /// Breaks the connection of two peers.
    pub(super) fn disconnect(&mut self, one: usize, other: usize) {
        *self.connections.entry((one.min(other), one.max(other))).or_insert(0) += 1;
        self.network.forget(one, other);
    }

    /// Schedules the arrivals of data. A registration may arrive a second time after its
    /// incarnation has ended.
    pub(super) fn send(
        &mut self,
        from: Member,
        to: Member,
        (era, term): (Era, Term),
        cargo: Cargo,
        queue: &mut EventQueue,
    ) {
        let (sender, receiver) = (index_of(from), index_of(to));
        let mut arrivals = match &cargo {
            Cargo::Tensor { .. } => {
                let (_, size) = self.weight(&cargo);
                self.network.tensor(queue.now(), sender, receiver, size)
            }
            _ => self.network.control(queue.now(), sender, receiver),
        };
        if matches!(cargo, Cargo::ToCoordinator(ToCoordinator::Register(_)))
            && queue.rng.chance(self.scenario.network.strays_per_mille)
        {
            arrivals.push(queue.random_moment(STRAY_REGISTRATION));
        }
        let connection = self.connection(sender, receiver);
        for at in arrivals {
            let cargo = cargo.clone();
            queue.at(at, Event::Arrives { to, from, connection, era, term, cargo });
        }
    }

    /// Reads a stage's files from the peer's own disk, or fetches a part of them from each holder.
    /// Returns the time of their arrival and the weights, if any peer has them.
    pub(super) fn obtain(
        &mut self,
        to: usize,
        (version, part): (Step, &SnapshotPart),
        nodes: &Nodes<'_>,
        queue: &mut EventQueue,
        observation: &mut Observation<'_>,
    ) -> (Moment, Option<Weights>) {
        let now = queue.now();
        let read = |index: usize| nodes[index].read(now, version, part.stage);
        if let Some(weights) = read(to) {
            return (now, Some(weights));
        }
        let holders = part.stored.holders.iter().filter_map(|holder| nodes.place(*holder));
        let holders = holders.filter(|index| !self.network.is_cut(now, (*index, to)));
        let held: Vec<(usize, Weights)> =
            holders.filter_map(|index| Some((index, read(index)?))).collect();
        let Some((_, weights)) = held.first() else {
            return (queue.random_moment(NO_HOLDER), None);
        };
        let whole: Bytes = part.stored.files.iter().map(|file| file.size).sum();
        let size = Bytes(whole.0.div_ceil(held.len() as u64));
        let mut here = now;
        for (from, _) in &held {
            observation.show(Seen::Sent { from: *from, to, sort: Sort::File, size });
            here = here.max(self.network.file(now, *from, to, size));
        }
        (here, Some(*weights))
    }

    /// A peer's estimates of its links: the true ones if the scenario measures links, otherwise
    /// random ones, and none in half of the swarms.
    pub(super) fn measured_links(&self, index: usize) -> BTreeMap<PeerId, LinkEstimate> {
        let known = self.network.is_measured() || self.scenario.seed % 2 == 1;
        let others = if known { self.network.known_to(index) } else { Vec::new() };
        others.into_iter().map(|other| (peer_id(other), self.measured_link(index, other))).collect()
    }

    fn measured_link(&self, index: usize, other: usize) -> LinkEstimate {
        if self.network.is_measured() {
            return self.network.link(index, other);
        }
        let number = self.scenario.seed.rotate_left((index * 8 + other) as u32) % 1000;
        LinkEstimate { round_trip: Duration::from_millis(number), rate: Some(Rate(1 + number)) }
    }

    /// A newcomer's probes of its links to members: those that are alive, with their round-trip
    /// times.
    pub(super) fn probe_links(
        &self,
        index: usize,
        at: &[(PeerId, Vec<SocketAddr>)],
        nodes: &Nodes<'_>,
    ) -> Vec<(PeerId, LinkEstimate)> {
        let found = at.iter().filter_map(|(peer, _)| nodes.place(*peer));
        let found = found.filter(|other| nodes[*other].alive);
        let probe = |other| {
            let round_trip = self.measured_link(index, other).round_trip;
            // The rate is known only after data has been sent.
            (peer_id(other), LinkEstimate { round_trip, rate: None })
        };
        found.map(probe).collect()
    }

    /// The kind of a message and its size on the wire.
    pub(super) fn weight(&self, cargo: &Cargo) -> (Sort, Bytes) {
        let encoded = |length: Result<Vec<u8>, wire::WireError>| {
            Bytes(length.expect("messages are under their cap").len() as u64)
        };
        match cargo {
            Cargo::FromCoordinator(message) => (Sort::Told, encoded(wire::encode(message))),
            Cargo::ToCoordinator(message) => (Sort::Reported, encoded(wire::encode(message))),
            Cargo::PeerMessage(message) => (Sort::Said, encoded(wire::encode(message))),
            Cargo::CoordinatorMoved(coordinator) => {
                (Sort::Told, encoded(wire::encode(coordinator)))
            }
            Cargo::Elected(proofs) => (Sort::Told, encoded(wire::encode(proofs))),
            Cargo::Tensor { tag, size, .. } => match tag {
                TensorTag::Activation { .. }
                | TensorTag::ActivationGradient { .. }
                | TensorTag::Recalled { .. } => (Sort::Tensor, *size),
                TensorTag::RoundPart { .. } | TensorTag::RoundResult { .. } => {
                    (Sort::Piece, Bytes(size.0.saturating_mul(self.scenario.weight)))
                }
            },
        }
    }
}
