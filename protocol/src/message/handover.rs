//! Tensors that one member hands to another: their names, and what both state of them.

use super::Signature;
use crate::ids::{ClaimKey, ContentHash, Era, Member};

/// Which of the inputs of work a tensor is.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, bincode::Encode, bincode::Decode,
)]
pub enum Recalled {
    /// The activation that the stage before made.
    Activation,
    /// The gradient that the next stage made.
    Gradient,
}

/// Names a tensor between two stages: an input of work.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, bincode::Encode, bincode::Decode,
)]
pub struct InputId {
    /// The work.
    pub key: ClaimKey,
    /// Which of its inputs.
    pub input: Recalled,
}

impl InputId {
    /// The work that makes it; `None` for none, which an unchecked message may name.
    #[must_use]
    pub fn maker(&self) -> Option<ClaimKey> {
        match self.input {
            Recalled::Activation => self.key.upstream(),
            Recalled::Gradient => Some(self.key.downstream()),
        }
    }
}

/// Who made a tensor, and when, signed by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Seal {
    /// The era. After a return to a checkpoint the same work may come to something else.
    pub era: Era,
    /// The maker.
    pub by: Member,
    /// Its signature.
    pub signature: Signature,
}

/// A tensor that was handed over, as its maker signed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Handed {
    /// The tensor's hash.
    pub hash: ContentHash,
    /// The maker's seal.
    pub seal: Seal,
}

/// The tensors that a member took and made for one microbatch at one stage, with labels, as their makers sealed them;
/// those that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct Handover {
    /// The activation that it took; none at the first stage.
    pub activation: Option<Handed>,
    /// The activation that it made; none at the last stage.
    pub output: Option<Handed>,
    /// The gradient that it took; none at the last stage.
    pub gradient: Option<Handed>,
    /// The gradient that it made; none at the first stage.
    pub returned: Option<Handed>,
}

impl Handover {
    /// What it took as an input of its work.
    #[must_use]
    pub fn taken(&self, input: Recalled) -> Option<Handed> {
        match input {
            Recalled::Activation => self.activation,
            Recalled::Gradient => self.gradient,
        }
    }

    /// What it made as an input of other work.
    #[must_use]
    pub fn made(&self, input: Recalled) -> Option<Handed> {
        match input {
            Recalled::Activation => self.output,
            Recalled::Gradient => self.returned,
        }
    }
}

/// The hashes of a [`Handover`]: of the activation and the gradient that were taken, and of those that were made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HandoverHashes {
    /// The activation and the gradient that were taken.
    pub taken: [Option<ContentHash>; 2],
    /// The activation and the gradient that were made.
    pub made: [Option<ContentHash>; 2],
}

impl From<Handover> for HandoverHashes {
    fn from(Handover { activation, output, gradient, returned }: Handover) -> Self {
        let hashes = |tensors: [Option<Handed>; 2]| tensors.map(|tensor| Some(tensor?.hash));
        Self { taken: hashes([activation, gradient]), made: hashes([output, returned]) }
    }
}
