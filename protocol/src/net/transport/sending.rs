//! Sends a message with tensors: as many parts at once as there are streams.

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use quinn::{Connection, WriteError};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::send_queue::{MessageNumber, TensorJob};
use super::tensor;

/// Number of shared streams of a connection for large messages, in addition to the one stream that
/// each message has. A message that uses all of them has 34 MiB in flight, which fills a link of 1
/// Gbit/s with a round trip of 280 ms, or of 10 Gbit/s with 28 ms.
pub(super) const LANES: usize = 16;

/// Sends all parts of a message; returns its bytes once the peer's machine has received them. One
/// stream is the message's own, so that it completes independently of others. It shares the streams
/// of `lanes` with other messages, one part at a time.
pub(super) async fn send(
    connection: &Connection,
    lanes: &Semaphore,
    number: MessageNumber,
    job: &TensorJob,
) -> Result<usize, WriteError> {
    let lengths: Vec<usize> = job.frames.iter().map(|frame| frame.body().len()).collect();
    let parts = tensor::parts(&lengths);
    let (mut next, mut bytes, mut own_is_free) = (0, 0, true);
    let mut under_way = FuturesUnordered::new();
    loop {
        if own_is_free && next < parts {
            under_way.push(send_part(connection, number, job, next, None));
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
                under_way.push(send_part(connection, number, job, next, Some(lane)));
                next += 1;
            }
            else => return Ok(bytes),
        }
    }
}

/// Sends a part; returns its bytes, and whether it used the message's own stream.
async fn send_part(
    connection: &Connection,
    number: MessageNumber,
    job: &TensorJob,
    part: usize,
    lane: Option<SemaphorePermit<'_>>,
) -> Result<(usize, bool), WriteError> {
    let mut stream = connection.open_uni().await?;
    job.class.prioritize(&stream, number);
    let pieces = tensor::encode(number, part, &job.tag, &job.frames);
    Ok((tensor::write(&mut stream, pieces).await?, lane.is_none()))
}
