//! Late claims: the coordinator asks their holders for them, where another replica could do the work. A holder
//! answers at once, since its messages never wait for its engine; one that does not answer is expelled.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Grant, Member, Stage, Step};
use shoal_protocol::message::{FromCoordinator, PassTimes};
use shoal_protocol::units::Moment;

use super::super::context::Context;
use super::super::{Out, event, send};
use super::open_steps::OpenSteps;
use super::stealing::Stealing;
use crate::action::{CoordinatorEvent, LossCause};
use crate::coordinator::placing::throughput::{Estimates, ServiceTimes};
use crate::coordinator::work::deadline::Times;
use crate::coordinator::work::ledger::Ledger;

/// Requests for a claim without an answer, a retry apart, after which the holder is expelled.
const UNANSWERED: u32 = 8;

/// Answers that a claim is being worked on, before its end or the next stage's, after which the holder is expelled. The
/// time between two doubles up to [`DOUBLINGS`] times.
const KEPT: u32 = 16;

/// Doublings of patience at most.
const DOUBLINGS: u32 = 6;

/// Passes of a virtual worker that its first deadline, before any was measured, allows for.
const UNMEASURED_PASSES: u64 = 120;

/// Round trips from the request for a claim until another member holds its work: the holder releases it, the
/// holder before learns of that, offers the activation and sends it.
const ROUND_TRIPS: u32 = 3;

/// The claims that are watched, and measurements of how long work takes.
#[derive(Debug, Default)]
pub(super) struct Stragglers {
    times: Times,
    /// Throughput estimates, for placing newcomers.
    service_times: ServiceTimes,
    watches: BTreeMap<ClaimKey, Watch>,
    /// When each watch ends.
    due: BTreeSet<(Moment, ClaimKey)>,
    stealing: Stealing,
    released: BTreeMap<ClaimKey, Released>,
}

/// A claim that is watched.
#[derive(Debug, Clone, Copy)]
struct Watch {
    holder: Member,
    grant: Grant,
    /// When the claim is late.
    at: Moment,
    /// Requests without an answer.
    unanswered: u32,
    /// Requests that were answered with `Working`.
    kept: u32,
}

/// A claim that was released.
#[derive(Debug, Clone, Copy)]
struct Released {
    /// How often the claim was late and released.
    times: u32,
    preference: Preference,
    /// When the preference ends.
    until: Moment,
}

/// Which member should get work that was just released, or should not.
#[derive(Debug, Clone, Copy)]
pub(in super::super) enum Preference {
    /// The member that the work was stolen for.
    For(Member),
    /// The member that released the work of its own accord.
    Not(Member),
}

impl Stragglers {
    /// The estimated throughput of members at stages.
    pub(super) fn estimates(&self, stages: u16, now: Moment) -> Estimates<'_> {
        self.service_times.estimates(stages, now)
    }

    /// When the first claim is late.
    pub(super) fn next_timeout(&self) -> Option<Moment> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Which member should get this work next, or should not, if it was just released.
    pub(super) fn preference(&self, key: ClaimKey, now: Moment) -> Option<Preference> {
        self.released.get(&key).filter(|last| last.until > now).map(|last| last.preference)
    }

    /// Whether the values that are cached for stealing equal a recount.
    #[cfg(test)]
    pub(super) fn is_counted(&self) -> bool {
        self.stealing.is_counted(|stage, member| self.service_times.measured(stage, member))
    }

    /// A step is committed.
    pub(super) fn forget_up_to(&mut self, step: Step) {
        self.watches.retain(|key, _| key.step > step);
        self.due.retain(|(_, key)| key.step > step);
        self.released.retain(|key, _| key.step > step);
        self.stealing.forget_up_to(step);
    }

    /// Forgets the claims of all steps; measurements stay.
    pub(super) fn forget_work(&mut self) {
        let (times, service_times) =
            (std::mem::take(&mut self.times), std::mem::take(&mut self.service_times));
        *self = Self { times, service_times, ..Self::default() };
    }

    /// Forgets the measurements of a member that is gone.
    pub(super) fn forget_member(&mut self, member: Member) {
        self.times.forget(member);
        self.forget_service_times(member);
    }

    /// Forgets how fast a member is.
    pub(super) fn forget_service_times(&mut self, member: Member) {
        self.service_times.forget(member);
        self.stealing.set_service_time(None, member, None);
    }

    /// Watches a claim that was granted; a repeated grant changes nothing.
    pub(super) fn watch(&mut self, context: &Context, key: ClaimKey, holder: Member, grant: Grant) {
        let known = self.watches.get(&key).is_some_and(|watch| watch.grant == grant);
        if !known {
            let at = context.now + self.patience(context, key, holder).forward;
            self.set_watch(key, Watch { holder, grant, at, unanswered: 0, kept: 0 });
        }
    }

    fn set_watch(&mut self, key: ClaimKey, watch: Watch) {
        if let Some(before) = self.watches.insert(key, watch) {
            self.due.remove(&(before.at, key));
            if before.holder != watch.holder {
                self.stealing.ended(key, before.holder);
            }
        }
        let service_time = || self.service_times.measured(key.stage, watch.holder);
        self.stealing.claimed(key, watch.holder, watch.grant, service_time);
        self.due.insert((watch.at, key));
    }

    fn unwatch(&mut self, key: ClaimKey) -> Option<Watch> {
        let watch = self.watches.remove(&key)?;
        self.due.remove(&(watch.at, key));
        self.stealing.ended(key, watch.holder);
        Some(watch)
    }

    fn next_late(&mut self, now: Moment) -> Option<(ClaimKey, Watch)> {
        let (at, key) = *self.due.first()?;
        if at > now {
            return None;
        }
        self.unwatch(key).map(|watch| (key, watch))
    }

    /// Learns from the time that a member spent on a claim. The stage before has all it needs from here on.
    pub(super) fn learn(
        &mut self,
        context: &Context,
        from: Member,
        key: ClaimKey,
        pass_times: PassTimes,
    ) {
        let manifest = &context.config.manifest;
        let trains = key.microbatch.0 < manifest.training.microbatches;
        // A virtual worker makes many passes, and a held-out microbatch one.
        if manifest.passes_of(key.microbatch) == manifest.passes() {
            self.times.add(key.stage, from, pass_times);
        }
        // Held-out microbatches have no backward pass.
        if trains {
            let devices = context.members.current.devices_of(from);
            let each = pass_times.shared_by(devices);
            let service_time = self.service_times.add(key.stage, from, each, context.now);
            self.stealing.set_service_time(Some(key.stage), from, Some(service_time));
        }
        self.unwatch(key);
        let Some(before) = key.upstream() else { return };
        if let Some(mut watch) = self.watches.get(&before).copied()
            && watch.unanswered == 0
        {
            watch.kept = 0;
            watch.at = context.now + self.patience(context, before, watch.holder).backward;
            self.set_watch(before, watch);
        }
    }

    /// The time after which a member's work is late. Each release of the same claim doubles it.
    fn patience(&self, context: &Context, key: ClaimKey, holder: Member) -> PassTimes {
        let passes = context.config.manifest.passes().min(UNMEASURED_PASSES);
        let patience = context.config.patience * passes as u32;
        let unknown = PassTimes { forward: patience, backward: patience };
        let late = self.times.late(key.stage, holder).unwrap_or(unknown);
        let releases = self.released.get(&key).map_or(0, |last| last.times);
        let longer = 1 << releases.min(DOUBLINGS);
        let at_least = context.config.retry;
        PassTimes {
            forward: late.forward.max(at_least) * longer,
            backward: late.backward.max(at_least) * longer,
        }
    }

    /// Asks the holders of late claims for them. Returns a holder that does not answer, or that has said too often
    /// that it works on a claim, if there is one, with the cause.
    pub(super) fn reclaim_late(
        &mut self,
        context: &Context,
        steps: &OpenSteps,
        out: &mut Out,
    ) -> Option<(Member, LossCause)> {
        let members = &context.members;
        while let Some((key, watch)) = self.next_late(context.now) {
            let ledger = steps.ledger(key.step);
            if !ledger.is_some_and(|ledger| ledger.awaits(key, watch.holder, watch.grant)) {
                continue;
            }
            let patience = self.patience(context, key, watch.holder);
            let replaceable =
                members.current.replicas(key.stage).any(|other| other != watch.holder);
            if !context.runs(key.step) || !replaceable {
                let at = context.now + patience.forward.max(patience.backward);
                self.set_watch(key, Watch { at, unanswered: 0, ..watch });
                continue;
            }
            let gives_up = match (watch.unanswered >= UNANSWERED, watch.kept >= KEPT) {
                (true, _) => Some(LossCause::Silent),
                (_, true) => Some(LossCause::Withholds),
                _ => None,
            };
            if let Some(how) = gives_up
                && members.is_expendable(watch.holder, context.config.home)
            {
                return Some((watch.holder, how));
            }
            let grant = watch.grant;
            send(watch.holder, FromCoordinator::Reclaim { key, grant, patience }, out);
            let (at, unanswered) = (context.retry_at(), watch.unanswered + 1);
            self.set_watch(key, Watch { at, unanswered, ..watch });
        }
        None
    }

    /// A holder works on a claim that it was asked for: it is not late.
    pub(super) fn keep(&mut self, context: &Context, from: Member, key: ClaimKey, grant: Grant) {
        let watch = self.watches.get(&key).copied();
        let Some(mut watch) = watch.filter(|w| w.holder == from && w.grant == grant) else {
            return;
        };
        let patience = self.patience(context, key, from);
        let longer = 1 << watch.kept.min(DOUBLINGS);
        watch.unanswered = 0;
        watch.kept += 1;
        watch.at = context.now + patience.forward.min(patience.backward) * longer;
        self.set_watch(key, watch);
    }

    /// A holder released a claim; `idle` is the member that it was stolen for.
    pub(super) fn release(
        &mut self,
        context: &Context,
        from: Member,
        key: ClaimKey,
        idle: Option<Member>,
        out: &mut Out,
    ) {
        let late = self.unwatch(key).is_some_and(|watch| watch.unanswered > 0);
        let times = self.released.get(&key).map_or(0, |last| last.times);
        // A member that refuses work, because its engine has yet to drop it, does not get it back at once.
        let pause =
            if late { self.patience(context, key, from).forward } else { context.config.retry };
        let (times, until) = (times + u32::from(late), context.now + pause);
        let preference = idle.map_or(Preference::Not(from), Preference::For);
        self.released.insert(key, Released { times, preference, until });
        if late {
            event(CoordinatorEvent::Reclaimed { member: from, key }, out);
        }
    }

    /// Requests claims that other replicas have yet to begin, for a member with next to nothing left of a step
    /// at a stage.
    pub(super) fn steal(
        &mut self,
        context: &Context,
        steps: &OpenSteps,
        place: (Step, Stage),
        idle: Member,
        out: &mut Out,
    ) {
        if !context.runs(place.0) {
            return;
        }
        let service_time = self.service_times.measured(place.1, idle);
        let round_trips = steps.round_trip().map(|time| time * ROUND_TRIPS);
        let round_trips = round_trips.unwrap_or(context.config.retry);
        while let Some(ledger) = steps.ledger(place.0) {
            let delay = |key, holder| round_trips + transfer(context, ledger, (key, holder), idle);
            let chosen = self.stealing.choose(ledger, place, (idle, service_time), delay);
            let Some((key, holder, grant)) = chosen else { return };
            if !ledger.awaits(key, holder, grant) {
                self.stealing.ended(key, holder);
                continue;
            }
            self.stealing.request((key, holder, grant), idle);
            let patience = PassTimes::default();
            send(holder, FromCoordinator::Reclaim { key, grant, patience }, out);
        }
    }

    /// The holder of a claim answered a request for it. Returns the member that it was to be stolen for.
    pub(super) fn steal_answered(&mut self, key: ClaimKey, grant: Grant) -> Option<Member> {
        self.stealing.answered(key, grant)
    }
}

/// The time that the tensors of a claim take to an idle member and back, as far as they would not travel to
/// its holder: a holder that hosts the stage before too gets them from itself. Zero where the link was not
/// measured.
fn transfer(
    context: &Context,
    ledger: &Ledger,
    (key, holder): (ClaimKey, Member),
    idle: Member,
) -> Duration {
    let manifest = &context.config.manifest;
    let from = key.upstream().and_then(|before| ledger.holder(before));
    let Some(from) = from.filter(|from| *from != idle) else { return Duration::ZERO };
    let measured = context.members.links.measured(from.peer, idle.peer);
    let Some(rate) = measured.and_then(|link| link.rate) else { return Duration::ZERO };
    let activation = rate.time(manifest.boundary_bytes(manifest.codec.activations));
    if from == holder {
        activation + rate.time(manifest.boundary_bytes(manifest.codec.activation_gradients))
    } else {
        activation
    }
}
