//! How long members need for a microbatch. Averages forget: who was not heard of for long counts less
//! and less by its own and more and more by what is typical.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{Member, Stage, StageSpan};
use shoal_protocol::message::Spent;
use shoal_protocol::units::Moment;

use super::Throughput;
use crate::lateness::believable;
use crate::typical::median;

/// What a microbatch is taken to need at a stage while nobody is measured anywhere, in nanoseconds.
const UNKNOWN_PACE: u64 = 1_000_000_000;

/// An average counts in full for so many times its own pace, and for a minute at least.
const FRESH_PACES: u32 = 64;
const FRESH: Duration = Duration::from_secs(60);

/// How long members need for a microbatch at the stages that they were measured at.
#[derive(Debug, Clone, Default)]
pub struct Paces {
    of: BTreeMap<(Stage, Member), Average>,
}

/// An exponential average with a weight of 1/8, corrected for what it began from: nothing.
#[derive(Debug, Clone, Copy)]
struct Average {
    /// The sum of all values, each 7/8 of what it was with every value after it.
    sum: u64,
    /// The same sum of ones, in millionths.
    weight: u64,
    /// When the newest value came.
    at: Moment,
}

impl Average {
    const ONE: u64 = 1_000_000;

    fn new(at: Moment) -> Self {
        Self { sum: 0, weight: 0, at }
    }

    fn add(&mut self, nanoseconds: u64, now: Moment) {
        self.sum = self.sum - self.sum / 8 + nanoseconds;
        self.weight = self.weight - self.weight / 8 + Self::ONE;
        self.at = now;
    }

    /// Nanoseconds for one microbatch.
    fn pace(self) -> u64 {
        let mean = u128::from(self.sum) * u128::from(Self::ONE) / u128::from(self.weight.max(1));
        u64::try_from(mean).unwrap_or(u64::MAX).max(1)
    }

    /// How often its part in an estimate was halved since the newest value came.
    fn halvings(self, now: Moment) -> u32 {
        let fresh = FRESH.max(Duration::from_nanos(self.pace()) * FRESH_PACES);
        u32::try_from(now.since(self.at).as_nanos() / fresh.as_nanos()).unwrap_or(u32::MAX)
    }
}

impl Paces {
    /// A microbatch took a member so long at a stage. Returns the nanoseconds that it is now measured to
    /// need for one there.
    pub fn add(&mut self, stage: Stage, member: Member, spent: Spent, now: Moment) -> u64 {
        let Spent { forward, backward } = believable(spent);
        let time = forward + backward;
        let nanoseconds = u64::try_from(time.as_nanos()).expect("two hours are few nanoseconds");
        let average = self.of.entry((stage, member)).or_insert_with(|| Average::new(now));
        average.add(nanoseconds, now);
        average.pace()
    }

    /// A member is gone.
    pub fn forget(&mut self, member: Member) {
        self.of.retain(|(_, of), _| *of != member);
    }

    /// Nanoseconds that a member was measured to need for a microbatch at a stage.
    #[must_use]
    pub fn measured(&self, stage: Stage, member: Member) -> Option<u64> {
        self.of.get(&(stage, member)).map(|average| average.pace())
    }

    /// What is to be expected now of everybody at every stage of a run.
    #[must_use]
    pub fn estimates(&self, stages: u16, now: Moment) -> Estimates<'_> {
        let mut measured: BTreeMap<Stage, Vec<u64>> = BTreeMap::new();
        for ((stage, _), average) in &self.of {
            measured.entry(*stage).or_default().push(average.pace());
        }
        let medians: BTreeMap<Stage, u64> = measured
            .into_iter()
            .map(|(stage, mut paces)| (stage, median(&mut paces).expect("somebody is measured")))
            .collect();
        let mut all: Vec<u64> = medians.values().copied().collect();
        let anywhere = median(&mut all).unwrap_or(UNKNOWN_PACE);
        let of_stage = |stage| medians.get(&stage).copied().unwrap_or(anywhere);
        Estimates { paces: self, now, typical: (0..stages).map(Stage).map(of_stage).collect() }
    }
}

/// What is to be expected of members at stages at one moment.
#[derive(Debug, Clone)]
pub struct Estimates<'a> {
    paces: &'a Paces,
    now: Moment,
    /// What a microbatch takes at each stage, typically.
    typical: Vec<u64>,
}

impl Estimates<'_> {
    /// Nanoseconds that a member needs for a microbatch at a stage. Who is not measured there is as
    /// much faster or slower than is typical as it is at the stages where it is measured.
    #[must_use]
    pub fn pace(&self, member: Member, stage: Stage) -> u64 {
        let typical = self.typical(stage);
        let (own, halvings) = match self.paces.of.get(&(stage, member)) {
            Some(average) => (average.pace(), average.halvings(self.now)),
            None => match self.elsewhere(member) {
                Some((of, average)) => {
                    let own = u128::from(average.pace()) * u128::from(typical)
                        / u128::from(self.typical(of));
                    (u64::try_from(own).unwrap_or(u64::MAX), average.halvings(self.now))
                }
                None => return typical,
            },
        };
        let apart = own.abs_diff(typical).checked_shr(halvings).unwrap_or(0);
        if own > typical { typical + apart } else { typical - apart }.max(1)
    }

    /// What a member gets through at each stage of a span: all of them share its engine.
    #[must_use]
    pub fn throughput(&self, member: Member, span: StageSpan) -> Throughput {
        let all =
            span.stages().fold(0u64, |sum, stage| sum.saturating_add(self.pace(member, stage)));
        Throughput::of_pace(all)
    }

    /// What a microbatch takes at a stage, typically.
    pub(crate) fn typical(&self, stage: Stage) -> u64 {
        self.typical.get(usize::from(stage.0)).copied().unwrap_or(UNKNOWN_PACE)
    }

    /// The newest measurement of a member at any stage.
    fn elsewhere(&self, member: Member) -> Option<(Stage, Average)> {
        let stages = (0..self.typical.len() as u16).map(Stage);
        let known = stages.filter_map(|stage| Some((stage, *self.paces.of.get(&(stage, member))?)));
        known.max_by_key(|(stage, average)| (average.at, *stage))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shoal_protocol::ids::{Incarnation, PeerId};

    use super::*;

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    fn spent(milliseconds: u64) -> Spent {
        let time = Duration::from_millis(milliseconds);
        Spent { forward: time / 3, backward: time - time / 3 }
    }

    fn at(seconds: u64) -> Moment {
        Moment(Duration::from_secs(seconds))
    }

    #[test]
    fn who_is_not_measured_is_typical_of_its_stage_and_as_fast_as_it_is_elsewhere() {
        let mut paces = Paces::default();
        assert_eq!(paces.estimates(2, at(0)).pace(member(1), Stage(0)), UNKNOWN_PACE);
        for (number, time) in [(1, 100), (2, 200), (3, 900)] {
            paces.add(Stage(0), member(number), spent(time), at(0));
        }
        paces.add(Stage(1), member(4), spent(50), at(0));
        let estimates = paces.estimates(3, at(1));
        let pace = |number, stage| estimates.pace(member(number), Stage(stage)) / 1_000_000;
        assert_eq!([pace(1, 0), pace(3, 0), pace(9, 0)], [100, 900, 200]);
        assert_eq!([pace(1, 1), pace(4, 0), pace(9, 1)], [25, 200, 50]);
        // Of the two stages with somebody measured, the faster one stands for the third.
        assert_eq!(pace(9, 2), 50);
        let both = StageSpan { first: Stage(0), last: Stage(1) };
        assert_eq!(estimates.throughput(member(1), both), Throughput::of_pace(125_000_000));
    }

    #[test]
    fn an_old_measurement_gives_way_to_what_is_typical() {
        let mut paces = Paces::default();
        paces.add(Stage(0), member(1), spent(900), at(0));
        paces.add(Stage(0), member(2), spent(100), at(0));
        paces.add(Stage(0), member(3), spent(100), at(0));
        let pace = |seconds| paces.estimates(1, at(seconds)).pace(member(1), Stage(0)) / 1_000_000;
        assert_eq!([0, 59, 60, 120, 100_000].map(pace), [900, 900, 500, 300, 100]);
        paces.forget(member(1));
        assert_eq!(paces.estimates(1, at(0)).pace(member(1), Stage(0)), 100_000_000);
    }

    #[test]
    fn no_word_of_a_member_makes_the_numbers_overflow() {
        let mut paces = Paces::default();
        let endless = Spent { forward: Duration::MAX, backward: Duration::MAX };
        for _ in 0..100 {
            paces.add(Stage(0), member(1), endless, at(0));
        }
        let all = paces.estimates(1024, Moment(Duration::MAX));
        assert!(all.throughput(member(1), StageSpan::all(1024)) < Throughput(1));
    }

    proptest! {
        #[test]
        fn an_average_is_between_what_was_measured_and_follows_it(
            times in prop::collection::vec(1u64..100_000, 1..40),
            then in 1u64..100_000,
        ) {
            let mut paces = Paces::default();
            let mut add = |time| {
                paces.add(Stage(0), member(1), spent(time), at(0));
                paces.estimates(1, at(0)).pace(member(1), Stage(0)) / 1000
            };
            // The first one is believed as it is.
            prop_assert!(add(times[0]).abs_diff(times[0] * 1000) <= 1);
            let last = times.iter().skip(1).map(|time| add(*time)).last();
            let last = last.unwrap_or(times[0] * 1000);
            let (low, high) = (times.iter().min(), times.iter().max());
            let within = low.copied() <= Some(last / 1000 + 1) && Some(last / 1000) <= high.copied();
            prop_assert!(within, "{last}");
            let last = (0..120).map(|_| add(then)).last().expect("there are some");
            prop_assert!(last.abs_diff(then * 1000) <= 1 + 100 + last.max(then * 1000) / 10);
        }
    }
}
