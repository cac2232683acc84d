//! One swarm and its circumstances: everything that a run of the simulator follows from.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::codec::{Codec, SumCodec};
use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Evaluation, Manifest, Model, Training, example};
use shoal_protocol::message::StageChoice;
use shoal_protocol::units::{Bytes, Moment};

use crate::peer::{PeerLimits, RoundCut};
use crate::rebalance::Rebalance;
use crate::rng::Rng;
use crate::router::Routing;

/// Members of the largest swarm that a seed makes.
const PEERS: u64 = 64;

/// Stages of the longest pipeline that a seed makes.
const STAGES: u64 = 8;

/// Elements of the largest stage that a seed makes.
const ELEMENTS: u64 = 40;

/// One swarm and its circumstances.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Decides everything that is still left to chance while the swarm runs.
    pub seed: u64,
    /// The run.
    pub manifest: Arc<Manifest>,
    /// Elements of each stage's vector.
    pub parameters: BTreeMap<Stage, usize>,
    /// On a link each element of a round weighs as much as so many.
    pub weight: u64,
    /// When nothing more is looked at; else the run goes to its end.
    pub until: Option<Duration>,
    /// The peers, the first of which is the coordinator's too.
    pub peers: Vec<PeerScenario>,
    /// The network.
    pub network: NetworkScenario,
    /// What one stage's file in a snapshot weighs on its way.
    pub snapshot: Bytes,
    /// What writing a copy of a stage takes at most; its peer computes meanwhile.
    pub write: Duration,
    /// From a record's way into the log until it is down for good, at most.
    pub log_delay: Duration,
    /// After how long an all-reduce without a result is tried again, at first.
    pub patience: Duration,
    /// Peers that keep the log, if there are so many: the first ones.
    pub anchors: usize,
    /// How long a run that lost a stage waits for those who have its newest checkpoint.
    pub homecoming: Duration,
    /// When members change their stages.
    pub rebalance: Rebalance,
    /// By what peers choose between replicas.
    pub routing: Routing,
    /// What goes wrong.
    pub faults: Faults,
}

/// What goes wrong, and when.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// In order of their moments.
    pub happen: Vec<(Duration, Fault)>,
    /// From a death or a cut until others notice, at most.
    pub notice: Duration,
    /// From the loss of the leading anchor until another leads, at most.
    pub election: Duration,
    /// From the end of a life until the next one begins, where it begins by itself.
    pub rebirth: Duration,
}

/// Something that goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A peer dies, and starts anew after a while, if it does.
    Crash {
        /// Which.
        peer: usize,
        /// After how long it starts anew.
        restart: Option<Duration>,
        /// Whether its disk is lost with it.
        disk: bool,
    },
    /// A peer is told to leave in order; when it has, it starts anew after a while.
    Drain {
        /// Which.
        peer: usize,
    },
    /// A peer dies, and does not come back unless it is said to.
    Leave {
        /// Which.
        peer: usize,
    },
    /// A peer that does not live begins a life, with nothing on its disk.
    Join {
        /// Which.
        peer: usize,
    },
    /// The anchors choose another leader though the one that leads lives.
    Depose,
    /// When the next commit is given to the log, all replicas of a stage die that the coordinator's
    /// peer does not host.
    Ambush {
        /// Which of those stages, counted round.
        stage: usize,
        /// After how long they start anew.
        restart: Duration,
    },
    /// The connection between two peers breaks; what is on its way is lost.
    Break {
        /// One.
        one: usize,
        /// The other.
        other: usize,
    },
    /// A peer's engine and words stand still for a while, as if its process were stopped.
    Pause {
        /// Which.
        peer: usize,
        /// For how long.
        time: Duration,
    },
    /// Every peer of a region dies at once.
    Region {
        /// Which.
        region: usize,
        /// After how long they start anew.
        restart: Option<Duration>,
    },
    /// The connection between two peers breaks, and what is sent from one to the other is lost for
    /// a while.
    Cut {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// Whether the other direction is lost too.
        both: bool,
        /// For how long.
        time: Duration,
    },
    /// What goes from one peer to the other takes longer for a while.
    SlowLink {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// So much longer.
        delay: Duration,
        /// For how long.
        time: Duration,
    },
    /// A peer's tasks take longer for a while.
    SlowPeer {
        /// Which.
        peer: usize,
        /// So many times as long.
        factor: u32,
        /// For how long.
        time: Duration,
    },
    /// A peer's disk takes nothing and gives nothing for a while.
    Disk {
        /// Which.
        peer: usize,
        /// For how long.
        time: Duration,
    },
}

impl Fault {
    /// How long it lasts.
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
            | Self::Depose => Duration::ZERO,
        }
    }
}

/// How a peer's clock goes.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// What it read when the run began.
    pub ahead: Duration,
    /// What it counts while a thousand go by.
    pub rate: u32,
}

impl Default for Clock {
    fn default() -> Self {
        Self { ahead: Duration::ZERO, rate: 1000 }
    }
}

impl Clock {
    /// What it reads at a moment.
    pub(super) fn reads(self, now: Moment) -> Moment {
        Moment(self.ahead + now.0 * self.rate / 1000)
    }

    /// The first moment at which it reads this.
    pub(super) fn when(self, reads: Moment) -> Moment {
        let counted = reads.0.saturating_sub(self.ahead).as_nanos() * 1000;
        let nanoseconds = counted.div_ceil(u128::from(self.rate));
        Moment(Duration::from_nanos(u64::try_from(nanoseconds).expect("runs are short")))
    }
}

/// One peer.
#[derive(Debug, Clone)]
pub struct PeerScenario {
    /// The stages it wants.
    pub choice: StageChoice,
    /// The stages that it has room for.
    pub fits: BTreeSet<Stage>,
    /// How much it takes on.
    pub limits: PeerLimits,
    /// When it starts; none where it waits for a [`Fault::Join`].
    pub start: Option<Duration>,
    /// What its tasks take.
    pub compute: ComputeScenario,
    /// Whether it keeps every checkpoint.
    pub archive: bool,
    /// Where it is.
    pub region: usize,
    /// How its clock goes.
    pub clock: Clock,
}

/// What a peer's tasks take.
#[derive(Debug, Clone)]
pub struct ComputeScenario {
    /// A forward pass of one stage.
    pub forward: Duration,
    /// A backward pass of one stage.
    pub backward: Duration,
    /// Any other task.
    pub other: Duration,
    /// Each pass takes up to so many thousandths longer.
    pub jitter_per_mille: u64,
}

/// The network between peers.
#[derive(Debug, Clone)]
pub struct NetworkScenario {
    /// One way, from each region to each.
    pub latency: Vec<Vec<Duration>>,
    /// Every message takes up to so much longer.
    pub jitter: Duration,
    /// Bytes per second from a peer to another; none is no limit.
    pub bandwidth: Option<u64>,
    /// The same from each region to each, where they differ; else empty.
    pub bandwidths: Vec<Vec<u64>>,
    /// Whether peers know what their links are: who does not is told nonsense of them, or nothing.
    pub measured: bool,
    /// Bytes per second from a peer to all others together; none is no limit. Files have a quarter of it,
    /// and while some go out all else has the rest.
    pub uplink: Option<u64>,
    /// Of a thousand messages and tensors, so many arrive twice.
    pub duplicates_per_mille: u64,
    /// Of a thousand offers, so many go to two replicas, as if the sender had given up on the first.
    pub strays_per_mille: u64,
}

impl Scenario {
    /// The swarm of this seed.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let most = rng.pick(&[3, 8, 24, PEERS]);
        let count = rng.within(1..=most);
        let most = rng.pick(&[2, 4, STAGES]);
        let stages = rng.within(1..=most);
        let mut manifest = manifest(&mut rng, stages as u16);
        let parameters = (0..stages as u16).map(|stage| (Stage(stage), 0));
        let mut parameters: BTreeMap<Stage, usize> = parameters.collect();
        for elements in parameters.values_mut() {
            *elements = rng.within(1..=ELEMENTS) as usize;
        }
        let block = rng.within(1..=4) as usize;
        let piece_elements = block * rng.within(1..=6) as usize;
        let cut = RoundCut { block_elements: block, piece_elements };
        let network = network(&mut rng);
        let regions = network.latency.len() as u64;
        let every_stage = count < stages || rng.chance(100);
        let mut other = Rng::new(seed ^ 0x726f_6f6d_0000_0000);
        let peers = (0..count)
            .map(|index| {
                let choice = if index == 0 && every_stage {
                    StageChoice::All
                } else if rng.chance(50) {
                    // Who insists on a stage may leave too few for another that nobody else hosts.
                    let middle = StageChoice::One(Stage((stages / 2) as u16));
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
                peer
            })
            .collect();
        let log_delay = Duration::from_millis(rng.pick(&[0, 8, 150]));
        manifest.checkpoint.keep = other.pick(&[1, 2, 2, 4]);
        let manifest = Arc::new(manifest);
        let faults = Faults::default();
        let patience = Duration::from_secs(rng.pick(&[10, 30]));
        let snapshot = Bytes(rng.pick(&[8, 2_000, 40_000]));
        Self {
            seed,
            manifest,
            parameters,
            weight: 1,
            until: None,
            peers,
            network,
            snapshot,
            write: Duration::from_millis(other.pick(&[0, 5, 500, 5_000])),
            log_delay,
            patience,
            anchors: 1,
            homecoming: Duration::from_secs(10),
            rebalance: Rebalance::Never,
            routing: Routing::default(),
            faults,
        }
    }

    /// The swarm of this seed, with deaths, breaks and stand-stills.
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
            manifest.training.steps = rng.within(4..=24);
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
        scenario.homecoming = Duration::from_secs(rng.pick(&[1, 10]));
        let mut other = Rng::new(seed ^ 0x6d6f_7665_0000_0000);
        let every = Duration::from_millis(other.pick(&[30, 300, 3_000]));
        scenario.rebalance = match other.within(0..=3) {
            0 => Rebalance::Never,
            1 => Rebalance::When { every, gain: 50 },
            _ => Rebalance::Restless { every },
        };
        for peer in &mut scenario.peers {
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

    /// The same run on one peer that hosts every stage.
    #[must_use]
    pub fn alone(&self) -> Self {
        let mut alone = self.clone();
        alone.faults = Faults::default();
        alone.peers.truncate(1);
        alone.peers[0].choice = StageChoice::All;
        alone
    }

    /// A run that only its shape matters of.
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
    // What it changes here is what pieces of rounds weigh.
    let exact = SumCodec::Exact;
    let sums = [exact, exact, SumCodec::Rounded(Codec::F32), SumCodec::Rounded(Codec::Bf16)];
    manifest.codec.all_reduce = sums[(manifest.training.seed % 4) as usize];
    manifest.training.staleness = u8::from((manifest.training.seed / 4).is_multiple_of(3));
    manifest.evaluation.every = rng.within(0..=2);
    if manifest.evaluation.every > 0 {
        manifest.evaluation.microbatches = rng.within(1..=5) as u32;
    }
    manifest.checkpoint.every = rng.within(0..=3);
    assert_eq!(manifest.check(), Ok(()), "scenarios are of runs that can be");
    manifest
}

/// Something that goes wrong.
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

fn peer(
    rng: &mut Rng,
    manifest: &Manifest,
    cut: RoundCut,
    choice: StageChoice,
    region: usize,
) -> PeerScenario {
    let forward = rng.microseconds(200..=20_000) * rng.pick(&[1, 1, 1, 4]);
    PeerScenario {
        choice,
        fits: manifest.stages().collect(),
        limits: limits(rng, manifest, cut),
        start: Some(rng.microseconds(0..=100_000)),
        compute: ComputeScenario {
            forward,
            backward: forward * 2,
            other: rng.microseconds(1..=500),
            jitter_per_mille: rng.pick(&[0, 100, 1000]),
        },
        archive: false,
        region,
        clock: Clock::default(),
    }
}

fn limits(rng: &mut Rng, manifest: &Manifest, cut: RoundCut) -> PeerLimits {
    // What one microbatch weighs at one stage: activation with labels, and gradient.
    let training = &manifest.training;
    let unit = (manifest.activation_bytes() + manifest.gradient_bytes()).0;
    let stages = u64::from(training.stages);
    // Of the steps that can run, and of the one that is given out before the first of them ends.
    let steps = manifest.steps_at_once() + 1;
    PeerLimits {
        first_window: rng.within(1..=4) as usize,
        largest_window: rng.pick(&[1, 2, 4, 64]),
        offers: rng.pick(&[0, 1, 3, 64]),
        askers: rng.pick(&[1, 4, 64]),
        cell: rng.pick(&[1, 3, 64]),
        in_flight: Bytes(unit * stages * steps * rng.pick(&[1, 3, 64])),
        // Room for the results of two steps at least.
        heard: Bytes(8 * ELEMENTS * stages * rng.pick(&[2, 3, 1000])),
        round_bytes: Bytes(8 * cut.piece_elements as u64 * rng.within(0..=8)),
        cut,
        retry: Duration::from_millis(rng.pick(&[100, 700, 2000])),
    }
}
