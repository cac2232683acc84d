//! What a peer is told once, when it starts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::ids::{Member, Stage};
use shoal_protocol::limits;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::Candidate;
use shoal_protocol::units::Bytes;

use crate::router::Routing;

/// Everything that a peer starts with.
#[derive(Debug, Clone)]
pub struct PeerConfig {
    /// This peer in this life.
    pub me: Member,
    /// The run.
    pub manifest: Arc<Manifest>,
    /// As what it wants to be a member.
    pub candidate: Candidate,
    /// Elements of each stage's flat vector of parameters, for every stage of the run.
    pub parameters: BTreeMap<Stage, usize>,
    /// How much it takes on.
    pub limits: PeerLimits,
    /// Decides between replicas that are equally good, so that peers do not all choose the same.
    pub seed: u64,
    /// By what it chooses between replicas of the next stage.
    pub routing: Routing,
}

/// How much a peer takes on.
#[derive(Debug, Clone)]
pub struct PeerLimits {
    /// Microbatches in flight at one stage, at least at first. What a stage needs over links of no
    /// latency it has in any case: [`crate::schedule::first_window`].
    pub first_window: usize,
    /// Microbatches in flight at one stage, at most.
    pub largest_window: usize,
    /// Offers that wait for room at one stage. With few places those of slow replicas and of fast ones
    /// would all be taken, and the slow would have as much to do as the fast.
    pub offers: usize,
    /// Senders remembered at one stage, to be told when there is room again, and senders of one
    /// microbatch beyond the first.
    pub askers: usize,
    /// Replicas of the next stage that it sends to: enough that some have room, and few enough that
    /// what is said to them does not grow with the swarm.
    pub cell: usize,
    /// Activations and gradients that wait or are in use, all hosted stages together.
    pub in_flight: Bytes,
    /// Integers of a round on their way to the other members. At least one piece per member goes
    /// out in any case.
    pub round_bytes: Bytes,
    /// Results of rounds that a newcomer keeps until it has its weights.
    pub heard: Bytes,
    /// How a stage's vector is cut in a round; equal at all members.
    pub cut: RoundCut,
    /// After how long an unanswered word to the coordinator, or a vain offer, is repeated.
    pub retry: Duration,
}

/// How a stage's vector is cut in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundCut {
    /// Members' parts start at multiples of this.
    pub block_elements: usize,
    /// Elements of one piece at most; a multiple of the block.
    pub piece_elements: usize,
}

impl Default for RoundCut {
    fn default() -> Self {
        Self {
            block_elements: limits::ROUND_BLOCK_ELEMENTS,
            piece_elements: limits::ROUND_PIECE_ELEMENTS,
        }
    }
}

impl Default for PeerLimits {
    fn default() -> Self {
        Self {
            first_window: 1,
            largest_window: 1 << 10,
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
