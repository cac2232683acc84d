//! Fetches a file from several peers at once.
//!
//! First, one holder sends the hashes of the file's pieces, which are checked against the file's
//! hash. Then every piece is checked alone as it arrives, so a holder that sends wrong bytes is
//! detected at once, at the cost of one piece. If a holder sends nothing for long on all its
//! requests, its pieces are requested from other holders, and once more from itself; then the
//! holder is dropped. If a holder's connection breaks, it is dialled once more while the others
//! continue. An interrupted fetch of the same file is resumed ([`partial`]).

pub(super) mod partial;
mod plan;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::future::join_all;
use tokio::sync::Notify;
use tokio::time::sleep_until;

use self::partial::Partial;
use self::plan::{Next, Plan};
use super::error::{ConnectError, FetchError};
use super::file_transfer::{FetchProgress, Part, fetch_hashes, fetch_length, fetch_piece};
use super::peer::{Peer, Session};
use super::progress::with_progress_timeout;
use super::{Shared, dial};
use crate::ids::{ContentHash, PeerId};
use crate::limits;
use crate::pieces::{PieceHashes, piece_at};
use crate::units::{Bytes, Moment};

/// Pieces requested from one holder at once: enough to fill a long link with pieces of 1 MiB.
const AT_ONCE: usize = 8;

/// Maximum number of holders of one fetch.
const HOLDERS: usize = 8;

/// Time for which a holder may send nothing while it has requests for pieces. Longer than the
/// longest pause that it makes while it trains ([`super::upload_limit`]).
const SILENCE: Duration = Duration::from_secs(60);

/// Time for which a holder may send nothing before it answers a short request.
const ANSWER: Duration = Duration::from_secs(20);

/// Bytes per second at which a holder reads its disk. It may have to read the whole file before it
/// sends the hashes of the pieces.
const READ: u64 = 64 << 20;

/// A file to fetch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) hash: ContentHash,
    /// Length in bytes.
    pub(super) length: u64,
}

/// Fetches a file into `destination`, which appears only when the file is complete and verified.
pub(super) async fn fetch(
    shared: &Arc<Shared>,
    holders: &[PeerId],
    wanted: Wanted,
    destination: &Path,
) -> Result<(), FetchError> {
    if wanted.length > limits::FILE.0 {
        return Err(FetchError::TooLarge { size: Bytes(wanted.length) });
    }
    let io_error = |source| FetchError::Io { path: destination.to_owned(), source };
    let (hashes, candidates) = hashes(shared, holders, wanted).await?;
    let hashes = Arc::new(hashes);
    let (partial, missing) = blocking({
        let (destination, hashes) = (destination.to_owned(), hashes.clone());
        move || Partial::open(&destination, wanted, &hashes)
    })
    .await
    .map_err(io_error)?;
    let count = candidates.len();
    let work = Work {
        shared,
        wanted,
        hashes,
        file: partial.file.clone(),
        destination,
        start: Instant::now(),
        plan: Mutex::new(Plan::new(missing, count)),
        progress: (0..count).map(|_| FetchProgress::default()).collect(),
        failure: Mutex::new(None),
        changed: Notify::new(),
    };
    let tasks =
        (0..AT_ONCE * count).map(|task| work.fetch_pieces(task % count, &candidates[task % count]));
    tokio::select! {
        () = work.finished() => {}
        _ = join_all(tasks) => {}
    }
    if !work.plan().is_complete() {
        let failure = work.failure.into_inner().unwrap_or_else(PoisonError::into_inner);
        return Err(failure.expect("every dropped holder has failed"));
    }
    let target = destination.to_owned();
    blocking(move || partial.publish(&target)).await.map_err(io_error)
}

/// Runs disk operations on a thread that may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other).and_then(|done| done)
}

/// The length of a file, as reported by a holder.
pub(super) async fn length(
    shared: &Arc<Shared>,
    holder: PeerId,
    hash: ContentHash,
) -> Result<u64, FetchError> {
    let peer = known(shared, holder)?;
    let session = session(shared, &peer).await?;
    let progress = FetchProgress::default();
    with_timeout(ANSWER, &progress, fetch_length(&session.connection, hash, &progress)).await
}

/// Waits for an answer until the holder sends nothing for `patience`.
async fn with_timeout<T>(
    patience: Duration,
    progress: &FetchProgress,
    answer: impl Future<Output = Result<T, FetchError>>,
) -> Result<T, FetchError> {
    let answered = with_progress_timeout(patience, || progress.bytes(), answer).await;
    answered.unwrap_or(Err(FetchError::Silent { patience }))
}

/// The hashes of the pieces, and the holders that have not failed so far.
async fn hashes(
    shared: &Arc<Shared>,
    holders: &[PeerId],
    wanted: Wanted,
) -> Result<(PieceHashes, Vec<Arc<Peer>>), FetchError> {
    let mut failure = FetchError::NotFound { hash: wanted.hash };
    let mut rest = holders.iter().take(HOLDERS);
    while let Some(holder) = rest.next() {
        let asked = async {
            let peer = known(shared, *holder)?;
            let session = session(shared, &peer).await?;
            let (connection, counters) = (&session.connection, &shared.counters);
            let (patience, progress) =
                (ANSWER + read_time(wanted.length), FetchProgress::default());
            let list = fetch_hashes(connection, wanted.hash, wanted.length, counters, &progress);
            let list = with_timeout(patience, &progress, list).await?;
            Ok((peer, list))
        };
        match asked.await {
            Ok((first, list)) => {
                let Some(list) = PieceHashes::checked(wanted.hash, wanted.length, list) else {
                    shared.counters.wrong_file();
                    failure = FetchError::WrongHash { expected: wanted.hash };
                    continue;
                };
                let others = rest.filter_map(|holder| known(shared, *holder).ok());
                return Ok((list, std::iter::once(first).chain(others).collect()));
            }
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn read_time(length: u64) -> Duration {
    Duration::from_secs(length / READ)
}

fn known(shared: &Arc<Shared>, holder: PeerId) -> Result<Arc<Peer>, ConnectError> {
    if holder == shared.local.id() {
        return Err(ConnectError::OwnAddress);
    }
    shared.peer(holder).ok_or(ConnectError::TooManyPeers)
}

async fn session(shared: &Shared, peer: &Peer) -> Result<Arc<Session>, ConnectError> {
    let addresses = peer.state.borrow().addresses.clone();
    dial::reach(shared, peer, &addresses).await
}

/// The state of one fetch.
struct Work<'a> {
    shared: &'a Arc<Shared>,
    wanted: Wanted,
    hashes: Arc<PieceHashes>,
    file: Arc<File>,
    destination: &'a Path,
    start: Instant,
    plan: Mutex<Plan>,
    /// Bytes received from each holder.
    progress: Vec<FetchProgress>,
    /// The last failure.
    failure: Mutex<Option<FetchError>>,
    changed: Notify,
}

impl Work<'_> {
    fn plan(&self) -> MutexGuard<'_, Plan> {
        // A poisoned lock is usable: its holders only calculate.
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Moment {
        Moment(self.start.elapsed())
    }

    /// Waits until the fetch has ended; pending answers and connections are then dropped.
    async fn finished(&self) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.plan().is_over() {
                return;
            }
            changed.await;
        }
    }

    /// Fetches piece after piece from one holder.
    async fn fetch_pieces(&self, holder: usize, peer: &Peer) {
        loop {
            // Registered before the plan is read, so that no later change is missed.
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let next = self.plan().next(self.now(), holder);
            match next {
                Next::Over => return,
                Next::Wait(None) => changed.await,
                Next::Wait(Some(until)) => {
                    let late = sleep_until((self.start + until.0).into());
                    tokio::select! {
                        () = changed => {}
                        () = late => {}
                    }
                }
                Next::Piece(piece) => self.try_piece(holder, peer, piece).await,
            }
        }
    }

    async fn try_piece(&self, holder: usize, peer: &Peer, piece: u64) {
        let fetched = self.fetch(holder, peer, piece).await;
        match fetched {
            Ok(()) => {
                self.plan().received(self.now(), holder, piece);
            }
            Err(error) => {
                let permanent = matches!(
                    error,
                    FetchError::WrongHash { .. }
                        | FetchError::NotFound { .. }
                        | FetchError::Size { .. }
                        | FetchError::Connect(_)
                );
                if matches!(error, FetchError::WrongHash { .. }) {
                    self.shared.counters.wrong_file();
                }
                let is_local = matches!(error, FetchError::Io { .. });
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                if is_local {
                    self.plan().abort();
                } else {
                    self.plan().failed(holder, piece, permanent);
                }
            }
        }
        self.changed.notify_waiters();
    }

    /// Fetches, checks and writes a piece.
    async fn fetch(&self, holder: usize, peer: &Peer, piece: u64) -> Result<(), FetchError> {
        let Wanted { hash, length } = self.wanted;
        let session = session(self.shared, peer).await?;
        let (position, size) = piece_at(length, piece);
        let (counters, progress) = (&self.shared.counters, &self.progress[holder]);
        let part = Part { hash, length, position, size };
        let received = fetch_piece(&session.connection, part, counters, progress);
        let received = with_timeout(SILENCE, progress, received).await?;
        let (file, hashes) = (self.file.clone(), self.hashes.clone());
        let written = blocking(move || {
            // A piece that does not unpack is as wrong as one with another hash.
            let Ok(bytes) = received.unpack(size) else { return Ok(false) };
            let right = hashes.holds(length, piece, &bytes);
            if right { file.write_all_at(&bytes, position).map(|()| true) } else { Ok(false) }
        });
        let io_error = |source| FetchError::Io { path: self.destination.to_owned(), source };
        match written.await {
            Ok(true) => Ok(()),
            Ok(false) => Err(FetchError::WrongHash { expected: hash }),
            Err(error) => Err(io_error(error)),
        }
    }
}
