//! Snapshots: copies of a stage's weights at a version, for checkpoints and newcomers. Two replicas write each for
//! a checkpoint, several for newcomers, which fetch from all of them at once.
//!
//! No single replica's word is taken for what the weights are: the files of all its writers must be equal. Of those
//! that differ the majority counts, and the others leave.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{Member, Stage, Step};
use shoal_protocol::message::{FromCoordinator, StoredFile, StoredStage};
use shoal_protocol::units::Moment;

use super::super::context::Context;
use super::super::{Out, send};

/// Files of one stage of one snapshot at most.
const FILES: usize = 64;

/// Replicas whose equal files are believed, where a stage has so many.
pub(super) const WITNESSES: usize = 2;

/// Replicas that write a stage after others of it differed, where it has so many.
const JURY: usize = 5;

/// Snapshots that are being written, or written and still needed.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    parts: BTreeMap<(Step, Stage), Part>,
    /// How often each member was asked to write, so that the work is spread.
    writes: BTreeMap<Member, u64>,
    /// Parts that no writer could store.
    failed: BTreeSet<(Step, Stage)>,
    /// Stages whose replicas wrote different files: more of them write the next snapshot.
    doubted: BTreeSet<Stage>,
    /// When failed parts are written again, and silent writers asked again.
    retry_at: Option<Moment>,
}

/// One stage of a snapshot.
#[derive(Debug, Clone)]
struct Part {
    /// All that were asked to write it.
    asked: BTreeSet<Member>,
    /// Writers that did not answer yet.
    writers: BTreeSet<Member>,
    /// What the others wrote; one unless a replica lies or is broken.
    copies: Vec<Written>,
    /// When the first of them answered.
    first_at: Option<Moment>,
}

/// Equal files, and the members that hold them.
#[derive(Debug, Clone)]
struct Written {
    files: Vec<StoredFile>,
    holders: BTreeSet<Member>,
}

/// What follows from writers whose files differ.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) enum Verdict {
    /// Most wrote the same, and these something else.
    Disproved(Vec<Member>),
    /// Nobody knows which files are right. More replicas write the next snapshot.
    Unclear(Step, Stage),
    /// The same, and there are no other replicas.
    Split(Step, Stage),
}

impl Part {
    /// Whether no member holds it, or is to write it.
    fn is_lost(&self) -> bool {
        self.writers.is_empty() && self.copies.is_empty()
    }

    /// What its writers agree on, once enough of them have answered.
    fn agreed(&self) -> Option<&Written> {
        let [copies] = &self.copies[..] else { return None };
        let enough = copies.holders.len() >= WITNESSES || self.writers.is_empty();
        enough.then_some(copies)
    }

    fn add(&mut self, from: Member, files: Vec<StoredFile>) {
        match self.copies.iter_mut().find(|copies| copies.files == files) {
            Some(copies) => drop(copies.holders.insert(from)),
            None => self.copies.push(Written { files, holders: BTreeSet::from([from]) }),
        }
    }

    fn forget(&mut self, member: Member) -> bool {
        let mut known = self.writers.remove(&member);
        for copies in &mut self.copies {
            known |= copies.holders.remove(&member);
        }
        self.copies.retain(|copies| !copies.holders.is_empty());
        known
    }

    /// Whether its writers have answered, and differ.
    fn is_disputed(&self) -> bool {
        self.copies.len() > 1 && self.writers.is_empty()
    }

    /// Keeps what most wrote. Returns the members that wrote something else; `None` if there is no such majority.
    fn settle(&mut self) -> Option<Vec<Member>> {
        self.copies.sort_by_key(|copies| std::cmp::Reverse(copies.holders.len()));
        if self.copies[0].holders.len() == self.copies[1].holders.len() {
            return None;
        }
        let others = self.copies.split_off(1).into_iter();
        Some(others.flat_map(|copies| copies.holders).collect())
    }
}

impl Snapshots {
    /// When writers are asked again.
    pub(super) fn retry_at(&self) -> Option<Moment> {
        self.retry_at
    }

    /// The files of a stage at a version and their holders, once it is stored.
    pub(super) fn stored(&self, version: Step, stage: Stage) -> Option<StoredStage> {
        let Written { files, holders } = self.parts.get(&(version, stage))?.agreed()?;
        let holders = holders.iter().map(|member| member.peer).collect();
        Some(StoredStage { holders, files: files.clone() })
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
        let copies = if self.doubted.contains(&stage) { copies.max(JURY) } else { copies };
        let writers: BTreeSet<Member> = replicas.into_iter().take(copies).collect();
        if writers.is_empty() {
            // The stage lost its replicas, and the run is about to rewind.
            return;
        }
        for writer in &writers {
            *self.writes.entry(*writer).or_insert(0) += 1;
            send(*writer, FromCoordinator::Store { version, stage }, out);
        }
        let (asked, copies) = (writers.clone(), Vec::new());
        self.parts.insert((version, stage), Part { asked, writers, copies, first_at: None });
        self.retry_at.get_or_insert(context.retry_at());
    }

    /// Asks silent writers again, because a message may be lost. Where enough have answered the others are not waited
    /// for, nor are they for long after the first. Returns the parts that no writer could store. Nothing if no retry is
    /// due.
    pub(super) fn retry(&mut self, context: &Context, out: &mut Out) -> Option<Vec<(Step, Stage)>> {
        if self.retry_at.is_none_or(|at| context.now < at) {
            return None;
        }
        self.retry_at = None;
        for ((version, stage), part) in &mut self.parts {
            let late = part.first_at.is_some_and(|at| context.now >= at + context.config.patience);
            if !part.copies.is_empty() && (part.agreed().is_some() || late) {
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
        if !files.is_empty() {
            part.first_at.get_or_insert(context.now);
            part.add(from, files);
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

    /// What follows from a part whose writers differ, if there is one.
    pub(super) fn judge(&mut self, context: &Context) -> Option<Verdict> {
        let mut disputed = self.parts.iter_mut().filter(|(_, part)| part.is_disputed());
        let ((version, stage), part) = disputed.next()?;
        let (version, stage) = (*version, *stage);
        if let Some(members) = part.settle() {
            return Some(Verdict::Disproved(members));
        }
        let replicas = context.members.staying_replicas(stage);
        let more = replicas.iter().any(|replica| !part.asked.contains(replica));
        self.parts.remove(&(version, stage));
        self.doubted.insert(stage);
        Some(if more { Verdict::Unclear(version, stage) } else { Verdict::Split(version, stage) })
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
            if part.forget(member) && part.is_lost() {
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
