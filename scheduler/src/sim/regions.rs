//! Swarms whose peers are in regions far from each other: what it is worth that they know who is near.

use std::time::Duration;

use shoal_protocol::message::StageChoice;
use shoal_protocol::units::{Bytes, Moment};

use super::{ComputeScenario, NetworkScenario, PeerScenario, Report, Scenario};
use crate::planner::cases::Case;
use crate::rebalance::Rebalance;
use crate::rng::Rng;
use crate::router::Routing;

/// A swarm in the regions of a case, whose peers come one after the other in any order.
#[derive(Debug, Clone, Copy)]
pub struct Regional<'a> {
    /// Regions and the links between them.
    pub case: &'a Case,
    /// Peers in each region.
    pub peers: usize,
    /// Pipeline stages.
    pub stages: u16,
    /// Microbatches a step, and steps.
    pub steps: (u32, u64),
    /// An activation, and a stage's gradient.
    pub weighs: (Bytes, Bytes),
    /// A forward pass; a backward pass takes twice as long.
    pub forward: Duration,
}

/// From one newcomer to the next: the one before has its stage by then.
const APART: Duration = Duration::from_secs(2);

/// Steps before those that count: the first measures links.
const FIRST: usize = 30;

impl Regional<'_> {
    /// The swarm with the order of this seed. Peers know who is near, or do not.
    ///
    /// # Panics
    /// When there is nobody.
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
    /// How long a step takes, of those after the first few.
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
    use crate::sim::run;

    const SEEDS: u64 = 8;

    /// So many times as long a step may be by chance: peers that know nothing may be lucky in where they
    /// come to be.
    const LUCK: f64 = 1.04;

    /// Four regions of one country.
    const COUNTRY: Regional<'_> = Regional {
        case: &CASES[1],
        peers: 4,
        stages: 4,
        steps: (32, 60),
        weighs: (Bytes(1 << 20), Bytes(400_000_000)),
        forward: Duration::from_millis(100),
    };

    /// Step times without and with nearness, of some seeds; never is a step longer with it than by
    /// chance. The model is the same.
    fn times(regional: Regional<'_>) -> (f64, f64) {
        let (mut without, mut with) = (0.0, 0.0);
        for seed in 0..SEEDS {
            let [alone, near] = [false, true].map(|near| {
                let report = run(&regional.scenario(seed, near)).expect("every oracle holds");
                assert!(report.finished, "seed {seed}");
                (report.step_time().as_secs_f64(), report.checkpoint)
            });
            assert!(near.0 <= alone.0 * LUCK, "seed {seed}: {} with, {} without", near.0, alone.0);
            assert_eq!(near.1, alone.1, "seed {seed}");
            without += alone.0;
            with += near.0;
        }
        (without, with)
    }

    #[test]
    fn steps_over_long_links_are_shorter_where_peers_know_who_is_near() {
        let (without, with) = times(COUNTRY);
        assert!(with < 0.85 * without, "{with} of {without}");
    }

    #[test]
    fn steps_are_no_longer_where_activations_weigh_most() {
        let weighs = (Bytes(8 << 20), Bytes(4_000_000));
        let (without, with) = times(Regional { weighs, ..COUNTRY });
        assert!(with < without, "{with} of {without}");
    }

    #[test]
    fn steps_are_no_longer_where_nothing_weighs_much() {
        let weighs = (Bytes(1 << 10), Bytes(4_096));
        let (without, with) = times(Regional { weighs, steps: (64, 40), ..COUNTRY });
        assert!(with < without, "{with} of {without}");
    }
}
