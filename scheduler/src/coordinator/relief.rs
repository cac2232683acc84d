//! Relief: who has next to nothing left of a step takes over what a replica with more to do has yet
//! to begin. So a step does not wait at its end for the slow to do what the fast could, and what one
//! had taken in that becomes slow is done by others.

use std::collections::BTreeMap;
use std::ops::Bound;

use shoal_protocol::ids::{ClaimKey, Grant, Member, Microbatch, Stage, Step};
use shoal_protocol::message::{FromCoordinator, PassTimes};

use super::{Coordinator, Out, Phase, send};

/// Claims left of a step with which a member may get another's besides: in general, and when fewer
/// microbatches are unheld than there are replicas at work.
const LEFT: usize = 1;
const LEFT_AT_END: usize = 8;

/// How many halves as long as the other would need a member must have to do.
const HALVES: u64 = 3;

/// Round trips from when work is asked for until another has it: its holder lets go of it, who is
/// before it hears so, offers it and sends it.
const ROUND_TRIPS: u32 = 3;

/// Replicas that are looked at for one that is idle, those that follow it in order: all, where they are
/// not very many. Looking at all of many with each report would take the square of them.
const LOOKED_AT: usize = 64;

/// How often the same work is asked for in this way, whoever holds it.
const TIMES: u32 = 2;

/// Who has which claims, and which were asked for to relieve their holders.
#[derive(Debug, Default)]
pub(super) struct Relief {
    places: BTreeMap<(Step, Stage), Place>,
    asked: BTreeMap<ClaimKey, Asked>,
}

/// The claims of a step at a stage.
#[derive(Debug, Default)]
struct Place {
    holders: BTreeMap<Member, Holder>,
    /// How many claims were asked for to give them to each member, and are not answered for.
    coming: BTreeMap<Member, usize>,
}

/// What a member has.
#[derive(Debug)]
struct Holder {
    claims: BTreeMap<Microbatch, Grant>,
    /// Nanoseconds that it was measured to need for one. This and `last` are kept here since many are looked
    /// at for each idle.
    service_time: Option<u64>,
    /// The last of its claims that may be asked for, and how many there are up to it.
    last: Option<(u64, Microbatch, Grant)>,
}

/// Work that was asked for.
#[derive(Debug, Clone, Copy)]
struct Asked {
    /// Under which grant last: nothing is asked for twice under one.
    grant: Grant,
    /// Whom for, while that is not answered.
    idle: Option<Member>,
    times: u32,
}

impl Holder {
    /// The last claim that may be asked for.
    fn last(
        &self,
        may_ask: impl Fn(Microbatch, Grant) -> bool,
    ) -> Option<(u64, Microbatch, Grant)> {
        let known = self.claims.iter().rev();
        let mut left = (1..=self.claims.len() as u64).rev().zip(known);
        let (count, (at, grant)) = left.find(|(_, (at, grant))| may_ask(**at, **grant))?;
        Some((count, *at, *grant))
    }

    /// Nanoseconds until it is done with what it has up to the last that may be asked for.
    fn busy(&self) -> Option<(u64, Microbatch, Grant)> {
        let (count, at, grant) = self.last?;
        Some((self.service_time?.saturating_mul(count), at, grant))
    }
}

impl Place {
    /// Claims that a member has, or that were asked for to give it.
    fn left(&self, member: Member) -> usize {
        let has = self.holders.get(&member).map_or(0, |holder| holder.claims.len());
        has + self.coming.get(&member).copied().unwrap_or(0)
    }

    /// Something is asked for to give it to a member.
    fn comes(&mut self, idle: Member) {
        *self.coming.entry(idle).or_insert(0) += 1;
    }

    /// What was asked for to give it to a member is answered for.
    fn came(&mut self, idle: Member) {
        if let Some(coming) = self.coming.get_mut(&idle) {
            *coming -= 1;
            if *coming == 0 {
                self.coming.remove(&idle);
            }
        }
    }
}

impl Relief {
    /// A member, which was measured to have this pace, has a claim.
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
            self.changed(key, holder);
        }
    }

    /// A member has a claim no more, or its work is done.
    pub(super) fn ended(&mut self, key: ClaimKey, holder: Member) {
        let Some(place) = self.places.get_mut(&(key.step, key.stage)) else { return };
        if let Some(known) = place.holders.get_mut(&holder) {
            known.claims.remove(&key.microbatch);
            if known.claims.is_empty() {
                place.holders.remove(&holder);
            } else {
                self.changed(key, holder);
            }
        }
    }

    /// A member has other claims beside this one than it had, or this one was asked for.
    fn changed(&mut self, key: ClaimKey, holder: Member) {
        let Self { places, asked } = self;
        let place = places.get_mut(&(key.step, key.stage));
        if let Some(known) = place.and_then(|place| place.holders.get_mut(&holder)) {
            known.last =
                known.last(|at, grant| may_ask(asked, ClaimKey { microbatch: at, ..key }, grant));
        }
    }

    /// What a member is measured to need at a stage is something else now, or at all where none is
    /// named.
    pub(super) fn service_time_changed(
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

    /// A claim of a member is asked for, to give it to another.
    fn ask(&mut self, (key, holder, grant): (ClaimKey, Member, Grant), idle: Member) {
        let before = self.asked.get(&key).copied();
        let times = before.map_or(0, |asked| asked.times) + 1;
        self.asked.insert(key, Asked { grant, idle: Some(idle), times });
        let place = self.places.entry((key.step, key.stage)).or_default();
        if let Some(before) = before.and_then(|asked| asked.idle) {
            place.came(before);
        }
        place.comes(idle);
        self.changed(key, holder);
    }

    /// The holder of what was asked for answered. Returns whom it was asked for.
    pub(super) fn answered(&mut self, key: ClaimKey, grant: Grant) -> Option<Member> {
        let asked = self.asked.get_mut(&key).filter(|asked| asked.grant == grant)?;
        let idle = asked.idle.take()?;
        if let Some(place) = self.places.get_mut(&(key.step, key.stage)) {
            place.came(idle);
        }
        Some(idle)
    }

    /// A step is committed.
    pub(super) fn forget_through(&mut self, step: Step) {
        self.places.retain(|(of, _), _| *of > step);
        self.asked.retain(|key, _| key.step > step);
    }

    /// Whether what comes to each member, and holders' paces, are what is asked for and measured.
    #[cfg(test)]
    pub(super) fn is_counted(&self, measured: impl Fn(Stage, Member) -> Option<u64>) -> bool {
        let mut coming: BTreeMap<(Step, Stage), BTreeMap<Member, usize>> = BTreeMap::new();
        for (key, idle) in self.asked.iter().filter_map(|(key, asked)| Some((key, asked.idle?))) {
            *coming.entry((key.step, key.stage)).or_default().entry(idle).or_insert(0) += 1;
        }
        let mut counted = |(at, place): (&(Step, Stage), &Place)| {
            let mut holders = place.holders.iter();
            coming.remove(at).unwrap_or_default() == place.coming
                && holders.all(|(member, holder)| {
                    let key = |microbatch| ClaimKey { step: at.0, stage: at.1, microbatch };
                    let last = holder.last(|at, grant| may_ask(&self.asked, key(at), grant));
                    !holder.claims.is_empty()
                        && (holder.service_time, holder.last) == (measured(at.1, *member), last)
                })
        };
        self.places.iter().all(&mut counted) && coming.is_empty()
    }
}

/// Whether a claim may be asked for, by what was.
fn may_ask(asked: &BTreeMap<ClaimKey, Asked>, key: ClaimKey, grant: Grant) -> bool {
    let asked = asked.get(&key);
    asked.is_none_or(|asked| asked.grant != grant && asked.times < TIMES)
}

impl Coordinator {
    /// Asks for what another replica has yet to begin, for a member that has next to nothing left of
    /// a step at a stage.
    pub(super) fn relieve(&mut self, step: Step, stage: Stage, idle: Member, out: &mut Out) {
        let runs = matches!(self.phase, Phase::Open | Phase::Closing | Phase::Committing);
        if !runs || !self.has_weights_of(step) {
            return;
        }
        while let Some((key, holder, grant)) = self.to_relieve((step, stage), idle) {
            let ledger = self.work.ledgers.get(&step);
            if !ledger.is_some_and(|ledger| ledger.awaits(key, holder, grant)) {
                self.stragglers.relief.ended(key, holder);
                continue;
            }
            self.stragglers.relief.ask((key, holder, grant), idle);
            let patience = PassTimes::default();
            send(holder, FromCoordinator::Reclaim { key, grant, patience }, out);
        }
    }

    /// The last claim of the replica that has most to do, of those that are looked at, if that is so much
    /// more than the idle one has that one claim less makes the step's end come sooner.
    fn to_relieve(&self, place: (Step, Stage), idle: Member) -> Option<(ClaimKey, Member, Grant)> {
        let (step, stage) = place;
        let relief = &self.stragglers.relief;
        let place = relief.places.get(&place)?;
        let left = place.left(idle);
        let unheld = self.work.ledgers.get(&step)?.unheld(stage) as usize;
        if left > if unheld < place.holders.len() { LEFT_AT_END } else { LEFT } {
            return None;
        }
        let service_time = self.stragglers.service_times.measured(stage, idle)?;
        let done_at = service_time.saturating_mul(left as u64 + 1);
        let path = self.work.round_trip().map_or(self.config.retry, |time| time * ROUND_TRIPS);
        let path = u64::try_from(path.as_nanos()).unwrap_or(u64::MAX);
        let longer = (done_at.saturating_mul(HALVES) / 2).saturating_add(path);
        let after = place.holders.range((Bound::Excluded(idle), Bound::Unbounded));
        let others = after.chain(place.holders.range(..idle)).take(LOOKED_AT);
        let busy = others.filter_map(|(member, holder)| {
            let (all, at, grant) = holder.busy().filter(|(all, ..)| *all >= longer)?;
            Some((all, *member, at, grant))
        });
        let (_, holder, microbatch, grant) = busy.max()?;
        Some((ClaimKey { step, stage, microbatch }, holder, grant))
    }

    /// A holder works on a claim: if it was asked for another's relief, that one may get one more.
    pub(super) fn relief_refused(&mut self, key: ClaimKey, grant: Grant, out: &mut Out) {
        if let Some(idle) = self.stragglers.relief.answered(key, grant) {
            self.relieve(key.step, key.stage, idle, out);
        }
    }
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

    fn left(relief: &Relief, number: u8) -> usize {
        relief.places.get(&PLACE).map_or(0, |place| place.left(member(number)))
    }

    #[test]
    fn what_is_asked_for_counts_for_whom_it_is_asked_until_it_is_answered() {
        let mut relief = Relief::default();
        relief.claimed(key(0), member(1), grant(), || None);
        relief.ask((key(0), member(1), grant()), member(2));
        assert_eq!([1, 2, 3].map(|number| left(&relief, number)), [1, 1, 0]);
        assert_eq!(relief.answered(key(0), grant()), Some(member(2)));
        assert_eq!(relief.answered(key(0), grant()), None);
        assert_eq!(left(&relief, 2), 0);
        relief.forget_through(PLACE.0);
        assert_eq!(left(&relief, 1), 0);
    }

    /// What may happen to a claim.
    #[derive(Debug, Clone, Copy)]
    enum Word {
        Claimed(u32, u8),
        Ended(u32, u8),
        Asked(u32, u8),
        Answered(u32),
        ServiceTimeChanged(u8, u64),
    }

    fn words() -> impl Strategy<Value = Vec<Word>> {
        let (key, who) = (0u32..8, 0u8..3);
        let word = prop_oneof![
            (key.clone(), who.clone()).prop_map(|(key, who)| Word::Claimed(key, who)),
            (key.clone(), who.clone()).prop_map(|(key, who)| Word::Ended(key, who)),
            (key.clone(), who.clone()).prop_map(|(key, who)| Word::Asked(key, who)),
            key.prop_map(Word::Answered),
            (who, 1u64..9)
                .prop_map(|(who, service_time)| Word::ServiceTimeChanged(who, service_time)),
        ];
        prop::collection::vec(word, 0..60)
    }

    proptest! {
        /// However claims come and go, and whatever is asked for, each member has left what was claimed
        /// and has not ended and what is asked for to give it, and who has some has its newest pace.
        #[test]
        fn what_is_left_is_what_a_recount_says(words in words()) {
            let mut relief = Relief::default();
            let mut held = std::collections::BTreeSet::new();
            let mut service_times = [None; 3];
            for word in words {
                match word {
                    Word::Claimed(at, who) => {
                        relief.claimed(key(at), member(who), grant(), || service_times[usize::from(who)]);
                        held.insert((who, at));
                    }
                    Word::Ended(at, who) => {
                        relief.ended(key(at), member(who));
                        held.remove(&(who, at));
                    }
                    Word::Asked(at, who) => {
                        // Whoever has it; nobody where two are said to.
                        let holder = held.iter().find(|(_, of)| *of == at).map(|(of, _)| *of);
                        let alone = held.iter().filter(|(_, of)| *of == at).count() == 1;
                        if let Some(holder) = holder.filter(|_| alone) {
                            relief.ask((key(at), member(holder), grant()), member(who));
                        }
                    }
                    Word::Answered(at) => {
                        let asked = relief.asked.get(&key(at)).and_then(|asked| asked.idle);
                        prop_assert_eq!(relief.answered(key(at), grant()), asked);
                    }
                    Word::ServiceTimeChanged(who, service_time) => {
                        service_times[usize::from(who)] = Some(service_time);
                        relief.service_time_changed(Some(PLACE.1), member(who), Some(service_time));
                    }
                }
                let measured = |_, of: Member| service_times[usize::from(of.peer.0[0])];
                let shared = (0..8).any(|at| held.iter().filter(|(_, of)| *of == at).count() > 1);
                prop_assert!(shared || relief.is_counted(measured));
                for who in 0..3 {
                    let has = held.iter().filter(|(of, _)| *of == who).count();
                    let comes = |asked: &&Asked| asked.idle == Some(member(who));
                    let coming = relief.asked.values().filter(comes).count();
                    prop_assert_eq!(left(&relief, who), has + coming);
                    let place = relief.places.get(&PLACE);
                    let holder = place.and_then(|place| place.holders.get(&member(who)));
                    prop_assert_eq!(holder.is_some(), has > 0);
                    let service_time = holder.map(|holder| holder.service_time);
                    prop_assert!(service_time.is_none_or(|service_time| service_time == service_times[usize::from(who)]));
                }
            }
        }
    }
}
