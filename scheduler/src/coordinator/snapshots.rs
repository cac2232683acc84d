//! Copies of a stage's weights at a version, written by one replica, for checkpoints and newcomers.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{Member, Stage, Step};
use shoal_protocol::message::{FromCoordinator, StoredFile};
use shoal_protocol::units::Moment;

use super::{Coordinator, Out, send};

/// Files of one stage of one snapshot.
const FILES: usize = 64;

/// Copies that are being written, or written and still of use.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    parts: BTreeMap<(Step, Stage), Part>,
    /// How often a member was told to write, so that the work is spread.
    writes: BTreeMap<Member, u64>,
    /// What its writer's disk did not take.
    failed: BTreeSet<(Step, Stage)>,
    /// When that is tried again, and those are asked again who do not answer.
    pub(super) again_at: Option<Moment>,
}

/// One stage of a snapshot.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) writer: Member,
    pub(super) files: Option<Vec<StoredFile>>,
}

impl Snapshots {
    /// Where a stage is stored at a version, if it is.
    pub(super) fn stored(&self, version: Step, stage: Stage) -> Option<(Member, &Vec<StoredFile>)> {
        let part = self.parts.get(&(version, stage))?;
        Some((part.writer, part.files.as_ref()?))
    }

    /// Who holds which files of every stage of a version, in order of stages, once all are stored.
    pub(super) fn whole(
        &self,
        version: Step,
        stages: impl Iterator<Item = Stage>,
    ) -> Option<Vec<(Member, Vec<StoredFile>)>> {
        let stored = |stage| self.stored(version, stage).map(|(who, files)| (who, files.clone()));
        stages.map(stored).collect()
    }

    /// Forgets what nobody wants.
    pub(super) fn keep(&mut self, wanted: impl Fn(Step) -> bool) {
        self.parts.retain(|(version, _), _| wanted(*version));
    }

    /// Forgets what was written, or was to be, by who is gone; returns which.
    pub(super) fn forget_writer(&mut self, member: Member) -> Vec<(Step, Stage)> {
        self.writes.remove(&member);
        let lost = self.parts.iter().filter(|(_, part)| part.writer == member);
        let lost: Vec<(Step, Stage)> = lost.map(|(key, _)| *key).collect();
        for key in &lost {
            self.parts.remove(key);
        }
        lost
    }

    pub(super) fn forget_all(&mut self) {
        self.parts.clear();
        self.failed.clear();
        self.again_at = None;
    }

    /// Forgets a whole version.
    pub(super) fn forget_version(&mut self, version: Step) {
        self.parts.retain(|(other, _), _| *other != version);
    }
}

impl Coordinator {
    /// Has a stage written at a version, which is the present one or the next, by the replica that
    /// wrote least; unless a complete checkpoint has it.
    pub(super) fn want_snapshot(&mut self, version: Step, stage: Stage, out: &mut Out) {
        let stored = self.snapshots.parts.contains_key(&(version, stage));
        if stored || self.is_archived(version, stage) {
            return;
        }
        let replicas = self.replicas_of(stage);
        let Snapshots { parts, writes, .. } = &mut self.snapshots;
        let count = |member: &Member| writes.get(member).copied().unwrap_or(0);
        // Nobody: the stage is about to be found without replicas, and the run rewound.
        let Some(writer) = replicas.into_iter().min_by_key(count) else { return };
        *writes.entry(writer).or_insert(0) += 1;
        parts.insert((version, stage), Part { writer, files: None });
        send(writer, FromCoordinator::Store { version, stage }, out);
        self.snapshots.again_at.get_or_insert(self.now + self.config.retry);
    }

    /// Has written again what a disk did not take, and asks again who did not answer: one of the two
    /// words may be lost.
    pub(super) fn retry_snapshots(&mut self, out: &mut Out) {
        let due = self.snapshots.again_at.is_some_and(|at| self.now >= at);
        if due {
            self.snapshots.again_at = None;
            for ((version, stage), part) in &self.snapshots.parts {
                if part.files.is_none() {
                    let (version, stage) = (*version, *stage);
                    send(part.writer, FromCoordinator::Store { version, stage }, out);
                    self.snapshots.again_at = Some(self.now + self.config.retry);
                }
            }
            let failed = std::mem::take(&mut self.snapshots.failed);
            let parts = &self.snapshots.parts;
            let failed: Vec<_> =
                failed.into_iter().filter(|part| !parts.contains_key(part)).collect();
            self.rewrite_snapshots(&failed, out);
            self.drop_unwanted_snapshots();
        }
    }

    /// A stage is written.
    pub(super) fn stored(
        &mut self,
        from: Member,
        version: Step,
        stage: Stage,
        files: Vec<StoredFile>,
        out: &mut Out,
    ) {
        let Some(part) = self.snapshots.parts.get_mut(&(version, stage)) else { return };
        if part.writer != from || part.files.is_some() || files.len() > FILES {
            return;
        }
        if files.is_empty() {
            // At once it would fail again, where nobody else can write it.
            self.snapshots.parts.remove(&(version, stage));
            self.snapshots.failed.insert((version, stage));
            self.snapshots.again_at.get_or_insert(self.now + self.config.retry);
            return;
        }
        part.files = Some(files);
        self.copy_whole_checkpoints(out);
        self.tell_newcomers(out);
    }
}
