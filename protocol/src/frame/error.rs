//! Why a tensor on the wire is none.

use std::fmt;

use super::VERSION;
use crate::codec::packing::PackingError;
use crate::limits;

/// What is wrong with a tensor on the wire.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A layout that we do not know.
    #[error("tensor frame of version {version}; this build reads version {VERSION}")]
    Version {
        /// What it says it is.
        version: u8,
    },
    /// No such kind of number.
    #[error("tensor frame with unknown element type {code}")]
    UnknownElement {
        /// Its code.
        code: u8,
    },
    /// No such packing.
    #[error("tensor frame with unknown packing {code}")]
    UnknownPacking {
        /// Its code.
        code: u8,
    },
    /// Too many dimensions.
    #[error("a tensor of {rank} dimensions is over the cap of {}", limits::TENSOR_RANK)]
    Rank {
        /// How many.
        rank: usize,
    },
    /// A size beyond the last dimension.
    #[error("tensor frame of {rank} dimensions gives a size to one more")]
    UnusedDimension {
        /// How many it says it has.
        rank: usize,
    },
    /// Over the cap.
    #[error("{} over the cap of {}", Size(*.bytes), limits::TENSOR)]
    TooLarge {
        /// Its bytes; `None` when they do not even fit a u64.
        bytes: Option<u64>,
    },
    /// Length, shape and element type disagree.
    #[error("a tensor of {announced} bytes where its shape makes {expected}")]
    RawLength {
        /// Bytes announced, or given.
        announced: u64,
        /// What element type and shape make.
        expected: u64,
    },
    /// Packed bytes that are not fewer than raw ones, or raw ones of another count.
    #[error("{announced} packed bytes for a tensor of {raw} bytes")]
    PackedLength {
        /// Packed bytes announced.
        announced: u64,
        /// Raw bytes.
        raw: u64,
    },
    /// The body does not have the announced length.
    #[error("tensor body of {given} bytes where {announced} were announced")]
    BodyLength {
        /// Bytes announced.
        announced: u64,
        /// Bytes that came.
        given: u64,
    },
    /// Changed on the way.
    #[error("tensor frame with a wrong checksum")]
    Checksum,
    /// The checksum is right and the packed bytes are not.
    #[error(transparent)]
    Codec(#[from] PackingError),
}

struct Size(Option<u64>);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(bytes) => write!(f, "a tensor of {bytes} bytes is"),
            None => f.write_str("a tensor of more than 2^64 bytes is"),
        }
    }
}
