//! Snapshots that this peer is asked to write.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{Stage, Step};
use shoal_protocol::message::{StoredFile, ToCoordinator};

use super::{Out, Peer};
use crate::action::{PeerAction, Task};

/// Snapshots asked of this peer.
#[derive(Debug, Default)]
pub(super) struct Stores {
    /// At versions that are not reached yet.
    due: BTreeSet<(Step, Stage)>,
    /// Given to the engine.
    writing: BTreeSet<(Step, Stage)>,
    /// The newest of each stage, for when the report must be said again.
    written: BTreeMap<Stage, (Step, Vec<StoredFile>)>,
}

impl Peer {
    /// A stage is to be saved at a version.
    pub(super) fn store(&mut self, version: Step, stage: Stage, out: &mut Out) {
        if !self.stages.contains_key(&stage) {
            // It was left meanwhile.
            let message = ToCoordinator::Stored { version, stage, files: Vec::new() };
            return out.push(PeerAction::ToCoordinator(message));
        }
        if let Some((written, files)) = self.stores.written.get(&stage)
            && *written == version
        {
            let files = files.clone();
            let message = ToCoordinator::Stored { version, stage, files };
            return out.push(PeerAction::ToCoordinator(message));
        }
        if version < self.version && !self.stores.writing.contains(&(version, stage)) {
            // The word came too late: somebody else may have it, or a later version does.
            let message = ToCoordinator::Stored { version, stage, files: Vec::new() };
            return out.push(PeerAction::ToCoordinator(message));
        }
        // Who serves since the last view may still have results to apply.
        let behind = self.backlog.len() as u64;
        if (self.version.0..=self.version.0 + 1 + behind).contains(&version.0) {
            self.stores.due.insert((version, stage));
            self.store_when_due(out);
        }
    }

    /// Tasks are carried out in order, so what is given once the engine has this version reads it.
    pub(super) fn store_when_due(&mut self, out: &mut Out) {
        if !self.has_weights() {
            return;
        }
        let due: Vec<(Step, Stage)> =
            self.stores.due.range(..(self.version.next(), Stage(0))).copied().collect();
        for (version, stage) in due {
            self.stores.due.remove(&(version, stage));
            if version == self.version && self.stores.writing.insert((version, stage)) {
                out.push(PeerAction::Compute(Task::Store { version, stage }));
            }
        }
    }

    /// The engine wrote a stage. What was begun before a rewind is nobody's.
    pub(super) fn stored(
        &mut self,
        version: Step,
        stage: Stage,
        files: Vec<StoredFile>,
        out: &mut Out,
    ) {
        if !self.stores.writing.remove(&(version, stage)) {
            return;
        }
        self.stores.written.insert(stage, (version, files.clone()));
        let message = ToCoordinator::Stored { version, stage, files };
        out.push(PeerAction::ToCoordinator(message));
    }

    /// The disk did not take a stage: another replica may write it, which the coordinator sees to
    /// when it hears of no files.
    pub(super) fn not_stored(&mut self, version: Step, stage: Stage, out: &mut Out) {
        if self.stores.writing.remove(&(version, stage)) {
            let message = ToCoordinator::Stored { version, stage, files: Vec::new() };
            out.push(PeerAction::ToCoordinator(message));
        }
    }
}
