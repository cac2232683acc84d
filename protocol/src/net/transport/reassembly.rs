//! Reassembly of tensor messages from their parts.
//!
//! Parts arrive in any order. The first one reserves room for the whole message, so that no two
//! incomplete messages wait for each other. Each part is read directly to its place: completing the
//! message copies nothing.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use quinn::{ReadExactError, RecvStream};
use tokio::io::AsyncReadExt;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};

use super::error::Violation;
use super::send_queue::SMALLEST;
use super::tensor::{PREFIX, Prefix, parts, segments};
use crate::frame::{Frame, Header};
use crate::limits;

/// Maximum bytes for which one message is counted, however large it is: a smaller one still has
/// room beside it.
const COUNTED: u64 = limits::RECEIVE_ROOM.0 - limits::SEND_QUEUE.0;

/// The reason why no message was read.
#[derive(Debug)]
pub(super) enum ReadFailure {
    /// The sender broke the protocol.
    Violation(Violation),
    /// The sender aborted the message, or the connection was lost.
    Lost,
}

impl<V: Into<Violation>> From<V> for ReadFailure {
    fn from(violation: V) -> Self {
        Self::Violation(violation.into())
    }
}

/// A complete message.
pub(super) struct Received {
    pub(super) tag: Vec<u8>,
    pub(super) frames: Vec<Frame>,
    pub(super) bytes: usize,
    pub(super) room: OwnedSemaphorePermit,
}

/// The incomplete messages of one connection.
pub(super) struct Reassembly {
    room: Arc<Semaphore>,
    /// Messages of which some part has arrived. Each has room for all of it, or a stream that waits
    /// for room.
    messages: Mutex<BTreeMap<u64, Arc<Message>>>,
    /// Bytes that arrived, of all messages.
    arrived: AtomicU64,
    /// Those at the last look.
    seen: AtomicU64,
}

impl Reassembly {
    pub(super) fn new() -> Self {
        let room = Arc::new(Semaphore::new(limits::RECEIVE_ROOM.0 as usize));
        let (arrived, seen) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { room, messages: Mutex::default(), arrived, seen }
    }

    /// Reads a part; returns the message if it is complete. Bodies are read only once there is room
    /// for all of them, and never if they exceed `largest` bytes. Dropping the result frees the
    /// room.
    /// `guests` is the room that a guest shares with all others: what does not fit there is lost.
    pub(super) async fn read(
        &self,
        stream: &mut RecvStream,
        largest: u64,
        guests: Option<&Arc<Semaphore>>,
    ) -> Result<Option<Received>, ReadFailure> {
        let mut prefix = [0; PREFIX];
        exact(stream, &mut prefix).await?;
        let prefix = Prefix::decode(prefix)?;
        let mut head = vec![0; prefix.head()];
        exact(stream, &mut head).await?;
        let message = self.message(prefix, head, largest)?;
        let too_large = guests.is_some() && message.bytes() > limits::GUEST_ROOM.0;
        let read = match too_large {
            true => Err(ReadFailure::Lost),
            false => {
                let room = guests.unwrap_or(&self.room);
                message.read(stream, prefix.part as usize, room, &self.arrived).await
            }
        };
        if !matches!(read, Ok(None)) {
            // The message is complete, or never will be.
            self.lock().remove(&prefix.message);
        }
        let Some(bodies) = read? else { return Ok(None) };
        message.received(prefix, bodies).map(Some)
    }

    /// Looks for messages that began and of which nothing arrived since that many looks. A member's are silent only
    /// if nothing else of it arrived either: on a slow link, one message waits for another.
    pub(super) fn look(&self, looks: u32, is_member: bool) -> Option<Violation> {
        let arrived = self.arrived.load(Ordering::Relaxed);
        let others = arrived != self.seen.swap(arrived, Ordering::Relaxed);
        let mut silent = false;
        for message in self.lock().values().filter(|message| message.bodies.initialized()) {
            let moved = message.moved.swap(false, Ordering::Relaxed) || is_member && others;
            let looked = if moved { 0 } else { message.looks.load(Ordering::Relaxed) + 1 };
            message.looks.store(looked, Ordering::Relaxed);
            silent |= looked >= looks;
        }
        silent.then_some(Violation::TensorSilent)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Message>>> {
        // A poisoned lock is usable: its holders only look up entries.
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The message that a part belongs to.
    fn message(
        &self,
        prefix: Prefix,
        head: Vec<u8>,
        largest: u64,
    ) -> Result<Arc<Message>, Violation> {
        let (tag, headers) = prefix.split(&head)?;
        let lengths: Vec<usize> = headers.iter().map(Header::packed_length).collect();
        let bytes = lengths.iter().map(|length| *length as u64).sum();
        if bytes > largest {
            return Err(Violation::TensorsTooLarge { bytes, largest });
        }
        let parts = parts(&lengths);
        if prefix.part as usize >= parts {
            return Err(Violation::TensorPart { part: prefix.part });
        }
        let otherwise = Violation::TensorHeader { tag: tag.len(), frames: lengths.len() };
        let mut messages = self.lock();
        let message = messages
            .entry(prefix.message)
            .or_insert_with(|| Arc::new(Message::new(head.clone(), lengths, parts)));
        if message.head == head { Ok(message.clone()) } else { Err(otherwise) }
    }
}

/// One incomplete message.
struct Message {
    /// Tag and headers.
    head: Vec<u8>,
    /// Bytes of each body.
    lengths: Vec<usize>,
    parts: usize,
    bodies: OnceCell<Mutex<Bodies>>,
    /// Whether bytes arrived since the last look, and the looks since they did.
    moved: AtomicBool,
    looks: AtomicU32,
}

/// A destination of data: the tensor, the range of its bytes, and the buffer.
struct Segment {
    frame: usize,
    range: Range<usize>,
    bytes: BytesMut,
}

enum Part {
    Awaited(Vec<Segment>),
    /// A stream is reading it.
    Reading,
    Complete(Vec<Segment>),
}

struct Bodies {
    room: Option<OwnedSemaphorePermit>,
    parts: Vec<Part>,
    /// Number of incomplete parts.
    missing: usize,
}

/// All bodies, and the room that they occupy.
type Whole = (Vec<Bytes>, OwnedSemaphorePermit);

impl Message {
    fn new(head: Vec<u8>, lengths: Vec<usize>, parts: usize) -> Self {
        let (moved, looks) = (AtomicBool::new(true), AtomicU32::new(0));
        Self { head, lengths, parts, bodies: OnceCell::new(), moved, looks }
    }

    /// Bytes of tag, headers and bodies.
    fn bytes(&self) -> u64 {
        (self.head.len() + self.lengths.iter().sum::<usize>()) as u64
    }

    /// Reads a part once there is room; returns the bodies once all parts are complete.
    async fn read(
        &self,
        stream: &mut RecvStream,
        part: usize,
        room: &Arc<Semaphore>,
        arrived: &AtomicU64,
    ) -> Result<Option<Whole>, ReadFailure> {
        let mut segments = self.take(part, room).await?;
        for segment in &mut segments {
            body(stream, segment, |bytes| {
                self.moved.store(true, Ordering::Relaxed);
                arrived.fetch_add(bytes as u64, Ordering::Relaxed);
            })
            .await?;
        }
        match stream.read(&mut [0]).await {
            Ok(None) => self.put(part, segments),
            Ok(Some(_)) => Err(Violation::TensorTrailing.into()),
            Err(_) => Err(ReadFailure::Lost),
        }
    }

    /// The buffers of a part, once there is room for the whole message.
    async fn take(&self, part: usize, room: &Arc<Semaphore>) -> Result<Vec<Segment>, ReadFailure> {
        let bodies = self.bodies.get_or_try_init(|| self.bodies(room)).await?;
        let mut bodies = bodies.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut bodies.parts[part], Part::Reading) {
            Part::Awaited(segments) => Ok(segments),
            Part::Reading | Part::Complete(_) => {
                Err(Violation::TensorPart { part: part as u32 }.into())
            }
        }
    }

    async fn bodies(&self, room: &Arc<Semaphore>) -> Result<Mutex<Bodies>, ReadFailure> {
        let needed = self.bytes().clamp(SMALLEST as u64, COUNTED) as u32;
        let room = room.clone().acquire_many_owned(needed).await.map_err(|_| ReadFailure::Lost)?;
        // Reserves addresses; memory is used as bytes arrive.
        let mut rest: Vec<BytesMut> =
            self.lengths.iter().map(|length| BytesMut::with_capacity(*length)).collect();
        let mut parts = Vec::with_capacity(self.parts);
        for part in 0..self.parts {
            let segments = segments(&self.lengths, part).map(|(frame, range)| {
                let after = rest[frame].split_off(range.len());
                let bytes = std::mem::replace(&mut rest[frame], after);
                Segment { frame, range, bytes }
            });
            parts.push(Part::Awaited(segments.collect()));
        }
        Ok(Mutex::new(Bodies { room: Some(room), missing: parts.len(), parts }))
    }

    /// Stores a complete part; returns the bodies once all parts are complete.
    fn put(&self, part: usize, segments: Vec<Segment>) -> Result<Option<Whole>, ReadFailure> {
        let bodies = self.bodies.get().ok_or(ReadFailure::Lost)?;
        let mut bodies = bodies.lock().unwrap_or_else(PoisonError::into_inner);
        bodies.parts[part] = Part::Complete(segments);
        bodies.missing -= 1;
        if bodies.missing > 0 {
            return Ok(None);
        }
        let mut whole: Vec<BytesMut> = self.lengths.iter().map(|_| BytesMut::new()).collect();
        for part in std::mem::take(&mut bodies.parts) {
            let Part::Complete(segments) = part else { return Err(ReadFailure::Lost) };
            for segment in segments {
                // The segments are adjacent, so this only joins the handles.
                whole[segment.frame].unsplit(segment.bytes);
            }
        }
        let room = bodies.room.take().ok_or(ReadFailure::Lost)?;
        Ok(Some((whole.into_iter().map(BytesMut::freeze).collect(), room)))
    }

    fn received(&self, prefix: Prefix, (bodies, room): Whole) -> Result<Received, ReadFailure> {
        let (tag, headers) = prefix.split(&self.head)?;
        let frames = headers.into_iter().zip(bodies).map(|(header, body)| Frame::new(header, body));
        let frames = frames.collect::<Result<Vec<_>, _>>()?;
        let heads = self.parts * (PREFIX + self.head.len());
        let bytes = heads + self.lengths.iter().sum::<usize>();
        Ok(Received { tag, frames, bytes, room })
    }
}

async fn exact(stream: &mut RecvStream, buffer: &mut [u8]) -> Result<(), ReadFailure> {
    match stream.read_exact(buffer).await {
        Ok(()) => Ok(()),
        Err(ReadExactError::FinishedEarly(_)) => Err(Violation::TensorCutShort.into()),
        Err(ReadExactError::ReadError(_)) => Err(ReadFailure::Lost),
    }
}

async fn body(
    stream: &mut RecvStream,
    segment: &mut Segment,
    arrived: impl Fn(usize),
) -> Result<(), ReadFailure> {
    let length = segment.range.len();
    let mut stream = stream.take(length as u64);
    while segment.bytes.len() < length {
        match stream.read_buf(&mut segment.bytes).await {
            Ok(0) => return Err(Violation::TensorCutShort.into()),
            Ok(bytes) => arrived(bytes),
            Err(_) => return Err(ReadFailure::Lost),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_message_that_is_silent_for_long_is_given_up_and_a_slow_one_is_not() {
        const LOOKS: u32 = 3;
        let reassembly = Reassembly::new();
        let begun = || async {
            let message = Arc::new(Message::new(vec![1], vec![100], 1));
            let room = message.bodies(&reassembly.room).await.expect("there is room");
            assert!(message.bodies.set(room).is_ok());
            message
        };
        let message = begun().await;
        reassembly.lock().insert(1, message.clone());
        // It waits for room: the sender cannot help that.
        let waiting = Arc::new(Message::new(vec![1], vec![100], 1));
        reassembly.lock().insert(2, waiting);
        let looks =
            |is_member| (0..LOOKS).filter_map(|_| reassembly.look(LOOKS, is_member)).count();
        assert_eq!(looks(true), 0, "it has just begun");
        assert_eq!(reassembly.look(LOOKS, true), Some(Violation::TensorSilent));
        message.moved.store(true, Ordering::Relaxed);
        assert_eq!(looks(false), 0);
        // Others of the same member arrive over a slow link meanwhile.
        for _ in 0..3 * LOOKS {
            reassembly.arrived.fetch_add(1, Ordering::Relaxed);
            assert_eq!(reassembly.look(LOOKS, true), None);
        }
        reassembly.arrived.fetch_add(1, Ordering::Relaxed);
        let stranger = (0..LOOKS).filter_map(|_| {
            reassembly.arrived.fetch_add(1, Ordering::Relaxed);
            reassembly.look(LOOKS, false)
        });
        assert!(stranger.count() > 0, "a stranger's other messages are no excuse");
    }
}
