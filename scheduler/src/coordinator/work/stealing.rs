//! Work stealing: a member with next to nothing left of a step takes over claims that a replica with more left
//! has yet to begin. So the end of a step does not wait for slow replicas, and work that a replica accepted
//! before it became slow is done by others.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Grant, Member, Microbatch, Stage, Step};

use crate::coordinator::work::ledger::Ledger;

/// Claims left of a step with which a member may get another's besides: in general, and when fewer
/// microbatches are unheld than there are replicas at work.
const LEFT: usize = 1;
const LEFT_AT_END: usize = 8;

/// A claim is stolen if its holder is busy for at least half as many times this as the idle member would be.
const HALVES: u64 = 3;

/// Replicas that are compared for one idle member: those that follow it in order, which are all where there are
/// not very many. Comparing all of many at each report would take quadratic time.
const COMPARED: usize = 64;

/// How often the same claim may be requested in this way, from all holders together.
const TIMES: u32 = 2;

/// The claims of each member, and those that were requested for an idle member.
#[derive(Debug, Default)]
pub(super) struct Stealing {
    places: BTreeMap<(Step, Stage), Place>,
    requested: BTreeMap<ClaimKey, Requested>,
}

/// The claims of a step at a stage.
#[derive(Debug, Default)]
struct Place {
    holders: BTreeMap<Member, Holder>,
    /// The number of claims that are requested for each member, without an answer so far.
    incoming: BTreeMap<Member, usize>,
}

/// The claims that a member holds.
#[derive(Debug)]
struct Holder {
    claims: BTreeMap<Microbatch, Grant>,
    /// Measured nanoseconds per microbatch. This and `last` are cached, since many holders are compared for
    /// each idle member.
    service_time: Option<u64>,
    /// The last of the claims that may be requested, and the number of claims up to it.
    last: Option<(u64, Microbatch, Grant)>,
}

/// A claim that was requested.
#[derive(Debug, Clone, Copy)]
struct Requested {
    /// The newest grant that was requested. The same grant is requested only once.
    grant: Grant,
    /// The member that the claim is for, until the holder answers.
    idle: Option<Member>,
    times: u32,
}

impl Holder {
    /// The last claim that may be requested, and the number of claims up to it.
    fn last(
        &self,
        may_request: impl Fn(Microbatch, Grant) -> bool,
    ) -> Option<(u64, Microbatch, Grant)> {
        let known = self.claims.iter().rev();
        let mut left = (1..=self.claims.len() as u64).rev().zip(known);
        let (count, (at, grant)) = left.find(|(_, (at, grant))| may_request(**at, **grant))?;
        Some((count, *at, *grant))
    }

    /// Nanoseconds until it is done with its claims up to the last that may be requested, and that claim.
    fn busy(&self) -> Option<(u64, Microbatch, Grant)> {
        let (count, at, grant) = self.last?;
        Some((self.service_time?.saturating_mul(count), at, grant))
    }
}

impl Place {
    /// Claims that a member holds, or that are requested for it.
    fn left(&self, member: Member) -> usize {
        let held = self.holders.get(&member).map_or(0, |holder| holder.claims.len());
        held + self.incoming.get(&member).copied().unwrap_or(0)
    }

    fn add_incoming(&mut self, idle: Member) {
        *self.incoming.entry(idle).or_insert(0) += 1;
    }

    fn remove_incoming(&mut self, idle: Member) {
        if let Some(incoming) = self.incoming.get_mut(&idle) {
            *incoming -= 1;
            if *incoming == 0 {
                self.incoming.remove(&idle);
            }
        }
    }
}

impl Stealing {
    /// A member holds a claim. `service_time` gives its measured nanoseconds per microbatch.
    pub(super) fn claimed(
        &mut self,
        key: ClaimKey,
        holder: Member,
        grant: Grant,
        service_time: impl FnOnce() -> Option<u64>,
    ) {
        let place = self.places.entry((key.step, key.stage)).or_default();
        let new = || Holder { claims: BTreeMap::new(), service_time: service_time(), last: None };
        let known = place.holders.entry(holder).or_insert_with(new);
        if known.claims.insert(key.microbatch, grant) != Some(grant) {
            self.update_last(key, holder);
        }
    }

    /// A member does not hold a claim any more, or its work is done.
    pub(super) fn ended(&mut self, key: ClaimKey, holder: Member) {
        let Some(place) = self.places.get_mut(&(key.step, key.stage)) else { return };
        if let Some(known) = place.holders.get_mut(&holder) {
            known.claims.remove(&key.microbatch);
            if known.claims.is_empty() {
                place.holders.remove(&holder);
            } else {
                self.update_last(key, holder);
            }
        }
    }

    /// Updates the cached last claim of a holder.
    fn update_last(&mut self, key: ClaimKey, holder: Member) {
        let Self { places, requested } = self;
        let place = places.get_mut(&(key.step, key.stage));
        if let Some(known) = place.and_then(|place| place.holders.get_mut(&holder)) {
            known.last = known.last(|at, grant| {
                may_request(requested, ClaimKey { microbatch: at, ..key }, grant)
            });
        }
    }

    /// Sets a member's measured nanoseconds per microbatch, at one stage or at all.
    pub(super) fn set_service_time(
        &mut self,
        stage: Option<Stage>,
        member: Member,
        service_time: Option<u64>,
    ) {
        for ((_, of), place) in &mut self.places {
            if stage.is_none_or(|stage| stage == *of)
                && let Some(holder) = place.holders.get_mut(&member)
            {
                holder.service_time = service_time;
            }
        }
    }

    /// A claim is requested from its holder, for an idle member.
    pub(super) fn request(
        &mut self,
        (key, holder, grant): (ClaimKey, Member, Grant),
        idle: Member,
    ) {
        let before = self.requested.get(&key).copied();
        let times = before.map_or(0, |before| before.times) + 1;
        self.requested.insert(key, Requested { grant, idle: Some(idle), times });
        let place = self.places.entry((key.step, key.stage)).or_default();
        if let Some(before) = before.and_then(|before| before.idle) {
            place.remove_incoming(before);
        }
        place.add_incoming(idle);
        self.update_last(key, holder);
    }

    /// Chooses the claim to steal: the last one of the busiest replica among those that are compared, if that
    /// is busy for so much longer than the idle member that the move ends the step sooner. `delay` is the time
    /// until the idle member would hold the work of a claim that another member holds, `service_time` its
    /// measured nanoseconds per microbatch.
    pub(super) fn choose(
        &self,
        ledger: &Ledger,
        (step, stage): (Step, Stage),
        (idle, service_time): (Member, Option<u64>),
        delay: impl Fn(ClaimKey, Member) -> Duration,
    ) -> Option<(ClaimKey, Member, Grant)> {
        let place = self.places.get(&(step, stage))?;
        let left = place.left(idle);
        let unheld = ledger.unheld(stage) as usize;
        if left > if unheld < place.holders.len() { LEFT_AT_END } else { LEFT } {
            return None;
        }
        let done_at = service_time?.saturating_mul(left as u64 + 1);
        let longer = done_at.saturating_mul(HALVES) / 2;
        let after = place.holders.range((Bound::Excluded(idle), Bound::Unbounded));
        let others = after.chain(place.holders.range(..idle)).take(COMPARED);
        let busy = others.filter_map(|(member, holder)| {
            let (all, microbatch, grant) = holder.busy().filter(|(all, ..)| *all >= longer)?;
            let key = ClaimKey { step, stage, microbatch };
            let delay = u64::try_from(delay(key, *member).as_nanos()).unwrap_or(u64::MAX);
            (all >= longer.saturating_add(delay)).then_some((all, *member, key, grant))
        });
        let (_, holder, key, grant) = busy.max_by_key(|(all, member, ..)| (*all, *member))?;
        Some((key, holder, grant))
    }

    /// The holder of a claim answered a request for it. Returns the member that the claim was for.
    pub(super) fn answered(&mut self, key: ClaimKey, grant: Grant) -> Option<Member> {
        let requested = self.requested.get_mut(&key).filter(|last| last.grant == grant)?;
        let idle = requested.idle.take()?;
        if let Some(place) = self.places.get_mut(&(key.step, key.stage)) {
            place.remove_incoming(idle);
        }
        Some(idle)
    }

    /// A step is committed.
    pub(super) fn forget_up_to(&mut self, step: Step) {
        self.places.retain(|(of, _), _| *of > step);
        self.requested.retain(|key, _| key.step > step);
    }

    /// Whether all cached values equal a recount.
    #[cfg(test)]
    pub(super) fn is_counted(&self, measured: impl Fn(Stage, Member) -> Option<u64>) -> bool {
        let mut incoming: BTreeMap<(Step, Stage), BTreeMap<Member, usize>> = BTreeMap::new();
        for (key, idle) in self.requested.iter().filter_map(|(key, last)| Some((key, last.idle?))) {
            *incoming.entry((key.step, key.stage)).or_default().entry(idle).or_insert(0) += 1;
        }
        let mut counted = |(at, place): (&(Step, Stage), &Place)| {
            let mut holders = place.holders.iter();
            incoming.remove(at).unwrap_or_default() == place.incoming
                && holders.all(|(member, holder)| {
                    let key = |microbatch| ClaimKey { step: at.0, stage: at.1, microbatch };
                    let last =
                        holder.last(|at, grant| may_request(&self.requested, key(at), grant));
                    !holder.claims.is_empty()
                        && (holder.service_time, holder.last) == (measured(at.1, *member), last)
                })
        };
        self.places.iter().all(&mut counted) && incoming.is_empty()
    }
}

/// Whether a claim may be requested.
fn may_request(requested: &BTreeMap<ClaimKey, Requested>, key: ClaimKey, grant: Grant) -> bool {
    let last = requested.get(&key);
    last.is_none_or(|last| last.grant != grant && last.times < TIMES)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shoal_protocol::ids::{Incarnation, PeerId};

    use super::*;

    const PLACE: (Step, Stage) = (Step(3), Stage(1));

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    fn key(microbatch: u32) -> ClaimKey {
        ClaimKey { step: PLACE.0, stage: PLACE.1, microbatch: Microbatch(microbatch) }
    }

    fn grant() -> Grant {
        Grant::default()
    }

    fn left(stealing: &Stealing, number: u8) -> usize {
        stealing.places.get(&PLACE).map_or(0, |place| place.left(member(number)))
    }

    #[test]
    fn a_requested_claim_counts_for_the_idle_member_until_its_holder_answers() {
        let mut stealing = Stealing::default();
        stealing.claimed(key(0), member(1), grant(), || None);
        stealing.request((key(0), member(1), grant()), member(2));
        assert_eq!([1, 2, 3].map(|number| left(&stealing, number)), [1, 1, 0]);
        assert_eq!(stealing.answered(key(0), grant()), Some(member(2)));
        assert_eq!(stealing.answered(key(0), grant()), None);
        assert_eq!(left(&stealing, 2), 0);
        stealing.forget_up_to(PLACE.0);
        assert_eq!(left(&stealing, 1), 0);
    }

    #[test]
    fn a_claim_stays_where_its_tensors_would_travel_longer_than_its_holder_is_busy() {
        let mut stealing = Stealing::default();
        let second = 1_000_000_000;
        (0..10).for_each(|at| stealing.claimed(key(at), member(1), grant(), || Some(second)));
        (0..2).for_each(|at| stealing.claimed(key(10 + at), member(3), grant(), || Some(second)));
        let ledger = Ledger::open(PLACE.0, 2, 12, 12);
        let stolen = |near: u64, far: u64| {
            let delay =
                |_, holder| Duration::from_secs(if holder == member(1) { far } else { near });
            stealing.choose(&ledger, PLACE, (member(2), Some(second)), delay)
        };
        // Ten seconds of work against one and a half, and two.
        assert_eq!(stolen(0, 0), Some((key(9), member(1), grant())));
        assert_eq!(stolen(0, 8), Some((key(9), member(1), grant())));
        assert_eq!(stolen(0, 9), Some((key(11), member(3), grant())));
        assert_eq!(stolen(1, 9), None);
    }

    /// An event of a claim; the second number is a member.
    #[derive(Debug, Clone, Copy)]
    enum Event {
        Claimed(u32, u8),
        Ended(u32, u8),
        Requested(u32, u8),
        Answered(u32),
        ServiceTimeChanged(u8, u64),
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let (key, member) = (0u32..8, 0u8..3);
        let event = prop_oneof![
            (key.clone(), member.clone()).prop_map(|(key, who)| Event::Claimed(key, who)),
            (key.clone(), member.clone()).prop_map(|(key, who)| Event::Ended(key, who)),
            (key.clone(), member.clone()).prop_map(|(key, who)| Event::Requested(key, who)),
            key.prop_map(Event::Answered),
            (member, 1u64..9)
                .prop_map(|(who, service_time)| Event::ServiceTimeChanged(who, service_time)),
        ];
        prop::collection::vec(event, 0..60)
    }

    proptest! {
        /// After any events, a member has left the claims that it holds and those requested for it, and each
        /// holder has its newest service time.
        #[test]
        fn claims_left_equal_a_recount(events in events()) {
            let mut stealing = Stealing::default();
            let mut held = std::collections::BTreeSet::new();
            let mut service_times = [None; 3];
            for event in events {
                match event {
                    Event::Claimed(at, who) => {
                        stealing.claimed(key(at), member(who), grant(), || service_times[usize::from(who)]);
                        held.insert((who, at));
                    }
                    Event::Ended(at, who) => {
                        stealing.ended(key(at), member(who));
                        held.remove(&(who, at));
                    }
                    Event::Requested(at, who) => {
                        // Only a claim with one holder can be requested.
                        let holder = held.iter().find(|(_, of)| *of == at).map(|(of, _)| *of);
                        let alone = held.iter().filter(|(_, of)| *of == at).count() == 1;
                        if let Some(holder) = holder.filter(|_| alone) {
                            stealing.request((key(at), member(holder), grant()), member(who));
                        }
                    }
                    Event::Answered(at) => {
                        let asked = stealing.requested.get(&key(at)).and_then(|last| last.idle);
                        prop_assert_eq!(stealing.answered(key(at), grant()), asked);
                    }
                    Event::ServiceTimeChanged(who, service_time) => {
                        service_times[usize::from(who)] = Some(service_time);
                        stealing.set_service_time(Some(PLACE.1), member(who), Some(service_time));
                    }
                }
                let measured = |_, of: Member| service_times[usize::from(of.peer.0[0])];
                let shared = (0..8).any(|at| held.iter().filter(|(_, of)| *of == at).count() > 1);
                prop_assert!(shared || stealing.is_counted(measured));
                for who in 0..3 {
                    let has = held.iter().filter(|(of, _)| *of == who).count();
                    let comes = |last: &&Requested| last.idle == Some(member(who));
                    let coming = stealing.requested.values().filter(comes).count();
                    prop_assert_eq!(left(&stealing, who), has + coming);
                    let place = stealing.places.get(&PLACE);
                    let holder = place.and_then(|place| place.holders.get(&member(who)));
                    prop_assert_eq!(holder.is_some(), has > 0);
                    let service_time = holder.map(|holder| holder.service_time);
                    prop_assert!(service_time.is_none_or(|service_time| service_time == service_times[usize::from(who)]));
                }
            }
        }
    }
}
