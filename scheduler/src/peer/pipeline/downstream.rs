//! Downstream: delivers activations to the next stage.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{ClaimKey, Exchange, Member, Stage};
use shoal_protocol::message::{MemberRecord, PeerMessage, View, ViewChange};
use shoal_protocol::units::{Bytes, Moment};

use super::delivery::{Delivery, Route};
use super::next_stage::NextStage;
use crate::action::{Payload, PeerAction};
use crate::peer::Out;
use crate::peer::context::Context;
use crate::peer::senders::{Asked, Host, Listed};

/// Retry intervals after which an unanswered offer is repeated, and an acceptance too.
pub(super) const UNANSWERED: u32 = 4;

/// Retry intervals after which the answer to a sent activation is requested.
const UNRETURNED: u32 = 16;

/// The deliveries of all jobs, and the replicas of the stages after the hosted ones.
#[derive(Debug, Default)]
pub(in crate::peer) struct Downstream {
    /// The next stage of each hosted stage.
    next: BTreeMap<Stage, NextStage>,
    deliveries: BTreeMap<ClaimKey, Delivery>,
    /// Bytes of the activations in the output log.
    logged: Bytes,
}

/// Stages and jobs.
impl Downstream {
    /// Adds a hosted stage.
    pub(super) fn add_stage(&mut self, ctx: &Context<'_>, stage: Stage) {
        self.next.insert(stage, NextStage::new(ctx.config, stage));
    }

    /// Removes a hosted stage, of which no job is left.
    pub(super) fn remove_stage(&mut self, stage: Stage) {
        self.next.remove(&stage);
    }

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

    /// Bytes of the activations in the output log.
    pub(super) fn logged(&self) -> Bytes {
        self.logged
    }

    /// Adds a job. Its activation is offered as early as possible, long before it is computed, so that
    /// the answer is there in time.
    pub(super) fn insert(
        &mut self,
        ctx: &Context<'_>,
        key: ClaimKey,
        delivery: Delivery,
        out: &mut Out,
    ) {
        self.deliveries.insert(key, delivery);
        self.offer_early(ctx, key, out);
    }

    /// The activation of a microbatch in the output log.
    pub(in crate::peer) fn logged_output(&self, key: ClaimKey) -> Option<Payload> {
        self.deliveries.get(&key)?.outputs.first().copied()
    }

    /// The job's claim is granted. `next_holder` is the holder of the next stage's claim, if there is one.
    pub(super) fn grant(
        &mut self,
        ctx: &Context<'_>,
        key: ClaimKey,
        next_holder: Option<Member>,
        out: &mut Out,
    ) {
        let delivery = self.existing(key);
        delivery.is_granted = true;
        delivery.next_holder = delivery.next_holder.or(next_holder);
        self.offer_early(ctx, key, out);
    }

    /// The next activation is computed: puts it into the output log and sends it once it is accepted.
    pub(super) fn add_output(
        &mut self,
        now: Moment,
        key: ClaimKey,
        output: Payload,
        out: &mut Out,
    ) {
        self.logged += output.size;
        let delivery = self.existing(key);
        delivery.outputs.push(output);
        delivery.send(now, key, out);
    }

    /// An answer arrived; `unanswered` is the first that has not. After the last one nothing need be delivered any
    /// more.
    pub(super) fn note_answer(&mut self, now: Moment, key: ClaimKey, unanswered: Exchange) {
        let next = existing(&mut self.next, key.stage);
        let delivery = existing(&mut self.deliveries, key);
        delivery.exchanges.unanswered = unanswered.0;
        if unanswered.0 < delivery.exchanges.count {
            return;
        }
        delivery.is_answered = true;
        if let Route::Sent { to, at } = delivery.route {
            next.note_answer(to, at, now);
        }
        // A blocked replay is requested again if it is still needed.
        if next.unblock(key) {
            delivery.route = Route::Unrouted;
        }
    }

    /// The member of the next stage that a job's activation was offered to; `None` for one that it was not.
    pub(super) fn asked(&self, from: Listed, key: ClaimKey) -> Option<Asked> {
        Asked::of(&self.deliveries.get(&key)?.asked, from, key)
    }

    /// A receiver has answered an exchange: those after it may follow.
    pub(super) fn note_progress(
        &mut self,
        now: Moment,
        (from, exchange): (Asked, Exchange),
        out: &mut Out,
    ) {
        let key = from.key();
        let Some(delivery) = self.deliveries.get_mut(&key) else { return };
        let Route::Sent { to, at } = &mut delivery.route else { return };
        if *to == from.member() && delivery.exchanges.count > 1 {
            *at = now;
            let answered = exchange.0.saturating_add(1).min(delivery.exchanges.count);
            delivery.exchanges.reached = delivery.exchanges.reached.max(answered);
            delivery.send(now, key, out);
        }
    }

    /// A replica has the activation: there is no need to offer it again.
    pub(super) fn cancel_replay(&mut self, key: ClaimKey) {
        if let Some(delivery) = self.deliveries.get_mut(&key) {
            delivery.needs_replay = false;
        }
    }

    /// Withdraws the offer of an activation.
    pub(super) fn withdraw(&mut self, key: ClaimKey, out: &mut Out) {
        let delivery = self.existing(key);
        let goes_on = delivery.exchanges.count > 1 && !delivery.is_answered;
        let to = match delivery.route {
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

    /// Removes a job and its output log.
    pub(super) fn remove(&mut self, key: ClaimKey, out: &mut Out) {
        let removed = self.deliveries.remove(&key);
        existing(&mut self.next, key.stage).unblock(key);
        for output in removed.into_iter().flat_map(|delivery| delivery.outputs) {
            self.logged = self.logged - output.size;
            out.push(PeerAction::Release(output.id));
        }
    }

    /// Forgets which replicas are busy, for a rewind. All jobs are removed before.
    pub(super) fn restart(&mut self) {
        self.next.values_mut().for_each(NextStage::clear);
    }

    /// The delivery of a job that the caller knows to exist.
    fn existing(&mut self, key: ClaimKey) -> &mut Delivery {
        existing(&mut self.deliveries, key)
    }
}

/// Offers and their answers.
impl Downstream {
    fn offer_early(&mut self, ctx: &Context<'_>, key: ClaimKey, out: &mut Out) {
        if self.existing(key).may_offer() {
            self.offer(ctx, key, out);
        }
    }

    /// Offers an activation: to the holder of the next stage's claim where that is known, otherwise to the
    /// router's choice. If no replica has room, the work is blocked until one has.
    fn offer(&mut self, ctx: &Context<'_>, key: ClaimKey, out: &mut Out) {
        let delivery = existing(&mut self.deliveries, key);
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
        let delivery = self.existing(key);
        delivery.route = Route::Offered { to, at: ctx.now };
        delivery.asked.insert(to);
        let retry = std::mem::replace(&mut delivery.was_offered, true);
        let message = PeerMessage::Offer { key: key.downstream(), size, retry };
        out.push(PeerAction::Send { to, message });
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
        if key.step >= ctx.version() && !self.deliveries.contains_key(&key) {
            // The job was dropped, perhaps with its whole stage, and the receiver waits in vain.
            let message = PeerMessage::Withdrawn { key: downstream };
            out.push(PeerAction::Send { to: from, message });
        }
        let Some(next) = self.next.get_mut(&key.stage) else { return };
        next.note_service_time(from, service_time);
        if let Some(delivery) = self.deliveries.get_mut(&key) {
            let route = delivery.route;
            let was_sent = matches!(route, Route::Sent { to, .. } if to == from);
            let is_lost = matches!(
                route, Route::Sent { to, at } if to == from && ctx.now.since(at) >= ctx.retry()
            );
            // The receiver waits even if the answer is here: it may come from an earlier holder that is
            // gone. Only the last stage delivers nothing.
            let is_over = !delivery.is_due() && !was_sent && route != Route::Nowhere;
            if is_lost || is_over {
                // The activation did not arrive, or is long on its way.
                delivery.accept(host, wanted);
                return delivery.send(ctx.now, key, out);
            }
            // The offer may have gone elsewhere since. The receiver occupies room for it all the same,
            // and two receivers that wait for each other's work would never end.
            let is_open = matches!(route, Route::Offered { .. } | Route::Blocked { .. })
                && delivery.next_holder.is_none_or(|holder| holder == from);
            if is_open && delivery.is_due() {
                next.unblock(key);
                delivery.accept(host, wanted);
                delivery.send(ctx.now, key, out);
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
        let Some(delivery) = self.deliveries.get_mut(&key) else { return };
        // The holder of a claim has room for its work. A busy one released the claim.
        if delivery.next_holder == Some(from) {
            delivery.next_holder = None;
        }
        if delivery.route.to() == Some(from) && delivery.is_due() {
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
        let Some(delivery) = self.deliveries.get_mut(&key) else { return };
        let route = delivery.route;
        let on_its_way = route.to() == Some(holder) || route == Route::Nowhere;
        if on_its_way || !delivery.is_due() || holder == from {
            return;
        }
        let next = existing(&mut self.next, key.stage);
        if Host::of(ctx.view, holder, [key.stage.next()]).is_none() {
            // The holder is gone or not listed yet. The coordinator reports the fate of its claim.
            if route.to() == Some(from) {
                delivery.route = Route::Blocked { since: ctx.now };
                next.block(key);
            }
            return;
        }
        delivery.next_holder = Some(holder);
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
impl Downstream {
    /// Repeats what has no answer for long.
    pub(in crate::peer) fn retry(&mut self, ctx: &Context<'_>, out: &mut Out) {
        self.retry_blocked(ctx, out);
        self.repeat_offers(ctx, out);
    }

    /// Offers again what has been blocked for long: a busy replica may have forgotten the refused sender.
    fn retry_blocked(&mut self, ctx: &Context<'_>, out: &mut Out) {
        let stages: Vec<Stage> = self.next.keys().copied().collect();
        for stage in stages {
            let next = existing(&mut self.next, stage);
            let is_overdue = |key: &ClaimKey| {
                let route = self.deliveries.get(key).map(|delivery| delivery.route);
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
    fn repeat_offers(&mut self, ctx: &Context<'_>, out: &mut Out) {
        let is_late = |at, intervals: u32| ctx.now.since(at) >= ctx.retry() * intervals;
        let late: Vec<(ClaimKey, Member)> = self
            .deliveries
            .iter()
            .filter(|(_, delivery)| delivery.is_due())
            .filter_map(|(key, delivery)| match delivery.route {
                Route::Offered { to, at } if is_late(at, UNANSWERED) => Some((*key, to)),
                Route::Sent { to, at } if is_late(at, UNRETURNED) => Some((*key, to)),
                _ => None,
            })
            .collect();
        for (key, to) in late {
            self.offer_to(ctx, to, key, out);
        }
    }

    /// Routes work to other replicas where its receiver departed. Where the answer is here already, the
    /// coordinator says whether the activation is needed again.
    pub(super) fn remove_members(
        &mut self,
        ctx: &Context<'_>,
        departed: &BTreeSet<Member>,
        out: &mut Out,
    ) {
        let has_departed = |member: Member| departed.contains(&member);
        let mut lost = Vec::new();
        for (key, delivery) in &mut self.deliveries {
            if delivery.next_holder.is_some_and(has_departed) {
                delivery.next_holder = None;
            }
            if delivery.route.to().is_some_and(has_departed) && delivery.is_due() {
                delivery.route = Route::Unrouted;
                lost.push(*key);
            }
        }
        for key in lost {
            self.offer_early(ctx, key, out);
        }
    }

    /// The connection to a member broke. Messages may be lost, so all work that waits for its answer is
    /// offered to it again.
    pub(in crate::peer) fn handle_disconnected(
        &mut self,
        ctx: &Context<'_>,
        member: Member,
        out: &mut Out,
    ) {
        if !ctx.view.lists(member) {
            return;
        }
        let waits = |delivery: &Delivery| delivery.route.to() == Some(member) && delivery.is_due();
        let deliveries = self.deliveries.iter().filter(|(_, delivery)| waits(delivery));
        let waiting: Vec<ClaimKey> = deliveries.map(|(key, _)| *key).collect();
        for key in waiting {
            self.offer_to(ctx, member, key, out);
        }
    }

    /// The next stage's claims have no holder any more: offers the logged activations again.
    pub(in crate::peer) fn handle_replay(
        &mut self,
        ctx: &Context<'_>,
        keys: &[ClaimKey],
        out: &mut Out,
    ) {
        for key in keys.iter().copied() {
            let delivery = self.deliveries.get_mut(&key);
            let Some(delivery) = delivery.filter(|delivery| delivery.is_granted) else { continue };
            let route = delivery.route;
            if route == Route::Nowhere {
                continue;
            }
            delivery.needs_replay |= delivery.is_answered;
            delivery.next_holder = None;
            match route.to().filter(|to| ctx.view.serves(*to)) {
                // Its claim may be on its way; otherwise it accepts the work again.
                Some(to) => self.offer_to(ctx, to, key, out),
                None if matches!(route, Route::Blocked { .. }) => {}
                None => {
                    delivery.route = Route::Unrouted;
                    self.offer_early(ctx, key, out);
                }
            }
        }
    }
}

/// The entry that the caller knows to exist.
fn existing<K: Ord, V>(entries: &mut BTreeMap<K, V>, key: K) -> &mut V {
    entries.get_mut(&key).expect("the caller knows that the entry exists")
}
