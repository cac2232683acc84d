//! The run's guard: judges each step by the losses and gradient norms of those before it.
//!
//! What it remembers is state of the run, like the optimizer's moments: in every stage's checkpoints and snapshots, the
//! same in each. So a peer that comes late, a run that goes back, and one process alone come to the same verdicts.

use std::ops::Range;

use shoal_protocol::manifest::{Guard, Manifest, Outlier, Verdict};
use shoal_protocol::message::FixedLoss;

/// The standard deviation of normal numbers over the median of their distances from the median.
const NORMAL: f64 = 1.4826;

/// The least deviation, relatively to the median: numbers that hardly differ make no outlier of the next.
const LEAST_DEVIATION: f64 = 0.01;

/// Numbers beside the two windows.
const COUNTS: usize = 4;

/// What the guard remembers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GuardState {
    guard: Guard,
    terms_per_microbatch: u64,
    /// Losses of the last steps, the oldest first.
    losses: Vec<f32>,
    /// Norms of their gradients.
    norms: Vec<f32>,
    /// Steps without an update.
    skipped: u32,
    /// Outliers since the last step that was none.
    in_a_row: u32,
    /// Steps that still have the rate of an outlier.
    lowered: u32,
}

impl GuardState {
    /// That of a run's beginning; `None` without a guard.
    pub(crate) fn new(manifest: &Manifest) -> Option<Self> {
        Some(Self {
            guard: manifest.guard?,
            terms_per_microbatch: manifest.terms_per_microbatch(),
            losses: Vec::new(),
            norms: Vec::new(),
            skipped: 0,
            in_a_row: 0,
            lowered: 0,
        })
    }

    /// Updates that the optimizer has made, of so many steps.
    pub(crate) fn updates_of(&self, steps: u64) -> u64 {
        steps.saturating_sub(self.skipped.into())
    }

    /// Whether a gradient may be left out that is not finite: else the run stops.
    pub(crate) fn leaves_out(&self) -> bool {
        self.guard.not_finite && !self.is_at_an_end()
    }

    /// Whether there are as many outliers in a row as there may be.
    fn is_at_an_end(&self) -> bool {
        self.in_a_row >= self.guard.patience
    }

    /// The verdict of the next step, by its loss and the norm of its gradient.
    pub(crate) fn judge(&self, loss: FixedLoss, gradient_norm: f64) -> Verdict {
        let outlier = self.outlier(loss, gradient_norm);
        let rate = match outlier {
            Some(Outlier::NotFinite { .. }) => 0.0,
            Some(_) => self.guard.rate,
            None if self.lowered > 0 => self.guard.rate,
            None => 1.0,
        };
        Verdict { rate, outlier }
    }

    fn outlier(&self, loss: FixedLoss, gradient_norm: f64) -> Option<Outlier> {
        if loss.broken > 0 {
            return Some(Outlier::NotFinite { gradients: loss.broken });
        }
        if self.losses.len() < self.guard.least as usize || self.is_at_an_end() {
            return None;
        }
        let exceeds = |value: f32, window: &[f32]| {
            let (value, limit) = (f64::from(value), limit(window, self.guard.deviations));
            (value > limit).then_some((value, limit))
        };
        let [loss, norm] = self.numbers(loss, gradient_norm);
        let by_loss = exceeds(loss, &self.losses);
        let by_loss = by_loss.map(|(value, limit)| Outlier::Loss { value, limit });
        let by_norm = || exceeds(norm, &self.norms);
        by_loss.or_else(|| by_norm().map(|(value, limit)| Outlier::GradientNorm { value, limit }))
    }

    /// Loss and gradient norm of a step, as they are remembered.
    fn numbers(&self, loss: FixedLoss, gradient_norm: f64) -> [f32; 2] {
        [loss.mean(self.terms_per_microbatch) as f32, gradient_norm as f32]
    }

    /// Remembers a step with its verdict. Outliers count in the windows as well: what has become usual is none.
    pub(crate) fn note(&mut self, loss: FixedLoss, gradient_norm: f64, verdict: &Verdict) {
        self.skipped = self.skipped.saturating_add(verdict.is_skipped().into());
        match verdict.outlier {
            Some(_) => (self.in_a_row, self.lowered) = (self.in_a_row + 1, self.guard.steps),
            None => (self.in_a_row, self.lowered) = (0, self.lowered.saturating_sub(1)),
        }
        if loss.broken > 0 {
            return;
        }
        let numbers = self.numbers(loss, gradient_norm);
        for (window, number) in [&mut self.losses, &mut self.norms].into_iter().zip(numbers) {
            if window.len() >= self.guard.window as usize {
                window.remove(0);
            }
            window.push(number);
        }
    }

    /// The state as numbers, in the order of [`vectors`].
    pub(crate) fn values(&self) -> Vec<f32> {
        let window = self.guard.window as usize;
        let mut values = Vec::new();
        for numbers in [&self.losses, &self.norms] {
            values.extend(numbers);
            values.resize(values.len() + window - numbers.len(), 0.0);
        }
        // A count beyond 2^24 stays there.
        let counts = [self.losses.len() as u32, self.skipped, self.in_a_row, self.lowered];
        values.extend(counts.map(|count| count.min(1 << 24) as f32));
        values
    }

    /// Takes a state; without one, that of a run's beginning.
    pub(crate) fn set(&mut self, values: Option<&[f32]>) {
        let window = self.guard.window as usize;
        let zeros = vec![0.0; 2 * window + COUNTS];
        let values = values.unwrap_or(&zeros);
        assert_eq!(values.len(), zeros.len(), "a state has the layout of its manifest");
        let count = |at: usize| values[2 * window + at] as u32;
        let filled = window.min(count(0) as usize);
        let taken = |range: Range<usize>| values[range].to_vec();
        (self.losses, self.norms) = (taken(0..filled), taken(window..window + filled));
        (self.skipped, self.in_a_row, self.lowered) = (count(1), count(2), count(3));
    }
}

/// The largest number that is no outlier beside these.
fn limit(window: &[f32], deviations: f64) -> f64 {
    let median_of_window = median(window.iter().map(|number| f64::from(*number)).collect());
    let distance = |number: &f32| (f64::from(*number) - median_of_window).abs();
    let deviation = NORMAL * median(window.iter().map(distance).collect());
    median_of_window + deviations * deviation.max(LEAST_DEVIATION * median_of_window.abs())
}

/// The middle number, or the mean of the two in the middle.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let half = numbers.len() / 2;
    match numbers.len() % 2 {
        0 => f64::midpoint(numbers[half - 1], numbers[half]),
        _ => numbers[half],
    }
}

/// The vectors of the state in an optimizer file, with their lengths.
pub(crate) fn vectors(guard: &Guard) -> [(&'static str, usize); 3] {
    let window = guard.window as usize;
    [("losses", window), ("gradient_norms", window), ("counts", COUNTS)]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::manifest;

    fn state(guard: Guard) -> GuardState {
        GuardState::new(&Manifest { guard: Some(guard), ..manifest() }).expect("a guard")
    }

    /// The verdicts of steps with these losses, norms and broken gradients.
    fn verdicts(state: &mut GuardState, steps: &[(f64, f64, u32)]) -> Vec<Verdict> {
        let terms = manifest().terms_per_microbatch();
        let mut all = Vec::new();
        for (loss, norm, broken) in steps {
            let loss = FixedLoss { broken: *broken, ..FixedLoss::from_nats(*loss, terms, 0) };
            let verdict = state.judge(loss, *norm);
            state.note(loss, *norm, &verdict);
            all.push(verdict);
        }
        all
    }

    const SMALL: Guard = Guard {
        deviations: 4.0,
        window: 8,
        least: 4,
        rate: 0.0,
        steps: 0,
        not_finite: true,
        patience: 3,
    };

    #[test]
    fn the_limit_is_that_of_the_formula() {
        // Median 3, distances 2 1 0 1 7 with the median 1.
        assert_eq!(limit(&[1.0, 2.0, 3.0, 4.0, 10.0], 2.0), 3.0 + 2.0 * 1.4826);
        // Of an even number the mean of the two in the middle.
        assert_eq!(limit(&[1.0, 2.0, 4.0, 10.0], 1.0), 3.0 + 1.4826 * 1.5);
        assert_eq!(limit(&[5.0; 9], 3.0), 5.0 + 3.0 * 0.05);
    }

    #[test]
    fn a_step_far_out_is_skipped_and_the_next_is_not() {
        let mut guarded = state(SMALL);
        let usual = [(3.0, 1.0, 0), (2.9, 1.1, 0), (2.8, 0.9, 0), (2.9, 1.0, 0)];
        assert!(verdicts(&mut guarded, &usual).iter().all(|one| *one == Verdict::WHOLE));
        let seen = verdicts(&mut guarded, &[(9.0, 1.0, 0), (2.7, 1.0, 0), (2.7, 30.0, 0)]);
        assert!(matches!(seen[0].outlier, Some(Outlier::Loss { value: 9.0, .. })), "{seen:?}");
        assert_eq!(seen[1], Verdict::WHOLE);
        assert!(matches!(seen[2].outlier, Some(Outlier::GradientNorm { .. })), "{seen:?}");
        assert!(seen[2].is_skipped());
        assert_eq!(guarded.updates_of(7), 5);
    }

    #[test]
    fn a_lowered_rate_lasts_for_its_steps() {
        let mut guarded = state(Guard { rate: 0.5, steps: 2, ..SMALL });
        verdicts(&mut guarded, &[(3.0, 1.0, 0); 5]);
        let steps = [(9.0, 1.0, 0), (3.0, 1.0, 0), (3.0, 1.0, 0), (3.0, 1.0, 0), (3.0, 1.0, 1)];
        let rates: Vec<f64> = verdicts(&mut guarded, &steps).iter().map(|one| one.rate).collect();
        assert_eq!(rates, [0.5, 0.5, 0.5, 1.0, 0.0], "what is not finite is always skipped");
        assert_eq!(guarded.updates_of(10), 9);
    }

    #[test]
    fn after_so_many_in_a_row_a_step_counts_and_broken_gradients_stop_the_run() {
        let mut guarded = state(SMALL);
        verdicts(&mut guarded, &[(3.0, 1.0, 0); 5]);
        let seen = verdicts(&mut guarded, &[(9.0, 1.0, 0); 4]);
        let skipped: Vec<bool> = seen.iter().map(Verdict::is_skipped).collect();
        assert_eq!(skipped, [true, true, true, false]);
        for left in (0..3).rev() {
            assert!(guarded.leaves_out());
            verdicts(&mut guarded, &[(3.0, 1.0, 2)]);
            assert_eq!(guarded.leaves_out(), left > 0);
        }
        verdicts(&mut guarded, &[(9.0, 1.0, 0)]);
        assert!(guarded.leaves_out(), "a step that counts begins the row anew");
        assert!(!state(Guard { not_finite: false, ..SMALL }).leaves_out());
    }

    proptest! {
        /// A state that is written and read goes on as one that was never written.
        #[test]
        fn a_state_survives_its_file(
            steps in prop::collection::vec((0.0f64..10.0, 0.0f64..5.0, 0u32..2), 0..40),
            more in prop::collection::vec((0.0f64..10.0, 0.0f64..5.0, 0u32..2), 0..20),
        ) {
            let mut guarded = state(SMALL);
            verdicts(&mut guarded, &steps);
            let values = guarded.values();
            prop_assert_eq!(values.len(), vectors(&SMALL).iter().map(|(_, length)| length).sum::<usize>());
            let mut read = state(SMALL);
            read.set(Some(&values));
            prop_assert_eq!(&read, &guarded);
            prop_assert_eq!(verdicts(&mut read, &more), verdicts(&mut guarded, &more));
            read.set(None);
            prop_assert_eq!(read, state(SMALL));
        }

        /// No numbers of a damaged file make it panic.
        #[test]
        fn any_numbers_are_a_state(counts in prop::collection::vec(any::<f32>(), COUNTS)) {
            let mut values = vec![f32::NAN; 2 * SMALL.window as usize];
            values.extend(counts);
            let mut guarded = state(SMALL);
            guarded.set(Some(&values));
            let _ = verdicts(&mut guarded, &[(1.0, 1.0, 0); 3]);
        }
    }
}
