//! Progress: hands over between the weights and the microbatches, from step to step.

use shoal_protocol::ids::{Era, Stage, StageSpan, Step};
use shoal_protocol::message::{CommitRecord, Followed, RoundId, SnapshotPart};
use shoal_protocol::units::Moment;

use super::weights::{Close, Decision, NextStep, Piece, StepMessage};
use super::{Out, Peer, Status, context_of};
use crate::action::{Fault, PeerAction, PeerEvent, Task, TaskResult};

/// Rounds and commits.
impl Peer {
    /// A step is closed for some weights: takes the pieces of a round that came before this peer listened to it.
    pub(super) fn follow_close(&mut self, now: Moment, listens: Option<RoundId>, out: &mut Out) {
        if let Some(round) = listens {
            self.handle_early_pieces(now, round, out);
        }
        self.catch_up(now, out);
    }

    /// A step is committed.
    pub(super) fn handle_commit(&mut self, now: Moment, record: CommitRecord, out: &mut Out) {
        let ctx = context_of!(self, now);
        if ctx.target.is_some() {
            let message = StepMessage::Commit(record.clone());
            if self.weights.queue(&ctx, Followed::Destination, message, out) {
                self.catch_up_migration(now, out);
            }
        }
        let message = StepMessage::Commit(record);
        self.weights.queue(&context_of!(self, now), Followed::Own, message, out);
        self.catch_up(now, out);
    }

    /// Handles the queued closes and commits, as far as their steps are reached and their results here.
    fn catch_up(&mut self, now: Moment, out: &mut Out) {
        loop {
            let ctx = context_of!(self, now);
            let hosted = self.pipeline.hosted_at(&ctx, ctx.version());
            match self.weights.next_step(&ctx, &hosted, out) {
                NextStep::None => return,
                NextStep::Reduce(close) => self.reduce(now, close, out),
                NextStep::Apply(record, rounds) => self.apply(now, record, &hosted, &rounds, out),
                NextStep::Differs(step) => {
                    return self.leave(now, Fault::ResultDiffers { step }, out);
                }
            }
        }
    }

    /// Begins this peer's part in a round.
    fn reduce(&mut self, now: Moment, close: Close, out: &mut Out) {
        let id = close.round.id;
        let stages = self.config.manifest.stages_of(id.weights);
        let Some(own) = self.pipeline.counted(stages, id.step) else { return };
        // The round reads this peer's own sums.
        self.audits.give_up(out);
        let ctx = context_of!(self, now);
        match self.weights.begin_round(&ctx, close, &own, out) {
            Ok(true) => self.handle_early_pieces(now, id, out),
            Ok(false) => {}
            Err(fault) => self.leave(now, fault, out),
        }
    }

    /// Handles the pieces that came before the close of their round.
    fn handle_early_pieces(&mut self, now: Moment, round: RoundId, out: &mut Out) {
        for piece in self.weights.take_early(round) {
            self.handle_round_piece(now, piece, out);
        }
    }

    /// A piece of a round arrived.
    pub(super) fn handle_round_piece(&mut self, now: Moment, piece: Piece, out: &mut Out) {
        if self.weights.receive_piece(&context_of!(self, now), piece, out) {
            self.follow_result(now, out);
        }
    }

    /// A task of a round ended.
    pub(super) fn handle_round_task(&mut self, now: Moment, result: TaskResult, out: &mut Out) {
        if self.weights.handle_round_task(result, &self.links, out) {
            self.follow_result(now, out);
        }
    }

    /// A received result is whole or assembled: goes on with the commits that wait for it.
    fn follow_result(&mut self, now: Moment, out: &mut Out) {
        self.catch_up_migration(now, out);
        self.catch_up(now, out);
        self.weights.report_ready(&context_of!(self, now), out);
    }

    /// Applies a commit at the hosted stages, whose results are those of these rounds.
    fn apply(
        &mut self,
        now: Moment,
        record: CommitRecord,
        hosted: &[Stage],
        rounds: &[RoundId],
        out: &mut Out,
    ) {
        let (step, next) = (record.step, record.step.next());
        self.audits.abandon_all(out);
        let ctx = context_of!(self, now);
        self.weights.apply(&ctx, &record, hosted, rounds, out);
        self.pipeline.drop_through(&ctx, step, out);
        self.weights.await_applied(&ctx, record, hosted, out);
        self.position.version = next;
        self.change_over(now, out);
        self.pipeline.forget_before(next);
        let ctx = context_of!(self, now);
        self.weights.write_snapshots(&ctx, out);
        self.pipeline.join_newest(&ctx);
        self.pipeline.admit_all(&ctx, out);
        self.weights.report_ready(&ctx, out);
        self.leave_when_drained(now, out);
    }
}

/// Newcomers and rewinds.
impl Peer {
    /// The coordinator names the snapshot to start from.
    pub(super) fn handle_snapshot(
        &mut self,
        now: Moment,
        (version, view): (Step, u64),
        parts: Vec<SnapshotPart>,
        out: &mut Out,
    ) {
        let hosted = self.pipeline.hosted();
        let start = (version, view);
        let started = self.weights.start_from(&context_of!(self, now), hosted, start, parts, out);
        if started == Some(Followed::Own) {
            self.position.version = version;
        }
        self.follow(now, started, out);
    }

    /// The engine holds a stage at a version.
    pub(super) fn handle_restored(
        &mut self,
        now: Moment,
        version: Step,
        stage: Stage,
        out: &mut Out,
    ) {
        let restored = self.weights.handle_restored(version, stage);
        self.follow(now, restored, out);
    }

    /// Goes on with weights that have a start, or of which the engine holds more.
    fn follow(&mut self, now: Moment, of: Option<Followed>, out: &mut Out) {
        match of {
            None => {}
            Some(Followed::Destination) => self.catch_up_migration(now, out),
            Some(Followed::Own) => {
                self.weights.write_snapshots(&context_of!(self, now), out);
                self.catch_up(now, out);
                self.weights.report_ready(&context_of!(self, now), out);
            }
        }
    }

    /// Serves from the view on that lists this peer as serving.
    pub(super) fn serve_when_listed(&mut self, now: Moment, out: &mut Out) {
        if self.weights.serve_when_listed(&context_of!(self, now)) {
            let version = self.position.version;
            out.push(PeerAction::Event(PeerEvent::Serving { version }));
            self.pipeline.notify_early_senders(out);
        }
    }

    /// The run goes back to a version: discards everything of later steps. The engine's tasks end before
    /// it restores other weights, and their results do not count.
    pub(super) fn rewind(
        &mut self,
        now: Moment,
        era: Era,
        version: Step,
        span: StageSpan,
        out: &mut Out,
    ) {
        let known = self.position.era;
        self.position.era = era.max(known);
        if self.status != Status::Member || era <= known {
            return;
        }
        self.audits.abandon_all(out);
        self.pipeline.drop_through(&context_of!(self, now), Step(u64::MAX), out);
        self.cancel_migration(out);
        self.weights.leave_era(era, out);
        self.pipeline.restart();
        self.position.span = Some(span);
        self.pipeline.host(&context_of!(self, now), span, out);
        self.position.version = version;
        self.weights.restart();
        out.push(PeerAction::Event(PeerEvent::Rewound { era, version }));
    }
}

/// Migrations.
impl Peer {
    /// Follows the membership's assignment of this peer to another span.
    pub(super) fn follow_assignment(&mut self, now: Moment, out: &mut Out) {
        match self.weights.follow_decision(&context_of!(self, now)) {
            Decision::Pending => {}
            Decision::From(step, to) => {
                self.pipeline.leave_from(&context_of!(self, now), step, to, out);
                self.open_target(now, out);
            }
            Decision::Cancelled(to) => {
                self.cancel_migration(out);
                out.push(PeerAction::Event(PeerEvent::MoveCancelled { to }));
            }
        }
        if self.is_serving() {
            self.weights.begin_migration(&context_of!(self, now), out);
        }
    }

    /// Accepts work of the fetched stages as soon as their weights are as new as the served ones.
    fn open_target(&mut self, now: Moment, out: &mut Out) {
        let mut stages = self.weights.stages_to_open(self.position.version);
        stages.retain(|stage| !self.pipeline.hosts(*stage));
        if !stages.is_empty() {
            self.pipeline.open_stages(&context_of!(self, now), &stages, out);
        }
        self.change_over(now, out);
    }

    /// Changes to the other span as soon as its first step is reached and all of its stages are open.
    fn change_over(&mut self, now: Moment, out: &mut Out) {
        let at = self.position.version;
        let is_open = |stage| self.pipeline.hosts(stage);
        let own = self.position.span.unwrap_or(StageSpan::none());
        let Some(to) = self.weights.change_over(at, own, is_open, out) else { return };
        let from = self.position.span.replace(to).expect("members host stages");
        self.pipeline.host(&context_of!(self, now), to, out);
        out.push(PeerAction::Event(PeerEvent::Moved { from, to, at }));
        // The membership may assign the next stage already.
        self.follow_assignment(now, out);
    }

    /// Brings the weights of the fetched stages forward, and opens these when they are new enough.
    fn catch_up_migration(&mut self, now: Moment, out: &mut Out) {
        if self.weights.catch_up_migration(&context_of!(self, now), out) {
            self.open_target(now, out);
            self.weights.report_ready(&context_of!(self, now), out);
        }
    }

    /// Ends the migration without a change, and leaves the fetched stages unless they are open.
    fn cancel_migration(&mut self, out: &mut Out) {
        for stage in self.weights.cancel_migration(out) {
            if !self.pipeline.hosts(stage) {
                out.push(PeerAction::Compute(Task::Leave { stage }));
            }
        }
    }
}
