//! Reads the description of a simulated swarm and its faults.

use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::Deserialize;
#[cfg(any(test, fuzzing))]
use shoal_protocol::decoder::Decoder;
use shoal_protocol::ids::Stage;
use shoal_protocol::limits;
use shoal_protocol::message::{StageChoice, StageRoom};
use shoal_scheduler::coordinator::placing::rebalance::Rebalance;
use shoal_scheduler::peer::PeerLimits;
use shoal_scheduler::sim::{
    Clock, ComputeScenario, Fault, Faults, NetworkScenario, PeerScenario, Scenario,
    SnapshotScenario,
};

use crate::fleet::{Between, Line};
use crate::fleet_error::FleetError;
use crate::groups::{self, Group};

/// Limits on a swarm: as many peers as a run may have members, and otherwise far more than a laptop
/// simulates in acceptable time.
pub const PEERS: usize = limits::MEMBERS;
const MICROBATCHES: u32 = 1 << 14;
const STEPS: u64 = 1_000_000;
const REGIONS: usize = 64;
const DEATHS: f64 = 1e5;

/// Why a file describes no valid swarm.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// It is not TOML, or has unknown keys.
    #[error(transparent)]
    Malformed(#[from] toml::de::Error),
    /// There are no peers, too many, or fewer than stages.
    #[error("peers must be from 1 to {PEERS}, and at least as many as stages")]
    Peers,
    /// A number that must be positive is 0.
    #[error("stages, regions and microbatches must be at least 1")]
    None,
    /// A number exceeds the simulator's limits.
    #[error(
        "at most {MICROBATCHES} microbatches, {STEPS} steps, {REGIONS} regions, and as many anchors \
         as peers"
    )]
    TooMany,
    /// Activations are empty, or exceed the size limit of a tensor.
    #[error(
        "microbatch_size, context and hidden must be at least 1, and their activation at most {}",
        limits::TENSOR
    )]
    Activation,
    /// A number that must be positive is 0, negative or too large.
    #[error("forward, slowest and bandwidth must be positive")]
    NotPositive,
    /// A group is invalid.
    #[error("group {0}: {1}")]
    Group(usize, &'static str),
    /// The links are invalid.
    #[error(transparent)]
    Links(#[from] FleetError),
    /// The model's size is out of range.
    #[error("parameters is a number from 0 to 1e13")]
    Parameters,
    /// A time is out of range.
    #[error("times are in seconds, from 0 to a million")]
    Time,
    /// The staleness is out of range.
    #[error("staleness is from 0 to {}", limits::STALENESS)]
    Staleness,
    /// There are too many deaths.
    #[error("more than {DEATHS} deaths: raise crash_every")]
    Deaths,
}

/// The description of a swarm and its faults. Times are in seconds.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Described {
    /// Peers. The first one is the coordinator and never dies.
    pub peers: usize,
    /// Pipeline stages.
    pub stages: u16,
    /// Optimizer updates.
    pub steps: u64,
    /// Microbatches of a step.
    pub microbatches: u32,
    /// Commits between checkpoints. 0 writes only the last one.
    pub checkpoint_every: u64,
    /// Time of a forward pass of one stage on the fastest peer. A backward pass takes twice as long.
    pub forward: f64,
    /// Factor by which the slowest peer is slower than the fastest.
    pub slowest: f64,
    /// Number of regions. Peers are assigned to them in turn.
    pub regions: usize,
    /// One-way delay between peers of one region.
    pub latency_near: f64,
    /// One-way delay between peers of different regions.
    pub latency_far: f64,
    /// Bytes per second from one peer to another.
    pub bandwidth: f64,
    /// Samples of a microbatch. With tokens and width they give the size of an activation.
    pub microbatch_size: u32,
    /// Tokens of a sample.
    pub context: u32,
    /// Width of an activation.
    pub hidden: u32,
    /// Mean time between deaths. 0 turns deaths off.
    pub crash_every: f64,
    /// Time from a death until the peer restarts.
    pub restart_after: f64,
    /// The longest time from a death until others notice it.
    pub notice: f64,
    /// Peers that replicate the coordinator's log.
    pub anchors: usize,
    /// The longest time from the coordinator's death until another peer takes over.
    pub election: f64,
    /// Parameters of the whole model, which give the sizes of rounds and snapshots and the memory
    /// that a stage needs. 0 is a model of negligible size.
    pub parameters: f64,
    /// Time between comparisons of the stages, after which members may move. 0 turns them off.
    pub rebalance: f64,
    /// Updates by which the weights that a step reads may be stale: 0, or 1 to hide all-reduces.
    pub staleness: u8,
    /// Time at which the simulation ends. 0 runs until all steps are committed.
    pub until: f64,
    /// Groups of like peers, in place of `peers` and `slowest`. An additional coordinator computes
    /// nothing and never dies.
    pub group: Vec<Group>,
    /// The link within the regions of groups. The three take the place of `regions`, `latency_near`, `latency_far` and
    /// `bandwidth`.
    pub within: Line,
    /// The link between regions that no other names.
    pub between: Option<Line>,
    /// Links between two regions.
    pub link: Vec<Between>,
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
            parameters: 0.0,
            rebalance: 60.0,
            staleness: 0,
            until: 0.0,
            group: Vec::new(),
            within: Line { delay: 0.0005, bandwidth: 1.25e9 },
            between: Some(Line { delay: 0.05, bandwidth: 25e6 }),
            link: Vec::new(),
        }
    }
}

impl Described {
    /// Parses a swarm.
    ///
    /// # Errors
    /// If the text describes no valid swarm.
    pub fn parse(text: &str) -> Result<Self, ScenarioError> {
        let described: Self = toml::from_str(text)?;
        described.check()?;
        groups::check(&described)?;
        Ok(described)
    }

    fn check(&self) -> Result<(), ScenarioError> {
        let positive = |value: f64| value > 0.0 && value < 1e12;
        let time = |value: f64| (0.0..1e6).contains(&value);
        let few = self.group.is_empty() && usize::from(self.stages) > self.peers;
        if !(1..=PEERS).contains(&self.peers) || few {
            return Err(ScenarioError::Peers);
        }
        let counts = [u64::from(self.stages), self.regions as u64, self.microbatches.into()];
        if counts.contains(&0) {
            return Err(ScenarioError::None);
        }
        let small = self.regions <= REGIONS && self.anchors <= self.peers.max(3);
        if self.microbatches > MICROBATCHES || self.steps > STEPS || !small {
            return Err(ScenarioError::TooMany);
        }
        let sizes = [self.microbatch_size, self.context, self.hidden];
        let numbers: u128 = sizes.into_iter().map(u128::from).product();
        if !(1..=u128::from(limits::TENSOR.0 / 4)).contains(&numbers) {
            return Err(ScenarioError::Activation);
        }
        if !positive(self.forward) || !positive(self.slowest) || !positive(self.bandwidth) {
            return Err(ScenarioError::NotPositive);
        }
        let times = [
            self.latency_near,
            self.latency_far,
            self.crash_every,
            self.restart_after,
            self.notice,
            self.election,
            self.forward * self.slowest,
            self.rebalance,
            self.until,
        ];
        if self.staleness > limits::STALENESS {
            return Err(ScenarioError::Staleness);
        }
        if !times.into_iter().all(time) {
            return Err(ScenarioError::Time);
        }
        let dies = self.crash_every > 0.0 && self.group.is_empty();
        if dies && self.until() / self.crash_every > DEATHS {
            return Err(ScenarioError::Deaths);
        }
        Ok(())
    }

    /// The scenario for a seed.
    pub fn scenario(&self, seed: u64) -> Scenario {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut manifest = Scenario::small_manifest(self.stages, self.microbatches, self.steps);
        manifest.training.seed = seed;
        manifest.training.microbatch_size = self.microbatch_size;
        manifest.model.context = self.context;
        manifest.model.hidden = self.hidden;
        manifest.checkpoint.every = self.checkpoint_every;
        manifest.training.staleness = self.staleness;
        let seconds = Duration::from_secs_f64;
        let latency = |from: usize, to: usize| {
            seconds(if from == to { self.latency_near } else { self.latency_far })
        };
        let near = seconds(self.latency_near);
        let row = |from| (0..self.regions).map(|to| latency(from, to)).collect();
        let peers = (0..self.peers).map(|index| self.peer(index, &mut rng)).collect();
        let happen = self.deaths(&mut rng);
        let network = NetworkScenario {
            latency: (0..self.regions).map(row).collect(),
            ..NetworkScenario::even(near, near, Some(self.bandwidth as u64))
        };
        let mut scenario = Scenario {
            seed,
            until: (self.until > 0.0).then(|| seconds(self.until)),
            snapshot: SnapshotScenario {
                size: shoal_protocol::units::Bytes::mebi(4),
                write: Duration::from_millis(100),
            },
            anchors: self.anchors,
            return_trip: Duration::from_secs(120),
            extend_after: Duration::from_secs(30),
            rebalance: Rebalance::every_so_often(seconds(self.rebalance)),
            faults: Faults {
                happen,
                notice: seconds(self.notice),
                election: seconds(self.election),
                rebirth: seconds(self.restart_after),
            },
            ..Scenario::plain(manifest, peers, network)
        };
        groups::apply(self, &mut scenario);
        scenario
    }

    /// A peer with a random speed between the fastest and the slowest.
    pub fn peer(&self, index: usize, rng: &mut ChaCha8Rng) -> PeerScenario {
        let slower = 1.0 + (self.slowest - 1.0) * unit(rng);
        let forward = Duration::from_secs_f64(self.forward * slower);
        PeerScenario {
            choice: StageChoice::Auto,
            fits: (0..self.stages).map(Stage).collect(),
            room: StageRoom::in_memory(2),
            longest: 1,
            limits: PeerLimits::default(),
            start: Some(Duration::ZERO),
            compute: ComputeScenario {
                forward,
                backward: forward * 2,
                splits: true,
                other: Duration::from_micros(100),
                jitter_per_mille: 50,
            },
            devices: std::num::NonZeroU16::MIN,
            divides_stages: false,
            island: None,
            tiers: None,
            archive: false,
            region: index % self.regions,
            clock: Clock::default(),
        }
    }

    /// A time by which a run without deaths has long ended.
    fn until(&self) -> f64 {
        let passes = self.steps as f64 * f64::from(self.microbatches) * f64::from(self.stages);
        passes * 12.0 * self.forward * self.slowest / self.peers as f64
    }

    /// Random deaths until then. The first peer dies only if others can take over as coordinator.
    fn deaths(&self, rng: &mut ChaCha8Rng) -> Vec<(Duration, Fault)> {
        if self.crash_every <= 0.0 || self.peers < 2 || !self.group.is_empty() {
            return Vec::new();
        }
        let mut at = 0.0;
        let mut happen = Vec::new();
        loop {
            at += self.crash_every * (0.5 + unit(rng));
            if at > self.until() {
                return happen;
            }
            let immortal = usize::from(self.anchors < 3);
            let peer = immortal + rng.next_u32() as usize % (self.peers - immortal);
            let restart = Some(Duration::from_secs_f64(self.restart_after));
            happen.push((Duration::from_secs_f64(at), Fault::Crash { peer, restart, disk: false }));
        }
    }
}

fn unit(rng: &mut ChaCha8Rng) -> f64 {
    f64::from(rng.next_u32()) / f64::from(u32::MAX)
}

/// How the decoder of a scenario is tested.
#[cfg(any(test, fuzzing))]
pub const DECODER: Decoder = Decoder {
    name: "scenario",
    examples: || {
        let texts = [
            "peers = 4\nstages = 2\nsteps = 3\n",
            "crash_every = 0.5\nregions = 1\nhidden = 64\n",
            groups::EXAMPLE,
        ];
        texts.map(|text| text.as_bytes().to_vec()).to_vec()
    },
    check: |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return };
        let Ok(described) = Described::parse(text) else { return };
        // Every valid description gives a scenario for every seed.
        let scenario = described.scenario(1);
        assert!(!described.group.is_empty() || scenario.peers.len() == described.peers);
    },
};

#[cfg(test)]
mod tests {
    use shoal_scheduler::sim::{self, Mark};

    use super::*;

    #[test]
    fn the_default_swarm_trains_through_deaths_and_repeats() {
        let described = Described { steps: 3, crash_every: 2.0, ..Described::default() };
        assert!(described.check().is_ok());
        let scenario = described.scenario(1);
        let report = sim::run(&scenario).expect("every oracle holds");
        assert!(report.finished && report.marks[Mark::Died] > 0, "{report:?}");
        assert_eq!(sim::run(&described.scenario(1)), Ok(report));
    }

    #[test]
    fn rebalance_and_staleness_reach_the_scenario() {
        let scenario = |text| Described::parse(text).expect("a swarm").scenario(1);
        let minute = Rebalance::every_so_often(Duration::from_secs(60));
        let usual = scenario("");
        assert_eq!((usual.rebalance, usual.manifest.training.staleness), (minute, 0));
        let other = scenario("rebalance = 0\nstaleness = 1\n");
        assert_eq!((other.rebalance, other.manifest.training.staleness), (Rebalance::Never, 1));
    }

    /// The most peers can be described; a step of more than a thousand is simulated.
    #[test]
    fn a_swarm_of_thousands_trains() {
        assert!(Described::parse("peers = 16384").is_ok());
        let text = "peers = 1100\nregions = 4\nstages = 8\nmicrobatches = 1000\nsteps = 1\n\
                    crash_every = 0\nforward = 0.5\n";
        let scenario = Described::parse(text).expect("a swarm").scenario(1);
        let report = sim::run(&scenario).expect("every oracle holds");
        assert!(report.finished && report.steps.len() == 1, "{report:?}");
    }

    #[test]
    fn invalid_swarms_are_refused() {
        for text in [
            "peers = 0",
            "stages = 13",
            "forward = -1.0",
            "latency_far = 1e9",
            "x = 1",
            "regions = 1000000000",
            "anchors = 1000000000",
            "crash_every = 1e-300",
            "hidden = 4000000000",
            "peers = 16385",
            "rebalance = -1.0",
            "staleness = 5",
        ] {
            assert!(Described::parse(text).is_err(), "{text}");
        }
    }
}
