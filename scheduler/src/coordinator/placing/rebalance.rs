//! Plans stage changes of members that make the swarm faster.
//!
//! A pipeline is as fast as its slowest stage. Members move one at a time from the stage with the
//! most spare throughput to the one with the least, as long as that speeds up the slower of the two
//! stages (max-min fairness; SWARM, arXiv 2301.11913, moves one peer at a time). Only the final
//! result counts: from (2, 2, 6, 6) no single move helps, and four together do.

mod search;

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{Member, Stage};

use self::search::Search;

/// When members change their stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rebalance {
    /// Never.
    Never,
    /// If it makes the swarm faster.
    When {
        /// Interval between two comparisons of the stages.
        every: Duration,
        /// Minimum gain, in thousandths.
        gain: u32,
    },
    /// Whenever a member can move, with or without a gain: this exercises moves in tests.
    Restless {
        /// Interval between two attempts.
        every: Duration,
    },
}

/// Minimum gain for a move, in thousandths: smaller differences are within the error of measured
/// speeds.
const GAIN: u32 = 100;

/// Ratio of speeds that counts as no difference: no member moves for that alone.
pub(crate) const SAME: f64 = 1.02;

/// Number of equally good candidates among which the nearest is selected.
const EQUALS: usize = 64;

impl Rebalance {
    /// Moves if it makes the swarm faster, with this interval between comparisons; zero means
    /// never.
    #[must_use]
    pub fn every_so_often(every: Duration) -> Self {
        if every.is_zero() { Self::Never } else { Self::When { every, gain: GAIN } }
    }

    /// Interval between comparisons of the stages.
    #[must_use]
    pub fn every(self) -> Option<Duration> {
        match self {
            Self::Never => None,
            Self::When { every, .. } | Self::Restless { every } => Some(every),
        }
    }
}

/// A member as a replica of a stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Replica {
    /// The member.
    pub member: Member,
    /// The stage that it serves, or will serve when its move is complete.
    pub stage: Stage,
    /// Its microbatches per second there.
    pub speed: f64,
    /// Whether it may move.
    pub mobile: bool,
}

/// Moves that together make the swarm faster.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The new stage of each moved member.
    pub moves: Vec<(Member, Stage)>,
    /// Microbatches per second of the slowest stage before the moves.
    pub before: f64,
    /// The same after the moves.
    pub after: f64,
}

/// The moves that maximise the speed of the slowest stage: the fewest that reach about the maximum.
/// `costs` is the duration of a microbatch at each stage, in any common unit.
///
/// # Panics
/// If a stage has no cost.
#[must_use]
pub fn plan(replicas: &[Replica], costs: &BTreeMap<Stage, f64>) -> Plan {
    plan_near(replicas, costs, |_, _| 0.0)
}

/// Like [`plan`], but among equally useful members the nearest one moves, if the result is about as
/// good with no more moves. `distance` is the distance of a member to a stage, in any unit.
///
/// # Panics
/// If a stage has no cost.
#[must_use]
pub fn nearest_plan(
    replicas: &[Replica],
    costs: &BTreeMap<Stage, f64>,
    distance: impl Fn(Member, Stage) -> f64,
) -> Plan {
    let plain = plan(replicas, costs);
    if plain.moves.is_empty() {
        return plain;
    }
    let near = plan_near(replicas, costs, distance);
    let as_good = near.moves.len() <= plain.moves.len() && near.after * SAME >= plain.after;
    if as_good { near } else { plain }
}

fn plan_near(
    replicas: &[Replica],
    costs: &BTreeMap<Stage, f64>,
    distance: impl Fn(Member, Stage) -> f64,
) -> Plan {
    let mut search = Search::new(replicas, costs);
    let before = search.slowest().1;
    let (mut moves, mut afters) = (Vec::new(), vec![before]);
    // Most candidates of one move are candidates of the next one too.
    let mut distances = BTreeMap::new();
    let mut distance = |member, stage| {
        *distances.entry((member, stage)).or_insert_with(|| distance(member, stage))
    };
    while let Some((mover, to)) = search.next_move(&mut distance) {
        moves.push((search.go(mover, to), to));
        afters.push(search.slowest().1);
    }
    let best = afters.iter().copied().fold(before, f64::max);
    let enough = afters.iter().position(|after| after * SAME >= best).unwrap_or(0);
    moves.truncate(enough);
    Plan { moves, before, after: afters[enough] }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shoal_protocol::ids::{Incarnation, PeerId};

    use super::*;

    fn replicas(counts: &[usize]) -> Vec<Replica> {
        let stages = (0..).map(Stage).zip(counts);
        let places = stages.flat_map(|(stage, count)| std::iter::repeat_n(stage, *count));
        let replica = |(number, stage): (usize, Stage)| {
            let mut id = [0; 32];
            id[..8].copy_from_slice(&(number as u64).to_be_bytes());
            let member = Member { peer: PeerId(id), incarnation: Incarnation(1) };
            Replica { member, stage, speed: 1.0, mobile: true }
        };
        places.enumerate().map(replica).collect()
    }

    fn costs(stages: usize) -> BTreeMap<Stage, f64> {
        (0..stages as u16).map(|stage| (Stage(stage), 1.0)).collect()
    }

    fn after(replicas: &[Replica], plan: &Plan, stages: usize) -> Vec<usize> {
        let mut counts = vec![0; stages];
        for replica in replicas {
            let moved = plan.moves.iter().find(|(member, _)| *member == replica.member);
            counts[usize::from(moved.map_or(replica.stage, |(_, to)| *to).0)] += 1;
        }
        counts
    }

    #[test]
    fn equal_members_spread_evenly_with_the_fewest_moves() {
        for (counts, moves, slowest) in [
            (&[4, 4, 4, 4][..], 0, 4.0),
            (&[2, 2, 6, 6], 4, 4.0),
            (&[1, 7], 3, 4.0),
            (&[3, 4, 5, 4], 1, 4.0),
            (&[3, 3, 3, 4], 0, 3.0),
            // A second move would have no gain.
            (&[1, 2, 5], 1, 2.0),
            (&[0, 2], 1, 1.0),
            (&[0, 1], 0, 0.0),
        ] {
            let replicas = replicas(counts);
            let plan = plan(&replicas, &costs(counts.len()));
            assert_eq!((plan.moves.len(), plan.after), (moves, slowest), "{counts:?}: {plan:?}");
            assert!(
                after(&replicas, &plan, counts.len()).iter().all(|count| *count as f64 >= slowest)
            );
        }
    }

    /// Four fast peers and two that are four times slower, on three stages with a replica each:
    /// from any initial placement, repeated plans reach the optimum.
    #[test]
    fn unequal_members_reach_the_optimum_from_any_placement() {
        let speeds = [1.0, 1.0, 1.0, 1.0, 0.25, 0.25];
        for number in 0..3usize.pow(6) {
            let places: Vec<usize> = (0..6).map(|index| number / 3usize.pow(index) % 3).collect();
            if (0..3).any(|stage| !places.contains(&stage)) {
                continue;
            }
            let mut all = replicas(&[6]);
            for ((replica, speed), place) in all.iter_mut().zip(speeds).zip(&places) {
                (replica.speed, replica.stage) = (speed, Stage(*place as u16));
            }
            let mut after = 0.0;
            for _ in 0..4 {
                let plan = plan(&all, &costs(3));
                for (member, to) in &plan.moves {
                    let moved = all.iter_mut().find(|replica| replica.member == *member);
                    moved.expect("it is one of them").stage = *to;
                }
                after = plan.after;
            }
            assert_eq!(after, 1.25, "{places:?}");
        }
    }

    /// Measured speeds are never exactly equal: a second move would turn (3, 2) into (2, 3).
    #[test]
    fn no_member_moves_for_an_insignificant_gain() {
        let mut replicas = replicas(&[4, 1]);
        replicas[4].speed = 0.999;
        let plan = plan(&replicas, &costs(2));
        assert_eq!((plan.moves.len(), plan.after), (1, 1.999));
    }

    #[test]
    fn an_immobile_member_stays() {
        let mut replicas = replicas(&[1, 5]);
        replicas.iter_mut().skip(2).for_each(|replica| replica.mobile = false);
        let plan = plan(&replicas, &costs(2));
        assert_eq!(plan.moves, [(replicas[1].member, Stage(0))]);
    }

    #[test]
    fn a_fast_member_moves_where_a_slow_one_would_not_help() {
        let mut replicas = replicas(&[1, 3]);
        replicas[1].speed = 2.0;
        replicas[2].speed = 4.0;
        replicas[3].speed = 4.0;
        let plan = plan(&replicas, &costs(2));
        assert_eq!((plan.moves, plan.after), (vec![(replicas[2].member, Stage(0))], 5.0));
    }

    #[test]
    fn a_stage_that_costs_more_gets_more_members() {
        let replicas = replicas(&[4, 4]);
        let dear = BTreeMap::from([(Stage(0), 3.0), (Stage(1), 1.0)]);
        let slow: Vec<Replica> = replicas
            .iter()
            .map(|replica| Replica { speed: 1.0 / dear[&replica.stage], ..*replica })
            .collect();
        let plan = plan(&slow, &dear);
        assert_eq!(after(&slow, &plan, 2), [6, 2]);
    }

    proptest! {
        #[test]
        fn no_plan_empties_a_stage_or_slows_the_swarm(
            counts in prop::collection::vec(1usize..9, 1..6),
            speeds in prop::collection::vec(0.1f64..10.0, 48),
        ) {
            let mut all = replicas(&counts);
            for (replica, speed) in all.iter_mut().zip(speeds) {
                replica.speed = speed;
            }
            let plan = plan(&all, &costs(counts.len()));
            prop_assert!(plan.after >= plan.before);
            prop_assert!(plan.moves.is_empty() || plan.after > plan.before);
            prop_assert!(after(&all, &plan, counts.len()).iter().all(|count| *count > 0));
            prop_assert!(plan.moves.len() < all.len());
        }

        /// The optimum for equal members is an even distribution.
        #[test]
        fn equal_members_reach_the_optimum(counts in prop::collection::vec(1usize..12, 1..8)) {
            let all = replicas(&counts);
            let plan = plan(&all, &costs(counts.len()));
            prop_assert_eq!(plan.after, (all.len() / counts.len()) as f64);
        }
    }
}
