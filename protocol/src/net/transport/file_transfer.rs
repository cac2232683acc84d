//! Transfer of files by their hash, one piece per request.
//!
//! A request is a stream of its own ([`super::request`]): the hash, then position and length of a
//! piece (u64 and u32, little-endian). The answer is the length of the whole file (u64; all ones if
//! there is no such file), then the piece ([`super::file_piece`]). A length of all ones requests
//! the hashes of all pieces instead, which are sent unpacked.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use quinn::{Connection, RecvStream, SendStream, VarInt};

use super::class::Class;
use super::error::FetchError;
use super::file_piece::{HEAD, Head, Piece, PiecePacker};
use super::peer::Peer;
use super::progress::with_progress_timeout;
use super::read_progress::ReadProgress;
use super::request::Kind as RequestKind;
use super::traffic::{Counters, Kind};
use super::upload_limit::UploadLimit;
use crate::ids::ContentHash;
use crate::limits;
use crate::pieces::{HASH, piece_at, piece_hash, pieces};

/// Bytes of a [`Request`].
pub(super) const REQUEST: usize = 32 + 8 + 4;
const NOT_FOUND: u64 = u64::MAX;
const HASHES: u32 = u32::MAX;

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

/// An answer is aborted if the peer receives no byte of it for this long.
const STALL: Duration = Duration::from_secs(20);

/// Number of files whose piece hashes are cached.
const LISTS: usize = 64;

/// A file that other peers may fetch.
#[derive(Debug)]
pub struct OpenFile {
    /// Open for reading.
    pub file: File,
    /// Length in bytes.
    pub length: u64,
}

/// The files that other peers may fetch. Called on a thread that may block.
pub trait FileSource: Send + Sync + 'static {
    /// The file of this hash; `None` if there is none.
    fn open(&self, hash: &ContentHash) -> Option<OpenFile>;
}

/// The piece hashes of recently requested files.
#[derive(Debug, Default)]
pub(super) struct PieceLists(Mutex<VecDeque<(ContentHash, Arc<[u8]>)>>);

impl PieceLists {
    fn known(&self, hash: ContentHash) -> Option<Arc<[u8]>> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter().find(|(of, _)| *of == hash).map(|(_, list)| list.clone())
    }

    fn keep(&self, hash: ContentHash, list: Arc<[u8]>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.truncate(LISTS - 1);
        known.push_front((hash, list));
    }
}

/// A source without files.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoFiles;

impl FileSource for NoFiles {
    fn open(&self, _hash: &ContentHash) -> Option<OpenFile> {
        None
    }
}

/// Serves the file requests of one peer.
pub(super) struct Service<'a> {
    pub(super) source: &'a Arc<dyn FileSource>,
    pub(super) lists: &'a Arc<PieceLists>,
    pub(super) packer: &'a Arc<PiecePacker>,
    pub(super) counters: &'a Counters,
    pub(super) upload_limit: &'a UploadLimit,
    /// The requesting peer.
    pub(super) peer: &'a Peer,
    pub(super) connection: &'a Connection,
}

/// The length of a file, and the parts of an answer that follow it.
type Found = Option<(u64, Vec<Bytes>)>;

impl Service<'_> {
    /// Answers one request. A malformed request gets no answer.
    pub(super) async fn serve(&self, send: SendStream, mut recv: RecvStream) {
        let mut request = [0; REQUEST];
        if recv.read_exact(&mut request).await.is_err() {
            return;
        }
        let Request { hash, position, length } = Request::decode(&request);
        let (source, lists) = (self.source.clone(), self.lists.clone());
        match length {
            HASHES => {
                let list = find(hash, move || list_of(&*source, &lists, hash)).await;
                let found = list.map(|(whole, list)| (whole, vec![Bytes::from_owner(list)]));
                self.answer(send, found).await;
            }
            // A request for the length alone does not wait for upload capacity.
            0 => {
                let known = find(hash, move || Some(Ok((source.open(&hash)?.length, ())))).await;
                self.answer(send, known.map(|(whole, ())| (whole, Vec::new()))).await;
            }
            _ if u64::from(length) > limits::FILE_PIECE.0 => {}
            _ => {
                let stopped = send.stopped();
                let piece = self.send_piece(send, hash, position, length);
                tokio::select! {
                    // A transfer in progress notices by itself that the peer stopped it, and counts
                    // it.
                    biased;
                    () = self.upload_limit.serve(self.peer.id, piece) => {}
                    // A stopped request does not wait for its turn.
                    _ = stopped => {}
                }
            }
        }
    }

    /// Sends a piece; returns the number of bytes that arrived, like [`Self::answer`].
    async fn send_piece(
        &self,
        send: SendStream,
        hash: ContentHash,
        position: u64,
        length: u32,
    ) -> usize {
        let (source, packer) = (self.source.clone(), self.packer.clone());
        let measured = self.peer.file_rate().rate();
        let rate = self.peer.link_rate(measured);
        let found = find(hash, move || {
            let piece = piece_of(&*source, hash, position, length)?;
            Some(piece.map(|(whole, raw)| (whole, packer.pack(raw.into(), rate))))
        });
        let found = found.await.map(|(whole, piece)| {
            self.counters.piece(piece.packing);
            (whole, vec![Bytes::copy_from_slice(&piece.head().encode()), piece.bytes])
        });
        self.answer(send, found).await
    }

    /// Sends the answer, and waits until it has arrived. Returns the number of bytes that arrived:
    /// 0 if the peer stopped the stream, or received nothing for long.
    async fn answer(&self, mut send: SendStream, found: Found) -> usize {
        let (whole, bytes) = found.unwrap_or((NOT_FOUND, Vec::new()));
        let class = if bytes.is_empty() { Class::Control } else { Class::Chunk };
        let mut answer = vec![Bytes::copy_from_slice(&whole.to_le_bytes())];
        answer.extend(bytes);
        let length = answer.iter().map(Bytes::len).sum();
        class.prioritize(&send, 0);
        let taken = ReadProgress::new(self.connection);
        self.peer.file_rate().began(Instant::now());
        let arrived =
            with_progress_timeout(STALL, || taken.now(), taken.all(&mut send, &mut answer)).await;
        if arrived.is_none() {
            // Fails only if the peer stopped the stream first.
            let _ = send.reset(VarInt::from_u32(0));
        }
        let arrived = if arrived == Some(true) { length } else { 0 };
        self.counters.sent(Kind::File, taken.written());
        self.peer.file_rate().ended(Instant::now(), arrived, self.connection.rtt());
        arrived
    }
}

/// Reads from a file on a thread that may block.
async fn find<T: Send + 'static>(
    hash: ContentHash,
    read: impl FnOnce() -> Option<io::Result<(u64, T)>> + Send + 'static,
) -> Option<(u64, T)> {
    match tokio::task::spawn_blocking(read).await.ok().flatten()? {
        Ok(found) => Some(found),
        Err(error) => {
            tracing::warn!(%hash, %error, "cannot read a file that a peer asked for");
            None
        }
    }
}

/// The length of a file, and a piece of it.
pub(super) fn piece_of(
    source: &dyn FileSource,
    hash: ContentHash,
    position: u64,
    length: u32,
) -> Option<io::Result<(u64, Vec<u8>)>> {
    let file = source.open(&hash)?;
    let end = position.saturating_add(u64::from(length)).min(file.length);
    let mut piece = vec![0; end.saturating_sub(position) as usize];
    Some(file.file.read_exact_at(&mut piece, position).map(|()| (file.length, piece)))
}

/// The length of a file, and the hashes of its pieces.
fn list_of(
    source: &dyn FileSource,
    lists: &PieceLists,
    hash: ContentHash,
) -> Option<io::Result<(u64, Arc<[u8]>)>> {
    let file = source.open(&hash).filter(|file| file.length <= limits::FILE.0)?;
    if let Some(list) = lists.known(hash) {
        return Some(Ok((file.length, list)));
    }
    let mut list = Vec::with_capacity(pieces(file.length) as usize * HASH);
    for index in 0..pieces(file.length) {
        let (position, size) = piece_at(file.length, index);
        let mut piece = vec![0; size];
        if let Err(error) = file.file.read_exact_at(&mut piece, position) {
            return Some(Err(error));
        }
        list.extend(piece_hash(file.length, index, &piece));
    }
    let list: Arc<[u8]> = list.into();
    lists.keep(hash, list.clone());
    Some(Ok((file.length, list)))
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
