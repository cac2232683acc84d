//! The cost of many simultaneous newcomers to a training swarm, and their distribution over stages:
//! prints the first table of docs/benchmarks/swarms.md.
//!
//! Arguments: simultaneous newcomers (200) and seeds (1).

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::Stage;
use shoal_protocol::message::{LogRecord, StageChoice, View};
use shoal_protocol::units::{Bytes, Moment};
use shoal_scheduler::action::CoordinatorEvent;
use shoal_scheduler::coordinator::placing::rebalance::Rebalance;
use shoal_scheduler::sim::{
    self, ComputeScenario, Fault, NetworkScenario, PeerScenario, Scenario, Seen, Sort, Watch,
};

const STAGES: u16 = 4;
/// Peers that train before the newcomers arrive.
const BEFORE: usize = 16;
const MICROBATCHES: u32 = 512;
const FORWARD: Duration = Duration::from_millis(200);
const BACKWARD: Duration = Duration::from_millis(400);
const JITTER_PER_MILLE: u64 = 20;

/// Latency between any two peers, and each peer's total uplink rate: a gigabit per second.
const LATENCY: Duration = Duration::from_millis(10);
const UPLINK: u64 = 125_000_000;

/// A stage of 25 million parameters: weights and moments in a snapshot.
const PARAMETERS: u64 = 25_000_000;
const SNAPSHOT: Bytes = Bytes(12 * PARAMETERS);

/// When the newcomers arrive, when the measured steps before that begin, and when the run ends.
const COME: Duration = Duration::from_secs(900);
const SETTLED: Duration = Duration::from_secs(300);
const END: Duration = Duration::from_secs(3600);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let newcomers: usize = arguments.next().map_or(Ok(200), |text| text.parse())?;
    let seeds: u64 = arguments.next().map_or(Ok(1), |text| text.parse())?;
    println!(
        "{newcomers} newcomers arrive at once at {BEFORE} peers that train {STAGES} stages: passes of 0.2 s and 0.4 s,\n\
         {MICROBATCHES} microbatches a step, 300 MB a stage, an uplink of 1 Gbit/s each.\n"
    );
    for seed in 0..seeds {
        let watched = |scenario: &Scenario| {
            let mut storm = Storm::default();
            sim::run_watched(scenario, &mut storm).map(|_| storm)
        };
        let mut calm = scenario(newcomers, seed);
        let storm = watched(&calm)?;
        // The same swarm with and without the newcomers.
        calm.faults.happen.clear();
        calm.until = Some(storm.all_serve(newcomers).0);
        storm.print(newcomers, &watched(&calm)?);
    }
    Ok(())
}

fn scenario(newcomers: usize, seed: u64) -> Scenario {
    let mut manifest = Scenario::small_manifest(STAGES, MICROBATCHES, 100_000);
    manifest.training.microbatch_size = 4;
    manifest.model.context = 1024;
    manifest.model.hidden = 512;
    let compute = ComputeScenario::passes(FORWARD, BACKWARD, JITTER_PER_MILLE);
    let auto = PeerScenario::plain(StageChoice::Auto, STAGES, compute.clone());
    let coordinator = PeerScenario::plain(StageChoice::None, STAGES, compute);
    let mut peers = vec![coordinator];
    peers.extend(vec![auto.clone(); BEFORE]);
    peers.extend(vec![PeerScenario { start: None, ..auto }; newcomers]);
    let network =
        NetworkScenario { uplink: Some(UPLINK), ..NetworkScenario::even(LATENCY, LATENCY, None) };
    let mut scenario = Scenario::plain(manifest, peers, network);
    scenario.seed = seed;
    scenario.snapshot.size = SNAPSHOT;
    scenario.weigh_stages(PARAMETERS);
    scenario.rebalance = Rebalance::every_so_often(Duration::from_secs(60));
    scenario.until = Some(END);
    let first = 1 + BEFORE;
    let joins = (first..first + newcomers).map(|peer| (COME, Fault::Join { peer }));
    scenario.faults.happen = joins.collect();
    scenario
}

/// Observations of the newcomers.
#[derive(Debug, Default)]
struct Storm {
    views: Vec<(Moment, View)>,
    commits: Vec<Moment>,
    files: BTreeMap<usize, u64>,
    moves: u64,
    /// When each peer counted a microbatch.
    counted: BTreeMap<usize, Vec<Moment>>,
}

impl Watch for Storm {
    fn sees(&mut self, now: Moment, seen: Seen<'_>) {
        match seen {
            Seen::Logged(LogRecord::View(change)) => {
                let mut view =
                    self.views.last().map_or_else(View::default, |(_, view)| view.clone());
                view.take(change).expect("changes follow each other in the log");
                self.views.push((now, view));
            }
            Seen::Sent { from, sort: Sort::File, size, .. } => {
                *self.files.entry(from).or_default() += size.0;
            }
            Seen::Counted { peer, .. } => self.counted.entry(peer).or_default().push(now),
            Seen::Decided(CoordinatorEvent::Committed { .. }) => self.commits.push(now),
            Seen::Decided(CoordinatorEvent::Moves { .. }) => self.moves += 1,
            _ => {}
        }
    }
}

impl Storm {
    /// When more than `before` peers serve.
    fn first_serves(&self, before: usize) -> Moment {
        let more = |(_, view): &&(Moment, View)| hosts(view, true).iter().sum::<usize>() > before;
        self.views.iter().find(more).map_or(Moment(END), |(at, _)| *at)
    }

    /// When all newcomers serve too.
    fn all_serve(&self, newcomers: usize) -> Moment {
        self.first_serves(BEFORE + newcomers - 1)
    }

    /// Microbatches per second between two commits.
    fn rate(&self, from: Moment, to: Moment) -> f64 {
        let within = self.commits.iter().filter(|at| **at > from && **at <= to);
        let within: Vec<&Moment> = within.collect();
        let [first, .., last] = within.as_slice() else { return 0.0 };
        let time = last.since(**first).as_secs_f64();
        (within.len() - 1) as f64 * f64::from(MICROBATCHES) / time
    }

    /// Number of microbatches that a donor counted.
    fn counted(&self, donor: usize, from: Moment, to: Moment) -> f64 {
        let all = self.counted.get(&donor).into_iter().flatten();
        all.filter(|at| **at > from && **at <= to).count() as f64
    }

    /// By how many percent donors count less than without newcomers: all together, and the one that
    /// loses most.
    fn less(&self, calm: &Self, from: Moment, to: Moment) -> (f64, f64) {
        let counts = |donor| (self.counted(donor, from, to), calm.counted(donor, from, to));
        let less = |(own, calm): (f64, f64)| 100.0 - own / calm.max(1.0) * 100.0;
        let add = |one: (f64, f64), other: (f64, f64)| (one.0 + other.0, one.1 + other.1);
        let all = (1..=BEFORE).map(counts).fold((0.0, 0.0), add);
        let worst = (1..=BEFORE).map(|donor| less(counts(donor))).fold(f64::MIN, f64::max);
        (less(all), worst)
    }

    fn print(&self, newcomers: usize, calm: &Self) {
        let came = Moment(COME);
        let before =
            self.views.iter().rev().find(|(at, _)| *at <= came).expect("a view before the arrival");
        let (_, last) = self.views.last().expect("at least one view");
        let above = self.views.iter().map(|(_, view)| above_even(view)).fold(0.0, f64::max);
        println!(
            "replicas {:?} before, {:?} after; at most {above:.2} above the even share, {} moves",
            hosts(&before.1, false),
            hosts(last, false),
            self.moves,
        );
        let first = self.first_serves(BEFORE);
        let all = self.all_serve(newcomers);
        println!(
            "the first newcomers serve after {:.0} s, all after {:.0} s; microbatches per second: {:.1} before, \
             {:.1} meanwhile, {:.1} after",
            first.since(came).as_secs_f64(),
            all.since(came).as_secs_f64(),
            self.rate(Moment(SETTLED), came),
            self.rate(came, all),
            self.rate(all, Moment(END)),
        );
        let gave = |peer| self.files.get(&peer).copied().unwrap_or(0) as f64 / 1e9;
        let donors = || (1..=BEFORE).map(gave);
        let (early, worst_early) = self.less(calm, came, first);
        let (whole, worst) = self.less(calm, came, all);
        println!(
            "donors count {early:.1}% less until the first newcomers serve (worst: {worst_early:.1}%), and {whole:.1}% \
             (worst: {worst:.1}%) until all do;\nfiles from each: {:.1} GB on average, {:.1} GB at most, of {:.1} \
             GB in all\n",
            donors().sum::<f64>() / BEFORE as f64,
            donors().fold(0.0, f64::max),
            self.files.values().sum::<u64>() as f64 / 1e9,
        );
    }
}

/// The number of hosts of each stage, with or without those that do not serve yet.
fn hosts(view: &View, serving: bool) -> Vec<usize> {
    let of = |stage| {
        let records = view.members.iter().filter(|record| record.serving || !serving);
        records.filter(|record| record.destination().contains(Stage(stage))).count()
    };
    (0..STAGES).map(of).collect()
}

/// By how many hosts the largest stage exceeds its even share.
fn above_even(view: &View) -> f64 {
    let hosts = hosts(view, false);
    let even = hosts.iter().sum::<usize>() as f64 / f64::from(STAGES);
    *hosts.iter().max().expect("there are stages") as f64 - even
}
