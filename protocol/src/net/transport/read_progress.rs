//! What the other end has taken of an answer.
//!
//! Of a stream QUIC tells two things: that bytes fit into the window that the other end leaves, and that all of
//! them have arrived. What moves between the two is seen of the connection alone.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use quinn::{Connection, SendStream};
use tokio::time::timeout;

/// Bytes that count as something: keep-alives and acknowledgements are fewer.
const STEP: u64 = 16 << 10;

/// How long what fits into the other end's windows may take to arrive, however much else moves: an answer is a
/// few mebibytes at most.
const ARRIVAL: Duration = Duration::from_secs(300);

/// Counts what is taken of one answer.
pub(super) struct ReadProgress<'a> {
    connection: &'a Connection,
    written: AtomicU64,
    whole: AtomicBool,
}

impl<'a> ReadProgress<'a> {
    pub(super) fn new(connection: &'a Connection) -> Self {
        Self { connection, written: AtomicU64::new(0), whole: AtomicBool::new(false) }
    }

    /// Changes with whatever is taken.
    pub(super) fn now(&self) -> u64 {
        let written = self.written.load(Ordering::Relaxed);
        if !self.whole.load(Ordering::Relaxed) {
            return written;
        }
        let stats = self.connection.stats();
        written + stats.udp_tx.bytes.saturating_sub(stats.path.lost_bytes) / STEP
    }

    /// Bytes handed to the connection.
    pub(super) fn written(&self) -> usize {
        self.written.load(Ordering::Relaxed) as usize
    }

    /// Sends all of an answer; whether it has arrived.
    pub(super) async fn all(&self, send: &mut SendStream, mut rest: &mut [Bytes]) -> bool {
        while !rest.is_empty() {
            let Ok(written) = send.write_chunks(rest).await else { return false };
            self.written.fetch_add(written.bytes as u64, Ordering::Relaxed);
            // Chunks are emptied as they are written; empty ones are so from the start.
            let whole = rest.iter().take_while(|chunk| chunk.is_empty()).count();
            rest = &mut rest[whole..];
        }
        self.whole.store(true, Ordering::Relaxed);
        if send.finish().is_err() {
            return false;
        }
        matches!(timeout(ARRIVAL, send.stopped()).await, Ok(Ok(None)))
    }
}
