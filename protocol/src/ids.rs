//! Identifiers: peers and their incarnations, runs, stages, steps, microbatches.
//!
//! Every id is a newtype, so that the compiler rejects a step in place of a microbatch. Every id is
//! ordered, so that collections of ids have the same iteration order on every machine.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

macro_rules! counter {
    ($(#[$meta:meta])* $name:ident($inner:ty)) => {
        $(#[$meta])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize,
            Deserialize, bincode::Encode, bincode::Decode,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The next higher value.
            ///
            /// # Panics
            /// If the counter overflows, which no run can reach.
            #[must_use]
            pub fn next(self) -> Self {
                Self(self.0.checked_add(1).expect("counter exhausted"))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

counter! {
    /// Distinguishes the lives of a peer in a run: every process start and every rejoin takes a
    /// higher one.
    Incarnation(u64)
}
counter! {
    /// Counts the rewinds of the run to a checkpoint.
    Era(u32)
}
counter! {
    /// The number of a coordinator's term.
    Term(u64)
}
counter! {
    /// One optimizer update. Step `s` reads version `s` of the weights and makes version `s + 1`.
    Step(u64)
}
counter! {
    /// A contiguous range of layers, counted from the embedding.
    Stage(u16)
}
counter! {
    /// Weights whose gradients are summed in one round: those of the stage with the same number, or,
    /// after the last stage's, those that the first and the last stage share.
    WeightGroup(u16)
}
counter! {
    /// Position of a microbatch within its step. Positions at and above the step's count of
    /// training microbatches are held out: they are evaluated and train nothing.
    Microbatch(u32)
}
counter! {
    /// Position of an exchange within its microbatch: an activation that goes up a stage and the gradient that
    /// comes back. A virtual worker of several stages, or one that joins a meeting on its way, has one for each
    /// of its passes; all others have one.
    Exchange(u32)
}
counter! {
    /// One attempt at a step's all-reduce of one weight group.
    Attempt(u32)
}
counter! {
    /// How often an attempt was mended because members of it were lost.
    Mend(u32)
}

/// The right to count a microbatch's work, as issued by one coordinator. Later grants compare
/// greater.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    bincode::Encode,
    bincode::Decode,
)]
pub struct Grant {
    /// The coordinator's term.
    pub term: Term,
    /// Its number within the term.
    pub number: u64,
}

impl Grant {
    /// The next grant of the same term.
    ///
    /// # Panics
    /// If the numbers overflow, which no run can reach.
    #[must_use]
    pub fn next(self) -> Self {
        Self { number: self.number.checked_add(1).expect("grants exhausted"), ..self }
    }
}

/// A network identity: an ed25519 public key. Its holder proves possession during the handshake.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(try_from = "String", into = "String")]
pub struct PeerId(pub [u8; 32]);

/// The identity multihash of a protobuf-encoded ed25519 key, up to the key itself
/// (libp2p's peer id specification).
const PEER_ID_PREFIX: [u8; 6] = [0x00, 0x24, 0x08, 0x01, 0x12, 0x20];

/// Orders ids by their bytes. Every message causes lookups in large ordered maps. Most keys differ
/// in their first eight bytes, which compare as one number.
impl Ord for PeerId {
    fn cmp(&self, other: &Self) -> Ordering {
        let first = |id: &Self| id.0.first_chunk().map_or(0, |first| u64::from_be_bytes(*first));
        first(self).cmp(&first(other)).then_with(|| self.0.cmp(&other.0))
    }
}

impl PartialOrd for PeerId {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PeerId {
    /// The bytes of libp2p's peer id.
    #[must_use]
    pub fn to_multihash(self) -> Vec<u8> {
        [PEER_ID_PREFIX.as_slice(), &self.0].concat()
    }

    /// Reads libp2p's bytes. Only ed25519 identities exist in a swarm.
    ///
    /// # Errors
    /// If the bytes are not the identity multihash of an ed25519 key.
    pub fn from_multihash(bytes: &[u8]) -> Result<Self, ParseIdError> {
        bytes
            .strip_prefix(&PEER_ID_PREFIX)
            .and_then(|key| key.try_into().ok())
            .map(Self)
            .ok_or(ParseIdError::Peer)
    }

    /// The last six characters, enough to distinguish peers in a log line.
    #[must_use]
    pub fn short(&self) -> String {
        let text = self.to_string();
        text[text.len() - 6..].to_owned()
    }
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&bs58::encode(self.to_multihash()).into_string())
    }
}

impl fmt::Debug for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerId(..{})", self.short())
    }
}

impl FromStr for PeerId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // A peer id has 52 characters; the cap avoids the decoding of long lines.
        if text.len() > 64 {
            return Err(ParseIdError::Peer);
        }
        let bytes = bs58::decode(text).into_vec().map_err(|_| ParseIdError::Peer)?;
        Self::from_multihash(&bytes)
    }
}

impl TryFrom<String> for PeerId {
    type Error = ParseIdError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<PeerId> for String {
    fn from(id: PeerId) -> Self {
        id.to_string()
    }
}

/// A BLAKE3 hash of a file, a piece of weights or a manifest.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(try_from = "String", into = "String")]
pub struct ContentHash(pub [u8; 32]);

impl ContentHash {
    /// The hash of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl From<blake3::Hash> for ContentHash {
    fn from(hash: blake3::Hash) -> Self {
        Self(*hash.as_bytes())
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContentHash({:.8}..)", self.to_string())
    }
}

impl FromStr for ContentHash {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        blake3::Hash::from_hex(text).map(Self::from).map_err(|_| ParseIdError::Hash)
    }
}

impl TryFrom<String> for ContentHash {
    type Error = ParseIdError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<ContentHash> for String {
    fn from(hash: ContentHash) -> Self {
        hash.to_string()
    }
}

/// The name of a run: the hash of its manifest.
pub type RunId = ContentHash;

/// The error of a text or byte string that is not an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ParseIdError {
    /// Not base58, or not an ed25519 identity.
    #[error("not a peer id: it must be 52 characters starting with 12D3KooW")]
    Peer,
    /// Not 64 hexadecimal digits.
    #[error("not a hash: it must be 64 hexadecimal digits")]
    Hash,
    /// Neither one stage nor two in order.
    #[error("not a span of stages: it must be a number from 0, or the first and the last as 0-3")]
    Span,
}

/// One incarnation of a peer in a run.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
pub struct Member {
    /// The peer's network identity.
    pub peer: PeerId,
    /// The incarnation of the peer.
    pub incarnation: Incarnation,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.peer.short(), self.incarnation)
    }
}

/// The unit of exactly-once counting: the work of one stage on one microbatch of one step.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
pub struct ClaimKey {
    /// The optimizer update that the work belongs to.
    pub step: Step,
    /// The stage whose layers do the work.
    pub stage: Stage,
    /// The samples to work on.
    pub microbatch: Microbatch,
}

impl ClaimKey {
    /// The same microbatch at the next stage.
    #[must_use]
    pub fn downstream(self) -> Self {
        Self { stage: self.stage.next(), ..self }
    }

    /// The same microbatch at the previous stage; `None` at the first stage.
    #[must_use]
    pub fn upstream(self) -> Option<Self> {
        Some(Self { stage: Stage(self.stage.0.checked_sub(1)?), ..self })
    }
}

impl fmt::Display for ClaimKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {} stage {} microbatch {}", self.step, self.stage, self.microbatch)
    }
}

/// The contiguous stages that one peer hosts, `first..=last`; a list of stages in JSON.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(into = "Vec<Stage>", try_from = "Vec<Stage>")]
pub struct StageSpan {
    /// The first stage hosted.
    pub first: Stage,
    /// The last stage hosted.
    pub last: Stage,
}

impl Stage {
    /// Which of so many devices has this stage, where a peer's devices divide its stages: they take stages in turn, so that
    /// adjacent ones are on different devices (Narayanan et al., arXiv 2104.04473, call stages of one device interleaved).
    ///
    /// # Panics
    /// If there is no device.
    #[must_use]
    pub fn device_in_turn(self, devices: usize) -> usize {
        usize::from(self.0) % devices
    }
}

impl From<StageSpan> for Vec<Stage> {
    fn from(span: StageSpan) -> Self {
        span.stages().collect()
    }
}

impl TryFrom<Vec<Stage>> for StageSpan {
    type Error = &'static str;

    fn try_from(stages: Vec<Stage>) -> Result<Self, Self::Error> {
        let (Some(first), Some(last)) = (stages.first(), stages.last()) else {
            return Ok(Self::none());
        };
        let span = Self { first: *first, last: *last };
        if span.stages().eq(stages.iter().copied()) {
            Ok(span)
        } else {
            Err("the stages of one peer follow each other")
        }
    }
}

impl StageSpan {
    /// The span of one stage.
    #[must_use]
    pub fn one(stage: Stage) -> Self {
        Self { first: stage, last: stage }
    }

    /// The span of all stages of a run with `stages` stages.
    #[must_use]
    pub fn all(stages: u16) -> Self {
        Self { first: Stage(0), last: Stage(stages.saturating_sub(1)) }
    }

    /// The span of no stage: the peer keeps the log or an archive and computes nothing.
    #[must_use]
    pub fn none() -> Self {
        Self { first: Stage(1), last: Stage(0) }
    }

    /// Whether the span has no stage.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.first > self.last
    }

    /// Whether the span includes this stage.
    #[must_use]
    pub fn contains(self, stage: Stage) -> bool {
        (self.first..=self.last).contains(&stage)
    }

    /// The hosted stages in order.
    pub fn stages(self) -> impl Iterator<Item = Stage> {
        (self.first.0..=self.last.0).map(Stage)
    }

    /// The stages that another span lacks, in order.
    pub fn outside(self, other: Self) -> impl Iterator<Item = Stage> {
        self.stages().filter(move |stage| !other.contains(*stage))
    }
}

impl fmt::Display for StageSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            f.write_str("none")
        } else if self.first == self.last {
            write!(f, "{}", self.first)
        } else {
            write!(f, "{}-{}", self.first, self.last)
        }
    }
}

/// The form that [`StageSpan`] is displayed in: a stage, or the first and the last with `-` between.
impl FromStr for StageSpan {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let stage = |text: &str| text.parse().map(Stage).map_err(|_| ParseIdError::Span);
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let span = Self { first: stage(first)?, last: stage(last)? };
        if span.is_empty() { Err(ParseIdError::Span) } else { Ok(span) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn peer_ids_are_ordered_by_their_bytes(
            one in any::<[u8; 32]>(), other in any::<[u8; 32]>(), same in 0usize..33
        ) {
            let mut other = other;
            other[..same].copy_from_slice(&one[..same]);
            prop_assert_eq!(PeerId(one).cmp(&PeerId(other)), one.cmp(&other));
        }
    }

    #[test]
    fn a_peer_id_reads_back_its_own_text() {
        let id = PeerId([7; 32]);
        let text = id.to_string();
        assert!(text.starts_with("12D3KooW"), "{text}");
        assert_eq!(text.parse(), Ok(id));
    }

    #[test]
    fn a_span_reads_back_its_own_text() {
        let span = |first, last| StageSpan { first: Stage(first), last: Stage(last) };
        for (text, read) in [("0", span(0, 0)), ("4-7", span(4, 7)), ("3-3", span(3, 3))] {
            assert_eq!(text.parse(), Ok(read));
        }
        for text in ["", "-", "3-", "-3", "3-2", "1-2-3", "65536", "a"] {
            assert_eq!(text.parse::<StageSpan>(), Err(ParseIdError::Span), "{text}");
        }
    }

    #[test]
    fn malformed_ids_are_rejected() {
        for text in ["", "0", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", &"1".repeat(1000)] {
            assert_eq!(text.parse::<PeerId>(), Err(ParseIdError::Peer));
        }
    }

    #[test]
    fn the_first_stage_has_nothing_upstream() {
        let key = ClaimKey { step: Step(3), stage: Stage(0), microbatch: Microbatch(1) };
        assert_eq!(key.upstream(), None);
        assert_eq!(key.downstream().upstream(), Some(key));
    }
}
