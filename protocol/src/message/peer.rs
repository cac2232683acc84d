//! What members say to each other about work, and what a tensor on its way is.

use super::RoundId;
use crate::ids::{ClaimKey, Member, Mend, Stage};
use crate::units::Bytes;

/// A member to a member.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub enum PeerMessage {
    /// The sender has an activation for the receiver's stage.
    Offer {
        /// The receiver's work.
        key: ClaimKey,
        /// Size of the activation with its labels.
        size: Bytes,
        /// Whether it was offered before, here or elsewhere: two replicas may have taken it, so the
        /// receiver offers it onward only once its own claim is granted.
        retry: bool,
    },
    /// The receiver of an offer has room: send it.
    Accepted {
        /// As offered.
        key: ClaimKey,
        /// Nanoseconds that the receiver needs for one microbatch, forward and backward; 0 while it
        /// has not measured any.
        service_time: u64,
    },
    /// The receiver of an offer has neither room nor a place to wait: offer it elsewhere.
    Busy {
        /// As offered.
        key: ClaimKey,
        /// As in `Accepted`.
        service_time: u64,
    },
    /// The work is another's: send it there.
    HeldBy {
        /// As offered.
        key: ClaimKey,
        /// Whose.
        holder: Member,
    },
    /// The sender, which was busy, has room again.
    Free {
        /// At this stage.
        stage: Stage,
    },
    /// The sender no longer has what it offered and has not sent.
    Withdrawn {
        /// As offered.
        key: ClaimKey,
    },
    /// A held-out microbatch came to the end of the pipeline: what flows back in place of an
    /// activation gradient.
    Evaluated {
        /// The receiver's work.
        key: ClaimKey,
    },
}

/// What a tensor on its way is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum TensorTag {
    /// An activation in `Manifest::boundary_shape`, then its labels, `[samples, tokens]`.
    Activation {
        /// The receiver's work.
        key: ClaimKey,
    },
    /// The gradient of an activation, in its shape.
    ActivationGradient {
        /// The receiver's work.
        key: ClaimKey,
    },
    /// One member's integers for the receiver's part of a round.
    RoundPart {
        /// Which round.
        round: RoundId,
        /// As it was then.
        mend: Mend,
        /// Which piece of the receiver's part.
        piece: u32,
        /// The sum of the sender's tags.
        proof: u64,
    },
    /// The reduced gradient of the sender's part of a round.
    RoundResult {
        /// Which round.
        round: RoundId,
        /// As it was then.
        mend: Mend,
        /// Which piece of the sender's part.
        piece: u32,
        /// The sum of all members' tags.
        proof: u64,
    },
}
