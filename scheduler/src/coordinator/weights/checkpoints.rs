//! Checkpoints: a replica writes each stage of a version, and other members copy it. When enough of them hold
//! it, the checkpoint is complete and goes into the log.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{Member, Stage, Step};
use shoal_protocol::manifest::Checkpoint;
use shoal_protocol::message::{FromCoordinator, LogRecord, SnapshotPart, StoredStage};
use shoal_protocol::units::Moment;

use super::super::context::Context;
use super::super::progress::Phase;
use super::super::{Out, event, send};
use super::archive::Archive;
use super::snapshots::Snapshots;
use crate::action::{CoordinatorAction, CoordinatorEvent};

/// Checkpoints that may be pending at a time. Another one that falls due is left out, unless it is the last.
const PENDING: usize = 4;

/// Peers that hold each stage of a complete checkpoint, where there are so many: a disk may be lost with its
/// peer.
const HOLDERS: usize = 2;

/// Checkpoints that are not complete yet.
#[derive(Debug, Default)]
pub(super) struct Checkpoints {
    pending: BTreeMap<Step, Pending>,
    /// Whether one was abandoned: the next version makes up for it.
    overdue: bool,
    /// When members that could not keep a copy are asked again.
    retry_at: Option<Moment>,
    /// The newest version that an archive holds as a whole.
    archived: Option<Step>,
    /// When the newest one began, and how long the last complete one took.
    begun_at: Option<Moment>,
    took: Duration,
    /// How often each member was asked to keep a copy, so that the work is spread.
    copies_kept: BTreeMap<Member, u64>,
}

/// The state of a checkpoint that is not complete yet.
#[derive(Debug)]
enum Pending {
    Writing,
    Copying(Vec<Copies>),
    /// The checkpoint is being appended to the log.
    Logging,
}

/// One stage of a checkpoint, and its copies.
#[derive(Debug)]
struct Copies {
    stored: StoredStage,
    /// Members that were asked to keep it and did not answer yet.
    asked: BTreeSet<Member>,
    /// Members that could not keep it.
    failed: BTreeSet<Member>,
}

impl Copies {
    fn wants_more(&self) -> bool {
        self.stored.holders.len() + self.asked.len() < HOLDERS
    }

    fn may_ask(&self, member: Member) -> bool {
        let holds = self.stored.holders.contains(&member.peer);
        !holds && !self.asked.contains(&member) && !self.failed.contains(&member)
    }

    /// Whether as many members hold it as can be asked. For the last checkpoint that is all that were asked.
    fn is_enough(&self, last: bool) -> bool {
        (self.stored.holders.len() >= HOLDERS && !last) || self.asked.is_empty()
    }
}

impl Checkpoints {
    /// When copies are asked for again.
    pub(super) fn retry_at(&self) -> Option<Moment> {
        self.retry_at
    }

    /// Whether a version's files are still needed.
    pub(super) fn needs(&self, version: Step) -> bool {
        self.pending.contains_key(&version)
    }

    /// Whether a version's stages are still being written.
    pub(super) fn is_writing(&self, version: Step) -> bool {
        matches!(self.pending.get(&version), Some(Pending::Writing))
    }

    /// The run rewinds: pending checkpoints are made again.
    pub(super) fn rewind(&mut self) {
        *self = Self::default();
    }

    /// An earlier coordinator did not complete a checkpoint: the next version makes up for it.
    pub(super) fn set_overdue(&mut self) {
        self.overdue = true;
    }

    /// Whether the present version is to be saved. By time they are so far apart that they take a twentieth of it.
    pub(super) fn is_due(&mut self, context: &Context) -> bool {
        let Checkpoint { every, interval, .. } = context.config.manifest.checkpoint;
        let begun_at = *self.begun_at.get_or_insert(context.now);
        let apart = Duration::from_secs(interval.into()).max(20 * self.took);
        let by_steps = every > 0 && context.progress.version.0.is_multiple_of(every);
        let by_time = interval > 0 && context.now >= begun_at + apart;
        by_steps || by_time || (self.overdue && (every > 0 || interval > 0))
    }

    /// Whether another checkpoint may begin.
    pub(super) fn has_room(&self, context: &Context) -> bool {
        self.pending.len() < PENDING || context.is_last_version()
    }

    /// A checkpoint of a version begins; all its stages are to be written.
    pub(super) fn begin(&mut self, version: Step, now: Moment) {
        self.begun_at = Some(now);
        self.pending.insert(version, Pending::Writing);
    }

    /// The present version is being saved: nothing has to be made up for.
    pub(super) fn clear_overdue(&mut self) {
        self.overdue = false;
    }

    /// Has the checkpoints copied whose stages are all stored.
    pub(super) fn copy_stored(
        &mut self,
        context: &Context,
        snapshots: &Snapshots,
        archive: &Archive,
        out: &mut Out,
    ) {
        let mut stored = Vec::new();
        for (version, pending) in &mut self.pending {
            let stages = context.config.manifest.stages();
            if matches!(pending, Pending::Writing)
                && let Some(stages) = snapshots.whole(*version, stages)
            {
                let copies = stages.into_iter().map(|stored| Copies {
                    stored,
                    asked: BTreeSet::new(),
                    failed: BTreeSet::new(),
                });
                *pending = Pending::Copying(copies.collect());
                stored.push(*version);
            }
        }
        for version in stored {
            self.ask_for_copies(context, archive, version, out);
        }
    }

    fn copies(&mut self, version: Step) -> Option<&mut Vec<Copies>> {
        match self.pending.get_mut(&version) {
            Some(Pending::Copying(stages)) => Some(stages),
            _ => None,
        }
    }

    /// Asks for the missing copies of all pending checkpoints.
    pub(super) fn ask_for_all_copies(
        &mut self,
        context: &Context,
        archive: &Archive,
        out: &mut Out,
    ) {
        let pending: Vec<Step> = self.pending.keys().copied().collect();
        for version in pending {
            self.ask_for_copies(context, archive, version, out);
        }
    }

    /// Asks archives, and other members where more copies are needed, to keep the stages that they lack.
    /// Appends the checkpoint to the log once it is copied.
    fn ask_for_copies(
        &mut self,
        context: &Context,
        archive: &Archive,
        version: Step,
        out: &mut Out,
    ) {
        if context.progress.is_suspended() {
            return;
        }
        let Some(stages) = self.copies(version) else { return };
        let mut stages = std::mem::take(stages);
        for (stage, copies) in (0..).map(Stage).zip(&mut stages) {
            for member in context.members.current.with_duty(|duties| duties.archive) {
                self.ask_for_copy((version, stage), copies, member, out);
            }
            while copies.wants_more()
                && let Some(member) = self.choose_copier(context, stage, copies)
            {
                self.ask_for_copy((version, stage), copies, member, out);
            }
        }
        let mut newer = self.pending.range(version.next()..);
        // After a newer checkpoint in the log, this one would be of no use.
        let overtaken = newer.any(|(_, pending)| matches!(pending, Pending::Logging));
        if is_copied(context, version, &stages) && !overtaken {
            let stages = stages.into_iter().map(|copies| copies.stored).collect();
            self.pending.insert(version, Pending::Logging);
            let keep = context.config.manifest.checkpoint.keep;
            let oldest = archive.oldest_with(version, keep);
            out.push(CoordinatorAction::Append(LogRecord::Checkpoint { version, stages, oldest }));
        } else {
            self.pending.insert(version, Pending::Copying(stages));
        }
    }

    fn ask_for_copy(
        &mut self,
        (version, stage): (Step, Stage),
        copies: &mut Copies,
        member: Member,
        out: &mut Out,
    ) {
        if copies.may_ask(member) {
            copies.asked.insert(member);
            *self.copies_kept.entry(member).or_insert(0) += 1;
            let part = SnapshotPart { stage, stored: copies.stored.clone() };
            send(member, FromCoordinator::Keep { version, part }, out);
        }
    }

    /// The member to keep one more copy of a stage: preferably one that does not host it, and that keeps least.
    fn choose_copier(&self, context: &Context, stage: Stage, copies: &Copies) -> Option<Member> {
        let current = &context.members.current;
        let count = |member: &Member| self.copies_kept.get(member).copied().unwrap_or(0);
        let hosts =
            |member: &Member| current.span_of(*member).is_some_and(|span| span.contains(stage));
        let able = current.members().filter(|member| copies.may_ask(*member));
        able.min_by_key(|member| (hosts(member), count(member)))
    }

    /// Takes a member's answer whether it keeps a copy. Returns whether it was asked to.
    pub(super) fn record_copy(
        &mut self,
        context: &Context,
        archive: &Archive,
        from: Member,
        (version, stage, whole): (Step, Stage, bool),
        out: &mut Out,
    ) -> bool {
        let stages = self.copies(version);
        let copies = stages.and_then(|stages| stages.get_mut(usize::from(stage.0)));
        let Some(copies) = copies.filter(|copies| copies.asked.contains(&from)) else {
            return false;
        };
        copies.asked.remove(&from);
        if whole {
            copies.stored.holders.push(from.peer);
        } else {
            copies.failed.insert(from);
            self.retry_at.get_or_insert(context.retry_at());
        }
        self.ask_for_copies(context, archive, version, out);
        true
    }

    /// Asks members again that could not keep a copy, when that is due.
    pub(super) fn retry(&mut self, context: &Context, archive: &Archive, out: &mut Out) {
        if self.retry_at.is_none_or(|at| context.now < at) {
            return;
        }
        self.retry_at = None;
        self.ask_archives(context, archive, out);
        for pending in self.pending.values_mut() {
            if let Pending::Copying(stages) = pending {
                stages.iter_mut().for_each(|copies| copies.failed.clear());
            }
        }
        self.ask_for_all_copies(context, archive, out);
    }

    /// A member is gone: others keep the copies that it was asked for. Returns the versions of which it alone held a stage.
    pub(super) fn forget_member(&mut self, gone: Member) -> Vec<Step> {
        self.copies_kept.remove(&gone);
        let mut spoiled = Vec::new();
        for (version, pending) in &mut self.pending {
            let Pending::Copying(stages) = pending else { continue };
            for copies in stages {
                copies.asked.remove(&gone);
                copies.stored.holders.retain(|holder| *holder != gone.peer);
                if copies.stored.holders.is_empty() {
                    spoiled.push(*version);
                }
            }
        }
        spoiled
    }

    /// Abandons a checkpoint; the next version makes up for it.
    pub(super) fn abandon(&mut self, version: Step, out: &mut Out) {
        self.pending.remove(&version);
        self.overdue = true;
        event(CoordinatorEvent::CheckpointAbandoned { version }, out);
    }

    /// A checkpoint is complete: older ones need not be completed any more.
    pub(super) fn complete(&mut self, version: Step, now: Moment, out: &mut Out) {
        self.took = self.begun_at.map_or(Duration::ZERO, |at| now.since(at));
        self.pending.remove(&version);
        let overtaken = |(older, pending): (&Step, &Pending)| {
            (*older < version && !matches!(pending, Pending::Logging)).then_some(*older)
        };
        let overtaken: Vec<Step> = self.pending.iter().filter_map(overtaken).collect();
        for version in overtaken {
            self.pending.remove(&version);
            event(CoordinatorEvent::CheckpointAbandoned { version }, out);
        }
    }

    /// An archive holds a version as a whole.
    pub(super) fn set_archived(&mut self, version: Step) {
        self.archived = self.archived.max(Some(version));
    }

    /// Whether the present version is complete and an archive holds all of it. If only the archive is missing,
    /// archives are asked again after a while.
    pub(super) fn is_saved(&mut self, context: &Context, archive: &Archive) -> bool {
        let version = context.progress.version;
        if !archive.holds(version) || !self.pending.is_empty() {
            return false;
        }
        let archived = self.archived == Some(version);
        if !archived {
            self.retry_at.get_or_insert(context.retry_at());
        }
        archived
    }

    /// Sends archives the last checkpoint again, which the end of the run waits for.
    fn ask_archives(&mut self, context: &Context, archive: &Archive, out: &mut Out) {
        let version = context.progress.version;
        let Some(stages) = archive.stages(version) else { return };
        let saving = matches!(context.progress.phase, Phase::Saving);
        if !saving || self.archived == Some(version) {
            return;
        }
        let oldest = archive.oldest();
        for to in context.members.current.with_duty(|duties| duties.archive) {
            let stages = stages.to_vec();
            send(to, FromCoordinator::Checkpoint { version, stages, oldest }, out);
        }
        self.retry_at = Some(context.retry_at());
    }
}

/// Whether as many members hold a checkpoint as can be asked. The last one is the model: an archive must hold
/// all of it.
fn is_copied(context: &Context, version: Step, stages: &[Copies]) -> bool {
    let last = version.0 == context.config.manifest.training.steps;
    let mut archives = context.members.current.with_duty(|duties| duties.archive);
    let archived = archives
        .any(|archive| stages.iter().all(|copies| copies.stored.holders.contains(&archive.peer)));
    stages.iter().all(|copies| copies.is_enough(last)) && (archived || !last)
}
