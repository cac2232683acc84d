//! Throughput of each stage of a run, from the measured service times of its hosts.
//!
//! A pipeline runs at the speed of its slowest stage, so an additional peer helps most where it
//! raises the lowest throughput.

mod service_times;

use std::collections::BTreeSet;

use shoal_protocol::ids::{Member, PeerId, Stage, StageSpan};

pub use self::service_times::{Estimates, ServiceTimes};
use crate::coordinator::placing::rebalance::SAME;
use crate::rng::mixed;

/// Microbatches per million seconds, so that integers suffice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Throughput(pub u64);

impl Throughput {
    /// The throughput of a host with this service time in nanoseconds.
    #[must_use]
    pub fn of_service_time(nanoseconds: u64) -> Self {
        Self(1_000_000_000_000_000 / nanoseconds.max(1))
    }

    /// Microbatches per second.
    #[must_use]
    pub fn per_second(self) -> f64 {
        self.0 as f64 / 1e6
    }
}

/// Throughput of each stage of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageThroughputs {
    /// The number of hosts of each stage and their total throughput.
    stages: Vec<(usize, Throughput)>,
}

impl StageThroughputs {
    /// Sums up a run with `stages` stages and these hosts.
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

    /// Adds a host of these stages.
    pub fn add(&mut self, span: StageSpan, added: Throughput) {
        for (hosts, throughput) in self.hosted_by(span) {
            *hosts += 1;
            throughput.0 = throughput.0.saturating_add(added.0);
        }
    }

    /// Removes a host of these stages.
    pub fn remove(&mut self, span: StageSpan, removed: Throughput) {
        for (hosts, throughput) in self.hosted_by(span) {
            *hosts = hosts.saturating_sub(1);
            throughput.0 = if *hosts == 0 { 0 } else { throughput.0.saturating_sub(removed.0) };
        }
    }

    fn hosted_by(&mut self, span: StageSpan) -> impl Iterator<Item = &mut (usize, Throughput)> {
        let first = usize::from(span.first.0);
        self.stages
            .iter_mut()
            .skip(first)
            .take((usize::from(span.last.0) + 1).saturating_sub(first))
    }

    /// Number of hosts of a stage.
    #[must_use]
    pub fn hosts(&self, stage: Stage) -> usize {
        self.stages.get(usize::from(stage.0)).map_or(0, |(hosts, _)| *hosts)
    }

    /// Throughput of a stage.
    #[must_use]
    pub fn of_stage(&self, stage: Stage) -> Throughput {
        self.stages.get(usize::from(stage.0)).map_or_else(Default::default, |(_, through)| *through)
    }

    /// Throughput of the pipeline: that of its slowest stage.
    #[must_use]
    pub fn of_run(&self) -> Throughput {
        self.stages.iter().map(|(_, throughput)| *throughput).min().unwrap_or_default()
    }

    /// The stages at which one more host, which can host those that it `fits`, raises the
    /// throughput most. Stages without a host come first, in order; otherwise those with the least
    /// throughput, or about the least. Among several such stages the newcomer's id decides the
    /// order, so that simultaneous newcomers do not fill the stages in one order.
    #[must_use]
    pub fn neediest(&self, fits: &BTreeSet<Stage>, newcomer: PeerId) -> Vec<Stage> {
        let seed = u64::from_le_bytes(*newcomer.0.first_chunk().expect("a peer id has 32 bytes"));
        let known = fits.iter().filter(|stage| usize::from(stage.0) < self.stages.len());
        let mut known: Vec<Stage> = known.copied().collect();
        known.sort_by_cached_key(|stage| {
            let hosted = self.hosts(*stage) > 0;
            // Each stage without a host takes one newcomer, so their order need not vary.
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

    /// Each stage has one measured host with this service time in milliseconds.
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
    fn a_newcomer_joins_the_stage_with_the_least_throughput() {
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
        // 400 / 2 = 200 ties with the last stage.
        assert_eq!(order[0], 1);
        assert!(order[1..3] == [1, 2] || order[1..3] == [2, 1], "{order:?}");
        let only = BTreeSet::from([Stage(0)]);
        assert_eq!(throughput.neediest(&only, member(9).peer), [Stage(0)]);
        assert_eq!(throughput.neediest(&BTreeSet::new(), member(9).peer), []);
    }

    #[test]
    fn a_removed_host_takes_its_throughput_along() {
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
        /// Compared with the most even distribution, each stage has at most one host more than its
        /// share of the work requires.
        #[test]
        fn newcomers_spread_in_proportion_to_the_cost_of_stages(
            service_times in prop::collection::vec(10u64..1000, 1..12),
            newcomers in 0u16..200,
            salt: u16,
        ) {
            let stages = service_times.len() as u16;
            let known = measured(&service_times);
            let estimates = known.estimates(stages, Moment::default());
            let mut throughput = StageThroughputs::of(stages, first_hosts(stages), &estimates);
            for number in 0..newcomers {
                let newcomer = member(number ^ salt);
                let stage = throughput.neediest(&all(stages), newcomer.peer);
                let span = StageSpan::one(stage[0]);
                throughput.add(span, Throughput::of_service_time(estimates.service_time(newcomer, span.first)));
            }
            let hosts = f64::from(newcomers) + f64::from(stages);
            let work: u64 = service_times.iter().sum();
            for (stage, service_time) in service_times.iter().enumerate() {
                let even = hosts * *service_time as f64 / work as f64;
                let found = throughput.hosts(Stage(stage as u16));
                prop_assert!(found == 1 || found as f64 <= even + 1.001, "{found} of {even}");
            }
        }

        /// Without measurements, stages differ by at most one host, and every stage gets one first.
        #[test]
        fn unmeasured_newcomers_spread_evenly(stages in 1u16..20, newcomers in 0u16..100, salt: u16) {
            let service_times = ServiceTimes::default();
            let estimates = service_times.estimates(stages, Moment::default());
            let mut throughput = StageThroughputs::of(stages, [], &estimates);
            for number in 0..newcomers {
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
