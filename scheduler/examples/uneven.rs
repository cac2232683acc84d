//! The peers of `make bench-uneven` in the simulator: predicts the throughput of real ones.
//!
//! Arguments: microbatches per step, steps, the number of last steps that count, the staleness, and
//! for each peer its stage and the microseconds of its forward and backward pass, as in
//! `0:25000:26000`. Prints microbatches per second.

use std::time::Duration;

use shoal_protocol::ids::{Stage, StageSpan};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::StageChoice;
use shoal_protocol::units::Moment;
use shoal_scheduler::action::CoordinatorEvent;
use shoal_scheduler::sim::{
    self, ComputeScenario, NetworkScenario, PeerScenario, Scenario, Seen, Watch,
};

/// Latency between any two peers on one machine.
const LATENCY: Duration = Duration::from_micros(200);

/// Number of seeds in the mean.
const SEEDS: u64 = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [microbatches, steps, counted, staleness, peers @ ..] = arguments.as_slice() else {
        return Err("MICROBATCHES STEPS COUNTED STALENESS and the peers".into());
    };
    let peers = peers.iter().map(|text| peer(text)).collect::<Option<Vec<_>>>();
    let peers = peers.ok_or("a peer is STAGE:FORWARD:BACKWARD, both in microseconds")?;
    let stages = peers.iter().map(|(stage, _)| stage.0 + 1).max().ok_or("no peers")?;
    let microbatches = microbatches.parse()?;
    let mut manifest = Scenario::small_manifest(stages, microbatches, steps.parse()?);
    manifest.training.staleness = staleness.parse()?;
    let counted: usize = counted.parse()?;
    let mut rates = 0.0;
    for seed in 0..SEEDS {
        let scenario = Scenario { seed, ..scenario(manifest.clone(), &peers) };
        let mut commits = Commits::default();
        sim::run_watched(&scenario, &mut commits)?;
        let Commits(moments) = commits;
        let before = moments.len().checked_sub(counted + 1).ok_or("more count than there are")?;
        let time = moments[moments.len() - 1].since(moments[before]);
        rates += counted as f64 * f64::from(microbatches) / time.as_secs_f64();
    }
    println!("{:.3}", rates / SEEDS as f64);
    Ok(())
}

fn scenario(manifest: Manifest, peers: &[(Stage, ComputeScenario)]) -> Scenario {
    let stages = manifest.training.stages;
    let plain = |(stage, compute): &(Stage, ComputeScenario)| {
        PeerScenario::plain(StageChoice::Span(StageSpan::one(*stage)), stages, compute.clone())
    };
    let network = NetworkScenario::even(LATENCY, LATENCY, None);
    Scenario::plain(manifest, peers.iter().map(plain).collect(), network)
}

/// When each step was committed.
#[derive(Debug, Default)]
struct Commits(Vec<Moment>);

impl Watch for Commits {
    fn sees(&mut self, now: Moment, seen: Seen<'_>) {
        if let Seen::Decided(CoordinatorEvent::Committed { .. }) = seen {
            self.0.push(now);
        }
    }
}

fn peer(text: &str) -> Option<(Stage, ComputeScenario)> {
    let (stage, passes) = text.split_once(':')?;
    let (forward, backward) = passes.split_once(':')?;
    let time = |text: &str| text.parse().map(Duration::from_micros).ok();
    // Passes that wait have nearly equal durations.
    Some((Stage(stage.parse().ok()?), ComputeScenario::passes(time(forward)?, time(backward)?, 10)))
}
