//! The position of the run: term, era, version and phase.

use std::time::Duration;

use shoal_protocol::history::History;
use shoal_protocol::ids::{Era, Stage, Step, Term};
use shoal_protocol::message::{CommitRecord, ToCoordinator};
use shoal_protocol::units::Moment;

use super::census::Census;
use super::lost_stage::Search;
use super::{Out, event};
use crate::action::CoordinatorEvent;

/// The position of the run, and the event that the coordinator waits for.
#[derive(Debug)]
pub(super) struct Progress {
    /// The coordinator's term of office.
    pub(super) term: Term,
    pub(super) era: Era,
    /// The version that the era began at.
    pub(super) began_at: Step,
    /// The version of the weights: the number of the first step that is not committed.
    pub(super) version: Step,
    /// The newest commit of the era.
    pub(super) last_commit: Option<CommitRecord>,
    /// Whether work was ever granted in this run.
    pub(super) begun: bool,
    /// Whether the log held the end of the run before this term.
    pub(super) completed: bool,
    pub(super) phase: Phase,
    /// What was computed after this version has something wrong in it: the run goes back to it, or further.
    tainted_after: Option<Step>,
    /// The uncovered stages and the number of missing members in the last `Waiting` event.
    pub(super) last_waiting: Option<(Vec<Stage>, usize)>,
    /// Since when the run waits for nothing but hosts of stages that have none.
    pub(super) lacks_hosts_since: Option<Moment>,
    /// Whether members take those stages beside their own with the next era.
    pub(super) extends: bool,
}

/// The state of the run, mostly by the event that the coordinator waits for.
#[derive(Debug)]
pub(super) enum Phase {
    /// The term is being appended to the log.
    Beginning,
    /// Members report the claims that they hold.
    Census(Census),
    /// Members are missing.
    Gathering,
    /// A stage lost its last replica; the coordinator searches for a checkpoint.
    LostStage(Search),
    /// The next era's membership, then the rewind itself, are being appended to the log.
    Rewinding { version: Step, logging: bool },
    /// Microbatches flow.
    Open,
    /// All microbatches are done; the all-reduce runs.
    Closing,
    /// The commit is being appended to the log.
    Committing,
    /// The last step is committed; its checkpoint is not yet complete.
    Saving,
    /// The end of the run is being appended to the log.
    Ending,
    /// The run is complete.
    Finished,
    /// The run cannot continue.
    Stopped { reason: String },
}

impl Progress {
    /// The position that the log gives, at the beginning of a term.
    pub(super) fn of(history: &History, term: Term) -> Self {
        Self {
            term,
            era: history.era,
            began_at: history.began_at,
            version: history.version,
            last_commit: history.commit.clone(),
            begun: history.has_begun(),
            completed: history.completed,
            phase: Phase::Beginning,
            tainted_after: history.tainted_after,
            last_waiting: None,
            lacks_hosts_since: None,
            extends: false,
        }
    }

    /// Whether no decision is made except on membership.
    pub(super) fn is_suspended(&self) -> bool {
        matches!(
            self.phase,
            Phase::Beginning | Phase::Census(_) | Phase::LostStage(_) | Phase::Rewinding { .. }
        )
    }

    /// Whether the run has ended, complete or not.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Finished | Phase::Stopped { .. })
    }

    /// Whether a step is open, in its all-reduce or being committed.
    pub(super) fn is_training(&self) -> bool {
        matches!(self.phase, Phase::Open | Phase::Closing | Phase::Committing)
    }

    /// Whether a step is closed and not committed yet.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self.phase, Phase::Closing | Phase::Committing)
    }

    /// Whether every newcomer has the current weights: the initial ones.
    pub(super) fn is_before_first_step(&self) -> bool {
        self.version == self.began_at && self.era == Era(0) && !self.begun
    }

    /// Whether a message is of use in the present phase. While the coordinator is suspended, only departures and
    /// reports of held claims and files are.
    pub(super) fn accepts(&self, message: &ToCoordinator) -> bool {
        if !self.is_suspended() {
            return true;
        }
        match message {
            ToCoordinator::Leave
            | ToCoordinator::Draining
            | ToCoordinator::CannotReach { .. }
            | ToCoordinator::ViewRequest => true,
            ToCoordinator::Held { .. }
            | ToCoordinator::Done { .. }
            | ToCoordinator::Stored { .. }
            | ToCoordinator::Released { .. } => matches!(self.phase, Phase::Census(_)),
            ToCoordinator::Kept { .. } => matches!(self.phase, Phase::LostStage(_)),
            _ => false,
        }
    }

    /// Enters a phase.
    pub(super) fn enter(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// The census is complete; `granted` is whether members hold claims. Members may be missing.
    pub(super) fn gather(&mut self, granted: bool) {
        self.begun |= granted;
        self.phase = Phase::Gathering;
    }

    /// Reports the stages without a replica and the number of missing members, if that is new.
    pub(super) fn report_waiting(&mut self, stages: Vec<Stage>, members: usize, out: &mut Out) {
        let waiting = Some((stages.clone(), members));
        if self.last_waiting != waiting {
            self.last_waiting = waiting;
            event(CoordinatorEvent::Waiting { stages, members }, out);
        }
    }

    /// Notes whether the run waits for nothing but hosts of stages that have none. Returns whether it has waited for
    /// so long.
    pub(super) fn wait_for_hosts(&mut self, now: Moment, lacks: bool, most: Duration) -> bool {
        if !lacks {
            self.lacks_hosts_since = None;
        }
        lacks && now.since(*self.lacks_hosts_since.get_or_insert(now)) >= most
    }

    /// The era and the version of a rewind that is to be appended to the log. Nothing after the first call.
    pub(super) fn begin_logging_rewind(&mut self) -> Option<(Era, Step)> {
        let Phase::Rewinding { version, logging } = &mut self.phase else { return None };
        let first = !std::mem::replace(logging, true);
        first.then(|| (self.era.next(), *version))
    }

    /// Opens the step that follows the committed version.
    pub(super) fn open_step(&mut self) {
        self.phase = Phase::Open;
        self.begun = true;
    }

    /// Reopens a closed step, because some of its work must be repeated. Returns whether it was closed.
    pub(super) fn reopen_step(&mut self) -> bool {
        let closing = matches!(self.phase, Phase::Closing);
        if closing {
            self.phase = Phase::Open;
        }
        closing
    }

    /// A commit is in the log.
    ///
    /// # Panics
    /// If the step was not closed, or is not the next one.
    pub(super) fn commit(&mut self, record: CommitRecord) {
        assert!(matches!(self.phase, Phase::Committing), "only a closed step is committed");
        assert_eq!(record.step, self.version, "steps are committed one after the other");
        self.version = self.version.next();
        self.last_commit = Some(record);
    }

    /// What was computed after this version has something wrong in it.
    pub(super) fn taint(&mut self, back: Step) {
        let earlier = self.tainted_after.map_or(back, |earlier| earlier.min(back));
        self.tainted_after = Some(earlier);
    }

    /// Whether the run must go back.
    pub(super) fn is_tainted(&self) -> bool {
        self.tainted_after.is_some()
    }

    /// A rewind is in the log. Returns the number of steps that are undone.
    ///
    /// # Panics
    /// If this coordinator did not begin it.
    pub(super) fn rewind(&mut self, era: Era, version: Step) -> u64 {
        assert!(matches!(self.phase, Phase::Rewinding { .. }), "only this coordinator rewinds");
        let steps = self.version.0.saturating_sub(version.0);
        self.tainted_after.take_if(|sound| version <= *sound);
        self.era = era;
        self.began_at = version;
        self.version = version;
        self.last_commit = None;
        self.last_waiting = None;
        self.extends = false;
        self.phase = Phase::Gathering;
        steps
    }
}
