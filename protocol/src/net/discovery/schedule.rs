//! The times of the searches for other peers of the run.

use std::future::pending;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Interval between searches for other peers of the run. Every second search also publishes this
/// peer.
const ROUND: Duration = Duration::from_secs(30);

/// After a new peer appears, the next search starts this long after the last one.
const EARLY: Duration = Duration::from_millis(500);

/// The last and the next search.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    last: Option<Instant>,
    next: Option<Instant>,
    /// Number of searches for the run since the last new peer.
    count: u64,
}

impl Schedule {
    /// Waits for the time of the next search.
    pub(super) async fn due(&self) {
        match self.next {
            Some(at) => sleep_until(at).await,
            None => pending().await,
        }
    }

    /// Plans a search if none is planned.
    pub(super) fn plan(&mut self) {
        self.next.get_or_insert_with(|| Instant::now() + ROUND);
    }

    /// Plans a search at once.
    pub(super) fn plan_now(&mut self) {
        self.next = Some(Instant::now());
    }

    /// A new peer may know others: plans an early search that also publishes this peer.
    pub(super) fn plan_early(&mut self) {
        let earliest = self.last.map_or_else(Instant::now, |last| last + EARLY);
        self.next = Some(self.next.map_or(earliest, |next| next.min(earliest)));
        self.count = 0;
    }

    /// A search starts.
    pub(super) fn begin(&mut self) {
        let now = Instant::now();
        self.last = Some(now);
        self.next = Some(now + ROUND);
    }

    /// Counts a search for the run; returns whether it also publishes this peer.
    pub(super) fn count_search(&mut self) -> bool {
        let publishes = self.count.is_multiple_of(2);
        self.count += 1;
        publishes
    }
}
