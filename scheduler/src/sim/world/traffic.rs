//! What goes from peer to peer.

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
        let meant = node.alive && node.me == to;
        let deaf = node.deaf_to.contains(&from);
        self.marks.rare.old_lives += u64::from(!meant || deaf);
        if !meant || deaf || connection != self.connection(index, sender) {
            return Ok(());
        }
        if let Cargo::Reported(message) = &cargo
            && self.is_for_another(index, from, message)
        {
            return Ok(());
        }
        let node = &self.nodes[index];
        let expected = match &cargo {
            Cargo::Told(_) => era >= node.era || self.omitted_rules.omit == Omit::Eras,
            Cargo::Heard(_) => era == node.era || self.omitted_rules.omit == Omit::Eras,
            Cargo::Reported(message) => self.is_timely(index, from, message, (era, term)),
            Cargo::Tensor { .. } | Cargo::CoordinatorMoved(_) => true,
        };
        let past = matches!(cargo, Cargo::Told(_)) && term < node.term;
        if !expected || (past && self.omitted_rules.omit != Omit::Terms) {
            return Ok(());
        }
        if matches!(cargo, Cargo::Told(_)) {
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
            Cargo::Told(mut message) => {
                if !self.omitted_rules.told(to, &mut message) {
                    return Ok(());
                }
                self.input(index, PeerInput::FromCoordinator { from, message })
            }
            Cargo::Heard(message) => self.input(index, PeerInput::PeerMessage { from, message }),
            Cargo::Tensor { mut tag, content, size } => {
                if let Some(oracles) = &mut self.oracles
                    && let TensorTag::RoundResult { round, piece, .. } = tag
                    && self.nodes[index].peer.may_host(round.stage)
                {
                    oracles.results.came(to, round, (from, piece));
                }
                self.omitted_rules.tagged(to, &mut tag);
                let payload = self.nodes[index].payloads.keep(content, size);
                self.input(index, PeerInput::Tensor { from, tag, payload })
            }
            Cargo::Reported(mut message) => {
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

    /// Whether a word to the coordinator came to a peer that none lives with; who said it learns
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

    /// Whether a member's word is of the coordinator's era and term. Who is no member gets an answer
    /// in any case.
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

    /// Says something to whom a peer takes for the coordinator, or to who is it where that one is
    /// gone or unknown.
    pub(super) fn report_to_coordinator(&mut self, me: Member, message: ToCoordinator) {
        let node = &self.nodes[index_of(me)];
        let coordinator =
            node.coordinator.filter(|coordinator| !node.deaf_to.contains(coordinator));
        if let Some(to) = coordinator.or_else(|| self.leader()) {
            self.send(me, to, Cargo::Reported(message));
        }
    }

    /// How often two peers have connected anew.
    pub(super) fn connection(&self, one: usize, other: usize) -> u64 {
        self.connections.get(&(one.min(other), one.max(other))).copied().unwrap_or(0)
    }

    /// Sends a word from one peer to another. Some offers stray.
    pub(super) fn say(&mut self, from: Member, to: Member, mut message: PeerMessage) {
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
                self.send(from, other, Cargo::Heard(message.clone()));
            }
        }
        self.send(from, to, Cargo::Heard(message));
    }

    /// Puts something on its way.
    pub(super) fn send(&mut self, from: Member, to: Member, cargo: Cargo) {
        let (sender, receiver) = (index_of(from), index_of(to));
        let cut = self.network.is_cut(self.now, (sender, receiver));
        if cut || self.nodes[sender].deaf_to.contains(&to) {
            // The connection is gone, and no other can be made.
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
        // A registration comes once more when its life may be over.
        if matches!(cargo, Cargo::Reported(ToCoordinator::Register(_)))
            && self.rng.chance(self.scenario.network.strays_per_mille)
        {
            arrivals.push(self.now + self.rng.microseconds(0..=5_000_000));
        }
        let connection = self.connection(sender, receiver);
        let node = &self.nodes[sender];
        let (era, term) = match (&cargo, &node.seat) {
            (Cargo::Told(_), Some(seat)) => (seat.coordinator.era(), seat.coordinator.term()),
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

    /// Has a stage's files kept.
    pub(super) fn keep(&mut self, index: usize, version: Step, part: &SnapshotPart) {
        let (at, weights) = self.obtain(index, version, part);
        let (to, stage) = (self.nodes[index].me, part.stage);
        self.at(at, Event::Kept { to, version, stage, weights });
    }

    /// What a peer believes that its links carry: what they do, where that is measured, else what it
    /// will, and in half of the swarms nothing.
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

    /// A newcomer looks at members: it finds those that live, and how far they are.
    pub(super) fn probe_links(&mut self, index: usize, at: &[(PeerId, Vec<SocketAddr>)]) {
        let found = at.iter().filter_map(|(peer, _)| self.place(*peer));
        let found = found.filter(|other| self.nodes[*other].alive);
        let link_estimates: Vec<(PeerId, LinkEstimate)> = found
            .map(|other| {
                let round_trip = self.measured_link(index, other).round_trip;
                // What it carries shows only when something is sent.
                (peer_id(other), LinkEstimate { round_trip, rate: None })
            })
            .collect();
        let took = link_estimates.iter().map(|(_, path)| path.round_trip).max().unwrap_or_default();
        let to = self.nodes[index].me;
        self.at(self.now + took, Event::LinksProbed { to, link_estimates });
    }

    /// Gets a stage's files from this peer's own disk, or else a part of them from each holder that has them.
    fn obtain(
        &mut self,
        to: usize,
        version: Step,
        part: &SnapshotPart,
    ) -> (Moment, Option<Weights>) {
        let file = (version, part.stage);
        let has = |index: &usize| {
            let node = &self.nodes[*index];
            node.alive && self.now >= node.engine.no_disk && node.engine.disk.contains_key(&file)
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

    /// What something weighs on its way.
    fn weight(&self, cargo: &Cargo) -> (Sort, Bytes) {
        let words = |length: Result<Vec<u8>, wire::WireError>| {
            Bytes(length.expect("messages are under their cap").len() as u64)
        };
        match cargo {
            Cargo::Told(message) => (Sort::Told, words(wire::encode(message))),
            Cargo::Reported(message) => (Sort::Reported, words(wire::encode(message))),
            Cargo::Heard(message) => (Sort::Said, words(wire::encode(message))),
            Cargo::CoordinatorMoved(coordinator) => (Sort::Told, words(wire::encode(coordinator))),
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
