//! The run's log and the anchors that keep it: what is logged is so for everybody, one anchor leads
//! at a time, and who led before may not know yet that it does no more.

use std::collections::{BTreeSet, VecDeque};

use shoal_protocol::history::History;
use shoal_protocol::ids::{ContentHash, Member, PeerId};
use shoal_protocol::message::LogRecord;
use shoal_protocol::units::Moment;

use super::{Event, Held, World, index_of};
use crate::action::CoordinatorInput;
use crate::coordinator::{Coordinator, CoordinatorConfig};
use crate::sim::watch::Seen;

/// The log, and who leads.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) history: History,
    /// Who keeps it.
    pub(super) voters: BTreeSet<PeerId>,
    pub(super) leader: Option<Member>,
    /// Counts leaderships.
    office: u64,
    /// What the leader gave and is not logged yet.
    pending: VecDeque<LogRecord>,
    /// When the last of these is.
    last: Moment,
    /// An election is on its way.
    electing: bool,
}

/// A coordinator and the leadership that it has.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) coordinator: Coordinator,
    pub(super) office: u64,
    pub(super) remind_at: Option<Moment>,
}

impl Log {
    pub(super) fn new(voters: BTreeSet<PeerId>) -> Self {
        Self {
            history: History::default(),
            voters,
            leader: None,
            office: 0,
            pending: VecDeque::new(),
            last: Moment::default(),
            electing: false,
        }
    }
}

impl World<'_> {
    /// A coordinator gives the log a record.
    pub(super) fn append(&mut self, office: u64, record: LogRecord) {
        // Who leads no more can log nothing.
        if office == self.log.office {
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
        self.at(self.log.last, Event::Logged { office: self.log.office });
    }

    /// The oldest record that is not logged is, if enough anchors live.
    pub(super) fn logged(&mut self, office: u64) -> Held {
        if office != self.log.office || !self.has_majority() {
            return Ok(());
        }
        let Some(record) = self.log.pending.pop_front() else { return Ok(()) };
        self.commit(&record)?;
        let to = self.log.leader.expect("who leads gave it");
        let told = self.now + self.rng.microseconds(0..=1_000);
        self.log.last = self.log.last.max(told);
        self.at(self.log.last, Event::Appended { to, office, record });
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

    /// The anchor that leads, if it lives.
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

    /// Somebody new is to lead after a while.
    pub(super) fn elect_soon(&mut self) {
        if !std::mem::replace(&mut self.log.electing, true) {
            let most = self.scenario.faults.election.as_micros() as u64;
            let at = self.now + self.rng.microseconds(most / 2..=most);
            self.at(at, Event::Elect);
        }
    }

    /// An anchor wins the election. What the one before had given and was not logged may be, or not.
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
            self.at(at, Event::Deposed { at: before, office: self.log.office });
        }
        self.log.office += 1;
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
            homecoming: self.scenario.homecoming,
            load: self.scenario.load(),
            rebalance: self.scenario.rebalance,
            routing: self.scenario.routing,
        });
        #[cfg(test)]
        {
            coordinator.omit = Some(self.omitted_rules.omit);
        }
        let office = self.log.office;
        self.nodes[index].seat = Some(Seat { coordinator, office, remind_at: None });
        let mut actions = Vec::new();
        let now = self.reads(index);
        let seat = self.nodes[index].seat.as_mut().expect("it was just taken");
        seat.coordinator.start(now, &mut actions);
        self.coordinate(index, actions)
    }

    /// Who led learns that it does no more.
    pub(super) fn deposed(&mut self, at: Member, office: u64) {
        let node = &mut self.nodes[index_of(at)];
        if node.me == at && node.seat.as_ref().is_some_and(|seat| seat.office == office) {
            node.seat = None;
        }
    }

    /// A coordinator is reminded of what is due.
    pub(super) fn remind(&mut self, to: Member, office: u64) -> Held {
        let node = &mut self.nodes[index_of(to)];
        match &mut node.seat {
            Some(seat) if node.me == to && seat.office == office => {
                seat.remind_at = None;
                self.coordinator_input(index_of(to), CoordinatorInput::Tick)
            }
            _ => Ok(()),
        }
    }

    /// A record of a coordinator is down for good.
    pub(super) fn appended(&mut self, to: Member, office: u64, record: LogRecord) -> Held {
        let node = &self.nodes[index_of(to)];
        let sits = node.seat.as_ref().is_some_and(|seat| seat.office == office);
        if self.lives(to) && sits {
            return self.coordinator_input(index_of(to), CoordinatorInput::Appended(record));
        }
        Ok(())
    }

    /// An anchor is back: perhaps there are enough of them now.
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
