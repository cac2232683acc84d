//! One hosted stage: its room, its pace, and the way onward from it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Member, Microbatch, Step};

use crate::router::Router;

/// One hosted stage.
#[derive(Debug)]
pub(super) struct Hosted {
    /// Microbatches that may take up room.
    pub(super) window: usize,
    /// What the window never grows beyond.
    pub(super) largest_window: usize,
    /// Microbatches that the output log has room for.
    pub(super) log_room: usize,
    /// Microbatches that take up room.
    pub(super) accepted: usize,
    /// Microbatches whose step is not committed: those the output log is for.
    pub(super) jobs: usize,
    /// Offers that wait for room, oldest step and lowest microbatch first.
    pub(super) offers: BTreeMap<(Step, Microbatch), Member>,
    /// Who was told that this stage is busy.
    pub(super) turned_away: BTreeSet<Member>,
    /// Work of this stage whose activation nobody takes now.
    pub(super) blocked: BTreeSet<ClaimKey>,
    /// The replicas of the next stage.
    pub(super) onward: Router,
    pub(super) pace: Pace,
    /// What is in the accumulator, and the sum of its tags.
    pub(super) counted: BTreeSet<Microbatch>,
    pub(super) proof: u64,
    /// Whether people were told that the log is full.
    pub(super) log_full_said: bool,
}

impl Hosted {
    pub(super) fn new(
        window: usize,
        largest_window: usize,
        log_room: usize,
        onward: Router,
    ) -> Self {
        assert!(window > 0 && window <= largest_window, "a stage has room");
        Self {
            window,
            largest_window,
            log_room,
            accepted: 0,
            jobs: 0,
            offers: BTreeMap::new(),
            turned_away: BTreeSet::new(),
            blocked: BTreeSet::new(),
            onward,
            pace: Pace::default(),
            counted: BTreeSet::new(),
            proof: 0,
            log_full_said: false,
        }
    }

    /// How many more microbatches it can take in.
    pub(super) fn room(&self) -> usize {
        let window = self.window.saturating_sub(self.accepted);
        window.min(self.log_room.saturating_sub(self.jobs))
    }

    /// Whether only the output log keeps work out.
    pub(super) fn is_log_full(&self) -> bool {
        self.jobs >= self.log_room && self.accepted < self.window
    }
}

/// How long the engine needs for one microbatch: exponential moving averages (weight 1/8, after
/// the first) of the time that forward and backward passes took.
#[derive(Debug, Default)]
pub(super) struct Pace {
    forward: Option<u64>,
    backward: Option<u64>,
}

impl Pace {
    pub(super) fn ran_forward(&mut self, busy: Duration) {
        self.forward = Some(averaged(self.forward, busy));
    }

    pub(super) fn ran_backward(&mut self, busy: Duration) {
        self.backward = Some(averaged(self.backward, busy));
    }

    /// Nanoseconds for both passes; none while one is not measured.
    pub(super) fn nanoseconds(&self) -> Option<u64> {
        Some(self.forward? + self.backward?)
    }
}

fn averaged(old: Option<u64>, busy: Duration) -> u64 {
    let new = u64::try_from(busy.as_nanos()).unwrap_or(u64::MAX / 16);
    old.map_or(new, |old| old - old / 8 + new / 8).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_follows_what_is_measured() {
        let mut pace = Pace::default();
        pace.ran_forward(Duration::from_nanos(800));
        assert_eq!(pace.nanoseconds(), None);
        pace.ran_backward(Duration::from_nanos(1600));
        assert_eq!(pace.nanoseconds(), Some(2400));
        pace.ran_backward(Duration::from_nanos(800));
        assert_eq!(pace.nanoseconds(), Some(800 + 1400 + 100));
    }
}
