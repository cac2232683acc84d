//! Service times of members per microbatch. Estimates decay: without new reports, a member's own
//! average counts ever less and the stage's median ever more.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{Member, Stage, StageSpan};
use shoal_protocol::message::PassTimes;
use shoal_protocol::units::Moment;

use super::Throughput;
use crate::coordinator::work::deadline::believable;
use crate::robust_average::median;

/// Service time of a microbatch, in nanoseconds, while no member is measured.
const UNKNOWN_SERVICE_TIME: u64 = 1_000_000_000;

/// An average has full weight for this many times its service time, and for at least a minute.
const FRESH_MICROBATCHES: u32 = 64;
const FRESH: Duration = Duration::from_secs(60);

/// Measured service times of members at their stages.
#[derive(Debug, Clone, Default)]
pub struct ServiceTimes {
    of: BTreeMap<(Stage, Member), Average>,
}

/// An exponential average with a weight of 1/8, corrected for its start at zero.
#[derive(Debug, Clone, Copy)]
struct Average {
    /// The sum of all values, each multiplied by 7/8 for every later value.
    sum: u64,
    /// The same sum for ones instead of values, in millionths.
    weight: u64,
    /// The time of the newest value.
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

    /// Nanoseconds per microbatch.
    fn service_time(self) -> u64 {
        let mean = u128::from(self.sum) * u128::from(Self::ONE) / u128::from(self.weight.max(1));
        u64::try_from(mean).unwrap_or(u64::MAX).max(1)
    }

    /// Number of times that its weight in an estimate has been halved since the newest value.
    fn halvings(self, now: Moment) -> u32 {
        let fresh = FRESH.max(Duration::from_nanos(self.service_time()) * FRESH_MICROBATCHES);
        u32::try_from(now.since(self.at).as_nanos() / fresh.as_nanos()).unwrap_or(u32::MAX)
    }
}

impl ServiceTimes {
    /// Adds the pass times of a member's microbatch at a stage. Returns its measured service time
    /// there, in nanoseconds.
    pub fn add(&mut self, stage: Stage, member: Member, pass_times: PassTimes, now: Moment) -> u64 {
        let PassTimes { forward, backward } = believable(pass_times);
        let time = forward + backward;
        let nanoseconds = u64::try_from(time.as_nanos()).expect("two hours are few nanoseconds");
        let average = self.of.entry((stage, member)).or_insert_with(|| Average::new(now));
        average.add(nanoseconds, now);
        average.service_time()
    }

    /// Removes a member.
    pub fn forget(&mut self, member: Member) {
        self.of.retain(|(_, of), _| *of != member);
    }

    /// A member's measured service time at a stage, in nanoseconds.
    #[must_use]
    pub fn measured(&self, stage: Stage, member: Member) -> Option<u64> {
        self.of.get(&(stage, member)).map(|average| average.service_time())
    }

    /// The present estimates for all members at every stage of a run.
    #[must_use]
    pub fn estimates(&self, stages: u16, now: Moment) -> Estimates<'_> {
        let mut measured: BTreeMap<Stage, Vec<u64>> = BTreeMap::new();
        for ((stage, _), average) in &self.of {
            measured.entry(*stage).or_default().push(average.service_time());
        }
        let medians: BTreeMap<Stage, u64> = measured
            .into_iter()
            .map(|(stage, mut service_times)| {
                (stage, median(&mut service_times).expect("a member is measured"))
            })
            .collect();
        let mut all: Vec<u64> = medians.values().copied().collect();
        let anywhere = median(&mut all).unwrap_or(UNKNOWN_SERVICE_TIME);
        let of_stage = |stage| medians.get(&stage).copied().unwrap_or(anywhere);
        Estimates {
            service_times: self,
            now,
            typical: (0..stages).map(Stage).map(of_stage).collect(),
        }
    }
}

/// Estimated service times of members at stages, at one moment.
#[derive(Debug, Clone)]
pub struct Estimates<'a> {
    service_times: &'a ServiceTimes,
    now: Moment,
    /// The typical service time at each stage.
    typical: Vec<u64>,
}

impl Estimates<'_> {
    /// A member's estimated service time at a stage, in nanoseconds. A member that is not measured
    /// there is assumed to have the same ratio to the typical time as at the stages where it is
    /// measured.
    #[must_use]
    pub fn service_time(&self, member: Member, stage: Stage) -> u64 {
        let typical = self.typical(stage);
        let (own, halvings) = match self.service_times.of.get(&(stage, member)) {
            Some(average) => (average.service_time(), average.halvings(self.now)),
            None => match self.elsewhere(member) {
                Some((of, average)) => {
                    let own = u128::from(average.service_time()) * u128::from(typical)
                        / u128::from(self.typical(of));
                    (u64::try_from(own).unwrap_or(u64::MAX), average.halvings(self.now))
                }
                None => return typical,
            },
        };
        let apart = own.abs_diff(typical).checked_shr(halvings).unwrap_or(0);
        if own > typical { typical + apart } else { typical - apart }.max(1)
    }

    /// A member's throughput at each stage of a span, whose stages share its engine.
    #[must_use]
    pub fn throughput(&self, member: Member, span: StageSpan) -> Throughput {
        let all = span
            .stages()
            .fold(0u64, |sum, stage| sum.saturating_add(self.service_time(member, stage)));
        Throughput::of_service_time(all)
    }

    /// The typical service time at a stage.
    pub(crate) fn typical(&self, stage: Stage) -> u64 {
        self.typical.get(usize::from(stage.0)).copied().unwrap_or(UNKNOWN_SERVICE_TIME)
    }

    /// The newest measurement of a member at any stage.
    fn elsewhere(&self, member: Member) -> Option<(Stage, Average)> {
        let stages = (0..self.typical.len() as u16).map(Stage);
        let known =
            stages.filter_map(|stage| Some((stage, *self.service_times.of.get(&(stage, member))?)));
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

    fn pass_times(milliseconds: u64) -> PassTimes {
        let time = Duration::from_millis(milliseconds);
        PassTimes { forward: time / 3, backward: time - time / 3 }
    }

    fn at(seconds: u64) -> Moment {
        Moment(Duration::from_secs(seconds))
    }

    #[test]
    fn an_unmeasured_member_is_typical_of_its_stage_or_as_fast_as_elsewhere() {
        let mut service_times = ServiceTimes::default();
        assert_eq!(
            service_times.estimates(2, at(0)).service_time(member(1), Stage(0)),
            UNKNOWN_SERVICE_TIME
        );
        for (number, time) in [(1, 100), (2, 200), (3, 900)] {
            service_times.add(Stage(0), member(number), pass_times(time), at(0));
        }
        service_times.add(Stage(1), member(4), pass_times(50), at(0));
        let estimates = service_times.estimates(3, at(1));
        let service_time =
            |number, stage| estimates.service_time(member(number), Stage(stage)) / 1_000_000;
        assert_eq!([service_time(1, 0), service_time(3, 0), service_time(9, 0)], [100, 900, 200]);
        assert_eq!([service_time(1, 1), service_time(4, 0), service_time(9, 1)], [25, 200, 50]);
        // Two stages are measured; the faster one is used for the third.
        assert_eq!(service_time(9, 2), 50);
        let both = StageSpan { first: Stage(0), last: Stage(1) };
        assert_eq!(estimates.throughput(member(1), both), Throughput::of_service_time(125_000_000));
    }

    #[test]
    fn an_old_measurement_decays_towards_the_typical_time() {
        let mut service_times = ServiceTimes::default();
        service_times.add(Stage(0), member(1), pass_times(900), at(0));
        service_times.add(Stage(0), member(2), pass_times(100), at(0));
        service_times.add(Stage(0), member(3), pass_times(100), at(0));
        let service_time = |seconds| {
            service_times.estimates(1, at(seconds)).service_time(member(1), Stage(0)) / 1_000_000
        };
        assert_eq!([0, 59, 60, 120, 100_000].map(service_time), [900, 900, 500, 300, 100]);
        service_times.forget(member(1));
        assert_eq!(
            service_times.estimates(1, at(0)).service_time(member(1), Stage(0)),
            100_000_000
        );
    }

    #[test]
    fn extreme_reports_cause_no_overflow() {
        let mut service_times = ServiceTimes::default();
        let endless = PassTimes { forward: Duration::MAX, backward: Duration::MAX };
        for _ in 0..100 {
            service_times.add(Stage(0), member(1), endless, at(0));
        }
        let all = service_times.estimates(1024, Moment(Duration::MAX));
        assert!(all.throughput(member(1), StageSpan::all(1024)) < Throughput(1));
    }

    proptest! {
        #[test]
        fn an_average_is_between_what_was_measured_and_follows_it(
            times in prop::collection::vec(1u64..100_000, 1..40),
            then in 1u64..100_000,
        ) {
            let mut service_times = ServiceTimes::default();
            let mut add = |time| {
                service_times.add(Stage(0), member(1), pass_times(time), at(0));
                service_times.estimates(1, at(0)).service_time(member(1), Stage(0)) / 1000
            };
            // The first value is used as it is.
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
