//! The replicas of the first stage that request work of a step, in the order of their turns and in that of when
//! they would finish one more microbatch. Sums over all of them are kept up with every change, so that the next
//! replica is found without a scan.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::Member;

use crate::router::{PER, Routing, Turn, speed};

/// A member that requests work of a step, or holds some after which it could request more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Standing {
    /// Nanoseconds per microbatch; 0 while that is not measured.
    pub(super) service_time: u64,
    /// Microbatches that are granted and not done, and run before another would.
    pub(super) open: u64,
    /// The member's turn, if it requests more.
    pub(super) turn: Option<Turn>,
}

impl Standing {
    /// Nanoseconds until the member would finish one more.
    fn need(self) -> u128 {
        u128::from(self.open + 1) * u128::from(self.service_time)
    }
}

/// The limits for one more microbatch. A member that takes it must finish it, after all its others, by about
/// the time in which all members together finish their microbatches and the free ones; and must need no longer
/// for it alone than all together need for the free ones. Otherwise all would wait for a slow member near the
/// end of a step. Members outside the queue do not count, because none of their work may be waited for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Nanoseconds for all open and free microbatches.
    all: u128,
    /// Nanoseconds for the free microbatches.
    free: u128,
}

impl Limits {
    fn allow(self, standing: Standing) -> bool {
        standing.need() <= self.all && u128::from(standing.service_time) <= self.free
    }
}

/// The members that request work of a step, or hold some after which they could request more.
#[derive(Debug, Default)]
pub(super) struct WorkQueue {
    all: BTreeMap<Member, Standing>,
    /// Members that request more, by turn.
    by_turn: BTreeMap<(Turn, Member), Standing>,
    /// The same members, by when they would finish one more.
    by_need: BTreeMap<(u128, Turn, Member), Standing>,
    /// All members, the fastest first.
    service_times: BTreeSet<(u64, Member)>,
    /// Of all members together: their throughput and their open microbatches.
    speed: u128,
    open: u64,
}

impl WorkQueue {
    /// Sets or removes a member's entry.
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

    /// Whether no member requests more.
    pub(super) fn is_empty(&self) -> bool {
        self.by_turn.is_empty()
    }

    /// Whether a member requests more.
    pub(super) fn requests_more(&self, member: Member) -> bool {
        self.all.get(&member).is_some_and(|known| known.turn.is_some())
    }

    /// The members that request more, by turn.
    pub(super) fn members(&self) -> impl Iterator<Item = Member> + '_ {
        self.by_turn.keys().map(|(_, member)| *member)
    }

    /// The limits while so many microbatches are free; none if any member is in time.
    pub(super) fn limits(&self, free: usize, routing: Routing) -> Option<Limits> {
        let fastest = self.service_times.first().map_or(0, |(service_time, _)| *service_time);
        let known = routing.is_by_speed() && fastest > 0 && fastest < u64::MAX;
        let (speed, fastest) = (self.speed.max(1), u128::from(fastest));
        known.then(|| Limits {
            all: u128::from(free as u64 + self.open) * PER / speed + fastest,
            free: free as u128 * PER / speed + fastest,
        })
    }

    /// The members that request work, hold none and would exceed the limits with the first: the slowest first.
    pub(super) fn late(&self, limits: Limits) -> impl Iterator<Item = Member> + '_ {
        let slow =
            move |(service_time, _): &&(u64, Member)| u128::from(*service_time) > limits.free;
        let slow = self.service_times.iter().rev().take_while(slow).map(|(_, member)| *member);
        slow.filter(|member| {
            self.all.get(member).is_some_and(|known| known.turn.is_some() && known.open == 0)
        })
    }

    /// The member whose turn is first, of those that are able and within the limits.
    pub(super) fn first(
        &self,
        limits: Option<Limits>,
        able: impl Fn(&Member) -> bool,
    ) -> Option<Member> {
        let Some(limits) = limits else { return self.members().find(able) };
        let mut soon = self.by_need.iter().take_while(|((need, ..), _)| *need <= limits.all);
        let mut first: Option<(Turn, Member)> = None;
        // Near a step's end no member may be within the limits though many request more; before, all are
        // though many would finish soon. Both orders are scanned in step until one of them gives the answer.
        for ((_, member), standing) in &self.by_turn {
            if limits.allow(*standing) && able(member) {
                return Some(*member);
            }
            let Some(((_, turn, member), standing)) = soon.next() else { break };
            if limits.allow(*standing) && able(member) {
                let this = (*turn, *member);
                first = Some(first.map_or(this, |first| first.min(this)));
            }
        }
        first.map(|(_, member)| member)
    }

    /// Whether this equals a queue that is built from these entries.
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

    type Change = (u8, Option<(u64, u64, Option<usize>)>);

    fn changes() -> impl Strategy<Value = Vec<Change>> {
        let standing = (0u64..5, 0u64..4, prop::option::of(0usize..8));
        prop::collection::vec((0u8..8, prop::option::weighted(0.8, standing)), 0..40)
    }

    proptest! {
        /// After any changes, the queue equals a recount, and its first member is the one that a scan finds.
        #[test]
        fn the_queue_equals_a_recount(changes in changes(), free in 0usize..30, bad in 0u8..9) {
            let turns = turns();
            let mut queue = WorkQueue::default();
            let mut known: BTreeMap<Member, Standing> = BTreeMap::new();
            for (number, standing) in changes {
                let standing = standing.map(|(service_time, open, turn)| Standing {
                    service_time: service_time * 1_000_000_000,
                    open,
                    turn: turn.map(|turn| turns[turn]),
                });
                queue.set(member(number), standing);
                known.remove(&member(number));
                known.extend(standing.map(|standing| (member(number), standing)));
                prop_assert!(queue.is_of(known.iter().map(|(who, standing)| (*who, *standing))));
                let limits = queue.limits(free, Routing::BySpeed);
                let unmeasured = known.values().any(|standing| standing.service_time == 0);
                prop_assert_eq!(limits.is_none(), unmeasured || known.is_empty());
                if let Some(limits) = limits {
                    let late = known.iter().filter(|(_, known)| {
                        known.turn.is_some() && known.open == 0 && u128::from(known.service_time) > limits.free
                    });
                    let late: BTreeSet<Member> = late.map(|(who, _)| *who).collect();
                    prop_assert_eq!(queue.late(limits).collect::<BTreeSet<_>>(), late);
                }
                let able = |who: &Member| *who != member(bad);
                let wants = known.iter().filter(|(who, standing)| {
                    able(who) && limits.is_none_or(|limits| limits.allow(**standing))
                });
                let first = wants.filter_map(|(who, standing)| Some((standing.turn?, *who))).min();
                prop_assert_eq!(queue.first(limits, able), first.map(|(_, who)| who));
            }
        }
    }
}
