//! Whether a peer that swaps its stages loses much time to its disk.

use std::time::Duration;

/// Time of the engine before its share is judged: a few visits of every stage, in most runs.
const LEAST_BUSY: Duration = Duration::from_secs(20);

/// A share of the engine's time that is worth a word.
const LARGE_SHARE: f64 = 0.2;

/// Compares the time for which the engine waited for tensors with all of its time.
#[derive(Debug, Default)]
pub(super) struct SwapWatch {
    busy: Duration,
    said: bool,
}

impl SwapWatch {
    /// Takes in a task of the engine, and the time for which the engine has waited so far. Returns the share of
    /// the time that is lost, once, if it is large.
    pub(super) fn computed(&mut self, busy: Duration, waited: Duration) -> Option<f64> {
        self.busy += busy;
        let share = waited.as_secs_f64() / self.busy.as_secs_f64();
        if self.said || self.busy < LEAST_BUSY || share < LARGE_SHARE {
            return None;
        }
        self.said = true;
        Some(share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_share_is_said_once_and_a_small_one_never() {
        let second = Duration::from_secs(1);
        let said = |each: Duration| {
            let mut watch = SwapWatch::default();
            let computed = (1..=60).filter_map(|count| watch.computed(second, each * count));
            computed.collect::<Vec<f64>>()
        };
        assert_eq!(said(second / 2), [0.5]);
        assert!(said(second / 10).is_empty());
        assert!(said(Duration::ZERO).is_empty());
    }
}
