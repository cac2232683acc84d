//! What a spot fleet keeps of the best placement of those who live, with and without members that change
//! their stages: prints the table of docs/rebalancing.md.
//!
//! Arguments: the seeds of each row (1), and the hours of each trace from when a pipeline can be (1).

use std::time::Duration;

use shoal_protocol::ids::Stage;
use shoal_protocol::message::StageChoice;
use shoal_protocol::units::{Bytes, Moment};
use shoal_scheduler::rebalance::Rebalance;
use shoal_scheduler::sim::{
    self, ComputeScenario, Fault, NetworkScenario, PeerScenario, Scenario, Seen, SpotTrace,
    SpotUnit, Watch,
};

const STAGES: u16 = 4;
const MICROBATCHES: u32 = 64;
const FORWARD: Duration = Duration::from_secs(1);
const BACKWARD: Duration = Duration::from_secs(2);

/// One stage's weights and moments, and what a peer's link carries in a second: 8 s.
const STATE: Bytes = Bytes(1_000_000_000);
const LINK: u64 = 125_000_000;

const HOUR: Duration = Duration::from_secs(3600);

/// Real fleets, with the unit of their times (`tests/data/README.md` says whose).
const TRACES: [(&str, &str, SpotUnit); 3] = [
    (
        "g4dn us-east-1c",
        include_str!("../../tests/data/spot-traces/aws-g4dn-us-east-1c.csv"),
        SpotUnit::Seconds,
    ),
    ("p2", include_str!("../../tests/data/spot-traces/aws-p2.csv"), SpotUnit::Hours),
    (
        "g4dn events",
        include_str!("../../tests/data/spot-traces/g4dn-events.csv"),
        SpotUnit::Seconds,
    ),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut next = |default: u64| arguments.next().map_or(Ok(default), |text| text.parse());
    let (seeds, hours) = (next(1)?, next(1)?);
    println!(
        "{STAGES} stages, equal peers, passes of 1 s and 2 s, {MICROBATCHES} microbatches a step, {STATE} a \
         stage over links of 1 Gbit/s; at most {hours} h of each trace, mean of {seeds} seeds."
    );
    println!(
        "Share of what the best placement of those who live would get through, moves free, in %.\n"
    );
    println!("fleet              T        whole  first hour  last hour  moves  deaths");
    for (name, text, unit) in TRACES {
        let trace = SpotTrace::parse(text, unit)?;
        for every in [None, Some(300), Some(60)] {
            let mut sum = Shares::default();
            for seed in 0..seeds {
                sum.add(&measure(
                    &trace,
                    every.map(Duration::from_secs),
                    HOUR * hours as u32,
                    seed,
                )?);
            }
            let each = |share: f64| 100.0 * share / seeds as f64;
            println!(
                "{name:17}  {:>6}  {:6.1}  {:10.1}  {:9.1}  {:5}  {:6}",
                every.map_or_else(|| "never".to_owned(), |seconds| format!("{seconds} s")),
                each(sum.whole),
                each(sum.first),
                each(sum.last),
                sum.moves / seeds,
                sum.deaths / seeds,
            );
        }
    }
    Ok(())
}

#[derive(Debug, Default)]
struct Shares {
    whole: f64,
    first: f64,
    last: f64,
    moves: u64,
    deaths: u64,
}

impl Shares {
    fn add(&mut self, other: &Self) {
        self.whole += other.whole;
        self.first += other.first;
        self.last += other.last;
        self.moves += other.moves;
        self.deaths += other.deaths;
    }
}

fn measure(
    trace: &SpotTrace,
    every: Option<Duration>,
    time: Duration,
    seed: u64,
) -> Result<Shares, sim::Violation> {
    let (scenario, from) = scenario(trace, every, time, seed);
    let mut fleet = Fleet { until: from, ..Fleet::default() };
    let report = sim::run_watched(&scenario, &mut fleet)?;
    let end = scenario.until.expect("it was set");
    fleet.lasts(Moment(end));
    let hour = |at: usize| fleet.hours.get(at).map_or(0.0, Hour::share);
    let whole = fleet.hours.iter().fold(Hour::default(), |sum, hour| Hour {
        counted: sum.counted + hour.counted,
        optimum: sum.optimum + hour.optimum,
    });
    let first = (from.0.as_secs() / HOUR.as_secs()) as usize;
    let last = (end.as_secs().saturating_sub(1) / HOUR.as_secs()) as usize;
    Ok(Shares {
        whole: whole.share(),
        first: hour(first),
        last: hour(last),
        moves: report.moves,
        deaths: fleet.deaths,
    })
}

/// What was counted, and what could have been, hour by hour.
#[derive(Debug, Default)]
struct Fleet {
    alive: u64,
    deaths: u64,
    until: Moment,
    hours: Vec<Hour>,
}

#[derive(Debug, Default, Clone)]
struct Hour {
    /// Microbatches through the last stage.
    counted: f64,
    /// What as many replicas of each stage as there can be would have counted.
    optimum: f64,
}

impl Hour {
    fn share(&self) -> f64 {
        if self.optimum > 0.0 { self.counted / self.optimum } else { 1.0 }
    }
}

impl Fleet {
    fn hour(&mut self, at: Moment) -> &mut Hour {
        let hour = (at.0.as_secs() / HOUR.as_secs()) as usize;
        if self.hours.len() <= hour {
            self.hours.resize(hour + 1, Hour::default());
        }
        &mut self.hours[hour]
    }

    /// As many live from the last change on until now.
    fn lasts(&mut self, now: Moment) {
        let replicas = self.alive / u64::from(STAGES);
        let rate = replicas as f64 / (FORWARD + BACKWARD).as_secs_f64();
        while self.until < now {
            let next = Moment(HOUR * (self.until.0.as_secs() / HOUR.as_secs() + 1) as u32).min(now);
            let time = next.since(self.until).as_secs_f64();
            let from = self.until;
            self.hour(from).optimum += time * rate;
            self.until = next;
        }
    }
}

impl Watch for Fleet {
    fn sees(&mut self, now: Moment, seen: Seen<'_>) {
        match seen {
            // The first one keeps the run and computes nothing.
            Seen::Born { peer } if peer > 0 => {
                self.lasts(now);
                self.alive += 1;
            }
            Seen::Died { peer } if peer > 0 => {
                self.lasts(now);
                self.alive -= 1;
                self.deaths += 1;
            }
            Seen::Counted { key, .. } if key.stage == Stage(STAGES - 1) && now >= self.until => {
                self.lasts(now);
                self.hour(now).counted += 1.0;
            }
            _ => {}
        }
    }
}

/// The swarm of a trace, and when its first instances are there.
fn scenario(
    trace: &SpotTrace,
    every: Option<Duration>,
    time: Duration,
    seed: u64,
) -> (Scenario, Moment) {
    let mut manifest = Scenario::small_manifest(STAGES, MICROBATCHES, 1_000_000);
    manifest.checkpoint.every = 8;
    manifest.training.staleness = 1;
    let (most, mut happen) = trace.fates(1, 1.0, seed);
    let (latency, jitter) = (Duration::from_millis(1), Duration::from_micros(100));
    let network = NetworkScenario::even(latency, jitter, Some(LINK));
    let mut scenario = Scenario::plain(manifest, (0..=most).map(peer).collect(), network);
    scenario.seed = seed;
    scenario.snapshot = STATE;
    scenario.write = Duration::from_secs(1);
    scenario.rebalance = Rebalance::every_so_often(every.unwrap_or_default());
    let enough = happen.iter().scan(0u64, |alive, (at, fate)| {
        match fate {
            Fault::Join { .. } => *alive += 1,
            _ => *alive = alive.saturating_sub(1),
        }
        Some((*at, *alive))
    });
    let from = { enough }.find(|(_, alive)| *alive >= u64::from(STAGES));
    // Nothing happens before that, so it begins there.
    let skipped = from.map_or(Duration::ZERO, |(at, _)| at);
    let from = Duration::ZERO;
    happen.iter_mut().for_each(|(at, _)| *at = at.saturating_sub(skipped) + from);
    let end = time.min(trace.end() - skipped) + from;
    happen.retain(|(at, _)| *at <= end);
    scenario.until = Some(end);
    scenario.faults.happen = happen;
    (scenario, Moment(from))
}

fn peer(index: usize) -> PeerScenario {
    let choice = if index == 0 { StageChoice::None } else { StageChoice::Auto };
    let compute = ComputeScenario::passes(FORWARD, BACKWARD, 20);
    PeerScenario {
        start: (index == 0).then_some(Duration::ZERO),
        archive: index == 0,
        ..PeerScenario::plain(choice, STAGES, compute)
    }
}
