//! Requests, each on a bidirectional stream of its own; the first byte is the kind of request.

use quinn::RecvStream;

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A piece of a file.
    File = 0,
    /// A reachability probe of the sender.
    Probe = 1,
}

impl Kind {
    /// A request of this kind in its encoded form.
    pub(super) fn encode(self, request: &[u8]) -> Vec<u8> {
        [&[self as u8], request].concat()
    }

    /// Reads the kind of a request; `None` if it is unknown, or the stream has ended.
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
