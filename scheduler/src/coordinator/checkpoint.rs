//! Saving the weights: every stage of a version is written by a replica and copied to others; when
//! as many have it as can be asked for, the log says so.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{Member, Stage, Step};
use shoal_protocol::message::{FromCoordinator, LogRecord, SnapshotPart, StoredStage};
use shoal_protocol::units::Moment;

use super::{Coordinator, Out, Phase, event, send};
use crate::action::{CoordinatorAction, CoordinatorEvent};

/// Checkpoints that may be in the making at a time; another one that falls due is left out, unless
/// it is the last.
const PENDING: usize = 4;

/// Peers that have each stage of a complete checkpoint, where there are so many: the disk of one may
/// be gone with it.
const HOLDERS: usize = 2;

/// Checkpoints in the making.
#[derive(Debug, Default)]
pub(super) struct Checkpoints {
    pending: BTreeMap<Step, Making>,
    /// One was abandoned: the next version makes up for it.
    overdue: bool,
    /// When who could not keep a copy is asked again.
    pub(super) again_at: Option<Moment>,
    /// The newest version that an archive has as a whole.
    archived: Option<Step>,
    /// How often a member was told to keep a copy, so that the work is spread.
    kept: BTreeMap<Member, u64>,
}

/// How far a checkpoint is.
#[derive(Debug)]
enum Making {
    Writing,
    Copying(Vec<Copies>),
    Logging,
}

/// One stage of a checkpoint in the making, and who has it.
#[derive(Debug)]
struct Copies {
    stored: StoredStage,
    /// Who was asked to keep it, and did not answer.
    asked: BTreeSet<Member>,
    /// Who could not.
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

    /// A coordinator before this one did not come to an end with a checkpoint.
    pub(super) fn make_up(&mut self) {
        self.overdue = true;
    }

    fn copies(&mut self, version: Step) -> Option<&mut Vec<Copies>> {
        match self.pending.get_mut(&version) {
            Some(Making::Copying(stages)) => Some(stages),
            _ => None,
        }
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
        let full = self.checkpoints.pending.len() >= PENDING && !self.is_last_version();
        if full || self.archive.holds(self.version) {
            return self.finish_when_saved(out);
        }
        self.checkpoints.overdue = false;
        self.write_all_stages(out);
        self.copy_whole_checkpoints(out);
    }

    /// Has every stage of the current version written for a checkpoint.
    fn write_all_stages(&mut self, out: &mut Out) {
        self.checkpoints.pending.insert(self.version, Making::Writing);
        for stage in self.config.manifest.clone().stages() {
            self.want_snapshot(self.version, stage, out);
        }
    }

    /// Has the checkpoints copied of which every stage is stored.
    pub(super) fn copy_whole_checkpoints(&mut self, out: &mut Out) {
        let mut whole = Vec::new();
        for (version, making) in &mut self.checkpoints.pending {
            let stages = self.config.manifest.stages();
            if matches!(making, Making::Writing)
                && let Some(stages) = self.snapshots.whole(*version, stages)
            {
                let copies = stages.into_iter().map(|stored| Copies {
                    stored,
                    asked: BTreeSet::new(),
                    failed: BTreeSet::new(),
                });
                *making = Making::Copying(copies.collect());
                whole.push(*version);
            }
        }
        for version in whole {
            self.ask_for_copies(version, out);
        }
    }

    /// Asks archives, and others where more are needed, to keep what they do not have; writes down
    /// what has been copied enough.
    fn ask_for_copies(&mut self, version: Step, out: &mut Out) {
        if self.is_suspended() {
            return;
        }
        let Some(stages) = self.checkpoints.copies(version) else { return };
        let mut stages = std::mem::take(stages);
        for (stage, copies) in (0..).map(Stage).zip(&mut stages) {
            let archives: Vec<Member> =
                self.membership.with_duty(|duties| duties.archive).collect();
            for member in archives {
                self.ask_for_copy(version, stage, copies, member, out);
            }
            while copies.wants_more()
                && let Some(member) = self.coordinator(stage, copies)
            {
                self.ask_for_copy(version, stage, copies, member, out);
            }
        }
        let mut newer = self.checkpoints.pending.range(version.next()..);
        // What follows a newer one into the log would be of no use.
        let overtaken = newer.any(|(_, making)| matches!(making, Making::Logging));
        if self.is_copied(version, &stages) && !overtaken {
            let stages = stages.into_iter().map(|copies| copies.stored).collect();
            self.checkpoints.pending.insert(version, Making::Logging);
            let keep = self.config.manifest.checkpoint.keep;
            let oldest = self.archive.oldest_with(version, keep);
            out.push(CoordinatorAction::Append(LogRecord::Checkpoint { version, stages, oldest }));
        } else {
            self.checkpoints.pending.insert(version, Making::Copying(stages));
        }
    }

    fn ask_for_copy(
        &mut self,
        version: Step,
        stage: Stage,
        copies: &mut Copies,
        member: Member,
        out: &mut Out,
    ) {
        if copies.may_ask(member) {
            copies.asked.insert(member);
            *self.checkpoints.kept.entry(member).or_insert(0) += 1;
            let part = SnapshotPart { stage, stored: copies.stored.clone() };
            send(member, FromCoordinator::Keep { version, part }, out);
        }
    }

    /// Who is to have one more copy of a stage: rather who does not serve it, and who keeps least.
    fn coordinator(&self, stage: Stage, copies: &Copies) -> Option<Member> {
        let count = |member: &Member| self.checkpoints.kept.get(member).copied().unwrap_or(0);
        let hosts = |member: &Member| {
            self.membership.span_of(*member).is_some_and(|span| span.contains(stage))
        };
        self.membership
            .members()
            .filter(|member| copies.may_ask(*member))
            .min_by_key(|member| (hosts(member), count(member)))
    }

    /// Whether as many have it as can be asked for. The last one is the model: an archive must have
    /// it whole.
    fn is_copied(&self, version: Step, stages: &[Copies]) -> bool {
        let last = version.0 == self.config.manifest.training.steps;
        let enough = |copies: &Copies| {
            (copies.stored.holders.len() >= HOLDERS && !last) || copies.asked.is_empty()
        };
        let mut archives = self.membership.with_duty(|duties| duties.archive);
        let archived = archives.any(|archive| {
            stages.iter().all(|copies| copies.stored.holders.contains(&archive.peer))
        });
        stages.iter().all(enough) && (archived || !last)
    }

    /// A member keeps a stage of a checkpoint, or could not get it.
    pub(super) fn kept(
        &mut self,
        from: Member,
        version: Step,
        stage: Stage,
        whole: bool,
        out: &mut Out,
    ) {
        let stages = self.checkpoints.copies(version);
        let copies = stages.and_then(|stages| stages.get_mut(usize::from(stage.0)));
        let asked = copies.filter(|copies| copies.asked.contains(&from));
        let Some(copies) = asked else {
            return self.holder_found(from, version, stage, whole, out);
        };
        copies.asked.remove(&from);
        if whole {
            copies.stored.holders.push(from.peer);
        } else {
            copies.failed.insert(from);
            self.checkpoints.again_at.get_or_insert(self.now + self.config.retry);
        }
        self.ask_for_copies(version, out);
    }

    /// Asks those again whose disks did not take a copy.
    pub(super) fn retry_copies(&mut self, out: &mut Out) {
        if self.checkpoints.again_at.is_none_or(|at| self.now < at) {
            return;
        }
        self.checkpoints.again_at = None;
        self.ask_archives(out);
        for making in self.checkpoints.pending.values_mut() {
            if let Making::Copying(stages) = making {
                stages.iter_mut().for_each(|copies| copies.failed.clear());
            }
        }
        self.ask_for_all_copies(out);
    }

    /// A member is gone: what it was to keep is for others, and what only it had is written again.
    pub(super) fn forget_coordinator(&mut self, gone: Member, out: &mut Out) {
        self.checkpoints.kept.remove(&gone);
        let mut spoiled = Vec::new();
        for (version, making) in &mut self.checkpoints.pending {
            let Making::Copying(stages) = making else { continue };
            for copies in stages {
                copies.asked.remove(&gone);
                copies.stored.holders.retain(|holder| *holder != gone.peer);
                if copies.stored.holders.is_empty() {
                    spoiled.push(*version);
                }
            }
        }
        for version in spoiled {
            self.snapshots.forget_version(version);
            self.make_again(version, out);
        }
    }

    /// Asks again for copies where somebody came or went.
    pub(super) fn ask_for_all_copies(&mut self, out: &mut Out) {
        let pending: Vec<Step> = self.checkpoints.pending.keys().copied().collect();
        for version in pending {
            self.ask_for_copies(version, out);
        }
    }

    /// The checkpoint is in the log.
    pub(super) fn checkpoint_logged(
        &mut self,
        version: Step,
        stages: Vec<StoredStage>,
        oldest: Step,
        out: &mut Out,
    ) {
        self.checkpoints.pending.remove(&version);
        self.abandon_before(version, out);
        self.archive.keep(version, stages.clone(), oldest);
        self.drop_unwanted_snapshots();
        let last = version.0 == self.config.manifest.training.steps;
        let files = stages.iter().map(|stored| stored.files.clone()).collect();
        event(CoordinatorEvent::CheckpointStored { version, stages: files, last }, out);
        self.tell_all(&FromCoordinator::Checkpoint { version, stages, oldest }, out);
        self.finish_when_saved(out);
    }

    /// A newer checkpoint is complete: of those before it nobody has to have the parts any more.
    fn abandon_before(&mut self, version: Step, out: &mut Out) {
        let overtaken = |(older, making): (&Step, &Making)| {
            (*older < version && !matches!(making, Making::Logging)).then_some(*older)
        };
        let overtaken: Vec<Step> = self.checkpoints.pending.iter().filter_map(overtaken).collect();
        for version in overtaken {
            self.checkpoints.pending.remove(&version);
            event(CoordinatorEvent::CheckpointAbandoned { version }, out);
        }
    }

    /// Part of a checkpoint in the making is lost before it was copied.
    pub(super) fn checkpoint_spoiled(&mut self, version: Step, out: &mut Out) {
        if matches!(self.checkpoints.pending.get(&version), Some(Making::Writing)) {
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
        let saved = self.archive.holds(self.version) && self.checkpoints.pending.is_empty();
        if !matches!(self.phase, Phase::Saving) || !saved {
            return;
        }
        if self.checkpoints.archived == Some(self.version) {
            // Once some have gone, no later coordinator could find out.
            self.phase = Phase::Ending;
            out.push(CoordinatorAction::Append(LogRecord::Completed));
        } else {
            self.checkpoints.again_at.get_or_insert(self.now + self.config.retry);
        }
    }

    /// The log has it that the run is over.
    pub(super) fn finish(&mut self, out: &mut Out) {
        self.phase = Phase::Finished;
        self.tell_all(&FromCoordinator::Finished, out);
        event(CoordinatorEvent::Finished, out);
    }

    /// An archive has a checkpoint as a whole.
    pub(super) fn archived_whole(&mut self, version: Step, out: &mut Out) {
        self.checkpoints.archived = self.checkpoints.archived.max(Some(version));
        self.finish_when_saved(out);
    }

    /// Tells archives again of the last checkpoint, which the run's end waits for.
    fn ask_archives(&mut self, out: &mut Out) {
        let version = self.version;
        let Some(stages) = self.archive.stages(version) else { return };
        if !matches!(self.phase, Phase::Saving) || self.checkpoints.archived == Some(version) {
            return;
        }
        let (stages, oldest) = (stages.to_vec(), self.archive.oldest());
        for to in self.membership.with_duty(|duties| duties.archive) {
            let stages = stages.clone();
            send(to, FromCoordinator::Checkpoint { version, stages, oldest }, out);
        }
        self.checkpoints.again_at = Some(self.now + self.config.retry);
    }
}
