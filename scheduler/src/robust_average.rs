//! What is typical of one member's passes, and of many values.

use std::time::Duration;

/// What a pass takes: an average of weight 1/8 that begins anew where passes take another time. No pass is
/// much faster by chance, so one is enough to tell; of those that are much slower it takes two in a row, and
/// one counts as twice the average at most.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RobustAverage {
    /// Nanoseconds; 0 before the first.
    mean: u64,
    /// Passes since it began, up to the weight.
    count: u64,
    /// The last one was much slower.
    slow: bool,
}

impl RobustAverage {
    /// How many times as fast or slow is much.
    const MUCH: u64 = 2;

    /// One pass counts for a part in so many, when there are so many.
    const WEIGHT: u64 = 8;

    pub(crate) fn add(&mut self, busy: Duration) {
        let new = u64::try_from(busy.as_nanos()).unwrap_or(u64::MAX).clamp(1, u64::MAX / 16);
        let slow = new > self.mean * Self::MUCH;
        if self.count == 0 || new * Self::MUCH < self.mean || (slow && self.slow) {
            *self = Self { mean: new, count: 1, slow: false };
            return;
        }
        self.slow = slow;
        self.count = Self::WEIGHT.min(self.count + 1);
        let new = new.min(self.mean * Self::MUCH);
        self.mean = (self.mean - self.mean / self.count + new / self.count).max(1);
    }

    /// None before the first.
    pub(crate) fn nanoseconds(&self) -> Option<u64> {
        (self.count > 0).then_some(self.mean)
    }
}

/// The middle one; of two the smaller.
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
    fn the_first_pass_counts_little_as_soon_as_there_is_another() {
        assert_eq!(after(&[]), None);
        assert_eq!(after(&[60_000]), Some(60_000));
        assert_eq!(after(&[60_000, 1_000]), Some(1_000));
        assert_eq!(after(&[1_200, 1_000]), Some(1_100));
    }

    #[test]
    fn one_slow_pass_is_an_accident_and_two_in_a_row_are_not() {
        assert_eq!(after(&[1_000, 100_000]), Some(1_500));
        let steady = [1_000; 20];
        assert_eq!(after(&[&steady[..], &[100_000]].concat()), Some(1_125));
        assert_eq!(after(&[&steady[..], &[100_000, 1_000]].concat()), Some(1_110));
        assert_eq!(after(&[&steady[..], &[100_000, 90_000]].concat()), Some(90_000));
        // One fast pass is enough.
        assert_eq!(after(&[&steady[..], &[100_000, 90_000, 1_000]].concat()), Some(1_000));
    }
}
