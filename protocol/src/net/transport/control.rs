//! Messages on the control stream: a length of four bytes, little-endian, then the message.

use quinn::{ReadExactError, RecvStream};

use super::error::Violation;
use crate::limits;

/// Bytes of the length prefix.
pub(super) const PREFIX: usize = 4;

/// The reason why no message was read.
#[derive(Debug)]
pub(super) enum ReadFailure {
    /// The stream ended between two messages.
    End,
    /// The sender broke the protocol.
    Violation(Violation),
    /// The connection was lost.
    Lost,
}

/// The length prefix of a message.
pub(super) fn prefix(message: &[u8]) -> [u8; PREFIX] {
    let length = u32::try_from(message.len()).expect("a control message is within its limit");
    length.to_le_bytes()
}

/// Reads one message; allocates nothing for one over the size limit.
pub(super) async fn read(stream: &mut RecvStream) -> Result<Vec<u8>, ReadFailure> {
    let mut length = [0; PREFIX];
    match stream.read_exact(&mut length).await {
        Ok(()) => {}
        Err(ReadExactError::FinishedEarly(0)) => return Err(ReadFailure::End),
        Err(error) => return Err(failure(&error)),
    }
    let length = u32::from_le_bytes(length);
    if u64::from(length) > limits::CONTROL_MESSAGE.0 {
        return Err(ReadFailure::Violation(Violation::ControlTooLarge { size: length.into() }));
    }
    let mut message = vec![0; length as usize];
    stream.read_exact(&mut message).await.map_err(|error| failure(&error))?;
    Ok(message)
}

fn failure(error: &ReadExactError) -> ReadFailure {
    match error {
        ReadExactError::FinishedEarly(_) => ReadFailure::Violation(Violation::ControlEnded),
        ReadExactError::ReadError(quinn::ReadError::Reset(_)) => {
            ReadFailure::Violation(Violation::ControlEnded)
        }
        ReadExactError::ReadError(_) => ReadFailure::Lost,
    }
}
