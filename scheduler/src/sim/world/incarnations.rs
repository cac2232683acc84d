//! The deaths and restarts of peers, and the loss of connections between them.

use std::time::Duration;

use shoal_protocol::ids::{Member, Stage};
use shoal_protocol::units::Moment;

use super::Held;
use super::event::Event;
use super::peer_index::index_of;
use super::swarm::Swarm;
use crate::action::{CoordinatorInput, PeerInput};
use crate::sim::marks::Mark;
use crate::sim::watch::Seen;

impl Swarm<'_> {
    /// A peer dies. It restarts after `restart`, otherwise after all faults.
    pub(super) fn crash(&mut self, peer: usize, restart: Option<Duration>, disk_is_lost: bool) {
        let node = &mut self.nodes[peer];
        if !node.alive {
            return;
        }
        self.observation.mark(Mark::Died);
        // The log's own disk is never lost: with a single anchor that would end the run.
        if disk_is_lost && !self.log.has_voter(node.me.peer) {
            node.engine.disk.clear();
        }
        let after = restart.unwrap_or_else(|| self.after_all_faults());
        self.ends(peer, Some(after));
    }

    /// Time until a while after the last fault, when all peers restart.
    fn after_all_faults(&self) -> Duration {
        let last = self.scenario.faults.happen.last().map_or(Duration::ZERO, |(at, _)| *at);
        Moment(last).since(self.queue.now()) + Duration::from_secs(1)
    }

    /// Triggers an armed ambush when a commit is appended: all replicas of its stage die.
    pub(super) fn strike(&mut self) {
        let Some((stage, restart)) = self.ambush.take() else { return };
        let leader = self.log.leader();
        let coordinator = self.nodes.iter().find(|node| leader == Some(node.me));
        let spared = |stage: &Stage| coordinator.is_some_and(|node| node.has_work_at(*stage));
        let stages: Vec<Stage> =
            self.scenario.manifest.stages().filter(|stage| !spared(stage)).collect();
        if stages.is_empty() {
            return;
        }
        let stage = stages[stage % stages.len()];
        self.observation.mark(Mark::LostInCommit);
        let hosts = self.nodes.iter().enumerate().filter(|(_, node)| node.has_work_at(stage));
        let hosts: Vec<usize> = hosts.map(|(index, _)| index).collect();
        if self.observation.is_over() {
            return;
        }
        for peer in hosts {
            self.observation.advanced(Duration::ZERO);
            self.crash(peer, Some(restart), false);
        }
    }

    /// Ends an incarnation. Others notice after a while, and the peer may restart later.
    pub(super) fn ends(&mut self, index: usize, restart: Option<Duration>) {
        let gone = self.nodes[index].me;
        self.nodes[index].alive = false;
        self.observation.show(Seen::Died { peer: index });
        self.nodes[index].seat = None;
        if self.log.leader() == Some(gone) {
            self.log.elect_soon(&mut self.queue);
        }
        for other in (0..self.nodes.len()).filter(|other| *other != index) {
            self.traffic.network.forget(index, other);
            let noticed = Event::Noticed { at: self.nodes[other].me, other: gone, dead: true };
            self.queue.within(self.scenario.faults.notice, noticed);
        }
        if let Some(restart) = restart {
            self.queue.after(restart, Event::Reborn(index));
        }
    }

    /// Starts a new incarnation of a peer.
    pub(super) fn reborn(&mut self, index: usize) {
        // After the end of the run and the loss of its coordinator, there is no run to rejoin.
        let run_is_gone = self.observation.is_over() && self.leader().is_none();
        if self.nodes[index].alive || run_is_gone {
            return;
        }
        let me = self.nodes.restart(index);
        self.queue.after(Duration::ZERO, Event::Start(me));
        if self.log.has_voter(me.peer) {
            self.anchor_is_back();
        }
    }

    /// Breaks the connection of two peers. Both notice after a while.
    pub(super) fn breaks(&mut self, one: usize, other: usize) {
        let (first, second) = (self.nodes[one].me, self.nodes[other].me);
        if one == other || !self.nodes.lives(first) || !self.nodes.lives(second) {
            return;
        }
        self.traffic.disconnect(one, other);
        for (at, other) in [(first, second), (second, first)] {
            let noticed = Event::Noticed { at, other, dead: false };
            self.queue.within(self.scenario.faults.notice, noticed);
        }
    }

    /// A peer cannot connect to another.
    pub(super) fn unreached(&mut self, at: Member, other: Member) -> Held {
        let index = index_of(at);
        self.coordinator_input(index, CoordinatorInput::Disconnected { member: other })?;
        self.input(index, PeerInput::Unreachable { member: other })
    }

    /// A peer, and the coordinator on it, learns that a connection broke.
    pub(super) fn noticed(&mut self, at: Member, other: Member, dead: bool) -> Held {
        let index = index_of(at);
        if dead {
            self.nodes[index].known_dead.insert(other);
        }
        if self.nodes.lives(at) {
            self.coordinator_input(index, CoordinatorInput::Disconnected { member: other })?;
            self.input(index, PeerInput::Disconnected { member: other })?;
        }
        Ok(())
    }
}
