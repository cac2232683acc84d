//! `shoal simulate`: a swarm in a modelled world, with the state machines of the real one.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::Deserialize;
use shoal_protocol::ids::Stage;
use shoal_protocol::message::StageChoice;
use shoal_scheduler::peer::PeerLimits;
use shoal_scheduler::sim::{
    self, Clock, ComputeScenario, Fault, Faults, NetworkScenario, PeerScenario, Report, Scenario,
};

use crate::cli::SimulateArgs;
use crate::exit::{Exit, ExitWith};

/// What swarms may have at most: far more than a laptop simulates in a while.
const PEERS: usize = 1024;
const MICROBATCHES: u32 = 1 << 14;

/// A swarm and what befalls it, as a file says it. Times are in seconds.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Described {
    /// Peers; the first keeps the run and never dies.
    peers: usize,
    /// Pipeline stages.
    stages: u16,
    /// Optimizer updates.
    steps: u64,
    /// Microbatches of a step.
    microbatches: u32,
    /// Commits from one checkpoint to the next; 0 is none but the last.
    checkpoint_every: u64,
    /// A forward pass of one stage on the fastest peer; a backward pass takes twice as long.
    forward: f64,
    /// The slowest peer takes so many times as long.
    slowest: f64,
    /// Regions that peers are spread over in turn.
    regions: usize,
    /// One way between peers of one region, and of two.
    latency_near: f64,
    latency_far: f64,
    /// Bytes a second from a peer to another.
    bandwidth: f64,
    /// Numbers of an activation, which decide its bytes: samples, tokens and width.
    microbatch_size: u32,
    context: u32,
    hidden: u32,
    /// From one death to the next, on average; 0 is no deaths.
    crash_every: f64,
    /// From a death until the peer starts again.
    restart_after: f64,
    /// From a death until others notice, at most.
    notice: f64,
    /// Peers that keep the log together.
    anchors: usize,
    /// Seconds from the death of the one that keeps the run until another does, at most.
    election: f64,
}

impl Default for Described {
    fn default() -> Self {
        Self {
            peers: 12,
            stages: 4,
            steps: 20,
            microbatches: 32,
            checkpoint_every: 5,
            forward: 0.05,
            slowest: 2.0,
            regions: 3,
            latency_near: 0.0005,
            latency_far: 0.05,
            bandwidth: 25e6,
            microbatch_size: 4,
            context: 128,
            hidden: 256,
            crash_every: 10.0,
            restart_after: 3.0,
            notice: 0.6,
            anchors: 3,
            election: 1.5,
        }
    }
}

/// Runs a swarm for each seed and prints what came of it.
///
/// # Errors
/// When the file describes no swarm, or something that must hold does not.
pub(super) fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    let described = match &args.scenario {
        None => Described::default(),
        Some(path) => read(path).exit_with(Exit::Usage)?,
    };
    described.check().exit_with(Exit::Usage)?;
    let seeds = match &args.seeds {
        Some(Seeds(seeds)) => seeds.clone(),
        None => args.seed..args.seed + 1,
    };
    for seed in seeds {
        let scenario = described.scenario(seed);
        let outcome = if args.trace { sim::run_traced(&scenario) } else { sim::run(&scenario) };
        let report = outcome.with_context(|| {
            let file =
                args.scenario.as_ref().map_or_else(String::new, |p| format!("{} ", p.display()));
            format!("seed {seed} fails; again: shoal simulate {file}--seed {seed} --trace")
        })?;
        print_report(seed, &scenario, &report);
    }
    Ok(())
}

/// A range of seeds, as `A..B`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seeds(Range<u64>);

impl std::str::FromStr for Seeds {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (from, to) = text.split_once("..").ok_or("a range of seeds is A..B")?;
        let number = |text: &str| text.parse().map_err(|_| "a range of seeds is A..B");
        Ok(Self(number(from)?..number(to)?))
    }
}

fn read(path: &PathBuf) -> anyhow::Result<Described> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("no scenario can be read at {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("{} is no scenario", path.display()))
}

impl Described {
    fn check(&self) -> anyhow::Result<()> {
        let positive = |value: f64| value > 0.0 && value < 1e12;
        let time = |value: f64| (0.0..1e6).contains(&value);
        if !(1..=PEERS).contains(&self.peers) || usize::from(self.stages) > self.peers {
            bail!("peers must be from 1 to {PEERS}, and at least as many as stages");
        }
        if self.stages == 0 || self.regions == 0 || self.microbatches == 0 {
            bail!("stages, regions and microbatches must be at least 1");
        }
        if self.microbatches > MICROBATCHES || self.steps > 1_000_000 {
            bail!("at most {MICROBATCHES} microbatches and a million steps");
        }
        if !positive(self.forward) || !positive(self.slowest) || !positive(self.bandwidth) {
            bail!("forward, slowest and bandwidth must be positive");
        }
        let times = [
            self.latency_near,
            self.latency_far,
            self.crash_every,
            self.restart_after,
            self.notice,
            self.election,
            self.forward * self.slowest,
        ];
        if !times.into_iter().all(time) {
            bail!("times are in seconds, from 0 to a million");
        }
        Ok(())
    }

    fn scenario(&self, seed: u64) -> Scenario {
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let mut manifest = Scenario::small_manifest(self.stages, self.microbatches, self.steps);
        manifest.training.seed = seed;
        manifest.training.microbatch_size = self.microbatch_size;
        manifest.model.context = self.context;
        manifest.model.hidden = self.hidden;
        manifest.checkpoint.every = self.checkpoint_every;
        let seconds = Duration::from_secs_f64;
        let latency = |from: usize, to: usize| {
            seconds(if from == to { self.latency_near } else { self.latency_far })
        };
        let row = |from| (0..self.regions).map(|to| latency(from, to)).collect();
        let peers = (0..self.peers).map(|index| self.peer(index, &mut dice)).collect();
        let happen = self.deaths(&mut dice);
        Scenario {
            seed,
            manifest: Arc::new(manifest),
            parameters: (0..self.stages).map(|stage| (Stage(stage), 64)).collect(),
            peers,
            network: NetworkScenario {
                latency: (0..self.regions).map(row).collect(),
                jitter: seconds(self.latency_near),
                bandwidth: Some(self.bandwidth as u64),
                duplicates_per_mille: 0,
                strays_per_mille: 0,
            },
            snapshot: shoal_protocol::units::Bytes::mebi(4),
            write: Duration::from_millis(100),
            log_delay: Duration::from_millis(5),
            patience: Duration::from_secs(30),
            anchors: self.anchors,
            homecoming: Duration::from_secs(120),
            faults: Faults {
                happen,
                notice: seconds(self.notice),
                election: seconds(self.election),
                rebirth: seconds(self.restart_after),
            },
        }
    }

    /// A peer whose speed lies between those of the fastest and the slowest.
    fn peer(&self, index: usize, dice: &mut ChaCha8Rng) -> PeerScenario {
        let slower = 1.0 + (self.slowest - 1.0) * unit(dice);
        let forward = Duration::from_secs_f64(self.forward * slower);
        PeerScenario {
            choice: StageChoice::Auto,
            fits: (0..self.stages).map(Stage).collect(),
            limits: PeerLimits::default(),
            start: Duration::ZERO,
            compute: ComputeScenario {
                forward,
                backward: forward * 2,
                other: Duration::from_micros(100),
                jitter_per_mille: 50,
            },
            archive: false,
            region: index % self.regions,
            clock: Clock::default(),
        }
    }

    /// Deaths of any peer, the first too where others can keep the run, until the run would long be over without them.
    fn deaths(&self, dice: &mut ChaCha8Rng) -> Vec<(Duration, Fault)> {
        if self.crash_every <= 0.0 || self.peers < 2 {
            return Vec::new();
        }
        let passes = self.steps as f64 * f64::from(self.microbatches) * f64::from(self.stages);
        let alone = passes * 3.0 * self.forward * self.slowest / self.peers as f64;
        let mut at = 0.0;
        let mut happen = Vec::new();
        loop {
            at += self.crash_every * (0.5 + unit(dice));
            if at > alone * 4.0 {
                return happen;
            }
            let spared = usize::from(self.anchors < 3);
            let peer = spared + dice.next_u32() as usize % (self.peers - spared);
            let restart = Some(Duration::from_secs_f64(self.restart_after));
            happen.push((Duration::from_secs_f64(at), Fault::Crash { peer, restart, disk: false }));
        }
    }
}

fn unit(dice: &mut ChaCha8Rng) -> f64 {
    f64::from(dice.next_u32()) / f64::from(u32::MAX)
}

fn print_report(seed: u64, scenario: &Scenario, report: &Report) {
    let ends: Vec<Duration> = report.steps.values().map(|step| step.last.0).collect();
    let starts =
        std::iter::once(report.steps.values().next().map_or(Duration::ZERO, |s| s.first.0));
    let mut steps: Vec<Duration> = starts
        .chain(ends.iter().copied())
        .zip(&ends)
        .map(|(before, end)| end.saturating_sub(before))
        .collect();
    steps.sort();
    let all: Duration = steps.iter().sum();
    let busy = report.busy.as_secs_f64() / (all.as_secs_f64() * scenario.peers.len() as f64);
    let median = steps.get(steps.len() / 2).copied().unwrap_or_default();
    let longest = steps.last().copied().unwrap_or_default();
    let recovery = &report.recovery;
    println!(
        "seed {seed}: {} steps in {:.1} s of the model's time, engines busy {:.0}%; a step took \
         {:.2} s (median), {:.2} s (longest)",
        steps.len(),
        all.as_secs_f64(),
        busy * 100.0,
        median.as_secs_f64(),
        longest.as_secs_f64()
    );
    println!(
        "  {} deaths, {} expelled, {} caught up later; {} claims taken back, {} let go of late, \
         {} activations asked for again, {} rounds tried again, {} returns to a checkpoint",
        recovery.crashes,
        recovery.lost,
        recovery.joined,
        recovery.revoked,
        recovery.recalled,
        recovery.replays,
        recovery.rounds_aborted,
        recovery.rewinds
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_swarm_trains_through_deaths_and_repeats() {
        let described = Described { steps: 3, crash_every: 2.0, ..Described::default() };
        assert!(described.check().is_ok());
        let scenario = described.scenario(1);
        let report = sim::run(&scenario).expect("every oracle holds");
        assert!(report.finished && report.recovery.crashes > 0, "{report:?}");
        assert_eq!(sim::run(&described.scenario(1)), Ok(report));
    }

    #[test]
    fn what_is_no_swarm_is_refused() {
        for text in ["peers = 0", "stages = 13", "forward = -1.0", "latency_far = 1e9", "x = 1"] {
            let read: Result<Described, _> = toml::from_str(text);
            assert!(read.is_err() || read.expect("parsed").check().is_err(), "{text}");
        }
        assert!("3..7".parse::<Seeds>().is_ok() && "3-7".parse::<Seeds>().is_err());
    }
}
