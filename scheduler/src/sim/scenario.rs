//! A simulated swarm and its conditions: everything that determines a run of the simulator.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::codec::{Codec, SumCodec};
use shoal_protocol::ids::{ContentHash, Stage, StageSpan, Step, WeightGroup};
use shoal_protocol::limits;
use shoal_protocol::manifest::{
    Audit, DistanceCodec, Evaluation, Guard, InnerLoop, InnerMoments, Manifest, Model, Start,
    Training, example,
};
use shoal_protocol::message::{StageChoice, StageRoom};
use shoal_protocol::units::Bytes;

use super::drawn_peer::{devices, island, peer};
use super::peer_scenario::{Clock, PeerScenario};
use super::tiers::TierScenario;
use crate::coordinator::placing::rebalance::Rebalance;
use crate::rng::Rng;
use crate::round::RoundCut;
use crate::router::Routing;

/// Maximum number of peers in a scenario from a seed.
const PEERS: u64 = 64;

/// Maximum number of stages in a scenario from a seed.
const STAGES: u64 = 8;

/// Maximum number of elements of a stage in a scenario from a seed.
pub(super) const ELEMENTS: u64 = 40;

/// Members keep their stages, however long others have no host.
pub(super) const NO_EXTENSION: Duration = Duration::from_secs(1 << 30);

/// A simulated swarm and its conditions.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Seed of all random decisions during the run.
    pub seed: u64,
    /// The manifest of the run.
    pub manifest: Arc<Manifest>,
    /// Elements of each weight group's vector.
    pub parameters: BTreeMap<WeightGroup, usize>,
    /// Number of real elements whose bytes each element of a round takes on a link.
    pub weight: u64,
    /// The version of the checkpoint that the run is founded on, because its log is lost; 0 for a new run.
    pub founded: Step,
    /// The end of the simulation; `None` runs to the end of the training.
    pub until: Option<Duration>,
    /// The peers. The first is also the first coordinator.
    pub peers: Vec<PeerScenario>,
    /// The network.
    pub network: NetworkScenario,
    /// The snapshots of stages.
    pub snapshot: SnapshotScenario,
    /// Maximum time from appending a record to the log until it is durable.
    pub log_delay: Duration,
    /// Initial timeout after which an all-reduce without a result is retried.
    pub patience: Duration,
    /// Number of anchors: the first peers, as far as there are so many.
    pub anchors: usize,
    /// The peer that lies, if one does. It is taken for an anchor, and no anchor votes for it: an elected one is believed.
    pub liar: Option<usize>,
    /// How long a run that lost a stage waits for peers that have its newest checkpoint.
    pub return_trip: Duration,
    /// How long stages may be without a host before members take them beside their own.
    pub extend_after: Duration,
    /// When members change their stages.
    pub rebalance: Rebalance,
    /// How peers choose between replicas.
    pub routing: Routing,
    /// The faults.
    pub faults: Faults,
}

/// Faults and their times.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Ordered by time.
    pub happen: Vec<(Duration, Fault)>,
    /// Maximum time until others notice a death or a cut.
    pub notice: Duration,
    /// Maximum time from the loss of the leading anchor to the next election.
    pub election: Duration,
    /// Time from the end of an incarnation to the automatic start of the next one.
    pub rebirth: Duration,
}

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode)]
pub enum Fault {
    /// A peer dies, and restarts after a while if `restart` is set.
    Crash {
        /// The peer.
        peer: usize,
        /// Time until the restart.
        restart: Option<Duration>,
        /// Whether its disk is lost.
        disk: bool,
    },
    /// A peer leaves in order, then restarts after a while.
    Drain {
        /// The peer.
        peer: usize,
    },
    /// A peer dies and stays down until a [`Fault::Join`].
    Leave {
        /// The peer.
        peer: usize,
    },
    /// A peer that is down starts with an empty disk.
    Join {
        /// The peer.
        peer: usize,
    },
    /// The liar says something that it has no right to say.
    Lie {
        /// Chooses the lie.
        number: u64,
    },
    /// The anchors elect another leader although the present one is alive.
    Depose,
    /// When the next commit is appended to the log, all replicas of a stage die that the
    /// coordinator's peer does not host.
    Ambush {
        /// Index into those stages, modulo their number.
        stage: usize,
        /// Time until they restart.
        restart: Duration,
    },
    /// The connection between two peers breaks; data in flight is lost.
    Break {
        /// One peer.
        one: usize,
        /// The other peer.
        other: usize,
    },
    /// A peer's engine and messages stall for a while, as if its process were stopped.
    Pause {
        /// The peer.
        peer: usize,
        /// The duration.
        time: Duration,
    },
    /// All peers of a region die at once.
    Region {
        /// The region.
        region: usize,
        /// Time until they restart.
        restart: Option<Duration>,
    },
    /// The connection between two peers breaks, and data sent from one to the other is lost for a
    /// while.
    Cut {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// Whether the opposite direction is cut too.
        both: bool,
        /// The duration.
        time: Duration,
    },
    /// Data from one peer to another takes longer for a while.
    SlowLink {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// The additional delay.
        delay: Duration,
        /// The duration.
        time: Duration,
    },
    /// A peer's tasks take longer for a while.
    SlowPeer {
        /// The peer.
        peer: usize,
        /// The factor on their durations.
        factor: u32,
        /// The duration.
        time: Duration,
    },
    /// A peer's disk fails all reads and writes for a while.
    Disk {
        /// The peer.
        peer: usize,
        /// The duration.
        time: Duration,
    },
}

impl Fault {
    /// The fault's duration.
    pub(super) fn time(self) -> Duration {
        match self {
            Self::Pause { time, .. }
            | Self::Cut { time, .. }
            | Self::SlowLink { time, .. }
            | Self::SlowPeer { time, .. }
            | Self::Disk { time, .. } => time,
            Self::Crash { .. }
            | Self::Drain { .. }
            | Self::Leave { .. }
            | Self::Join { .. }
            | Self::Ambush { .. }
            | Self::Break { .. }
            | Self::Region { .. }
            | Self::Lie { .. }
            | Self::Depose => Duration::ZERO,
        }
    }
}

/// The snapshots of stages.
#[derive(Debug, Clone, Copy)]
pub struct SnapshotScenario {
    /// Size of one stage's file in a snapshot on a link.
    pub size: Bytes,
    /// Maximum time to write a copy of a stage. Its peer computes meanwhile.
    pub write: Duration,
}

/// The network between peers.
#[derive(Debug, Clone)]
pub struct NetworkScenario {
    /// One-way latency from each region to each.
    pub latency: Vec<Vec<Duration>>,
    /// Maximum random delay of every message.
    pub jitter: Duration,
    /// Bytes per second from one peer to another; `None` is unlimited.
    pub bandwidth: Option<u64>,
    /// Bytes per second from each region to each, if they differ; otherwise empty.
    pub bandwidths: Vec<Vec<u64>>,
    /// Whether peers get true measurements of their links. Otherwise they get random values or
    /// none.
    pub measured: bool,
    /// Bytes per second from a peer to all others together; `None` is unlimited. Files get a
    /// quarter of it; while some are being sent, all other data has the rest.
    pub uplink: Option<u64>,
    /// Of a thousand messages and tensors, this many arrive twice.
    pub duplicates_per_mille: u64,
    /// Of a thousand offers, this many go to two replicas, as if the sender had given up on the
    /// first.
    pub strays_per_mille: u64,
}

impl Scenario {
    /// The scenario of this seed.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let most = rng.pick(&[3, 8, 24, PEERS]);
        let count = rng.within(1..=most);
        let most = rng.pick(&[2, 4, STAGES]);
        let stages = rng.within(1..=most);
        let mut manifest = manifest(&mut rng, stages as u16);
        let parameters = manifest.weight_groups().map(|weights| (weights, 0));
        let mut parameters: BTreeMap<WeightGroup, usize> = parameters.collect();
        for elements in parameters.values_mut() {
            *elements = rng.within(1..=ELEMENTS) as usize;
        }
        let block = rng.within(1..=4) as usize;
        let pieces = rng.within(1..=6) as usize;
        let cut = RoundCut { block_elements: block, piece_elements: block * pieces };
        let network = network(&mut rng);
        let regions = network.latency.len() as u64;
        let every_stage = count < stages || rng.chance(100);
        let mut other = Rng::new(seed ^ 0x726f_6f6d_0000_0000);
        let peers = (0..count)
            .map(|index| {
                let choice = if index == 0 && every_stage {
                    StageChoice::All
                } else if rng.chance(50) {
                    // If it insisted on a stage, too few peers might remain for another stage.
                    let middle = StageChoice::Span(StageSpan::one(Stage((stages / 2) as u16)));
                    if every_stage { middle } else { StageChoice::All }
                } else {
                    StageChoice::Auto
                };
                let region = rng.within(0..=regions - 1) as usize;
                let mut peer = peer(&mut rng, &manifest, cut, choice, region);
                let spare = if every_stage { index > 0 } else { index >= stages };
                if spare && other.chance(60) {
                    peer.choice = StageChoice::None;
                } else if spare && every_stage && choice == StageChoice::Auto && other.chance(300) {
                    let lacks = Stage(other.within(0..=stages - 1) as u16);
                    peer.fits.retain(|stage| stages == 1 || *stage != lacks);
                }
                peer.tiers = TierScenario::drawn(seed, index, &manifest, &parameters, &peer);
                (peer.devices, peer.divides_stages) = devices(seed, index, &peer.limits);
                peer.island = island(seed, index);
                peer
            })
            .collect();
        let log_delay = Duration::from_millis(rng.pick(&[0, 8, 150]));
        manifest.checkpoint.keep = other.pick(&[1, 2, 2, 4]);
        go_on_from_a_checkpoint(&mut manifest, &mut Rng::new(seed ^ 0x7374_6172_7400_0000));
        let manifest = Arc::new(manifest);
        let patience = Duration::from_secs(rng.pick(&[10, 30]));
        let size = Bytes(rng.pick(&[8, 2_000, 40_000]));
        let write = Duration::from_millis(other.pick(&[0, 5, 500, 5_000]));
        Self {
            seed,
            manifest,
            parameters,
            weight: 1,
            founded: Step(0),
            until: None,
            peers,
            network,
            snapshot: SnapshotScenario { size, write },
            log_delay,
            patience,
            anchors: 1,
            liar: None,
            return_trip: Duration::from_secs(10),
            extend_after: NO_EXTENSION,
            rebalance: Rebalance::Never,
            routing: Routing::default(),
            faults: Faults::default(),
        }
    }

    /// The scenario of this seed, with crashes, broken connections and stalls.
    #[must_use]
    pub fn faulty(seed: u64) -> Self {
        let mut scenario = Self::from_seed(seed);
        let mut rng = Rng::new(seed ^ 0x6661_756c_7473_0000);
        let peers = scenario.peers.len() as u64;
        let notice = rng.pick(&[1_000, 50_000, 3_000_000]);
        let rebirth = rng.pick(&[10_000, 200_000, 2_000_000]);
        // Newcomers need time to catch up.
        if rng.chance(300) {
            let mut manifest = (*scenario.manifest).clone();
            manifest.training.steps = manifest.first_version().0 + rng.within(4..=24);
            scenario.manifest = Arc::new(manifest);
        }
        let most = rng.pick(&[1, 3, 10, 30]);
        let count = rng.within(1..=most);
        let span = rng.pick(&[200_000, 2_000_000, 20_000_000]);
        if rng.chance(500) {
            for peer in &mut scenario.peers {
                let ahead = rng.microseconds(0..=3_600_000_000);
                peer.clock = Clock { ahead, rate: rng.within(800..=1250) as u32 };
            }
        }
        let regions = scenario.network.latency.len() as u64;
        let last_stage = u64::from(scenario.manifest.last_stage().0);
        let mut happen: Vec<(Duration, Fault)> = (0..count)
            .map(|_| (rng.microseconds(0..=span), fault(&mut rng, peers, regions)))
            .collect();
        scenario.anchors = rng.pick(&[1, 1, 3, 5]);
        scenario.return_trip = Duration::from_secs(rng.pick(&[1, 10]));
        let mut other = Rng::new(seed ^ 0x6d6f_7665_0000_0000);
        let every = Duration::from_millis(other.pick(&[30, 300, 3_000]));
        scenario.extend_after = Duration::from_millis(other.pick(&[1, 300, 3_000]));
        scenario.rebalance = match other.within(0..=3) {
            0 => Rebalance::Never,
            1 => Rebalance::When { every, gain: 50 },
            _ => Rebalance::Restless { every },
        };
        for peer in &mut scenario.peers {
            let most = other.pick(&[1, 2, 2, 3, 8]);
            peer.room = StageRoom::in_memory(most);
            if let Some(tiers) = &peer.tiers {
                let resident = other.pick(&[0, 1, 2]).min(most);
                peer.limits.resident = usize::from(resident);
                peer.room = StageRoom { in_memory: resident, most, swap_rate: tiers.rate };
                // Fewer microbatches are kept of each stage where there are more.
                let windows = &mut peer.limits.largest_windows;
                windows.push(windows[0].div_ceil(2));
            }
            peer.longest = other.pick(&[1, 2, 8]);
            peer.archive = rng.chance(50);
        }
        if rng.chance(100) {
            let stage = rng.within(0..=last_stage) as usize;
            let restart = rng.microseconds(0..=3_000_000);
            happen.push((rng.microseconds(0..=span), Fault::Ambush { stage, restart }));
        }
        happen.sort_by_key(|(at, _)| *at);
        scenario.faults = Faults {
            happen,
            notice: Duration::from_micros(notice),
            election: Duration::from_micros(rng.pick(&[20_000, 300_000, 2_000_000])),
            rebirth: Duration::from_micros(rebirth),
        };
        scenario
    }

    /// The scenario of this seed with faults, and with one more member, which lies. It may be elected as far as the others
    /// know; with an odd seed it hosts stages.
    #[must_use]
    pub fn with_liar(seed: u64) -> Self {
        let mut scenario = Self::faulty(seed);
        let mut rng = Rng::new(seed ^ 0x6c69_6172_0000_0000);
        let cut = scenario.peers[0].limits.cut;
        let region = scenario.peers[0].region;
        let choice = if seed.is_multiple_of(2) { StageChoice::None } else { StageChoice::Auto };
        let liar = peer(&mut rng, &scenario.manifest, cut, choice, region);
        scenario.anchors = scenario.anchors.min(scenario.peers.len());
        scenario.liar = Some(scenario.peers.len());
        scenario.peers.push(liar);
        let lies = rng.pick(&[1, 10, 100, 400]);
        let span = rng.pick(&[300_000, 3_000_000]);
        let lie = |number| (rng.microseconds(0..=span), Fault::Lie { number });
        let lies: Vec<_> = (0..lies).map(lie).collect();
        scenario.faults.happen.extend(lies);
        scenario.faults.happen.sort_by_key(|(at, _)| *at);
        scenario
    }

    /// The scenario of this seed with faults, in which work is audited before it counts.
    #[must_use]
    pub fn audited(seed: u64) -> Self {
        let mut scenario = Self::faulty(seed);
        let mut rng = Rng::new(seed ^ 0x6175_6469_7400_0000);
        let manifest = Arc::make_mut(&mut scenario.manifest);
        let audit = Audit { share: rng.pick(&[0.1, 0.5, 1.0]), probation: rng.pick(&[0, 2]) };
        // What workers exchange on their way is not audited.
        if !manifest.workers_exchange() {
            manifest.audit = audit;
        }
        scenario
    }

    /// The scenario of this seed, audited and with faults, in a run of few stages with so many more replicas of each,
    /// which the faults spare.
    #[must_use]
    pub fn replicated(seed: u64, replicas: usize) -> Self {
        let is_small = |scenario: &Self| {
            let manifest = &scenario.manifest;
            manifest.training.stages <= 4 && !manifest.workers_exchange()
        };
        let mut scenarios = (0..).map(|nth| Self::audited(seed + nth * 1_000_003));
        let mut scenario = scenarios.find(is_small).expect("one in a few is small");
        let mut rng = Rng::new(seed ^ 0x7265_706c_6963_6173);
        let cut = scenario.peers[0].limits.cut;
        let region = scenario.peers[0].region;
        let manifest = Arc::make_mut(&mut scenario.manifest);
        manifest.audit.share = rng.pick(&[0.3, 1.0]);
        for stage in manifest.stages().collect::<Vec<_>>() {
            let choice = StageChoice::Span(StageSpan::one(stage));
            let more = (0..replicas).map(|_| peer(&mut rng, manifest, cut, choice, region));
            scenario.peers.extend(more);
        }
        scenario
    }

    /// The same run on one peer that hosts every stage.
    #[must_use]
    pub fn alone(&self) -> Self {
        let mut alone = self.clone();
        alone.faults = Faults::default();
        alone.founded = Step(0);
        alone.peers.truncate(1);
        alone.peers[0].choice = StageChoice::All;
        alone
    }

    /// A manifest of which only the shape matters.
    #[must_use]
    pub fn small_manifest(stages: u16, microbatches: u32, steps: u64) -> Manifest {
        let small = example::small();
        Manifest {
            model: Model {
                hidden: 2,
                layers: u32::from(stages),
                heads: 1,
                key_value_heads: 1,
                intermediate: 2,
                context: 4,
                ..small.model
            },
            training: Training {
                seed: 0,
                steps,
                stages,
                microbatches,
                microbatch_size: 1,
                ..small.training
            },
            evaluation: Evaluation { every: 0, microbatches: 0, ..small.evaluation },
            ..small
        }
    }
}

fn manifest(rng: &mut Rng, stages: u16) -> Manifest {
    let most = rng.pick(&[3, 12, 40]);
    let microbatches = rng.within(1..=most) as u32;
    let steps = rng.within(0..=4);
    let mut manifest = Scenario::small_manifest(stages, microbatches, steps);
    manifest.training.seed = rng.number();
    // The codec changes only the size of round pieces here.
    let rounded = [Codec::F32, Codec::Bf16].map(SumCodec::Rounded);
    let sums = [SumCodec::Exact, SumCodec::Integers, rounded[0], rounded[1]];
    manifest.codec.all_reduce = sums[(manifest.training.seed % 4) as usize];
    // Half of all runs wait for each update.
    let staleness = (manifest.training.seed / 4 % 8) as u8;
    manifest.training.staleness = if staleness > limits::STALENESS { 0 } else { staleness };
    manifest.model.block.tied = (manifest.training.seed / 12).is_multiple_of(2);
    manifest.evaluation.every = rng.within(0..=2);
    if manifest.evaluation.every > 0 {
        manifest.evaluation.microbatches = rng.within(1..=5) as u32;
    }
    manifest.checkpoint.every = rng.within(0..=3);
    let mut timed = Rng::new(manifest.training.seed ^ 0x7469_6d65_0000_0000);
    manifest.checkpoint.interval = timed.chance(300).into();
    train_workers(&mut manifest);
    guard(&mut manifest);
    assert_eq!(manifest.check(), Ok(()), "a scenario has a valid manifest");
    manifest
}

/// Some runs leave out gradients that are not finite, and skip their steps.
fn guard(manifest: &mut Manifest) {
    let mut rng = Rng::new(manifest.training.seed ^ 0x6775_6172_6400_0000);
    if manifest.inner.is_none() && rng.chance(150) {
        manifest.guard = Some(Guard::default());
    }
}

/// Makes of some runs one of virtual workers: of those of several stages, and of one whose workers join meetings on
/// their way.
fn train_workers(manifest: &mut Manifest) {
    let mut rng = Rng::new(manifest.training.seed ^ 0x776f_726b_0000_0000);
    if manifest.training.staleness > 1 || !rng.chance(200) {
        return;
    }
    let (codec, moments) = (DistanceCodec::F32, InnerMoments::Zero);
    let [steps, microbatches] = [0; 2].map(|_| rng.within(1..=3) as u32);
    let optimizer = manifest.optimizer.clone();
    let overlaps = manifest.training.staleness > 0;
    let overlap = if overlaps { rng.within(1..=u64::from(steps)) as u32 } else { 0 };
    if manifest.training.stages == 1 && [0, steps].contains(&overlap) {
        // To the scheduler these are microbatches as any others.
        return;
    }
    manifest.model.block.tied = false;
    manifest.inner = Some(InnerLoop { steps, microbatches, optimizer, codec, moments, overlap });
    // As many passes as in the other runs.
    manifest.training.microbatches = manifest.training.microbatches.div_ceil(steps * microbatches);
}

/// Lets some runs go on from a checkpoint of another run.
fn go_on_from_a_checkpoint(manifest: &mut Manifest, rng: &mut Rng) {
    let step = rng.within(1..=9);
    if manifest.training.steps > 0 && rng.chance(300) {
        let (checkpoint, samples) = (ContentHash([0; 32]), 0);
        manifest.start = Some(Start { checkpoint, bytes: 1, step: Step(step), samples });
        manifest.training.steps += step;
    }
}

/// A random fault.
fn fault(rng: &mut Rng, peers: u64, regions: u64) -> Fault {
    let peer = rng.within(0..=peers - 1) as usize;
    let other = rng.within(0..=peers - 1) as usize;
    let (from, to) = (peer, other);
    let time = rng.microseconds(1_000..=5_000_000);
    let restart = rng.microseconds(0..=3_000_000);
    let restart = rng.chance(800).then_some(restart);
    let which = rng.within(0..=19);
    match which {
        10 => Fault::Depose,
        0 | 1 if peer != other => Fault::Break { one: peer, other },
        2 => Fault::Pause { peer, time },
        3 => Fault::Region { region: rng.within(0..=regions - 1) as usize, restart },
        4 | 5 if peer != other => Fault::Cut { from, to, both: rng.chance(500), time },
        6 => Fault::SlowLink { from, to, delay: rng.microseconds(1_000..=2_000_000), time },
        7 => Fault::SlowPeer { peer, factor: rng.within(2..=50) as u32, time },
        8 | 9 => Fault::Disk { peer, time },
        _ => {
            let disk = rng.chance(300);
            if which > 16 { Fault::Drain { peer } } else { Fault::Crash { peer, restart, disk } }
        }
    }
}

fn network(rng: &mut Rng) -> NetworkScenario {
    let regions = rng.within(1..=4) as usize;
    let far = rng.pick(&[500, 20_000, 150_000]);
    let mut latency = vec![vec![Duration::ZERO; regions]; regions];
    for (from, row) in latency.iter_mut().enumerate() {
        for (to, latency) in row.iter_mut().enumerate() {
            let most = if from == to { 500 } else { far };
            *latency = rng.microseconds(0..=most);
        }
    }
    let jitter = rng.pick(&[0, 200, 30_000]);
    NetworkScenario {
        latency,
        jitter: Duration::from_micros(jitter),
        bandwidth: rng.pick(&[None, Some(100_000), Some(10_000)]),
        bandwidths: Vec::new(),
        measured: false,
        uplink: None,
        duplicates_per_mille: rng.pick(&[0, 0, 10, 200]),
        strays_per_mille: rng.pick(&[0, 0, 100]),
    }
}
