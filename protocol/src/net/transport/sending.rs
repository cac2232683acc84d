//! A message with tensors on its way: as many of its parts at once as there are streams for.

use std::sync::atomic::{AtomicUsize, Ordering};

use futures::future::try_join_all;
use quinn::{Connection, WriteError};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::outbox::{TensorJob, Ticket};
use super::tensor;

/// Streams of a connection that large messages take beside the one that every message has. One that has all of
/// them has 34 MiB under way: a link of 1 Gbit/s with a round trip of 280 ms, or of 10 Gbit/s with 28 ms.
pub(super) const LANES: usize = 16;

/// A message, and which of its parts is the next to go.
struct Sending<'a> {
    connection: &'a Connection,
    ticket: Ticket,
    job: &'a TensorJob,
    parts: usize,
    next: AtomicUsize,
}

/// Sends all of a message, and gives its bytes once the peer's machine has them. Its first stream is its own, so
/// that it comes to its end whatever others wait for; those of `lanes` it has while it has something for them.
pub(super) async fn send(
    connection: &Connection,
    lanes: &Semaphore,
    ticket: Ticket,
    job: &TensorJob,
) -> Result<usize, WriteError> {
    let lengths: Vec<usize> = job.frames.iter().map(|frame| frame.body().len()).collect();
    let parts = tensor::parts(&lengths);
    let sending = Sending { connection, ticket, job, parts, next: AtomicUsize::new(0) };
    let more = (1..parts).map_while(|_| lanes.try_acquire().ok().map(Some));
    let all = std::iter::once(None).chain(more).map(|lane| sending.some(lane));
    Ok(try_join_all(all).await?.into_iter().sum())
}

impl Sending<'_> {
    /// Sends part after part until none is left.
    async fn some(&self, _lane: Option<SemaphorePermit<'_>>) -> Result<usize, WriteError> {
        let mut bytes = 0;
        loop {
            let part = self.next.fetch_add(1, Ordering::Relaxed);
            if part >= self.parts {
                return Ok(bytes);
            }
            let mut stream = self.connection.open_uni().await?;
            self.job.class.put(&stream, self.ticket);
            let pieces = tensor::encode(self.ticket, part, &self.job.tag, &self.job.frames);
            bytes += tensor::write(&mut stream, pieces).await?;
        }
    }
}
