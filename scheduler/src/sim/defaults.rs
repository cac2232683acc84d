//! Swarms without randomness except where requested: the starting point of benchmarks.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{Stage, Step, WeightGroup};
use shoal_protocol::limits;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{StageChoice, StageRoom};
use shoal_protocol::units::Bytes;

use super::peer_scenario::{Clock, ComputeScenario, PeerScenario};
use super::scenario::{Faults, NO_EXTENSION, NetworkScenario, Scenario, SnapshotScenario};
use crate::coordinator::placing::locality::Load;
use crate::coordinator::placing::rebalance::Rebalance;
use crate::coordinator::round_patience;
use crate::peer::PeerLimits;
use crate::round::RoundCut;
use crate::round::{AHEAD, ahead, piece_bytes};
use crate::router::Routing;

/// Elements of each weight group's vector: few, since only benchmarks of rounds need more.
const ELEMENTS: usize = 64;

/// Pieces of a stage's vector for each of its replicas, as long as a round of all replicas has at
/// most `MOST_ON_WAY` of them in flight.
const PIECES_EACH: usize = 16;
const MOST_ON_WAY: usize = 1 << 18;

/// Default size of one stage's file in a snapshot.
const SNAPSHOT: Bytes = Bytes(8);

/// Numbers that the optimizer keeps per weight: AdamW's moments.
const MOMENTS: u64 = 2;

impl Scenario {
    /// A run of these peers without faults.
    #[must_use]
    pub fn plain(manifest: Manifest, peers: Vec<PeerScenario>, network: NetworkScenario) -> Self {
        let parameters: BTreeMap<WeightGroup, usize> =
            manifest.weight_groups().map(|weights| (weights, ELEMENTS)).collect();
        Self {
            seed: 0,
            manifest: manifest.into(),
            parameters,
            weight: 1,
            founded: Step(0),
            until: None,
            peers,
            network,
            snapshot: SnapshotScenario { size: SNAPSHOT, write: Duration::ZERO },
            log_delay: Duration::from_millis(5),
            patience: Duration::from_secs(30),
            anchors: 1,
            liar: None,
            return_trip: Duration::from_secs(10),
            extend_after: NO_EXTENSION,
            rebalance: Rebalance::Never,
            routing: Routing::default(),
            faults: Faults {
                happen: Vec::new(),
                notice: Duration::from_millis(500),
                election: Duration::from_secs(1),
                rebirth: Duration::from_secs(10),
            },
        }
    }
}

impl Scenario {
    /// Gives every stage `numbers` numbers. Each simulated element stands for several of them.
    /// Pieces are real ones if they are few. Otherwise each replica gets several, equally many at
    /// all stages, as far as the simulation remains fast.
    pub fn weigh_stages(&mut self, numbers: u64) {
        let replicas = self.peers.len().div_ceil(self.parameters.len());
        let real = (numbers as usize).div_ceil(limits::ROUND_PIECE_ELEMENTS).max(1);
        let pieces = real.min(PIECES_EACH * replicas).min((MOST_ON_WAY / replicas).max(1));
        let elements = pieces.max(ELEMENTS);
        self.parameters.values_mut().for_each(|all| *all = elements);
        self.weight = (numbers / elements as u64).max(1);
        let block = elements.div_ceil(pieces);
        let cut = RoundCut { block_elements: block, piece_elements: block };
        let codec = self.manifest.codec.all_reduce;
        // The limit of data in flight counts simulated elements and suits the link that needs the
        // most.
        let piece = piece_bytes(cut, codec);
        let weighs = Bytes(piece.0 * self.weight);
        let regions = self.network.latency.len();
        let link_estimates = (0..regions).flat_map(|from| (0..regions).map(move |to| (from, to)));
        let link_estimates = link_estimates.map(|(from, to)| self.network.path(from, to));
        let most =
            link_estimates.map(|path| ahead(weighs, AHEAD, Some(&path))).max().unwrap_or(AHEAD);
        let others = replicas.saturating_sub(1).max(1) as u64;
        for peer in &mut self.peers {
            peer.limits.cut = cut;
            peer.limits.round_bytes = Bytes(piece.0 * u64::from(most) * others);
        }
        self.patience = round_patience(codec, numbers);
    }
}

impl Scenario {
    /// The data that a step sends.
    pub(super) fn load(&self) -> Load {
        let elements = |weights| self.parameters.get(&weights).map_or(0, |count| *count as u64);
        let of_stage = |stage| self.manifest.groups_of(stage).map(elements).sum::<u64>();
        let parameters = |stage| of_stage(stage).saturating_mul(self.weight);
        Load::of(&self.manifest, parameters, |stage| parameters(stage).saturating_mul(1 + MOMENTS))
    }
}

impl PeerScenario {
    /// A peer that is present from the beginning and can host the stages that it chooses.
    #[must_use]
    pub fn plain(choice: StageChoice, stages: u16, compute: ComputeScenario) -> Self {
        let fits: BTreeSet<Stage> = match choice {
            StageChoice::Span(span) => span.stages().collect(),
            _ => (0..stages).map(Stage).collect(),
        };
        Self {
            choice,
            fits,
            room: StageRoom::in_memory(2),
            longest: 1,
            limits: PeerLimits::default(),
            start: Some(Duration::ZERO),
            compute,
            devices: std::num::NonZeroU16::MIN,
            divides_stages: false,
            tiers: None,
            island: None,
            archive: false,
            region: 0,
            clock: Clock::default(),
        }
    }
}

impl NetworkScenario {
    /// Equal links with true measurements.
    #[must_use]
    pub fn even(latency: Duration, jitter: Duration, bandwidth: Option<u64>) -> Self {
        Self {
            latency: vec![vec![latency]],
            jitter,
            bandwidth,
            bandwidths: Vec::new(),
            measured: true,
            uplink: None,
            duplicates_per_mille: 0,
            strays_per_mille: 0,
        }
    }
}

impl ComputeScenario {
    /// Passes of these durations, randomly up to `jitter_per_mille` thousandths longer.
    #[must_use]
    pub fn passes(forward: Duration, backward: Duration, jitter_per_mille: u64) -> Self {
        let other = Duration::from_micros(100);
        Self { forward, backward, splits: false, other, jitter_per_mille }
    }
}
