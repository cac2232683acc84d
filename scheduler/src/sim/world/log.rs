//! The run's replicated log and its anchors. A logged record is logged for all. One anchor leads at
//! a time, and a former leader may not yet know that it was deposed.

use std::collections::{BTreeSet, VecDeque};

use shoal_protocol::history::History;
use shoal_protocol::ids::{ContentHash, Member, PeerId};
use shoal_protocol::message::LogRecord;
use shoal_protocol::units::Moment;

use super::{Event, Held, World, index_of};
use crate::action::CoordinatorInput;
use crate::coordinator::{Coordinator, CoordinatorConfig};
use crate::sim::watch::Seen;

/// The log and its leader.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) history: History,
    /// The anchors that replicate it.
    pub(super) voters: BTreeSet<PeerId>,
    pub(super) leader: Option<Member>,
    /// Number of the current leadership.
    leadership: u64,
    /// Records that the leader has appended and that are not durable yet.
    pending: VecDeque<LogRecord>,
    /// When the last of these becomes durable.
    last: Moment,
    /// An election is scheduled.
    electing: bool,
}

/// A coordinator and the number of its leadership.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) coordinator: Coordinator,
    pub(super) leadership: u64,
    pub(super) remind_at: Option<Moment>,
}

impl Log {
    pub(super) fn new(voters: BTreeSet<PeerId>) -> Self {
        Self {
            history: History::default(),
            voters,
            leader: None,
            leadership: 0,
            pending: VecDeque::new(),
            last: Moment::default(),
            electing: false,
        }
    }
}

impl World<'_> {
    /// A coordinator appends a record to the log.
    pub(super) fn append(&mut self, leadership: u64, record: LogRecord) {
        // A deposed leader cannot append.
        if leadership == self.log.leadership {
            self.log.pending.push_back(record);
            self.schedule_log();
        } else {
            self.marks.rare.logged_too_late += 1;
        }
    }

    fn schedule_log(&mut self) {
        let most = self.scenario.log_delay.as_micros() as u64;
        let down = self.now + self.rng.microseconds(0..=most);
        self.log.last = self.log.last.max(down);
        self.at(self.log.last, Event::Logged { leadership: self.log.leadership });
    }

    /// The oldest pending record becomes durable, if a majority of the anchors is alive.
    pub(super) fn logged(&mut self, leadership: u64) -> Held {
        if leadership != self.log.leadership || !self.has_majority() {
            return Ok(());
        }
        let Some(record) = self.log.pending.pop_front() else { return Ok(()) };
        self.commit(&record)?;
        let to = self.log.leader.expect("only a leader appends");
        let notified_at = self.now + self.rng.microseconds(0..=1_000);
        self.log.last = self.log.last.max(notified_at);
        self.at(self.log.last, Event::Appended { to, leadership, record });
        Ok(())
    }

    fn commit(&mut self, record: &LogRecord) -> Held {
        let applied = self.log.history.apply(record).map_err(|error| error.to_string());
        self.holds("never back", applied)?;
        self.show(Seen::Logged(record));
        let held = self.oracles.as_mut().map(|oracles| oracles.monotone.logged(record));
        self.holds("never back", held.unwrap_or(Ok(())))?;
        if let (LogRecord::View(_), Some(oracles)) = (record, &mut self.oracles) {
            oracles.views.logged(&self.log.history.view);
        }
        if let LogRecord::Commit(record) = record {
            self.report.commits += 1;
            let Some(oracles) = &mut self.oracles else { return Ok(()) };
            let once = oracles.exactly_once.committed(record);
            let same = oracles.replicas.committed(record);
            oracles.results.committed(record);
            self.holds("exactly once", once)?;
            self.holds("equal replicas", same)?;
        }
        if let LogRecord::Checkpoint { version, stages, .. } = record {
            let files: Vec<_> = stages.iter().map(|stored| stored.files.clone()).collect();
            let saved = self.oracles.as_ref().map(|o| o.replicas.saved(*version, &files));
            self.holds("equal replicas", saved.unwrap_or(Ok(())))?;
            let hashes: Vec<u8> = files.iter().flatten().flat_map(|file| file.hash.0).collect();
            self.report.checkpoint = Some(ContentHash::of(&hashes));
        }
        Ok(())
    }

    /// The leading anchor, if it is alive.
    pub(super) fn leader(&self) -> Option<Member> {
        self.log.leader.filter(|leader| self.lives(*leader))
    }

    fn has_majority(&self) -> bool {
        self.living_voters().len() * 2 > self.log.voters.len()
    }

    fn living_voters(&self) -> Vec<usize> {
        let lives = |index: &usize| {
            let node = &self.nodes[*index];
            node.alive && node.paused <= self.now && self.log.voters.contains(&node.me.peer)
        };
        (0..self.nodes.len()).filter(lives).collect()
    }

    /// Schedules an election.
    pub(super) fn elect_soon(&mut self) {
        if !std::mem::replace(&mut self.log.electing, true) {
            let most = self.scenario.faults.election.as_micros() as u64;
            let at = self.now + self.rng.microseconds(most / 2..=most);
            self.at(at, Event::Elect);
        }
    }

    /// An anchor wins the election. Its predecessor's pending records become durable or are lost,
    /// at random.
    pub(super) fn elect(&mut self) -> Held {
        self.log.electing = false;
        if self.is_over() || !self.has_majority() {
            return Ok(());
        }
        let candidates = self.living_voters();
        let index = self.rng.pick(&candidates);
        let pending = std::mem::take(&mut self.log.pending);
        let kept = self.rng.within(0..=pending.len() as u64) as usize;
        for record in pending.iter().take(kept) {
            self.commit(record)?;
            self.marks.rare.logged_unheard += 1;
        }
        let notice = self.scenario.faults.notice.as_micros() as u64;
        if let Some(before) = self.leader() {
            let at = self.now + self.rng.microseconds(0..=notice);
            self.at(at, Event::Deposed { at: before, leadership: self.log.leadership });
        }
        self.log.leadership += 1;
        self.log.last = self.now;
        self.report.recovery.terms += 1;
        self.take_seat(index)
    }

    fn take_seat(&mut self, index: usize) -> Held {
        let me = self.nodes[index].me;
        self.log.leader = Some(me);
        #[cfg_attr(not(test), expect(unused_mut, reason = "only tests leave rules out"))]
        let mut coordinator = Coordinator::new(CoordinatorConfig {
            manifest: self.scenario.manifest.clone(),
            history: self.log.history.clone(),
            anchors: self.log.voters.clone(),
            wait_for: self.scenario.peers.iter().filter(|peer| peer.start.is_some()).count(),
            home: me,
            retry: self.scenario.peers[index].limits.retry,
            patience: self.scenario.patience,
            return_trip: self.scenario.return_trip,
            load: self.scenario.load(),
            rebalance: self.scenario.rebalance,
            routing: self.scenario.routing,
        });
        #[cfg(test)]
        {
            coordinator.omit = Some(self.omitted_rules.omit);
        }
        let leadership = self.log.leadership;
        self.nodes[index].seat = Some(Seat { coordinator, leadership, remind_at: None });
        let mut actions = Vec::new();
        let now = self.reads(index);
        let seat = self.nodes[index].seat.as_mut().expect("it was just taken");
        seat.coordinator.start(now, &mut actions);
        self.coordinate(index, actions)
    }

    /// A former leader learns that it was deposed.
    pub(super) fn deposed(&mut self, at: Member, leadership: u64) {
        let node = &mut self.nodes[index_of(at)];
        if node.me == at && node.seat.as_ref().is_some_and(|seat| seat.leadership == leadership) {
            node.seat = None;
        }
    }

    /// A coordinator's timer fires.
    pub(super) fn remind(&mut self, to: Member, leadership: u64) -> Held {
        let node = &mut self.nodes[index_of(to)];
        match &mut node.seat {
            Some(seat) if node.me == to && seat.leadership == leadership => {
                seat.remind_at = None;
                self.coordinator_input(index_of(to), CoordinatorInput::Tick)
            }
            _ => Ok(()),
        }
    }

    /// A coordinator's record is durable.
    pub(super) fn appended(&mut self, to: Member, leadership: u64, record: LogRecord) -> Held {
        let node = &self.nodes[index_of(to)];
        let leads = node.seat.as_ref().is_some_and(|seat| seat.leadership == leadership);
        if self.lives(to) && leads {
            return self.coordinator_input(index_of(to), CoordinatorInput::Appended(record));
        }
        Ok(())
    }

    /// An anchor is back: there may be a majority again.
    pub(super) fn anchor_is_back(&mut self) {
        if self.leader().is_none() {
            self.elect_soon();
        } else {
            for _ in 0..self.log.pending.len() {
                self.schedule_log();
            }
        }
    }
}
