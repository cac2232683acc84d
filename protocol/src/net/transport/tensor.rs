//! A message with tensors: one stream of its own, then gone.
//!
//! Bytes of the tag (u16, little-endian), number of tensors (u8), a zero, the tag, the tensors'
//! headers, their bodies. All lengths are known before any body is read, so room for the whole
//! message is taken at once and no two messages wait for each other half-way.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use quinn::{ReadExactError, RecvStream, SendStream, StoppedError, WriteError};
use tokio::io::AsyncReadExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::Violation;
use super::outbox::{SMALLEST, TensorJob};
use crate::frame::{Frame, HEADER, Header};
use crate::limits;

/// Bytes of a tag.
pub(super) const TAG: usize = 4 << 10;

/// Tensors of one message.
pub(super) const FRAMES: usize = 4;

/// Bytes of a [`Prefix`].
pub(super) const PREFIX: usize = 4;

/// Why no tensors were read.
#[derive(Debug)]
pub(super) enum ReadFailure {
    /// The sender's fault.
    Violation(Violation),
    /// The sender gave the message up, or the connection broke.
    Lost,
}

impl<V: Into<Violation>> From<V> for ReadFailure {
    fn from(violation: V) -> Self {
        Self::Violation(violation.into())
    }
}

/// A message as it was read.
pub(super) struct Received {
    pub(super) tag: Vec<u8>,
    pub(super) frames: Vec<Frame>,
    pub(super) bytes: usize,
    pub(super) room: OwnedSemaphorePermit,
}

/// The first bytes of a message, which say how long its head is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prefix {
    tag: usize,
    frames: usize,
}

impl Prefix {
    pub(super) fn decode([low, high, frames, zero]: [u8; PREFIX]) -> Result<Self, Violation> {
        let tag = usize::from(u16::from_le_bytes([low, high]));
        let frames = usize::from(frames);
        if tag > TAG || !(1..=FRAMES).contains(&frames) || zero != 0 {
            return Err(Violation::TensorHeader { tag, frames });
        }
        Ok(Self { tag, frames })
    }

    /// Bytes of tag and headers together.
    pub(super) fn head(self) -> usize {
        self.tag + self.frames * HEADER
    }

    /// The tag and the headers in a head.
    pub(super) fn split(self, head: &[u8]) -> Result<(Vec<u8>, Vec<Header>), Violation> {
        let (tag, headers) = head.split_at(self.tag);
        let headers = headers.as_chunks::<HEADER>().0.iter().map(Header::decode);
        Ok((tag.to_vec(), headers.collect::<Result<_, _>>()?))
    }
}

/// The message as pieces to write; bodies are not copied.
pub(super) fn encode(tag: &[u8], frames: &[Frame]) -> Vec<Bytes> {
    let mut head = BytesMut::with_capacity(PREFIX + tag.len() + frames.len() * HEADER);
    let length = u16::try_from(tag.len()).expect("a tag is checked when it is queued");
    head.extend_from_slice(&length.to_le_bytes());
    head.extend_from_slice(&[frames.len() as u8, 0]);
    head.extend_from_slice(tag);
    for frame in frames {
        head.extend_from_slice(&frame.header().encode());
    }
    let bodies = frames.iter().map(|frame| frame.body().clone());
    std::iter::once(head.freeze()).chain(bodies).collect()
}

/// Writes a message and waits until the peer's machine has all of it; gives its bytes.
pub(super) async fn write(stream: &mut SendStream, job: &TensorJob) -> Result<usize, WriteError> {
    let mut pieces = encode(&job.tag, &job.frames);
    let bytes = pieces.iter().map(Bytes::len).sum();
    stream.write_all_chunks(&mut pieces).await?;
    stream.finish().map_err(|_| WriteError::ClosedStream)?;
    match stream.stopped().await {
        Ok(None) => Ok(bytes),
        Ok(Some(code)) => Err(WriteError::Stopped(code)),
        Err(StoppedError::ConnectionLost(error)) => Err(WriteError::ConnectionLost(error)),
        Err(StoppedError::ZeroRttRejected) => Err(WriteError::ZeroRttRejected),
    }
}

/// Reads a message. Its bodies are read only once there is room for all of them, which goes back
/// when the result is dropped; a message larger than all the room takes all of it.
pub(super) async fn read(
    stream: &mut RecvStream,
    room: Arc<Semaphore>,
) -> Result<Received, ReadFailure> {
    let mut prefix = [0; PREFIX];
    exact(stream, &mut prefix).await?;
    let prefix = Prefix::decode(prefix)?;
    let mut head = vec![0; prefix.head()];
    exact(stream, &mut head).await?;
    let (tag, headers) = prefix.split(&head)?;

    let bytes = prefix.head() + headers.iter().map(Header::packed_length).sum::<usize>();
    let needed = bytes.clamp(SMALLEST, limits::RECEIVE_ROOM.0 as usize) as u32;
    let room = room.acquire_many_owned(needed).await.map_err(|_| ReadFailure::Lost)?;
    let mut frames = Vec::with_capacity(headers.len());
    for header in headers {
        let body = body(stream, header.packed_length()).await?;
        frames.push(Frame::new(header, body)?);
    }
    match stream.read(&mut [0]).await {
        Ok(None) => {}
        Ok(Some(_)) => return Err(Violation::TensorTrailing.into()),
        Err(_) => return Err(ReadFailure::Lost),
    }
    let bytes = PREFIX + tag.len() + frames.iter().map(Frame::wire_length).sum::<usize>();
    Ok(Received { tag, frames, bytes, room })
}

async fn exact(stream: &mut RecvStream, buffer: &mut [u8]) -> Result<(), ReadFailure> {
    match stream.read_exact(buffer).await {
        Ok(()) => Ok(()),
        Err(ReadExactError::FinishedEarly(_)) => Err(Violation::TensorCutShort.into()),
        Err(ReadExactError::ReadError(_)) => Err(ReadFailure::Lost),
    }
}

async fn body(stream: &mut RecvStream, length: usize) -> Result<Bytes, ReadFailure> {
    // Reserves addresses; memory is taken as bytes arrive.
    let mut body = BytesMut::with_capacity(length);
    let mut stream = stream.take(length as u64);
    while body.len() < length {
        match stream.read_buf(&mut body).await {
            Ok(0) => return Err(Violation::TensorCutShort.into()),
            Ok(_) => {}
            Err(_) => return Err(ReadFailure::Lost),
        }
    }
    Ok(body.freeze())
}

/// Whether a failed write means that the connection is gone, rather than this one message refused.
pub(super) fn is_lost(error: &WriteError) -> bool {
    !matches!(error, WriteError::Stopped(_))
}
