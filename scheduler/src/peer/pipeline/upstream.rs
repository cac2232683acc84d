//! Upstream: offers of other members, and claims and work of the coordinator.

use shoal_protocol::ids::{ClaimKey, Exchange, Grant, Member, Microbatch, Stage, Step};
use shoal_protocol::message::{FromCoordinator, PassTimes, PeerMessage, ToCoordinator};
use shoal_protocol::units::Moment;

use super::Pipeline;
use super::downstream::UNANSWERED;
use super::exchanges::Exchanges;
use super::job::{Claim, Job, Report};
use super::stage::QueuedOffer;
use crate::action::{Payload, PeerAction};
use crate::peer::context::Context;
use crate::peer::senders::{Feeder, Host, Listed};
use crate::peer::{Out, report_invalid, report_unentitled};

/// Claims in one message of a census, far below the size limit of a message.
const CLAIMS: usize = 256;

/// Offers.
impl Pipeline {
    /// A member offers an activation for a hosted stage.
    pub(in crate::peer) fn handle_offer(
        &mut self,
        ctx: &Context<'_>,
        key: ClaimKey,
        (host, retry): (Host, bool),
        out: &mut Out,
    ) {
        let from = host.member();
        let offer = QueuedOffer { from, retry };
        if !ctx.is_serving {
            self.add_early_sender(ctx, key.stage, from);
            return self.send_busy(from, key, out);
        }
        if key.step < ctx.version() {
            return;
        }
        let manifest = &ctx.config.manifest;
        let exists = key.step.0 < manifest.training.steps
            && key.microbatch.0 < manifest.microbatches_of(key.step.0);
        if exists && key.step > ctx.version() && !ctx.is_open(key.step) {
            // The sender is ahead: commits or an expulsion are on their way here.
            return;
        }
        if key.stage == Stage(0) || key.stage > manifest.last_stage() || !exists {
            return report_invalid(from, "an offer for work that is not there", out);
        }
        if !self.hosts_at(ctx, key.stage, key.step) {
            // The sender's view or this peer's is old.
            if ctx.is_moving_to(key.stage) {
                self.add_early_sender(ctx, key.stage, from);
            }
            return self.send_busy(from, key, out);
        }
        if self.jobs.contains(key) {
            return self.handle_repeated_offer(ctx, host, key, out);
        }
        if ctx.is_draining && key.step > ctx.version() {
            return self.send_busy(from, key, out);
        }
        let hosted = self.stages.existing(key.stage);
        hosted.remove_waiting_sender(from);
        if self.queue.is_dropping(key) {
            // The sender is notified of room when the engine discarded the earlier job.
            return self.refuse(ctx, from, key, out);
        }
        if hosted.room(key.step) > 0 {
            return self.accept_offer(ctx, key, offer, out);
        }
        self.queue_offer(ctx, offer, key, out);
        self.admit(ctx, key.stage, out);
    }

    /// Remembers the sender of an offer that came before this peer served the stage.
    fn add_early_sender(&mut self, ctx: &Context<'_>, stage: Stage, from: Member) {
        let known = self.early_senders.contains(&(stage, from));
        if known || self.early_senders.len() < ctx.config.limits.askers {
            self.early_senders.insert((stage, from));
        }
    }

    /// Queues an offer, ahead of later steps' offers. The last one is refused where the queue is full.
    fn queue_offer(&mut self, ctx: &Context<'_>, offer: QueuedOffer, key: ClaimKey, out: &mut Out) {
        let hosted = self.stages.existing(key.stage);
        let place = (key.step, key.microbatch);
        if let Some(other) = hosted.offers.get(&place) {
            if other.from != offer.from {
                // The first sender goes first; the other one offers it again later.
                self.send_busy(offer.from, key, out);
            }
            return;
        }
        hosted.offers.insert(place, offer);
        if hosted.offers.len() > ctx.config.limits.offers {
            let ((step, microbatch), last) = hosted.offers.pop_last().expect("one was put in");
            self.refuse(ctx, last.from, ClaimKey { step, stage: key.stage, microbatch }, out);
        }
    }

    /// An offer of work that is here already: a repetition, or an offer of another sender.
    fn handle_repeated_offer(
        &mut self,
        ctx: &Context<'_>,
        host: Host,
        key: ClaimKey,
        out: &mut Out,
    ) {
        let from = host.member();
        let service_time = self.stages.service_time();
        let job = self.jobs.existing(key);
        if !job.upstream.senders.contains(&from) {
            // The limit is for senders beyond the first.
            if job.upstream.senders.len() <= ctx.config.limits.askers {
                job.upstream.senders.push(from);
            } else if !job.upstream.answered {
                return self.refuse(ctx, from, key, out);
            }
        }
        let exchanges = &job.exchanges;
        if job.upstream.answered && !exchanges.are_many() {
            job.answer(from, key, out);
        } else if exchanges.awaits_input() || exchanges.are_many() {
            // A sender that begins anew gets the answers of earlier exchanges one by one.
            let wanted = exchanges.wanted();
            let message = PeerMessage::Accepted { key, wanted, service_time };
            out.push(PeerAction::Send { to: from, message });
        }
    }

    /// Refuses an offer. The sender is notified when there is room again.
    fn refuse(&mut self, ctx: &Context<'_>, from: Member, key: ClaimKey, out: &mut Out) {
        let hosted = self.stages.existing(key.stage);
        hosted.add_waiting_sender(from, key.step, ctx.config.limits.askers);
        hosted.note_refused(key);
        self.send_busy(from, key, out);
    }

    pub(super) fn send_busy(&self, to: Member, key: ClaimKey, out: &mut Out) {
        let service_time = self.stages.service_time();
        out.push(PeerAction::Send { to, message: PeerMessage::Busy { key, service_time } });
    }

    /// Sends all senders of a job elsewhere.
    pub(super) fn send_busy_to_senders(&mut self, key: ClaimKey, out: &mut Out) {
        let service_time = self.stages.service_time();
        for to in self.jobs.existing(key).upstream.senders.iter().copied() {
            out.push(PeerAction::Send { to, message: PeerMessage::Busy { key, service_time } });
        }
    }

    /// Accepts queued offers while there is room, and notifies refused senders when there is a place.
    pub(super) fn admit(&mut self, ctx: &Context<'_>, stage: Stage, out: &mut Out) {
        while let Some(((step, microbatch), offer)) = self.stages.existing(stage).next_offer() {
            let key = ClaimKey { step, stage, microbatch };
            if key.step >= ctx.version() && !self.jobs.contains(key) {
                self.accept_offer(ctx, key, offer, out);
            }
        }
        let hosted = self.stages.existing(stage);
        for to in hosted.take_served_senders(ctx.config.limits.offers, ctx.version()) {
            out.push(PeerAction::Send { to, message: PeerMessage::Free { stage } });
        }
    }

    /// Accepts queued offers at all hosted stages.
    pub(in crate::peer) fn admit_all(&mut self, ctx: &Context<'_>, out: &mut Out) {
        for stage in self.stages.list() {
            self.admit(ctx, stage, out);
        }
    }

    /// Accepts an offer. The claim is requested at once, so that its answer is there in time.
    fn accept_offer(
        &mut self,
        ctx: &Context<'_>,
        key: ClaimKey,
        offer: QueuedOffer,
        out: &mut Out,
    ) {
        let contested = offer.retry || self.stages.existing(key.stage).was_refused(key);
        let claim = Claim::Requested { at: ctx.now };
        let (service_time, to) = (self.stages.service_time(), offer.from);
        let message = PeerMessage::Accepted { key, wanted: Exchange(0), service_time };
        out.push(PeerAction::Send { to, message });
        out.push(PeerAction::ToCoordinator(ToCoordinator::Claim { key }));
        let mut job = Job::new(key, Some(to), claim, exchanges_of(ctx, key));
        job.upstream.accepted_at = ctx.now;
        job.delivery.is_contested = contested;
        self.insert(ctx, key, job, out);
    }

    /// Adds a job, which occupies room from here on.
    fn insert(&mut self, ctx: &Context<'_>, key: ClaimKey, job: Job, out: &mut Out) {
        self.stages.existing(key.stage).occupy(key.step);
        self.jobs.insert(key, job);
        self.offer_early(ctx, key, out);
        self.advance(ctx, key, out);
    }

    /// The sender of a job's activations; `None` if the job is not here, or took no offer of this member.
    pub(in crate::peer) fn feeder(
        &self,
        from: Listed,
        key: ClaimKey,
        out: &mut Out,
    ) -> Option<Feeder> {
        let feeder = Feeder::of(&self.jobs.get(key)?.upstream.senders, from, key);
        if feeder.is_none() {
            report_unentitled(from.member(), "an activation that was not accepted", out);
        }
        feeder
    }

    /// An activation arrived. One that was here before means that its sender lacks the answer.
    pub(in crate::peer) fn handle_activation(
        &mut self,
        ctx: &Context<'_>,
        from: Feeder,
        exchange: Exchange,
        payload: Payload,
        out: &mut Out,
    ) {
        let key = from.key();
        if self.jobs.receive_input(ctx.now, (from, exchange), payload, out) {
            self.queue_passes(ctx, key);
        } else if let Some(job) = self.jobs.get(key).filter(|job| job.exchanges.are_many()) {
            job.answer_exchange(from.member(), key, exchange, out);
        }
    }

    /// A sender has the offered work no more.
    pub(in crate::peer) fn handle_withdrawn(
        &mut self,
        ctx: &Context<'_>,
        from: Listed,
        key: ClaimKey,
        out: &mut Out,
    ) {
        let from = from.member();
        let Some(hosted) = self.stages.get_mut(key.stage) else { return };
        let place = (key.step, key.microbatch);
        if hosted.offers.get(&place).is_some_and(|offer| offer.from == from) {
            hosted.offers.remove(&place);
        }
        if let Some(job) = self.jobs.get_mut(key) {
            job.upstream.senders.retain(|sender| *sender != from);
            if job.is_deserted() {
                self.abandon(ctx, key, out);
                self.admit(ctx, key.stage, out);
            }
        }
    }

    /// Repeats acceptances whose activation is late.
    pub(in crate::peer) fn repeat_acceptances(&mut self, ctx: &Context<'_>, out: &mut Out) {
        let service_time = self.stages.service_time();
        let patience = ctx.retry() * UNANSWERED;
        self.jobs.repeat_acceptances(ctx.now, patience, service_time, out);
    }
}

/// Claims and work.
impl Pipeline {
    /// Handles a message about claims. Work whose step is not open is dropped by its commit.
    pub(in crate::peer) fn handle_claims(
        &mut self,
        ctx: &Context<'_>,
        message: FromCoordinator,
        out: &mut Out,
    ) {
        match message {
            FromCoordinator::Replay { keys } => self.handle_replay(ctx, &keys, out),
            FromCoordinator::Work { step, grants } => self.handle_work(ctx, step, &grants, out),
            FromCoordinator::Granted { key, grant, next_holder } => {
                self.handle_granted(ctx, key, grant, next_holder, out);
            }
            FromCoordinator::Held { key, holder } => self.handle_held(ctx, key, holder, out),
            FromCoordinator::Reclaim { key, grant, patience } => {
                self.handle_reclaim(ctx, key, grant, patience, out);
            }
            FromCoordinator::Noted { key, grant } => self.jobs.acknowledge_report(key, grant),
            _ => {}
        }
    }

    /// Reports the held claims for a census.
    pub(in crate::peer) fn report_claims(&mut self, out: &mut Out) {
        let claims = self.jobs.held_claims();
        let parts = claims.len().div_ceil(CLAIMS).max(1);
        let mut claims = claims.into_iter();
        for part in 0..parts {
            let claims = claims.by_ref().take(CLAIMS).collect();
            let last = part + 1 == parts;
            let message = ToCoordinator::Held { claims, part: part as u32, last };
            out.push(PeerAction::ToCoordinator(message));
        }
    }

    /// Requests every pending claim again, of a new coordinator.
    pub(in crate::peer) fn repeat_claims(&mut self, now: Moment, out: &mut Out) {
        self.jobs.repeat_claims(now, out);
    }

    /// Forgets the last request for work, so that the next one is sent in any case.
    pub(in crate::peer) fn forget_work_request(&mut self) {
        self.requests.forget();
    }

    /// Microbatches of the first stage, with their claims.
    fn handle_work(
        &mut self,
        ctx: &Context<'_>,
        step: Step,
        grants: &[(Microbatch, Grant)],
        out: &mut Out,
    ) {
        let stage = Stage(0);
        if !self.hosts_at(ctx, stage, step) || !ctx.is_open(step) {
            return;
        }
        for (microbatch, grant) in grants {
            self.requests.note_grant(*grant);
            let key = ClaimKey { step, stage, microbatch: *microbatch };
            let is_here = self.jobs.contains(key);
            // It may be accepted again once the engine discarded the earlier job.
            let is_void = self.released.covers(key, *grant) || self.queue.is_dropping(key);
            // It answers an earlier request, for more room than there is.
            let has_room = is_here || self.stages.existing(stage).room(step) > 0;
            if is_void || !has_room {
                self.released.refuse(key, *grant, out);
            } else if !is_here {
                let claim = Claim::Granted(*grant);
                let job = Job::new(key, None, claim, exchanges_of(ctx, key));
                self.insert(ctx, key, Job { ready_at: ctx.now, ..job }, out);
            }
        }
    }

    /// Requests work for room at the first stage that the coordinator does not know of.
    pub(in crate::peer) fn request_work(&mut self, ctx: &Context<'_>, out: &mut Out) {
        let Some(hosted) = self.stages.get(Stage(0)) else { return };
        // Each step has its own room: the next step's work is handed out before this one ends, and this
        // one's again after the loss of a peer.
        let room = |step: Step| (step, u32::try_from(hosted.room(step)).unwrap_or(u32::MAX));
        let most = if ctx.is_draining { 1 } else { usize::MAX };
        let steps = (ctx.version().0..=ctx.newest_open().0).map(Step);
        let steps = steps.filter(|step| self.hosts_at(ctx, Stage(0), *step));
        let rooms: Vec<(Step, u32)> =
            steps.map(room).take(most).filter(|(_, room)| *room > 0).collect();
        let service_time = self.stages.service_time();
        self.requests.send(rooms, service_time, out);
    }

    /// Requests work even if the last request was the same.
    pub(in crate::peer) fn repeat_work_request(&mut self, ctx: &Context<'_>, out: &mut Out) {
        self.forget_work_request();
        self.request_work(ctx, out);
    }

    /// The coordinator granted a claim.
    fn handle_granted(
        &mut self,
        ctx: &Context<'_>,
        key: ClaimKey,
        grant: Grant,
        next_holder: Option<Member>,
        out: &mut Out,
    ) {
        if key.step < ctx.version() {
            return;
        }
        let is_void = self.released.covers(key, grant);
        let Some(job) = self.jobs.get_mut(key) else {
            // The job was dropped while its claim was on the way.
            return self.released.refuse(key, grant, out);
        };
        if job.grant().is_some() || is_void {
            return;
        }
        job.claim = Claim::Granted(grant);
        job.delivery.next_holder = job.delivery.next_holder.or(next_holder);
        self.offer_early(ctx, key, out);
        self.advance(ctx, key, out);
    }

    /// Another member holds the claim: drops the work and redirects its senders.
    fn handle_held(&mut self, ctx: &Context<'_>, key: ClaimKey, holder: Member, out: &mut Out) {
        let Some(job) = self.jobs.get(key).filter(|job| job.grant().is_none()) else { return };
        if holder == ctx.me() {
            return;
        }
        for to in job.upstream.senders.iter().copied() {
            out.push(PeerAction::Send { to, message: PeerMessage::HeldBy { key, holder } });
        }
        self.abandon(ctx, key, out);
        self.admit(ctx, key.stage, out);
    }

    /// The coordinator asks for a claim back: if its work is late or, without any patience, if it has not
    /// begun. The answer does not wait for the engine.
    fn handle_reclaim(
        &mut self,
        ctx: &Context<'_>,
        key: ClaimKey,
        grant: Grant,
        patience: PassTimes,
        out: &mut Out,
    ) {
        if key.step < ctx.version() {
            return;
        }
        let job = self.jobs.get(key);
        let Some(job) = job.filter(|job| job.grant().is_none_or(|own| own == grant)) else {
            return self.released.refuse(key, grant, out);
        };
        // The report of finished work repeats until it is acknowledged.
        let is_open = job.grant().is_some() && job.report == Report::NotDone;
        let is_stolen = patience == PassTimes::default();
        let is_released = if is_stolen {
            !job.exchanges.have_begun()
        } else {
            let runnable = ctx.has_weights(key, job.exchanges.next());
            job.is_late(ctx.now, self.available_at(ctx, key, job), runnable, patience)
        };
        if is_open && is_released {
            self.send_busy_to_senders(key, out);
            self.add_reclaimed_senders(ctx, key, is_stolen);
            self.abandon(ctx, key, out);
            self.admit(ctx, key.stage, out);
        } else {
            out.push(PeerAction::ToCoordinator(ToCoordinator::Working { key, grant }));
        }
    }

    /// The time from which the engine could have run the next pass of this work: its inputs and weights
    /// were there, and the last pass had ended. While passes end, none that waits is late.
    pub(super) fn available_at(&self, ctx: &Context<'_>, key: ClaimKey, job: &Job) -> Moment {
        let reads = ctx.config.manifest.exchange_reads(key.step, job.exchanges.current());
        let reads_newest = reads == ctx.version();
        let weights_at = if reads_newest { ctx.position.version_at } else { Moment::default() };
        job.ready_at.max(weights_at).max(self.queue.ended_at(job.device))
    }

    /// Notifies the senders of reclaimed work when there is room again: at once where the work was stolen,
    /// since this peer is not late then; otherwise when the engine ended a pass.
    fn add_reclaimed_senders(&mut self, ctx: &Context<'_>, key: ClaimKey, is_stolen: bool) {
        let hosted = self.stages.existing(key.stage);
        let most = ctx.config.limits.askers;
        for sender in self.jobs.existing(key).upstream.senders.iter().copied() {
            if is_stolen {
                hosted.add_stolen_sender(sender, key.step, most);
            } else {
                hosted.add_late_sender(sender, key, most);
            }
        }
    }
}

/// The exchanges of a microbatch that begins at a stage.
fn exchanges_of(ctx: &Context<'_>, key: ClaimKey) -> Exchanges {
    let manifest = &ctx.config.manifest;
    let numbers = (manifest.exchanges_of(key.microbatch), manifest.exchanges_at_once());
    Exchanges::new(numbers, key.stage == Stage(0), ctx.is_last(key))
}
