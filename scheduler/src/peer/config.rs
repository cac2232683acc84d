//! The configuration of a peer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::ids::{Member, WeightGroup};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{Candidate, Sealer};
use shoal_protocol::units::Bytes;

use crate::round::RoundCut;
use crate::router::Routing;

/// The configuration of a peer.
#[derive(Debug, Clone)]
pub struct PeerConfig {
    /// This incarnation of the peer.
    pub me: Member,
    /// The manifest of the run.
    pub manifest: Arc<Manifest>,
    /// The peer's application for membership.
    pub candidate: Candidate,
    /// The number of elements of each weight group of the run.
    pub parameters: BTreeMap<WeightGroup, usize>,
    /// The resource limits.
    pub limits: PeerLimits,
    /// How long a peer that is the last host of a stage waits for a checkpoint before it leaves in order.
    pub saving: Duration,
    /// Breaks ties between equally good replicas, differently at each peer.
    pub seed: u64,
    /// Seals what it hands over, in a run with audits.
    pub sealer: Sealer,
    /// The policy for the choice between replicas of the next stage.
    pub routing: Routing,
    /// Whether its devices divide the stages that it hosts ([`shoal_protocol::ids::Stage::device_in_turn`]), and each has passes of its own
    /// alone. Else each has passes of any stage.
    pub divides_stages: bool,
}

impl PeerConfig {
    /// The devices that can have passes of so many hosted stages at the same time.
    pub(crate) fn devices_for(&self, hosted: usize) -> usize {
        let devices = self.candidate.devices.get().into();
        if self.divides_stages { hosted.clamp(1, devices) } else { devices }
    }
}

/// The resource limits of a peer.
#[derive(Debug, Clone)]
pub struct PeerLimits {
    /// Microbatches in flight at one stage, at first. A stage begins with at least the number that it
    /// needs over links without latency: [`crate::schedule::first_window`].
    pub first_window: usize,
    /// The same where stages are swapped.
    pub first_swapped_window: usize,
    /// Microbatches in flight at each stage, at most, of a peer that hosts one stage, two and so on; the last one is
    /// for all further too. Not empty.
    pub largest_windows: Vec<usize>,
    /// Stages that memory holds at once. Where a peer hosts more, they are swapped.
    pub resident: usize,
    /// Offers that wait for room at one stage. With few places, every replica would have a full queue, and
    /// slow replicas would get as much work as fast ones.
    pub offers: usize,
    /// Refused senders that a stage notifies when it has room again; also senders of one microbatch beyond
    /// the first.
    pub askers: usize,
    /// Replicas of the next stage to which the peer sends. Some of them should have room, while the number
    /// of messages to them must not grow with the swarm.
    pub cell: usize,
    /// Bytes of activations and gradients that wait or are in use, at all hosted stages together.
    pub in_flight: Bytes,
    /// Bytes of a round's sums on their way to other members. Each member gets at least one piece at a
    /// time, regardless of this limit.
    pub round_bytes: Bytes,
    /// Bytes of round results that a newcomer keeps until it has its weights.
    pub heard: Bytes,
    /// The division of a stage's vector in a round; equal at all members.
    pub cut: RoundCut,
    /// The interval at which unanswered messages and offers are repeated.
    pub retry: Duration,
}

impl PeerLimits {
    /// Whether so many hosted stages are swapped.
    #[must_use]
    pub fn swaps(&self, hosted: usize) -> bool {
        hosted > self.resident
    }

    /// Microbatches in flight at each of so many hosted stages, at most.
    #[must_use]
    pub fn largest_window(&self, hosted: usize) -> usize {
        let last = self.largest_windows.last();
        let window = self.largest_windows.get(hosted.saturating_sub(1)).or(last);
        *window.expect("there is a limit")
    }
}

impl Default for PeerLimits {
    fn default() -> Self {
        Self {
            first_window: 1,
            first_swapped_window: 1,
            largest_windows: vec![1 << 10],
            resident: usize::MAX,
            offers: 1 << 10,
            askers: 64,
            cell: 64,
            in_flight: Bytes::mebi(4 << 10),
            round_bytes: Bytes::mebi(256),
            heard: Bytes::mebi(4 << 10),
            cut: RoundCut::default(),
            retry: Duration::from_secs(2),
        }
    }
}
