//! The engine's passes: what it gets next, and what follows from their results.

use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Stage, Step};
use shoal_protocol::message::{FixedLoss, InputId, Recalled};
use shoal_protocol::units::Moment;

use super::Pipeline;
use super::job::{Job, Pass};
use super::jobs::Jobs;
use super::stage::PassTimes;
use super::stages::HostedStages;
use crate::action::{DeviceIndex, Payload, PeerAction, PeerEvent, Task};
use crate::peer::Out;
use crate::peer::context::Context;

/// The engine's passes and their results.
impl Pipeline {
    /// Gives the engine the next passes if it has too few. At the last stage the backward pass comes along
    /// with the forward pass that it follows.
    pub(in crate::peer) fn dispatch(&mut self, ctx: &Context<'_>, out: &mut Out) {
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
    pub(in crate::peer) fn wait_ends_at(&self) -> Option<Moment> {
        self.queue.visits.until()
    }

    /// Widens a stage's window by one when the engine idles and the window keeps work out: over a slow
    /// link more work must be in flight. Widens it by half where the engine waits for loads: more
    /// microbatches in a visit hide longer ones.
    pub(in crate::peer) fn widen_when_idle(&mut self, ctx: &Context<'_>, out: &mut Out) {
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
    pub(super) fn queue_passes(&mut self, ctx: &Context<'_>, key: ClaimKey) {
        let job = self.jobs.existing(key);
        // The first pass waits in the queue for its weights, and one on the way of a virtual worker outside of it.
        let is_next = !job.exchanges.have_begun() || ctx.has_weights(key, job.exchanges.next());
        self.queue.queue(key, job, is_next, ctx.is_held_out(key));
    }

    /// A version of the weights arrived: queues the passes on the way of virtual workers that waited for it.
    pub(in crate::peer) fn join_newest(&mut self, ctx: &Context<'_>) {
        for key in self.jobs.keys_through(ctx.version()) {
            self.queue_passes(ctx, key);
        }
    }

    /// Does the next possible thing for a job: queues its passes, or ends its evaluation.
    pub(super) fn advance(&mut self, ctx: &Context<'_>, key: ClaimKey, out: &mut Out) {
        self.queue_passes(ctx, key);
        if ctx.is_held_out(key) && self.jobs.existing(key).can_be_evaluated() {
            self.answer_senders(ctx, key, out);
            self.jobs.report(ctx.now, key, out);
        }
    }

    /// A forward pass ended.
    pub(in crate::peer) fn handle_forward(
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
    pub(in crate::peer) fn handle_backward(
        &mut self,
        ctx: &Context<'_>,
        key: ClaimKey,
        busy: Duration,
        (gradient, leaves): (Option<Payload>, bool),
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
            if leaves {
                self.queue.note_addition(key, device);
            }
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
        // The microbatch has all its exchanges.
        let exchanges = ctx.config.manifest.exchanges_of(key.microbatch);
        self.measure(ctx, key, busy * exchanges, measure);
        self.stages.notify_late_senders(out);
        ctx.now.since(began)
    }

    /// Adds a measured time of a microbatch to its stage's.
    fn measure(
        &mut self,
        ctx: &Context<'_>,
        key: ClaimKey,
        busy: Duration,
        measure: impl Fn(&mut PassTimes, Duration),
    ) {
        // A virtual worker makes many passes, and a held-out microbatch one.
        let manifest = &ctx.config.manifest;
        let is_usual = manifest.passes_of(key.microbatch) == manifest.passes();
        let count = self.stages.list().len();
        if let Some(hosted) = self.stages.get_mut(key.stage).filter(|_| is_usual) {
            // The other devices do as much meanwhile.
            let devices = ctx.config.devices_for(count);
            let each = busy / u32::try_from(devices).expect("a few devices");
            measure(&mut hosted.times, each);
            // The pass of released late work counts twice, since its length is no accident.
            if hosted.has_late(key) {
                measure(&mut hosted.times, each);
            }
        }
    }

    /// Releases the result of work that was dropped meanwhile, and the tensors that it used.
    fn drop_result(&mut self, key: ClaimKey, result: Option<Payload>, out: &mut Out) {
        out.extend(result.map(|payload| PeerAction::Release(payload.id)));
        for payload in self.queue.take_in_use(key) {
            self.jobs.release(payload, out);
        }
    }

    /// Releases the result of a pass that ends after the peer left the run.
    pub(in crate::peer) fn release_result(
        &mut self,
        key: ClaimKey,
        result: Option<Payload>,
        out: &mut Out,
    ) {
        if self.queue.is_dropping(key) {
            self.drop_result(key, result, out);
        } else {
            out.extend(result.map(|payload| PeerAction::Release(payload.id)));
        }
    }

    /// The engine has added a gradient to an accumulator, or refused it. Returns whether it computed products first.
    pub(in crate::peer) fn end_addition(&mut self, now: Moment, key: ClaimKey) -> bool {
        self.queue.note_added(now, key)
    }

    /// A gradient was added to its accumulator. `computed` is the time that this took, if products were left to it.
    pub(in crate::peer) fn handle_accumulated(
        &mut self,
        ctx: &Context<'_>,
        key: ClaimKey,
        (computed, broken): (Option<Duration>, bool),
        out: &mut Out,
    ) {
        // A peer that left the stage before this step dropped the job: that accumulator counts nowhere.
        if !self.jobs.contains(key) {
            return;
        }
        if let Some(busy) = computed {
            self.measure(ctx, key, busy, PassTimes::add_addition);
            self.jobs.existing(key).pass_times.backward += busy;
        }
        if broken {
            let job = self.jobs.existing(key);
            job.loss = Some(job.loss.unwrap_or_default().of_broken());
        }
        self.stages.existing(key.stage).count(key);
        out.push(PeerAction::Event(PeerEvent::Counted { key }));
        self.release_room(ctx, key, out);
        self.jobs.report(ctx.now, key, out);
    }

    /// The engine discarded dropped work.
    pub(in crate::peer) fn handle_discarded(
        &mut self,
        ctx: &Context<'_>,
        key: ClaimKey,
        out: &mut Out,
    ) {
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
