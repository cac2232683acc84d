//! The pipeline at one peer: the microbatches at its hosted stages.
//!
//! A microbatch at one stage is a [`job::Job`]. This file has the hosted stages and the end of jobs, `passes` what the
//! engine does. `upstream` handles offers and claims, `downstream` delivers activations to the next stage.

mod claims;
mod compute_queue;
mod delivery;
mod downstream;
mod exchanges;
mod job;
mod jobs;
mod next_stage;
mod passes;
mod residency;
mod stage;
mod stages;
mod upstream;
mod visits;
mod work_request;

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{ClaimKey, Member, Stage, StageSpan, Step};
use shoal_protocol::message::{InputId, PeerMessage, Recalled};

use self::claims::ReleasedClaims;
use self::compute_queue::{ComputeQueue, Dropped};
use self::jobs::Jobs;
use self::next_stage::NextStage;
pub(super) use self::stage::Counted;
use self::stages::HostedStages;
use self::work_request::WorkRequests;
use super::Out;
use super::config::PeerConfig;
use super::context::Context;
use crate::action::{DeviceIndex, Payload, PeerAction, PeerLoad, Task};

/// The hosted stages and the microbatches at them.
#[derive(Debug)]
pub(super) struct Pipeline {
    stages: HostedStages,
    jobs: Jobs,
    queue: ComputeQueue,
    released: ReleasedClaims,
    requests: WorkRequests,
    /// The next stage of each hosted stage.
    next: BTreeMap<Stage, NextStage>,
    /// Senders of offers that came before this peer served their stage.
    early_senders: BTreeSet<(Stage, Member)>,
}

/// Hosted stages.
impl Pipeline {
    /// A pipeline without stages.
    pub(super) fn new(config: &PeerConfig) -> Self {
        Self {
            stages: HostedStages::default(),
            jobs: Jobs::default(),
            queue: ComputeQueue::new(config),
            released: ReleasedClaims::default(),
            requests: WorkRequests::default(),
            next: BTreeMap::new(),
            early_senders: BTreeSet::new(),
        }
    }

    /// Whether this peer hosts a stage.
    pub(super) fn hosts(&self, stage: Stage) -> bool {
        self.stages.contains(stage)
    }

    /// The hosted stages.
    pub(super) fn hosted(&self) -> Vec<Stage> {
        self.stages.list()
    }

    /// The contents of a step's accumulators at the hosted ones of these stages; `None` if there are
    /// none.
    pub(super) fn counted(
        &self,
        stages: impl Iterator<Item = Stage>,
        step: Step,
    ) -> Option<Counted> {
        self.stages.counted(stages, step)
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

    /// Forgets earlier steps, whose jobs are dropped already.
    pub(super) fn forget_before(&mut self, step: Step) {
        self.released.forget_before(step);
        self.stages.forget_before(step);
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

    /// A device that can have passes of a stage.
    pub(super) fn device_for(&self, stage: Stage) -> DeviceIndex {
        self.queue.only_device_of(stage).unwrap_or_default()
    }

    /// Whether passes of this work may run, or be still to come.
    pub(super) fn has_passes(&self, key: ClaimKey) -> bool {
        self.queue.is_dropping(key) || self.jobs.is_open(key)
    }

    /// Whether work of a step at a stage was granted here and is not done.
    pub(super) fn has_granted(&self, step: Step, stage: Stage) -> bool {
        self.jobs.has_granted(step, stage)
    }

    /// An input of other work in the output log.
    pub(super) fn logged(&self, of: InputId) -> Option<Payload> {
        match of.input {
            Recalled::Activation => self.jobs.logged_output(of.key.upstream()?),
            Recalled::Gradient => self.jobs.logged_gradient(of.key.downstream()),
        }
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
