//! The encoding of control messages and manifests.
//!
//! This is the only module that depends on the encoding (bincode 2, which is no longer maintained,
//! so it must stay replaceable). Decoding never allocates more than the limit of a control message,
//! and rejects bytes after the value's end.

pub use bincode::Encode;
use bincode::config::{Configuration, Limit, LittleEndian, Varint};

use crate::limits;

const CONFIG: Configuration<LittleEndian, Varint, Limit<{ limits::CONTROL_MESSAGE.0 as usize }>> =
    bincode::config::standard().with_limit::<{ limits::CONTROL_MESSAGE.0 as usize }>();

/// Errors of encoding and decoding.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The message exceeds the size limit.
    #[error("a control message of {size} bytes is over the cap of {}", limits::CONTROL_MESSAGE)]
    TooLarge {
        /// Its size in bytes.
        size: usize,
    },
    /// The bytes do not encode the expected type.
    #[error("malformed control message: {reason}")]
    Malformed {
        /// The decoder's message.
        reason: String,
    },
    /// Further bytes follow a complete value.
    #[error("{count} bytes follow the end of a control message")]
    TrailingBytes {
        /// Number of further bytes.
        count: usize,
    },
}

/// Encodes a message.
///
/// # Errors
/// If it exceeds the size limit.
pub fn encode<T: bincode::Encode>(value: &T) -> Result<Vec<u8>, WireError> {
    let bytes = bincode::encode_to_vec(value, CONFIG)
        .map_err(|error| WireError::Malformed { reason: error.to_string() })?;
    if bytes.len() as u64 > limits::CONTROL_MESSAGE.0 {
        return Err(WireError::TooLarge { size: bytes.len() });
    }
    Ok(bytes)
}

/// Decodes a message that fills `bytes` to the end.
///
/// # Errors
/// If the bytes exceed the size limit, are malformed, or continue after the message.
pub fn decode<T: bincode::Decode<()>>(bytes: &[u8]) -> Result<T, WireError> {
    if bytes.len() as u64 > limits::CONTROL_MESSAGE.0 {
        return Err(WireError::TooLarge { size: bytes.len() });
    }
    let (value, read) = bincode::decode_from_slice(bytes, CONFIG)
        .map_err(|error| WireError::Malformed { reason: error.to_string() })?;
    if read != bytes.len() {
        return Err(WireError::TrailingBytes { count: bytes.len() - read });
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announced_length_over_the_limit_allocates_nothing() {
        // A varint that announces 2^40 elements.
        let bytes = [253, 0, 0, 0, 0, 0, 1, 0, 0];
        assert!(matches!(decode::<Vec<u64>>(&bytes), Err(WireError::Malformed { .. })));
    }

    #[test]
    fn bytes_after_the_end_are_rejected() {
        let mut bytes = encode(&7u32).expect("small");
        bytes.push(0);
        assert_eq!(decode::<u32>(&bytes), Err(WireError::TrailingBytes { count: 1 }));
    }
}
