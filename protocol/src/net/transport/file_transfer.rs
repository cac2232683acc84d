//! Files by their hash, a piece per request.
//!
//! A request is a stream of its own ([`super::request`]): the hash, the position and the length of a piece (u64 and
//! u32, little-endian). The answer is the length of the whole file (u64; all ones when there is no
//! such file), then the piece ([`super::piece`]). A length of all ones asks for the hashes of all pieces
//! instead, which come as they are.

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
use super::progress::while_moving;
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

/// What is wanted of a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) hash: ContentHash,
    pub(super) position: u64,
    /// Or [`HASHES`].
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

/// An answer of which the peer has taken nothing for so long is given up.
const STALL: Duration = Duration::from_secs(20);

/// Files whose pieces' hashes are remembered.
const LISTS: usize = 64;

/// A file that can be given to others.
#[derive(Debug)]
pub struct OpenFile {
    /// Open for reading.
    pub file: File,
    /// Its bytes.
    pub length: u64,
}

/// Where the files are that others may fetch. It is asked on a thread that may block.
pub trait FileSource: Send + Sync + 'static {
    /// The file of this hash; `None` when there is none.
    fn open(&self, hash: &ContentHash) -> Option<OpenFile>;
}

/// The hashes of the pieces of files that were asked for lately.
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

/// Gives nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoFiles;

impl FileSource for NoFiles {
    fn open(&self, _hash: &ContentHash) -> Option<OpenFile> {
        None
    }
}

/// Whose files are served, and how.
pub(super) struct Service<'a> {
    pub(super) source: &'a Arc<dyn FileSource>,
    pub(super) lists: &'a Arc<PieceLists>,
    pub(super) packer: &'a Arc<PiecePacker>,
    pub(super) counters: &'a Counters,
    pub(super) upload_limit: &'a UploadLimit,
    /// Who asks.
    pub(super) peer: &'a Peer,
    pub(super) connection: &'a Connection,
}

/// What there is to say of a file: its length, and pieces of an answer after that.
type Found = Option<(u64, Vec<Bytes>)>;

impl Service<'_> {
    /// Answers one request. A malformed one is dropped: who sent it gets no answer.
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
            // Who only asks whether we are there waits for nothing.
            0 => {
                let known = find(hash, move || Some(Ok((source.open(&hash)?.length, ())))).await;
                self.answer(send, known.map(|(whole, ())| (whole, Vec::new()))).await;
            }
            _ if u64::from(length) > limits::BLOB_PIECE.0 => {}
            _ => {
                let stopped = send.stopped();
                let piece = self.give_piece(send, hash, position, length);
                tokio::select! {
                    // What is on its way sees by itself when nobody listens, and counts it.
                    biased;
                    () = self.upload_limit.give(self.peer.id, piece) => {}
                    // Who listens no more waits for no turn.
                    _ = stopped => {}
                }
            }
        }
    }

    /// Gives the bytes of it that arrived, as [`Self::answer`].
    async fn give_piece(
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

    /// Sends what is found of a file, and waits until it has arrived; gives the bytes that did, which are none
    /// where the peer listens no more, or takes nothing for long.
    async fn answer(&self, mut send: SendStream, found: Found) -> usize {
        let (whole, bytes) = found.unwrap_or((NOT_FOUND, Vec::new()));
        let class = if bytes.is_empty() { Class::Control } else { Class::Chunk };
        let mut answer = vec![Bytes::copy_from_slice(&whole.to_le_bytes())];
        answer.extend(bytes);
        let length = answer.iter().map(Bytes::len).sum();
        class.put(&send, 0);
        let taken = ReadProgress::new(self.connection);
        self.peer.file_rate().began(Instant::now());
        let arrived = while_moving(STALL, || taken.now(), taken.all(&mut send, &mut answer)).await;
        if arrived.is_none() {
            // Fails only where the peer was quicker.
            let _ = send.reset(VarInt::from_u32(0));
        }
        let arrived = if arrived == Some(true) { length } else { 0 };
        self.counters.sent(Kind::File, taken.written());
        self.peer.file_rate().ended(Instant::now(), arrived, self.connection.rtt());
        arrived
    }
}

/// Looks for something of a file on a thread that may wait for the disk.
async fn find<T: Send + 'static>(
    hash: ContentHash,
    look: impl FnOnce() -> Option<io::Result<(u64, T)>> + Send + 'static,
) -> Option<(u64, T)> {
    match tokio::task::spawn_blocking(look).await.ok().flatten()? {
        Ok(found) => Some(found),
        Err(error) => {
            tracing::warn!(%hash, %error, "cannot read a file that a peer asked for");
            None
        }
    }
}

/// A piece of a file, after the file's length.
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

/// The hashes of a file's pieces, after the file's length.
fn list_of(
    source: &dyn FileSource,
    lists: &PieceLists,
    hash: ContentHash,
) -> Option<io::Result<(u64, Arc<[u8]>)>> {
    let file = source.open(&hash).filter(|file| file.length <= limits::BLOB.0)?;
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

/// Bytes that were heard of a holder, over all that it is asked for at once: it answers in an order of its own.
#[derive(Debug, Default)]
pub(super) struct Heard(AtomicU64);

impl Heard {
    pub(super) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Reads as many bytes as there is room for.
    async fn read(&self, recv: &mut RecvStream, mut room: &mut [u8]) -> Result<(), FetchError> {
        while !room.is_empty() {
            match recv.read(room).await.map_err(interrupted)? {
                Some(read) => {
                    self.0.fetch_add(read as u64, Ordering::Relaxed);
                    room = &mut room[read..];
                }
                None => return Err(interrupted("the answer was cut short")),
            }
        }
        Ok(())
    }
}

/// Asks what the pieces of a file of `length` bytes hash to. What is said is not checked.
pub(super) async fn fetch_hashes(
    connection: &Connection,
    hash: ContentHash,
    length: u64,
    counters: &Counters,
    heard: &Heard,
) -> Result<Vec<[u8; HASH]>, FetchError> {
    let bytes = pieces(length) as usize * HASH;
    let request = Request { hash, position: 0, length: HASHES };
    let mut recv = ask(connection, request, length, heard).await?;
    let mut list = vec![0; bytes];
    heard.read(&mut recv, &mut list).await?;
    counters.received(Kind::File, 8 + bytes);
    Ok(list.as_chunks::<HASH>().0.to_vec())
}

/// Asks for a file that nobody has: whoever answers is there.
pub(super) async fn probe(connection: &Connection) -> Result<(), FetchError> {
    match fetch_length(connection, ContentHash([0; 32]), &Heard::default()).await {
        Ok(_) | Err(FetchError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Asks for a piece of a file. Nothing of it is checked, but that there is no more.
pub(super) async fn fetch_piece(
    connection: &Connection,
    Part { hash, length, position, size }: Part,
    counters: &Counters,
    heard: &Heard,
) -> Result<Piece, FetchError> {
    let request = Request { hash, position, length: size as u32 };
    let mut recv = ask(connection, request, length, heard).await?;
    if size == 0 {
        // Of nothing only the length is said.
        counters.received(Kind::File, 8);
        return Ok(Piece::empty());
    }
    let mut head = [0; HEAD];
    heard.read(&mut recv, &mut head).await?;
    let head = Head::decode(head, size).ok_or(FetchError::WrongHash { expected: hash })?;
    let mut bytes = vec![0; head.length()];
    heard.read(&mut recv, &mut bytes).await?;
    counters.received(Kind::File, 8 + HEAD + bytes.len());
    Ok(Piece::received(head, bytes))
}

/// Which bytes of which file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) hash: ContentHash,
    /// Bytes of the file.
    pub(super) length: u64,
    pub(super) position: u64,
    /// How many bytes.
    pub(super) size: usize,
}

/// Sends a request and reads of the answer that it is about a file of `length` bytes.
async fn ask(
    connection: &Connection,
    request: Request,
    length: u64,
    heard: &Heard,
) -> Result<RecvStream, FetchError> {
    let (recv, found) = begin(connection, request, heard).await?;
    if found == length { Ok(recv) } else { Err(FetchError::Size { expected: length, found }) }
}

/// Asks how many bytes a file has. What is said is not checked.
pub(super) async fn fetch_length(
    connection: &Connection,
    hash: ContentHash,
    heard: &Heard,
) -> Result<u64, FetchError> {
    let request = Request { hash, position: 0, length: 0 };
    begin(connection, request, heard).await.map(|(_, length)| length)
}

/// Sends a request and reads the file's length, with which the answer begins.
async fn begin(
    connection: &Connection,
    request: Request,
    heard: &Heard,
) -> Result<(RecvStream, u64), FetchError> {
    let (mut send, mut recv) = connection.open_bi().await.map_err(interrupted)?;
    // A few bytes, which must not wait for what is given the other way.
    Class::Control.put(&send, 0);
    send.write_all(&RequestKind::File.before(&request.encode())).await.map_err(interrupted)?;
    send.finish().map_err(interrupted)?;
    let mut whole = [0; 8];
    heard.read(&mut recv, &mut whole).await?;
    match u64::from_le_bytes(whole) {
        NOT_FOUND => Err(FetchError::NotFound { hash: request.hash }),
        length => Ok((recv, length)),
    }
}

fn interrupted(error: impl std::fmt::Display) -> FetchError {
    FetchError::Interrupted(error.to_string())
}
