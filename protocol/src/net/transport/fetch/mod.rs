//! A file from several peers at once.
//!
//! First one of them says what its pieces hash to, which its own hash proves or refutes; from then on
//! every piece is checked by itself as it comes, so a holder that sends other bytes is found out at once
//! and costs one piece. Of a holder that sends nothing at all for long, whatever it was asked for, its pieces
//! are asked of others, and of itself once more; then it is asked no more. A holder whose connection broke is dialled once more while others go on. What an
//! earlier fetch of the same file left is gone on with ([`partial`]).

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
use super::file_transfer::{Heard, Part, fetch_hashes, fetch_length, fetch_piece};
use super::peer::{Peer, Session};
use super::progress::while_moving;
use super::{Shared, dial};
use crate::ids::{ContentHash, PeerId};
use crate::limits;
use crate::pieces::{PieceHashes, piece_at};
use crate::units::{Bytes, Moment};

/// Pieces asked of one holder at once: enough to fill a long link with pieces of a mebibyte.
const AT_ONCE: usize = 8;

/// Holders asked for one file, at most.
const HOLDERS: usize = 8;

/// How long a holder of which pieces were asked may send nothing: longer than the longest pause that one makes
/// while it trains ([`super::upload_limit`]).
const SILENCE: Duration = Duration::from_secs(60);

/// How long a holder that is asked a question may send nothing.
const ANSWER: Duration = Duration::from_secs(20);

/// Before it answers what the pieces hash to, a holder may have to read the whole file: so many bytes a second.
const READ: u64 = 64 << 20;

/// A file that is wanted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) hash: ContentHash,
    /// Its bytes.
    pub(super) length: u64,
}

/// Fetches a file into `destination`, which appears only once all of it is right.
pub(super) async fn fetch(
    shared: &Arc<Shared>,
    holders: &[PeerId],
    wanted: Wanted,
    destination: &Path,
) -> Result<(), FetchError> {
    if wanted.length > limits::BLOB.0 {
        return Err(FetchError::TooLarge { size: Bytes(wanted.length) });
    }
    let io_error = |source| FetchError::Io { path: destination.to_owned(), source };
    let (hashes, honest) = hashes(shared, holders, wanted).await?;
    let hashes = Arc::new(hashes);
    let (partial, missing) = blocking({
        let (destination, hashes) = (destination.to_owned(), hashes.clone());
        move || Partial::open(&destination, wanted, &hashes)
    })
    .await
    .map_err(io_error)?;
    let count = honest.len();
    let work = Work {
        shared,
        wanted,
        hashes,
        file: partial.file.clone(),
        destination,
        start: Instant::now(),
        plan: Mutex::new(Plan::new(missing, count)),
        heard: (0..count).map(|_| Heard::default()).collect(),
        failure: Mutex::new(None),
        changed: Notify::new(),
    };
    let tasks = (0..AT_ONCE * count).map(|task| work.bring(task % count, &honest[task % count]));
    tokio::select! {
        () = work.over() => {}
        _ = join_all(tasks) => {}
    }
    if !work.plan().is_complete() {
        let failure = work.failure.into_inner().unwrap_or_else(PoisonError::into_inner);
        return Err(failure.expect("whoever is asked no more has failed"));
    }
    let target = destination.to_owned();
    blocking(move || partial.publish(&target)).await.map_err(io_error)
}

/// Does what waits for the disk on a thread that may.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other).and_then(|done| done)
}

/// How long a holder says that a file is.
pub(super) async fn length(
    shared: &Arc<Shared>,
    holder: PeerId,
    hash: ContentHash,
) -> Result<u64, FetchError> {
    let peer = known(shared, holder)?;
    let session = session(shared, &peer).await?;
    let heard = Heard::default();
    heard_of(ANSWER, &heard, fetch_length(&session.connection, hash, &heard)).await
}

/// Waits for an answer as long as something of it comes.
async fn heard_of<T>(
    patience: Duration,
    heard: &Heard,
    answer: impl Future<Output = Result<T, FetchError>>,
) -> Result<T, FetchError> {
    let answered = while_moving(patience, || heard.bytes(), answer).await;
    answered.unwrap_or(Err(FetchError::Silent { patience }))
}

/// What the pieces hash to, and who of the holders did not say something else before.
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
            let (patience, heard) = (ANSWER + read_time(wanted.length), Heard::default());
            let list = fetch_hashes(connection, wanted.hash, wanted.length, counters, &heard);
            let list = heard_of(patience, &heard, list).await?;
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
    if holder == shared.peer {
        return Err(ConnectError::Myself);
    }
    shared.peer(holder).ok_or(ConnectError::TooManyPeers)
}

async fn session(shared: &Shared, peer: &Peer) -> Result<Arc<Session>, ConnectError> {
    let addresses = peer.state.borrow().addresses.clone();
    dial::reach(shared, peer, &addresses).await
}

/// One file on its way.
struct Work<'a> {
    shared: &'a Arc<Shared>,
    wanted: Wanted,
    hashes: Arc<PieceHashes>,
    file: Arc<File>,
    destination: &'a Path,
    start: Instant,
    plan: Mutex<Plan>,
    /// What came from each holder.
    heard: Vec<Heard>,
    /// The last one.
    failure: Mutex<Option<FetchError>>,
    changed: Notify,
}

impl Work<'_> {
    fn plan(&self) -> MutexGuard<'_, Plan> {
        // Whoever holds it does no more than calculate.
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Moment {
        Moment(self.start.elapsed())
    }

    /// Nobody waits for an answer, or a connection, that is of no more use.
    async fn over(&self) {
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

    /// Has one holder bring piece after piece.
    async fn bring(&self, holder: usize, peer: &Peer) {
        loop {
            // Before the plan is looked at, so that no change after it is missed.
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
                Next::Piece(piece) => self.bring_piece(holder, peer, piece).await,
            }
        }
    }

    async fn bring_piece(&self, holder: usize, peer: &Peer, piece: u64) {
        let brought = self.fetch(holder, peer, piece).await;
        match brought {
            Ok(()) => {
                self.plan().brought(self.now(), holder, piece);
            }
            Err(error) => {
                let for_good = matches!(
                    error,
                    FetchError::WrongHash { .. }
                        | FetchError::NotFound { .. }
                        | FetchError::Size { .. }
                        | FetchError::Connect(_)
                );
                if matches!(error, FetchError::WrongHash { .. }) {
                    self.shared.counters.wrong_file();
                }
                let nobody_does_better = matches!(error, FetchError::Io { .. });
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                if nobody_does_better {
                    self.plan().give_up();
                } else {
                    self.plan().failed(holder, piece, for_good);
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
        let (counters, heard) = (&self.shared.counters, &self.heard[holder]);
        let part = Part { hash, length, position, size };
        let received = fetch_piece(&session.connection, part, counters, heard);
        let received = heard_of(SILENCE, heard, received).await?;
        let (file, hashes) = (self.file.clone(), self.hashes.clone());
        let written = blocking(move || {
            // What does not unpack is as wrong as what is something else.
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
