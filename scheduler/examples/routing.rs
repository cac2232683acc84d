//! The share of the combined speed that a stage of unequal replicas achieves, by routing policy:
//! prints the tables of docs/benchmarks/swarms.md.
//!
//! Argument: the seeds of each row (10).

use std::time::Duration;

use shoal_protocol::ids::{Stage, StageSpan};
use shoal_protocol::message::StageChoice;
use shoal_protocol::units::Moment;
use shoal_scheduler::router::Routing;
use shoal_scheduler::sim::{
    self, ComputeScenario, Fault, NetworkScenario, PeerScenario, Scenario, Seen, Watch,
};

/// Duration of the passes of each replica of a stage, relative to the fastest.
const SLOWER: [u32; 3] = [1, 2, 4];

const STAGES: u16 = 3;
const STEPS: u64 = 6;

/// Passes of the fastest replica.
const FORWARD: Duration = Duration::from_millis(100);
const BACKWARD: Duration = Duration::from_millis(200);

/// Latency between any two peers.
const LATENCY: Duration = Duration::from_millis(10);

/// One-way messages between a step's last gradient and the next step's first pass: done, close, a
/// piece, its sum, reduced, committed.
const HOPS: u32 = 6;

/// The straggler is the fastest replica of the middle stage: from a moment on it takes ten times as
/// long.
const STRAGGLER: usize = 1;
const TENFOLD: u32 = 10;

/// The effect of the straggler is over when this many microbatches in a row are counted at `SHARE`
/// of the fluid rate or faster.
const IN_A_ROW: usize = 20;
const SHARE: f64 = 0.95;

/// The step in which it slows down.
const SLOWS_IN: u32 = 3;

/// Maximum random extension of a pass, in thousandths.
const JITTER_PER_MILLE: u64 = 50;

const ROUTINGS: [(&str, Routing); 3] = [
    ("by speed", Routing::BySpeed),
    ("in turn", Routing::InTurn),
    ("at random", Routing::AtRandom),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let seeds = std::env::args().nth(1).map_or(Ok(10), |text| text.parse())?;
    println!(
        "{STAGES} stages of three replicas each, speeds 1 : 2 : 4, latency a tenth of the fastest forward pass; \
         means of {seeds} seeds.\n\
         Share: of the throughput with infinitely divisible work, from the second commit to the last. Best: the\n\
         share if only the beginning and end of a step are lost. Then the fastest replica of the middle stage\n\
         becomes ten times slower after a quarter of a step. Gone: microbatches counted at its stage until\n\
         {IN_A_ROW} in a row arrive at {SHARE} of the new rate, the worst of the seeds. Share after: of the new\n\
         rate, over the whole steps that follow.\n"
    );
    println!("microbatches  chosen       share  best   gone  share after  best");
    for microbatches in [64, 128, 256, 512] {
        for (name, routing) in ROUTINGS {
            let all = (0..seeds).map(|seed| measure(microbatches, routing, seed));
            let all = all.collect::<Result<Vec<Row>, _>>()?;
            let mean = |of: fn(&Row) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
            let gone = all.iter().map(|row| row.gone).max_by_key(|gone| gone.unwrap_or(usize::MAX));
            println!(
                "{microbatches:12}  {name:11}  {:.3}  {:.3}  {:>4}  {:11.3}  {:.3}",
                mean(|row| row.share),
                best(microbatches, fluid(false)),
                gone.flatten().map_or("-".to_owned(), |count| count.to_string()),
                mean(|row| row.after),
                best(microbatches, fluid(true)),
            );
        }
    }
    Ok(())
}

/// The result of one seed.
struct Row {
    share: f64,
    gone: Option<usize>,
    after: f64,
}

fn measure(microbatches: u32, routing: Routing, seed: u64) -> Result<Row, sim::Violation> {
    let mut scenario = scenario(microbatches, routing);
    scenario.seed = seed;
    let even = counts(&scenario)?;
    let since = even[(SLOWS_IN * microbatches + microbatches / 4) as usize];
    let forever = Duration::from_secs(1 << 20);
    let slow = Fault::SlowPeer { peer: STRAGGLER, factor: TENFOLD, time: forever };
    scenario.faults.happen = vec![(since.0, slow)];
    let uneven = counts(&scenario)?;
    Ok(Row {
        share: share(&even, 2 * microbatches, fluid(false)),
        gone: gone(&uneven, since),
        after: share(&uneven, (SLOWS_IN + 1) * microbatches, fluid(true)),
    })
}

fn scenario(microbatches: u32, routing: Routing) -> Scenario {
    let manifest = Scenario::small_manifest(STAGES, microbatches, STEPS);
    let replicas = SLOWER.into_iter().flat_map(|slower| (0..STAGES).map(move |s| (slower, s)));
    let peers = replicas.map(|(slower, stage)| {
        let compute =
            ComputeScenario::passes(FORWARD * slower, BACKWARD * slower, JITTER_PER_MILLE);
        PeerScenario::plain(StageChoice::Span(StageSpan::one(Stage(stage))), STAGES, compute)
    });
    let network = NetworkScenario::even(LATENCY, Duration::ZERO, None);
    let mut scenario = Scenario::plain(manifest, peers.collect(), network);
    scenario.log_delay = Duration::ZERO;
    scenario.routing = routing;
    scenario
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

/// The mean random extension of passes.
fn longer() -> f64 {
    1.0 + JITTER_PER_MILLE as f64 / 2000.0
}

/// Microbatches per second of the slowest stage with infinitely divisible work.
fn fluid(straggles: bool) -> f64 {
    let pass = (FORWARD + BACKWARD).as_secs_f64() * longer();
    let speeds = SLOWER.iter().enumerate().map(|(index, slower)| {
        let tenfold = if straggles && index == 0 { TENFOLD } else { 1 };
        1.0 / f64::from(slower * tenfold)
    });
    speeds.sum::<f64>() / pass
}

/// The share that remains if the last stage waits for a step's first activation, and all stages
/// wait for its last gradient to return through the earlier stages and to be summed, all on the
/// fastest replicas.
fn best(microbatches: u32, rate: f64) -> f64 {
    let passes = (FORWARD + BACKWARD).as_secs_f64() * longer() * f64::from(STAGES - 1);
    let latencies = LATENCY * (2 * u32::from(STAGES - 1) + HOPS);
    let work = f64::from(microbatches) / rate;
    work / (work + passes + latencies.as_secs_f64())
}

/// The fraction of a rate that is reached after this many microbatches.
fn share(counts: &[Moment], after: u32, rate: f64) -> f64 {
    let after = after as usize;
    let time = counts[counts.len() - 1].since(counts[after - 1]);
    (counts.len() - after) as f64 / time.as_secs_f64() / rate
}

/// Number of microbatches until `IN_A_ROW` in a row arrive at the expected rate.
fn gone(counts: &[Moment], since: Moment) -> Option<usize> {
    let first = counts.partition_point(|at| *at <= since);
    let mut ends = vec![since];
    ends.extend(&counts[first..]);
    let enough = |row: &[Moment]| {
        IN_A_ROW as f64 / row[IN_A_ROW].since(row[0]).as_secs_f64() >= SHARE * fluid(true)
    };
    ends.windows(IN_A_ROW + 1).position(enough)
}
