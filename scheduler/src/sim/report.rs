//! The result of a run of the simulator.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{ContentHash, PeerId, Step};
use shoal_protocol::message::{Conviction, MoveReason};
use shoal_protocol::units::{Bytes, Moment};

use crate::action::{AuditOutcome, CoordinatorEvent, Fault};

/// The result of a run of the simulator.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Hash of all events in order: equal for equal runs.
    pub trace: u64,
    /// The time of the last event.
    pub end: Moment,
    /// Number of events.
    pub events: u64,
    /// Steps committed.
    pub commits: u64,
    /// The work of the members.
    pub work: Work,
    /// Losses and recoveries.
    pub recovery: Recovery,
    /// How often rare paths were taken.
    pub rare: Rare,
    /// Changes of a peer's stage.
    pub moves: u64,
    /// Decisions about such changes, by reason.
    pub migrations: BTreeMap<MoveReason, Migrations>,
    /// Time of all engines' passes together.
    pub busy: Duration,
    /// What all engines loaded and waited for, where peers swap their stages.
    pub swapped: Swapped,
    /// When the passes of each step ran.
    pub steps: BTreeMap<Step, StepTime>,
    /// Hash of the newest checkpoint.
    pub checkpoint: Option<ContentHash>,
    /// Whether the training was completed.
    pub finished: bool,
    /// The reason why the run stopped early, if it did.
    pub stopped: Option<String>,
    /// Lies that a member told.
    pub lies: u64,
    /// Audits of members' work.
    pub audits: AuditCounts,
    /// Peers that were convicted.
    pub convictions: Vec<Conviction>,
    /// Faults that peers reported.
    pub faults: Vec<Fault>,
}

/// Audits of members' work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AuditCounts {
    /// Those that found what was stated.
    pub sound: u64,
    /// Those that nobody could make.
    pub not_made: u64,
}

/// The swapping of stages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swapped {
    /// Bytes loaded onto devices.
    pub loaded: Bytes,
    /// Time for which tasks waited for what they touch.
    pub waited: Duration,
}

/// The work of the members.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Completion reports that arrived more than once.
    pub repeated: u64,
    /// Offers answered with busy.
    pub refused: u64,
    /// Offers redirected to a claim's holder.
    pub redirected: u64,
    /// The widest window at any stage.
    pub widest_window: usize,
}

/// Losses and recoveries.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Peers that died.
    pub crashes: u64,
    /// Members that took stages without a host beside their own.
    pub extended: u64,
    /// Members that were expelled.
    pub lost: u64,
    /// Newcomers that began to serve.
    pub joined: u64,
    /// Newcomers that fell behind and started over.
    pub behind: u64,
    /// Lost and returned claims.
    pub claims: ClaimRecovery,
    /// Interrupted rounds.
    pub rounds: RoundRecovery,
    /// Lost connections.
    pub links: LinkRecovery,
    /// Coordinators, including the first.
    pub terms: u64,
    /// Number of lost stages.
    pub lost_stage: u64,
    /// Returns to an earlier version.
    pub rewinds: u64,
    /// Abandoned checkpoints.
    pub checkpoints_abandoned: u64,
    /// Snapshots that a disk failed to write.
    pub not_stored: u64,
}

/// Lost and returned claims.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClaimRecovery {
    /// Claims of expelled members.
    pub revoked: u64,
    /// Activations that were requested again.
    pub replays: u64,
    /// Claims that their holders released.
    pub released: u64,
    /// Of those, overdue claims released on a revocation request.
    pub reclaimed: u64,
    /// Messages about claims that were not their sender's.
    pub refused: u64,
}

/// Interrupted rounds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RoundRecovery {
    /// Aborted rounds.
    pub aborted: u64,
    /// Rounds whose result was not the sum of what was given.
    pub forged: u64,
    /// Rounds that continued without lost members.
    pub mended: u64,
    /// Committed results that a peer gave up because pieces of them were lost.
    pub results_lost: u64,
}

/// Lost connections.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkRecovery {
    /// Connections that could not be restored for a while.
    pub cuts: u64,
    /// Messages and tensors to unreachable peers.
    pub unreached: u64,
}

/// How often rare paths were taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rare {
    /// Rare paths of claims.
    pub claims: RareClaims,
    /// Rare paths of rounds.
    pub rounds: RareRounds,
    /// Rare paths of the log.
    pub log: RareLog,
    /// A message to or from an earlier incarnation was dropped.
    pub old_lives: u64,
    /// A member requested the whole view.
    pub members_wanted: u64,
    /// A member requested a whole round group.
    pub round_groups_requested: u64,
}

/// How often claims took rare paths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RareClaims {
    /// An activation was requested again although a lost member had done its work.
    pub replayed_done: u64,
    /// Work that had lost its next replica lost it again.
    pub rerouted_again: u64,
    /// A claim was released while its grant was in flight.
    pub released_in_flight: u64,
    /// Claims that a new coordinator took over from its predecessor.
    pub taken_over: u64,
    /// A claim was requested back after its work was done.
    pub reclaimed_done: u64,
    /// A claim was requested back although its work was not overdue.
    pub reclaimed_early: u64,
    /// A claim was requested back again after no answer.
    pub reclaimed_again: u64,
    /// A later activation of a virtual worker was sent again.
    pub exchanges_again: u64,
    /// A virtual worker was given up after some of its exchanges.
    pub workers_given_up: u64,
    /// A virtual worker went on when the meeting before was over.
    pub joined: u64,
}

/// How often rounds took rare paths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RareRounds {
    /// A round was mended before any member had a result.
    pub mended_before_result: u64,
    /// A round was mended when some members had their result.
    pub mended_after_result: u64,
    /// The lost members had counted nothing at a round's stage.
    pub mended_unchanged: u64,
    /// A round was mended without several members.
    pub mended_without_many: u64,
    /// Members that continued a mended round of weights that two stages share.
    pub mended_shared: u64,
    /// Sums of an island that its collector made.
    pub collected: u64,
    /// The same after a mend.
    pub collected_again: u64,
    /// A newcomer that listened to a round served before the round's commit.
    pub promoted: u64,
    /// Microbatches done during the all-reduce of an earlier step.
    pub overlapped: u64,
}

/// How often the log took rare paths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RareLog {
    /// A record became durable after its coordinator was deposed.
    pub durable_after_deposal: u64,
    /// A deposed coordinator appended a record.
    pub appended_after_deposal: u64,
    /// All replicas of a stage died while a commit was being logged.
    pub lost_in_commit: u64,
}

/// Stage changes of members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Migrations {
    /// All of them.
    pub begun: u64,
    /// Completed ones.
    pub done: u64,
    /// Cancelled ones.
    pub given_up: u64,
}

/// When the passes of a step ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepTime {
    /// The start of the first one.
    pub first: Moment,
    /// The end of the last one.
    pub last: Moment,
    /// Their total duration on all engines.
    pub busy: Duration,
}

impl Report {
    /// Whether a peer was convicted.
    pub(super) fn has_convicted(&self, peer: PeerId) -> bool {
        self.convictions.iter().any(|conviction| conviction.peer == peer)
    }

    /// Counts an event of the coordinator.
    pub(super) fn note(&mut self, event: &CoordinatorEvent) {
        match event {
            CoordinatorEvent::Lost { .. } => self.recovery.lost += 1,
            CoordinatorEvent::Revoked { claims, .. } => self.recovery.claims.revoked += claims,
            CoordinatorEvent::RoundsAborted { rounds, .. } => {
                self.recovery.rounds.aborted += *rounds as u64;
            }
            CoordinatorEvent::Audited { outcome, .. } => match outcome {
                AuditOutcome::Sound => self.audits.sound += 1,
                AuditOutcome::NotAudited => self.audits.not_made += 1,
            },
            CoordinatorEvent::Convicted(conviction) => {
                self.convictions.push((**conviction).clone())
            }
            CoordinatorEvent::RoundForged { .. } => self.recovery.rounds.forged += 1,
            CoordinatorEvent::RoundMended { .. } => self.recovery.rounds.mended += 1,
            CoordinatorEvent::ClaimRefused { .. } => self.recovery.claims.refused += 1,
            CoordinatorEvent::Reclaimed { .. } => self.recovery.claims.reclaimed += 1,
            CoordinatorEvent::StageLost { .. } => self.recovery.lost_stage += 1,
            CoordinatorEvent::Rewound { .. } => self.recovery.rewinds += 1,
            CoordinatorEvent::CheckpointAbandoned { .. } => {
                self.recovery.checkpoints_abandoned += 1;
            }
            CoordinatorEvent::MoveBegun { reason, to, .. } => {
                self.migrations(*reason).begun += 1;
                let extends = *reason == MoveReason::StageLost && to.stages().count() > 1;
                self.recovery.extended += u64::from(extends);
            }
            CoordinatorEvent::Moves { reason, .. } => self.migrations(*reason).done += 1,
            CoordinatorEvent::MoveCancelled { reason, .. } => {
                self.migrations(*reason).given_up += 1;
            }
            CoordinatorEvent::Finished => self.finished = true,
            _ => {}
        }
    }

    fn migrations(&mut self, reason: MoveReason) -> &mut Migrations {
        self.migrations.entry(reason).or_default()
    }

    /// Counts a pass of a step.
    pub(super) fn ran(&mut self, step: Step, from: Moment, to: Moment) {
        let new = StepTime { first: from, last: to, busy: Duration::ZERO };
        let time = self.steps.entry(step).or_insert(new);
        time.last = time.last.max(to);
        time.busy += to.since(from);
    }
}
