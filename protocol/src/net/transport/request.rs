//! Requests, each a stream of its own in both directions: the first byte says what is asked for.

use quinn::RecvStream;

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A piece of a file.
    File = 0,
    /// To be rung at.
    Probe = 1,
}

impl Kind {
    /// A request of this kind as it is sent.
    pub(super) fn before(self, request: &[u8]) -> Vec<u8> {
        [&[self as u8], request].concat()
    }

    /// Reads what is asked for; `None` where that is nothing that there is, or nobody asks any more.
    pub(super) async fn read(stream: &mut RecvStream) -> Option<Self> {
        let mut kind = [0];
        stream.read_exact(&mut kind).await.ok()?;
        match kind[0] {
            0 => Some(Self::File),
            1 => Some(Self::Probe),
            _ => None,
        }
    }
}
