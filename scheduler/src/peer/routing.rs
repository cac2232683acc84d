//! Sending on: who takes the activation, and what comes back.

use shoal_protocol::ids::{ClaimKey, Member, Stage};
use shoal_protocol::message::{PeerMessage, TensorTag};
use shoal_protocol::units::Moment;

use super::job::{Answer, Progress, Route};
use super::{Out, Peer};
use crate::action::{Payload, PayloadId, PeerAction};
use crate::router::is_early;

impl Peer {
    /// Offers the activation onward as early as can be, long before it is computed, so that the
    /// answer is not waited for. What another replica may have taken too waits for its claim: if it
    /// turned out to be the other's, it would keep room at every later stage for an activation that
    /// never comes.
    pub(super) fn offer_early(&mut self, now: Moment, key: ClaimKey, out: &mut Out) {
        let job = &self.jobs[&key];
        let may = job.must_go_on() && (job.grant().is_some() || !job.contested);
        if job.route == Route::Unrouted && may {
            self.offer(now, key, out);
        }
    }

    /// Offers the activation of this work: to the holder of the next stage's claim where it is
    /// known, else to whom the router chooses. If nobody has room it waits until somebody has.
    pub(super) fn offer(&mut self, now: Moment, key: ClaimKey, out: &mut Out) {
        let job = self.jobs.get_mut(&key).expect("only jobs are offered");
        let hosted = self.stages.get_mut(&key.stage).expect("hosted stages are known");
        let (view, era) = (&self.view, self.era);
        let hosts = |member: &Member| {
            view.record(*member).is_some_and(|record| record.hosts(key.stage.next(), era, key.step))
        };
        let all = self.config.manifest.microbatches_of(key.step.0);
        let left = all.saturating_sub(key.microbatch.0) as usize;
        let following = hosted.part.of(left.saturating_sub(1) as u64);
        let early = is_early(left, all as usize);
        let chosen = match job.holder {
            Some(holder) => Some(holder),
            // What comes again is late already: anybody may have it.
            None if job.offered => hosted.onward.choose_where(hosts),
            None => hosted.onward.choose_in_time(key.step, (following, early), hosts),
        };
        match chosen {
            Some(to) => self.offer_to(now, to, key, out),
            None => {
                // However often it is tried meanwhile, it has waited since the first time.
                if !matches!(job.route, Route::Blocked { .. }) {
                    job.route = Route::Blocked { since: now };
                }
                hosted.blocked.insert(key);
            }
        }
    }

    /// Offers the activation of this work to one member.
    pub(super) fn offer_to(&mut self, now: Moment, to: Member, key: ClaimKey, out: &mut Out) {
        let size = self.config.manifest.activation_bytes();
        let job = self.jobs.get_mut(&key).expect("only jobs are offered");
        let hosted = self.stages.get_mut(&key.stage).expect("a job's stage is hosted");
        hosted.blocked.remove(&key);
        job.route = Route::Offered { to, at: now };
        let retry = std::mem::replace(&mut job.offered, true);
        let message = PeerMessage::Offer { key: key.downstream(), size, retry };
        out.push(PeerAction::Send { to, message });
    }

    /// The receiver of an offer has room.
    pub(super) fn accepted(
        &mut self,
        now: Moment,
        from: Member,
        downstream: ClaimKey,
        service_time: u64,
        out: &mut Out,
    ) {
        let Some(key) = downstream.upstream() else { return };
        if key.step >= self.version && !self.jobs.contains_key(&key) {
            // It was let go of, perhaps with its whole stage, and the receiver waits in vain.
            let message = PeerMessage::Withdrawn { key: downstream };
            out.push(PeerAction::Send { to: from, message });
        }
        let Some(hosted) = self.stages.get_mut(&key.stage) else { return };
        hosted.onward.measured(from, service_time);
        if let Some(job) = self.jobs.get_mut(&key) {
            let retry = self.config.limits.retry;
            let unheard = matches!(
                job.route, Route::Sent { to, at } if to == from && now.since(at) >= retry
            );
            let sent = matches!(job.route, Route::Sent { to, .. } if to == from);
            // Who says yes waits, whoever gave the answer that is here: a holder that is gone since
            // may have. Only the last stage sends nothing on.
            let waits_for_nothing = !job.must_go_on() && !sent && job.route != Route::Nowhere;
            if unheard || waits_for_nothing {
                // What was sent did not arrive, or is long on its way.
                job.route = Route::Accepted { to: from };
                self.send_on(now, key, out);
                return;
            }
            // Also when it has been offered elsewhere since: who says yes keeps room for it, and two
            // that keep room for what waits at the other would wait for ever.
            let open = matches!(job.route, Route::Offered { .. } | Route::Blocked { .. })
                && job.holder.is_none_or(|holder| holder == from);
            if open && job.must_go_on() {
                hosted.blocked.remove(&key);
                job.route = Route::Accepted { to: from };
                self.send_on(now, key, out);
            }
        }
        // Who took one may take another.
        self.offer_blocked(now, key.stage, out);
    }

    /// Sends the activation once it is both computed and accepted.
    pub(super) fn send_on(&mut self, now: Moment, key: ClaimKey, out: &mut Out) {
        let job = self.jobs.get_mut(&key).expect("only jobs are sent on");
        if let (Route::Accepted { to }, Some(output)) = (job.route, job.output) {
            job.route = Route::Sent { to, at: now };
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
        service_time: u64,
        out: &mut Out,
    ) {
        let Some(key) = downstream.upstream() else { return };
        let Some(hosted) = self.stages.get_mut(&key.stage) else { return };
        hosted.onward.measured(from, service_time);
        let Some(job) = self.jobs.get_mut(&key) else { return };
        // Who holds the claim has room for it. Who is busy has let go of it, and it may be another's by now.
        if job.holder == Some(from) {
            job.holder = None;
        }
        let reached = matches!(
            job.route,
            Route::Offered { to, .. } | Route::Accepted { to } | Route::Sent { to, .. } if to == from
        );
        if reached && job.must_go_on() {
            hosted.onward.set_busy(from);
            hosted.onward.refund(from);
            self.offer(now, key, out);
        }
    }

    /// The work is another's.
    pub(super) fn redirected(
        &mut self,
        now: Moment,
        from: Member,
        downstream: ClaimKey,
        holder: Member,
        out: &mut Out,
    ) {
        let Some(key) = downstream.upstream() else { return };
        let Some(job) = self.jobs.get_mut(&key) else { return };
        let on_its_way = job.route.to() == Some(holder) || job.route == Route::Nowhere;
        if on_its_way || !job.must_go_on() || holder == from {
            return;
        }
        let hosted = self.stages.get_mut(&key.stage).expect("a job's stage is hosted");
        if !self.view.lists(holder) {
            // It is gone, or not known here yet: what becomes of its claim is told in time.
            if job.route.to() == Some(from) {
                job.route = Route::Blocked { since: now };
                hosted.blocked.insert(key);
            }
            return;
        }
        job.holder = Some(holder);
        hosted.onward.charge(holder);
        self.offer_to(now, holder, key, out);
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
    pub(super) fn gradient(&mut self, now: Moment, key: ClaimKey, payload: Payload, out: &mut Out) {
        let held_out = self.is_held_out(key);
        match self.jobs.get_mut(&key) {
            Some(job) if job.answer == Answer::Expected && !held_out => {
                job.answer = Answer::Here(payload);
                if job.forward == Progress::Done {
                    job.ready_at = now;
                }
                self.in_flight += payload.size;
                self.settle(now, key);
                self.queue_passes(key);
            }
            Some(job) => {
                // Somebody has it: there is no need to offer it again.
                job.replay = false;
                out.push(PeerAction::Release(payload.id));
            }
            None => out.push(PeerAction::Release(payload.id)),
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
            self.settle(now, key);
            self.advance(now, key, out);
        } else {
            job.replay = false;
        }
    }

    /// The answer is here: the activation need not go anywhere any more.
    fn settle(&mut self, now: Moment, key: ClaimKey) {
        let hosted = self.stages.get_mut(&key.stage).expect("a job's stage is hosted");
        let job = self.jobs.get_mut(&key).expect("only jobs are answered");
        if let Route::Sent { to, at } = job.route {
            let _ = hosted.onward.answered(to, at, now);
        }
        // A replay that was waiting for a place is asked for again, if it is still needed.
        if hosted.blocked.remove(&key) {
            job.route = Route::Unrouted;
        }
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
            None => out.push(PeerAction::Send { to, message: PeerMessage::Evaluated { key } }),
        }
    }
}
