//! Messages between members about work, and the tags of tensors.

use super::{InputId, Recalled, RoundId, Seal};
use crate::ids::{ClaimKey, Exchange, Member, Mend, Stage};
use crate::units::Bytes;

/// A message from one member to another.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub enum PeerMessage {
    /// The sender has an activation for the receiver's stage.
    Offer {
        /// The work that the receiver would do.
        key: ClaimKey,
        /// Size of the activation with its labels.
        size: Bytes,
        /// Whether the activation was offered before, to any replica. Two replicas may then have
        /// accepted it, so the receiver offers its output onward only once its own claim is
        /// granted.
        retry: bool,
    },
    /// The receiver of an offer has room: the sender sends the activation.
    Accepted {
        /// The offered work.
        key: ClaimKey,
        /// The first exchange whose activation the receiver lacks.
        wanted: Exchange,
        /// Nanoseconds that the receiver needs for one microbatch, forward and backward; 0 while it
        /// has not measured any.
        service_time: u64,
    },
    /// The receiver of an offer has neither room nor a free place in its queue: the sender offers
    /// the work to another replica.
    Busy {
        /// The offered work.
        key: ClaimKey,
        /// As in `Accepted`.
        service_time: u64,
    },
    /// Another member holds the work's claim: the sender sends the activation there.
    HeldBy {
        /// The offered work.
        key: ClaimKey,
        /// The holder of the claim.
        holder: Member,
    },
    /// The sender, which was busy, has room again.
    Free {
        /// The stage with room.
        stage: Stage,
    },
    /// The sender no longer has an activation that it offered and has not sent.
    Withdrawn {
        /// The offered work.
        key: ClaimKey,
    },
    /// A held-out microbatch reached the end of the pipeline. Flows back in place of an activation
    /// gradient.
    Evaluated {
        /// The receiver's work.
        key: ClaimKey,
    },
    /// The sender audits work and asks for an input of it, which the receiver has in its output log.
    Recall {
        /// The audited work.
        key: ClaimKey,
        /// The input.
        input: Recalled,
    },
}

/// What a message with tensors begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TensorHeader {
    /// Identifies the tensors.
    pub tag: TensorTag,
    /// Their maker's seal, in a run with audits: activations and gradients have one.
    pub seal: Option<Seal>,
}

/// Without a seal.
impl From<TensorTag> for TensorHeader {
    fn from(tag: TensorTag) -> Self {
        Self { tag, seal: None }
    }
}

/// Identifies the content of a tensor message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum TensorTag {
    /// An activation in `Manifest::boundary_shape`, then its labels in `Manifest::label_shape`. Of a virtual
    /// worker of several stages a [note](crate::manifest::NOTE) follows; its last exchange has nothing else.
    Activation {
        /// The receiver's work.
        key: ClaimKey,
        /// The exchange.
        exchange: Exchange,
    },
    /// The gradient of an activation, in its shape; a note as above.
    ActivationGradient {
        /// The receiver's work.
        key: ClaimKey,
        /// The exchange.
        exchange: Exchange,
    },
    /// Integers of a piece of a round's vector, for the member that adds them: the sender's, or those of its island.
    RoundPart {
        /// The round.
        round: RoundId,
        /// The mend of the round that the sums belong to.
        mend: Mend,
        /// The number of the piece in the round.
        piece: u32,
        /// The sum of the tags of the microbatches in them.
        proof: u64,
    },
    /// The reduced gradient of a piece of a round's vector, from its owner or the island's collector.
    RoundResult {
        /// The round.
        round: RoundId,
        /// The mend of the round that the result belongs to.
        mend: Mend,
        /// The number of the piece in the round.
        piece: u32,
        /// The sum of all members' tags.
        proof: u64,
    },
    /// An input of work that the receiver audits: an activation with its labels, or a gradient.
    Recalled {
        /// The audited work.
        key: ClaimKey,
        /// The input.
        input: Recalled,
    },
}

impl TensorTag {
    /// Which input of work it is; `None` of a piece of a round.
    #[must_use]
    pub fn input(&self) -> Option<InputId> {
        let (key, input) = match *self {
            Self::Activation { key, .. } => (key, Recalled::Activation),
            Self::ActivationGradient { key, .. } => (key, Recalled::Gradient),
            Self::Recalled { key, input } => (key, input),
            Self::RoundPart { .. } | Self::RoundResult { .. } => return None,
        };
        Some(InputId { key, input })
    }
}
