//! Transfer of files by their hash, one piece per request. [`super::file_server`] answers.
//!
//! A request is a stream of its own ([`super::request`]): the hash, then position and length of a
//! piece (u64 and u32, little-endian). The answer is the length of the whole file (u64; all ones if
//! there is no such file), then the piece ([`super::file_piece`]). A length of all ones requests
//! the hashes of all pieces instead, which are sent unpacked.

use std::sync::atomic::{AtomicU64, Ordering};

use quinn::{Connection, RecvStream};

use super::class::Class;
use super::error::FetchError;
use super::file_piece::{HEAD, Head, Piece};
use super::request::Kind as RequestKind;
use super::traffic::{Counters, Kind};
use crate::ids::ContentHash;
use crate::pieces::{HASH, pieces};

/// Bytes of a [`Request`].
pub(super) const REQUEST: usize = 32 + 8 + 4;
/// The length of a file that does not exist.
pub(super) const NOT_FOUND: u64 = u64::MAX;
/// The length that requests the hashes of all pieces.
pub(super) const HASHES: u32 = u32::MAX;

/// A request for a part of a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) hash: ContentHash,
    pub(super) position: u64,
    /// Length in bytes, or [`HASHES`].
    pub(super) length: u32,
}

impl Request {
    pub(super) fn encode(self) -> [u8; REQUEST] {
        let mut bytes = [0; REQUEST];
        let (hash, rest) = bytes.split_first_chunk_mut::<32>().expect("its length is larger");
        let (position, length) = rest.split_first_chunk_mut::<8>().expect("its length is larger");
        *hash = self.hash.0;
        *position = self.position.to_le_bytes();
        length.copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; REQUEST]) -> Self {
        let (hash, rest) = bytes.split_first_chunk::<32>().expect("its length is larger");
        let (position, length) = rest.split_first_chunk::<8>().expect("its length is larger");
        Self {
            hash: ContentHash(*hash),
            position: u64::from_le_bytes(*position),
            length: u32::from_le_bytes(length.try_into().expect("four are left")),
        }
    }
}

/// Bytes received from a holder over all simultaneous requests, which it answers in its own order.
#[derive(Debug, Default)]
pub(super) struct FetchProgress(AtomicU64);

impl FetchProgress {
    pub(super) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Fills the buffer.
    async fn read(&self, recv: &mut RecvStream, mut room: &mut [u8]) -> Result<(), FetchError> {
        while !room.is_empty() {
            match recv.read(room).await.map_err(interrupted)? {
                Some(read) => {
                    self.0.fetch_add(read as u64, Ordering::Relaxed);
                    room = &mut room[read..];
                }
                None => return Err(interrupted("the answer was truncated")),
            }
        }
        Ok(())
    }
}

/// Requests the hashes of the pieces of a file of `length` bytes. The answer is not checked.
pub(super) async fn fetch_hashes(
    connection: &Connection,
    hash: ContentHash,
    length: u64,
    counters: &Counters,
    progress: &FetchProgress,
) -> Result<Vec<[u8; HASH]>, FetchError> {
    let bytes = pieces(length) as usize * HASH;
    let request = Request { hash, position: 0, length: HASHES };
    let mut recv = ask(connection, request, length, progress).await?;
    let mut list = vec![0; bytes];
    progress.read(&mut recv, &mut list).await?;
    counters.received(Kind::File, 8 + bytes);
    Ok(list.as_chunks::<HASH>().0.to_vec())
}

/// Requests a file that no peer has: any answer proves that the peer's process runs.
pub(super) async fn probe(connection: &Connection) -> Result<(), FetchError> {
    match fetch_length(connection, ContentHash([0; 32]), &FetchProgress::default()).await {
        Ok(_) | Err(FetchError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Requests a piece of a file. Only the length of the answer is checked.
pub(super) async fn fetch_piece(
    connection: &Connection,
    Part { hash, length, position, size }: Part,
    counters: &Counters,
    progress: &FetchProgress,
) -> Result<Piece, FetchError> {
    let request = Request { hash, position, length: size as u32 };
    let mut recv = ask(connection, request, length, progress).await?;
    if size == 0 {
        // An empty piece has no head: the answer is only the file's length.
        counters.received(Kind::File, 8);
        return Ok(Piece::empty());
    }
    let mut head = [0; HEAD];
    progress.read(&mut recv, &mut head).await?;
    let head = Head::decode(head, size).ok_or(FetchError::WrongHash { expected: hash })?;
    let mut bytes = vec![0; head.length()];
    progress.read(&mut recv, &mut bytes).await?;
    counters.received(Kind::File, 8 + HEAD + bytes.len());
    Ok(Piece::received(head, bytes))
}

/// A range of bytes of a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) hash: ContentHash,
    /// Length of the whole file in bytes.
    pub(super) length: u64,
    pub(super) position: u64,
    /// Length of the part in bytes.
    pub(super) size: usize,
}

/// Sends a request, and checks that the answer is about a file of `length` bytes.
async fn ask(
    connection: &Connection,
    request: Request,
    length: u64,
    progress: &FetchProgress,
) -> Result<RecvStream, FetchError> {
    let (recv, found) = begin(connection, request, progress).await?;
    if found == length { Ok(recv) } else { Err(FetchError::Size { expected: length, found }) }
}

/// Requests the length of a file in bytes. The answer is not checked.
pub(super) async fn fetch_length(
    connection: &Connection,
    hash: ContentHash,
    progress: &FetchProgress,
) -> Result<u64, FetchError> {
    let request = Request { hash, position: 0, length: 0 };
    begin(connection, request, progress).await.map(|(_, length)| length)
}

/// Sends a request, and reads the file's length at the start of the answer.
async fn begin(
    connection: &Connection,
    request: Request,
    progress: &FetchProgress,
) -> Result<(RecvStream, u64), FetchError> {
    let (mut send, mut recv) = connection.open_bi().await.map_err(interrupted)?;
    // A request is small, and must not wait for data in the same direction.
    Class::Control.prioritize(&send, 0);
    send.write_all(&RequestKind::File.encode(&request.encode())).await.map_err(interrupted)?;
    send.finish().map_err(interrupted)?;
    let mut whole = [0; 8];
    progress.read(&mut recv, &mut whole).await?;
    match u64::from_le_bytes(whole) {
        NOT_FOUND => Err(FetchError::NotFound { hash: request.hash }),
        length => Ok((recv, length)),
    }
}

fn interrupted(error: impl std::fmt::Display) -> FetchError {
    FetchError::Interrupted(error.to_string())
}
