//! Which members should change places so that those who send each other much are near.
//!
//! No stage gets faster or slower by it, since only members that are about equally fast change places. Two
//! at a time do, those whose exchange saves most of what all members' tensors are on their way, until none
//! saves much: the local improvement of the planner's search, from the placement that is there. What that
//! is worth is what a step waits for: its slowest all-reduce, and its ways from stage to stage.

use shoal_protocol::ids::{Member, Stage};

use crate::nearness::{Load, Ways};
use crate::rebalance::{Replica, SAME};

/// Members that are looked at: of more a part, another one with each look.
pub(crate) const CELL: usize = 64;

/// Exchanges in one plan.
const MOST: usize = CELL;

/// An exchange saves at least this part of all, or is not made: it costs two snapshots.
const WORTH: f64 = 0.01;

/// Exchanges that together make a step shorter.
#[derive(Debug, Clone, PartialEq)]
pub struct Exchange {
    /// Who goes where.
    pub moves: Vec<(Member, Stage)>,
    /// Seconds of a step that its tensors are on their way.
    pub before: f64,
    /// After the moves.
    pub after: f64,
}

/// What members of a cell send each other, in seconds of a step.
struct Cell {
    /// Of an all-reduce, and from stage to stage, for every pair.
    exchange: Vec<f64>,
    pass: Vec<f64>,
    stages: Vec<Stage>,
    count: usize,
}

impl Cell {
    fn new(members: &[Replica], ways: &Ways, load: &Load) -> Option<Self> {
        let replicas = |stage| members.iter().filter(|other| other.stage == stage).count();
        let count = members.len();
        let (mut exchange, mut pass) = (vec![0.0; count * count], vec![0.0; count * count]);
        for (place, one) in members.iter().enumerate() {
            for (other_place, other) in members.iter().enumerate().filter(|(at, _)| *at != place) {
                let link = ways.link(one.member.peer, other.member.peer)?;
                let share = replicas(one.stage).max(1) as u32;
                let traffic = load.of_replica(one.stage, share);
                let at = place * count + other_place;
                exchange[at] = 2.0 * link.exchange(traffic.gradient, share).as_secs_f64();
                pass[at] = 2.0 * link.time(traffic.activations).as_secs_f64();
            }
        }
        let stages = members.iter().map(|member| member.stage).collect();
        Some(Self { exchange, pass, stages, count })
    }

    fn hosts(&self, stage: Stage) -> impl Iterator<Item = usize> + '_ {
        (0..self.count).filter(move |place| self.stages[*place] == stage)
    }

    /// What a member's tensors take at a stage, with the others where they are.
    fn own(&self, place: usize, stage: Stage) -> f64 {
        let others = (0..self.count).filter(|other| *other != place);
        others.map(|other| self.between(place, other, stage, self.stages[other])).sum()
    }

    fn between(&self, one: usize, other: usize, stage: Stage, other_stage: Stage) -> f64 {
        let at = one * self.count + other;
        match stage.0.abs_diff(other_stage.0) {
            0 => self.exchange[at],
            1 => self.pass[at] / self.hosts(other_stage).count().max(1) as f64,
            _ => 0.0,
        }
    }

    /// What an exchange saves.
    fn saves(&self, one: usize, other: usize) -> f64 {
        let (here, there) = (self.stages[one], self.stages[other]);
        let now = self.own(one, here) + self.own(other, there);
        // Each at the other's place, and the other no more there.
        let moved = |place: usize, gone: usize, to: Stage, from: Stage| {
            self.own(place, to) - self.between(place, gone, to, to)
                + self.between(place, gone, to, from)
        };
        now - moved(one, other, there, here) - moved(other, one, here, there)
    }

    /// Seconds that a step waits.
    fn waits(&self) -> f64 {
        let all = 0..self.count;
        let same = |place: usize| {
            self.hosts(self.stages[place])
                .map(|other| self.exchange[place * self.count + other])
                .sum::<f64>()
        };
        let slowest = all.map(same).fold(0.0, f64::max);
        let last = self.stages.iter().map(|stage| stage.0).max().unwrap_or(0);
        let boundary = |stage: u16| {
            let pairs = self.hosts(Stage(stage)).flat_map(|one| {
                self.hosts(Stage(stage + 1)).map(move |other| self.pass[one * self.count + other])
            });
            let (sum, count) = pairs.fold((0.0, 0usize), |(sum, n), pass| (sum + pass, n + 1));
            sum / count.max(1) as f64
        };
        slowest + (0..last).map(boundary).sum::<f64>()
    }
}

/// The exchanges among these members, a cell at most; none where ways are not known.
#[must_use]
pub fn exchange(members: &[Replica], ways: &Ways, load: &Load) -> Option<Exchange> {
    let members = &members[..members.len().min(CELL)];
    let mut cell = Cell::new(members, ways, load)?;
    let before = cell.waits();
    let all: f64 = (0..cell.count).map(|place| cell.own(place, cell.stages[place])).sum();
    let alike = |one: &Replica, other: &Replica| {
        one.speed <= other.speed * SAME && other.speed <= one.speed * SAME
    };
    for _ in 0..MOST {
        let pairs = (0..cell.count).flat_map(|one| (0..one).map(move |other| (one, other)));
        let able = pairs.filter(|(one, other)| {
            let (one, other) = (&members[*one], &members[*other]);
            one.mobile && other.mobile && alike(one, other)
        });
        let apart = able.filter(|(one, other)| cell.stages[*one] != cell.stages[*other]);
        let best = apart
            .map(|(one, other)| (cell.saves(one, other), one, other))
            .max_by(|one, other| one.0.total_cmp(&other.0));
        let Some((saved, one, other)) = best.filter(|(saved, ..)| *saved > WORTH * all) else {
            break;
        };
        debug_assert!(saved.is_finite(), "ways end");
        cell.stages.swap(one, other);
    }
    let moves = members.iter().zip(&cell.stages);
    let moves = moves.filter(|(member, stage)| member.stage != **stage);
    let moves = moves.map(|(member, stage)| (member.member, *stage)).collect();
    Some(Exchange { moves, before, after: cell.waits() })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shoal_protocol::ids::{Incarnation, PeerId};
    use shoal_protocol::message::Way;
    use shoal_protocol::units::{Bytes, Rate};

    use super::*;

    /// Members of two places: those whose number is even here, the others there.
    fn placed(stages: &[u16], speeds: &[f64]) -> (Vec<Replica>, Ways) {
        let peer = |number: usize| PeerId([number as u8; 32]);
        let member = |number| Member { peer: peer(number), incarnation: Incarnation(1) };
        let members = stages.iter().zip(speeds).enumerate().map(|(number, (stage, speed))| {
            Replica { member: member(number), stage: Stage(*stage), speed: *speed, mobile: true }
        });
        let mut ways = Ways::default();
        for one in 0..stages.len() {
            let others = (0..stages.len()).filter(|other| *other != one);
            let said: Vec<(PeerId, Way)> = others
                .map(|other| {
                    let near = (one + other).is_multiple_of(2);
                    let round_trip = Duration::from_millis(if near { 6 } else { 100 });
                    let rate = Some(Rate(if near { 100 } else { 10 } * 1_000_000));
                    (peer(other), Way { round_trip, rate })
                })
                .collect();
            ways.note(peer(one), &said);
        }
        (members.collect(), ways)
    }

    fn sums() -> Load {
        Load { activations: Bytes(1000), gradients: vec![Bytes(100_000_000); 2] }
    }

    #[test]
    fn members_of_one_place_come_to_one_stage() {
        // Of each place two at each stage: two have to change.
        let (members, ways) = placed(&[0, 0, 0, 0, 1, 1, 1, 1], &[1.0; 8]);
        let found = exchange(&members, &ways, &sums()).expect("all ways are known");
        assert_eq!(found.moves.len(), 4, "{found:?}");
        let stage = |number: usize| {
            let moved = found.moves.iter().find(|(member, _)| *member == members[number].member);
            moved.map_or(members[number].stage, |(_, to)| *to)
        };
        assert!((0..8).all(|number| (stage(number) == stage(0)) == (number % 2 == 0)));
        // Before, by the slowest: of a gradient a quarter each, there and back, to one near and two
        // far ones; then to three near ones. And a little for what is passed on.
        assert!((found.before - 2.0 * (0.25 + 2.5 * 2.0 + 0.101)).abs() < 0.2, "{found:?}");
        assert!((found.after - 2.0 * (0.25 * 3.0 + 0.009)).abs() < 0.2, "{found:?}");
        // There is nothing more to be had.
        let settled: Vec<Replica> = members
            .iter()
            .enumerate()
            .map(|(number, member)| Replica { stage: stage(number), ..*member })
            .collect();
        assert!(exchange(&settled, &ways, &sums()).expect("known").moves.is_empty());
    }

    #[test]
    fn only_who_is_as_fast_and_may_move_changes_places() {
        let speeds = [1.0, 3.0, 1.0, 3.0, 4.0, 9.0, 4.0, 9.0];
        let (mut members, ways) = placed(&[0, 0, 0, 0, 1, 1, 1, 1], &speeds);
        assert!(exchange(&members, &ways, &sums()).expect("known").moves.is_empty());
        for member in &mut members {
            (member.speed, member.mobile) = (1.0, false);
        }
        assert!(exchange(&members, &ways, &sums()).expect("known").moves.is_empty());
    }

    #[test]
    fn nobody_moves_where_ways_are_not_known() {
        let (members, _) = placed(&[0, 0, 1, 1], &[1.0; 4]);
        assert_eq!(exchange(&members, &Ways::default(), &sums()), None);
    }
}
