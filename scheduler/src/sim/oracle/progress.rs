//! A run without faults ends within a bound, and reports no fault.

use std::time::Duration;

use shoal_protocol::units::Moment;

use crate::sim::peer_scenario::PeerScenario;
use crate::sim::scenario::Scenario;
use crate::sim::tiers::TierScenario;

/// The maximum time without progress.
#[derive(Debug)]
pub(in crate::sim) struct Progress {
    bound: Duration,
    last: Moment,
}

impl Progress {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let manifest = &scenario.manifest;
        let microbatches = manifest.training.microbatches + manifest.evaluation.microbatches;
        let passes = microbatches * u32::from(manifest.training.stages) + 1;
        let peers = || scenario.peers.iter();
        // The slowest peer does all the work and loads all that it holds for it, and each pass waits for a retry that is answered over
        // the slowest link.
        let swapped = |tiers: &TierScenario| tiers.rate.time(tiers.memory) * 4;
        let both = |peer: &PeerScenario| {
            let loads = peer.tiers.as_ref().map(swapped).unwrap_or_default();
            peer.compute.forward + peer.compute.backward + loads
        };
        let slowest = peers().map(both).max();
        let retry = peers().map(|peer| peer.limits.retry).max();
        let farthest = scenario.network.latency.iter().flatten().max();
        let (Some(slowest), Some(retry), Some(farthest)) = (slowest, retry, farthest) else {
            unreachable!("a swarm has peers")
        };
        let trip = retry + (*farthest + scenario.network.jitter) * 10;
        let bound = (slowest * 2 + trip) * passes + Duration::from_secs(60);
        Self { bound, last: Moment::default() }
    }

    /// Notes progress: a step was opened, committed or saved, a peer was admitted, or a file
    /// arrived.
    pub(in crate::sim) fn advanced(&mut self, now: Moment) {
        self.last = now;
    }

    pub(in crate::sim) fn check(&self, now: Moment) -> Result<(), String> {
        if now.since(self.last) <= self.bound {
            Ok(())
        } else {
            Err(format!("no progress in the last {:?}", self.bound))
        }
    }
}
