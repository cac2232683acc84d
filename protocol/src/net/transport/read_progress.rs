//! The progress of the other end in receiving an answer.
//!
//! For a stream, QUIC reports only two facts: bytes fit into the other end's window, and all bytes
//! have arrived. Progress between the two is visible only on the connection as a whole.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use quinn::{Connection, SendStream};
use tokio::time::timeout;

/// Bytes sent that count as progress; keep-alives and acknowledgements are fewer.
const STEP: u64 = 16 << 10;

/// Time limit from the moment when all bytes fit into the other end's windows until they have
/// arrived, whatever the progress. An answer has a few MiB at most.
const ARRIVAL: Duration = Duration::from_secs(300);

/// Measures the progress of one answer.
pub(super) struct ReadProgress<'a> {
    connection: &'a Connection,
    written: AtomicU64,
    whole: AtomicBool,
}

impl<'a> ReadProgress<'a> {
    pub(super) fn new(connection: &'a Connection) -> Self {
        Self { connection, written: AtomicU64::new(0), whole: AtomicBool::new(false) }
    }

    /// A number that changes with every progress.
    pub(super) fn now(&self) -> u64 {
        let written = self.written.load(Ordering::Relaxed);
        if !self.whole.load(Ordering::Relaxed) {
            return written;
        }
        let stats = self.connection.stats();
        written + stats.udp_tx.bytes.saturating_sub(stats.path.lost_bytes) / STEP
    }

    /// Bytes written to the connection.
    pub(super) fn written(&self) -> usize {
        self.written.load(Ordering::Relaxed) as usize
    }

    /// Sends all of an answer; returns whether it has arrived.
    pub(super) async fn all(&self, send: &mut SendStream, mut rest: &mut [Bytes]) -> bool {
        while !rest.is_empty() {
            let Ok(written) = send.write_chunks(rest).await else { return false };
            self.written.fetch_add(written.bytes as u64, Ordering::Relaxed);
            // Written chunks become empty; empty chunks are so from the start.
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
