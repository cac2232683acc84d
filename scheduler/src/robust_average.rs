//! Robust statistics: a running average of pass durations, and a median.

use std::time::Duration;

/// Average duration of a pass, with a weight of 1/8, that restarts when the duration changes. No
/// pass is much faster by chance, so one fast pass restarts it. Slow passes restart it only twice
/// in a row; a single one counts as at most twice the average.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RobustAverage {
    /// Nanoseconds; 0 before the first pass.
    mean: u64,
    /// Passes since the restart, up to the weight.
    count: u64,
    /// Whether the last pass was much slower.
    slow: bool,
}

impl RobustAverage {
    /// Factor that counts as much faster or slower.
    const LARGE_FACTOR: u64 = 2;

    /// A pass weighs one part in this many, once there are that many.
    const WEIGHT: u64 = 8;

    pub(crate) fn add(&mut self, busy: Duration) {
        let new = u64::try_from(busy.as_nanos()).unwrap_or(u64::MAX).clamp(1, u64::MAX / 16);
        let slow = new > self.mean * Self::LARGE_FACTOR;
        if self.count == 0 || new * Self::LARGE_FACTOR < self.mean || (slow && self.slow) {
            *self = Self { mean: new, count: 1, slow: false };
            return;
        }
        self.slow = slow;
        self.count = Self::WEIGHT.min(self.count + 1);
        let new = new.min(self.mean * Self::LARGE_FACTOR);
        self.mean = (self.mean - self.mean / self.count + new / self.count).max(1);
    }

    /// The average; `None` before the first pass.
    pub(crate) fn nanoseconds(&self) -> Option<u64> {
        (self.count > 0).then_some(self.mean)
    }
}

/// The median; for an even number, the lower one of the middle two.
pub(crate) fn median(values: &mut [u64]) -> Option<u64> {
    let middle = values.len().checked_sub(1)? / 2;
    Some(*values.select_nth_unstable(middle).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(passes: &[u64]) -> Option<u64> {
        let mut robust_average = RobustAverage::default();
        passes.iter().for_each(|pass| robust_average.add(Duration::from_nanos(*pass)));
        robust_average.nanoseconds()
    }

    #[test]
    fn the_first_pass_soon_counts_little() {
        assert_eq!(after(&[]), None);
        assert_eq!(after(&[60_000]), Some(60_000));
        assert_eq!(after(&[60_000, 1_000]), Some(1_000));
        assert_eq!(after(&[1_200, 1_000]), Some(1_100));
    }

    #[test]
    fn two_slow_passes_in_a_row_restart_the_average_and_one_does_not() {
        assert_eq!(after(&[1_000, 100_000]), Some(1_500));
        let steady = [1_000; 20];
        assert_eq!(after(&[&steady[..], &[100_000]].concat()), Some(1_125));
        assert_eq!(after(&[&steady[..], &[100_000, 1_000]].concat()), Some(1_110));
        assert_eq!(after(&[&steady[..], &[100_000, 90_000]].concat()), Some(90_000));
        // One fast pass restarts it.
        assert_eq!(after(&[&steady[..], &[100_000, 90_000, 1_000]].concat()), Some(1_000));
    }
}
