//! Exchanges of stages between members, so that members which send each other much data are near.
//!
//! Each step exchanges the stages of the two members that saves most time of all members' tensors
//! in transit, until none saves much. This is the local improvement of the planner's search,
//! starting from the present placement. Its value is the time that a step waits: for its slowest
//! all-reduce, and for the transfers between stages. If the two members are not equally fast, a
//! stage gets slower; the loss is limited to the error of measured speeds, and is reported.

use std::collections::BTreeMap;

use shoal_protocol::ids::{Member, Stage};

use crate::coordinator::placing::locality::{LinkEstimates, Load};
use crate::coordinator::placing::rebalance::Replica;
use crate::planner::Link;

/// Members considered at a time: in a larger swarm a different subset each time.
pub(crate) const CELL: usize = 64;

/// Maximum number of exchanges in one plan.
const MOST: usize = CELL;

/// An exchange that saves less than this fraction of all transit time is not made: it costs two
/// snapshots.
const WORTH: f64 = 0.01;

/// Minimum fraction of its speed that the slowest stage keeps.
const KEPT: f64 = 0.9;

/// Exchanges that together shorten a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Exchange {
    /// The new stage of each moved member.
    pub moves: Vec<(Member, Stage)>,
    /// Seconds per step that its tensors are in transit.
    pub before: f64,
    /// The same after the moves.
    pub after: f64,
    /// Fraction of its speed that the slowest stage keeps: 1 if no stage is slower than it was.
    pub kept: f64,
}

/// Throughput of all stages, in microbatches per second.
struct Speeds<'a> {
    costs: &'a BTreeMap<Stage, f64>,
    of_stages: BTreeMap<Stage, f64>,
    /// Speed of the slowest stage before any move.
    before: f64,
}

impl<'a> Speeds<'a> {
    /// `None` if a stage has no throughput.
    fn new(replicas: &[Replica], costs: &'a BTreeMap<Stage, f64>) -> Option<Self> {
        let mut of_stages: BTreeMap<Stage, f64> = costs.keys().map(|stage| (*stage, 0.0)).collect();
        for replica in replicas {
            *of_stages.get_mut(&replica.stage)? += replica.speed;
        }
        let before = least(&of_stages);
        (before > 0.0).then_some(Self { costs, of_stages, before })
    }

    /// Speed of a replica at another stage.
    fn at(&self, replica: &Replica, to: Stage) -> f64 {
        replica.speed * self.costs[&replica.stage] / self.costs[&to]
    }

    /// Throughput of the stages of these two replicas after their exchange.
    fn exchanged(&self, one: &Replica, other: &Replica) -> [(Stage, f64); 2] {
        [(one, other), (other, one)].map(|(goes, comes)| {
            let stage = goes.stage;
            (stage, self.of_stages[&stage] - goes.speed + self.at(comes, stage))
        })
    }

    fn allow(&self, one: &Replica, other: &Replica) -> bool {
        self.exchanged(one, other).iter().all(|(_, speed)| *speed >= KEPT * self.before)
    }

    fn exchange(&mut self, one: &mut Replica, other: &mut Replica) {
        self.of_stages.extend(self.exchanged(one, other));
        let (there, here) = (self.at(one, other.stage), self.at(other, one.stage));
        (one.speed, other.speed) = (there, here);
        std::mem::swap(&mut one.stage, &mut other.stage);
    }

    fn kept(&self) -> f64 {
        (least(&self.of_stages) / self.before).min(1.0)
    }
}

/// The speed of the slowest stage.
fn least(of_stages: &BTreeMap<Stage, f64>) -> f64 {
    of_stages.values().copied().fold(f64::INFINITY, f64::min)
}

/// Members, their present stages, and the duration of their transfers, in seconds per step.
struct Cell {
    placed: Vec<Replica>,
    /// Times of an all-reduce, and between neighbouring stages, for every pair.
    exchange: Vec<f64>,
    pass: Vec<f64>,
}

impl Cell {
    /// The members that have paths to all others in the cell; `None` if no two have.
    fn new(members: &[Replica], link_estimates: &LinkEstimates, load: &Load) -> Option<Self> {
        let count = members.len();
        let (mut links, peer) = (vec![None; count * count], |at: usize| members[at].member.peer);
        let default_rate = link_estimates.median_rate();
        for (one, other) in pairs(count) {
            links[one * count + other] = link_estimates.link(peer(one), peer(other), default_rate);
        }
        let known = connected(count, |one, other| links[one * count + other].is_some());
        let replicas = |stage| members.iter().filter(|other| other.stage == stage).count();
        let placed: Vec<Replica> = known.iter().map(|place| members[*place]).collect();
        let count = (placed.len() > 1).then_some(placed.len())?;
        let (mut exchange, mut pass) = (vec![0.0; count * count], vec![0.0; count * count]);
        for (one, other) in pairs(count) {
            let link: Link = links[known[one] * members.len() + known[other]]?;
            let share = replicas(placed[one].stage).max(1) as u32;
            let traffic = load.of_replica(placed[one].stage, share);
            let at = one * count + other;
            exchange[at] = 2.0 * link.exchange(traffic.gradient, share).as_secs_f64();
            pass[at] = 2.0 * link.time(traffic.activations).as_secs_f64();
        }
        Some(Self { placed, exchange, pass })
    }

    fn count(&self) -> usize {
        self.placed.len()
    }

    fn hosts(&self, stage: Stage) -> impl Iterator<Item = usize> + '_ {
        (0..self.count()).filter(move |place| self.placed[*place].stage == stage)
    }

    /// Transfer time of a member at a stage, with the others at their stages.
    fn own(&self, place: usize, stage: Stage) -> f64 {
        let others = (0..self.count()).filter(|other| *other != place);
        others.map(|other| self.between(place, other, stage, self.placed[other].stage)).sum()
    }

    fn between(&self, one: usize, other: usize, stage: Stage, other_stage: Stage) -> f64 {
        let at = one * self.count() + other;
        match stage.0.abs_diff(other_stage.0) {
            0 => self.exchange[at],
            1 => self.pass[at] / self.hosts(other_stage).count().max(1) as f64,
            _ => 0.0,
        }
    }

    /// Seconds saved by an exchange.
    fn saves(&self, one: usize, other: usize) -> f64 {
        let (here, there) = (self.placed[one].stage, self.placed[other].stage);
        let now = self.own(one, here) + self.own(other, there);
        // Each at the other's stage, and the other no longer there.
        let moved = |place: usize, gone: usize, to: Stage, from: Stage| {
            self.own(place, to) - self.between(place, gone, to, to)
                + self.between(place, gone, to, from)
        };
        now - moved(one, other, there, here) - moved(other, one, here, there)
    }

    /// Seconds that a step waits.
    fn waits(&self) -> f64 {
        let all = 0..self.count();
        let same = |place: usize| {
            self.hosts(self.placed[place].stage)
                .map(|other| self.exchange[place * self.count() + other])
                .sum::<f64>()
        };
        let slowest = all.map(same).fold(0.0, f64::max);
        let last = self.placed.iter().map(|member| member.stage.0).max().unwrap_or(0);
        let boundary = |stage: u16| {
            let pairs = self.hosts(Stage(stage)).flat_map(|one| {
                self.hosts(Stage(stage + 1)).map(move |other| self.pass[one * self.count() + other])
            });
            let (sum, count) = pairs.fold((0.0, 0usize), |(sum, n), pass| (sum + pass, n + 1));
            sum / count.max(1) as f64
        };
        slowest + (0..last).map(boundary).sum::<f64>()
    }
}

/// All ordered pairs of different numbers below `count`.
fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count)
        .flat_map(move |one| (0..count).map(move |other| (one, other)))
        .filter(|(one, other)| one != other)
}

/// A subset in which all know each other, in order. It drops the one that lacks most of the
/// remaining ones, the last of several, until none lacks another.
fn connected(count: usize, knows: impl Fn(usize, usize) -> bool) -> Vec<usize> {
    let mut left: Vec<usize> = (0..count).collect();
    loop {
        let lacks =
            |one: usize| left.iter().filter(|other| **other != one && !knows(one, **other)).count();
        let worst = left.iter().enumerate().map(|(at, one)| (lacks(*one), at)).max();
        let Some((1.., at)) = worst else { return left };
        left.remove(at);
    }
}

/// Plans exchanges among the first of these members, at most one cell; a member without known paths
/// stays. Returns `None` if too few paths are known or a stage has no throughput. `costs` is the
/// duration of a microbatch at each stage, in any common unit.
#[must_use]
pub fn exchange(
    members: &[Replica],
    costs: &BTreeMap<Stage, f64>,
    link_estimates: &LinkEstimates,
    load: &Load,
) -> Option<Exchange> {
    let mut speeds = Speeds::new(members, costs)?;
    let members = &members[..members.len().min(CELL)];
    let mut cell = Cell::new(members, link_estimates, load)?;
    let first: Vec<Replica> = cell.placed.clone();
    let before = cell.waits();
    let all: f64 = (0..cell.count()).map(|place| cell.own(place, cell.placed[place].stage)).sum();
    for _ in 0..MOST {
        let pairs = (0..cell.count()).flat_map(|one| (0..one).map(move |other| (one, other)));
        let able = pairs.filter(|(one, other)| {
            let (one, other) = (&cell.placed[*one], &cell.placed[*other]);
            let apart = one.stage != other.stage;
            apart && one.mobile && other.mobile && speeds.allow(one, other)
        });
        let best = able
            .map(|(one, other)| (cell.saves(one, other), one, other))
            .max_by(|one, other| one.0.total_cmp(&other.0));
        let Some((saved, one, other)) = best.filter(|(saved, ..)| *saved > WORTH * all) else {
            break;
        };
        debug_assert!(saved.is_finite(), "times are finite");
        let [one, other] =
            cell.placed.get_disjoint_mut([one, other]).expect("two different members");
        speeds.exchange(one, other);
    }
    let moves = first.iter().zip(&cell.placed);
    let moves = moves.filter(|(before, after)| before.stage != after.stage);
    let moves = moves.map(|(_, after)| (after.member, after.stage)).collect();
    Some(Exchange { moves, before, after: cell.waits(), kept: speeds.kept() })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shoal_protocol::ids::{Incarnation, PeerId};
    use shoal_protocol::message::LinkEstimate;
    use shoal_protocol::units::{Bytes, Rate};

    use super::*;

    /// Members at two places, one for even numbers and one for odd.
    fn placed(stages: &[u16], speeds: &[f64]) -> (Vec<Replica>, LinkEstimates) {
        let peer = |number: usize| PeerId([number as u8; 32]);
        let member = |number| Member { peer: peer(number), incarnation: Incarnation(1) };
        let members = stages.iter().zip(speeds).enumerate().map(|(number, (stage, speed))| {
            Replica { member: member(number), stage: Stage(*stage), speed: *speed, mobile: true }
        });
        let mut link_estimates = LinkEstimates::default();
        for one in 0..stages.len() {
            let others = (0..stages.len()).filter(|other| *other != one);
            let measured: Vec<(PeerId, LinkEstimate)> = others
                .map(|other| {
                    let near = (one + other).is_multiple_of(2);
                    let round_trip = Duration::from_millis(if near { 6 } else { 100 });
                    let rate = Some(Rate(if near { 100 } else { 10 } * 1_000_000));
                    (peer(other), LinkEstimate { round_trip, rate })
                })
                .collect();
            link_estimates.note(peer(one), &measured);
        }
        (members.collect(), link_estimates)
    }

    /// Two stages; the second takes `second` times as long.
    fn costs(second: f64) -> BTreeMap<Stage, f64> {
        [(Stage(0), 1.0), (Stage(1), second)].into()
    }

    fn sums() -> Load {
        Load::with_gradients(Bytes(1000), vec![Bytes(100_000_000); 2])
    }

    #[test]
    fn members_of_one_place_end_up_at_one_stage() {
        // At each stage there are two members of each place: two pairs have to change.
        let (members, link_estimates) = placed(&[0, 0, 0, 0, 1, 1, 1, 1], &[1.0; 8]);
        let found =
            exchange(&members, &costs(1.0), &link_estimates, &sums()).expect("all paths are known");
        assert_eq!(found.moves.len(), 4, "{found:?}");
        let stage = |number: usize| {
            let moved = found.moves.iter().find(|(member, _)| *member == members[number].member);
            moved.map_or(members[number].stage, |(_, to)| *to)
        };
        assert!((0..8).all(|number| (stage(number) == stage(0)) == (number % 2 == 0)));
        // Before, for the slowest member: a quarter of a gradient, both ways, to one near and two far
        // members; afterwards to three near ones. And a little for activations.
        assert!((found.before - 2.0 * (0.25 + 2.5 * 2.0 + 0.101)).abs() < 0.2, "{found:?}");
        assert!((found.after - 2.0 * (0.25 * 3.0 + 0.009)).abs() < 0.2, "{found:?}");
        // No exchange improves the result.
        let settled: Vec<Replica> = members
            .iter()
            .enumerate()
            .map(|(number, member)| Replica { stage: stage(number), ..*member })
            .collect();
        assert!(
            exchange(&settled, &costs(1.0), &link_estimates, &sums())
                .expect("known")
                .moves
                .is_empty()
        );
    }

    #[test]
    fn only_mobile_members_move_and_no_stage_loses_much_speed() {
        let all = [0, 0, 0, 0, 1, 1, 1, 1];
        // Members of the second stage are four times as fast as those of the first: the members of
        // either place alone would form the slower stage.
        let speeds = [1.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0];
        let (members, link_estimates) = placed(&all, &speeds);
        let found = exchange(&members, &costs(1.0), &link_estimates, &sums()).expect("known");
        assert_eq!(found.moves.len(), 4, "four of the faster are enough: {found:?}");
        assert_eq!(found.kept, 1.0);
        // The same speeds for equal members, with a second stage that costs a quarter.
        let found = exchange(&members, &costs(0.25), &link_estimates, &sums()).expect("known");
        assert_eq!((found.moves.len(), found.kept), (4, 1.0), "{found:?}");
        // Three fast members at one stage and three slow ones at the other: the slower stage would
        // lose too much.
        let (mut members, link_estimates) = placed(&all, &[4.0, 1.0, 4.0, 1.0, 4.0, 1.0, 4.0, 1.0]);
        assert!(
            exchange(&members, &costs(1.0), &link_estimates, &sums())
                .expect("known")
                .moves
                .is_empty()
        );
        // A small loss is reported.
        for (number, member) in members.iter_mut().enumerate() {
            member.speed = if number % 2 == 0 { 1.0 } else { 0.95 };
        }
        let found = exchange(&members, &costs(1.0), &link_estimates, &sums()).expect("known");
        assert_eq!(found.moves.len(), 4, "{found:?}");
        assert!((found.kept - 3.8 / 3.9).abs() < 1e-9, "{found:?}");
        for member in &mut members {
            (member.speed, member.mobile) = (1.0, false);
        }
        assert!(
            exchange(&members, &costs(1.0), &link_estimates, &sums())
                .expect("known")
                .moves
                .is_empty()
        );
    }

    /// One member of each place, in the middle of the list, has no known paths.
    #[test]
    fn a_member_without_known_paths_stays_and_the_others_move() {
        let (all, link_estimates) = placed(&[0, 0, 0, 0, 1, 1, 1, 1], &[1.0; 8]);
        let unknown = |number: u8, stage| Replica {
            member: Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) },
            stage: Stage(stage),
            ..all[0]
        };
        let mut members = all.clone();
        members.insert(0, unknown(100, 0));
        members.insert(5, unknown(101, 1));
        let found = exchange(&members, &costs(1.0), &link_estimates, &sums())
            .expect("most paths are known");
        assert_eq!(found.moves.len(), 4, "{found:?}");
        let stage = |number: usize| {
            let moved = found.moves.iter().find(|(member, _)| *member == all[number].member);
            moved.map_or(all[number].stage, |(_, to)| *to)
        };
        assert!((0..8).all(|number| (stage(number) == stage(0)) == (number % 2 == 0)));
    }

    #[test]
    fn the_member_that_lacks_most_is_dropped_first() {
        let all = |_: usize, _: usize| true;
        assert_eq!(connected(3, all), [0, 1, 2]);
        // Member 1 knows none; members 0 and 3 do not know each other.
        let some = |one: usize, other: usize| {
            one != 1 && other != 1 && (one, other) != (3, 0) && (one, other) != (0, 3)
        };
        assert_eq!(connected(4, some), [0, 2]);
        assert_eq!(connected(2, |_, _| false), [0]);
        assert_eq!(connected(0, all), []);
    }

    #[test]
    fn no_member_moves_without_known_paths() {
        let (members, _) = placed(&[0, 0, 1, 1], &[1.0; 4]);
        assert_eq!(exchange(&members, &costs(1.0), &LinkEstimates::default(), &sums()), None);
    }
}
