//! Messages, tensors and files between peers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use shoal_protocol::ids::{Era, Member, PeerId, Step, Term};
use shoal_protocol::message::{LinkEstimate, PeerMessage, SnapshotPart, TensorTag, ToCoordinator};
use shoal_protocol::units::{Bytes, Moment, Rate};
use shoal_protocol::wire;

use super::{Cargo, Event, Held, Node, World, index_of, peer_id, place_of};
use crate::action::{CoordinatorInput, PeerInput};
use crate::sim::integer_model::Weights;
use crate::sim::omitted_rules::Omit;
use crate::sim::watch::{Seen, Sort};

impl World<'_> {
    pub(super) fn arrives(
        &mut self,
        to: Member,
        from: Member,
        connection: u64,
        (era, term): (Era, Term),
        cargo: Cargo,
    ) -> Held {
        let (index, sender) = (index_of(to), index_of(from));
        let node = &self.nodes[index];
        let is_alive = node.alive && node.me == to;
        let from_dead = node.known_dead.contains(&from);
        self.marks.rare.old_lives += u64::from(!is_alive || from_dead);
        if !is_alive || from_dead || connection != self.connection(index, sender) {
            return Ok(());
        }
        if let Cargo::ToCoordinator(message) = &cargo
            && self.is_for_another(index, from, message)
        {
            return Ok(());
        }
        let node = &self.nodes[index];
        let is_current = match &cargo {
            Cargo::FromCoordinator(_) => era >= node.era || self.omitted_rules.omit == Omit::Eras,
            Cargo::PeerMessage(_) => era == node.era || self.omitted_rules.omit == Omit::Eras,
            Cargo::ToCoordinator(message) => self.is_timely(index, from, message, (era, term)),
            Cargo::Tensor { .. } | Cargo::CoordinatorMoved(_) => true,
        };
        let is_outdated = matches!(cargo, Cargo::FromCoordinator(_)) && term < node.term;
        if !is_current || (is_outdated && self.omitted_rules.omit != Omit::Terms) {
            return Ok(());
        }
        if matches!(cargo, Cargo::FromCoordinator(_)) {
            let node = &mut self.nodes[index];
            node.era = era;
            node.term = term.max(node.term);
            node.coordinator = Some(from);
        }
        match cargo {
            Cargo::CoordinatorMoved(coordinator) => {
                self.nodes[index].coordinator = Some(coordinator);
                Ok(())
            }
            Cargo::FromCoordinator(mut message) => {
                if !self.omitted_rules.sent_to_member(to, &mut message) {
                    return Ok(());
                }
                self.input(index, PeerInput::FromCoordinator { from, message })
            }
            Cargo::PeerMessage(message) => {
                self.input(index, PeerInput::PeerMessage { from, message })
            }
            Cargo::Tensor { mut tag, content, size } => {
                if let Some(oracles) = &mut self.oracles
                    && let TensorTag::RoundResult { round, piece, .. } = tag
                    && self.nodes[index].peer.may_host(round.stage)
                {
                    oracles.results.received(to, round, (from, piece));
                }
                self.omitted_rules.tagged(to, &mut tag);
                let payload = self.nodes[index].payloads.keep(content, size);
                self.input(index, PeerInput::Tensor { from, tag, payload })
            }
            Cargo::ToCoordinator(mut message) => {
                self.omitted_rules.reported(from, &mut message);
                self.marks.reported(&message);
                if matches!(message, ToCoordinator::Released { .. }) {
                    self.report.recovery.released += 1;
                }
                if let ToCoordinator::Stored { files, .. } = &message {
                    self.report.recovery.not_stored += u64::from(files.is_empty());
                }
                if matches!(message, ToCoordinator::Stale { .. }) {
                    self.report.recovery.behind += 1;
                }
                self.coordinator_input(index, CoordinatorInput::Message { from, message })
            }
        }
    }

    /// Whether a message to the coordinator arrived at a peer without one. The sender then learns
    /// where the coordinator is.
    fn is_for_another(&mut self, index: usize, from: Member, message: &ToCoordinator) -> bool {
        if self.nodes[index].seat.is_some() {
            return false;
        }
        let me = self.nodes[index].me;
        if let Some(leader) = self.leader().filter(|_| !matches!(message, ToCoordinator::Leave)) {
            self.send(me, from, Cargo::CoordinatorMoved(leader));
        }
        true
    }

    /// Whether a member's message belongs to the coordinator's era and term. Peers that are not
    /// members always get an answer.
    fn is_timely(
        &self,
        index: usize,
        from: Member,
        message: &ToCoordinator,
        (era, term): (Era, Term),
    ) -> bool {
        let Some(seat) = &self.nodes[index].seat else { return false };
        let coordinator = &seat.coordinator;
        let newcomer = matches!(message, ToCoordinator::Register(_));
        newcomer
            || !coordinator.is_member(from)
            || self.omitted_rules.omit == Omit::Eras
            || (era, term) == (coordinator.era(), coordinator.term())
    }

    /// Sends a message to the coordinator that a peer believes in, or to the actual one if that is
    /// gone or unknown.
    pub(super) fn report_to_coordinator(&mut self, me: Member, message: ToCoordinator) {
        let node = &self.nodes[index_of(me)];
        let coordinator =
            node.coordinator.filter(|coordinator| !node.known_dead.contains(coordinator));
        if let Some(to) = coordinator.or_else(|| self.leader()) {
            self.send(me, to, Cargo::ToCoordinator(message));
        }
    }

    /// Number of reconnections of two peers.
    pub(super) fn connection(&self, one: usize, other: usize) -> u64 {
        self.connections.get(&(one.min(other), one.max(other))).copied().unwrap_or(0)
    }

    /// Sends a message from one peer to another. Some offers also go to a wrong peer.
    pub(super) fn send_message(&mut self, from: Member, to: Member, mut message: PeerMessage) {
        if let PeerMessage::Offer { key, retry, .. } = &mut message
            && self.rng.chance(self.scenario.network.strays_per_mille)
        {
            *retry = true;
            let hosts = |node: &Node| node.span.is_some_and(|span| span.contains(key.stage));
            let others: Vec<Member> = self
                .nodes
                .iter()
                .filter(|node| node.me != to && hosts(node))
                .map(|node| node.me)
                .collect();
            if !others.is_empty() {
                let other = self.rng.pick(&others);
                self.send(from, other, Cargo::PeerMessage(message.clone()));
            }
        }
        self.send(from, to, Cargo::PeerMessage(message));
    }

    /// Sends data over the network.
    pub(super) fn send(&mut self, from: Member, to: Member, cargo: Cargo) {
        let (sender, receiver) = (index_of(from), index_of(to));
        let cut = self.network.is_cut(self.now, (sender, receiver));
        if cut || self.nodes[sender].known_dead.contains(&to) {
            // The connection is gone and cannot be made again.
            self.report.recovery.unreached += 1;
            let at = self.now + self.rng.microseconds(0..=100_000);
            return self.at(at, Event::Unreached { at: from, other: to });
        }
        if self.watch.is_some() {
            let (sort, size) = self.weight(&cargo);
            self.show(Seen::Sent { from: sender, to: receiver, sort, size });
        }
        let mut arrivals = match &cargo {
            Cargo::Tensor { .. } => {
                let (_, size) = self.weight(&cargo);
                self.network.tensor(self.now, sender, receiver, size)
            }
            _ => self.network.control(self.now, sender, receiver),
        };
        // A registration may arrive a second time after its incarnation has ended.
        if matches!(cargo, Cargo::ToCoordinator(ToCoordinator::Register(_)))
            && self.rng.chance(self.scenario.network.strays_per_mille)
        {
            arrivals.push(self.now + self.rng.microseconds(0..=5_000_000));
        }
        let connection = self.connection(sender, receiver);
        let node = &self.nodes[sender];
        let (era, term) = match (&cargo, &node.seat) {
            (Cargo::FromCoordinator(_), Some(seat)) => {
                (seat.coordinator.era(), seat.coordinator.term())
            }
            _ => (node.era, node.term),
        };
        for at in arrivals {
            let cargo = cargo.clone();
            self.at(at, Event::Arrives { to, from, connection, era, term, cargo });
        }
    }

    /// Fetches a stage's files.
    pub(super) fn fetch(&mut self, index: usize, version: Step, part: &SnapshotPart) {
        let (at, weights) = self.obtain(index, version, part);
        let (to, stage) = (self.nodes[index].me, part.stage);
        self.at(at, Event::Fetched { to, version, stage, weights });
    }

    /// Replicates a stage's files to a peer.
    pub(super) fn keep(&mut self, index: usize, version: Step, part: &SnapshotPart) {
        let (at, weights) = self.obtain(index, version, part);
        let (to, stage) = (self.nodes[index].me, part.stage);
        self.at(at, Event::Kept { to, version, stage, weights });
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

    fn place(&self, peer: PeerId) -> Option<usize> {
        Some(place_of(peer)).filter(|place| *place < self.nodes.len())
    }

    /// A newcomer probes its links to members: it finds the live ones and their round-trip times.
    pub(super) fn probe_links(&mut self, index: usize, at: &[(PeerId, Vec<SocketAddr>)]) {
        let found = at.iter().filter_map(|(peer, _)| self.place(*peer));
        let found = found.filter(|other| self.nodes[*other].alive);
        let link_estimates: Vec<(PeerId, LinkEstimate)> = found
            .map(|other| {
                let round_trip = self.measured_link(index, other).round_trip;
                // The rate is known only after data has been sent.
                (peer_id(other), LinkEstimate { round_trip, rate: None })
            })
            .collect();
        let longest =
            link_estimates.iter().map(|(_, path)| path.round_trip).max().unwrap_or_default();
        let to = self.nodes[index].me;
        self.at(self.now + longest, Event::LinksProbed { to, link_estimates });
    }

    /// Reads a stage's files from the peer's own disk, or fetches a part of them from each holder.
    fn obtain(
        &mut self,
        to: usize,
        version: Step,
        part: &SnapshotPart,
    ) -> (Moment, Option<Weights>) {
        let file = (version, part.stage);
        let has = |index: &usize| {
            let node = &self.nodes[*index];
            node.alive
                && self.now >= node.engine.disk_fails_until
                && node.engine.disk.contains_key(&file)
        };
        let weights_of = |index: usize| self.nodes[index].engine.disk.get(&file).copied();
        if has(&to) {
            return (self.now, weights_of(to));
        }
        let holders = part.stored.holders.iter().filter_map(|holder| self.place(*holder));
        let reached = |index: &usize| !self.network.is_cut(self.now, (*index, to));
        let holders: Vec<usize> = holders.filter(has).filter(reached).collect();
        let Some(first) = holders.first() else {
            return (self.now + self.rng.microseconds(0..=100_000), None);
        };
        let weights = weights_of(*first);
        let whole: Bytes = part.stored.files.iter().map(|file| file.size).sum();
        let size = Bytes(whole.0.div_ceil(holders.len() as u64));
        let mut here = self.now;
        for from in holders {
            self.show(Seen::Sent { from, to, sort: Sort::File, size });
            here = here.max(self.network.file(self.now, from, to, size));
        }
        (here, weights)
    }

    /// The kind of a message and its size on the wire.
    fn weight(&self, cargo: &Cargo) -> (Sort, Bytes) {
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
            Cargo::Tensor { tag, size, .. } => match tag {
                TensorTag::Activation { .. } | TensorTag::ActivationGradient { .. } => {
                    (Sort::Tensor, *size)
                }
                TensorTag::RoundPart { .. } | TensorTag::RoundResult { .. } => {
                    (Sort::Piece, Bytes(size.0.saturating_mul(self.scenario.weight)))
                }
            },
        }
    }
}
