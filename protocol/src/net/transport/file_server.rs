//! Serves the file requests of other peers ([`super::file_transfer`]).

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use quinn::{Connection, RecvStream, SendStream, VarInt};

use super::class::Class;
use super::file_piece::PiecePacker;
use super::file_transfer::{HASHES, NOT_FOUND, REQUEST, Request};
use super::peer::Peer;
use super::progress::with_progress_timeout;
use super::read_progress::ReadProgress;
use super::traffic::{Counters, Kind};
use super::upload_limit::UploadLimit;
use crate::ids::ContentHash;
use crate::limits;
use crate::manifest::ChunkPacking;
use crate::pieces::{HASH, piece_at, piece_hash, pieces};

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
struct PieceLists(Mutex<VecDeque<(ContentHash, Arc<[u8]>)>>);

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

/// The files that this peer serves, and how it packs their pieces.
pub(super) struct FileServer {
    source: Arc<dyn FileSource>,
    lists: Arc<PieceLists>,
    packer: Arc<PiecePacker>,
}

impl FileServer {
    pub(super) fn new(source: Arc<dyn FileSource>) -> Self {
        Self { source, lists: Arc::default(), packer: Arc::default() }
    }

    /// Sets the packing of pieces, which are not packed before.
    pub(super) fn set_packing(&self, packing: ChunkPacking) {
        self.packer.set(packing);
    }
}

/// Serves the file requests of one peer.
pub(super) struct Service<'a> {
    pub(super) files: &'a FileServer,
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
        let (source, lists) = (self.files.source.clone(), self.files.lists.clone());
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
        let (source, packer) = (self.files.source.clone(), self.files.packer.clone());
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
