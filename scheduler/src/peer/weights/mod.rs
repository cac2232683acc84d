//! The weights of the hosted stages, from step to step.
//!
//! Rounds, commits, snapshots and migrations bring them forward. This file joins the parts:
//! `rounds`, the `step_queue`, `catch_up` of a newcomer, the `migration` to another span and the
//! `snapshot_writer`. Where the microbatches are concerned too, a method returns what follows to the
//! peer.

mod catch_up;
mod migration;
mod rounds;
mod snapshot_writer;
mod step_queue;

use std::collections::BTreeSet;
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Era, Member, Stage, Step, Term, WeightGroup};
use shoal_protocol::message::{CommitRecord, Round, RoundId, SnapshotPart, ToCoordinator};

use self::catch_up::CatchUp;
pub(super) use self::migration::Decision;
use self::migration::{Migration, NextCommit};
pub(in crate::peer) use self::rounds::Piece;
pub(super) use self::rounds::Rounds;
use self::rounds::{Received, Results, round_of};
use self::snapshot_writer::SnapshotWriter;
use self::step_queue::StepQueue;
pub(super) use self::step_queue::{Close, StepMessage};
use super::Out;
use super::context::Context;
use crate::action::{PeerAction, PeerEvent, Task};

/// Retry intervals without a piece of a committed result after which it counts as lost.
const LOST: u32 = 8;

/// Everything that brings the weights of the hosted stages forward.
#[derive(Debug, Default)]
pub(super) struct Weights {
    pub(super) rounds: Rounds,
    pub(super) steps: StepQueue,
    pub(super) catch_up: CatchUp,
    pub(super) migration: Migration,
    pub(super) snapshots: SnapshotWriter,
}

/// The next queued message that can be handled.
pub(super) enum NextStep {
    /// None: a step, weights or a result are missing.
    None,
    /// Begin a round.
    Reduce(Close),
    /// Apply a commit, whose results are those of these rounds.
    Apply(CommitRecord, Vec<RoundId>),
    /// The commit of this step names another result.
    Differs(Step),
}

/// The weights that moved forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Started {
    /// Those of the hosted stages.
    Own,
    /// Those of the stages that this peer fetches in a migration.
    Migration,
}

/// Reports.
impl Weights {
    /// Whether the weights are not those of the current version yet.
    pub(super) fn is_newcomer(&self) -> bool {
        self.catch_up.is_newcomer()
    }

    /// Whether the engine holds the weights of this peer's version.
    pub(super) fn are_here(&self, ctx: &Context<'_>) -> bool {
        ctx.is_member() && self.catch_up.has_weights()
    }

    /// Reports the version of a newcomer, or of a migration, to the coordinator. A newcomer first handles
    /// its queued messages, since those are about steps that are over.
    pub(super) fn report_ready(&self, ctx: &Context<'_>, out: &mut Out) {
        let (version, view) = (ctx.version(), ctx.view.number);
        let ready = PeerAction::ToCoordinator(ToCoordinator::Ready { version, view });
        if self.is_newcomer() && self.are_here(ctx) && self.steps.is_empty() {
            out.push(ready.clone());
        }
        if self.migration.is_ready(version) {
            out.push(ready);
        }
    }

    /// Repeats reports without an answer, and gives up results of which no piece arrived for long.
    pub(super) fn retry(&mut self, ctx: &Context<'_>, out: &mut Out) {
        self.rounds.repeat_outcomes(ctx.links, out);
        self.give_up_lost_result(ctx, out);
        self.give_up_lost_migration_result(ctx, out);
        self.report_ready(ctx, out);
        self.catch_up.repeat_report(self.migration.undecided().is_some(), out);
    }
}

/// Rounds and commits.
impl Weights {
    /// Queues a message about a step that is not over.
    pub(super) fn queue(&mut self, ctx: &Context<'_>, message: StepMessage, out: &mut Out) {
        let is_old = !self.is_newcomer() && message.step() < ctx.version();
        if ctx.is_member() && !is_old && !self.steps.push(message) {
            self.fall_behind(ctx, out);
        }
    }

    /// A microbatch is about to be added to a step's sums: neither its rounds nor those that wait to begin may read
    /// them until they are mended.
    pub(super) fn sums_change(&mut self, ctx: &Context<'_>, key: ClaimKey) {
        for weights in ctx.config.manifest.groups_of(key.stage) {
            self.rounds.sums_change(key.step, weights);
            self.steps.sums_change(key.step, weights);
        }
    }

    /// Takes the next queued message that can be handled. `hosted` are the stages that this peer serves
    /// in the step of its version.
    pub(super) fn next_step(
        &mut self,
        ctx: &Context<'_>,
        hosted: &[Stage],
        out: &mut Out,
    ) -> NextStep {
        while self.are_here(ctx)
            && let Some(message) = self.steps.first()
        {
            let step = message.step();
            if step > ctx.version() {
                break;
            }
            if step < ctx.version() {
                self.steps.pop();
                continue;
            }
            let mut results = Vec::new();
            if let StepMessage::Commit(record) = message {
                if self.migration.holds_up(step) {
                    break;
                }
                match self.rounds.results(record, &ctx.groups_of(hosted), out) {
                    Results::Here(rounds) => results = rounds,
                    Results::Differ => return NextStep::Differs(step),
                    Results::Missing | Results::Assembling => {
                        self.steps.await_result(ctx.now, step);
                        break;
                    }
                }
            }
            return match self.steps.pop() {
                Some(StepMessage::Close(close)) => NextStep::Reduce(close),
                Some(StepMessage::Commit(record)) => NextStep::Apply(record, results),
                None => NextStep::None,
            };
        }
        NextStep::None
    }

    /// Has the engine apply a commit at the hosted stages, and ends its rounds.
    pub(super) fn apply(
        &mut self,
        ctx: &Context<'_>,
        record: &CommitRecord,
        hosted: &[Stage],
        rounds: &[RoundId],
        out: &mut Out,
    ) {
        apply_at(ctx, hosted, rounds, record, out);
        self.rounds.abort_all(out);
        self.rounds.forget_results_through(ctx, record.step, out);
    }

    /// Releases the early pieces of an applied commit, and waits for the engine's tasks.
    pub(super) fn await_applied(
        &mut self,
        ctx: &Context<'_>,
        record: CommitRecord,
        hosted: &[Stage],
        out: &mut Out,
    ) {
        self.rounds.drop_early_through(ctx.position.era, record.step, out);
        self.steps.begin_applying(record, hosted.iter().copied().collect(), out);
    }

    /// Listens to a round's result. Returns whether the round is new.
    pub(super) fn listen(
        &mut self,
        ctx: &Context<'_>,
        round: Round,
        is_hosted: bool,
        out: &mut Out,
    ) -> bool {
        let id = round.id;
        let needed = self.migration.needs(id.weights, id.step);
        let is_old = match needed {
            Some(needed) => !needed,
            None => self.catch_up.has_start() && id.step < ctx.version(),
        };
        (needed.is_some() || is_hosted) && !is_old && self.rounds.listen(ctx, round, out)
    }

    /// Takes a piece of a round. Returns whether it completed a received result.
    #[must_use]
    pub(super) fn receive_piece(&mut self, ctx: &Context<'_>, piece: Piece, out: &mut Out) -> bool {
        let round = round_of(&piece.1).map(|(round, _)| round);
        let useful = round.is_some_and(|round| self.is_useful(ctx, round));
        match self.rounds.receive(ctx, piece, useful, out) {
            Received::Done => false,
            Received::Result { weights, whole } => {
                self.steps.note_progress(ctx.now);
                self.migration.note_progress(ctx.now, weights);
                whole
            }
            Received::Overflow { weights } => {
                self.fall_behind_at(ctx, weights, out);
                false
            }
        }
    }

    /// Whether a piece of an unknown round may be useful. The rewind to a new era may arrive after its
    /// first pieces, and a newcomer without a start needs every step.
    fn is_useful(&self, ctx: &Context<'_>, round: RoundId) -> bool {
        if ctx.is_over() || round.era != ctx.position.era {
            return !ctx.is_over() && round.era > ctx.position.era;
        }
        if self.migration.needs(round.weights, round.step) == Some(true) {
            return true;
        }
        if self.is_newcomer() {
            !self.catch_up.has_start() || round.step >= ctx.version()
        } else {
            ctx.is_open(round.step)
        }
    }

    /// Starts over where no piece of a committed result arrived for long: the pieces are lost, and the
    /// members that had the result have applied and released it.
    fn give_up_lost_result(&mut self, ctx: &Context<'_>, out: &mut Out) {
        let step = ctx.version();
        let is_lost = self.steps.is_overdue(ctx.now, step, result_timeout(ctx));
        if is_lost && self.are_here(ctx) && !self.rounds.is_assembling() {
            let span = ctx.position.span.expect("a peer with weights hosts stages");
            out.push(PeerAction::Event(PeerEvent::ResultLost { step, span }));
            self.fall_behind(ctx, out);
        }
    }

    /// Starts over where departed members owe pieces of a committed result. A round that is not committed
    /// is mended without them.
    pub(super) fn remove_members(
        &mut self,
        ctx: &Context<'_>,
        departed: &BTreeSet<Member>,
        out: &mut Out,
    ) {
        let (steps, migration) = (&self.steps, &self.migration);
        let moving_to = |weights| ctx.is_moving_to_weights(weights);
        let for_migration = |step, weights| moving_to(weights) && migration.commits(step);
        let for_step = |step, weights| !moving_to(weights) && steps.commits(step);
        let is_behind = self.rounds.awaits(departed, for_step);
        if self.rounds.awaits(departed, for_migration) {
            self.restart_migration(out);
        }
        if is_behind {
            self.fall_behind(ctx, out);
        }
    }
}

/// Snapshots.
impl Weights {
    /// The coordinator names a snapshot to start from: for the `hosted` stages of a newcomer, or for a
    /// migration. Returns which of them started.
    pub(super) fn start_from(
        &mut self,
        ctx: &Context<'_>,
        hosted: Vec<Stage>,
        (version, view): (Step, u64),
        parts: Vec<SnapshotPart>,
        out: &mut Out,
    ) -> Option<Started> {
        if !self.is_newcomer() {
            return self.start_migration_from(ctx, (version, view), parts, out);
        }
        if !ctx.is_member() || !self.catch_up.is_newer(version, ctx.version()) {
            return None;
        }
        let hosted: BTreeSet<Stage> = hosted.into_iter().collect();
        let named: BTreeSet<Stage> = parts.iter().map(|part| part.stage).collect();
        let is_initial = ctx.config.manifest.is_initial(version);
        if !is_initial && named != hosted {
            self.fall_behind(ctx, out);
            return None;
        }
        if is_initial {
            out.extend(hosted.iter().map(|stage| restore_task(version, *stage)));
        }
        self.catch_up.begin(version, if is_initial { hosted } else { named });
        if let Some(before) = version.0.checked_sub(1).map(Step) {
            self.rounds.forget_results_through(ctx, before, out);
            self.rounds.drop_early_through(ctx.position.era, before, out);
        }
        out.extend(parts.into_iter().map(|part| PeerAction::Fetch { version, part }));
        Some(Started::Own)
    }

    /// The files of a stage are here, or cannot be fetched or read.
    pub(super) fn handle_fetched(
        &mut self,
        ctx: &Context<'_>,
        version: Step,
        stage: Stage,
        whole: bool,
        out: &mut Out,
    ) {
        let for_migration = self.migration.awaits(version, stage);
        if !for_migration && !self.catch_up.awaits(version, stage) {
            return;
        }
        if whole {
            out.push(restore_task(version, stage));
        } else if for_migration {
            self.restart_migration(out);
        } else {
            self.fall_behind(ctx, out);
        }
    }

    /// The engine holds a stage at a version. Returns which weights waited for that.
    pub(super) fn handle_restored(&mut self, version: Step, stage: Stage) -> Option<Started> {
        if self.migration.awaits(version, stage) {
            self.migration.note_restored(stage);
            return Some(Started::Migration);
        }
        self.catch_up.note_restored(version, stage).then_some(Started::Own)
    }

    /// The coordinator requests a snapshot of a stage at a version.
    pub(super) fn handle_snapshot_request(
        &mut self,
        ctx: &Context<'_>,
        (version, stage): (Step, Stage),
        is_hosted: bool,
        out: &mut Out,
    ) {
        if !is_hosted {
            // This peer left the stage meanwhile.
            return snapshot_writer::report(version, stage, Vec::new(), out);
        }
        let current = (ctx.version(), self.steps.len());
        if self.snapshots.request((version, stage), current, out) {
            self.write_snapshots(ctx, out);
        }
    }

    /// Gives the engine the snapshots of the current version.
    pub(super) fn write_snapshots(&mut self, ctx: &Context<'_>, out: &mut Out) {
        if self.are_here(ctx) {
            self.snapshots.write_due(ctx.version(), out);
        }
    }
}

/// Newcomers and rewinds.
impl Weights {
    /// Serves from the view on that lists this peer as serving. Returns whether it begins to.
    #[must_use]
    pub(super) fn serve_when_listed(&mut self, ctx: &Context<'_>) -> bool {
        let begins = ctx.is_member() && self.is_newcomer() && ctx.view.serves(ctx.me());
        if begins {
            self.catch_up.finish();
        }
        begins
    }

    /// This peer cannot follow from its weights: starts over from a newer snapshot, and ends a migration.
    fn fall_behind(&mut self, ctx: &Context<'_>, out: &mut Out) {
        self.migration.end();
        self.catch_up.report_behind(false, out);
        self.start_over(ctx.position.era, out);
    }

    /// This peer cannot follow the weights of a stage that it hosts or migrates to.
    fn fall_behind_at(&mut self, ctx: &Context<'_>, weights: WeightGroup, out: &mut Out) {
        if ctx.is_moving_to_weights(weights) {
            self.restart_migration(out);
        } else {
            self.fall_behind(ctx, out);
        }
    }

    /// Forgets the start, and waits for a newer snapshot.
    fn start_over(&mut self, era: Era, out: &mut Out) {
        self.stop_listening(out);
        self.rounds.drop_early_through(era, Step(u64::MAX), out);
        self.catch_up.forget_start();
    }

    /// A new coordinator names the start again, where that is not decided. Steps may be missing.
    pub(super) fn enter_term(&mut self, ctx: &Context<'_>, term: Term, out: &mut Out) {
        self.steps.drop_terms_before(term);
        if self.migration.undecided().is_some() {
            self.reset_migration(out);
        }
        if self.is_newcomer() {
            self.start_over(ctx.position.era, out);
        }
    }

    /// Repeats a report that the coordinator before may not have handed on.
    pub(super) fn repeat_behind(&self, out: &mut Out) {
        if self.migration.has_lost_weights() || self.catch_up.is_lost() {
            out.push(PeerAction::ToCoordinator(ToCoordinator::Stale { there: false }));
        }
    }

    /// Discards everything that waits to be applied.
    fn stop_listening(&mut self, out: &mut Out) {
        self.steps.clear();
        self.rounds.forget_results(out);
    }

    /// Discards the rounds and messages of earlier eras, for a rewind.
    pub(super) fn leave_era(&mut self, new: Era, out: &mut Out) {
        self.rounds.drop_early_before(new, out);
        self.stop_listening(out);
        self.rounds.abort_all(out);
    }

    /// Begins as a newcomer in a new era.
    pub(super) fn restart(&mut self) {
        self.steps.forget_applying();
        self.snapshots = SnapshotWriter::default();
        self.catch_up.restart();
    }

    /// Discards everything, at the end of this peer's part in the run.
    pub(super) fn end(&mut self, out: &mut Out) {
        self.rounds.drop_early_through(Era(u32::MAX), Step(u64::MAX), out);
        self.migration.end();
        self.stop_listening(out);
        self.rounds.abort_all(out);
    }
}

/// Migrations.
impl Weights {
    /// Ends the migration without a change. Returns the stages of which the engine may hold weights for it.
    #[must_use]
    pub(super) fn cancel_migration(&mut self, out: &mut Out) -> Vec<Stage> {
        let Some(ended) = self.migration.end() else { return Vec::new() };
        self.rounds.forget_results_of(&ended.weights, Step(u64::MAX), out);
        self.rounds.drop_early_of(&ended.weights, out);
        if ended.has_start { ended.stages } else { Vec::new() }
    }

    /// The coordinator names the snapshot of the stages that the migration fetches.
    fn start_migration_from(
        &mut self,
        ctx: &Context<'_>,
        (version, view): (Step, u64),
        parts: Vec<SnapshotPart>,
        out: &mut Out,
    ) -> Option<Started> {
        if !self.migration.accepts_snapshot(version, view) {
            return None;
        }
        let is_initial = ctx.config.manifest.is_initial(version);
        let Some((stages, weights)) = self.migration.start_from(version, &parts, is_initial) else {
            self.restart_migration(out);
            return None;
        };
        if is_initial {
            out.extend(stages.into_iter().map(|stage| restore_task(version, stage)));
        } else if let Some(before) = version.0.checked_sub(1).map(Step) {
            self.rounds.forget_results_of(&weights, before, out);
        }
        out.extend(parts.into_iter().map(|part| PeerAction::Fetch { version, part }));
        Some(Started::Migration)
    }

    /// Keeps a commit for the weights that the migration fetches, if it may be useful. Returns whether it does.
    #[must_use]
    pub(super) fn queue_migration_commit(&mut self, record: &CommitRecord, out: &mut Out) -> bool {
        if !self.migration.accepts_commit(record) {
            return false;
        }
        let fits = self.migration.push_commit(record);
        if !fits {
            self.restart_migration(out);
        }
        fits
    }

    /// Applies commits to the weights that the migration fetches, as far as their results are here. Returns whether no
    /// commit is left that could be applied.
    #[must_use]
    pub(super) fn catch_up_migration(&mut self, ctx: &Context<'_>, out: &mut Out) -> bool {
        loop {
            let (stages, weights, record) = match self.migration.next_commit() {
                NextCommit::None => return true,
                NextCommit::AfterGap => {
                    // A commit was lost, or it is one from before this start: the received results may fit
                    // the next snapshot.
                    self.migration.forget_start();
                    self.catch_up.report_behind(true, out);
                    return false;
                }
                NextCommit::Unusable => {
                    self.restart_migration(out);
                    return false;
                }
                NextCommit::Ready { stages, weights, record } => (stages, weights, record),
            };
            let rounds = match self.rounds.results(&record, &weights, out) {
                Results::Here(rounds) => rounds,
                Results::Missing => {
                    self.migration.await_result(ctx.now, record.step);
                    return false;
                }
                Results::Assembling => {
                    self.migration.note_result();
                    return false;
                }
                Results::Differ => {
                    self.restart_migration(out);
                    return false;
                }
            };
            self.migration.note_result();
            apply_at(ctx, &stages, &rounds, &record, out);
            self.migration.note_applied();
            self.rounds.forget_results_of(&weights, record.step, out);
        }
    }

    /// The weights that the migration fetched are useless: asks for a newer snapshot. Once the first step is set,
    /// these stages are this peer's own, and it begins as a newcomer.
    fn restart_migration(&mut self, out: &mut Out) {
        if self.migration.target().is_some() {
            let is_undecided = self.migration.undecided().is_some();
            self.reset_migration(out);
            self.catch_up.report_behind(is_undecided, out);
        }
    }

    /// Forgets the weights that the migration fetched, and waits for a newer snapshot.
    fn reset_migration(&mut self, out: &mut Out) {
        if let Some(weights) = self.migration.restart() {
            self.rounds.forget_results_of(&weights, Step(u64::MAX), out);
            self.rounds.drop_early_of(&weights, out);
        }
    }

    /// Restarts the migration where no piece of a committed result arrived for long.
    fn give_up_lost_migration_result(&mut self, ctx: &Context<'_>, out: &mut Out) {
        let overdue = self.migration.overdue_result(ctx.now, result_timeout(ctx));
        if let Some((step, span)) = overdue {
            out.push(PeerAction::Event(PeerEvent::ResultLost { step, span }));
            self.restart_migration(out);
        }
    }
}

/// The time without a piece of a committed result after which that counts as lost.
fn result_timeout(ctx: &Context<'_>) -> Duration {
    ctx.retry() * LOST
}

fn restore_task(version: Step, stage: Stage) -> PeerAction {
    PeerAction::Compute(Task::Restore { version, stage })
}

/// Has the engine apply a commit at these stages, each with the results of its weights among these rounds.
fn apply_at(
    ctx: &Context<'_>,
    stages: &[Stage],
    rounds: &[RoundId],
    record: &CommitRecord,
    out: &mut Out,
) {
    let (step, gradient_norm, loss) = (record.step, record.gradient_norm, record.loss);
    for stage in stages.iter().copied() {
        let groups = ctx.groups_of(&[stage]);
        let is_its = |round: &&RoundId| groups.contains(&round.weights);
        let rounds = rounds.iter().filter(is_its).copied().collect();
        let task = Task::Apply { step, stage, rounds, gradient_norm, loss };
        out.push(PeerAction::Compute(task));
    }
}
