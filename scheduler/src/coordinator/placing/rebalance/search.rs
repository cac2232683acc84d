//! Finds the most useful replica for the slowest stage without examining each of them.
//!
//! The faster a replica is, the more it adds to its new stage and the less it leaves to its old
//! one. So among the replicas of one stage, ordered by speed, one in the middle makes the slower of
//! the two stages fastest, and usefulness decreases on either side of it.

#[cfg(test)]
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use shoal_protocol::ids::{Member, Stage};

use super::{EQUALS, Replica, SAME};

/// All replicas and their present stages.
#[derive(Debug)]
pub(super) struct Search<'a> {
    costs: &'a BTreeMap<Stage, f64>,
    replicas: Vec<Replica>,
    stages: BTreeMap<Stage, StageReplicas>,
    /// Number of evaluations of a move.
    #[cfg(test)]
    pub(super) evaluations: Cell<usize>,
}

/// The replicas of one stage, by index.
#[derive(Debug, Default)]
struct StageReplicas {
    /// In the order in which their speeds are added up.
    all: BTreeSet<usize>,
    /// Those that may move, the slowest first; among equals the lowest member first.
    mobile: Vec<usize>,
    /// Their total throughput.
    throughput: f64,
}

/// The mobile replicas of a stage that are slower than the most useful one, or the others.
struct Side<'a> {
    group: &'a StageReplicas,
    cost: f64,
    left: Range<usize>,
    /// Whether the fastest of them is the most useful.
    rises: bool,
    /// The most useful ones: all of one speed, and the resulting speed of the slower of the two
    /// stages.
    head: Option<(f64, Range<usize>)>,
}

impl<'a> Search<'a> {
    /// # Panics
    /// If a stage has no cost.
    pub(super) fn new(replicas: &[Replica], costs: &'a BTreeMap<Stage, f64>) -> Self {
        let mut stages: BTreeMap<Stage, StageReplicas> =
            costs.keys().map(|stage| (*stage, StageReplicas::default())).collect();
        for (place, replica) in replicas.iter().enumerate() {
            let group = stages.get_mut(&replica.stage).expect("every stage has a cost");
            group.all.insert(place);
            if replica.mobile {
                group.mobile.push(place);
            }
        }
        let mut search = Self {
            costs,
            replicas: replicas.to_vec(),
            stages,
            #[cfg(test)]
            evaluations: Cell::new(0),
        };
        let Self { replicas, stages, .. } = &mut search;
        for group in stages.values_mut() {
            group.mobile.sort_by(|one, other| {
                let (one, other) = (&replicas[*one], &replicas[*other]);
                one.speed.total_cmp(&other.speed).then(one.member.cmp(&other.member))
            });
            group.add_up(replicas);
        }
        search
    }

    /// The slowest stage, the first of several, and its microbatches per second.
    pub(super) fn slowest(&self) -> (Stage, f64) {
        let all = self.stages.iter().map(|(stage, group)| (*stage, group.throughput));
        all.min_by(|one, other| one.1.total_cmp(&other.1)).expect("a run has stages")
    }

    /// Moves a replica to a stage. It does not move again in this plan.
    pub(super) fn go(&mut self, place: usize, to: Stage) -> Member {
        let replica = &mut self.replicas[place];
        let from = std::mem::replace(&mut replica.stage, to);
        replica.speed *= self.costs[&from] / self.costs[&to];
        // No replica moves twice: a chain of moves would only be a detour.
        replica.mobile = false;
        let member = replica.member;
        let left = self.stages.get_mut(&from).expect("it was there");
        left.all.remove(&place);
        left.mobile.retain(|other| *other != place);
        left.add_up(&self.replicas);
        let joined = self.stages.get_mut(&to).expect("every stage has a cost");
        joined.all.insert(place);
        joined.add_up(&self.replicas);
        member
    }

    /// The next move to the slowest stage: the one that makes the slower of the two stages fastest,
    /// and faster than the slowest is now. Among equally useful replicas, the nearest.
    pub(super) fn next_move(
        &self,
        mut distance: impl FnMut(Member, Stage) -> f64,
    ) -> Option<(usize, Stage)> {
        let (to, now) = self.slowest();
        let equals = self.best(to, now).into_iter().map(|place| {
            let Replica { member, stage, .. } = self.replicas[place];
            (distance(member, to) - distance(member, stage), place)
        });
        let nearest = equals.min_by(|one, other| one.0.total_cmp(&other.0));
        nearest.map(|(_, place)| (place, to))
    }

    /// Up to [`EQUALS`] replicas that are most useful at a stage with this throughput, or about as
    /// useful, the most useful first. Among equals the lowest member comes first, so that repeated
    /// plans agree.
    fn best(&self, to: Stage, now: f64) -> Vec<usize> {
        let mut sides = self.sides(to, now);
        let mut found: Vec<(f64, usize)> = Vec::new();
        let lesser = |side: &Side| side.head.as_ref().map_or(f64::NEG_INFINITY, |head| head.0);
        while let Some(side) =
            sides.iter_mut().max_by(|one, other| lesser(one).total_cmp(&lesser(other)))
            && let Some((lesser, run)) = side.head.take()
        {
            let differs = found.first().is_some_and(|(best, _)| lesser * SAME < *best);
            // Among replicas as useful as the last one, the lowest count.
            let enough = found.len() >= EQUALS && found.last().is_some_and(|last| lesser < last.0);
            if lesser <= now || differs || enough {
                break;
            }
            found.extend(side.group.mobile[run].iter().take(EQUALS).map(|place| (lesser, *place)));
            self.advance(side, to, now);
        }
        found.sort_by(|(one_lesser, one), (other_lesser, other)| {
            let members = self.replicas[*one].member.cmp(&self.replicas[*other].member);
            other_lesser.total_cmp(one_lesser).then(members).then(one.cmp(other))
        });
        found.truncate(EQUALS);
        found.into_iter().map(|(_, place)| place).collect()
    }

    /// Both sides of each stage that a replica may leave.
    fn sides(&self, to: Stage, now: f64) -> Vec<Side<'_>> {
        let mut sides = Vec::new();
        for (stage, group) in &self.stages {
            if *stage == to || group.all.len() < 2 {
                continue;
            }
            let cost = self.costs[stage];
            let middle = group.mobile.partition_point(|place| {
                let (there, here) = self.both(group, cost, *place, to, now);
                there < here
            });
            for (left, rises) in [(0..middle, true), (middle..group.mobile.len(), false)] {
                let mut side = Side { group, cost, left, rises, head: None };
                self.advance(&mut side, to, now);
                sides.push(side);
            }
        }
        sides
    }

    /// Finds the most useful remaining replicas of a side.
    fn advance(&self, side: &mut Side<'_>, to: Stage, now: f64) {
        let Side { group, cost, left, rises, .. } = side;
        let mobile = &group.mobile[left.clone()];
        let Some(place) = (if *rises { mobile.last() } else { mobile.first() }) else { return };
        let (there, here) = self.both(group, *cost, *place, to, now);
        let speed = self.replicas[*place].speed;
        let than = |place: &usize| self.replicas[*place].speed.total_cmp(&speed);
        let run = if *rises {
            let start = left.start + mobile.partition_point(|place| than(place).is_lt());
            let run = start..left.end;
            left.end = start;
            run
        } else {
            let end = left.start + mobile.partition_point(|place| than(place).is_le());
            let run = left.start..end;
            left.start = end;
            run
        };
        side.head = Some((there.min(here), run));
    }

    /// Throughput of the stage that a replica moves to, and of the one that it leaves.
    fn both(
        &self,
        group: &StageReplicas,
        cost: f64,
        place: usize,
        to: Stage,
        now: f64,
    ) -> (f64, f64) {
        #[cfg(test)]
        self.evaluations.set(self.evaluations.get() + 1);
        let speed = self.replicas[place].speed;
        (now + speed * cost / self.costs[&to], group.throughput - speed)
    }
}

impl StageReplicas {
    fn add_up(&mut self, replicas: &[Replica]) {
        self.throughput = self.all.iter().map(|place| replicas[*place].speed).sum();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shoal_protocol::ids::{Incarnation, PeerId};

    use super::*;
    use crate::coordinator::placing::rebalance::{Plan, plan_near};

    fn member(number: u64) -> Member {
        let mut id = [0; 32];
        id[..8].copy_from_slice(&number.to_be_bytes());
        Member { peer: PeerId(id), incarnation: Incarnation(1) }
    }

    fn throughput(replicas: &[Replica], stage: Stage) -> f64 {
        replicas.iter().filter(|replica| replica.stage == stage).map(|replica| replica.speed).sum()
    }

    fn plain_slowest(replicas: &[Replica], costs: &BTreeMap<Stage, f64>) -> (Stage, f64) {
        let all = costs.keys().map(|stage| (*stage, throughput(replicas, *stage)));
        all.min_by(|one, other| one.1.total_cmp(&other.1)).expect("there are stages")
    }

    /// The next move by its definition: all replicas are evaluated and sorted.
    fn plain_move(
        replicas: &[Replica],
        costs: &BTreeMap<Stage, f64>,
        distance: &impl Fn(Member, Stage) -> f64,
    ) -> Option<(usize, Stage)> {
        let (to, now) = plain_slowest(replicas, costs);
        let lesser = |replica: &Replica| {
            let there = now + replica.speed * costs[&replica.stage] / costs[&to];
            there.min(throughput(replicas, replica.stage) - replica.speed)
        };
        let alone = |replica: &Replica| {
            replicas.iter().filter(|other| other.stage == replica.stage).count() == 1
        };
        let movers = replicas.iter().enumerate().filter(|(_, replica)| {
            replica.mobile && replica.stage != to && !alone(replica) && lesser(replica) > now
        });
        let mut movers: Vec<(usize, &Replica)> = movers.collect();
        movers.sort_by(|(_, one), (_, other)| {
            lesser(other).total_cmp(&lesser(one)).then(one.member.cmp(&other.member))
        });
        let best = lesser(movers.first()?.1);
        let equals =
            movers.into_iter().take(EQUALS).take_while(|(_, one)| lesser(one) * SAME >= best);
        let farther = |(_, one): &(usize, &Replica)| {
            distance(one.member, to) - distance(one.member, one.stage)
        };
        let nearest = equals.min_by(|one, other| farther(one).total_cmp(&farther(other)));
        nearest.map(|(place, _)| (place, to))
    }

    fn plain_plan(
        replicas: &[Replica],
        costs: &BTreeMap<Stage, f64>,
        distance: impl Fn(Member, Stage) -> f64,
    ) -> Plan {
        let mut replicas = replicas.to_vec();
        let before = plain_slowest(&replicas, costs).1;
        let (mut moves, mut afters) = (Vec::new(), vec![before]);
        while let Some((mover, to)) = plain_move(&replicas, costs, &distance) {
            let replica = &mut replicas[mover];
            replica.speed *= costs[&replica.stage] / costs[&to];
            (replica.stage, replica.mobile) = (to, false);
            moves.push((replica.member, to));
            afters.push(plain_slowest(&replicas, costs).1);
        }
        let best = afters.iter().copied().fold(before, f64::max);
        let enough = afters.iter().position(|after| after * SAME >= best).expect("there is one");
        moves.truncate(enough);
        Plan { moves, before, after: afters[enough] }
    }

    /// Speeds of which many are equal or nearly equal.
    fn speed() -> impl Strategy<Value = f64> {
        prop_oneof![
            4 => (1u8..5).prop_map(f64::from),
            2 => (0u8..9).prop_map(|more| 1.0 + f64::from(more) / 400.0),
            2 => 0.01f64..10.0,
            1 => Just(0.0),
            1 => Just(1e17),
        ]
    }

    fn replica() -> impl Strategy<Value = (u64, u16, f64, bool)> {
        (0u64..1000, 0u16..5, speed(), prop::bool::weighted(0.8))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn plans_equal_those_of_an_exhaustive_search(
            all in prop::collection::vec(replica(), 0..160),
            costs in prop::collection::vec(prop_oneof![Just(1.0), 0.1f64..10.0], 5),
            equal in prop::bool::ANY,
            salt in 0u64..3,
        ) {
            let all: Vec<Replica> = all
                .into_iter()
                .map(|(number, stage, speed, mobile)| {
                    let speed = if equal { 1.0 } else { speed };
                    Replica { member: member(number), stage: Stage(stage), speed, mobile }
                })
                .collect();
            let costs: BTreeMap<Stage, f64> = (0..).map(Stage).zip(costs).collect();
            // Far for some members, equally far for most, or for all.
            let distance = |member: Member, stage: Stage| {
                let number = u64::from(member.peer.0[7]) + u64::from(stage.0);
                (number * salt % 7) as f64
            };
            let found = plan_near(&all, &costs, distance);
            prop_assert_eq!(found, plain_plan(&all, &costs, distance));
        }
    }

    /// A quarter of the members of two stages moves, hundreds of moves, with all speeds different.
    #[test]
    fn a_move_among_ten_thousand_needs_few_evaluations() {
        let all: Vec<Replica> = (0..10_000)
            .map(|number| {
                let stage = Stage(if number < 8000 { (number % 4) as u16 } else { 4 });
                let speed = 1.0 + number as f64 / 1e4;
                Replica { member: member(number), stage, speed, mobile: true }
            })
            .collect();
        let costs: BTreeMap<Stage, f64> = (0..6).map(|stage| (Stage(stage), 1.0)).collect();
        let mut search = Search::new(&all, &costs);
        assert_eq!(search.evaluations.get(), 0);
        let (mut moves, mut distances) = (0, 0);
        while let Some((mover, to)) = search.next_move(|_, _| {
            distances += 1;
            0.0
        }) {
            search.go(mover, to);
            moves += 1;
        }
        assert!(moves > 500, "{moves} moves");
        assert!(distances <= moves * 2 * EQUALS, "{distances} distances");
        let each = search.evaluations.get() / moves;
        assert!(each < 200, "{each} evaluations for each of {moves} moves");
    }
}
