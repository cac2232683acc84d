//! The tensors that a peer's driver holds, by handle.

use std::collections::BTreeMap;

use shoal_protocol::ids::ContentHash;
use shoal_protocol::units::Bytes;

use super::integer_model::mix;
use crate::action::{Payload, PayloadId};

/// The content of a simulated tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Content {
    /// An activation or a gradient.
    Word(u64),
    /// Integers of a round.
    Sums(Vec<i64>),
}

impl Content {
    /// A hash for its seal.
    pub(super) fn hash(&self) -> ContentHash {
        ContentHash::of(&self.digest().to_le_bytes())
    }

    /// A hash of the content.
    pub(super) fn digest(&self) -> u64 {
        match self {
            Self::Word(word) => *word,
            Self::Sums(sums) => sums.iter().fold(0, |digest, sum| mix(&[digest, *sum as u64])),
        }
    }
}

/// A tensor's content is in no trace, but its hash: it may be long.
impl bincode::Encode for Content {
    fn encode<E: bincode::enc::Encoder>(
        &self,
        encoder: &mut E,
    ) -> Result<(), bincode::error::EncodeError> {
        self.digest().encode(encoder)
    }
}

/// One peer's tensors. Handles are never reused.
#[derive(Debug, Default)]
pub(super) struct Payloads {
    live: BTreeMap<PayloadId, (Content, Bytes)>,
    next: u64,
    /// Whether they are hashed.
    hashes: bool,
}

impl Payloads {
    /// None yet, of a run in which tensors are hashed or not.
    pub(super) fn new(hashes: bool) -> Self {
        Self { hashes, ..Self::default() }
    }

    pub(super) fn keep(&mut self, content: Content, size: Bytes) -> Payload {
        let id = PayloadId(self.next);
        self.next += 1;
        let hash = self.hashes.then(|| content.hash());
        self.live.insert(id, (content, size));
        Payload { id, size, hash, seal: None }
    }

    /// A live tensor; an error if it was released.
    pub(super) fn get(&self, id: PayloadId) -> Result<&(Content, Bytes), String> {
        self.live.get(&id).ok_or_else(|| format!("{id:?} is used after its release"))
    }

    pub(super) fn release(&mut self, id: PayloadId) -> Result<(), String> {
        let known = self.live.remove(&id);
        known.map(|_| ()).ok_or_else(|| format!("{id:?} is released twice"))
    }

    pub(super) fn leaked(&self) -> usize {
        self.live.len()
    }
}
