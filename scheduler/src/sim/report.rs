//! The result of a run of the simulator.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{ContentHash, PeerId, Step};
use shoal_protocol::message::{Conviction, MoveReason};
use shoal_protocol::units::{Bytes, Moment};

use super::marks::{Mark, Marks};
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
    /// Losses, recoveries and rare paths.
    pub marks: Marks,
    /// The widest window at any stage.
    pub widest_window: usize,
    /// Decisions about changes of a peer's stage, by reason.
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
    /// Peers that were convicted.
    pub convictions: Vec<Conviction>,
    /// Faults that peers reported.
    pub faults: Vec<Fault>,
}

/// The swapping of stages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swapped {
    /// Bytes loaded onto devices.
    pub loaded: Bytes,
    /// Time for which tasks waited for what they touch.
    pub waited: Duration,
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
        let marks = &mut self.marks;
        match event {
            CoordinatorEvent::Lost { .. } => marks.add(Mark::Expelled, 1),
            CoordinatorEvent::Revoked { claims, .. } => marks.add(Mark::ClaimRevoked, *claims),
            CoordinatorEvent::RoundsAborted { rounds, .. } => {
                marks.add(Mark::RoundAborted, *rounds as u64);
            }
            CoordinatorEvent::Audited { outcome, .. } => match outcome {
                AuditOutcome::Sound => marks.add(Mark::AuditedSound, 1),
                AuditOutcome::NotAudited => marks.add(Mark::NotAudited, 1),
            },
            CoordinatorEvent::Convicted(conviction) => {
                self.convictions.push((**conviction).clone())
            }
            CoordinatorEvent::RoundForged { .. } => marks.add(Mark::RoundForged, 1),
            CoordinatorEvent::RoundMended { .. } => marks.add(Mark::RoundMended, 1),
            CoordinatorEvent::ClaimRefused { .. } => marks.add(Mark::ClaimRefused, 1),
            CoordinatorEvent::Reclaimed { .. } => marks.add(Mark::ClaimReclaimed, 1),
            CoordinatorEvent::StageLost { .. } => marks.add(Mark::StageLost, 1),
            CoordinatorEvent::Rewound { .. } => marks.add(Mark::Rewound, 1),
            CoordinatorEvent::CheckpointAbandoned { .. } => {
                marks.add(Mark::CheckpointAbandoned, 1);
            }
            CoordinatorEvent::MoveBegun { reason, to, .. } => {
                let extends = *reason == MoveReason::StageLost && to.stages().count() > 1;
                marks.add_if(extends, Mark::Extended);
                self.migrations(*reason).begun += 1;
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
