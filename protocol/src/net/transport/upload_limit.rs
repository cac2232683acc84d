//! How much of the way out files may take from training, and how those who read files share it.
//!
//! How fast the way out is nobody knows, and need not: readers differ, and the one who takes pieces fastest shows
//! what it carries at least. While tensors go out, pieces begin so far apart that files have one part of
//! [`PARTS`] of that; and each reader has one piece at a time, and a pause after it, so that files have no
//! larger part of the way to it either. A slow reader's pause is its own: it takes little of the way out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::ids::PeerId;
use crate::limits;

/// Pieces of files on their way at once.
const TURNS: usize = 16;

/// Pieces on their way to one reader: enough to fill a long link, and others find turns beside it.
const READER_TURNS: usize = 8;

/// While tensors go out, files have one part of so many of the time.
const PARTS: u32 = 4;

/// Tensors go out for as long after the last one.
const RECENT: Duration = Duration::from_secs(1);

/// The longest pause: a reader that hears nothing takes its holder for gone after a longer time
/// ([`super::fetch`]).
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A reader of which no rate is known begins this long after the piece before, whatever that one's reader is
/// like: it may be the one that shows what the way out carries.
const FIRST: Duration = Duration::from_secs(1);

/// What was seen of a reader counts for so long.
const REMEMBERED: Duration = Duration::from_secs(60);

/// Fewer bytes tell of delays alone.
const LEAST: usize = 64 << 10;

/// The way out of this peer, which training and files share.
#[derive(Debug, Default)]
pub(super) struct UploadLimit {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Tensors on their way.
    tensors: usize,
    /// When the last one that ended did.
    trained: Option<Instant>,
    /// Pieces on their way.
    under_way: usize,
    /// When the last piece began.
    begun: Option<Instant>,
    /// When the next piece may begin, while tensors go out.
    free: Option<Instant>,
    readers: BTreeMap<PeerId, Reader>,
    /// Tickets and turns that were given so far.
    next: u64,
}

#[derive(Debug, Default)]
struct Reader {
    /// Its requests that wait, by the order in which they came.
    waiting: BTreeSet<u64>,
    /// Its pieces on their way.
    under_way: usize,
    /// Which turn was its last.
    served: u64,
    /// When its next piece may begin, while tensors go out.
    free: Option<Instant>,
    /// Bytes per second of a piece, and when that was seen.
    rate: Option<(f64, Instant)>,
}

impl UploadLimit {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Whoever holds it does no more than calculate.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A tensor goes out for as long as the result is kept.
    pub(super) fn trains(&self) -> Training<'_> {
        self.lock().tensors += 1;
        Training(self)
    }

    /// Waits for a turn of this reader and sends a piece of a file, which ends when it has arrived and gives the
    /// bytes that did, or when it never will.
    pub(super) async fn give(&self, reader: PeerId, piece: impl Future<Output = usize>) {
        let mut turn = self.turn(reader).await;
        turn.bytes = piece.await;
    }

    async fn turn(&self, reader: PeerId) -> Turn<'_> {
        let asking = Asking::new(self, reader);
        loop {
            // Before the state is looked at, so that no change after it is missed.
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let now = Instant::now();
            let next = self.lock().begin(now, asking.ticket);
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
    /// Until something has changed, or that moment.
    Wait(Option<Instant>),
}

impl State {
    fn is_training(&self, now: Instant) -> bool {
        self.tensors > 0 || self.trained.is_some_and(|last| now < last + RECENT)
    }

    /// Bytes per second that the way out carries at least.
    fn carries(&self) -> Option<f64> {
        self.readers.values().filter_map(|reader| Some(reader.rate?.0)).reduce(f64::max)
    }

    /// When a reader's next piece may begin, turns apart; `None` when one of its own has to end before.
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

    /// Whether it is this request's turn. Who has fewest pieces on their way goes first, then who was served
    /// longest ago.
    fn begin(&mut self, now: Instant, ticket: u64) -> Next {
        if self.under_way >= TURNS {
            return Next::Wait(None);
        }
        // Pauses are over once nothing goes out any more.
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
            Some((.., waits, id)) if waits == ticket => self.begins(now, ticket, id),
            // Whoever's turn it is tells the others once it has begun.
            Some(_) => Next::Wait(None),
            None => Next::Wait(soonest),
        }
    }

    fn begins(&mut self, now: Instant, ticket: u64, id: PeerId) -> Next {
        let piece = limits::BLOB_PIECE.0 as f64;
        let apart = self.carries().map_or(FIRST, |rate| pause(piece / rate * f64::from(PARTS)));
        (self.begun, self.free) = (Some(now), Some(now + apart));
        self.under_way += 1;
        self.next += 1;
        let reader = self.readers.entry(id).or_default();
        reader.waiting.remove(&ticket);
        reader.under_way += 1;
        reader.served = self.next;
        Next::Begin
    }

    /// A piece of so many bytes has arrived; of none, where it was given up.
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
            // What took less than was thought is followed by a shorter pause.
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

/// A pause of so many seconds, if it is not too long.
fn pause(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).map_or(LONGEST_PAUSE, |pause| pause.min(LONGEST_PAUSE))
}

/// A tensor on its way.
#[derive(Debug)]
pub(super) struct Training<'a>(&'a UploadLimit);

impl Drop for Training<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.tensors -= 1;
        state.trained = Some(Instant::now());
        let last = state.tensors == 0;
        drop(state);
        if last {
            // Who waits knows until when, from here on.
            self.0.changed.notify_waiters();
        }
    }
}

/// A request that waits for its turn.
struct Asking<'a> {
    upload_limit: &'a UploadLimit,
    reader: PeerId,
    ticket: u64,
}

impl<'a> Asking<'a> {
    fn new(upload_limit: &'a UploadLimit, reader: PeerId) -> Self {
        let mut state = upload_limit.lock();
        state.next += 1;
        let ticket = state.next;
        state.readers.entry(reader).or_default().waiting.insert(ticket);
        Self { upload_limit, reader, ticket }
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let mut state = self.upload_limit.lock();
        let waited = state
            .readers
            .get_mut(&self.reader)
            .is_some_and(|reader| reader.waiting.remove(&self.ticket));
        drop(state);
        if waited {
            // It may have been its turn.
            self.upload_limit.changed.notify_waiters();
        }
    }
}

/// A piece on its way.
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

    use super::super::progress::while_moving;
    use super::*;

    const PIECE: usize = limits::BLOB_PIECE.0 as usize;
    const QUICK: Duration = Duration::from_millis(100);
    const SLOW: Duration = Duration::from_secs(8);

    fn reader(number: u8) -> PeerId {
        PeerId([number; 32])
    }

    async fn piece(took: Duration) -> usize {
        sleep(took).await;
        PIECE
    }

    /// How long it takes to give a reader so many pieces that it asks for at once.
    async fn give(
        upload_limit: &UploadLimit,
        number: u8,
        pieces: usize,
        took: Duration,
    ) -> Duration {
        let begun = Instant::now();
        join_all((0..pieces).map(|_| upload_limit.give(reader(number), piece(took)))).await;
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn files_have_the_way_out_to_themselves_where_nothing_else_goes_out() {
        assert_eq!(give(&UploadLimit::default(), 1, 16, QUICK).await, 2 * QUICK);
    }

    #[tokio::test(start_paused = true)]
    async fn files_have_a_quarter_of_the_time_while_tensors_go_out() {
        let upload_limit = UploadLimit::default();
        let _training = upload_limit.trains();
        assert_eq!(give(&upload_limit, 1, 16, QUICK).await, 15 * 4 * QUICK + QUICK);
        // Many readers have no more together.
        let begun = Instant::now();
        join_all((1..=8).map(|number| give(&upload_limit, number, 4, QUICK))).await;
        let apart = begun.elapsed() / 32;
        assert!(apart >= 39 * QUICK / 10 && apart <= 5 * QUICK, "{apart:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn small_pieces_do_not_wait_as_long_as_large_ones() {
        let upload_limit = UploadLimit::default();
        let _training = upload_limit.trains();
        let small = || async {
            sleep(QUICK / 10).await;
            1000
        };
        let begun = Instant::now();
        join_all((0..8).map(|_| upload_limit.give(reader(1), small()))).await;
        assert_eq!(begun.elapsed(), 7 * 4 * QUICK / 10 + QUICK / 10);
    }

    #[tokio::test(start_paused = true)]
    async fn one_tensor_that_takes_long_is_training_all_the_while() {
        let upload_limit = UploadLimit::default();
        let training = upload_limit.trains();
        sleep(RECENT * 60).await;
        assert_eq!(give(&upload_limit, 1, 8, QUICK).await, 7 * 4 * QUICK + QUICK);
        // And a moment longer, within which another may begin.
        drop(training);
        let given = give(&upload_limit, 1, 16, QUICK).await;
        assert!(given > RECENT && given < RECENT + 5 * QUICK, "{given:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_does_not_slow_others_while_tensors_go_out() {
        let upload_limit = UploadLimit::default();
        let _training = upload_limit.trains();
        // What is known of the way out is a slow reader's rate.
        give(&upload_limit, 1, 1, SLOW).await;
        sleep(LONGEST_PAUSE).await;
        let slow = give(&upload_limit, 1, 4, SLOW);
        let quick = async {
            sleep(QUICK).await;
            give(&upload_limit, 2, 20, QUICK).await
        };
        let (slow, quick) = join(slow, quick).await;
        assert!(quick <= FIRST + 22 * 4 * QUICK, "{quick:?}");
        // Its own pauses are as long as ever, and it gets what it asked for.
        assert_eq!(slow, 3 * (4 * SLOW).min(SLOW + LONGEST_PAUSE) + SLOW);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_nothing_is_let_go_of_and_others_are_served_meanwhile() {
        let stall = Duration::from_secs(20);
        let upload_limit = UploadLimit::default();
        let stalls = || async { while_moving(stall, || 0, pending()).await.unwrap_or(0) };
        let stalled = join_all((0..16).map(|_| upload_limit.give(reader(1), stalls())));
        let others = async {
            sleep(QUICK).await;
            give(&upload_limit, 2, 16, QUICK).await
        };
        let begun = Instant::now();
        let (_, others) = join(stalled, others).await;
        assert_eq!(others, 2 * QUICK);
        // Its sixteen requests end after two stalls, and nobody waits for a third.
        assert!(begun.elapsed() < 3 * stall, "{:?}", begun.elapsed());
        assert_eq!(give(&upload_limit, 1, 8, QUICK).await, QUICK);
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_for_little_does_not_wait_for_who_asks_for_much() {
        let upload_limit = UploadLimit::default();
        let greedy = join_all((1..=4).map(|number| give(&upload_limit, number, 80, QUICK)));
        let modest = async {
            sleep(QUICK / 2).await;
            give(&upload_limit, 9, 4, QUICK).await
        };
        let (_, modest) = join(greedy, modest).await;
        assert!(modest <= 3 * QUICK, "{modest:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_given_up_holds_nobody_up() {
        let upload_limit = UploadLimit::default();
        let training = upload_limit.trains();
        let given_up = async {
            tokio::select! {
                () = upload_limit.give(reader(1), async { pending().await }) => {}
                () = sleep(SLOW) => {}
            }
        };
        join(given_up, give(&upload_limit, 2, 4, QUICK)).await;
        drop(training);
        sleep(REMEMBERED * 2).await;
        give(&upload_limit, 3, 1, QUICK).await;
        let state = upload_limit.lock();
        assert_eq!((state.under_way, state.tensors), (0, 0));
        assert_eq!(state.readers.keys().copied().collect::<Vec<_>>(), [reader(3)]);
    }
}
