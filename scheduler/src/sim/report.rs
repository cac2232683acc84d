//! What a run of the simulator came to.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{ContentHash, Step};
use shoal_protocol::message::MoveReason;
use shoal_protocol::units::Moment;
use shoal_protocol::wire;

use super::integer_model::mix;
use crate::action::{CoordinatorEvent, Fault};

/// What a run of the simulator came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Hash of all events in order: equal for equal runs.
    pub trace: u64,
    /// When the last thing happened.
    pub end: Moment,
    /// Things that happened.
    pub events: u64,
    /// Steps committed.
    pub commits: u64,
    /// Done reports that came again.
    pub repeated: u64,
    /// What became of losses.
    pub recovery: Recovery,
    /// How often rare paths were taken.
    pub rare: Rare,
    /// Changes of a peer's stage.
    pub moves: u64,
    /// What coordinators decided about them, by why.
    pub migrations: BTreeMap<MoveReason, Migrations>,
    /// Offers that were answered busy.
    pub turned_away: u64,
    /// Offers that were sent on to a claim's holder.
    pub redirected: u64,
    /// The widest window of any stage.
    pub widest_window: usize,
    /// How long all engines ran passes, together.
    pub busy: Duration,
    /// When passes of each step ran.
    pub steps: BTreeMap<Step, StepTime>,
    /// Hash of the newest checkpoint.
    pub checkpoint: Option<ContentHash>,
    /// Whether the run came to its end.
    pub finished: bool,
    /// Why the run could not go on, if it could not.
    pub stopped: Option<String>,
    /// What peers found that must not be.
    pub faults: Vec<Fault>,
}

/// What became of losses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Peers that died.
    pub crashes: u64,
    /// Members that were expelled.
    pub lost: u64,
    /// Claims of expelled members.
    pub revoked: u64,
    /// Rounds that came to nothing.
    pub rounds_aborted: u64,
    /// Rounds that went on without members that were gone.
    pub rounds_mended: u64,
    /// Activations that were asked for again.
    pub replays: u64,
    /// Claims that their holders let go of.
    pub released: u64,
    /// Those that were late and asked back.
    pub reclaimed: u64,
    /// Words about claims that were not their sender's.
    pub refused: u64,
    /// Newcomers that began to serve.
    pub joined: u64,
    /// Newcomers that began anew.
    pub behind: u64,
    /// Committed results that a peer gave up, since pieces of them were lost on the way.
    pub results_lost: u64,
    /// Coordinators that took over, the first one too.
    pub terms: u64,
    /// Times that a stage was lost.
    pub lost_stage: u64,
    /// Returns to an earlier version.
    pub rewinds: u64,
    /// Checkpoints that were abandoned.
    pub checkpoints_abandoned: u64,
    /// Connections that could not be made anew for a while.
    pub cuts: u64,
    /// Words and tensors that found nobody.
    pub unreached: u64,
    /// Snapshots that a disk did not take.
    pub not_stored: u64,
}

/// How often rare paths were taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rare {
    /// An activation was asked for again though its work had been done, by who is gone.
    pub replayed_done: u64,
    /// Work that had lost its way lost it again.
    pub rerouted_again: u64,
    /// A round was mended before anybody had a result.
    pub mended_before_result: u64,
    /// A round was mended when some had their result.
    pub mended_after_result: u64,
    /// The gone had counted nothing at a round's stage.
    pub mended_unchanged: u64,
    /// More than one was gone.
    pub mended_without_many: u64,
    /// A claim was let go of while its grant was on its way.
    pub released_in_flight: u64,
    /// A word to or of a life that is over was dropped.
    pub old_lives: u64,
    /// A newcomer that heard a round served before the round's commit.
    pub promoted_in_round: u64,
    /// Microbatches done while the all-reduce of a step before theirs was on.
    pub overlapped: u64,
    /// Claims that a coordinator took over from the one before.
    pub claims_taken_over: u64,
    /// A claim was asked back whose work was done.
    pub reclaimed_done: u64,
    /// A claim was asked back, and its work was not late.
    pub reclaimed_early: u64,
    /// A claim was asked back again, since there was no answer.
    pub reclaimed_again: u64,
    /// A record was logged though the coordinator that gave it learnt no more of it.
    pub logged_unheard: u64,
    /// A coordinator gave the log something though another had been chosen.
    pub logged_too_late: u64,
    /// Somebody asked for the whole membership.
    pub members_wanted: u64,
    /// Somebody asked for all whom a round is among.
    pub round_groups_requested: u64,
    /// All replicas of a stage died while a commit was on its way into the log.
    pub lost_in_commit: u64,
}

/// Members that were to change their stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Migrations {
    /// All of them.
    pub begun: u64,
    /// Those that did.
    pub done: u64,
    /// Those that did not after all.
    pub given_up: u64,
}

/// When the passes of a step ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepTime {
    /// The first one began.
    pub first: Moment,
    /// The last one ended.
    pub last: Moment,
    /// Their durations, of all engines together.
    pub busy: Duration,
}

impl Report {
    /// Notes what the coordinator says.
    pub(super) fn note(&mut self, event: &CoordinatorEvent) {
        match event {
            CoordinatorEvent::Lost { .. } => self.recovery.lost += 1,
            CoordinatorEvent::Revoked { claims, .. } => self.recovery.revoked += claims,
            CoordinatorEvent::RoundsAborted { rounds, .. } => {
                self.recovery.rounds_aborted += *rounds as u64;
            }
            CoordinatorEvent::RoundMended { .. } => self.recovery.rounds_mended += 1,
            CoordinatorEvent::ClaimRefused { .. } => self.recovery.refused += 1,
            CoordinatorEvent::Reclaimed { .. } => self.recovery.reclaimed += 1,
            CoordinatorEvent::StageLost { .. } => self.recovery.lost_stage += 1,
            CoordinatorEvent::Rewound { .. } => self.recovery.rewinds += 1,
            CoordinatorEvent::CheckpointAbandoned { .. } => {
                self.recovery.checkpoints_abandoned += 1;
            }
            CoordinatorEvent::MoveBegun { reason, .. } => self.migrations(*reason).begun += 1,
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

    /// Notes a pass of a step.
    pub(super) fn ran(&mut self, step: Step, from: Moment, to: Moment) {
        let new = StepTime { first: from, last: to, busy: Duration::ZERO };
        let time = self.steps.entry(step).or_insert(new);
        time.last = time.last.max(to);
        time.busy += to.since(from);
    }
}

/// Hash of everything noted in it, in order.
#[derive(Debug, Default)]
pub(super) struct Trace(u64);

impl Trace {
    pub(super) fn hash(&self) -> u64 {
        self.0
    }

    pub(super) fn word(&mut self, word: u64) {
        self.0 = mix(&[self.0, word]);
    }

    /// Notes a message as it would go over the wire.
    pub(super) fn message(&mut self, message: &impl wire::Encode) {
        let bytes = wire::encode(message).expect("messages are under their cap");
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(u64::from_le_bytes(word));
        }
    }
}
