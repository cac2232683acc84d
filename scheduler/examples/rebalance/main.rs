//! The share of the optimal throughput that a spot fleet achieves, with and without stage changes,
//! and the causes of the loss: prints the tables of docs/benchmarks/swarms.md.
//!
//! Arguments: the seeds of each row (10), the hours of each trace from the first possible pipeline
//! (6), the microbatches of a step (128), and a part of the name of the fleets to show (all).

mod fleet;

use std::time::Duration;

use shoal_protocol::message::StageChoice;
use shoal_protocol::units::{Bytes, Moment};
use shoal_scheduler::coordinator::placing::rebalance::Rebalance;
use shoal_scheduler::sim::{
    self, ComputeScenario, Fault, Mark, NetworkScenario, PeerScenario, Scenario, SpotTrace,
    SpotUnit,
};

use self::fleet::{Account, Fleet};

const STAGES: u16 = 4;
const MICROBATCHES: u32 = 128;

/// Updates that a step's weights lack.
const STALENESS: u8 = 1;

/// Steps between checkpoints.
const CHECKPOINT: u64 = 2;

const FORWARD: Duration = Duration::from_secs(1);
const BACKWARD: Duration = Duration::from_secs(2);

/// Maximum random extension of a pass, in thousandths.
const JITTER_PER_MILLE: u64 = 20;

/// One stage's weights and moments, and the rate of a peer's link in bytes per second: 8 s.
const STATE: Bytes = Bytes(1_000_000_000);
const LINK: u64 = 125_000_000;

const HOUR: Duration = Duration::from_secs(3600);

/// Real fleets and one without changes, with the unit of their times (`tests/data/README.md` names
/// the sources).
const TRACES: [(&str, &str, SpotUnit); 4] = [
    ("no changes", "0,16\n10800,16", SpotUnit::Seconds),
    (
        "g4dn us-east-1c",
        include_str!("../../../tests/data/spot-traces/aws-g4dn-us-east-1c.csv"),
        SpotUnit::Seconds,
    ),
    ("p2", include_str!("../../../tests/data/spot-traces/aws-p2.csv"), SpotUnit::Hours),
    (
        "g4dn events",
        include_str!("../../../tests/data/spot-traces/g4dn-events.csv"),
        SpotUnit::Seconds,
    ),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut next = |default: u32| arguments.next().map_or(Ok(default), |text| text.parse());
    let (seeds, hours, microbatches) = (next(10)?, next(6)?, next(MICROBATCHES)?);
    let wanted = arguments.next().unwrap_or_default();
    println!(
        "{STAGES} stages, equal peers, passes of 1 s and 2 s, {microbatches} microbatches a step, {STATE} a \
         stage over links of 1 Gbit/s; at most {hours} h of each trace, means of {seeds} seeds.\n\
         In % of the throughput of the best placement of the live peers, with free moves. Placed: throughput of\n\
         the actual placement, in all, in the first hour and in the last. Committed: committed work, likewise.\n\
         Then the losses: to placement, to fetches of newcomers, to repeated or undone work, to waits in steps\n\
         with deaths, and to waits in other steps.\n"
    );
    println!(
        "fleet                T   placed  first   last  committed  first   last    place  fetch  again  deaths  waits  moves  died  undone"
    );
    for (name, text, unit) in TRACES.into_iter().filter(|(name, ..)| name.contains(&wanted)) {
        let trace = SpotTrace::parse(text, unit)?;
        let time = HOUR * hours;
        let all = |every| -> Result<Outcome, sim::Violation> {
            let mut sum = Outcome::default();
            for seed in 0..seeds {
                sum.add(&measure(&trace, (every, time), microbatches, u64::from(seed))?);
            }
            Ok(sum)
        };
        let settings = [None, Some(300), Some(60)].map(|every| every.map(Duration::from_secs));
        let outcomes = std::thread::scope(|scope| {
            let threads = settings.map(|every| scope.spawn(move || all(every)));
            threads.map(|thread| thread.join().expect("nothing panics there"))
        });
        for (every, outcome) in settings.into_iter().zip(outcomes) {
            outcome?.print(name, every, u64::from(seeds));
        }
    }
    Ok(())
}

/// The result of one run, or of several together.
#[derive(Debug, Default)]
struct Outcome {
    whole: Account,
    first: Account,
    last: Account,
    moves: u64,
    deaths: u64,
    rewinds: u64,
}

impl Outcome {
    fn add(&mut self, other: &Self) {
        self.whole += &other.whole;
        self.first += &other.first;
        self.last += &other.last;
        self.moves += other.moves;
        self.deaths += other.deaths;
        self.rewinds += other.rewinds;
    }

    fn print(&self, name: &str, every: Option<Duration>, seeds: u64) {
        let part = |of: &Account, what: f64| 100.0 * what / of.optimum.max(f64::MIN_POSITIVE);
        let Self { whole, first, last, .. } = self;
        let placed = [whole, first, last].map(|of| part(of, of.placed));
        let committed = [whole, first, last].map(|of| part(of, of.committed));
        let lost = [
            whole.optimum - whole.placed,
            whole.placed - whole.serving,
            whole.counted - whole.committed,
            whole.troubled,
            whole.quiet,
        ];
        let lost = lost.map(|what| part(whole, what));
        println!(
            "{name:16} {:>6}  {:6.1} {:6.1} {:6.1}  {:9.1} {:6.1} {:6.1}   {:6.1} {:6.1} {:6.1}  {:6.1} {:6.1}  {:5}  {:4}  {:6}",
            every.map_or_else(|| "never".to_owned(), |time| format!("{} s", time.as_secs())),
            placed[0],
            placed[1],
            placed[2],
            committed[0],
            committed[1],
            committed[2],
            lost[0],
            lost[1],
            lost[2],
            lost[3],
            lost[4],
            self.moves / seeds,
            self.deaths / seeds,
            self.rewinds / seeds,
        );
    }
}

fn measure(
    trace: &SpotTrace,
    (every, time): (Option<Duration>, Duration),
    microbatches: u32,
    seed: u64,
) -> Result<Outcome, sim::Violation> {
    let scenario = scenario(trace, (every, time), microbatches, seed);
    let longer = 1.0 + JITTER_PER_MILLE as f64 / 2000.0;
    let pass = (FORWARD + BACKWARD).mul_f64(longer);
    let mut fleet = Fleet::new(STAGES, microbatches, STALENESS, pass);
    let report = sim::run_watched(&scenario, &mut fleet)?;
    let end = scenario.until.expect("it was set");
    fleet.advance(Moment(end));
    let last = (end.as_secs().saturating_sub(1) / HOUR.as_secs()) as usize;
    let hour = |at: usize| fleet.hours.get(at).copied().unwrap_or_default();
    Ok(Outcome {
        whole: fleet.whole(),
        first: hour(0),
        last: hour(last),
        moves: report.marks[Mark::Moved],
        deaths: fleet.deaths,
        rewinds: report.marks[Mark::Rewound],
    })
}

/// The swarm of a trace, from the time when its first instances form a pipeline.
fn scenario(
    trace: &SpotTrace,
    (every, time): (Option<Duration>, Duration),
    microbatches: u32,
    seed: u64,
) -> Scenario {
    let mut manifest = Scenario::small_manifest(STAGES, microbatches, 1_000_000);
    manifest.checkpoint.every = CHECKPOINT;
    manifest.training.staleness = STALENESS;
    let (most, mut happen) = trace.fates(1, 1.0, seed);
    let (latency, jitter) = (Duration::from_millis(1), Duration::from_micros(100));
    let network = NetworkScenario::even(latency, jitter, Some(LINK));
    let mut scenario = Scenario::plain(manifest, (0..=most).map(peer).collect(), network);
    scenario.seed = seed;
    scenario.snapshot.size = STATE;
    scenario.snapshot.write = Duration::from_secs(1);
    scenario.rebalance = Rebalance::every_so_often(every.unwrap_or_default());
    let enough = happen.iter().scan(0u64, |alive, (at, fate)| {
        match fate {
            Fault::Join { .. } => *alive += 1,
            _ => *alive = alive.saturating_sub(1),
        }
        Some((*at, *alive))
    });
    let skipped = { enough }.find(|(_, alive)| *alive >= u64::from(STAGES));
    let skipped = skipped.map_or(Duration::ZERO, |(at, _)| at);
    happen.iter_mut().for_each(|(at, _)| *at = at.saturating_sub(skipped));
    let end = time.min(trace.end() - skipped);
    happen.retain(|(at, _)| *at <= end);
    scenario.until = Some(end);
    scenario.faults.happen = happen;
    scenario
}

fn peer(index: usize) -> PeerScenario {
    let choice = if index == 0 { StageChoice::None } else { StageChoice::Auto };
    let compute = ComputeScenario::passes(FORWARD, BACKWARD, JITTER_PER_MILLE);
    PeerScenario {
        start: (index == 0).then_some(Duration::ZERO),
        archive: index == 0,
        ..PeerScenario::plain(choice, STAGES, compute)
    }
}
