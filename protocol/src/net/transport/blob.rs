//! Files fetched by their hash, a piece per request, several requests at once.
//!
//! A request is a stream of its own: the hash, the position and the length of a piece (u64 and
//! u32, little-endian). The answer is the length of the whole file (u64; all ones when there is no
//! such file), then the piece.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use quinn::{Connection, RecvStream, SendStream};

use super::error::FetchError;
use super::traffic::{Counters, Kind};
use super::uplink::Uplink;
use crate::ids::ContentHash;
use crate::limits;
use crate::units::Bytes;

/// Requests under way at once: enough to fill a long link with pieces of a mebibyte.
const AT_ONCE: usize = 8;

const REQUEST: usize = 32 + 8 + 4;
const NOT_FOUND: u64 = u64::MAX;

/// A file that can be given to others.
#[derive(Debug)]
pub struct Blob {
    /// Open for reading.
    pub file: File,
    /// Its bytes.
    pub length: u64,
}

/// Where the files are that others may fetch. It is asked on a thread that may block.
pub trait BlobSource: Send + Sync + 'static {
    /// The file of this hash; `None` when there is none.
    fn open(&self, hash: &ContentHash) -> Option<Blob>;
}

/// Gives nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoBlobs;

impl BlobSource for NoBlobs {
    fn open(&self, _hash: &ContentHash) -> Option<Blob> {
        None
    }
}

/// Answers one request. A malformed one is dropped: who sent it gets no answer.
pub(super) async fn serve(
    source: Arc<dyn BlobSource>,
    send: SendStream,
    mut recv: RecvStream,
    counters: &Counters,
    uplink: &Uplink,
) {
    let mut request = [0; REQUEST];
    if recv.read_exact(&mut request).await.is_err() {
        return;
    }
    let (hash, rest) = request.split_first_chunk::<32>().expect("its length is larger");
    let (position, length) = rest.split_first_chunk::<8>().expect("its length is larger");
    let position = u64::from_le_bytes(*position);
    let length = u32::from_le_bytes(length.try_into().expect("four are left"));
    if u64::from(length) > limits::BLOB_PIECE.0 {
        return;
    }
    let answer = answer(source, ContentHash(*hash), position, length, send, counters);
    if length == 0 {
        // Who only asks whether we are there waits for nothing.
        answer.await;
    } else {
        uplink.give(answer).await;
    }
}

/// Sends a piece of a file, and waits until it has arrived.
async fn answer(
    source: Arc<dyn BlobSource>,
    hash: ContentHash,
    position: u64,
    length: u32,
    mut send: SendStream,
    counters: &Counters,
) {
    let piece = tokio::task::spawn_blocking(move || {
        let blob = source.open(&hash)?;
        let end = position.saturating_add(u64::from(length)).min(blob.length);
        let mut piece = vec![0; end.saturating_sub(position) as usize];
        match blob.file.read_exact_at(&mut piece, position) {
            Ok(()) => Some((blob.length, piece)),
            Err(error) => {
                tracing::warn!(%hash, %error, "cannot read a file that a peer asked for");
                None
            }
        }
    });
    let (whole, piece) = piece.await.ok().flatten().unwrap_or((NOT_FOUND, Vec::new()));
    let written = async {
        send.write_all(&whole.to_le_bytes()).await?;
        send.write_all(&piece).await
    };
    if written.await.is_ok() {
        counters.sent(Kind::Blob, 8 + piece.len());
        // Nothing is left to do if the peer has stopped listening.
        let _ = send.finish();
        let _ = send.stopped().await;
    }
}

/// Fetches a file of `length` bytes into `destination`, which appears only once its hash is right.
pub(super) async fn fetch(
    connection: &Connection,
    hash: ContentHash,
    length: u64,
    destination: &Path,
    counters: &Counters,
) -> Result<(), FetchError> {
    if length > limits::BLOB.0 {
        return Err(FetchError::TooLarge { size: Bytes(length) });
    }
    let io_error = |source| FetchError::Io { path: destination.to_owned(), source };
    let partial = Partial::create(destination).map_err(io_error)?;
    let step = limits::BLOB_PIECE.0;
    // An empty file has no piece, but the peer must still have it.
    let positions = (0..length.div_ceil(step).max(1)).map(|piece| piece * step);
    let pieces = stream::iter(positions).map(|position| {
        let wanted = step.min(length - position) as usize;
        fetch_piece(connection, hash, position, wanted, length, counters)
    });
    let writer = (partial, blake3::Hasher::new());
    let (partial, hasher) = pieces
        .buffered(AT_ONCE)
        .try_fold(writer, |(mut partial, mut hasher), piece| async move {
            let written = tokio::task::spawn_blocking(move || {
                hasher.update(&piece);
                partial.file.write_all(&piece).map(|()| (partial, hasher))
            });
            written.await.map_err(io::Error::other).and_then(|written| written).map_err(io_error)
        })
        .await?;
    let found = ContentHash::from(hasher.finalize());
    if found != hash {
        counters.wrong_file();
        return Err(FetchError::WrongHash { expected: hash, found });
    }
    let destination = destination.to_owned();
    let target = destination.clone();
    tokio::task::spawn_blocking(move || partial.publish(&target))
        .await
        .map_err(io::Error::other)
        .and_then(|published| published)
        .map_err(|source| FetchError::Io { path: destination, source })
}

/// Asks for a file that nobody has: whoever answers is there.
pub(super) async fn probe(connection: &Connection, counters: &Counters) -> Result<(), FetchError> {
    match fetch_piece(connection, ContentHash([0; 32]), 0, 0, 0, counters).await {
        Ok(_) | Err(FetchError::NotFound { .. } | FetchError::Size { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

async fn fetch_piece(
    connection: &Connection,
    hash: ContentHash,
    position: u64,
    wanted: usize,
    length: u64,
    counters: &Counters,
) -> Result<Vec<u8>, FetchError> {
    fn interrupted(error: impl std::fmt::Display) -> FetchError {
        FetchError::Interrupted(error.to_string())
    }
    let (mut send, mut recv) = connection.open_bi().await.map_err(interrupted)?;
    let request = [&hash.0[..], &position.to_le_bytes(), &(wanted as u32).to_le_bytes()].concat();
    send.write_all(&request).await.map_err(interrupted)?;
    send.finish().map_err(interrupted)?;
    let mut whole = [0; 8];
    recv.read_exact(&mut whole).await.map_err(interrupted)?;
    match u64::from_le_bytes(whole) {
        NOT_FOUND => return Err(FetchError::NotFound { hash }),
        found if found != length => return Err(FetchError::Size { expected: length, found }),
        _ => {}
    }
    let mut piece = vec![0; wanted];
    recv.read_exact(&mut piece).await.map_err(interrupted)?;
    counters.received(Kind::Blob, 8 + wanted);
    Ok(piece)
}

/// A file under a temporary name beside its destination; dropped, it is removed.
struct Partial {
    file: File,
    path: PathBuf,
}

impl Partial {
    fn create(destination: &Path) -> io::Result<Self> {
        let mut name = destination.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.part", std::process::id()));
        let path = destination.with_file_name(name);
        Ok(Self { file: File::create(&path)?, path })
    }

    fn publish(self, destination: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        std::fs::rename(&self.path, destination)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After `publish` there is nothing under this name any more.
        let _ = std::fs::remove_file(&self.path);
    }
}
