//! Complete checkpoints, and the peers that hold them.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{PeerId, Stage, StageSpan, Step};
use shoal_protocol::message::{FromCoordinator, SnapshotPart, StoredStage};

use super::super::members::Members;
use super::super::{Out, send};

/// Complete checkpoints, and the peers that hold them.
#[derive(Debug)]
pub(in super::super) struct Archive {
    /// The version that the run begins with, which needs no checkpoint.
    first: Step,
    versions: BTreeMap<Step, Vec<StoredStage>>,
}

impl Archive {
    pub(in super::super) fn new(first: Step, versions: BTreeMap<Step, Vec<StoredStage>>) -> Self {
        Self { first, versions }
    }

    /// Adds a complete checkpoint, and forgets those before `oldest`.
    pub(in super::super) fn keep(&mut self, version: Step, stages: Vec<StoredStage>, oldest: Step) {
        self.versions.insert(version, stages);
        self.versions.retain(|saved, _| *saved >= oldest);
    }

    /// The oldest of the newest `count` versions, if `version` is one of them.
    pub(super) fn oldest_with(&self, version: Step, count: u32) -> Step {
        let mut versions: BTreeSet<Step> = self.versions.keys().copied().collect();
        versions.insert(version);
        while versions.len() > count as usize {
            versions.pop_first();
        }
        versions.pop_first().expect("one was put in, and one is kept")
    }

    /// All stages of a version.
    pub(super) fn stages(&self, version: Step) -> Option<&[StoredStage]> {
        self.versions.get(&version).map(Vec::as_slice)
    }

    /// One stage of a version.
    pub(in super::super) fn stage(&self, version: Step, stage: Stage) -> Option<&StoredStage> {
        self.versions.get(&version)?.get(usize::from(stage.0))
    }

    pub(super) fn holds(&self, version: Step) -> bool {
        self.versions.contains_key(&version)
    }

    /// The newest version, or the one that the run begins with.
    pub(in super::super) fn newest(&self) -> Step {
        self.versions.last_key_value().map_or(self.first, |(version, _)| *version)
    }

    pub(super) fn oldest(&self) -> Step {
        self.versions.first_key_value().map_or(self.first, |(version, _)| *version)
    }

    /// The newest version before another.
    pub(in super::super) fn before(&self, version: Step) -> Step {
        self.versions.range(..version).next_back().map_or(self.first, |(version, _)| *version)
    }

    /// Forgets the versions after the one that the run rewinds to, which could not be had.
    pub(super) fn forget_after(&mut self, version: Step) {
        self.versions.retain(|saved, _| *saved <= version);
    }

    /// A peer holds a stage, or does not. An archive keeps a whole checkpoint even when the log lists enough
    /// other holders.
    pub(in super::super) fn set_holder(
        &mut self,
        (version, stage): (Step, Stage),
        holder: PeerId,
        holds: bool,
    ) {
        let stages = self.versions.get_mut(&version);
        let stored = stages.and_then(|stages| stages.get_mut(usize::from(stage.0)));
        let Some(stored) = stored else { return };
        if !holds {
            stored.holders.retain(|known| *known != holder);
        } else if !stored.holders.contains(&holder) {
            stored.holders.push(holder);
        }
    }

    /// Whether a member holds a stage of a complete checkpoint.
    pub(in super::super) fn is_available(
        &self,
        members: &Members,
        version: Step,
        stage: Stage,
    ) -> bool {
        let stored = self.stage(version, stage);
        let mut holders = stored.iter().flat_map(|stored| &stored.holders);
        holders.any(|peer| members.current.member_of(*peer).is_some())
    }

    /// The files of a stage, if a member holds them.
    pub(super) fn part(
        &self,
        members: &Members,
        version: Step,
        stage: Stage,
    ) -> Option<SnapshotPart> {
        let stored = self.stage(version, stage)?.clone();
        self.is_available(members, version, stage).then_some(SnapshotPart { stage, stored })
    }

    /// Asks the holders of a version's stages whether they still hold them.
    pub(in super::super) fn ask_holders(
        &self,
        members: &Members,
        version: Step,
        span: StageSpan,
        out: &mut Out,
    ) {
        for stage in span.stages() {
            let Some(stored) = self.stage(version, stage) else { continue };
            let lives = stored.holders.iter().filter_map(|peer| members.current.member_of(*peer));
            for holder in lives {
                let part = SnapshotPart { stage, stored: stored.clone() };
                send(holder, FromCoordinator::Keep { version, part }, out);
            }
        }
    }
}
