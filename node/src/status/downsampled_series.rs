//! A curve of bounded size, however long the run is.

use super::Point;

/// The most points of a curve. One more merges neighbouring points.
pub(super) const POINTS: usize = 512;

/// Values by step. Each point is the mean of enough steps to fit into [`POINTS`].
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Series {
    bins: Vec<Bin>,
    /// Values in a full bin.
    width: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Bin {
    last: u64,
    sum: f64,
    count: u64,
}

impl Default for Series {
    fn default() -> Self {
        Self { bins: Vec::new(), width: 1 }
    }
}

impl Series {
    /// Adds the value of a step. A step that is not above the newest one is computed again: the
    /// values from that step on are discarded. A value that is not finite adds no point.
    pub(super) fn push(&mut self, step: u64, value: f64) {
        while self.bins.last().is_some_and(|bin| bin.last >= step) {
            self.bins.pop();
        }
        if !value.is_finite() {
            return;
        }
        match self.bins.last_mut().filter(|bin| bin.count < self.width) {
            Some(bin) => {
                *bin = Bin { last: step, sum: bin.sum + value, count: bin.count + 1 };
            }
            None => self.bins.push(Bin { last: step, sum: value, count: 1 }),
        }
        if self.bins.len() > POINTS {
            self.halve();
        }
    }

    fn halve(&mut self) {
        let one = |bins: &[Bin]| Bin {
            last: bins[bins.len() - 1].last,
            sum: bins.iter().map(|bin| bin.sum).sum(),
            count: bins.iter().map(|bin| bin.count).sum(),
        };
        self.bins = self.bins.chunks(2).map(one).collect();
        self.width = self.width.saturating_mul(2);
    }

    /// The curve, in order of steps.
    pub(super) fn points(&self) -> Vec<Point> {
        self.bins.iter().map(|bin| Point(bin.last, bin.sum / bin.count as f64)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_curve_is_short_sorted_and_within_its_values(
            values in prop::collection::vec((0u64..3, -9.0f64..9.0), 0..3000),
        ) {
            let (mut series, mut step) = (Series::default(), 0u64);
            for (ahead, value) in &values {
                step += ahead;
                series.push(step, *value);
            }
            let points = series.points();
            prop_assert!(points.len() <= POINTS);
            prop_assert!(points.is_sorted_by(|a, b| a.0 < b.0));
            prop_assert!(points.iter().all(|point| (-9.0..9.0).contains(&point.1)));
            prop_assert_eq!(points.last().map(|point| point.0), values.last().map(|_| step));
        }
    }

    #[test]
    fn steps_that_are_computed_again_replace_earlier_values() {
        let mut series = Series::default();
        for (step, value) in [(0, 5.0), (1, 4.0), (2, 3.0), (1, 4.5)] {
            series.push(step, value);
        }
        assert_eq!(series.points(), [Point(0, 5.0), Point(1, 4.5)]);
    }

    #[test]
    fn a_long_curve_has_means_and_no_gaps() {
        let mut series = Series::default();
        for step in 0..2 * POINTS as u64 {
            series.push(step, if step % 2 == 0 { 1.0 } else { 3.0 });
        }
        series.push(5000, f64::NAN);
        let points = series.points();
        assert_eq!(points.len(), POINTS);
        assert!(points.iter().all(|point| point.1 == 2.0), "{points:?}");
    }
}
