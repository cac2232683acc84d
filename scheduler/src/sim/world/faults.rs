//! Injects faults into the simulated world.

use shoal_protocol::ids::{Member, Stage};
use shoal_protocol::units::Moment;

use super::{Event, Held, Node, World, index_of, node};
use crate::action::{CoordinatorInput, PeerInput};
use crate::sim::scenario::{Fault, Scenario};
use crate::sim::watch::Seen;
use std::time::Duration;

impl World<'_> {
    pub(super) fn fault(&mut self, fault: Fault) -> Held {
        if self.is_over() {
            return Ok(());
        }
        if let Some(oracles) = &mut self.oracles {
            oracles.progress.advanced(self.now + grace_period(self.scenario, self.now, fault));
        }
        match fault {
            Fault::Depose => {
                self.elect_soon();
            }
            Fault::Crash { peer, restart, disk } => {
                if self.nodes[peer].alive {
                    self.report.recovery.crashes += 1;
                    // The log's own disk is never lost: with a single anchor that would end the
                    // run.
                    if disk && !self.log.voters.contains(&self.nodes[peer].me.peer) {
                        self.nodes[peer].engine.disk.clear();
                    }
                    let after = restart.unwrap_or_else(|| self.after_all_faults());
                    self.ends(peer, Some(after));
                }
            }
            Fault::Drain { peer } => return self.drain(peer),
            Fault::Leave { peer } => {
                if self.nodes[peer].alive {
                    self.report.recovery.crashes += 1;
                    self.ends(peer, None);
                }
            }
            Fault::Join { peer } => {
                if !self.nodes[peer].alive {
                    self.nodes[peer].engine.disk.clear();
                    self.reborn(peer);
                }
            }
            Fault::Ambush { stage, restart } => self.ambush = Some((stage, restart)),
            Fault::Region { region, restart } => {
                let peers = self.scenario.peers.iter().enumerate();
                let in_region = peers.filter(|(_, peer)| peer.region == region);
                for peer in in_region.map(|(index, _)| index).collect::<Vec<_>>() {
                    self.fault(Fault::Crash { peer, restart, disk: false })?;
                }
            }
            Fault::Break { one, other } => self.breaks(one, other),
            Fault::Cut { from, to, both, time } => {
                self.report.recovery.cuts += 1;
                self.network.cut((from, to), self.now + time);
                if both {
                    self.network.cut((to, from), self.now + time);
                }
                self.breaks(from, to);
            }
            Fault::SlowLink { from, to, delay, time } => {
                self.network.slow((from, to), self.now + time, delay);
            }
            Fault::SlowPeer { peer, factor, time } => {
                self.nodes[peer].engine.slow = (self.now + time, factor);
            }
            Fault::Disk { peer, time } => {
                self.nodes[peer].engine.disk_fails_until = self.now + time
            }
            Fault::Pause { peer, time } => {
                let paused = self.nodes[peer].paused.max(self.now + time);
                self.nodes[peer].paused = paused;
                self.at(paused, Event::Resume(peer));
                if self.log.leader == Some(self.nodes[peer].me) {
                    self.elect_soon();
                }
            }
        }
        Ok(())
    }

    /// Asks a running peer to leave in order.
    fn drain(&mut self, peer: usize) -> Held {
        let node = &self.nodes[peer];
        let is_running = node.alive && node.paused <= self.now;
        if is_running { self.input(peer, PeerInput::Drain) } else { Ok(()) }
    }

    /// Triggers an armed ambush when a commit is appended: all replicas of its stage die.
    pub(super) fn strike(&mut self) -> Held {
        let Some((stage, restart)) = self.ambush.take() else { return Ok(()) };
        let hosts = |node: &Node, stage| node.peer.load().window.contains_key(&stage);
        let coordinator = self.nodes.iter().find(|node| self.log.leader == Some(node.me));
        let spared =
            |stage: &Stage| coordinator.is_some_and(|coordinator| hosts(coordinator, *stage));
        let stages: Vec<Stage> =
            self.scenario.manifest.stages().filter(|stage| !spared(stage)).collect();
        if stages.is_empty() {
            return Ok(());
        }
        let stage = stages[stage % stages.len()];
        self.marks.rare.lost_in_commit += 1;
        let hosts = self.nodes.iter().enumerate().filter(|(_, node)| hosts(node, stage));
        for peer in hosts.map(|(index, _)| index).collect::<Vec<_>>() {
            self.fault(Fault::Crash { peer, restart: Some(restart), disk: false })?;
        }
        Ok(())
    }

    /// A stalled peer handles the events of the stall, in order.
    pub(super) fn resume(&mut self, index: usize) -> Held {
        if self.nodes[index].paused > self.now {
            return Ok(());
        }
        for event in std::mem::take(&mut self.nodes[index].delayed) {
            self.happen(event)?;
        }
        if self.log.voters.contains(&self.nodes[index].me.peer) {
            self.anchor_is_back();
        }
        Ok(())
    }

    /// Time until a while after the last fault, when all peers restart.
    fn after_all_faults(&self) -> Duration {
        let last = self.scenario.faults.happen.last().map_or(Duration::ZERO, |(at, _)| *at);
        Moment(last).since(self.now) + Duration::from_secs(1)
    }

    /// Ends an incarnation. Others notice after a while, and the peer may restart later.
    pub(super) fn ends(&mut self, index: usize, rebirth: Option<Duration>) {
        let gone = self.nodes[index].me;
        self.nodes[index].alive = false;
        self.show(Seen::Died { peer: index });
        self.nodes[index].seat = None;
        if self.log.leader == Some(gone) {
            self.elect_soon();
        }
        let notice = self.scenario.faults.notice.as_micros() as u64;
        for other in 0..self.nodes.len() {
            let at = self.nodes[other].me;
            if other != index {
                self.network.forget(index, other);
                let when = self.now + self.rng.microseconds(0..=notice);
                self.at(when, Event::Noticed { at, other: gone, dead: true });
            }
        }
        if let Some(rebirth) = rebirth {
            self.at(self.now + rebirth, Event::Reborn(index));
        }
    }

    fn breaks(&mut self, one: usize, other: usize) {
        let (first, second) = (self.nodes[one].me, self.nodes[other].me);
        if one == other || !self.lives(first) || !self.lives(second) {
            return;
        }
        *self.connections.entry((one.min(other), one.max(other))).or_insert(0) += 1;
        self.network.forget(one, other);
        let notice = self.scenario.faults.notice.as_micros() as u64;
        for (at, other) in [(first, second), (second, first)] {
            let when = self.now + self.rng.microseconds(0..=notice);
            self.at(when, Event::Noticed { at, other, dead: false });
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
        if self.lives(at) {
            self.coordinator_input(index, CoordinatorInput::Disconnected { member: other })?;
            self.input(index, PeerInput::Disconnected { member: other })?;
        }
        Ok(())
    }

    /// Starts a new incarnation of a peer.
    pub(super) fn reborn(&mut self, index: usize) {
        // After the end of the run and the loss of its coordinator, there is no run to rejoin.
        let run_is_gone = self.is_over() && self.leader().is_none();
        if self.nodes[index].alive || run_is_gone {
            return;
        }
        let life = self.nodes[index].me.incarnation.next();
        let new = node(self.scenario, index, life);
        let old = std::mem::replace(&mut self.nodes[index], new);
        self.nodes[index].known_dead = old.known_dead;
        self.nodes[index].engine.disk = old.engine.disk;
        self.at(self.now, Event::Start(self.nodes[index].me));
        if self.log.voters.contains(&old.me.peer) {
            self.anchor_is_back();
        }
    }
}

/// How long a fault may prevent progress.
fn grace_period(scenario: &Scenario, now: Moment, fault: Fault) -> Duration {
    match fault {
        // Too few peers may be alive until others join.
        Fault::Leave { .. } | Fault::Join { .. } => {
            let happen = &scenario.faults.happen;
            let next = happen.get(happen.partition_point(|(at, _)| *at <= now.0));
            next.map_or(Duration::ZERO, |(at, _)| Moment(*at).since(now))
        }
        _ => fault.time(),
    }
}
