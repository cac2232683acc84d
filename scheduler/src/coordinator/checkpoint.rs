//! Saving the weights: when every stage of a version is written, the log says so.

use std::collections::BTreeMap;

use shoal_protocol::ids::{Stage, Step};
use shoal_protocol::message::{FromCoordinator, LogRecord, StoredFile};

use super::{Coordinator, Out, Phase, event};
use crate::action::{CoordinatorAction, CoordinatorEvent};

/// Checkpoints that may be in the making at a time; another one that falls due is left out, unless
/// it is the last.
const PENDING: usize = 4;

/// Checkpoints in the making.
#[derive(Debug, Default)]
pub(super) struct Checkpoints {
    pending: BTreeMap<Step, Making>,
    /// One was abandoned: the next version makes up for it.
    overdue: bool,
    /// The run's keeper has the last one.
    last_collected: bool,
    /// The last one is in the log.
    last_logged: bool,
}

/// How far a checkpoint is.
#[derive(Debug)]
enum Making {
    Writing,
    Logging,
    /// The run's keeper fetches these.
    Collecting(BTreeMap<Stage, Vec<StoredFile>>),
}

impl Checkpoints {
    /// Whether a version's files are still needed.
    pub(super) fn needs(&self, version: Step) -> bool {
        self.pending.contains_key(&version)
    }

    /// The run goes back: what was in the making is made again.
    pub(super) fn begin_again(&mut self) {
        *self = Self::default();
    }
}

impl Coordinator {
    /// Whether the present version is to be saved.
    pub(super) fn checkpoint_is_due(&self) -> bool {
        let every = self.config.manifest.checkpoint.every;
        every > 0 && (self.version.0.is_multiple_of(every) || self.checkpoints.overdue)
    }

    /// Has the current version written.
    pub(super) fn start_checkpoint(&mut self, out: &mut Out) {
        if self.checkpoints.pending.len() >= PENDING && !self.is_last_version() {
            return;
        }
        self.checkpoints.overdue = false;
        self.write_all_stages(out);
        self.log_whole_checkpoints(out);
    }

    /// Has every stage of the current version written for a checkpoint.
    fn write_all_stages(&mut self, out: &mut Out) {
        self.checkpoints.pending.insert(self.version, Making::Writing);
        for stage in self.config.manifest.clone().stages() {
            self.want_snapshot(self.version, stage, out);
        }
    }

    /// Writes down the checkpoints of which every stage is stored.
    pub(super) fn log_whole_checkpoints(&mut self, out: &mut Out) {
        for (version, making) in &mut self.checkpoints.pending {
            let stages = self.config.manifest.stages();
            if matches!(making, Making::Writing)
                && let Some(whole) = self.snapshots.whole(*version, stages)
            {
                *making = Making::Logging;
                let stages = whole.into_iter().map(|(writer, files)| (writer.peer, files));
                let record = LogRecord::Checkpoint { version: *version, stages: stages.collect() };
                out.push(CoordinatorAction::Append(record));
            }
        }
    }

    /// The checkpoint is in the log: time to bring it together.
    pub(super) fn checkpoint_logged(&mut self, version: Step, out: &mut Out) {
        let stages = self.snapshots.whole(version, self.config.manifest.stages());
        let making = self.checkpoints.pending.get_mut(&version);
        // A writer died meanwhile: it is being written again, or was abandoned.
        let (Some(making), Some(stages)) = (making, stages) else { return };
        let files = stages.iter().map(|(_, files)| files.clone());
        *making = Making::Collecting((0..).map(Stage).zip(files).collect());
        let last = version.0 == self.config.manifest.training.steps;
        event(CoordinatorEvent::CheckpointStored { version, stages, last }, out);
        self.checkpoints.last_logged |= last;
    }

    /// The run's keeper has the files, or could not get them.
    pub(super) fn collected(&mut self, version: Step, whole: bool, out: &mut Out) {
        let making = self.checkpoints.pending.remove(&version);
        match making {
            Some(Making::Collecting(files)) if whole => {
                self.archive.keep(version, files);
                self.checkpoints.last_collected |= version.0 == self.config.manifest.training.steps;
                self.drop_unwanted_snapshots();
                self.finish_when_saved(out);
            }
            Some(Making::Collecting(_)) => {
                self.snapshots.forget_version(version);
                self.make_again(version, out);
            }
            // It is made again already.
            Some(other) => {
                self.checkpoints.pending.insert(version, other);
            }
            None => {}
        }
    }

    /// Part of a checkpoint in the making is lost. What is being fetched may be whole all the same.
    pub(super) fn checkpoint_spoiled(&mut self, version: Step, out: &mut Out) {
        let making = self.checkpoints.pending.get(&version);
        if matches!(making, Some(Making::Writing | Making::Logging)) {
            self.make_again(version, out);
        }
    }

    /// Writes a checkpoint again where that can be; else the next version makes up for it.
    fn make_again(&mut self, version: Step, out: &mut Out) {
        if version == self.version {
            self.write_all_stages(out);
        } else {
            self.checkpoints.pending.remove(&version);
            self.checkpoints.overdue = true;
            event(CoordinatorEvent::CheckpointAbandoned { version }, out);
            self.finish_when_saved(out);
        }
    }

    fn finish_when_saved(&mut self, out: &mut Out) {
        let Checkpoints { last_logged, last_collected, pending, .. } = &self.checkpoints;
        let saved = *last_logged && *last_collected && pending.is_empty();
        if saved && matches!(self.phase, Phase::Saving) {
            self.phase = Phase::Finished;
            self.tell_all(&FromCoordinator::Finished, out);
            event(CoordinatorEvent::Finished, out);
        }
    }
}
