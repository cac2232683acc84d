//! Limits the share of the upload capacity that files take while training traffic is sent, and
//! divides it among the readers of files.
//!
//! The upload capacity is unknown. Readers differ, and the reader that receives pieces fastest
//! gives a lower bound. While tensors are sent, pieces start at intervals such that files use one
//! [`PARTS`]th of that bound. Each reader gets one piece at a time, followed by a pause, so that
//! files use no larger share of the path to it either. The pause of a slow reader delays only that
//! reader, because it uses little of the upload capacity.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::ids::PeerId;
use crate::limits;

/// Maximum number of file pieces in flight.
const TURNS: usize = 16;

/// Maximum number of pieces in flight to one reader: enough to fill a long link, and room remains
/// for other readers.
const READER_TURNS: usize = 8;

/// While tensors are sent, files have one of this many parts of the time.
const PARTS: u32 = 4;

/// Time after the last tensor for which training still counts as active.
const RECENT: Duration = Duration::from_secs(1);

/// The maximum pause. A reader without data for longer treats its holder as gone
/// ([`super::fetch`]).
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A reader without a known rate starts this long after the previous piece, however slow that
/// piece's reader is: the new reader may serve a better bound of the upload capacity.
const FIRST: Duration = Duration::from_secs(1);

/// Time for which the measured rate of a reader is valid.
const REMEMBERED: Duration = Duration::from_secs(60);

/// Measurements of fewer bytes reflect only delays, and are discarded.
const LEAST: usize = 64 << 10;

/// The limiter of this peer's upload capacity, which training and files share.
#[derive(Debug, Default)]
pub(super) struct UploadLimit {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Number of tensors in flight.
    tensors: usize,
    /// The time when the last tensor ended.
    trained: Option<Instant>,
    /// Number of pieces in flight.
    under_way: usize,
    /// The time when the last piece started.
    begun: Option<Instant>,
    /// The earliest start of the next piece while tensors are sent.
    free: Option<Instant>,
    readers: BTreeMap<PeerId, Reader>,
    /// Counter of requests and turns.
    next: u64,
}

#[derive(Debug, Default)]
struct Reader {
    /// The numbers of its waiting requests, in order of arrival.
    waiting: BTreeSet<u64>,
    /// Number of its pieces in flight.
    under_way: usize,
    /// The number of its last turn.
    served: u64,
    /// The earliest start of its next piece while tensors are sent.
    free: Option<Instant>,
    /// Bytes per second of its last piece, with the time of measurement.
    rate: Option<(f64, Instant)>,
}

impl UploadLimit {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A poisoned lock is usable: its holders only calculate.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks a tensor as in flight until the result is dropped.
    pub(super) fn begin_tensor(&self) -> TensorGuard<'_> {
        self.lock().tensors += 1;
        TensorGuard(self)
    }

    /// Waits for a turn of this reader, then sends a piece of a file. `piece` returns the bytes
    /// that arrived when the transfer has ended.
    pub(super) async fn serve(&self, reader: PeerId, piece: impl Future<Output = usize>) {
        let mut turn = self.turn(reader).await;
        turn.bytes = piece.await;
    }

    async fn turn(&self, reader: PeerId) -> Turn<'_> {
        let request = WaitingRequest::new(self, reader);
        loop {
            // Registered before the state is read, so that no later change is missed.
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let now = Instant::now();
            let next = self.lock().begin(now, request.number);
            match next {
                Next::Begin => {
                    self.changed.notify_waiters();
                    return Turn { upload_limit: self, reader, begun: now, bytes: 0 };
                }
                Next::Wait(None) => changed.await,
                Next::Wait(Some(until)) => tokio::select! {
                    () = changed => {}
                    () = sleep_until(until) => {}
                },
            }
        }
    }
}

enum Next {
    Begin,
    /// Wait for a change, or until that time.
    Wait(Option<Instant>),
}

impl State {
    fn is_training(&self, now: Instant) -> bool {
        self.tensors > 0 || self.trained.is_some_and(|last| now < last + RECENT)
    }

    /// The lower bound of the upload capacity in bytes per second.
    fn capacity_bound(&self) -> Option<f64> {
        self.readers.values().filter_map(|reader| Some(reader.rate?.0)).reduce(f64::max)
    }

    /// The earliest start of a reader's next piece, without regard to turns; `None` if one of its
    /// pieces must end first.
    fn ready(&self, reader: &Reader, now: Instant) -> Option<Instant> {
        if !self.is_training(now) {
            return (reader.under_way < READER_TURNS).then_some(now);
        }
        if reader.under_way > 0 {
            return None;
        }
        let mut free = self.free;
        if reader.rate.is_none() {
            free = free.min(self.begun.map(|begun| begun + FIRST));
        }
        [free, reader.free].into_iter().flatten().max().or(Some(now))
    }

    /// Starts a request if it has the turn. The reader with the fewest pieces in flight is first,
    /// then the one that was served longest ago.
    fn begin(&mut self, now: Instant, number: u64) -> Next {
        if self.under_way >= TURNS {
            return Next::Wait(None);
        }
        // Pauses end when no tensors are sent any more.
        let calm = self.trained.filter(|_| self.tensors == 0).map(|last| last + RECENT);
        let (mut first, mut soonest) = (None, calm.filter(|calm| *calm > now));
        for (id, reader) in &self.readers {
            let Some(waits) = reader.waiting.first() else { continue };
            match self.ready(reader, now) {
                Some(ready) if ready <= now => {
                    let place = (reader.under_way, reader.served, *waits, *id);
                    first = Some(first.map_or(place, |first| place.min(first)));
                }
                Some(ready) => soonest = Some(soonest.map_or(ready, |soonest| ready.min(soonest))),
                None => {}
            }
        }
        match first {
            Some((.., waits, id)) if waits == number => self.start(now, number, id),
            // The request with the turn notifies the others once it has started.
            Some(_) => Next::Wait(None),
            None => Next::Wait(soonest),
        }
    }

    fn start(&mut self, now: Instant, number: u64, id: PeerId) -> Next {
        let piece = limits::FILE_PIECE.0 as f64;
        let apart =
            self.capacity_bound().map_or(FIRST, |rate| pause(piece / rate * f64::from(PARTS)));
        (self.begun, self.free) = (Some(now), Some(now + apart));
        self.under_way += 1;
        self.next += 1;
        let reader = self.readers.entry(id).or_default();
        reader.waiting.remove(&number);
        reader.under_way += 1;
        reader.served = self.next;
        Next::Begin
    }

    /// A piece of `bytes` bytes has arrived; `bytes` is 0 if it was aborted.
    fn ended(&mut self, now: Instant, begun: Instant, id: PeerId, bytes: usize) {
        let took = now - begun;
        self.under_way -= 1;
        let reader = self.readers.entry(id).or_default();
        reader.under_way -= 1;
        reader.free = Some(now + (took * (PARTS - 1)).min(LONGEST_PAUSE));
        if bytes >= LEAST && !took.is_zero() {
            reader.rate = Some((bytes as f64 / took.as_secs_f64(), now));
        }
        if self.begun == Some(begun) {
            // A piece that was faster than expected shortens the pause.
            let shorter = begun + pause(took.as_secs_f64() * f64::from(PARTS));
            self.free = self.free.map(|free| free.min(shorter));
        }
        let lately = |at: Instant| now < at + REMEMBERED;
        self.readers.retain(|_, reader| {
            let pauses = reader.free.is_some_and(|free| now < free);
            reader.rate = reader.rate.filter(|(_, seen)| lately(*seen));
            reader.under_way > 0 || !reader.waiting.is_empty() || pauses || reader.rate.is_some()
        });
    }
}

/// A pause of this length, at most the maximum.
fn pause(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).map_or(LONGEST_PAUSE, |pause| pause.min(LONGEST_PAUSE))
}

/// Marks a tensor as in flight.
#[derive(Debug)]
pub(super) struct TensorGuard<'a>(&'a UploadLimit);

impl Drop for TensorGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.tensors -= 1;
        state.trained = Some(Instant::now());
        let last = state.tensors == 0;
        drop(state);
        if last {
            // Waiting requests now have an end of their wait.
            self.0.changed.notify_waiters();
        }
    }
}

/// A request that waits for its turn.
struct WaitingRequest<'a> {
    upload_limit: &'a UploadLimit,
    reader: PeerId,
    number: u64,
}

impl<'a> WaitingRequest<'a> {
    fn new(upload_limit: &'a UploadLimit, reader: PeerId) -> Self {
        let mut state = upload_limit.lock();
        state.next += 1;
        let number = state.next;
        state.readers.entry(reader).or_default().waiting.insert(number);
        Self { upload_limit, reader, number }
    }
}

impl Drop for WaitingRequest<'_> {
    fn drop(&mut self) {
        let mut state = self.upload_limit.lock();
        let waited = state
            .readers
            .get_mut(&self.reader)
            .is_some_and(|reader| reader.waiting.remove(&self.number));
        drop(state);
        if waited {
            // It may have had the turn.
            self.upload_limit.changed.notify_waiters();
        }
    }
}

/// A piece in flight.
struct Turn<'a> {
    upload_limit: &'a UploadLimit,
    reader: PeerId,
    begun: Instant,
    bytes: usize,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.upload_limit.lock().ended(Instant::now(), self.begun, self.reader, self.bytes);
        self.upload_limit.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use futures::future::{join, join_all};
    use tokio::time::sleep;

    use super::super::progress::with_progress_timeout;
    use super::*;

    const PIECE: usize = limits::FILE_PIECE.0 as usize;
    const QUICK: Duration = Duration::from_millis(100);
    const SLOW: Duration = Duration::from_secs(8);

    fn reader(number: u8) -> PeerId {
        PeerId([number; 32])
    }

    async fn piece(took: Duration) -> usize {
        sleep(took).await;
        PIECE
    }

    /// The time to send a reader several pieces that it requests at once.
    async fn serve(
        upload_limit: &UploadLimit,
        number: u8,
        pieces: usize,
        took: Duration,
    ) -> Duration {
        let begun = Instant::now();
        join_all((0..pieces).map(|_| upload_limit.serve(reader(number), piece(took)))).await;
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn files_use_the_whole_upload_capacity_without_training() {
        assert_eq!(serve(&UploadLimit::default(), 1, 16, QUICK).await, 2 * QUICK);
    }

    #[tokio::test(start_paused = true)]
    async fn files_have_a_quarter_of_the_time_while_tensors_are_sent() {
        let upload_limit = UploadLimit::default();
        let _training = upload_limit.begin_tensor();
        assert_eq!(serve(&upload_limit, 1, 16, QUICK).await, 15 * 4 * QUICK + QUICK);
        // Many readers together get no more.
        let begun = Instant::now();
        join_all((1..=8).map(|number| serve(&upload_limit, number, 4, QUICK))).await;
        let apart = begun.elapsed() / 32;
        assert!(apart >= 39 * QUICK / 10 && apart <= 5 * QUICK, "{apart:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn small_pieces_cause_shorter_pauses() {
        let upload_limit = UploadLimit::default();
        let _training = upload_limit.begin_tensor();
        let small = || async {
            sleep(QUICK / 10).await;
            1000
        };
        let begun = Instant::now();
        join_all((0..8).map(|_| upload_limit.serve(reader(1), small()))).await;
        assert_eq!(begun.elapsed(), 7 * 4 * QUICK / 10 + QUICK / 10);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_transfer_of_one_tensor_counts_as_training() {
        let upload_limit = UploadLimit::default();
        let training = upload_limit.begin_tensor();
        sleep(RECENT * 60).await;
        assert_eq!(serve(&upload_limit, 1, 8, QUICK).await, 7 * 4 * QUICK + QUICK);
        // TensorGuard counts as active for a short time after, in which another tensor may start.
        drop(training);
        let given = serve(&upload_limit, 1, 16, QUICK).await;
        assert!(given > RECENT && given < RECENT + 5 * QUICK, "{given:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_does_not_delay_others_while_tensors_are_sent() {
        let upload_limit = UploadLimit::default();
        let _training = upload_limit.begin_tensor();
        // At first, the slow reader's rate is the only bound of the upload capacity.
        serve(&upload_limit, 1, 1, SLOW).await;
        sleep(LONGEST_PAUSE).await;
        let slow = serve(&upload_limit, 1, 4, SLOW);
        let quick = async {
            sleep(QUICK).await;
            serve(&upload_limit, 2, 20, QUICK).await
        };
        let (slow, quick) = join(slow, quick).await;
        assert!(quick <= FIRST + 22 * 4 * QUICK, "{quick:?}");
        // The slow reader's own pauses are unchanged, and it gets all its pieces.
        assert_eq!(slow, 3 * (4 * SLOW).min(SLOW + LONGEST_PAUSE) + SLOW);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stalled_reader_is_dropped_and_others_are_served_meanwhile() {
        let stall = Duration::from_secs(20);
        let upload_limit = UploadLimit::default();
        let stalls = || async { with_progress_timeout(stall, || 0, pending()).await.unwrap_or(0) };
        let stalled = join_all((0..16).map(|_| upload_limit.serve(reader(1), stalls())));
        let others = async {
            sleep(QUICK).await;
            serve(&upload_limit, 2, 16, QUICK).await
        };
        let begun = Instant::now();
        let (_, others) = join(stalled, others).await;
        assert_eq!(others, 2 * QUICK);
        // Its sixteen requests end after two stalls; no third is needed.
        assert!(begun.elapsed() < 3 * stall, "{:?}", begun.elapsed());
        assert_eq!(serve(&upload_limit, 1, 8, QUICK).await, QUICK);
    }

    #[tokio::test(start_paused = true)]
    async fn a_small_request_does_not_wait_for_large_ones() {
        let upload_limit = UploadLimit::default();
        let greedy = join_all((1..=4).map(|number| serve(&upload_limit, number, 80, QUICK)));
        let modest = async {
            sleep(QUICK / 2).await;
            serve(&upload_limit, 9, 4, QUICK).await
        };
        let (_, modest) = join(greedy, modest).await;
        assert!(modest <= 3 * QUICK, "{modest:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_aborted_request_delays_no_other() {
        let upload_limit = UploadLimit::default();
        let training = upload_limit.begin_tensor();
        let given_up = async {
            tokio::select! {
                () = upload_limit.serve(reader(1), async { pending().await }) => {}
                () = sleep(SLOW) => {}
            }
        };
        join(given_up, serve(&upload_limit, 2, 4, QUICK)).await;
        drop(training);
        sleep(REMEMBERED * 2).await;
        serve(&upload_limit, 3, 1, QUICK).await;
        let state = upload_limit.lock();
        assert_eq!((state.under_way, state.tensors), (0, 0));
        assert_eq!(state.readers.keys().copied().collect::<Vec<_>>(), [reader(3)]);
    }
}
