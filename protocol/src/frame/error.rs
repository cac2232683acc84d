//! Errors of tensor frames.

use std::fmt;

use super::VERSION;
use crate::codec::packing::PackingError;
use crate::limits;

/// The defect of a tensor frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// An unknown layout version.
    #[error("tensor frame of version {version}; this build reads version {VERSION}")]
    Version {
        /// The frame's version.
        version: u8,
    },
    /// An unknown number format.
    #[error("tensor frame with unknown element type {code}")]
    UnknownElement {
        /// The unknown code.
        code: u8,
    },
    /// An unknown packing.
    #[error("tensor frame with unknown packing {code}")]
    UnknownPacking {
        /// The unknown code.
        code: u8,
    },
    /// Too many dimensions.
    #[error("a tensor of {rank} dimensions is over the cap of {}", limits::TENSOR_RANK)]
    Rank {
        /// The number of dimensions.
        rank: usize,
    },
    /// A dimension beyond the announced rank is not zero.
    #[error("tensor frame of {rank} dimensions has a size for a further one")]
    UnusedDimension {
        /// The announced number of dimensions.
        rank: usize,
    },
    /// The tensor exceeds the size limit.
    #[error("{} over the cap of {}", Size(*.bytes), limits::TENSOR)]
    TooLarge {
        /// The tensor's bytes; `None` if they do not fit a u64.
        bytes: Option<u64>,
    },
    /// Length, shape and element type disagree.
    #[error("a tensor of {announced} bytes where its shape makes {expected}")]
    RawLength {
        /// Bytes announced, or given.
        announced: u64,
        /// Bytes that follow from element type and shape.
        expected: u64,
    },
    /// The packed length is not smaller than the raw one, or a raw body has another length.
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
        /// Bytes received.
        given: u64,
    },
    /// Header or body changed in transit.
    #[error("tensor frame with a wrong checksum")]
    Checksum,
    /// The checksum is correct but the packed bytes are not.
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
