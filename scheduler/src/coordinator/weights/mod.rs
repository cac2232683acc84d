//! The weights outside the replicas' memory: snapshots for newcomers, checkpoints, and the archive of complete
//! ones.
//!
//! A newcomer starts from a snapshot, or from a complete checkpoint, receives the results since, and then serves.
//! A member that migrates is a newcomer at its next stage.

mod archive;
mod checkpoints;
mod join_queue;
mod newcomers;
mod snapshots;

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{Member, Stage, Step};
use shoal_protocol::message::{FromCoordinator, SnapshotPart, StoredFile, StoredStage};
use shoal_protocol::units::Moment;

pub(super) use self::archive::Archive;
use self::checkpoints::Checkpoints;
pub(super) use self::newcomers::Newcomers;
use self::newcomers::fetched_stages;
pub(super) use self::snapshots::Verdict;
use self::snapshots::{Snapshots, WITNESSES};
use super::context::Context;
use super::{Out, event, send};
use crate::action::CoordinatorEvent;

/// Replicas that write a snapshot for newcomers, where a stage has so many. Each gives files only a part of its
/// upload rate while it trains, so that a newcomer has them as many times sooner.
const DONORS: usize = 4;

/// The weights outside the replicas' memory.
#[derive(Debug)]
pub(super) struct Weights {
    newcomers: Newcomers,
    snapshots: Snapshots,
    checkpoints: Checkpoints,
    archive: Archive,
}

impl Weights {
    /// With the complete checkpoints that the log lists, in a run that begins at version `first`.
    pub(super) fn new(first: Step, checkpoints: BTreeMap<Step, Vec<StoredStage>>) -> Self {
        Self {
            newcomers: Newcomers::default(),
            snapshots: Snapshots::default(),
            checkpoints: Checkpoints::default(),
            archive: Archive::new(first, checkpoints),
        }
    }

    /// The members that fetch weights.
    pub(super) fn newcomers(&self) -> &Newcomers {
        &self.newcomers
    }

    /// The complete checkpoints.
    pub(super) fn archive(&self) -> &Archive {
        &self.archive
    }

    #[cfg(test)]
    pub(super) fn newcomers_mut(&mut self) -> &mut Newcomers {
        &mut self.newcomers
    }

    #[cfg(test)]
    pub(super) fn archive_mut(&mut self) -> &mut Archive {
        &mut self.archive
    }

    /// When snapshots or copies are asked for again.
    pub(super) fn next_timeout(&self) -> Option<Moment> {
        self.snapshots.retry_at().into_iter().chain(self.checkpoints.retry_at()).min()
    }

    /// Has members start from a version, in this order. Those whose stages have no room for one more wait for
    /// their turn.
    pub(super) fn start_fetching(
        &mut self,
        context: &Context,
        members: impl IntoIterator<Item = Member>,
        version: Step,
        out: &mut Out,
    ) {
        let mut rooms = None;
        let mut started = false;
        for member in members {
            let Some(stages) = fetched_stages(context, member) else { continue };
            if !context.config.manifest.is_initial(version) {
                let rooms = rooms.get_or_insert_with(|| self.newcomers.rooms(context));
                if !self.newcomers.take_room(member, &stages, rooms, context.now) {
                    continue;
                }
                for stage in stages {
                    self.write_snapshot(context, (version, stage), DONORS, out);
                }
            }
            self.newcomers.start(context, member, version);
            started = true;
        }
        if started {
            self.drop_unneeded();
            self.announce_snapshots(context, out);
        }
    }

    /// Has queued members start whose turn has come.
    pub(super) fn take_turns(&mut self, context: &Context, version: Step, out: &mut Out) {
        if let Some(queued) = self.newcomers.take_queued() {
            self.start_fetching(context, queued, version, out);
        }
    }

    /// A member has the weights that it fetched. Returns how long that took.
    pub(super) fn end_fetching(&mut self, member: Member, now: Moment) -> Option<Duration> {
        let took = self.newcomers.fetch_time(member, now);
        self.stop_fetching(member);
        took
    }

    /// A member does not fetch weights any more.
    pub(super) fn stop_fetching(&mut self, member: Member) {
        self.newcomers.forget(member);
        self.drop_unneeded();
    }

    /// Sends newcomers the snapshots that are complete.
    pub(super) fn announce_snapshots(&mut self, context: &Context, out: &mut Out) {
        for (member, version, view) in self.newcomers.unannounced() {
            let Some(parts) = self.snapshot_for(context, member, version) else { continue };
            self.newcomers.set_announced(member);
            send(member, FromCoordinator::Snapshot { version, view, parts }, out);
        }
    }

    /// The stored parts of a member's stages at a version, once all are stored. The initial weights are stored
    /// nowhere.
    fn snapshot_for(
        &self,
        context: &Context,
        member: Member,
        version: Step,
    ) -> Option<Vec<SnapshotPart>> {
        let stages = fetched_stages(context, member)?;
        if context.config.manifest.is_initial(version) {
            return Some(Vec::new());
        }
        let part = |stage| {
            let archived = self.archive.part(&context.members, version, stage);
            archived.or_else(|| {
                let stored = self.snapshots.settled(version, stage)?;
                Some(SnapshotPart { stage, stored })
            })
        };
        stages.into_iter().map(part).collect()
    }

    /// Has a stage written, unless a complete checkpoint has it.
    fn write_snapshot(
        &mut self,
        context: &Context,
        part: (Step, Stage),
        copies: usize,
        out: &mut Out,
    ) {
        if !self.archive.is_available(&context.members, part.0, part.1) {
            self.snapshots.write(context, part, copies, out);
        }
    }

    /// A writer stored a stage, or could not: then there are no files.
    pub(super) fn stored(
        &mut self,
        context: &Context,
        from: Member,
        part: (Step, Stage),
        files: Vec<StoredFile>,
        out: &mut Out,
    ) {
        if self.snapshots.record(context, from, part, files) {
            self.checkpoints.copy_stored(context, &self.snapshots, &self.archive, out);
            self.announce_snapshots(context, out);
        }
    }

    /// What follows from replicas that wrote different files of a stage, if some did. What they agree on from then on
    /// is copied and announced.
    pub(super) fn judge(&mut self, context: &Context, out: &mut Out) -> Option<Verdict> {
        let verdict = self.snapshots.judge(context)?;
        self.checkpoints.copy_stored(context, &self.snapshots, &self.archive, out);
        self.announce_snapshots(context, out);
        Some(verdict)
    }

    /// Has failed snapshots written again, when that is due. Newcomers without a snapshot start again from
    /// `version`.
    pub(super) fn retry_snapshots(&mut self, context: &Context, version: Step, out: &mut Out) {
        if let Some(failed) = self.snapshots.retry(context, out) {
            self.checkpoints.copy_stored(context, &self.snapshots, &self.archive, out);
            self.replace_lost(context, &failed, version, out);
        }
    }

    /// Has lost snapshots written again where that is possible. Newcomers that need the others start again from
    /// `version`.
    pub(super) fn replace_lost(
        &mut self,
        context: &Context,
        lost: &[(Step, Stage)],
        version: Step,
        out: &mut Out,
    ) {
        for (lost, stage) in lost {
            if self.checkpoints.is_writing(*lost) {
                self.restart_checkpoint(context, *lost, out);
            }
            let fetches = |member: &Member| {
                fetched_stages(context, *member).is_some_and(|all| all.contains(stage))
            };
            let newcomers = self.newcomers.starting_from(*lost).into_iter().filter(fetches);
            for member in newcomers.collect::<Vec<_>>() {
                self.start_fetching(context, [member], version, out);
            }
        }
        self.drop_unneeded();
        self.announce_snapshots(context, out);
    }

    /// Forgets the snapshots that neither checkpoints nor newcomers need.
    fn drop_unneeded(&mut self) {
        let Self { newcomers, snapshots, checkpoints, .. } = self;
        snapshots.retain(|version| checkpoints.needs(version) || newcomers.need(version));
    }

    /// A member is gone. Returns the parts of snapshots that it alone held, or was to write; the caller has them
    /// replaced.
    pub(super) fn forget_member(
        &mut self,
        context: &Context,
        gone: Member,
        out: &mut Out,
    ) -> Vec<(Step, Stage)> {
        self.newcomers.forget(gone);
        let lost = self.snapshots.forget_writer(gone);
        for version in self.checkpoints.forget_member(gone) {
            self.snapshots.forget_version(version);
            self.restart_checkpoint(context, version, out);
        }
        lost
    }

    /// Whether the present version is to be saved.
    pub(super) fn is_checkpoint_due(&mut self, context: &Context) -> bool {
        self.checkpoints.is_due(context)
    }

    /// Has the present version saved, unless it is or too many checkpoints are pending.
    pub(super) fn start_checkpoint(&mut self, context: &Context, out: &mut Out) {
        let version = context.progress.version;
        if self.checkpoints.has_room(context) && !self.archive.holds(version) {
            self.checkpoints.clear_overdue();
            self.write_checkpoint(context, out);
            self.checkpoints.copy_stored(context, &self.snapshots, &self.archive, out);
        }
    }

    /// Has the present version saved before a member leaves that is the last one to host a stage. It waits for the
    /// message that tells it of the checkpoint.
    pub(super) fn save_before_leave(&mut self, context: &Context, leaver: Member, out: &mut Out) {
        let version = context.progress.version;
        if let Some(stages) = self.archive.stages(version) {
            let (stages, oldest) = (stages.to_vec(), self.archive.oldest());
            send(leaver, FromCoordinator::Checkpoint { version, stages, oldest }, out);
        } else if !self.checkpoints.needs(version) && !context.config.manifest.is_initial(version) {
            self.write_checkpoint(context, out);
            self.checkpoints.copy_stored(context, &self.snapshots, &self.archive, out);
        }
    }

    /// Has every stage of the present version written for a checkpoint.
    fn write_checkpoint(&mut self, context: &Context, out: &mut Out) {
        let version = context.progress.version;
        self.checkpoints.begin(version, context.now);
        for stage in context.config.manifest.stages() {
            self.write_snapshot(context, (version, stage), WITNESSES, out);
        }
    }

    /// Writes a spoiled checkpoint again if it is of the present version; else the next version makes up for it.
    fn restart_checkpoint(&mut self, context: &Context, version: Step, out: &mut Out) {
        if version == context.progress.version {
            self.write_checkpoint(context, out);
        } else {
            self.checkpoints.abandon(version, out);
        }
    }

    /// The next checkpoint is made early, if an earlier coordinator left out the newest one that was due.
    pub(super) fn make_up_for_missing(&mut self, context: &Context) {
        let every = context.config.manifest.checkpoint.every;
        let due = context.progress.version.0.checked_div(every).unwrap_or(0) * every;
        if due > self.archive.newest().0 {
            self.checkpoints.set_overdue();
        }
    }

    /// A member answers whether it keeps a copy of a checkpoint's stage. Returns whether it was asked to.
    pub(super) fn copied(
        &mut self,
        context: &Context,
        from: Member,
        copy: (Step, Stage, bool),
        out: &mut Out,
    ) -> bool {
        self.checkpoints.record_copy(context, &self.archive, from, copy, out)
    }

    /// A peer holds a stage of a complete checkpoint, or does not.
    pub(super) fn set_holder(
        &mut self,
        from: Member,
        (version, stage, whole): (Step, Stage, bool),
    ) {
        self.archive.set_holder((version, stage), from.peer, whole);
    }

    /// Asks for missing copies, after members came or went.
    pub(super) fn ask_for_copies(&mut self, context: &Context, out: &mut Out) {
        self.checkpoints.ask_for_all_copies(context, &self.archive, out);
    }

    /// Asks for missing copies, when that is due.
    pub(super) fn retry_copies(&mut self, context: &Context, out: &mut Out) {
        self.checkpoints.retry(context, &self.archive, out);
    }

    /// A checkpoint is in the log, and so complete.
    pub(super) fn complete_checkpoint(
        &mut self,
        context: &Context,
        (version, stages, oldest): (Step, Vec<StoredStage>, Step),
        out: &mut Out,
    ) {
        self.checkpoints.complete(version, context.now, out);
        self.archive.keep(version, stages.clone(), oldest);
        self.drop_unneeded();
        let last = version.0 == context.config.manifest.training.steps;
        let files = stages.iter().map(|stored| stored.files.clone()).collect();
        event(CoordinatorEvent::CheckpointStored { version, stages: files, last }, out);
        let message = FromCoordinator::Checkpoint { version, stages, oldest };
        context.members.broadcast(&message, out);
    }

    /// An archive holds a checkpoint as a whole.
    pub(super) fn archived(&mut self, version: Step) {
        self.checkpoints.set_archived(version);
    }

    /// Whether the present version is complete and an archive holds all of it.
    pub(super) fn is_saved(&mut self, context: &Context) -> bool {
        self.checkpoints.is_saved(context, &self.archive)
    }

    /// Checkpoints after a version have something wrong in them.
    pub(super) fn forget_after(&mut self, version: Step) {
        self.archive.forget_after(version);
    }

    /// The run rewinds to a version: newer ones could not be had, and all members start again.
    pub(super) fn rewind(&mut self, version: Step) {
        self.archive.forget_after(version);
        self.snapshots.rewind();
        self.checkpoints.rewind();
        self.newcomers.forget_all();
    }
}
