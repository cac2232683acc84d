//! The coordinators: the leading one, and possibly a deposed one that does not know it yet.

use std::collections::BTreeSet;
use std::time::Duration;

use shoal_protocol::history::History;
use shoal_protocol::ids::{Member, PeerId};
use shoal_protocol::message::{Founding, FromCoordinator, LogRecord, RoundId};

use super::Held;
use super::event::{Cargo, Event};
use super::log::Seat;
use super::peer_index::{index_of, peer_id, place_of};
use super::swarm::Swarm;
use crate::action::{CoordinatorAction, CoordinatorEvent, CoordinatorInput, LossCause};
use crate::coordinator::{Coordinator, CoordinatorConfig};
use crate::sim::hash_keys::HashKeys;
use crate::sim::marks::Mark;
use crate::sim::scenario::Fault;
use crate::sim::watch::Seen;

impl Swarm<'_> {
    /// The leading anchor, if it is alive.
    pub(super) fn leader(&self) -> Option<Member> {
        self.log.leader().filter(|leader| self.nodes.lives(*leader))
    }

    /// Passes an input to the coordinator on a peer, if there is one.
    pub(super) fn coordinator_input(&mut self, index: usize, input: CoordinatorInput) -> Held {
        let now = self.reads(index);
        let Some(seat) = &mut self.nodes[index].seat else { return Ok(()) };
        let mut actions = Vec::new();
        self.observation.show(Seen::Decides { begins: true });
        seat.coordinator.handle(now, input, &mut actions);
        self.observation.show(Seen::Decides { begins: false });
        self.coordinate(index, actions)?;
        self.nodes.schedule_reminder(index, &mut self.queue);
        Ok(())
    }

    fn coordinate(&mut self, index: usize, actions: Vec<CoordinatorAction>) -> Held {
        for mut action in actions {
            self.deviations.corruption.coordinator_action(&mut action);
            self.observation.coordinator_action(&action);
            let node = &self.nodes[index];
            let me = node.me;
            let Some(leadership) = node.seat.as_ref().map(|seat| seat.leadership) else {
                return Ok(());
            };
            match action {
                CoordinatorAction::Send { to, message } => {
                    if let FromCoordinator::Close { round, .. } = &message {
                        self.closes(index, *round);
                    }
                    self.send(me, to, Cargo::FromCoordinator(message));
                }
                CoordinatorAction::Append(record) => {
                    let commits = matches!(record, LogRecord::Commit(_));
                    if !self.log.append(leadership, record, &mut self.queue) {
                        self.observation.mark(Mark::AppendedAfterDeposal);
                    }
                    if commits {
                        self.strike();
                    }
                }
                CoordinatorAction::Anchors(voters) => {
                    let voters = self.without_liar(me.peer, voters);
                    self.log.set_voters(me, voters);
                }
                CoordinatorAction::Event(event) => {
                    self.observation.holds("no slander", self.slandered(&event))?;
                    self.observation.coordinator_event(event)?;
                }
            }
        }
        Ok(())
    }

    /// The wanted anchors without the liar, which may be elected as far as members know, and is not: they believe a
    /// coordinator that the anchors elected. Another one goes with it, so that the number stays odd: one that is dead,
    /// if there is one.
    fn without_liar(&self, leader: PeerId, mut voters: BTreeSet<PeerId>) -> BTreeSet<PeerId> {
        let liar = self.scenario.liar.map(peer_id);
        if liar.is_some_and(|liar| voters.remove(&liar)) && voters.len().is_multiple_of(2) {
            let lives = |peer: &PeerId| self.nodes[place_of(*peer)].alive;
            let others = voters.iter().copied().filter(|voter| *voter != leader);
            if let Some(other) = others.max_by_key(|voter| !lives(voter)) {
                voters.remove(&other);
            }
        }
        voters
    }

    /// Whether a liar's word expels a member that all can reach.
    fn slandered(&self, event: &CoordinatorEvent) -> Result<(), String> {
        let cut = |(_, fault): &(Duration, Fault)| matches!(fault, Fault::Cut { .. });
        let happen = &self.scenario.faults.happen;
        match (self.scenario.liar, event) {
            (Some(liar), CoordinatorEvent::Lost { member, how: LossCause::Unreachable, .. })
                if index_of(*member) != liar
                    && self.nodes.lives(*member)
                    && !happen.iter().any(cut) =>
            {
                Err(format!("{member} is expelled, and all can reach it"))
            }
            _ => Ok(()),
        }
    }

    /// A round begins.
    fn closes(&mut self, index: usize, id: RoundId) {
        let seat = self.nodes[index].seat.as_ref();
        if let Some(round) = seat.and_then(|seat| seat.coordinator.round(id)) {
            self.observation.round_closed(round);
        }
    }

    /// The oldest pending record becomes durable, if a majority of the anchors is alive.
    pub(super) fn logged(&mut self, leadership: u64) -> Held {
        let voters = self.nodes.running(self.queue.now(), self.log.voters());
        if leadership != self.log.leadership() || !self.log.is_majority(voters.len()) {
            return Ok(());
        }
        self.log.commit_next(&mut self.queue, &mut self.observation)
    }

    /// A coordinator's record is durable.
    pub(super) fn appended(&mut self, to: Member, leadership: u64, record: LogRecord) -> Held {
        if self.nodes.lives(to) && self.nodes.seat(to, leadership).is_some() {
            return self.coordinator_input(index_of(to), CoordinatorInput::Appended(record));
        }
        Ok(())
    }

    /// A coordinator's timer fires.
    pub(super) fn remind(&mut self, to: Member, leadership: u64) -> Held {
        let Some(seat) = self.nodes.seat(to, leadership) else { return Ok(()) };
        seat.remind_at = None;
        self.coordinator_input(index_of(to), CoordinatorInput::Tick)
    }

    /// A former leader learns that it was deposed.
    pub(super) fn deposed(&mut self, at: Member, leadership: u64) {
        if self.nodes.seat(at, leadership).is_some() {
            self.nodes[index_of(at)].seat = None;
        }
    }

    /// An anchor wins the election. Its predecessor's pending records become durable or are lost,
    /// at random.
    pub(super) fn elect(&mut self) -> Held {
        self.log.begin_election();
        let candidates = self.nodes.running(self.queue.now(), self.log.voters());
        if self.observation.is_over() || !self.log.is_majority(candidates.len()) {
            return Ok(());
        }
        let index = self.queue.rng.pick(&candidates);
        let pending = self.log.take_pending();
        let kept = self.queue.rng.within(0..=pending.len() as u64) as usize;
        for record in pending.iter().take(kept) {
            self.log.commit(record, &mut self.observation)?;
            self.observation.mark(Mark::LoggedAfterDeposal);
        }
        if let Some(at) = self.leader() {
            let deposed = Event::Deposed { at, leadership: self.log.leadership() };
            self.queue.within(self.scenario.faults.notice, deposed);
        }
        self.log.begin_leadership(self.nodes[index].me, self.queue.now());
        if self.log.leadership() > 1 {
            self.observation.mark(Mark::Succeeded);
        }
        let signers: Vec<PeerId> =
            candidates.iter().map(|index| self.nodes[*index].me.peer).collect();
        self.take_seat(index, &signers)
    }

    fn take_seat(&mut self, index: usize, signers: &[PeerId]) -> Held {
        let history = self.log.history().clone();
        let founded = self.founding.as_ref().filter(|_| history == History::default());
        let before = founded.map_or(history.term, Founding::term);
        #[cfg_attr(not(test), expect(unused_mut, reason = "only tests leave rules out"))]
        let mut coordinator = Coordinator::new(CoordinatorConfig {
            manifest: self.scenario.manifest.clone(),
            term: before.next(),
            history,
            founding: self.founding.clone(),
            anchors: self.log.voters().clone(),
            wait_for: self.scenario.peers.iter().filter(|peer| peer.start.is_some()).count(),
            home: self.nodes[index].me,
            retry: self.scenario.peers[index].limits.retry,
            patience: self.scenario.patience,
            return_trip: self.scenario.return_trip,
            extend_after: self.scenario.extend_after,
            load: self.scenario.load(),
            rebalance: self.scenario.rebalance,
            sealer: HashKeys(self.nodes[index].me.peer).sealer(&self.scenario.manifest),
            routing: self.scenario.routing,
        });
        #[cfg(test)]
        {
            coordinator.omit = Some(self.deviations.rules.omit);
        }
        self.log.prove(coordinator.term(), self.nodes[index].me.peer, signers);
        let mut actions = Vec::new();
        let now = self.reads(index);
        let leadership = self.log.leadership();
        let seat = Seat { coordinator, leadership, remind_at: None };
        self.nodes[index].seat.insert(seat).coordinator.start(now, &mut actions);
        self.coordinate(index, actions)
    }

    /// An anchor is back: there may be a majority again.
    pub(super) fn anchor_is_back(&mut self) {
        if self.leader().is_none() {
            self.log.elect_soon(&mut self.queue);
        } else {
            self.log.schedule_pending(&mut self.queue);
        }
    }
}
