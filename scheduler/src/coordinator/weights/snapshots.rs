//! Snapshots: copies of a stage's weights at a version, for checkpoints and newcomers. One replica writes each
//! for a checkpoint, several for newcomers, which fetch from all of them at once.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{Member, Stage, Step};
use shoal_protocol::message::{FromCoordinator, StoredFile, StoredStage};
use shoal_protocol::units::Moment;

use super::super::context::Context;
use super::super::{Out, send};

/// Files of one stage of one snapshot at most.
const FILES: usize = 64;

/// Snapshots that are being written, or written and still needed.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    parts: BTreeMap<(Step, Stage), Part>,
    /// How often each member was asked to write, so that the work is spread.
    writes: BTreeMap<Member, u64>,
    /// Parts that no writer could store.
    failed: BTreeSet<(Step, Stage)>,
    /// When failed parts are written again, and silent writers asked again.
    retry_at: Option<Moment>,
}

/// One stage of a snapshot.
#[derive(Debug, Clone)]
struct Part {
    /// Writers that did not answer yet.
    writers: BTreeSet<Member>,
    /// Members that hold the files.
    holders: BTreeSet<Member>,
    /// The same at all holders.
    files: Vec<StoredFile>,
}

impl Part {
    /// Whether no member holds it, or is to write it.
    fn is_lost(&self) -> bool {
        self.writers.is_empty() && self.holders.is_empty()
    }
}

impl Snapshots {
    /// When writers are asked again.
    pub(super) fn retry_at(&self) -> Option<Moment> {
        self.retry_at
    }

    /// The files of a stage at a version and their holders, once it is stored.
    pub(super) fn stored(&self, version: Step, stage: Stage) -> Option<StoredStage> {
        let part = self.parts.get(&(version, stage)).filter(|part| !part.holders.is_empty())?;
        let holders = part.holders.iter().map(|member| member.peer).collect();
        Some(StoredStage { holders, files: part.files.clone() })
    }

    /// The same, once all its writers have answered.
    pub(super) fn settled(&self, version: Step, stage: Stage) -> Option<StoredStage> {
        let part = self.parts.get(&(version, stage)).filter(|part| part.writers.is_empty());
        part.and_then(|_| self.stored(version, stage))
    }

    /// All stages of a version, in order, once all are stored.
    pub(super) fn whole(
        &self,
        version: Step,
        stages: impl Iterator<Item = Stage>,
    ) -> Option<Vec<StoredStage>> {
        stages.map(|stage| self.stored(version, stage)).collect()
    }

    /// Has a stage written at a version, the present one or the next, by so many of the replicas that have
    /// written least, unless it is written or being written.
    pub(super) fn write(
        &mut self,
        context: &Context,
        (version, stage): (Step, Stage),
        copies: usize,
        out: &mut Out,
    ) {
        if self.parts.contains_key(&(version, stage)) {
            return;
        }
        let mut replicas = context.members.staying_replicas(stage);
        replicas.sort_by_key(|member| self.writes.get(member).copied().unwrap_or(0));
        let writers: BTreeSet<Member> = replicas.into_iter().take(copies).collect();
        if writers.is_empty() {
            // The stage lost its replicas, and the run is about to rewind.
            return;
        }
        for writer in &writers {
            *self.writes.entry(*writer).or_insert(0) += 1;
            send(*writer, FromCoordinator::Store { version, stage }, out);
        }
        let (holders, files) = (BTreeSet::new(), Vec::new());
        self.parts.insert((version, stage), Part { writers, holders, files });
        self.retry_at.get_or_insert(context.retry_at());
    }

    /// Asks silent writers again where no member holds the part, because a message may be lost; where one does,
    /// the others are not waited for. Returns the parts that no writer could store. Nothing if no retry is due.
    pub(super) fn retry(&mut self, context: &Context, out: &mut Out) -> Option<Vec<(Step, Stage)>> {
        if self.retry_at.is_none_or(|at| context.now < at) {
            return None;
        }
        self.retry_at = None;
        for ((version, stage), part) in &mut self.parts {
            if !part.holders.is_empty() {
                part.writers.clear();
            }
            for writer in &part.writers {
                let (version, stage) = (*version, *stage);
                send(*writer, FromCoordinator::Store { version, stage }, out);
                self.retry_at = Some(context.retry_at());
            }
        }
        let failed = std::mem::take(&mut self.failed);
        Some(failed.into_iter().filter(|part| !self.parts.contains_key(part)).collect())
    }

    /// Takes a writer's report of the files that it wrote, none if it could not. Returns whether a member holds
    /// the part, or is still to write it.
    pub(super) fn record(
        &mut self,
        context: &Context,
        from: Member,
        (version, stage): (Step, Stage),
        files: Vec<StoredFile>,
    ) -> bool {
        let Some(part) = self.parts.get_mut(&(version, stage)) else { return false };
        if files.len() > FILES || !part.writers.remove(&from) {
            return false;
        }
        let fits = part.holders.is_empty() || part.files == files;
        if fits && !files.is_empty() {
            part.files = files;
            part.holders.insert(from);
        }
        if part.is_lost() {
            // An immediate retry would fail again, if no other member can write it.
            self.parts.remove(&(version, stage));
            self.failed.insert((version, stage));
            self.retry_at.get_or_insert(context.retry_at());
            return false;
        }
        true
    }

    /// Forgets the versions that are not needed.
    pub(super) fn retain(&mut self, needed: impl Fn(Step) -> bool) {
        self.parts.retain(|(version, _), _| needed(*version));
    }

    /// A member is gone. Returns the parts that it alone held, or was to write.
    pub(super) fn forget_writer(&mut self, member: Member) -> Vec<(Step, Stage)> {
        self.writes.remove(&member);
        let mut lost = Vec::new();
        for (key, part) in &mut self.parts {
            let was_its = part.writers.remove(&member) | part.holders.remove(&member);
            if was_its && part.is_lost() {
                lost.push(*key);
            }
        }
        for key in &lost {
            self.parts.remove(key);
        }
        lost
    }

    /// Forgets all snapshots.
    pub(super) fn rewind(&mut self) {
        self.parts.clear();
        self.failed.clear();
        self.retry_at = None;
    }

    /// Forgets a whole version.
    pub(super) fn forget_version(&mut self, version: Step) {
        self.parts.retain(|(other, _), _| *other != version);
    }
}
