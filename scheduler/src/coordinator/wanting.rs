//! Who wants some of a step's work: in the order of their turns, and in that of when they would be done with
//! more. What they have together is added up with every change, so that who should have the next microbatch
//! is found without looking at all of them.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::Member;

use crate::router::{PER, Routing, Turn, speed};

/// What a member is to a step of which it wants some, or has some that it could want another after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Standing {
    /// Nanoseconds that it needs for one; 0 while it is not measured.
    pub(super) service_time: u64,
    /// Microbatches given and not done that are in the way of another.
    pub(super) open: u64,
    /// When it is its turn, if it wants more.
    pub(super) turn: Option<Turn>,
}

impl Standing {
    /// Nanoseconds until it would be done with one more.
    fn need(self) -> u128 {
        u128::from(self.open + 1) * u128::from(self.service_time)
    }
}

/// Who would be done with one more microbatch, after all it has, about when all together can be done with
/// what they have and the free ones, and with this one when together they can with those. A slow member's
/// window near the end of a step would keep everybody waiting. Who neither wants any of this step nor has
/// any that it could want another after does not count: nobody may wait for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    through_all: u128,
    after_this: u128,
}

impl Limits {
    fn hold(self, standing: Standing) -> bool {
        standing.need() <= self.through_all && u128::from(standing.service_time) <= self.after_this
    }
}

/// Who wants some of a step, or has some that it could want another after.
#[derive(Debug, Default)]
pub(super) struct Wanting {
    all: BTreeMap<Member, Standing>,
    /// Who wants more, whose turn is first before others.
    by_turn: BTreeMap<(Turn, Member), Standing>,
    /// The same ones, who would be done with one more first before others.
    by_need: BTreeMap<(u128, Turn, Member), Standing>,
    /// Of all, the fastest first.
    service_times: BTreeSet<(u64, Member)>,
    /// What all get through together, and what they have.
    speed: u128,
    open: u64,
}

impl Wanting {
    /// A member is this to the step now, or nothing.
    pub(super) fn set(&mut self, member: Member, standing: Option<Standing>) {
        let before = self.all.get(&member).copied();
        if before == standing {
            return;
        }
        if let Some(old) = before {
            self.all.remove(&member);
            self.service_times.remove(&(old.service_time, member));
            self.speed -= speed(old.service_time);
            self.open -= old.open;
            if let Some(turn) = old.turn {
                self.by_turn.remove(&(turn, member));
                self.by_need.remove(&(old.need(), turn, member));
            }
        }
        if let Some(new) = standing {
            self.all.insert(member, new);
            self.service_times.insert((new.service_time, member));
            self.speed += speed(new.service_time);
            self.open += new.open;
            if let Some(turn) = new.turn {
                self.by_turn.insert((turn, member), new);
                self.by_need.insert((new.need(), turn, member), new);
            }
        }
    }

    /// Whether nobody wants more.
    pub(super) fn is_empty(&self) -> bool {
        self.by_turn.is_empty()
    }

    /// Whether a member wants more.
    pub(super) fn wants(&self, member: Member) -> bool {
        self.all.get(&member).is_some_and(|known| known.turn.is_some())
    }

    /// Who wants more.
    pub(super) fn members(&self) -> impl Iterator<Item = Member> + '_ {
        self.by_turn.keys().map(|(_, member)| *member)
    }

    /// Who is in time while so many microbatches are free; none where anybody is.
    pub(super) fn limits(&self, free: usize, routing: Routing) -> Option<Limits> {
        let fastest = self.service_times.first().map_or(0, |(service_time, _)| *service_time);
        let known = routing.is_by_speed() && fastest > 0 && fastest < u64::MAX;
        let (speed, fastest) = (self.speed.max(1), u128::from(fastest));
        known.then(|| Limits {
            through_all: u128::from(free as u64 + self.open) * PER / speed + fastest,
            after_this: free as u128 * PER / speed + fastest,
        })
    }

    /// Who wants more, has nothing and would be late with the first: the slowest first.
    pub(super) fn late(&self, limits: Limits) -> impl Iterator<Item = Member> + '_ {
        let slow =
            move |(service_time, _): &&(u64, Member)| u128::from(*service_time) > limits.after_this;
        let slow = self.service_times.iter().rev().take_while(slow).map(|(_, member)| *member);
        slow.filter(|member| {
            self.all.get(member).is_some_and(|known| known.turn.is_some() && known.open == 0)
        })
    }

    /// Whose turn is first of those who are able, and in time.
    pub(super) fn first(
        &self,
        limits: Option<Limits>,
        able: impl Fn(&Member) -> bool,
    ) -> Option<Member> {
        let Some(limits) = limits else { return self.members().find(able) };
        let mut soon =
            self.by_need.iter().take_while(|((need, ..), _)| *need <= limits.through_all);
        let mut first: Option<(Turn, Member)> = None;
        // Near a step's end nobody may be in time though many want more, and before it all are though
        // many would be done soon: both orders are gone through until one of them says who it is.
        for ((_, member), standing) in &self.by_turn {
            if limits.hold(*standing) && able(member) {
                return Some(*member);
            }
            let Some(((_, turn, member), standing)) = soon.next() else { break };
            if limits.hold(*standing) && able(member) {
                let this = (*turn, *member);
                first = Some(first.map_or(this, |first| first.min(this)));
            }
        }
        first.map(|(_, member)| member)
    }

    /// Whether this is what comes of these, counted anew.
    #[cfg(test)]
    pub(super) fn is_of(&self, all: impl Iterator<Item = (Member, Standing)>) -> bool {
        let mut anew = Self::default();
        all.for_each(|(member, standing)| anew.set(member, Some(standing)));
        (&self.all, &self.by_turn, &self.by_need, &self.service_times, self.speed, self.open)
            == (&anew.all, &anew.by_turn, &anew.by_need, &anew.service_times, anew.speed, anew.open)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shoal_protocol::ids::{Incarnation, PeerId};

    use super::*;
    use crate::router::Router;

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    /// A turn for each of eight members.
    fn turns() -> Vec<Turn> {
        let mut router = Router::new(3);
        router.set_candidates((0..8).map(member));
        (0..8).filter_map(|number| router.turn_of(member(number))).collect()
    }

    type Word = (u8, Option<(u64, u64, Option<usize>)>);

    fn words() -> impl Strategy<Value = Vec<Word>> {
        let standing = (0u64..5, 0u64..4, prop::option::of(0usize..8));
        prop::collection::vec((0u8..8, prop::option::weighted(0.8, standing)), 0..40)
    }

    proptest! {
        /// However members' wishes change, all is as if it were counted anew, and who is first is who is
        /// found by looking at everybody.
        #[test]
        fn what_is_kept_is_what_a_recount_says(words in words(), free in 0usize..30, bad in 0u8..9) {
            let turns = turns();
            let mut wanting = Wanting::default();
            let mut known: BTreeMap<Member, Standing> = BTreeMap::new();
            for (number, standing) in words {
                let standing = standing.map(|(service_time, open, turn)| Standing {
                    service_time: service_time * 1_000_000_000,
                    open,
                    turn: turn.map(|turn| turns[turn]),
                });
                wanting.set(member(number), standing);
                known.remove(&member(number));
                known.extend(standing.map(|standing| (member(number), standing)));
                prop_assert!(wanting.is_of(known.iter().map(|(who, standing)| (*who, *standing))));
                let limits = wanting.limits(free, Routing::BySpeed);
                let unmeasured = known.values().any(|standing| standing.service_time == 0);
                prop_assert_eq!(limits.is_none(), unmeasured || known.is_empty());
                if let Some(limits) = limits {
                    let late = known.iter().filter(|(_, known)| {
                        known.turn.is_some() && known.open == 0 && u128::from(known.service_time) > limits.after_this
                    });
                    let late: BTreeSet<Member> = late.map(|(who, _)| *who).collect();
                    prop_assert_eq!(wanting.late(limits).collect::<BTreeSet<_>>(), late);
                }
                let able = |who: &Member| *who != member(bad);
                let wants = known.iter().filter(|(who, standing)| {
                    able(who) && limits.is_none_or(|limits| limits.hold(**standing))
                });
                let first = wants.filter_map(|(who, standing)| Some((standing.turn?, *who))).min();
                prop_assert_eq!(wanting.first(limits, able), first.map(|(_, who)| who));
            }
        }
    }
}
