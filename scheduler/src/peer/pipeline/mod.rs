//! The pipeline at one peer: the microbatches at its hosted stages.
//!
//! A microbatch at one stage is a [`job::Job`]. This file has the hosted stages, the engine's passes and
//! the end of jobs. `upstream` handles offers and claims, `downstream` delivers activations to the next stage.

mod claims;
mod compute_queue;
mod delivery;
mod downstream;
mod exchanges;
mod job;
mod jobs;
mod next_stage;
mod residency;
mod stage;
mod stages;
mod upstream;
mod visits;
mod work_request;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Member, Stage, StageSpan, Step};
use shoal_protocol::message::{FixedLoss, InputId, PeerMessage, Recalled};
use shoal_protocol::units::Moment;

use self::claims::ReleasedClaims;
use self::compute_queue::{ComputeQueue, Dropped};
use self::job::{Job, Pass};
use self::jobs::Jobs;
use self::next_stage::NextStage;
pub(super) use self::stage::Counted;
use self::stage::PassTimes;
use self::stages::HostedStages;
use self::work_request::WorkRequests;
use super::Out;
use super::context::Context;
use crate::action::{DeviceIndex, Payload, PeerAction, PeerEvent, PeerLoad, Task};

/// The hosted stages and the microbatches at them.
#[derive(Debug)]
pub(super) struct Pipeline {
    pub(super) stages: HostedStages,
    pub(super) jobs: Jobs,
    queue: ComputeQueue,
    pub(super) released: ReleasedClaims,
    pub(super) requests: WorkRequests,
    /// The next stage of each hosted stage.
    next: BTreeMap<Stage, NextStage>,
    /// Senders of offers that came before this peer served their stage.
    early_senders: BTreeSet<(Stage, Member)>,
}

/// Hosted stages.
impl Pipeline {
    /// A pipeline without stages, of a peer with so many devices.
    pub(super) fn new(devices: usize) -> Self {
        Self {
            stages: HostedStages::default(),
            jobs: Jobs::default(),
            queue: ComputeQueue::new(devices),
            released: ReleasedClaims::default(),
            requests: WorkRequests::default(),
            next: BTreeMap::new(),
            early_senders: BTreeSet::new(),
        }
    }

    /// Whether this peer serves a stage in a step.
    pub(super) fn hosts_at(&self, ctx: &Context<'_>, stage: Stage, step: Step) -> bool {
        ctx.span_at(step).is_some_and(|span| span.contains(stage)) && self.stages.contains(stage)
    }

    /// The stages that this peer serves in a step.
    pub(super) fn hosted_at(&self, ctx: &Context<'_>, step: Step) -> Vec<Stage> {
        let hosted = self.stages.list().into_iter();
        hosted.filter(|stage| self.hosts_at(ctx, *stage, step)).collect()
    }

    /// Hosts the stages of a span and leaves all others.
    pub(super) fn host(&mut self, ctx: &Context<'_>, span: StageSpan, out: &mut Out) {
        for stage in self.stages.remove_outside(span) {
            self.next.remove(&stage);
            out.push(PeerAction::Compute(Task::Leave { stage }));
        }
        let count = span.stages().count();
        for stage in span.stages() {
            if self.stages.add(ctx.config, stage, count) {
                self.next.insert(stage, NextStage::new(ctx.config, stage));
            }
        }
        self.stages.set_span(ctx.config, span);
        self.update_routes(ctx);
    }

    /// Hosts these stages beside the others.
    pub(super) fn open_stages(&mut self, ctx: &Context<'_>, stages: &[Stage], out: &mut Out) {
        let hosted = self.stages.list();
        let count = hosted.len() + stages.len();
        for stage in hosted.iter().chain(stages) {
            self.stages.add(ctx.config, *stage, count);
        }
        for stage in stages {
            self.next.insert(*stage, NextStage::new(ctx.config, *stage));
        }
        self.update_routes(ctx);
        self.notify_early_senders(out);
    }

    /// Tells the senders of early offers that this peer serves their stage.
    pub(super) fn notify_early_senders(&mut self, out: &mut Out) {
        for (stage, to) in std::mem::take(&mut self.early_senders) {
            if self.stages.contains(stage) {
                out.push(PeerAction::Send { to, message: PeerMessage::Free { stage } });
            }
        }
    }

    /// The part of the load that the pipeline knows.
    pub(super) fn load(&self) -> PeerLoad {
        PeerLoad {
            in_flight: self.jobs.in_flight(),
            logged: self.jobs.logged(),
            ..self.stages.load()
        }
    }

    /// Forgets everything about work, for a rewind. All jobs are dropped before.
    pub(super) fn restart(&mut self) {
        for key in self.queue.take_rooms() {
            self.stages.vacate(key);
        }
        self.stages.forget_work();
        self.next.values_mut().for_each(NextStage::clear);
        self.released.clear();
        self.early_senders.clear();
        self.requests.forget();
    }
}

/// The engine's passes and their results.
impl Pipeline {
    /// Gives the engine the next passes if it has too few. At the last stage the backward pass comes along
    /// with the forward pass that it follows.
    pub(super) fn dispatch(&mut self, ctx: &Context<'_>, out: &mut Out) {
        while let Some((pass, device)) = self.next_pass(ctx, out) {
            match pass {
                Pass::Backward(key) => {
                    assert!(self.jobs.existing(key).can_run_backward(), "queued passes can run");
                    self.start_backward(key, device, out);
                }
                Pass::Forward(key) => {
                    let held_out = ctx.is_held_out(key);
                    let job = self.jobs.existing(key);
                    job.device = Some(device);
                    let (exchange, activation) = job.exchanges.start_forward();
                    let activation = activation.map(|payload| payload.id);
                    let turns = job.exchanges.turn_round() && job.grant().is_some() && !held_out;
                    let task = Task::Forward { key, exchange, activation, held_out, device };
                    out.push(PeerAction::Compute(task));
                    if turns {
                        self.queue.note_extra_pass(device);
                        self.start_backward(key, device, out);
                    }
                }
            }
            let (Pass::Forward(key) | Pass::Backward(key)) = pass;
            self.queue_passes(ctx, key);
        }
    }

    fn start_backward(&mut self, key: ClaimKey, device: DeviceIndex, out: &mut Out) {
        let job = self.jobs.existing(key);
        assert!(job.grant().is_some(), "no backward pass without its claim");
        let (exchange, gradient) = job.exchanges.start_backward();
        let gradient = gradient.map(|payload| payload.id);
        out.push(PeerAction::Compute(Task::Backward { key, exchange, gradient, device }));
    }

    /// The next pass for a device. Where stages are swapped and a visit begins with it, the stage of the next
    /// visit is loaded meanwhile.
    fn next_pass(&mut self, ctx: &Context<'_>, out: &mut Out) -> Option<(Pass, DeviceIndex)> {
        if !self.stages.are_swapped(ctx.config) {
            self.queue.visits.rest();
            return self.queue.next(ctx.newest_runnable(), &self.jobs);
        }
        let (stages, jobs) = (&self.stages, &self.jobs);
        let comes = |step, stage| more_comes(ctx, stages, jobs, step, stage);
        let (pass, visit) = self.queue.next_by_visit(ctx.now, ctx.newest_runnable(), comes)?;
        let hosted = self.stages.list().into_iter().collect();
        if let Some(next) = visit.and_then(|visit| visit.next(&hosted)) {
            let (Pass::Forward(key) | Pass::Backward(key)) = pass;
            let sums = (!next.upwards).then_some(key.step);
            out.push(PeerAction::Compute(Task::FetchAhead { stage: next.stage, sums }));
        }
        Some((pass, DeviceIndex::default()))
    }

    /// The time at which the engine waits no longer for more work of the stage that it has in memory.
    pub(super) fn wait_ends_at(&self) -> Option<Moment> {
        self.queue.visits.until()
    }

    /// Widens a stage's window by one when the engine idles and the window keeps work out: over a slow
    /// link more work must be in flight. Widens it by half where the engine waits for loads: more
    /// microbatches in a visit hide longer ones.
    pub(super) fn widen_when_idle(&mut self, ctx: &Context<'_>, out: &mut Out) {
        let (idle, exposed) = (self.queue.take_idle(), self.queue.visits.take_exposed());
        if !idle && !exposed {
            return;
        }
        let (oldest, newest) = (ctx.version(), ctx.newest_runnable());
        for stage in self.stages.list() {
            let hosted = self.stages.existing(stage);
            let has_more = stage == Stage(0) || hosted.has_waiting();
            let mut runnable = (oldest.0..=newest.0).map(Step);
            let more = if exposed { hosted.window().div_ceil(2) } else { 1 };
            if has_more && runnable.any(|step| hosted.is_full(step)) && hosted.widen(more) {
                self.admit(ctx, stage, out);
            }
        }
    }

    /// Queues the passes of a job that can run.
    fn queue_passes(&mut self, ctx: &Context<'_>, key: ClaimKey) {
        let job = self.jobs.existing(key);
        // The first pass waits in the queue for its weights, and one on the way of a virtual worker outside of it.
        let is_next = !job.exchanges.have_begun() || ctx.has_weights(key, job.exchanges.next());
        self.queue.queue(key, job, is_next, ctx.is_held_out(key));
    }

    /// A version of the weights arrived: queues the passes on the way of virtual workers that waited for it.
    pub(super) fn join_newest(&mut self, ctx: &Context<'_>) {
        for key in self.jobs.keys_through(ctx.version()) {
            self.queue_passes(ctx, key);
        }
    }

    /// Does the next possible thing for a job: queues its passes, or ends its evaluation.
    fn advance(&mut self, ctx: &Context<'_>, key: ClaimKey, out: &mut Out) {
        self.queue_passes(ctx, key);
        if ctx.is_held_out(key) && self.jobs.existing(key).can_be_evaluated() {
            self.answer_senders(ctx, key, out);
            self.jobs.report(ctx.now, key, out);
        }
    }

    /// A forward pass ended.
    pub(super) fn handle_forward(
        &mut self,
        ctx: &Context<'_>,
        key: ClaimKey,
        busy: Duration,
        (output, loss): (Option<Payload>, Option<FixedLoss>),
        out: &mut Out,
    ) {
        self.queue.visits.end(Pass::Forward(key), busy);
        let took = self.end_pass(ctx, key, busy, PassTimes::add_forward, out);
        if self.queue.is_dropping(key) {
            return self.drop_result(key, output, out);
        }
        assert!(ctx.is_last(key) || loss.is_none(), "a loss comes from the last stage");
        assert_eq!(ctx.is_last(key), output.is_none(), "all other stages have an activation");
        let job = self.jobs.existing(key);
        job.pass_times.forward = job.pass_times.forward.max(took);
        job.ready_at = ctx.now;
        job.loss = job.loss.or(loss);
        let (_, input) = job.exchanges.end_forward();
        let of = InputId { key: key.downstream(), input: Recalled::Activation };
        let output = output.map(|output| ctx.sealed(of, output));
        job.handover.activation = input.and_then(|input| input.handed());
        job.handover.output = output.and_then(|output| output.handed());
        if let Some(input) = input {
            self.jobs.release(input, out);
        }
        if let Some(output) = output {
            self.jobs.log_output(key, output);
            self.jobs.existing(key).send_outputs(ctx.now, key, out);
        }
        self.advance(ctx, key, out);
    }

    /// A backward pass ended. Returns whether its gradient is about to be added to the accumulator.
    #[must_use]
    pub(super) fn handle_backward(
        &mut self,
        ctx: &Context<'_>,
        key: ClaimKey,
        busy: Duration,
        gradient: Option<Payload>,
        out: &mut Out,
    ) -> bool {
        self.queue.visits.end(Pass::Backward(key), busy);
        let took = self.end_pass(ctx, key, busy, PassTimes::add_backward, out);
        if self.queue.is_dropping(key) {
            self.drop_result(key, gradient, out);
            return false;
        }
        let job = self.jobs.existing(key);
        assert!(job.grant().is_some(), "nothing is added without its claim");
        assert_eq!(gradient.is_none(), key.stage == Stage(0), "the first stage has no upstream");
        job.pass_times.backward = job.pass_times.backward.max(took);
        job.ready_at = ctx.now;
        let (exchange, used) = job.exchanges.end_backward();
        let of = key.upstream().map(|key| InputId { key, input: Recalled::Gradient });
        let gradient = of.zip(gradient).map(|(of, gradient)| ctx.sealed(of, gradient));
        job.handover.gradient = used.and_then(|used| used.handed());
        job.handover.returned = gradient.and_then(|gradient| gradient.handed());
        let is_over = job.exchanges.are_over();
        if let Some(used) = used {
            self.jobs.release(used, out);
        }
        if is_over {
            assert!(
                !ctx.is_last(key) || self.jobs.existing(key).loss.is_some(),
                "it ends in a loss"
            );
            let device = self.jobs.device_of(key);
            out.push(PeerAction::Compute(Task::Accumulate { key, device }));
        }
        if let Some(gradient) = gradient {
            self.jobs.log_gradient(key, gradient);
            let job = self.jobs.existing(key);
            for to in &job.upstream.senders {
                job.answer_exchange(*to, key, exchange, out);
            }
            if is_over {
                job.upstream.answered = true;
                self.release_room(ctx, key, out);
            }
        }
        if !is_over {
            self.go_on(ctx, key, out);
        }
        is_over
    }

    /// Goes on with the next exchange of a job, unless nobody is left to send it.
    fn go_on(&mut self, ctx: &Context<'_>, key: ClaimKey, out: &mut Out) {
        if self.jobs.existing(key).is_deserted() {
            self.abandon(ctx, key, out);
            self.admit(ctx, key.stage, out);
        } else {
            self.queue_passes(ctx, key);
        }
    }

    /// Measures a pass. Returns the time since it could have begun.
    fn end_pass(
        &mut self,
        ctx: &Context<'_>,
        key: ClaimKey,
        busy: Duration,
        measure: impl Fn(&mut PassTimes, Duration),
        out: &mut Out,
    ) -> Duration {
        let job = self.jobs.get(key);
        let began = job.map_or(ctx.now, |job| self.available_at(ctx, key, job));
        let device = job.and_then(|job| job.device).or(self.queue.device_of_dropped(key));
        self.queue.note_end(ctx.now, device.expect("a pass has a device"));
        // A virtual worker makes many passes, and a held-out microbatch one.
        let manifest = &ctx.config.manifest;
        let is_usual = manifest.passes_of(key.microbatch) == manifest.passes();
        if let Some(hosted) = self.stages.get_mut(key.stage).filter(|_| is_usual) {
            // The other devices run as many passes meanwhile, and the microbatch has all its exchanges.
            let exchanges = manifest.exchanges_of(key.microbatch);
            let each = busy * exchanges / u32::from(ctx.config.candidate.devices.get());
            measure(&mut hosted.times, each);
            // The pass of released late work counts twice, since its length is no accident.
            if hosted.has_late(key) {
                measure(&mut hosted.times, each);
            }
        }
        self.stages.notify_late_senders(out);
        ctx.now.since(began)
    }

    /// Releases the result of work that was dropped meanwhile, and the tensors that it used.
    fn drop_result(&mut self, key: ClaimKey, result: Option<Payload>, out: &mut Out) {
        out.extend(result.map(|payload| PeerAction::Release(payload.id)));
        for payload in self.queue.take_in_use(key) {
            self.jobs.release(payload, out);
        }
    }

    /// Releases the result of a pass that ends after the peer left the run.
    pub(super) fn release_result(&mut self, key: ClaimKey, result: Option<Payload>, out: &mut Out) {
        if self.queue.is_dropping(key) {
            self.drop_result(key, result, out);
        } else {
            out.extend(result.map(|payload| PeerAction::Release(payload.id)));
        }
    }

    /// A gradient was added to its accumulator.
    pub(super) fn handle_accumulated(&mut self, ctx: &Context<'_>, key: ClaimKey, out: &mut Out) {
        // A peer that left the stage before this step dropped the job: that accumulator counts nowhere.
        if !self.jobs.contains(key) {
            return;
        }
        self.stages.existing(key.stage).count(key);
        out.push(PeerAction::Event(PeerEvent::Counted { key }));
        self.release_room(ctx, key, out);
        self.jobs.report(ctx.now, key, out);
    }

    /// The engine discarded dropped work.
    pub(super) fn handle_discarded(&mut self, ctx: &Context<'_>, key: ClaimKey, out: &mut Out) {
        let dropped = self.queue.discarded(key);
        // Of passes that found numbers out of range.
        for payload in dropped.in_use {
            self.jobs.release(payload, out);
        }
        if dropped.holds_room {
            self.stages.vacate(key);
        }
        if self.stages.contains(key.stage) {
            self.admit(ctx, key.stage, out);
        }
    }
}

/// Whether other peers may send more work of a hosted stage in a step: inputs for which it has room, or
/// gradients.
fn more_comes(
    ctx: &Context<'_>,
    stages: &HostedStages,
    jobs: &Jobs,
    step: Step,
    stage: Stage,
) -> bool {
    let Some(hosted) = stages.get(stage) else { return false };
    let from_below = stage.0.checked_sub(1).is_none_or(|below| !stages.contains(Stage(below)));
    let from_above = stage != ctx.config.manifest.last_stage() && !stages.contains(stage.next());
    let training = &ctx.config.manifest.training;
    let fewer = || jobs.at(step, stage).count() < training.microbatches as usize;
    let awaits = |job: &Job| {
        let exchanges = &job.exchanges;
        from_below && exchanges.awaits_input() || from_above && exchanges.awaits_answer()
    };
    jobs.at(step, stage).any(awaits) || from_below && hosted.room(step) > 0 && fewer()
}

/// The end of jobs, by an answer or without one.
impl Pipeline {
    /// Answers all senders of a job, and releases its room.
    fn answer_senders(&mut self, ctx: &Context<'_>, key: ClaimKey, out: &mut Out) {
        let job = self.jobs.existing(key);
        job.upstream.answered = true;
        for to in &job.upstream.senders {
            job.answer(*to, key, out);
        }
        self.release_room(ctx, key, out);
    }

    /// Releases a job's room, once.
    fn release_room(&mut self, ctx: &Context<'_>, key: ClaimKey, out: &mut Out) {
        let job = self.jobs.existing(key);
        if std::mem::take(&mut job.holds_room) {
            self.stages.existing(key.stage).vacate(key.step);
            self.admit(ctx, key.stage, out);
        }
    }

    /// Drops the work of every step up to this one, and its output logs.
    pub(super) fn drop_through(&mut self, ctx: &Context<'_>, step: Step, out: &mut Out) {
        for key in self.jobs.keys_through(step) {
            self.drop_job(ctx, key, out);
        }
    }

    /// Drops a job. The engine's part of it is discarded later.
    fn drop_job(&mut self, ctx: &Context<'_>, key: ClaimKey, out: &mut Out) {
        self.queue.remove(key);
        if let Some(next) = self.next.get_mut(&key.stage) {
            next.unblock(key);
        }
        let removed = self.jobs.remove(key, out);
        let hosted = self.stages.existing(key.stage);
        let running = removed.running;
        if removed.holds_room && running == 0 {
            hosted.vacate(key.step);
        }
        if key.step >= ctx.version() {
            hosted.note_refused(key);
        }
        if running > 0 || removed.has_graph && !ctx.is_held_out(key) {
            let holds_room = removed.holds_room && running > 0;
            let device = removed.device.expect("its forward pass has begun");
            let dropped = Dropped { in_use: removed.in_use, running, holds_room, device };
            self.queue.drop_later(key, dropped);
            out.push(PeerAction::Compute(Task::Discard { key, device }));
        }
    }

    /// Drops work that cannot go on here: withdraws the offer of its activation and releases its claim.
    fn abandon(&mut self, ctx: &Context<'_>, key: ClaimKey, out: &mut Out) {
        self.withdraw(key, out);
        if let Some(grant) = self.jobs.existing(key).grant() {
            self.released.release(key, grant, out);
        }
        self.drop_job(ctx, key, out);
    }

    /// Hands the work of a step and later ones at stages outside a span to other replicas, since this peer does not
    /// host them by then.
    pub(super) fn leave_from(
        &mut self,
        ctx: &Context<'_>,
        step: Step,
        span: StageSpan,
        out: &mut Out,
    ) {
        for stage in self.stages.list().into_iter().filter(|stage| !span.contains(*stage)) {
            let late = self.stages.existing(stage).take_offers_from(step);
            for ((step, microbatch), offer) in late {
                self.send_busy(offer.from, ClaimKey { step, stage, microbatch }, out);
            }
        }
        let is_left = |key: &&ClaimKey| key.step >= step && !span.contains(key.stage);
        let keys: Vec<ClaimKey> = self.jobs.keys().filter(is_left).copied().collect();
        for key in keys {
            self.send_busy_to_senders(key, out);
            self.abandon(ctx, key, out);
            self.admit(ctx, key.stage, out);
        }
    }

    /// Members departed: delivers to other replicas, and drops work that only they would feed.
    pub(super) fn remove_members(
        &mut self,
        ctx: &Context<'_>,
        departed: &BTreeSet<Member>,
        out: &mut Out,
    ) {
        self.stages.remove_senders(departed);
        let keys: Vec<ClaimKey> = self.jobs.keys().copied().collect();
        for key in keys {
            let job = self.jobs.existing(key);
            job.upstream.senders.retain(|sender| !departed.contains(sender));
            if job.is_deserted() {
                self.abandon(ctx, key, out);
            }
        }
        self.reroute(ctx, departed, out);
        self.admit_all(ctx, out);
    }

    /// Whether the engine still has passes of dropped work.
    pub(super) fn is_dropping(&self, key: ClaimKey) -> bool {
        self.queue.is_dropping(key)
    }

    /// Whether there is work of the steps up to this one.
    pub(super) fn has_work_through(&self, step: Step) -> bool {
        self.jobs.keys().any(|key| key.step <= step)
    }

    /// Whether the engine began any work that is here.
    pub(super) fn has_begun_work(&self) -> bool {
        self.jobs.iter().any(|(_, job)| job.exchanges.have_begun())
    }
}
