//! Sending on: who takes the activation, and what comes back.

use shoal_protocol::ids::{ClaimKey, Member, Stage};
use shoal_protocol::message::{Between, TensorTag};
use shoal_protocol::units::Moment;

use super::job::{Answer, Route};
use super::{Out, Peer};
use crate::action::{Payload, PayloadId, PeerAction};

impl Peer {
    /// Offers the activation onward as early as can be, long before it is computed, so that the
    /// answer is not waited for. What another replica may have taken too waits for its claim: if it
    /// turned out to be the other's, it would keep room at every later stage for an activation that
    /// never comes.
    pub(super) fn offer_early(&mut self, now: Moment, key: ClaimKey, out: &mut Out) {
        let job = &self.jobs[&key];
        if job.route == Route::Unrouted && (job.grant().is_some() || !job.contested) {
            self.offer(now, key, out);
        }
    }

    /// Offers the activation of this work: to the holder of the next stage's claim where it is
    /// known, else to whom the router chooses. If nobody has room it waits until somebody has.
    pub(super) fn offer(&mut self, now: Moment, key: ClaimKey, out: &mut Out) {
        let job = self.jobs.get_mut(&key).expect("only jobs are offered");
        let hosted = self.stages.get_mut(&key.stage).expect("hosted stages are known");
        match job.holder.or_else(|| hosted.onward.choose()) {
            Some(to) => {
                job.route = Route::Offered { to };
                hosted.blocked.remove(&key);
                self.send_offer(to, key, out);
            }
            None => {
                job.route = Route::Blocked { since: now };
                hosted.blocked.insert(key);
            }
        }
    }

    fn send_offer(&mut self, to: Member, key: ClaimKey, out: &mut Out) {
        let size = self.activation_bytes();
        let job = self.jobs.get_mut(&key).expect("only jobs are offered");
        let retry = std::mem::replace(&mut job.offered, true);
        let message = Between::Offer { key: key.downstream(), size, retry };
        out.push(PeerAction::Send { to, message });
    }

    /// The receiver of an offer has room.
    pub(super) fn accepted(
        &mut self,
        now: Moment,
        from: Member,
        downstream: ClaimKey,
        pace: u64,
        out: &mut Out,
    ) {
        let Some(key) = downstream.upstream() else { return };
        let Some(hosted) = self.stages.get_mut(&key.stage) else { return };
        hosted.onward.measured(from, pace);
        if let Some(job) = self.jobs.get_mut(&key) {
            // Also when it has been offered elsewhere since: who says yes keeps room for it, and two
            // that keep room for what waits at the other would wait for ever.
            let open = matches!(job.route, Route::Offered { .. } | Route::Blocked { .. })
                && job.holder.is_none_or(|holder| holder == from);
            if open && job.answer == Answer::Expected {
                hosted.blocked.remove(&key);
                job.route = Route::Accepted { to: from };
                self.send_on(key, out);
            }
        }
        // Who took one may take another.
        self.offer_blocked(now, key.stage, out);
    }

    /// Sends the activation once it is both computed and accepted.
    pub(super) fn send_on(&mut self, key: ClaimKey, out: &mut Out) {
        let job = self.jobs.get_mut(&key).expect("only jobs are sent on");
        if let (Route::Accepted { to }, Some(output)) = (job.route, job.output) {
            job.route = Route::Sent { to };
            let tag = TensorTag::Activation { key: key.downstream() };
            out.push(PeerAction::SendTensor { to, tag, payload: output.id });
        }
    }

    /// The receiver of an offer has no room: it goes elsewhere.
    pub(super) fn turned_away(
        &mut self,
        now: Moment,
        from: Member,
        downstream: ClaimKey,
        pace: u64,
        out: &mut Out,
    ) {
        let Some(key) = downstream.upstream() else { return };
        let Some(hosted) = self.stages.get_mut(&key.stage) else { return };
        hosted.onward.measured(from, pace);
        let Some(job) = self.jobs.get_mut(&key) else { return };
        if job.route == (Route::Offered { to: from }) && job.answer == Answer::Expected {
            hosted.onward.set_busy(from);
            if job.holder == Some(from) {
                // Nobody else can take it: it waits until its holder is free.
                job.route = Route::Blocked { since: now };
                hosted.blocked.insert(key);
            } else {
                hosted.onward.refund(from);
                self.offer(now, key, out);
            }
        }
    }

    /// The work is another's.
    pub(super) fn redirected(
        &mut self,
        from: Member,
        downstream: ClaimKey,
        holder: Member,
        out: &mut Out,
    ) {
        let Some(key) = downstream.upstream() else { return };
        let Some(job) = self.jobs.get_mut(&key) else { return };
        let on_its_way = match job.route {
            Route::Offered { to } | Route::Accepted { to } | Route::Sent { to } => to == holder,
            Route::Nowhere | Route::Unrouted | Route::Blocked { .. } => false,
        };
        if on_its_way || job.answer != Answer::Expected || holder == from {
            return;
        }
        job.holder = Some(holder);
        job.route = Route::Offered { to: holder };
        let hosted = self.stages.get_mut(&key.stage).expect("a job's stage is hosted");
        hosted.blocked.remove(&key);
        hosted.onward.charge(holder);
        self.send_offer(holder, key, out);
    }

    /// A replica that had been busy has a place again.
    pub(super) fn freed(&mut self, now: Moment, from: Member, stage: Stage, out: &mut Out) {
        let Some(upstream) = stage.0.checked_sub(1).map(Stage) else { return };
        let Some(hosted) = self.stages.get_mut(&upstream) else { return };
        hosted.onward.set_free(from);
        self.offer_blocked(now, upstream, out);
    }

    /// Offers the oldest work that waits for a place. One at a time: whether there is a second
    /// place shows in the answer.
    fn offer_blocked(&mut self, now: Moment, stage: Stage, out: &mut Out) {
        let hosted = &self.stages[&stage];
        if let Some(key) = hosted.blocked.first().copied() {
            self.offer(now, key, out);
        }
    }

    /// Offers again what has waited in vain for long: who was turned away may have been forgotten.
    pub(super) fn retry_blocked(&mut self, now: Moment, out: &mut Out) {
        let retry = self.config.limits.retry;
        let stages: Vec<Stage> = self.stages.keys().copied().collect();
        for stage in stages {
            let hosted = self.stages.get_mut(&stage).expect("it was just listed");
            let jobs = &self.jobs;
            let long = |key: &&ClaimKey| matches!(jobs[*key].route, Route::Blocked { since } if now.since(since) >= retry);
            let waiting: Vec<ClaimKey> = hosted.blocked.iter().filter(long).copied().collect();
            if !waiting.is_empty() {
                hosted.onward.set_all_free();
            }
            for key in waiting {
                self.offer(now, key, out);
            }
        }
    }

    /// The gradient of a stage's output came.
    pub(super) fn gradient(&mut self, key: ClaimKey, payload: Payload, out: &mut Out) {
        let held_out = self.is_held_out(key);
        match self.jobs.get_mut(&key) {
            Some(job) if job.answer == Answer::Expected && !held_out => {
                job.answer = Answer::Here(payload);
                self.in_flight += payload.size;
                self.settle(key);
                self.queue_passes(key);
            }
            _ => out.push(PeerAction::Release(payload.id)),
        }
    }

    /// A held-out microbatch came to the end of the pipeline.
    pub(super) fn answered_evaluated(&mut self, now: Moment, key: ClaimKey, out: &mut Out) {
        if !self.is_held_out(key) {
            return;
        }
        let Some(job) = self.jobs.get_mut(&key) else { return };
        if job.answer == Answer::Expected {
            job.answer = Answer::Evaluated;
            self.settle(key);
            self.advance(now, key, out);
        }
    }

    /// The answer is here: the activation need not go anywhere any more.
    fn settle(&mut self, key: ClaimKey) {
        let hosted = self.stages.get_mut(&key.stage).expect("a job's stage is hosted");
        hosted.blocked.remove(&key);
    }

    /// Answers whoever sent a microbatch: with the gradient of its activation or, held out, with
    /// the word that it is evaluated.
    pub(super) fn answer(to: Member, key: ClaimKey, gradient: Option<PayloadId>, out: &mut Out) {
        let key = key.upstream().expect("the first stage answers nobody");
        match gradient {
            Some(payload) => {
                let tag = TensorTag::ActivationGradient { key };
                out.push(PeerAction::SendTensor { to, tag, payload });
            }
            None => out.push(PeerAction::Send { to, message: Between::Evaluated { key } }),
        }
    }
}
