//! When this anchor last heard from a leader, and when it becomes a candidate.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::time::{Duration, Instant};

use shoal_protocol::ids::PeerId;

/// The last known leader, and the election timer.
#[derive(Debug)]
pub(super) struct LeaderContact {
    leader: Option<(PeerId, Instant)>,
    /// The last event that restarts the election timer.
    quiet_since: Instant,
    /// The current election timeout. It is random, so that one anchor times out first.
    patience: Duration,
    election: Range<Duration>,
}

impl LeaderContact {
    pub(super) fn new(election: Range<Duration>) -> Self {
        let patience = some_time(&election);
        Self { leader: None, quiet_since: Instant::now(), patience, election }
    }

    /// A leader sent a request that this anchor followed.
    pub(super) fn followed(&mut self, leader: PeerId) {
        self.leader = Some((leader, Instant::now()));
        if self.patience < self.election.start {
            self.patience = some_time(&self.election);
        }
        self.wait();
    }

    /// Restarts the election timer.
    pub(super) fn wait(&mut self) {
        self.quiet_since = Instant::now();
    }

    /// Restarts the election timer with a timeout from this range.
    pub(super) fn wait_for(&mut self, range: &Range<Duration>) {
        self.wait();
        self.patience = some_time(range);
    }

    /// Whether the election timer expired; if so, it restarts.
    pub(super) fn due(&mut self) -> bool {
        let due = self.quiet_since.elapsed() >= self.patience;
        if due {
            let election = self.election.clone();
            self.wait_for(&election);
        }
        due
    }

    /// The time until the election timer expires.
    pub(super) fn left(&self) -> Duration {
        self.patience.saturating_sub(self.quiet_since.elapsed())
    }

    /// The leader, if it sent a request within this time.
    pub(super) fn leader(&self, within: Duration) -> Option<PeerId> {
        self.leader.filter(|(_, at)| at.elapsed() < within).map(|(peer, _)| peer)
    }
}

/// A random time from the range, different for two processes that start at once.
fn some_time(range: &Range<Duration>) -> Duration {
    let part = (RandomState::new().hash_one(0) >> 11) as f64 / (1u64 << 53) as f64;
    range.start + (range.end - range.start).mul_f64(part)
}
