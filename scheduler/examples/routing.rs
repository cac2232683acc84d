//! What a stage of unlike replicas keeps of their speeds together, by how senders choose between
//! them: prints the tables of docs/routing.md.

use std::time::Duration;

use shoal_protocol::ids::Stage;
use shoal_protocol::message::StageChoice;
use shoal_protocol::units::Moment;
use shoal_scheduler::peer::PeerLimits;
use shoal_scheduler::router::Routing;
use shoal_scheduler::sim::{
    self, Clock, ComputeScenario, Fault, Faults, NetworkScenario, PeerScenario, Scenario, Seen,
    Watch,
};

/// How many times as long the passes of each replica of a stage take as those of the fastest.
const SLOWER: [u32; 3] = [1, 2, 4];

const STAGES: u16 = 3;
const STEPS: u64 = 6;

/// The passes of the fastest replica.
const FORWARD: Duration = Duration::from_millis(100);
const BACKWARD: Duration = Duration::from_millis(200);

/// The straggler is the fastest replica of the middle stage: from a moment on it takes ten times as
/// long.
const STRAGGLER: usize = 1;
const TENFOLD: u32 = 10;

/// Counted in a row at `SHARE` of the fluid rate or faster, so many microbatches show that what the
/// straggler did is over.
const IN_A_ROW: usize = 20;
const SHARE: f64 = 0.95;

/// The step that it happens in.
const SLOWS_IN: u32 = 3;

/// Passes take up to so many thousandths longer.
const JITTER_PER_MILLE: u64 = 50;

const ROUTINGS: [(&str, Routing); 3] = [
    ("by speed", Routing::BySpeed),
    ("in turn", Routing::InTurn),
    ("at random", Routing::AtRandom),
];

fn main() -> Result<(), sim::Violation> {
    println!(
        "{STAGES} stages of three replicas each, speeds 1 : 2 : 4, links of a tenth of the fastest forward pass."
    );
    println!(
        "Share: of what the stages get through if work is divisible without end, from the second"
    );
    println!(
        "commit to the last. Then the fastest replica of the middle stage takes ten times as long from a"
    );
    println!(
        "quarter of a step on. Gone: microbatches counted at its stage until {IN_A_ROW} in a row come at"
    );
    println!(
        "{SHARE} of the new rate. Share after: of the new rate, over the whole steps that follow.\n"
    );
    println!("microbatches  chosen       share  gone  share after");
    for microbatches in [64, 128, 256, 512] {
        for (name, routing) in ROUTINGS {
            let mut scenario = scenario(microbatches, routing);
            let even = counts(&scenario)?;
            let since = even[(SLOWS_IN * microbatches + microbatches / 4) as usize];
            let forever = Duration::from_secs(1 << 20);
            let slow = Fault::SlowPeer { peer: STRAGGLER, factor: TENFOLD, time: forever };
            scenario.faults.happen = vec![(since.0, slow)];
            let uneven = counts(&scenario)?;
            println!(
                "{microbatches:12}  {name:11}  {:.3}  {:>4}  {:.3}",
                share(&even, 2 * microbatches, fluid(false)),
                gone(&uneven, since).map_or("-".to_owned(), |count| count.to_string()),
                share(&uneven, (SLOWS_IN + 1) * microbatches, fluid(true)),
            );
        }
    }
    Ok(())
}

fn scenario(microbatches: u32, routing: Routing) -> Scenario {
    let mut scenario = Scenario::from_seed(0);
    scenario.manifest = Scenario::small_manifest(STAGES, microbatches, STEPS).into();
    scenario.parameters = (0..STAGES).map(|stage| (Stage(stage), 16)).collect();
    scenario.network = NetworkScenario {
        latency: vec![vec![FORWARD / 10]],
        jitter: Duration::ZERO,
        bandwidth: None,
        bandwidths: Vec::new(),
        duplicates_per_mille: 0,
        strays_per_mille: 0,
    };
    scenario.log_delay = Duration::ZERO;
    scenario.routing = routing;
    scenario.faults = Faults::default();
    let replicas = SLOWER.into_iter().flat_map(|slower| (0..STAGES).map(move |s| (slower, s)));
    scenario.peers = replicas.map(|(slower, stage)| peer(slower, Stage(stage))).collect();
    scenario
}

fn peer(slower: u32, stage: Stage) -> PeerScenario {
    PeerScenario {
        choice: StageChoice::One(stage),
        fits: [stage].into(),
        limits: PeerLimits::default(),
        start: Some(Duration::ZERO),
        compute: ComputeScenario {
            forward: FORWARD * slower,
            backward: BACKWARD * slower,
            other: Duration::ZERO,
            jitter_per_mille: JITTER_PER_MILLE,
        },
        archive: false,
        region: 0,
        clock: Clock::default(),
    }
}

/// When microbatches were counted at the middle stage.
#[derive(Debug, Default)]
struct Counts(Vec<Moment>);

impl Watch for Counts {
    fn sees(&mut self, now: Moment, seen: Seen<'_>) {
        if let Seen::Counted { key, .. } = seen
            && key.stage == Stage(STAGES / 2)
        {
            self.0.push(now);
        }
    }
}

fn counts(scenario: &Scenario) -> Result<Vec<Moment>, sim::Violation> {
    let mut counts = Counts::default();
    sim::run_watched(scenario, &mut counts)?;
    Ok(counts.0)
}

/// Microbatches a second that the slowest stage gets through if work is divisible without end.
fn fluid(straggles: bool) -> f64 {
    let longer = 1.0 + JITTER_PER_MILLE as f64 / 2000.0;
    let pass = (FORWARD + BACKWARD).as_secs_f64() * longer;
    let speeds = SLOWER.iter().enumerate().map(|(index, slower)| {
        let tenfold = if straggles && index == 0 { TENFOLD } else { 1 };
        1.0 / f64::from(slower * tenfold)
    });
    speeds.sum::<f64>() / pass
}

/// The part of a rate that is reached after so many microbatches.
fn share(counts: &[Moment], after: u32, rate: f64) -> f64 {
    let after = after as usize;
    let time = counts[counts.len() - 1].since(counts[after - 1]);
    (counts.len() - after) as f64 / time.as_secs_f64() / rate
}

/// After how many microbatches so many in a row come as fast as they should.
fn gone(counts: &[Moment], since: Moment) -> Option<usize> {
    let first = counts.partition_point(|at| *at <= since);
    let mut ends = vec![since];
    ends.extend(&counts[first..]);
    let enough = |row: &[Moment]| {
        IN_A_ROW as f64 / row[IN_A_ROW].since(row[0]).as_secs_f64() >= SHARE * fluid(true)
    };
    ends.windows(IN_A_ROW + 1).position(enough)
}
