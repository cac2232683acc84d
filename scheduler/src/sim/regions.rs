//! Swarms with peers in distant regions: the benefit of locality.

use std::time::Duration;

use shoal_protocol::message::StageChoice;
use shoal_protocol::units::{Bytes, Moment};

use super::{ComputeScenario, NetworkScenario, PeerScenario, Report, Scenario};
use crate::coordinator::placing::rebalance::Rebalance;
use crate::planner::cases::Case;
use crate::rng::Rng;
use crate::router::Routing;

/// A swarm in the regions of a case, whose peers arrive one by one in random order.
#[derive(Debug, Clone, Copy)]
pub struct Regional<'a> {
    /// Regions and the links between them.
    pub case: &'a Case,
    /// Peers in each region.
    pub peers: usize,
    /// Pipeline stages.
    pub stages: u16,
    /// Microbatches per step, and steps.
    pub steps: (u32, u64),
    /// Sizes of an activation, and of a stage's gradient.
    pub weighs: (Bytes, Bytes),
    /// Duration of a forward pass; a backward pass takes twice as long.
    pub forward: Duration,
}

/// Time between two newcomers: by then the earlier one has its stage.
const APART: Duration = Duration::from_secs(2);

/// Steps before the measured ones: the first ones measure links.
const FIRST: usize = 30;

impl Regional<'_> {
    /// The swarm with the order of this seed, with locality (`near`) or without.
    ///
    /// # Panics
    /// If there are no peers.
    #[must_use]
    pub fn scenario(&self, seed: u64, near: bool) -> Scenario {
        let passes = ComputeScenario::passes(self.forward, self.forward * 2, 20);
        let mut homes: Vec<usize> =
            (0..self.case.regions.len()).flat_map(|home| vec![home; self.peers]).collect();
        let mut rng = Rng::new(seed);
        for place in (1..homes.len()).rev() {
            homes.swap(place, rng.within(0..=place as u64) as usize);
        }
        let peer = |(order, region): (u32, usize)| PeerScenario {
            region,
            start: Some(APART * order),
            ..PeerScenario::plain(StageChoice::Auto, self.stages, passes.clone())
        };
        let peers = (0..).zip(homes).map(peer).collect();
        let (microbatches, steps) = self.steps;
        let mut manifest = Scenario::small_manifest(self.stages, microbatches, steps);
        let numbers = self.weighs.0.0 / (4 * u64::from(manifest.model.context));
        manifest.model.hidden = u32::try_from(numbers).unwrap_or(u32::MAX);
        let mut scenario = Scenario::plain(manifest, peers, self.network());
        scenario.seed = seed;
        scenario.rebalance = Rebalance::every_so_often(Duration::from_secs(60));
        scenario.routing = if near { Routing::BySpeed } else { Routing::BySpeedAlone };
        scenario.weigh_stages(self.weighs.1.0 / 4);
        scenario
    }

    fn network(&self) -> NetworkScenario {
        let regions = || self.case.regions.iter();
        let link = |from, to| self.case.link(from, to);
        NetworkScenario {
            latency: regions()
                .map(|from| regions().map(|to| link(from, to).delay).collect())
                .collect(),
            bandwidths: regions()
                .map(|from| regions().map(|to| link(from, to).rate.0).collect())
                .collect(),
            measured: true,
            ..NetworkScenario::even(Duration::ZERO, Duration::from_micros(200), None)
        }
    }
}

impl Report {
    /// Mean time of a step, without the first few.
    #[must_use]
    pub fn step_time(&self) -> Duration {
        let ends: Vec<Moment> = self.steps.values().map(|step| step.last).collect();
        let counted = ends.len().saturating_sub(FIRST + 1);
        let (Some(first), Some(last)) = (ends.get(FIRST), ends.last()) else {
            return Duration::ZERO;
        };
        last.since(*first) / u32::try_from(counted.max(1)).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::cases::CASES;
    use crate::sim::{Mark, run};

    const SEEDS: u64 = 4;

    /// Factor by which a step may be longer by chance: without locality, peers may happen to get
    /// good stages.
    const CHANCE: f64 = 1.04;

    /// Four regions of one country.
    const COUNTRY: Regional<'_> = Regional {
        case: &CASES[1],
        peers: 4,
        stages: 4,
        steps: (32, 60),
        weighs: (Bytes(1 << 20), Bytes(400_000_000)),
        forward: Duration::from_millis(100),
    };

    /// Mean step times without and with locality over some seeds. With locality, no step is longer
    /// than chance allows. The model is the same.
    fn times(regional: Regional<'_>) -> (f64, f64) {
        let (mut without, mut with) = (0.0, 0.0);
        for seed in 0..SEEDS {
            let [alone, near] = [false, true].map(|near| {
                let report = run(&regional.scenario(seed, near)).expect("no oracle objects");
                assert!(report.finished, "seed {seed}");
                (report.step_time().as_secs_f64(), report.checkpoint)
            });
            assert!(
                near.0 <= alone.0 * CHANCE,
                "seed {seed}: {} with, {} without",
                near.0,
                alone.0
            );
            assert_eq!(near.1, alone.1, "seed {seed}");
            without += alone.0;
            with += near.0;
        }
        (without, with)
    }

    #[test]
    fn locality_shortens_steps_over_long_links() {
        let (without, with) = times(COUNTRY);
        assert!(with < 0.85 * without, "{with} of {without}");
    }

    #[test]
    fn locality_shortens_steps_with_large_activations() {
        let weighs = (Bytes(8 << 20), Bytes(4_000_000));
        let (without, with) = times(Regional { weighs, ..COUNTRY });
        assert!(with < without, "{with} of {without}");
    }

    #[test]
    fn locality_shortens_steps_with_little_data() {
        let weighs = (Bytes(1 << 10), Bytes(4_096));
        let (without, with) = times(Regional { weighs, steps: (64, 40), ..COUNTRY });
        assert!(with < without, "{with} of {without}");
    }

    /// Six replicas of one stage, at two places 40 ms apart, whose operators name no islands.
    fn places(measured: bool) -> Scenario {
        let passes =
            ComputeScenario::passes(Duration::from_millis(20), Duration::from_millis(40), 20);
        let peer = |region| PeerScenario {
            region,
            ..PeerScenario::plain(StageChoice::All, 1, passes.clone())
        };
        let peers = [0, 1, 0, 0, 1, 0].map(peer).to_vec();
        let [near, far] = [1, 40].map(Duration::from_millis);
        let network = NetworkScenario {
            latency: vec![vec![near, far], vec![far, near]],
            bandwidths: vec![vec![100_000_000, 2_500_000], vec![2_500_000, 100_000_000]],
            measured,
            ..NetworkScenario::even(Duration::ZERO, Duration::from_micros(200), None)
        };
        let mut scenario = Scenario::plain(Scenario::small_manifest(1, 12, 20), peers, network);
        scenario.weigh_stages(2_000_000);
        scenario
    }

    #[test]
    fn replicas_at_two_places_become_islands_by_their_measured_links() {
        let [alone, measured] = [false, true].map(|measured| {
            let report = run(&places(measured)).expect("no oracle objects");
            assert!(report.finished);
            report
        });
        assert_eq!(alone.marks[Mark::Collected], 0);
        assert!(measured.marks[Mark::Collected] > 0);
        assert_eq!(measured.checkpoint, alone.checkpoint);
    }
}
