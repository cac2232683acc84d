//! Downstream: delivers activations to the next stage, and takes its answers.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{ClaimKey, Exchange, Member, Stage};
use shoal_protocol::message::{MemberRecord, PeerMessage, View, ViewChange};
use shoal_protocol::units::Moment;

use super::Pipeline;
use super::delivery::Route;
use super::job::Job;
use super::next_stage::NextStage;
use crate::action::{Payload, PeerAction};
use crate::peer::context::Context;
use crate::peer::senders::{Asked, Host, Listed};
use crate::peer::{Out, report_unentitled};

/// Retry intervals after which an unanswered offer is repeated, and an acceptance too.
pub(super) const UNANSWERED: u32 = 4;

/// Retry intervals after which the answer to a sent activation is requested.
const UNRETURNED: u32 = 16;

/// The next stages.
impl Pipeline {
    /// Whether a membership change affects a replica of a stage after a hosted one. Most changes of a
    /// large swarm do not.
    pub(in crate::peer) fn is_rerouted_by(&self, view: &View, change: &ViewChange) -> bool {
        let next = |record: &MemberRecord| {
            let mut stages = self.next.keys().map(|stage| stage.next());
            stages.any(|stage| record.span.contains(stage) || record.destination().contains(stage))
        };
        let named = change.here.iter().map(|record| record.member);
        let mut named = named.chain(change.gone.iter().copied());
        change.stops
            || change.here.iter().any(|record| next(record))
            || named.any(|member| view.of_peer(member.peer).is_some_and(next))
    }

    /// Routes each stage's activations to the current replicas of the next one.
    pub(in crate::peer) fn update_routes(&mut self, ctx: &Context<'_>) {
        for (stage, next) in &mut self.next {
            next.update_members(ctx, stage.next());
        }
    }

    /// Follows the link estimates.
    pub(in crate::peer) fn update_links(&mut self, ctx: &Context<'_>) {
        for next in self.next.values_mut() {
            next.update_links(ctx);
        }
    }
}

/// Answers of the next stage.
impl Pipeline {
    /// The member of the next stage that a job was offered to; `None` if the job is not here, or was offered to
    /// others only.
    pub(in crate::peer) fn asked(
        &self,
        from: Listed,
        key: ClaimKey,
        out: &mut Out,
    ) -> Option<Asked> {
        let asked = Asked::of(&self.jobs.get(key)?.delivery.asked, from, key);
        if asked.is_none() {
            report_unentitled(from.member(), "an answer that was not asked for", out);
        }
        asked
    }

    /// The gradient of a stage's output arrived.
    pub(in crate::peer) fn handle_gradient(
        &mut self,
        ctx: &Context<'_>,
        from: Asked,
        exchange: Exchange,
        payload: Payload,
        out: &mut Out,
    ) {
        let key = from.key();
        if ctx.is_held_out(key) {
            return out.push(PeerAction::Release(payload.id));
        }
        let is_new = self.jobs.receive_gradient(ctx.now, (from, exchange), payload, out);
        if is_new {
            self.queue_passes(ctx, key);
        }
        self.note_answer(ctx.now, key, is_new);
        let Some(job) = self.jobs.get_mut(key) else { return };
        let Route::Sent { to, at } = &mut job.delivery.route else { return };
        if *to == from.member() && job.exchanges.are_many() {
            *at = ctx.now;
            job.note_reached(exchange);
            job.send_outputs(ctx.now, key, out);
        }
    }

    /// A held-out microbatch reached the last stage.
    pub(in crate::peer) fn handle_evaluated(
        &mut self,
        ctx: &Context<'_>,
        from: Asked,
        out: &mut Out,
    ) {
        let key = from.key();
        if !ctx.is_held_out(key) {
            return;
        }
        let Some(job) = self.jobs.get_mut(key) else { return };
        let is_new = job.exchanges.evaluate();
        self.note_answer(ctx.now, key, is_new);
        if is_new {
            self.advance(ctx, key, out);
        }
    }

    /// An answer arrived. After the last one nothing need be delivered any more, and after a repeated one nothing again:
    /// a replica has the activation.
    fn note_answer(&mut self, now: Moment, key: ClaimKey, is_new: bool) {
        let next = existing(&mut self.next, key.stage);
        let job = self.jobs.existing(key);
        if !is_new {
            job.delivery.needs_replay = false;
        } else if job.exchanges.are_answered() {
            if let Route::Sent { to, at } = job.delivery.route {
                next.note_answer(to, at, now);
            }
            // A blocked replay is requested again if it is still needed.
            if next.unblock(key) {
                job.delivery.route = Route::Unrouted;
            }
        }
    }
}

/// Offers and their answers.
impl Pipeline {
    /// Offers an activation as early as possible, long before it is computed, so that the answer is there in time.
    pub(super) fn offer_early(&mut self, ctx: &Context<'_>, key: ClaimKey, out: &mut Out) {
        if self.jobs.existing(key).may_offer() {
            self.offer(ctx, key, out);
        }
    }

    /// Offers an activation: to the holder of the next stage's claim where that is known, otherwise to the
    /// router's choice. If no replica has room, the work is blocked until one has.
    fn offer(&mut self, ctx: &Context<'_>, key: ClaimKey, out: &mut Out) {
        let delivery = &mut self.jobs.existing(key).delivery;
        let next = existing(&mut self.next, key.stage);
        let holder = delivery.next_holder;
        match holder.or_else(|| next.choose(ctx, key, delivery.was_offered)) {
            Some(to) => self.offer_to(ctx, to, key, out),
            None => {
                // The wait counts from the first attempt.
                if !matches!(delivery.route, Route::Blocked { .. }) {
                    delivery.route = Route::Blocked { since: ctx.now };
                }
                next.block(key);
            }
        }
    }

    /// Offers an activation to one member.
    fn offer_to(&mut self, ctx: &Context<'_>, to: Member, key: ClaimKey, out: &mut Out) {
        let size = ctx.config.manifest.activation_bytes();
        existing(&mut self.next, key.stage).unblock(key);
        let delivery = &mut self.jobs.existing(key).delivery;
        delivery.route = Route::Offered { to, at: ctx.now };
        delivery.asked.insert(to);
        let retry = std::mem::replace(&mut delivery.was_offered, true);
        let message = PeerMessage::Offer { key: key.downstream(), size, retry };
        out.push(PeerAction::Send { to, message });
    }

    /// Withdraws the offer of an activation.
    pub(super) fn withdraw(&mut self, key: ClaimKey, out: &mut Out) {
        let job = self.jobs.existing(key);
        let goes_on = job.exchanges.are_many() && !job.exchanges.are_answered();
        let to = match job.delivery.route {
            Route::Offered { to, .. } | Route::Accepted { to } => Some(to),
            // The receiver waits for the next exchange.
            Route::Sent { to, .. } if goes_on => Some(to),
            _ => None,
        };
        if let Some(to) = to {
            let key = key.downstream();
            out.push(PeerAction::Send { to, message: PeerMessage::Withdrawn { key } });
        }
    }

    /// A replica of the next stage has room for an offered activation.
    pub(in crate::peer) fn handle_accepted(
        &mut self,
        ctx: &Context<'_>,
        host: Host,
        (downstream, wanted): (ClaimKey, Exchange),
        service_time: u64,
        out: &mut Out,
    ) {
        let from = host.member();
        let Some(key) = downstream.upstream() else { return };
        if key.step >= ctx.version() && !self.jobs.contains(key) {
            // The job was dropped, perhaps with its whole stage, and the receiver waits in vain.
            let message = PeerMessage::Withdrawn { key: downstream };
            out.push(PeerAction::Send { to: from, message });
        }
        let Some(next) = self.next.get_mut(&key.stage) else { return };
        next.note_service_time(from, service_time);
        if let Some(job) = self.jobs.get_mut(key) {
            let (route, is_due) = (job.delivery.route, job.must_deliver());
            let was_sent = matches!(route, Route::Sent { to, .. } if to == from);
            let is_lost = matches!(
                route, Route::Sent { to, at } if to == from && ctx.now.since(at) >= ctx.retry()
            );
            // The receiver waits even if the answer is here: it may come from an earlier holder that is
            // gone. Only the last stage delivers nothing.
            let is_over = !is_due && !was_sent && !job.exchanges.turn_round();
            if is_lost || is_over {
                // The activation did not arrive, or is long on its way.
                job.accept(host, wanted);
                return job.send_outputs(ctx.now, key, out);
            }
            // The offer may have gone elsewhere since. The receiver occupies room for it all the same,
            // and two receivers that wait for each other's work would never end.
            let is_open = matches!(route, Route::Offered { .. } | Route::Blocked { .. })
                && job.delivery.next_holder.is_none_or(|holder| holder == from);
            if is_open && is_due {
                next.unblock(key);
                job.accept(host, wanted);
                job.send_outputs(ctx.now, key, out);
            }
        }
        // A replica that accepted one offer may accept another.
        self.offer_blocked(ctx, key.stage, out);
    }

    /// The receiver of an offer has no room: offers it elsewhere.
    pub(in crate::peer) fn handle_busy(
        &mut self,
        ctx: &Context<'_>,
        from: Listed,
        downstream: ClaimKey,
        service_time: u64,
        out: &mut Out,
    ) {
        let from = from.member();
        let Some(key) = downstream.upstream() else { return };
        let Some(next) = self.next.get_mut(&key.stage) else { return };
        next.note_service_time(from, service_time);
        let Some(job) = self.jobs.get_mut(key) else { return };
        // The holder of a claim has room for its work. A busy one released the claim.
        job.delivery.next_holder.take_if(|holder| *holder == from);
        if job.delivery.route.to() == Some(from) && job.must_deliver() {
            next.note_refusal(from);
            self.offer(ctx, key, out);
        }
    }

    /// Another member holds the next stage's claim.
    pub(in crate::peer) fn handle_redirect(
        &mut self,
        ctx: &Context<'_>,
        from: Asked,
        holder: Member,
        out: &mut Out,
    ) {
        let (from, key) = (from.member(), from.key());
        let Some(job) = self.jobs.get_mut(key) else { return };
        let receiver = job.delivery.route.to();
        if receiver == Some(holder) || !job.must_deliver() || holder == from {
            return;
        }
        let next = existing(&mut self.next, key.stage);
        if Host::of(ctx.view, holder, [key.stage.next()]).is_none() {
            // The holder is gone or not listed yet. The coordinator reports the fate of its claim.
            if receiver == Some(from) {
                job.delivery.route = Route::Blocked { since: ctx.now };
                next.block(key);
            }
            return;
        }
        job.delivery.next_holder = Some(holder);
        next.note_redirect(holder);
        self.offer_to(ctx, holder, key, out);
    }

    /// A busy replica has room again.
    pub(in crate::peer) fn handle_free(
        &mut self,
        ctx: &Context<'_>,
        from: Listed,
        stage: Stage,
        out: &mut Out,
    ) {
        let from = from.member();
        let Some(upstream) = stage.0.checked_sub(1).map(Stage) else { return };
        let Some(next) = self.next.get_mut(&upstream) else { return };
        next.set_free(from);
        self.offer_blocked(ctx, upstream, out);
    }

    /// Offers the oldest blocked work. One at a time: the answer shows whether there is more room.
    fn offer_blocked(&mut self, ctx: &Context<'_>, stage: Stage, out: &mut Out) {
        if let Some(key) = existing(&mut self.next, stage).first_blocked() {
            self.offer(ctx, key, out);
        }
    }
}

/// Losses and retries.
impl Pipeline {
    /// Repeats what has no answer for long.
    pub(in crate::peer) fn retry(&mut self, ctx: &Context<'_>, out: &mut Out) {
        self.jobs.repeat_reports(ctx.now, ctx.retry(), out);
        self.retry_blocked(ctx, out);
        self.retry_unanswered(ctx, out);
    }

    /// Offers again what has been blocked for long: a busy replica may have forgotten the refused sender.
    fn retry_blocked(&mut self, ctx: &Context<'_>, out: &mut Out) {
        let stages: Vec<Stage> = self.next.keys().copied().collect();
        for stage in stages {
            let next = existing(&mut self.next, stage);
            let is_overdue = |key: &ClaimKey| {
                let route = self.jobs.get(*key).map(|job| job.delivery.route);
                matches!(route, Some(Route::Blocked { since }) if ctx.now.since(since) >= ctx.retry())
            };
            let overdue: Vec<ClaimKey> = next.blocked().filter(is_overdue).collect();
            if !overdue.is_empty() {
                next.set_all_free();
            }
            for key in overdue {
                self.offer(ctx, key, out);
            }
        }
    }

    /// Repeats offers without an answer for long: messages in either direction may have been lost.
    fn retry_unanswered(&mut self, ctx: &Context<'_>, out: &mut Out) {
        let is_late = |at, intervals: u32| ctx.now.since(at) >= ctx.retry() * intervals;
        self.offer_again(ctx, out, |job| match job.delivery.route {
            Route::Offered { to, at } if is_late(at, UNANSWERED) => Some(to),
            Route::Sent { to, at } if is_late(at, UNRETURNED) => Some(to),
            _ => None,
        });
    }

    /// The connection to a member broke. Messages may be lost, so all work that waits for its answer is
    /// offered to it again.
    pub(in crate::peer) fn handle_disconnected(
        &mut self,
        ctx: &Context<'_>,
        member: Member,
        out: &mut Out,
    ) {
        if ctx.view.lists(member) {
            let to_it = |job: &Job| job.delivery.route.to().filter(|to| *to == member);
            self.offer_again(ctx, out, to_it);
        }
    }

    /// Offers to the selected receivers again what they have not answered.
    fn offer_again(
        &mut self,
        ctx: &Context<'_>,
        out: &mut Out,
        to: impl Fn(&Job) -> Option<Member>,
    ) {
        let due = self.jobs.iter().filter(|(_, job)| job.must_deliver());
        let again: Vec<(ClaimKey, Member)> =
            due.filter_map(|(key, job)| Some((*key, to(job)?))).collect();
        for (key, to) in again {
            self.offer_to(ctx, to, key, out);
        }
    }

    /// Routes work to other replicas where its receiver departed. Where the answer is here already, the
    /// coordinator says whether the activation is needed again.
    pub(super) fn reroute(
        &mut self,
        ctx: &Context<'_>,
        departed: &BTreeSet<Member>,
        out: &mut Out,
    ) {
        let mut lost = Vec::new();
        for (key, job) in self.jobs.iter_mut() {
            job.delivery.next_holder.take_if(|holder| departed.contains(holder));
            let receiver = job.delivery.route.to();
            if receiver.is_some_and(|to| departed.contains(&to)) && job.must_deliver() {
                job.delivery.route = Route::Unrouted;
                lost.push(*key);
            }
        }
        for key in lost {
            self.offer_early(ctx, key, out);
        }
    }

    /// The next stage's claims have no holder any more: offers the logged activations again.
    pub(super) fn handle_replay(&mut self, ctx: &Context<'_>, keys: &[ClaimKey], out: &mut Out) {
        for key in keys.iter().copied() {
            let job = self.jobs.get_mut(key).filter(|job| job.grant().is_some());
            let Some(job) = job.filter(|job| !job.exchanges.turn_round()) else { continue };
            job.delivery.needs_replay |= job.exchanges.are_answered();
            job.delivery.next_holder = None;
            let route = job.delivery.route;
            match route.to().filter(|to| ctx.view.serves(*to)) {
                // Its claim may be on its way; otherwise it accepts the work again.
                Some(to) => self.offer_to(ctx, to, key, out),
                None if matches!(route, Route::Blocked { .. }) => {}
                None => {
                    job.delivery.route = Route::Unrouted;
                    self.offer_early(ctx, key, out);
                }
            }
        }
    }
}

/// The next stage of a hosted one.
fn existing(next: &mut BTreeMap<Stage, NextStage>, stage: Stage) -> &mut NextStage {
    next.get_mut(&stage).expect("the caller knows that the stage is hosted")
}
