//! The weights of the hosted stages, from step to step.
//!
//! Rounds, commits, snapshots and migrations bring them forward. A [`Follower`] has what waits for that: this peer's own
//! follows the hosted stages, and that of the `migration` the stages of another span. This file joins them with the
//! `rounds`, the `snapshot_writer` and the reports of a peer that falls `behind`. Where the microbatches are concerned
//! too, a method returns what follows to the peer.

mod applying;
mod behind;
mod closing;
mod follower;
mod migration;
mod rounds;
mod snapshot_writer;

use std::collections::BTreeSet;

use shoal_protocol::ids::{Era, Member, Stage, Step, Term};
use shoal_protocol::manifest::Verdict;
use shoal_protocol::message::{
    CommitRecord, Followed, RoundId, SnapshotPart, StoredFile, ToCoordinator,
};

use self::applying::Applying;
use self::behind::BehindReports;
use self::follower::Follower;
pub(super) use self::follower::{Close, StepMessage};
pub(super) use self::migration::Decision;
use self::migration::Migration;
pub(in crate::peer) use self::rounds::Piece;
use self::rounds::{Results, Rounds};
use self::snapshot_writer::SnapshotWriter;
use super::Out;
use super::context::Context;
use crate::action::{PeerAction, PeerEvent, Task};

/// Retry intervals without a piece of a committed result after which it counts as lost.
const LOST: u32 = 8;

/// All weights that a peer may follow.
const FOLLOWED: [Followed; 2] = [Followed::Own, Followed::Destination];

/// Everything that brings the weights of the hosted stages forward.
#[derive(Debug, Default)]
pub(super) struct Weights {
    rounds: Rounds,
    /// Follows the hosted stages.
    own: Follower,
    /// Whether the peer serves: before, it is a newcomer.
    serves: bool,
    migration: Migration,
    behind: BehindReports,
    applying: Applying,
    snapshots: SnapshotWriter,
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

/// Reports.
impl Weights {
    /// Whether the weights are not those of the current version yet.
    pub(super) fn is_newcomer(&self) -> bool {
        !self.serves
    }

    /// Whether the engine holds the weights of this peer's version.
    pub(super) fn are_here(&self, ctx: &Context<'_>) -> bool {
        ctx.is_member() && self.own.version().is_some()
    }

    /// Reports the version of a newcomer, or of a migration, to the coordinator. A newcomer first handles
    /// its queued messages, since those are about steps that are over.
    pub(super) fn report_ready(&self, ctx: &Context<'_>, out: &mut Out) {
        let (version, view) = (ctx.version(), ctx.view.number);
        let ready = PeerAction::ToCoordinator(ToCoordinator::Ready { version, view });
        if self.is_newcomer() && self.are_here(ctx) && self.own.waiting() == 0 {
            out.push(ready.clone());
        }
        if self.migration.is_ready(version) {
            out.push(ready);
        }
    }

    /// Repeats reports without an answer, and gives up results of which no piece arrived for long.
    pub(super) fn retry(&mut self, ctx: &Context<'_>, out: &mut Out) {
        self.rounds.repeat_outcomes(ctx.links, out);
        for of in FOLLOWED {
            self.give_up_lost_result(ctx, of, out);
        }
        self.report_ready(ctx, out);
        self.behind.repeat(self.still_followed(), out);
    }

    /// The weights of which this peer needs a newer snapshot where the ones that its migration fetched are useless: once
    /// the first step is set, the other stages are this peer's own, and it begins as a newcomer.
    fn still_followed(&self) -> Followed {
        match self.migration.undecided() {
            Some(_) => Followed::Destination,
            None => Followed::Own,
        }
    }

    fn follower(&self, of: Followed) -> Option<&Follower> {
        match of {
            Followed::Own => Some(&self.own),
            Followed::Destination => self.migration.follower(),
        }
    }

    fn follower_mut(&mut self, of: Followed) -> Option<&mut Follower> {
        match of {
            Followed::Own => Some(&mut self.own),
            Followed::Destination => self.migration.ongoing().map(|ongoing| &mut ongoing.follower),
        }
    }
}

/// Rounds and commits.
impl Weights {
    /// Queues a message about a step that is not over. Returns whether it does.
    pub(super) fn queue(
        &mut self,
        ctx: &Context<'_>,
        of: Followed,
        message: StepMessage,
        out: &mut Out,
    ) -> bool {
        let step = message.step();
        let is_useful = match of {
            Followed::Own => ctx.is_member() && (self.is_newcomer() || step >= ctx.version()),
            Followed::Destination => self.migration.accepts_commit(step),
        };
        let Some(follower) = self.follower_mut(of).filter(|_| is_useful) else { return false };
        let fits = follower.push(message);
        if !fits {
            self.fall_behind(ctx, of, out);
        }
        fits
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
            && let Some(message) = self.own.first()
        {
            let step = message.step();
            let is_commit = matches!(message, StepMessage::Commit(_));
            if step < ctx.version() {
                self.own.pop();
                continue;
            }
            if step > ctx.version() || is_commit && self.migration.holds_up(step) {
                break;
            }
            let groups = ctx.groups_of(hosted);
            let rounds = match self.own.results(ctx.now, &mut self.rounds, &groups, out) {
                Results::Here(rounds) => rounds,
                Results::Differ => return NextStep::Differs(step),
                Results::Missing | Results::Assembling => break,
            };
            return match self.own.pop() {
                Some(StepMessage::Close(close)) => NextStep::Reduce(close),
                Some(StepMessage::Commit(record)) => NextStep::Apply(record, rounds),
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
        self.own.note_applied();
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
        self.applying.begin(record, hosted.iter().copied().collect(), out);
    }

    /// The engine applied a commit at one stage.
    pub(super) fn handle_applied(
        &mut self,
        step: Step,
        stage: Stage,
        verdict: Verdict,
        out: &mut Out,
    ) {
        self.applying.end(step, stage, verdict, out);
    }

    /// Starts over where no piece of a committed result arrived for long: the pieces are lost, and the
    /// members that had the result have applied and released it.
    fn give_up_lost_result(&mut self, ctx: &Context<'_>, of: Followed, out: &mut Out) {
        let follower = self.follower(of).filter(|_| !self.rounds.is_assembling());
        let overdue = follower.and_then(|one| one.overdue_result(ctx.now, ctx.retry() * LOST));
        let span = match of {
            Followed::Own => ctx.position.span,
            Followed::Destination => self.migration.target().map(|target| target.span),
        };
        if let Some((step, span)) = overdue.zip(span) {
            out.push(PeerAction::Event(PeerEvent::ResultLost { step, span }));
            self.fall_behind(ctx, of, out);
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
        let moving_to = |weights| ctx.is_moving_to_weights(weights);
        let lacks = |of: &Followed| {
            self.follower(*of).is_some_and(|follower| {
                let is_its = |weights| moving_to(weights) == (*of == Followed::Destination);
                let waits = |step, weights| is_its(weights) && follower.commits(step);
                self.rounds.awaits(departed, waits)
            })
        };
        let behind: Vec<Followed> = FOLLOWED.into_iter().rev().filter(lacks).collect();
        for of in behind {
            self.fall_behind(ctx, of, out);
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
    ) -> Option<Followed> {
        let (of, accepts) = if self.is_newcomer() {
            (Followed::Own, ctx.is_member() && self.own.is_newer(version))
        } else {
            (Followed::Destination, self.migration.accepts_snapshot(version, view))
        };
        if !accepts {
            return None;
        }
        let ongoing = self.migration.ongoing().filter(|_| of == Followed::Destination);
        let stages = ongoing.map_or(hosted, |ongoing| ongoing.fetched.clone());
        let stages: BTreeSet<Stage> = stages.into_iter().collect();
        let named: BTreeSet<Stage> = parts.iter().map(|part| part.stage).collect();
        let is_initial = ctx.config.manifest.is_initial(version);
        if !is_initial && named != stages {
            self.fall_behind(ctx, of, out);
            return None;
        }
        if is_initial {
            out.extend(stages.iter().map(|stage| restore_task(version, *stage)));
        }
        self.follower_mut(of)?.begin(version, stages);
        if let Some(before) = version.0.checked_sub(1).map(Step) {
            self.forget_through(ctx, of, before, out);
        }
        out.extend(parts.into_iter().map(|part| PeerAction::Fetch { version, part }));
        Some(of)
    }

    /// Discards the results of steps that a snapshot contains.
    fn forget_through(&mut self, ctx: &Context<'_>, of: Followed, step: Step, out: &mut Out) {
        match of {
            Followed::Own => {
                self.rounds.forget_results_through(ctx, step, out);
                self.rounds.drop_early_through(ctx.position.era, step, out);
            }
            Followed::Destination => {
                if let Some(ongoing) = self.migration.ongoing() {
                    self.rounds.forget_results_of(&ongoing.weights, step, out);
                }
            }
        }
    }

    /// The weights that await a stage at a version.
    fn awaiting(&self, version: Step, stage: Stage) -> Option<Followed> {
        let awaits = |of: &Followed| {
            self.follower(*of).is_some_and(|follower| follower.awaits(version, stage))
        };
        FOLLOWED.into_iter().rfind(awaits)
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
        match self.awaiting(version, stage) {
            None => {}
            Some(_) if whole => out.push(restore_task(version, stage)),
            Some(of) => self.fall_behind(ctx, of, out),
        }
    }

    /// The engine holds a stage at a version. Returns which weights waited for that.
    pub(super) fn handle_restored(&mut self, version: Step, stage: Stage) -> Option<Followed> {
        // A newcomer may have fetched it twice.
        let again = self.is_newcomer() && self.own.starts_at(version);
        let of = self.awaiting(version, stage).or(again.then_some(Followed::Own))?;
        self.follower_mut(of)?.note_restored(stage);
        Some(of)
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
        let current = (ctx.version(), self.own.waiting());
        if self.snapshots.request((version, stage), current, out) {
            self.write_snapshots(ctx, out);
        }
    }

    /// The engine wrote a snapshot, or failed to.
    pub(super) fn handle_stored(
        &mut self,
        version: Step,
        stage: Stage,
        files: Option<Vec<StoredFile>>,
        out: &mut Out,
    ) {
        self.snapshots.finish(version, stage, files, out);
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
            self.serves = true;
            self.own.hold(ctx.version());
        }
        begins
    }

    /// The peer is admitted at a version. It holds the weights if they are the initial ones; any others
    /// come by a snapshot.
    pub(super) fn admit(&mut self, version: Step, is_initial: bool) {
        if is_initial {
            self.own.hold(version);
        }
    }

    /// This peer cannot follow the weights of some stages from those that it has: starts over from a newer snapshot.
    fn fall_behind(&mut self, ctx: &Context<'_>, of: Followed, out: &mut Out) {
        match of {
            Followed::Own => {
                self.migration.end();
                self.behind.report(Followed::Own, self.serves, out);
                self.start_over(ctx.position.era, out);
            }
            Followed::Destination if self.migration.target().is_some() => {
                self.reset_migration(out);
                self.behind.report(self.still_followed(), self.serves, out);
            }
            Followed::Destination => {}
        }
    }

    /// Forgets the start, and waits for a newer snapshot.
    fn start_over(&mut self, era: Era, out: &mut Out) {
        self.stop_listening(out);
        self.rounds.drop_early_through(era, Step(u64::MAX), out);
        if self.is_newcomer() {
            self.own.forget_start();
        }
    }

    /// A new coordinator names the start again, where that is not decided. Steps may be missing.
    pub(super) fn enter_term(&mut self, ctx: &Context<'_>, term: Term, out: &mut Out) {
        self.own.drop_terms_before(term);
        if self.migration.undecided().is_some() {
            self.reset_migration(out);
        }
        if self.is_newcomer() {
            self.start_over(ctx.position.era, out);
        }
    }

    /// Repeats a report that the coordinator before may not have handed on.
    pub(super) fn repeat_behind(&self, out: &mut Out) {
        if self.migration.has_lost_weights() || self.behind.is_lost() {
            out.push(PeerAction::ToCoordinator(ToCoordinator::Behind(Followed::Own)));
        }
    }

    /// Discards everything that waits to be applied.
    fn stop_listening(&mut self, out: &mut Out) {
        self.own.clear();
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
        self.applying.clear();
        self.snapshots = SnapshotWriter::default();
        self.serves = false;
        self.own.forget_start();
        self.behind.forget_loss();
    }

    /// Discards everything, at the end of this peer's part in the run.
    pub(super) fn end(&mut self, out: &mut Out) {
        self.rounds.drop_early_through(Era(u32::MAX), Step(u64::MAX), out);
        self.migration.end();
        self.stop_listening(out);
        self.rounds.abort_all(out);
    }
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
