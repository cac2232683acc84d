//! A message with tensors on its way: as many of its parts at once as there are streams for.

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use quinn::{Connection, WriteError};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::send_queue::{TensorJob, Ticket};
use super::tensor;

/// Streams of a connection that large messages take beside the one that every message has. One that has all of
/// them has 34 MiB under way: a link of 1 Gbit/s with a round trip of 280 ms, or of 10 Gbit/s with 28 ms.
pub(super) const LANES: usize = 16;

/// Sends all of a message, and gives its bytes once the peer's machine has them. One stream is its own, so that it
/// comes to its end whatever others wait for; those of `lanes` it takes in turn with others, each for one part.
pub(super) async fn send(
    connection: &Connection,
    lanes: &Semaphore,
    ticket: Ticket,
    job: &TensorJob,
) -> Result<usize, WriteError> {
    let lengths: Vec<usize> = job.frames.iter().map(|frame| frame.body().len()).collect();
    let parts = tensor::parts(&lengths);
    let (mut next, mut bytes, mut own_is_free) = (0, 0, true);
    let mut under_way = FuturesUnordered::new();
    loop {
        if own_is_free && next < parts {
            under_way.push(send_part(connection, ticket, job, next, None));
            (next, own_is_free) = (next + 1, false);
        }
        tokio::select! {
            biased;
            Some(sent) = under_way.next() => {
                let (written, own) = sent?;
                bytes += written;
                own_is_free |= own;
            }
            Ok(lane) = lanes.acquire(), if next < parts => {
                under_way.push(send_part(connection, ticket, job, next, Some(lane)));
                next += 1;
            }
            else => return Ok(bytes),
        }
    }
}

/// Sends a part; gives its bytes, and whether it had the message's own stream.
async fn send_part(
    connection: &Connection,
    ticket: Ticket,
    job: &TensorJob,
    part: usize,
    lane: Option<SemaphorePermit<'_>>,
) -> Result<(usize, bool), WriteError> {
    let mut stream = connection.open_uni().await?;
    job.class.put(&stream, ticket);
    let pieces = tensor::encode(ticket, part, &job.tag, &job.frames);
    Ok((tensor::write(&mut stream, pieces).await?, lane.is_none()))
}
