//! What each stage of a run gets through, from the measured paces of those who host it.
//!
//! A pipeline runs at its slowest stage, so a peer is worth most where it raises the lowest
//! throughput.

mod service_times;

use std::collections::BTreeSet;

use shoal_protocol::ids::{Member, PeerId, Stage, StageSpan};

pub use self::service_times::{Estimates, ServiceTimes};
use crate::rebalance::SAME;
use crate::rng::mixed;

/// Microbatches in a million seconds, so that integers do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Throughput(pub u64);

impl Throughput {
    /// Of who needs so many nanoseconds for a microbatch.
    #[must_use]
    pub fn of_service_time(nanoseconds: u64) -> Self {
        Self(1_000_000_000_000_000 / nanoseconds.max(1))
    }

    /// Microbatches in a second.
    #[must_use]
    pub fn per_second(self) -> f64 {
        self.0 as f64 / 1e6
    }
}

/// What each stage of a run gets through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageThroughputs {
    /// The hosts of each stage and what they get through together.
    stages: Vec<(usize, Throughput)>,
}

impl StageThroughputs {
    /// Of a run with so many stages and these hosts.
    #[must_use]
    pub fn of(
        stages: u16,
        hosts: impl IntoIterator<Item = (Member, StageSpan)>,
        estimates: &Estimates<'_>,
    ) -> Self {
        let mut throughput = Self { stages: vec![Default::default(); usize::from(stages)] };
        for (member, span) in hosts {
            throughput.add(span, estimates.throughput(member, span));
        }
        throughput
    }

    /// Another host of these stages.
    pub fn add(&mut self, span: StageSpan, gets_through: Throughput) {
        for (hosts, throughput) in self.hosted_by(span) {
            *hosts += 1;
            throughput.0 = throughput.0.saturating_add(gets_through.0);
        }
    }

    /// One host of these stages less.
    pub fn remove(&mut self, span: StageSpan, gets_through: Throughput) {
        for (hosts, throughput) in self.hosted_by(span) {
            *hosts = hosts.saturating_sub(1);
            throughput.0 =
                if *hosts == 0 { 0 } else { throughput.0.saturating_sub(gets_through.0) };
        }
    }

    fn hosted_by(&mut self, span: StageSpan) -> impl Iterator<Item = &mut (usize, Throughput)> {
        let first = usize::from(span.first.0);
        self.stages
            .iter_mut()
            .skip(first)
            .take((usize::from(span.last.0) + 1).saturating_sub(first))
    }

    /// Those who host a stage.
    #[must_use]
    pub fn hosts(&self, stage: Stage) -> usize {
        self.stages.get(usize::from(stage.0)).map_or(0, |(hosts, _)| *hosts)
    }

    /// What a stage gets through.
    #[must_use]
    pub fn of_stage(&self, stage: Stage) -> Throughput {
        self.stages.get(usize::from(stage.0)).map_or_else(Default::default, |(_, through)| *through)
    }

    /// What the whole pipeline gets through: what its slowest stage does.
    #[must_use]
    pub fn of_run(&self) -> Throughput {
        self.stages.iter().map(|(_, throughput)| *throughput).min().unwrap_or_default()
    }

    /// The stages at which one more host, which has room for those that it `fits`, raises the
    /// throughput most: those that nobody hosts, the lowest first; else those that get through least, or
    /// about as little. Of several that get through equally little the newcomer's id decides which is
    /// first, so that a crowd does not fill the stages in one order.
    #[must_use]
    pub fn neediest(&self, fits: &BTreeSet<Stage>, newcomer: PeerId) -> Vec<Stage> {
        let seed = u64::from_le_bytes(*newcomer.0.first_chunk().expect("a peer id has 32 bytes"));
        let known = fits.iter().filter(|stage| usize::from(stage.0) < self.stages.len());
        let mut known: Vec<Stage> = known.copied().collect();
        known.sort_by_cached_key(|stage| {
            let hosted = self.hosts(*stage) > 0;
            // Each of those that nobody hosts takes one: there is no crowd to spread.
            let order = if hosted { mixed(seed, u64::from(stage.0)) } else { 0 };
            (hosted, self.of_stage(*stage), order, *stage)
        });
        let Some(first) = known.first().copied() else { return known };
        let most = self.of_stage(first).per_second() * SAME;
        known.retain(|stage| {
            let hosted = self.hosts(*stage) > 0;
            hosted == (self.hosts(first) > 0) && self.of_stage(*stage).per_second() <= most
        });
        known
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shoal_protocol::ids::Incarnation;
    use shoal_protocol::message::PassTimes;
    use shoal_protocol::units::Moment;
    use std::time::Duration;

    use super::*;

    fn member(number: u16) -> Member {
        let mut id = [0; 32];
        id[..2].copy_from_slice(&number.to_le_bytes());
        Member { peer: PeerId(id), incarnation: Incarnation(1) }
    }

    fn all(stages: u16) -> BTreeSet<Stage> {
        (0..stages).map(Stage).collect()
    }

    /// Each stage has one measured host, whose paces these are.
    fn measured(service_times: &[u64]) -> ServiceTimes {
        let mut known = ServiceTimes::default();
        for (stage, milliseconds) in service_times.iter().enumerate() {
            let pass_times =
                PassTimes { forward: Duration::from_millis(*milliseconds), ..PassTimes::default() };
            let member = member(1000 + stage as u16);
            known.add(Stage(stage as u16), member, pass_times, Moment::default());
        }
        known
    }

    fn first_hosts(stages: u16) -> impl Iterator<Item = (Member, StageSpan)> {
        (0..stages).map(|stage| (member(1000 + stage), StageSpan::one(Stage(stage))))
    }

    #[test]
    fn a_newcomer_goes_where_the_least_gets_through() {
        let service_times = measured(&[100, 400, 200]);
        let estimates = service_times.estimates(3, Moment::default());
        let mut throughput = StageThroughputs::of(3, first_hosts(3), &estimates);
        assert_eq!(throughput.of_run(), Throughput(2_500_000));
        let mut order = Vec::new();
        for number in 0..4 {
            let newcomer = member(number);
            let stage = throughput.neediest(&all(3), newcomer.peer)[0];
            order.push(stage.0);
            let span = StageSpan::one(stage);
            throughput.add(span, estimates.throughput(newcomer, span));
        }
        // 400 / 2 = 200 is a tie with the last stage's.
        assert_eq!(order[0], 1);
        assert!(order[1..3] == [1, 2] || order[1..3] == [2, 1], "{order:?}");
        let only = BTreeSet::from([Stage(0)]);
        assert_eq!(throughput.neediest(&only, member(9).peer), [Stage(0)]);
        assert_eq!(throughput.neediest(&BTreeSet::new(), member(9).peer), []);
    }

    #[test]
    fn who_goes_takes_along_what_it_got_through() {
        let service_times = measured(&[100, 200]);
        let estimates = service_times.estimates(2, Moment::default());
        let before = StageThroughputs::of(2, first_hosts(2), &estimates);
        let mut throughput = before.clone();
        let both = StageSpan::all(2);
        let through = estimates.throughput(member(3), both);
        throughput.add(both, through);
        assert!(throughput.of_run() > before.of_run());
        throughput.remove(both, through);
        assert_eq!(throughput, before);
        throughput.remove(StageSpan::one(Stage(1)), Throughput(1));
        assert_eq!((throughput.hosts(Stage(1)), throughput.of_run()), (0, Throughput(0)));
    }

    proptest! {
        /// Against the most even filling, each stage has as many hosts as its part of the work asks
        /// for, or one more at most.
        #[test]
        fn a_crowd_spreads_by_what_stages_cost(
            service_times in prop::collection::vec(10u64..1000, 1..12),
            crowd in 0u16..200,
            salt: u16,
        ) {
            let stages = service_times.len() as u16;
            let known = measured(&service_times);
            let estimates = known.estimates(stages, Moment::default());
            let mut throughput = StageThroughputs::of(stages, first_hosts(stages), &estimates);
            for number in 0..crowd {
                let newcomer = member(number ^ salt);
                let stage = throughput.neediest(&all(stages), newcomer.peer);
                let span = StageSpan::one(stage[0]);
                throughput.add(span, Throughput::of_service_time(estimates.service_time(newcomer, span.first)));
            }
            let hosts = f64::from(crowd) + f64::from(stages);
            let work: u64 = service_times.iter().sum();
            for (stage, service_time) in service_times.iter().enumerate() {
                let even = hosts * *service_time as f64 / work as f64;
                let found = throughput.hosts(Stage(stage as u16));
                prop_assert!(found == 1 || found as f64 <= even + 1.001, "{found} of {even}");
            }
        }

        /// While nobody is measured, stages differ by one host at most, and all are hosted first.
        #[test]
        fn an_unmeasured_crowd_spreads_evenly(stages in 1u16..20, crowd in 0u16..100, salt: u16) {
            let service_times = ServiceTimes::default();
            let estimates = service_times.estimates(stages, Moment::default());
            let mut throughput = StageThroughputs::of(stages, [], &estimates);
            for number in 0..crowd {
                let newcomer = member(number ^ salt);
                let stage = throughput.neediest(&all(stages), newcomer.peer)[0];
                let span = StageSpan::one(stage);
                throughput.add(span, estimates.throughput(newcomer, span));
                let hosts = (0..stages).map(|stage| throughput.hosts(Stage(stage)));
                let (least, most) = (hosts.clone().min(), hosts.max());
                prop_assert!(most <= least.map(|least| least + 1));
            }
        }
    }
}
