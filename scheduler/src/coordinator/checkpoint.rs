//! Saving the weights: one replica of each stage writes, and when all have, the log says so.

use std::collections::BTreeMap;

use shoal_protocol::ids::{Member, Stage, Step};
use shoal_protocol::message::{FromCoordinator, LogRecord, StoredFile};

use super::{Coordinator, Out, Phase, event, send};
use crate::action::{CoordinatorAction, CoordinatorEvent};

/// Checkpoints that may be in the making at a time; another one that falls due is left out, unless
/// it is the last.
const PENDING: usize = 4;

/// Files of one stage of one checkpoint.
const FILES: usize = 64;

/// Checkpoints in the making.
#[derive(Debug, Default)]
pub(super) struct Checkpoints {
    pending: BTreeMap<Step, Pending>,
    /// How often a member was told to write, so that the work is spread.
    writes: BTreeMap<Member, u64>,
    /// The run's keeper has the last one.
    last_collected: bool,
    /// The last one is in the log.
    last_logged: bool,
}

#[derive(Debug)]
struct Pending {
    writers: BTreeMap<Stage, Member>,
    files: BTreeMap<Stage, Vec<StoredFile>>,
}

impl Coordinator {
    /// Has the current version written.
    pub(super) fn start_checkpoint(&mut self, out: &mut Out) {
        if self.checkpoints.pending.len() >= PENDING && !self.is_last_version() {
            return;
        }
        let version = self.version;
        let mut writers = BTreeMap::new();
        for (stage, replicas) in self.replicas() {
            let writes = &mut self.checkpoints.writes;
            let rarest = |member: &Member| writes.get(member).copied().unwrap_or(0);
            let writer = replicas.into_iter().min_by_key(rarest).expect("every stage is hosted");
            *writes.entry(writer).or_insert(0) += 1;
            send(writer, FromCoordinator::Store { version, stage }, out);
            writers.insert(stage, writer);
        }
        self.checkpoints.pending.insert(version, Pending { writers, files: BTreeMap::new() });
    }

    /// A stage is written. When all are, the log says so.
    pub(super) fn stored(
        &mut self,
        from: Member,
        version: Step,
        stage: Stage,
        files: Vec<StoredFile>,
        out: &mut Out,
    ) {
        let Some(pending) = self.checkpoints.pending.get_mut(&version) else { return };
        if pending.writers.get(&stage) != Some(&from) || files.len() > FILES {
            return;
        }
        let whole = pending.writers.len();
        if pending.files.len() == whole || pending.files.insert(stage, files).is_some() {
            return;
        }
        if pending.files.len() == whole {
            let stages = pending
                .files
                .iter()
                .map(|(stage, files)| (pending.writers[stage].peer, files.clone()))
                .collect();
            let record = LogRecord::Checkpoint { version, stages };
            out.push(CoordinatorAction::Append(record));
        }
    }

    /// The checkpoint is complete for good.
    pub(super) fn checkpoint_logged(&mut self, version: Step, out: &mut Out) {
        let pending = self.checkpoints.pending.remove(&version).expect("it was in the making");
        let last = version.0 == self.config.manifest.training.steps;
        let stages = pending
            .files
            .into_iter()
            .map(|(stage, files)| (pending.writers[&stage], files))
            .collect();
        event(CoordinatorEvent::CheckpointStored { version, stages, last }, out);
        self.checkpoints.last_logged |= last;
        self.finish_when_saved(out);
    }

    /// The run's keeper has the files.
    pub(super) fn collected(&mut self, version: Step, out: &mut Out) {
        self.checkpoints.last_collected |= version.0 == self.config.manifest.training.steps;
        self.finish_when_saved(out);
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
