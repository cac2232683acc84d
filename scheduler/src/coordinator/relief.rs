//! Relief: who has next to nothing left of a step takes over what a replica with more to do has yet
//! to begin. So a step does not wait at its end for the slow to do what the fast could, and what one
//! had taken in that becomes slow is done by others.

use std::collections::BTreeMap;
use std::ops::Bound;

use shoal_protocol::ids::{ClaimKey, Grant, Member, Microbatch, Stage, Step};
use shoal_protocol::message::{FromCoordinator, Spent};

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
    open: BTreeMap<(Step, Stage), BTreeMap<Member, BTreeMap<Microbatch, Grant>>>,
    asked: BTreeMap<ClaimKey, Asked>,
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

impl Relief {
    /// A member has a claim.
    pub(super) fn claimed(&mut self, key: ClaimKey, holder: Member, grant: Grant) {
        let open = self.open.entry((key.step, key.stage)).or_default();
        open.entry(holder).or_default().insert(key.microbatch, grant);
    }

    /// A member has a claim no more, or its work is done.
    pub(super) fn ended(&mut self, key: ClaimKey, holder: Member) {
        let Some(open) = self.open.get_mut(&(key.step, key.stage)) else { return };
        if let Some(claims) = open.get_mut(&holder) {
            claims.remove(&key.microbatch);
            if claims.is_empty() {
                open.remove(&holder);
            }
        }
    }

    /// The holder of what was asked for answered. Returns whom it was asked for.
    fn answered(&mut self, key: ClaimKey, grant: Grant) -> Option<Member> {
        let asked = self.asked.get_mut(&key).filter(|asked| asked.grant == grant)?;
        asked.idle.take()
    }

    /// A step is committed.
    pub(super) fn forget_through(&mut self, step: Step) {
        self.open.retain(|(of, _), _| *of > step);
        self.asked.retain(|key, _| key.step > step);
    }

    /// Claims of a step at a stage that a member has, or that were asked for to give it.
    fn left(&self, (step, stage): (Step, Stage), member: Member) -> usize {
        let open = self.open.get(&(step, stage)).and_then(|open| open.get(&member));
        let first = ClaimKey { step, stage, microbatch: Microbatch(0) };
        let last = ClaimKey { microbatch: Microbatch(u32::MAX), ..first };
        let coming = self.asked.range(first..=last);
        open.map_or(0, BTreeMap::len)
            + coming.filter(|(_, asked)| asked.idle == Some(member)).count()
    }
}

impl Coordinator {
    /// Asks for what another replica has yet to begin, for a member that has next to nothing left of
    /// a step at a stage.
    pub(super) fn relieve(&mut self, step: Step, stage: Stage, idle: Member, out: &mut Out) {
        let runs = matches!(self.phase, Phase::Open | Phase::Closing | Phase::Committing);
        if !runs || self.config.manifest.reads(step) > self.version {
            return;
        }
        while let Some((key, holder, grant)) = self.to_relieve((step, stage), idle) {
            let ledger = self.work.ledgers.get(&step);
            if !ledger.is_some_and(|ledger| ledger.awaits(key, holder, grant)) {
                self.stragglers.relief.ended(key, holder);
                continue;
            }
            let asked = &mut self.stragglers.relief.asked;
            let times = asked.get(&key).map_or(0, |asked| asked.times) + 1;
            asked.insert(key, Asked { grant, idle: Some(idle), times });
            let patience = Spent::default();
            send(holder, FromCoordinator::Recall { key, grant, patience }, out);
        }
    }

    /// The last claim of the replica that has most to do, of those that are looked at, if that is so much
    /// more than the idle one
    /// has that one claim less makes the step's end come sooner.
    fn to_relieve(&self, place: (Step, Stage), idle: Member) -> Option<(ClaimKey, Member, Grant)> {
        let (step, stage) = place;
        let relief = &self.stragglers.relief;
        let left = relief.left(place, idle);
        let pace = |member: Member| self.stragglers.paces.measured(stage, member);
        let done_at = pace(idle)?.saturating_mul(left as u64 + 1);
        let open = relief.open.get(&place)?;
        let unheld = self.work.ledgers.get(&step)?.unheld(stage) as usize;
        if left > if unheld < open.len() { LEFT_AT_END } else { LEFT } {
            return None;
        }
        let unasked = |(microbatch, grant): &(&Microbatch, &Grant)| {
            let key = ClaimKey { step, stage, microbatch: **microbatch };
            let asked = relief.asked.get(&key);
            asked.is_none_or(|asked| asked.grant != **grant && asked.times < TIMES)
        };
        let after = open.range((Bound::Excluded(idle), Bound::Unbounded));
        let others = after.chain(open.range(..idle)).take(LOOKED_AT);
        let busy = others.filter_map(|(member, claims)| {
            let (last, grant) = claims.iter().rev().find(unasked)?;
            let through_it = claims.range(..=last).count() as u64;
            Some((pace(*member)?.saturating_mul(through_it), *member, *last, *grant))
        });
        let (all, holder, microbatch, grant) = busy.max()?;
        let way = self.work.round_trip().map_or(self.config.retry, |time| time * ROUND_TRIPS);
        let way = u64::try_from(way.as_nanos()).unwrap_or(u64::MAX);
        let longer = all >= (done_at.saturating_mul(HALVES) / 2).saturating_add(way);
        longer.then_some((ClaimKey { step, stage, microbatch }, holder, grant))
    }

    /// A holder let go of a claim, or works on it: it may have been asked for another's relief, who may
    /// get one more.
    pub(super) fn relief_answered(&mut self, key: ClaimKey, grant: Grant, out: &mut Out) {
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

    #[test]
    fn what_is_asked_for_counts_for_whom_it_is_asked_until_it_is_answered() {
        let mut relief = Relief::default();
        relief.claimed(key(0), member(1), grant());
        relief.asked.insert(key(0), Asked { grant: grant(), idle: Some(member(2)), times: 1 });
        assert_eq!([1, 2, 3].map(|number| relief.left(PLACE, member(number))), [1, 1, 0]);
        assert_eq!(relief.answered(key(0), grant()), Some(member(2)));
        assert_eq!(relief.answered(key(0), grant()), None);
        assert_eq!(relief.left(PLACE, member(2)), 0);
        relief.forget_through(PLACE.0);
        assert_eq!(relief.left(PLACE, member(1)), 0);
    }

    proptest! {
        /// However claims come and go, each holder has those that did not end.
        #[test]
        fn what_is_left_is_what_was_claimed_and_has_not_ended(
            words in prop::collection::vec((0u32..8, 0u8..3, any::<bool>()), 0..60),
        ) {
            let mut relief = Relief::default();
            let mut held = std::collections::BTreeSet::new();
            for (microbatch, number, claims) in words {
                if claims {
                    relief.claimed(key(microbatch), member(number), grant());
                    held.insert((number, microbatch));
                } else {
                    relief.ended(key(microbatch), member(number));
                    held.remove(&(number, microbatch));
                }
                for number in 0..3 {
                    let left = held.iter().filter(|(of, _)| *of == number).count();
                    prop_assert_eq!(relief.left(PLACE, member(number)), left);
                }
            }
        }
    }
}
