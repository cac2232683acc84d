//! The run's replicated log and its anchors. A logged record is logged for all. One anchor leads at
//! a time, and a former leader may not yet know that it was deposed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use shoal_protocol::history::History;
use shoal_protocol::ids::{Era, Member, PeerId, RunId, Term};
use shoal_protocol::message::{AnchorGroup, LogRecord, TermProof, TermVote, ToCoordinator};
use shoal_protocol::units::Moment;

use super::Held;
use super::event::Event;
use super::observation::Observation;
use super::peer_index::peer_id;
use super::queue::EventQueue;
use crate::coordinator::Coordinator;
use crate::sim::hash_keys::HashKeys;
use crate::sim::scenario::Scenario;

/// Maximum time until a leader learns that its record is durable.
const NOTIFICATION: Duration = Duration::from_millis(1);

/// The log and its leader.
#[derive(Debug)]
pub(super) struct Log {
    history: History,
    /// The anchors that replicate it.
    voters: BTreeSet<PeerId>,
    /// The number of these anchors' group.
    group: u64,
    run: RunId,
    /// What the anchors signed: each term, and each group that followed in it, in order.
    proofs: Vec<TermProof>,
    leader: Option<Member>,
    /// Number of the current leadership.
    leadership: u64,
    /// Records that the leader has appended and that are not durable yet.
    pending: VecDeque<LogRecord>,
    /// When the last of these becomes durable.
    last: Moment,
    /// An election is scheduled.
    electing: bool,
    /// Maximum time until a record is durable.
    delay: Duration,
    /// Maximum time until an election.
    election: Duration,
}

/// A coordinator and the number of its leadership.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) coordinator: Coordinator,
    pub(super) leadership: u64,
    pub(super) remind_at: Option<Moment>,
}

impl Seat {
    /// Whether a member's message belongs to the coordinator's era and term. Peers that are not
    /// members always get an answer.
    pub(super) fn accepts(
        &self,
        from: Member,
        era_and_term: (Era, Term),
        message: &ToCoordinator,
    ) -> bool {
        let coordinator = &self.coordinator;
        let newcomer = matches!(message, ToCoordinator::Register(_));
        newcomer
            || !coordinator.is_member(from)
            || era_and_term == (coordinator.era(), coordinator.term())
    }
}

impl Log {
    /// A log that one peer replicates.
    pub(super) fn new(scenario: &Scenario, first: usize) -> Self {
        Self {
            history: History::beginning_at(scenario.manifest.first_version()),
            voters: [peer_id(first)].into(),
            group: 0,
            run: scenario.manifest.run_id(),
            proofs: Vec::new(),
            leader: None,
            leadership: 0,
            pending: VecDeque::new(),
            last: Moment::default(),
            electing: false,
            delay: scenario.log_delay,
            election: scenario.faults.election,
        }
    }

    pub(super) fn history(&self) -> &History {
        &self.history
    }

    pub(super) fn voters(&self) -> &BTreeSet<PeerId> {
        &self.voters
    }

    /// The leading anchor, which may be dead.
    pub(super) fn leader(&self) -> Option<Member> {
        self.leader
    }

    pub(super) fn leadership(&self) -> u64 {
        self.leadership
    }

    pub(super) fn has_voter(&self, peer: PeerId) -> bool {
        self.voters.contains(&peer)
    }

    /// The leader replaces the anchors.
    pub(super) fn set_voters(&mut self, by: Member, voters: BTreeSet<PeerId>) {
        if self.leader != Some(by) || self.voters == voters || voters.is_empty() {
            return;
        }
        // A change needs a majority of both groups, which the world does not model.
        let signers: Vec<PeerId> = self.voters.union(&voters).copied().collect();
        self.voters = voters;
        self.group += 1;
        if let Some(TermProof { vote: TermVote { term, coordinator, .. }, .. }) = self.proofs.last()
        {
            self.prove(*term, *coordinator, &signers);
        }
    }

    /// These anchors sign the term of a coordinator.
    pub(super) fn prove(&mut self, term: Term, coordinator: PeerId, signers: &[PeerId]) {
        let group =
            AnchorGroup { history: 0, number: self.group, voters: vec![self.voters.clone()] };
        let vote = TermVote { term, coordinator, group };
        let bytes = vote.signed_bytes(self.run);
        let sign = |peer: &PeerId| (*peer, HashKeys::sign_as(*peer, &bytes));
        let signatures: BTreeMap<_, _> = signers.iter().map(sign).collect();
        self.proofs.push(TermProof { vote, signatures });
    }

    /// The run that the anchors sign for.
    pub(super) fn run(&self) -> RunId {
        self.run
    }

    /// The proofs that a coordinator of a term can show, from this one on: none if it was not elected for it.
    pub(super) fn proofs_of(&self, coordinator: PeerId, term: Term, from: usize) -> &[TermProof] {
        let end = self.proofs.partition_point(|proof| proof.vote.term <= term);
        let newest = end.checked_sub(1).map(|last| &self.proofs[last].vote);
        let elected =
            newest.is_some_and(|vote| (vote.term, vote.coordinator) == (term, coordinator));
        if elected { self.proofs.get(from..end).unwrap_or_default() } else { &[] }
    }

    /// The proofs that the anchors' leader can show.
    pub(super) fn newest_proofs(&self, from: usize) -> &[TermProof] {
        self.proofs.get(from..).unwrap_or_default()
    }

    /// Whether so many running anchors are a majority.
    pub(super) fn is_majority(&self, running: usize) -> bool {
        running * 2 > self.voters.len()
    }

    /// A coordinator appends a record. Returns false if it was deposed: it cannot append.
    pub(super) fn append(
        &mut self,
        leadership: u64,
        record: LogRecord,
        queue: &mut EventQueue,
    ) -> bool {
        let leads = leadership == self.leadership;
        if leads {
            self.pending.push_back(record);
            self.schedule(queue);
        }
        leads
    }

    fn schedule(&mut self, queue: &mut EventQueue) {
        let durable_at = queue.random_moment(self.delay);
        self.last = self.last.max(durable_at);
        queue.at(self.last, Event::Logged { leadership: self.leadership });
    }

    /// Schedules all pending records again.
    pub(super) fn schedule_pending(&mut self, queue: &mut EventQueue) {
        for _ in 0..self.pending.len() {
            self.schedule(queue);
        }
    }

    /// The oldest pending record becomes durable, and its leader learns that later.
    pub(super) fn commit_next(
        &mut self,
        queue: &mut EventQueue,
        observation: &mut Observation<'_>,
    ) -> Held {
        let Some(record) = self.pending.pop_front() else { return Ok(()) };
        self.commit(&record, observation)?;
        let to = self.leader.expect("only a leader appends");
        let notified_at = queue.random_moment(NOTIFICATION);
        self.last = self.last.max(notified_at);
        queue.at(self.last, Event::Appended { to, leadership: self.leadership, record });
        Ok(())
    }

    /// A record becomes durable.
    pub(super) fn commit(&mut self, record: &LogRecord, observation: &mut Observation<'_>) -> Held {
        let applied = self.history.apply(record).map_err(|error| error.to_string());
        observation.holds("never back", applied)?;
        observation.logged(record, &self.history.view)
    }

    /// Schedules an election.
    pub(super) fn elect_soon(&mut self, queue: &mut EventQueue) {
        if !std::mem::replace(&mut self.electing, true) {
            let most = self.election.as_micros() as u64;
            let delay = queue.rng.microseconds(most / 2..=most);
            queue.after(delay, Event::Elect);
        }
    }

    /// An election takes place.
    pub(super) fn begin_election(&mut self) {
        self.electing = false;
    }

    /// Takes the records that are not durable yet.
    pub(super) fn take_pending(&mut self) -> VecDeque<LogRecord> {
        std::mem::take(&mut self.pending)
    }

    /// An anchor begins to lead.
    pub(super) fn begin_leadership(&mut self, leader: Member, now: Moment) {
        self.leadership += 1;
        self.last = now;
        self.leader = Some(leader);
    }
}
