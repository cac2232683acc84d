//! Late claims are asked back, where another replica could do the work. Who holds one answers at
//! once, since its words never wait for its engine; who does not answer is expelled.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{ClaimKey, Grant, Member, Step};
use shoal_protocol::message::{FromCoordinator, PassTimes};
use shoal_protocol::units::Moment;

use super::relief::Relief;
use super::{Coordinator, Out, Phase, event, send};
use crate::action::CoordinatorEvent;
use crate::deadline::Times;
use crate::ledger::Ledger;
use crate::throughput::ServiceTimes;

/// Recalls without an answer, a retry apart, after which the holder is expelled.
const UNANSWERED: u32 = 8;

/// Doublings of patience at most.
const DOUBLINGS: u32 = 6;

/// The claims that are looked after, and what is known of how long work takes.
#[derive(Debug, Default)]
pub(super) struct Stragglers {
    times: Times,
    /// What work is expected to take, for placing newcomers.
    pub(super) service_times: ServiceTimes,
    watches: BTreeMap<ClaimKey, Watch>,
    /// When each watch ends.
    due: BTreeSet<(Moment, ClaimKey)>,
    pub(super) relief: Relief,
    /// What was let go of.
    released: BTreeMap<ClaimKey, Released>,
}

/// One claim that is looked after.
#[derive(Debug, Clone, Copy)]
struct Watch {
    holder: Member,
    grant: Grant,
    /// When it is asked back.
    at: Moment,
    /// Recalls without an answer.
    unanswered: u32,
    /// Recalls that were answered with `Working`.
    calm: u32,
}

#[derive(Debug, Clone, Copy)]
struct Released {
    /// How often it was asked back.
    times: u32,
    /// Who should have it next, or should not, and until when.
    preference: Preference,
    until: Moment,
}

/// Who should have work that was let go of just now, or should not.
#[derive(Debug, Clone, Copy)]
pub(super) enum Preference {
    /// For whose relief it was let go of.
    For(Member),
    /// Who let go of it for itself.
    Not(Member),
}

impl Stragglers {
    fn watch(&mut self, key: ClaimKey, watch: Watch) {
        if let Some(before) = self.watches.insert(key, watch) {
            self.due.remove(&(before.at, key));
            if before.holder != watch.holder {
                self.relief.ended(key, before.holder);
            }
        }
        let service_time = || self.service_times.measured(key.stage, watch.holder);
        self.relief.claimed(key, watch.holder, watch.grant, service_time);
        self.due.insert((watch.at, key));
    }

    fn unwatch(&mut self, key: ClaimKey) -> Option<Watch> {
        let watch = self.watches.remove(&key)?;
        self.due.remove(&(watch.at, key));
        self.relief.ended(key, watch.holder);
        Some(watch)
    }

    fn next_due(&mut self, now: Moment) -> Option<(ClaimKey, Watch)> {
        let (at, key) = *self.due.first()?;
        if at > now {
            return None;
        }
        self.unwatch(key).map(|watch| (key, watch))
    }

    pub(super) fn patience(&self) -> Option<Moment> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Who should have this work next, or should not, if somebody let go of it just now.
    pub(super) fn prefers(&self, key: ClaimKey, now: Moment) -> Option<Preference> {
        self.released.get(&key).filter(|last| last.until > now).map(|last| last.preference)
    }

    /// Whether what is kept for relief is what a recount says.
    #[cfg(test)]
    pub(super) fn is_counted(&self) -> bool {
        self.relief.is_counted(|stage, member| self.service_times.measured(stage, member))
    }

    /// A step is committed.
    pub(super) fn forget_through(&mut self, step: Step) {
        self.watches.retain(|key, _| key.step > step);
        self.due.retain(|(_, key)| key.step > step);
        self.released.retain(|key, _| key.step > step);
        self.relief.forget_through(step);
    }

    /// Every open step is forgotten.
    pub(super) fn forget_work(&mut self) {
        let (times, service_times) =
            (std::mem::take(&mut self.times), std::mem::take(&mut self.service_times));
        *self = Self { times, service_times, ..Self::default() };
    }

    /// A member is gone.
    pub(super) fn forget_member(&mut self, member: Member) {
        self.times.forget(member);
        self.service_times.forget(member);
        self.relief.service_time_changed(None, member, None);
    }
}

impl Coordinator {
    /// A claim was granted, or its grant said again.
    pub(super) fn watch(&mut self, key: ClaimKey, holder: Member, grant: Grant) {
        let known = self.stragglers.watches.get(&key).is_some_and(|watch| watch.grant == grant);
        if !known {
            let at = self.now + self.patience_with(key, holder).forward;
            let watch = Watch { holder, grant, at, unanswered: 0, calm: 0 };
            self.stragglers.watch(key, watch);
        }
    }

    /// Looks after every claim that an earlier coordinator granted.
    pub(super) fn watch_taken_over(&mut self) {
        let open: Vec<_> = self.work.ledgers.values().flat_map(Ledger::unfinished).collect();
        for (key, holder, grant) in open {
            self.watch(key, holder, grant);
        }
    }

    /// Work is done: how long it took is learnt from, and the stage before has all it needs.
    pub(super) fn learn(&mut self, from: Member, key: ClaimKey, pass_times: PassTimes) {
        self.stragglers.times.add(key.stage, from, pass_times);
        // What is held out has no backward pass.
        if key.microbatch.0 < self.config.manifest.training.microbatches {
            let service_time =
                self.stragglers.service_times.add(key.stage, from, pass_times, self.now);
            self.stragglers.relief.service_time_changed(Some(key.stage), from, Some(service_time));
        }
        self.stragglers.unwatch(key);
        let Some(before) = key.upstream() else { return };
        if let Some(mut watch) = self.stragglers.watches.get(&before).copied()
            && watch.unanswered == 0
        {
            watch.calm = 0;
            watch.at = self.now + self.patience_with(before, watch.holder).backward;
            self.stragglers.watch(before, watch);
        }
    }

    /// After how long a member's work is late. Each release of the same claim doubles it.
    fn patience_with(&self, key: ClaimKey, holder: Member) -> PassTimes {
        let unknown = PassTimes { forward: self.config.patience, backward: self.config.patience };
        let late = self.stragglers.times.late(key.stage, holder).unwrap_or(unknown);
        let releases = self.stragglers.released.get(&key).map_or(0, |last| last.times);
        let longer = 1 << releases.min(DOUBLINGS);
        let at_least = self.config.retry;
        PassTimes {
            forward: late.forward.max(at_least) * longer,
            backward: late.backward.max(at_least) * longer,
        }
    }

    /// Asks back what is late.
    pub(super) fn reclaim_late(&mut self, out: &mut Out) {
        while let Some((key, watch)) = self.stragglers.next_due(self.now) {
            let ledger = self.work.ledgers.get(&key.step);
            if !ledger.is_some_and(|ledger| ledger.awaits(key, watch.holder, watch.grant)) {
                continue;
            }
            let patience = self.patience_with(key, watch.holder);
            let runs = matches!(self.phase, Phase::Open | Phase::Closing | Phase::Committing);
            let open = runs && self.has_weights_of(key.step);
            let replaceable =
                self.membership.replicas(key.stage).any(|other| other != watch.holder);
            if !open || !replaceable {
                let at = self.now + patience.forward.max(patience.backward);
                self.stragglers.watch(key, Watch { at, unanswered: 0, ..watch });
                continue;
            }
            if watch.unanswered >= UNANSWERED && self.can_spare(watch.holder) {
                self.lost(watch.holder, "it does not answer when its work is asked back", out);
                continue;
            }
            let grant = watch.grant;
            send(watch.holder, FromCoordinator::Reclaim { key, grant, patience }, out);
            let (at, unanswered) = (self.now + self.config.retry, watch.unanswered + 1);
            self.stragglers.watch(key, Watch { at, unanswered, ..watch });
        }
    }

    /// A claim that was asked back is not late.
    pub(super) fn working(&mut self, from: Member, key: ClaimKey, grant: Grant) {
        let watch = self.stragglers.watches.get(&key).copied();
        let Some(mut watch) = watch.filter(|w| w.holder == from && w.grant == grant) else {
            return;
        };
        let patience = self.patience_with(key, from);
        let longer = 1 << watch.calm.min(DOUBLINGS);
        watch.unanswered = 0;
        watch.calm += 1;
        watch.at = self.now + patience.forward.min(patience.backward) * longer;
        self.stragglers.watch(key, watch);
    }

    /// A holder let go of a claim, for the relief of somebody or not: others do the work.
    pub(super) fn let_go(
        &mut self,
        from: Member,
        key: ClaimKey,
        idle: Option<Member>,
        out: &mut Out,
    ) {
        let reclaimed = self.stragglers.unwatch(key).is_some_and(|watch| watch.unanswered > 0);
        let times = self.stragglers.released.get(&key).map_or(0, |last| last.times);
        // Who refuses what it is given, since its engine has yet to drop it, is not asked at once.
        let pause =
            if reclaimed { self.patience_with(key, from).forward } else { self.config.retry };
        let (times, until) = (times + u32::from(reclaimed), self.now + pause);
        let preference = idle.map_or(Preference::Not(from), Preference::For);
        self.stragglers.released.insert(key, Released { times, preference, until });
        if reclaimed {
            event(CoordinatorEvent::Reclaimed { member: from, key }, out);
        }
    }
}
