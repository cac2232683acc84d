//! Size and number of a swarm's messages as it grows: prints the table of docs/benchmarks/swarms.md. Arguments:
//! numbers of peers and, for a shorter run, `--until` with the second of simulated time at which it
//! ends.

mod memory;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use shoal_protocol::message::StageChoice;
use shoal_protocol::units::{Bytes, Moment};
use shoal_scheduler::coordinator::placing::rebalance::Rebalance;
use shoal_scheduler::sim::{
    self, ComputeScenario, Fault, NetworkScenario, PeerScenario, Scenario, Seen, Sort, Watch,
};

const STAGES: u16 = 8;

/// Microbatches per step for each replica of a stage.
const EACH: u32 = 8;

const FORWARD: Duration = Duration::from_secs(1);

/// Start of the measurement, if the run is long enough, and default end. All peers join before.
const FROM: Duration = Duration::from_secs(120);
const UNTIL: Duration = Duration::from_secs(420);

/// Interval between comparisons of the stages.
const REBALANCE: Duration = Duration::from_secs(60);

/// Time between two deaths in runs with deaths; each peer restarts after a while.
const DEATHS: Duration = Duration::from_secs(30);
const RESTART: Duration = Duration::from_secs(10);

/// The measured part of the simulated time.
#[derive(Debug, Clone, Copy)]
struct Span {
    from: Duration,
    until: Duration,
}

fn main() -> Result<(), sim::Violation> {
    let (sizes, until) = arguments();
    let span = Span { from: FROM.min(until / 2), until };
    println!(
        "{STAGES} stages, passes of 1 s and 2 s, {EACH} microbatches a replica and step; messages only."
    );
    println!(
        "Between {} s and {} s of simulated time; with deaths, one every {} s.\n",
        span.from.as_secs(),
        span.until.as_secs(),
        DEATHS.as_secs()
    );
    println!(
        " peers  deaths  bytes/peer/s: told  reported  between  largest peer  coordinator msg/s  kB/s out  decisions/s/core     MB  steps  events/s  wall s/h  world's MB             trace"
    );
    for peers in sizes {
        for deaths in [false, true] {
            measure(peers, deaths, span)?;
        }
    }
    Ok(())
}

/// Numbers of peers, and the end.
fn arguments() -> (Vec<usize>, Duration) {
    let (mut sizes, mut until) = (Vec::new(), UNTIL);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == "--until" {
            let seconds = arguments.next().expect("--until needs a number of seconds");
            until =
                Duration::from_secs(seconds.parse().expect("--until needs a number of seconds"));
        } else {
            sizes.push(argument.parse().expect("a number of peers"));
        }
    }
    (if sizes.is_empty() { vec![100, 1000, 10_000] } else { sizes }, until)
}

fn measure(peers: usize, deaths: bool, span: Span) -> Result<(), sim::Violation> {
    let mut traffic = Traffic { from: span.from, ..Traffic::default() };
    let began = Instant::now();
    let report = sim::run_watched(&scenario(peers, deaths, span.until), &mut traffic)?;
    let wall = began.elapsed().as_secs_f64();
    let time = (span.until - span.from).as_secs_f64();
    let each = |sort| traffic.bytes(sort) as f64 / peers as f64 / time;
    let largest = traffic.received.values().map(|bytes| bytes.0).max().unwrap_or(0) as f64 / time;
    let of_coordinator = traffic.count(Sort::Told) + traffic.count(Sort::Reported);
    println!(
        "{peers:6}  {:6}  {:18.0}  {:8.0}  {:7.0}  {largest:12.0}  {:17.0}  {:8.0}  {:16.0}  {:5.1}  {:5}  {:8.0}  {:8.0}  {:10.0}  {:016x}",
        if deaths { "yes" } else { "no" },
        each(Sort::Told),
        each(Sort::Reported),
        each(Sort::Said),
        of_coordinator as f64 / time,
        traffic.bytes(Sort::Told) as f64 / 1e3 / time,
        traffic.decisions as f64 / traffic.deciding.as_secs_f64(),
        (traffic.before - traffic.after) as f64 / 1e6,
        report.steps.len(),
        report.events as f64 / wall,
        wall * 3600.0 / span.until.as_secs_f64(),
        traffic.before as f64 / 1e6,
        report.trace,
    );
    Ok(())
}

/// Data sent over links during the measurement.
#[derive(Debug, Default)]
struct Traffic {
    /// The start of the measurement.
    from: Duration,
    sent: BTreeMap<Sort, (u64, Bytes)>,
    /// Bytes received by each peer, from the coordinator and from others.
    received: BTreeMap<usize, Bytes>,
    /// Number of inputs that the coordinator handled since the start, and the time that it took.
    decisions: u64,
    deciding: Duration,
    since: Option<Instant>,
    /// Bytes held by the whole world at the end, with the coordinator and without it.
    before: usize,
    after: usize,
}

impl Traffic {
    fn count(&self, sort: Sort) -> u64 {
        self.sent.get(&sort).map_or(0, |(count, _)| *count)
    }

    fn bytes(&self, sort: Sort) -> u64 {
        self.sent.get(&sort).map_or(0, |(_, bytes)| bytes.0)
    }
}

impl Watch for Traffic {
    fn sees(&mut self, now: Moment, seen: Seen<'_>) {
        match seen {
            Seen::Decides { begins: true } => self.since = Some(Instant::now()),
            Seen::Decides { begins: false } => {
                self.decisions += 1;
                self.deciding += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
            }
            Seen::Goes { gone: false } => self.before = memory::held(),
            Seen::Goes { gone: true } => self.after = memory::held(),
            _ => {}
        }
        if let Seen::Sent { from, to, sort, size } = seen
            && from != to
            && now.0 >= self.from
        {
            let (count, bytes) = self.sent.entry(sort).or_default();
            *count += 1;
            *bytes += size;
            if matches!(sort, Sort::Told | Sort::Said) {
                *self.received.entry(to).or_default() += size;
            }
        }
    }
}

fn scenario(peers: usize, deaths: bool, until: Duration) -> Scenario {
    let replicas = (peers / usize::from(STAGES)) as u32;
    let mut manifest = Scenario::small_manifest(STAGES, EACH * replicas, 1_000);
    manifest.checkpoint.every = 0;
    // A real peer measures its links to some others; here all or none are known.
    let network = NetworkScenario {
        measured: false,
        ..NetworkScenario::even(Duration::from_millis(20), Duration::from_millis(2), None)
    };
    let compute = ComputeScenario::passes(FORWARD, FORWARD * 2, 100);
    // The first peer is the coordinator and computes nothing.
    let choice = |index| if index == 0 { StageChoice::None } else { StageChoice::Auto };
    let peer = |index| PeerScenario::plain(choice(index), STAGES, compute.clone());
    let mut scenario = Scenario::plain(manifest, (0..=peers).map(peer).collect(), network);
    scenario.until = Some(until);
    scenario.rebalance = Rebalance::every_so_often(REBALANCE);
    let times = if deaths { until.as_secs() / DEATHS.as_secs() } else { 0 };
    let crash = |peer| Fault::Crash { peer, restart: Some(RESTART), disk: false };
    scenario.faults.happen =
        (2..times as u32).map(|i| (DEATHS * i, crash(1 + i as usize))).collect();
    scenario
}
