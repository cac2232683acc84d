//! The all-reduce of one stage's replicas, and the proof that travels with it.

use crate::ids::{Attempt, ClaimKey, ContentHash, Era, Member, Microbatch, Stage, Step, Term};

/// One try at the all-reduce of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, bincode::Encode, bincode::Decode)]
pub struct RoundId {
    /// In which era.
    pub era: Era,
    /// Ordered by the coordinator of which term.
    pub term: Term,
    /// The step whose gradients are summed.
    pub step: Step,
    /// The stage.
    pub stage: Stage,
    /// The try.
    pub attempt: Attempt,
}

/// Who reduces with whom.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Round {
    /// Which round.
    pub id: RoundId,
    /// Every replica, what its accumulator must hold, and its weight in sharing out the work.
    pub members: Vec<RoundMember>,
    /// Newcomers that hear the result and add nothing.
    pub listeners: Vec<Member>,
}

/// One replica in a round.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct RoundMember {
    /// Who.
    pub member: Member,
    /// The training microbatches that its accumulator must hold, in order.
    pub counted: Vec<Microbatch>,
    /// Its part of the vector is in proportion to this.
    pub weight: u32,
}

/// What a round came to; equal at all its members.
#[derive(Debug, Clone, Copy, PartialEq, bincode::Encode, bincode::Decode)]
pub struct RoundOutcome {
    /// Hash of the hashes of the mean gradient's blocks, of [`limits::ROUND_BLOCK_ELEMENTS`] elements
    /// each: a block is measured as soon as it is there.
    ///
    /// [`limits::ROUND_BLOCK_ELEMENTS`]: crate::limits::ROUND_BLOCK_ELEMENTS
    pub hash: ContentHash,
    /// Sum of its squares, added in an order that depends on nothing.
    pub square_norm: f64,
    /// Sum modulo 2^64 of the tags of the microbatches that were counted.
    pub proof: u64,
}

/// The pseudo-random word that stands for one counted microbatch in the proof that travels with
/// every round. The sum modulo 2^64 of a batch's tags is equal to that of another multiset of the
/// same keys only by a chance of 2^-64.
#[must_use]
pub fn proof_tag(key: ClaimKey) -> u64 {
    let mut hasher = blake3::Hasher::new_derive_key("shoal proof tag v1");
    hasher.update(&key.step.0.to_le_bytes());
    hasher.update(&key.stage.0.to_le_bytes());
    hasher.update(&key.microbatch.0.to_le_bytes());
    let mut tag = [0; 8];
    hasher.finalize_xof().fill(&mut tag);
    u64::from_le_bytes(tag)
}
