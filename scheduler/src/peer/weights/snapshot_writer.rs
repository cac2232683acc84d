//! Snapshots that the coordinator asks this peer to write.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{Stage, Step};
use shoal_protocol::message::{StoredFile, ToCoordinator};

use crate::action::{PeerAction, Task};
use crate::peer::Out;

/// Requested snapshots.
#[derive(Debug, Default)]
pub(super) struct SnapshotWriter {
    /// Requests at versions that the weights have not reached.
    due: BTreeSet<(Step, Stage)>,
    /// Tasks that the engine has.
    writing: BTreeSet<(Step, Stage)>,
    /// The newest snapshot of each stage, for when its report must be repeated.
    written: BTreeMap<Stage, (Step, Vec<StoredFile>)>,
}

impl SnapshotWriter {
    /// Takes a request to save a hosted stage at a version. `current` is the version of the weights and
    /// `pending` the number of messages about later steps. Returns whether a task may have become due.
    pub(super) fn request(
        &mut self,
        (version, stage): (Step, Stage),
        (current, pending): (Step, usize),
        out: &mut Out,
    ) -> bool {
        if let Some((written, files)) = self.written.get(&stage)
            && *written == version
        {
            report(version, stage, files.clone(), out);
            return false;
        }
        if version < current && !self.writing.contains(&(version, stage)) {
            // The request came too late: another replica or a later version serves instead.
            report(version, stage, Vec::new(), out);
            return false;
        }
        // A peer that serves since the last view may still have results to apply.
        let reachable = (current.0..=current.0 + 1 + pending as u64).contains(&version.0);
        if reachable {
            self.due.insert((version, stage));
        }
        reachable
    }

    /// Gives the engine the snapshots of the current version. Tasks run in order, so each reads that
    /// version.
    pub(super) fn write_due(&mut self, current: Step, out: &mut Out) {
        let due: Vec<(Step, Stage)> =
            self.due.range(..(current.next(), Stage(0))).copied().collect();
        for (version, stage) in due {
            self.due.remove(&(version, stage));
            if version == current && self.writing.insert((version, stage)) {
                out.push(PeerAction::Compute(Task::Store { version, stage }));
            }
        }
    }

    /// This peer leaves a stage: another replica writes what is due of it.
    pub(super) fn leave(&mut self, left: Stage, out: &mut Out) {
        let (gone, due) = self.due.iter().copied().partition(|(_, stage)| *stage == left);
        self.due = due;
        for (version, stage) in BTreeSet::into_iter(gone) {
            report(version, stage, Vec::new(), out);
        }
    }

    /// The engine wrote a snapshot, or failed to: on a report without files the coordinator asks another
    /// replica. One that began before a rewind is ignored.
    pub(super) fn finish(
        &mut self,
        version: Step,
        stage: Stage,
        files: Option<Vec<StoredFile>>,
        out: &mut Out,
    ) {
        if self.writing.remove(&(version, stage)) {
            if let Some(files) = &files {
                self.written.insert(stage, (version, files.clone()));
            }
            report(version, stage, files.unwrap_or_default(), out);
        }
    }
}

/// Reports the files of a snapshot; none where this peer did not write it.
pub(super) fn report(version: Step, stage: Stage, files: Vec<StoredFile>, out: &mut Out) {
    out.push(PeerAction::ToCoordinator(ToCoordinator::Stored { version, stage, files }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_due_of_a_stage_that_is_left_is_not_written() {
        let mut writer = SnapshotWriter::default();
        let mut out = Vec::new();
        let (left, kept) = (Stage(0), Stage(1));
        for stage in [left, kept] {
            assert!(writer.request((Step(1), stage), (Step(0), 0), &mut out));
        }
        writer.leave(left, &mut out);
        writer.write_due(Step(1), &mut out);
        let stored = ToCoordinator::Stored { version: Step(1), stage: left, files: Vec::new() };
        let task = Task::Store { version: Step(1), stage: kept };
        assert_eq!(out, [PeerAction::ToCoordinator(stored), PeerAction::Compute(task)]);
    }
}
