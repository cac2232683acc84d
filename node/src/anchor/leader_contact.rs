//! When this anchor last heard of a leader, and how long it waits before it would be one.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::time::{Duration, Instant};

use shoal_protocol::ids::PeerId;

/// What is known of the leader, and since when.
#[derive(Debug)]
pub(super) struct LeaderContact {
    leader: Option<(PeerId, Instant)>,
    /// Nothing that would put off an election happened since.
    quiet_since: Instant,
    /// How long it may be quiet before an election; by chance, so that one anchor is the first.
    patience: Duration,
    election: Range<Duration>,
}

impl LeaderContact {
    pub(super) fn new(election: Range<Duration>) -> Self {
        let patience = some_time(&election);
        Self { leader: None, quiet_since: Instant::now(), patience, election }
    }

    /// A leader spoke, and is obeyed.
    pub(super) fn obeyed(&mut self, leader: PeerId) {
        self.leader = Some((leader, Instant::now()));
        if self.patience < self.election.start {
            self.patience = some_time(&self.election);
        }
        self.wait();
    }

    /// Something happened that an election should wait for.
    pub(super) fn wait(&mut self) {
        self.quiet_since = Instant::now();
    }

    /// The next election is due after some time of about this length.
    pub(super) fn wait_for(&mut self, range: &Range<Duration>) {
        self.wait();
        self.patience = some_time(range);
    }

    /// Whether it is time for an election; the next is due after another while.
    pub(super) fn due(&mut self) -> bool {
        let due = self.quiet_since.elapsed() >= self.patience;
        if due {
            let election = self.election.clone();
            self.wait_for(&election);
        }
        due
    }

    /// How long it may still be quiet.
    pub(super) fn left(&self) -> Duration {
        self.patience.saturating_sub(self.quiet_since.elapsed())
    }

    /// The leader, if it was heard within this time.
    pub(super) fn leader(&self, within: Duration) -> Option<PeerId> {
        self.leader.filter(|(_, at)| at.elapsed() < within).map(|(peer, _)| peer)
    }
}

/// By chance, and not the same for two processes that start at once.
fn some_time(range: &Range<Duration>) -> Duration {
    let part = (RandomState::new().hash_one(0) >> 11) as f64 / (1u64 << 53) as f64;
    range.start + (range.end - range.start).mul_f64(part)
}
