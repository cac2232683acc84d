//! Control messages and manifests as bytes.
//!
//! The one place that knows the encoding (bincode 2, which is no longer maintained, so it must stay
//! replaceable). Decoding never allocates beyond the cap of a control message and accepts nothing
//! after the value's end.

pub use bincode::Encode;
use bincode::config::{Configuration, Limit, LittleEndian, Varint};

use crate::limits;

const CONFIG: Configuration<LittleEndian, Varint, Limit<{ limits::CONTROL_MESSAGE.0 as usize }>> =
    bincode::config::standard().with_limit::<{ limits::CONTROL_MESSAGE.0 as usize }>();

/// Why bytes are no message, or a message no bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// More than the cap.
    #[error("a control message of {size} bytes is over the cap of {}", limits::CONTROL_MESSAGE)]
    TooLarge {
        /// Its size in bytes.
        size: usize,
    },
    /// Not the encoding of the expected type.
    #[error("malformed control message: {reason}")]
    Malformed {
        /// What the decoder stumbled over.
        reason: String,
    },
    /// A whole value, then more.
    #[error("{count} bytes follow the end of a control message")]
    TrailingBytes {
        /// How many.
        count: usize,
    },
}

/// Encodes a message.
///
/// # Errors
/// When it is over the cap.
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
/// When the bytes are over the cap, malformed, or go on after the message.
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
    fn a_claimed_length_beyond_the_cap_allocates_nothing() {
        // A varint that announces 2^40 elements.
        let bytes = [253, 0, 0, 0, 0, 0, 1, 0, 0];
        assert!(matches!(decode::<Vec<u64>>(&bytes), Err(WireError::Malformed { .. })));
    }

    #[test]
    fn bytes_after_the_end_are_refused() {
        let mut bytes = encode(&7u32).expect("small");
        bytes.push(0);
        assert_eq!(decode::<u32>(&bytes), Err(WireError::TrailingBytes { count: 1 }));
    }
}
