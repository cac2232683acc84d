//! The encoding of a message with tensors, in parts that have a stream each.
//!
//! The window of a stream is small ([`super::endpoint`]) and limits its throughput per round trip,
//! so a large message uses several streams at once. A part begins with the length of the tag (u16),
//! the number of tensors (u8), a zero byte, the index of the part (u32), and the number of the
//! message on its connection (u64), all little-endian. Then follow the tag, the tensors' headers,
//! and the part's share of their bodies. Every part but the last has [`PART`] bytes of bodies. All
//! lengths are known before any body is read, from whichever part arrives first.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use quinn::{SendStream, StoppedError, WriteError};

use super::error::Violation;
use super::send_queue::MessageNumber;
use crate::frame::{Frame, HEADER, Header};

/// Maximum bytes of a tag.
pub(super) const TAG: usize = 4 << 10;

/// Maximum number of tensors in a message.
pub(super) const FRAMES: usize = 4;

/// Bytes of a [`Prefix`].
pub(super) const PREFIX: usize = 16;

/// Bytes of bodies in a part. A whole part fits into a stream's window, so it never waits for the
/// window.
pub(super) const PART: usize = 2 << 20;

/// The first bytes of a part, which give the length of its head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Prefix {
    tag: usize,
    frames: usize,
    pub(super) part: u32,
    pub(super) message: MessageNumber,
}

impl Prefix {
    pub(super) fn decode(bytes: [u8; PREFIX]) -> Result<Self, Violation> {
        let [low, high, frames, zero, a, b, c, d, message @ ..] = bytes;
        let tag = usize::from(u16::from_le_bytes([low, high]));
        let frames = usize::from(frames);
        if tag > TAG || !(1..=FRAMES).contains(&frames) || zero != 0 {
            return Err(Violation::TensorHeader { tag, frames });
        }
        let part = u32::from_le_bytes([a, b, c, d]);
        Ok(Self { tag, frames, part, message: MessageNumber::from_le_bytes(message) })
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

/// The number of parts of a message whose bodies have these lengths.
pub(super) fn parts(lengths: &[usize]) -> usize {
    lengths.iter().sum::<usize>().div_ceil(PART).max(1)
}

/// The segments of bodies in a part: index of the body, and range of its bytes.
pub(super) fn segments(
    lengths: &[usize],
    part: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
    let (begin, end) = (part * PART, (part + 1) * PART);
    let mut before = 0;
    lengths.iter().enumerate().filter_map(move |(frame, length)| {
        let first = before;
        before += length;
        let range = begin.clamp(first, before) - first..end.clamp(first, before) - first;
        (!range.is_empty()).then_some((frame, range))
    })
}

/// Encodes a part as chunks to write; bodies are not copied.
pub(super) fn encode(
    message: MessageNumber,
    part: usize,
    tag: &[u8],
    frames: &[Frame],
) -> Vec<Bytes> {
    let mut head = BytesMut::with_capacity(PREFIX + tag.len() + frames.len() * HEADER);
    let length = u16::try_from(tag.len()).expect("a tag is checked when it is queued");
    head.extend_from_slice(&length.to_le_bytes());
    head.extend_from_slice(&[frames.len() as u8, 0]);
    head.extend_from_slice(&(part as u32).to_le_bytes());
    head.extend_from_slice(&message.to_le_bytes());
    head.extend_from_slice(tag);
    for frame in frames {
        head.extend_from_slice(&frame.header().encode());
    }
    let lengths: Vec<usize> = frames.iter().map(|frame| frame.body().len()).collect();
    let bodies = segments(&lengths, part).map(|(frame, range)| frames[frame].body().slice(range));
    std::iter::once(head.freeze()).chain(bodies).collect()
}

/// Writes a part, and waits until the peer's machine has all of it; returns its bytes.
pub(super) async fn write(
    stream: &mut SendStream,
    mut pieces: Vec<Bytes>,
) -> Result<usize, WriteError> {
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

/// Whether a failed write means that the connection is lost, rather than that the peer stopped this
/// message.
pub(super) fn is_lost(error: &WriteError) -> bool {
    !matches!(error, WriteError::Stopped(_))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_byte_is_in_one_part(
            lengths in prop::collection::vec(0usize..3 * PART, 1..=FRAMES),
        ) {
            let mut covered = vec![0; lengths.len()];
            let count = parts(&lengths);
            for part in 0..count {
                let mut bytes = 0;
                for (frame, range) in segments(&lengths, part) {
                    prop_assert_eq!(range.start, covered[frame], "in order, without gaps");
                    covered[frame] = range.end;
                    bytes += range.len();
                }
                prop_assert!(bytes == PART || part + 1 == count);
            }
            prop_assert_eq!(covered, lengths);
        }
    }
}
