//! Copies of a stage's weights at a version, for checkpoints and newcomers: written by one replica, or by as
//! many as newcomers fetch from at once.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{Member, Stage, Step};
use shoal_protocol::message::{FromCoordinator, StoredFile, StoredStage};
use shoal_protocol::units::Moment;

use super::{Coordinator, Out, send};

/// Files of one stage of one snapshot.
const FILES: usize = 64;

/// Replicas that write what newcomers begin from, where a stage has so many: each gives files a part of its
/// way out only while it trains, so that a newcomer has them as many times sooner.
const DONORS: usize = 4;

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
struct Part {
    /// Who is to write it, and did not answer.
    writers: BTreeSet<Member>,
    /// Who has it.
    holders: BTreeSet<Member>,
    /// The same at all holders.
    files: Vec<StoredFile>,
}

/// A part that is of use to nobody: none has it, and none is to write it.
fn is_lost(part: &Part) -> bool {
    part.writers.is_empty() && part.holders.is_empty()
}

impl Snapshots {
    /// Who holds which files of a stage at a version, if it is stored.
    pub(super) fn stored(&self, version: Step, stage: Stage) -> Option<StoredStage> {
        let part = self.parts.get(&(version, stage)).filter(|part| !part.holders.is_empty())?;
        let holders = part.holders.iter().map(|member| member.peer).collect();
        Some(StoredStage { holders, files: part.files.clone() })
    }

    /// The same once everybody has it who was to write it.
    pub(super) fn settled(&self, version: Step, stage: Stage) -> Option<StoredStage> {
        let part = self.parts.get(&(version, stage)).filter(|part| part.writers.is_empty());
        part.and_then(|_| self.stored(version, stage))
    }

    /// Who holds which files of every stage of a version, in order of stages, once all are stored.
    pub(super) fn whole(
        &self,
        version: Step,
        stages: impl Iterator<Item = Stage>,
    ) -> Option<Vec<StoredStage>> {
        stages.map(|stage| self.stored(version, stage)).collect()
    }

    /// Forgets what nobody wants.
    pub(super) fn keep(&mut self, wanted: impl Fn(Step) -> bool) {
        self.parts.retain(|(version, _), _| wanted(*version));
    }

    /// Nobody fetches from a member that is gone; returns what it alone had written, or was to.
    pub(super) fn forget_writer(&mut self, member: Member) -> Vec<(Step, Stage)> {
        self.writes.remove(&member);
        let mut lost = Vec::new();
        for (key, part) in &mut self.parts {
            let was_its = part.writers.remove(&member) | part.holders.remove(&member);
            if was_its && is_lost(part) {
                lost.push(*key);
            }
        }
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
    /// Has a stage written for a checkpoint: see [`Self::want_written`].
    pub(super) fn want_snapshot(&mut self, version: Step, stage: Stage, out: &mut Out) {
        self.want_written(version, stage, 1, out);
    }

    /// Has a stage written for newcomers, who fetch it from several.
    pub(super) fn want_donors(&mut self, version: Step, stage: Stage, out: &mut Out) {
        self.want_written(version, stage, DONORS, out);
    }

    /// Has a stage written at a version, which is the present one or the next, by so many replicas that
    /// wrote least; unless it is on its way, or a complete checkpoint has it.
    fn want_written(&mut self, version: Step, stage: Stage, copies: usize, out: &mut Out) {
        let stored = self.snapshots.parts.contains_key(&(version, stage));
        if stored || self.is_archived(version, stage) {
            return;
        }
        let mut replicas = self.replicas_of(stage);
        let Snapshots { parts, writes, .. } = &mut self.snapshots;
        replicas.sort_by_key(|member| writes.get(member).copied().unwrap_or(0));
        let writers: BTreeSet<Member> = replicas.into_iter().take(copies).collect();
        if writers.is_empty() {
            // The stage is about to be found without replicas, and the run rewound.
            return;
        }
        for writer in &writers {
            *writes.entry(*writer).or_insert(0) += 1;
            send(*writer, FromCoordinator::Store { version, stage }, out);
        }
        let (holders, files) = (BTreeSet::new(), Vec::new());
        parts.insert((version, stage), Part { writers, holders, files });
        self.snapshots.again_at.get_or_insert(self.now + self.config.retry);
    }

    /// Has written again what a disk did not take, and asks again who did not answer where nobody has:
    /// one of the two words may be lost. Where somebody has it the others are not waited for.
    pub(super) fn retry_snapshots(&mut self, out: &mut Out) {
        if self.snapshots.again_at.is_none_or(|at| self.now < at) {
            return;
        }
        self.snapshots.again_at = None;
        for ((version, stage), part) in &mut self.snapshots.parts {
            if !part.holders.is_empty() {
                part.writers.clear();
            }
            for writer in &part.writers {
                let (version, stage) = (*version, *stage);
                send(*writer, FromCoordinator::Store { version, stage }, out);
                self.snapshots.again_at = Some(self.now + self.config.retry);
            }
        }
        let failed = std::mem::take(&mut self.snapshots.failed);
        let parts = &self.snapshots.parts;
        let failed: Vec<_> = failed.into_iter().filter(|part| !parts.contains_key(part)).collect();
        self.rewrite_snapshots(&failed, out);
        self.drop_unwanted_snapshots();
        self.tell_newcomers(out);
    }

    /// A stage is written, or could not be.
    pub(super) fn stored(
        &mut self,
        from: Member,
        version: Step,
        stage: Stage,
        files: Vec<StoredFile>,
        out: &mut Out,
    ) {
        let Some(part) = self.snapshots.parts.get_mut(&(version, stage)) else { return };
        if files.len() > FILES || !part.writers.remove(&from) {
            return;
        }
        let fits = part.holders.is_empty() || part.files == files;
        if fits && !files.is_empty() {
            part.files = files;
            part.holders.insert(from);
        }
        if is_lost(part) {
            // At once it would fail again, where nobody else can write it.
            self.snapshots.parts.remove(&(version, stage));
            self.snapshots.failed.insert((version, stage));
            self.snapshots.again_at.get_or_insert(self.now + self.config.retry);
            return;
        }
        self.copy_whole_checkpoints(out);
        self.tell_newcomers(out);
    }
}
