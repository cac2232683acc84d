//! What goes from peer to peer.

use shoal_protocol::ids::{Era, Member, Step};
use shoal_protocol::message::{Between, SnapshotPart, ToCoordinator};
use shoal_protocol::units::Bytes;

use super::{Cargo, Event, HOME, Held, Node, World, index_of, peer_id};
use crate::action::{CoordinatorInput, PeerInput};
use crate::sim::border::Omit;

impl World<'_> {
    pub(super) fn arrives(
        &mut self,
        to: Member,
        from: Member,
        connection: u64,
        era: Era,
        cargo: Cargo,
    ) -> Held {
        let (index, sender) = (index_of(to), index_of(from));
        let node = &self.nodes[index];
        // The coordinator outlives the lives of the peer that it lives with.
        let meant = matches!(cargo, Cargo::Reported(_)) || (node.alive && node.me == to);
        let deaf = node.deaf_to.contains(&from);
        self.marks.rare.old_lives += u64::from(!meant || deaf);
        if !meant || deaf || connection != self.connection(index, sender) {
            return Ok(());
        }
        let mine = match &cargo {
            Cargo::Reported(_) => self.coordinator.era(),
            _ => self.nodes[index].era,
        };
        let expected = match &cargo {
            // Who is new does not know the era, and who learns of a new one is told by this.
            Cargo::Reported(ToCoordinator::Register { .. }) => true,
            Cargo::Told(_) => era >= mine,
            Cargo::Tensor { .. } => true,
            Cargo::Reported(_) | Cargo::Heard(_) => era == mine,
        };
        if !expected && self.border.omit != Omit::Eras {
            return Ok(());
        }
        if matches!(cargo, Cargo::Told(_)) {
            self.nodes[index].era = era;
        }
        match cargo {
            Cargo::Told(mut message) => {
                if !self.border.told(to, &mut message) {
                    return Ok(());
                }
                self.input(index, PeerInput::FromCoordinator { from, message })
            }
            Cargo::Heard(message) => self.input(index, PeerInput::Between { from, message }),
            Cargo::Tensor { mut tag, content, size } => {
                self.border.tagged(to, &mut tag);
                let payload = self.nodes[index].payloads.keep(content, size);
                self.input(index, PeerInput::Tensor { from, tag, payload })
            }
            Cargo::Reported(mut message) => {
                self.border.reported(from, &mut message);
                self.marks.reported(&message);
                if matches!(message, ToCoordinator::Released { .. }) {
                    self.report.recovery.released += 1;
                }
                if let ToCoordinator::Stored { files, .. } = &message {
                    self.report.recovery.not_stored += u64::from(files.is_empty());
                }
                if matches!(message, ToCoordinator::Behind) {
                    self.report.recovery.behind += 1;
                }
                self.coordinator_input(CoordinatorInput::Message { from, message })
            }
        }
    }

    /// How often two peers have connected anew.
    pub(super) fn connection(&self, one: usize, other: usize) -> u64 {
        self.connections.get(&(one.min(other), one.max(other))).copied().unwrap_or(0)
    }

    /// Sends a word from one peer to another. Some offers stray.
    pub(super) fn say(&mut self, from: Member, to: Member, mut message: Between) {
        if let Between::Offer { key, retry, .. } = &mut message
            && self.dice.chance(self.scenario.network.strays_per_mille)
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
                let other = self.dice.pick(&others);
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
            let at = self.now + self.dice.microseconds(0..=100_000);
            return self.at(at, Event::Unreached { at: from, other: to });
        }
        let arrivals = match &cargo {
            Cargo::Tensor { size, .. } => self.network.tensor(self.now, sender, receiver, *size),
            _ => self.network.control(self.now, sender, receiver),
        };
        let connection = self.connection(sender, receiver);
        let era = match &cargo {
            Cargo::Told(_) => self.coordinator.era(),
            _ => self.nodes[sender].era,
        };
        for at in arrivals {
            let cargo = cargo.clone();
            self.at(at, Event::Arrives { to, from, connection, era, cargo });
        }
    }

    /// Fetches a stage's files. Who is gone by the time that they would be here has not sent them.
    pub(super) fn fetch(&mut self, index: usize, version: Step, part: &SnapshotPart) {
        let holder = (0..self.nodes.len()).find(|other| peer_id(*other) == part.holder);
        let holder = holder.expect("holders are peers");
        let size: Bytes = part.files.iter().map(|file| file.size).sum();
        let arrivals = self.network.tensor(self.now, holder, index, size);
        let node = &self.nodes[holder];
        let file = (version, part.stage);
        let archived = self.archive.get(&file).filter(|_| holder == HOME);
        let weights = node.engine.disk.get(&file).or(archived).copied();
        let (to, stage) = (self.nodes[index].me, part.stage);
        let weights = weights.filter(|_| node.alive && self.now >= node.engine.no_disk);
        self.at(arrivals[0], Event::Fetched { to, version, stage, weights });
    }
}
