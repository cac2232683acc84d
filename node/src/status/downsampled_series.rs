//! A curve of bounded size, however long the run is.

use shoal_protocol::message::{CURVE_POINTS as POINTS, CurvePoint};

use super::Point;

/// Values by step. Each point is the mean of enough steps to fit into [`POINTS`]: one more merges neighbouring points.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Series {
    bins: Vec<Bin>,
    /// Values in a full bin.
    width: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Bin {
    first: u64,
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
                *bin = Bin { last: step, sum: bin.sum + value, count: bin.count + 1, ..*bin };
            }
            None => self.bins.push(Bin { first: step, last: step, sum: value, count: 1 }),
        }
        if self.bins.len() > POINTS {
            self.halve();
        }
    }

    /// The first step that has a value.
    pub(super) fn begins(&self) -> Option<u64> {
        self.bins.first().map(|bin| bin.first)
    }

    /// The curve for another peer.
    pub(super) fn history(&self) -> Vec<CurvePoint> {
        let point = |bin: &Bin| {
            let Bin { first, last, sum, count } = *bin;
            CurvePoint { first, last, count, mean: (sum / count as f64) as f32 }
        };
        self.bins.iter().map(point).collect()
    }

    /// Adds those points of another peer's curve that are before all of this one. Ones that cannot be are left out.
    pub(super) fn add_earlier(&mut self, points: &[CurvePoint]) {
        let before = self.begins().unwrap_or(u64::MAX);
        let mut earlier: Vec<Bin> = Vec::new();
        for &CurvePoint { first, last, count, mean } in points.iter().take(POINTS) {
            let after = earlier.last().map_or(0, |bin| bin.last);
            let in_order = after < first && first <= last && last < before;
            if in_order && mean.is_finite() && (1..=last - first + 1).contains(&count) {
                earlier.push(Bin { first, last, sum: f64::from(mean) * count as f64, count });
            }
        }
        let widest = earlier.iter().map(|bin| bin.count).max().unwrap_or(1);
        self.width = self.width.max(widest);
        earlier.append(&mut self.bins);
        self.bins = earlier;
        while self.bins.len() > POINTS {
            self.halve();
        }
    }

    fn halve(&mut self) {
        let one = |bins: &[Bin]| Bin {
            first: bins[0].first,
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

    proptest! {
        #[test]
        fn any_history_leaves_a_curve_that_is_short_and_sorted(
            own in prop::collection::vec((1u64..9, -9.0f64..9.0), 0..1500),
            theirs in prop::collection::vec((0u64..9, 0u64..9, 0u64..9, any::<f32>()), 0..600),
            begins in 0u64..2000,
        ) {
            let (mut series, mut step) = (Series::default(), begins);
            for (ahead, value) in &own {
                step += ahead;
                series.push(step, *value);
            }
            let newest = series.points().last().copied();
            let mut first = 0;
            let points = theirs.iter().map(|(ahead, length, count, mean)| {
                first += ahead;
                CurvePoint { first, last: first + length, count: *count, mean: *mean }
            });
            series.add_earlier(&points.collect::<Vec<_>>());
            series.push(step + 1, 0.5);
            let points = series.points();
            prop_assert!(points.len() <= POINTS);
            prop_assert!(points.is_sorted_by(|a, b| a.0 < b.0));
            prop_assert!(points.iter().all(|point| point.1.is_finite()));
            prop_assert!(newest.is_none_or(|newest| newest.0 <= step));
        }
    }

    #[test]
    fn a_history_is_prepended_once_and_only_where_it_is_earlier() {
        let (mut whole, mut late) = (Series::default(), Series::default());
        for step in 1..=2000 {
            whole.push(step, step as f64);
            if step > 1500 {
                late.push(step, step as f64);
            }
        }
        late.add_earlier(&whole.history());
        assert_eq!((late.begins(), whole.begins()), (Some(1), Some(1)));
        let points = late.points();
        assert!(points.len() <= POINTS);
        assert_eq!(points.last().map(|point| point.0), Some(2000));
        late.add_earlier(&whole.history());
        assert_eq!(late.points(), points);
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
