//! The rate of a training run: tokens per second, time per step and time left.

use shoal_formats::words::{counted, with_prefix};

use crate::event_text::duration;
use crate::events::StepReport;
use crate::step_count::StepCount;

/// The approximate number of steps that are printed of a short run without a terminal.
const LINES: u64 = 20;

/// Seconds after which the next step of a longer one is printed.
const SILENCE: f64 = 30.0;

/// Weight of the newest step in the moving averages.
const NEWEST: f64 = 0.2;

/// The progress of a run, and averages of its rate.
#[derive(Debug, Clone, Default)]
pub(crate) struct TrainingRate {
    pub(crate) steps: u64,
    /// The newest step.
    pub(crate) done: StepCount,
    /// Steps that were taken in.
    noted: u64,
    tokens: u64,
    seconds: f64,
    /// Seconds of the steps since the last one that was printed.
    silent_seconds: f64,
    first_loss: Option<f64>,
    last_loss: f64,
    /// Moving averages, with most weight on the past.
    pub(crate) tokens_per_second: f64,
    pub(crate) seconds_per_step: f64,
}

impl TrainingRate {
    /// Takes in the next step.
    pub(crate) fn note(&mut self, step: &StepReport) {
        self.done = StepCount::through(step.step);
        self.noted += 1;
        self.tokens += step.tokens;
        self.seconds += step.seconds;
        self.silent_seconds += step.seconds;
        let newest = if self.first_loss.is_none() { 1.0 } else { NEWEST };
        self.first_loss.get_or_insert(step.loss);
        self.last_loss = step.loss;
        self.tokens_per_second += newest * (step.tokens_per_second() - self.tokens_per_second);
        self.seconds_per_step += newest * (step.seconds - self.seconds_per_step);
    }

    /// Describes the progress at a step, on one line.
    pub(crate) fn describe(&self, step: &StepReport) -> String {
        let left = self.steps.saturating_sub(self.done.number());
        let left = left as f64 * self.seconds_per_step;
        let accuracy = step.preferences.map(|found| format!("  accuracy {:.2}", found.accuracy));
        format!(
            "{}/{}  loss {:.3}{}  {} tokens/s  {}  {} left",
            self.done.number(),
            self.steps,
            step.loss,
            accuracy.unwrap_or_default(),
            with_prefix(self.tokens_per_second),
            counted(step.peers as u64, "peer"),
            duration(left),
        )
    }

    /// Returns whether the newest step is printed where there is no terminal: one of about twenty, and one after half a
    /// minute without a line. The first is, whenever this peer came: it shows that training goes on.
    pub(crate) fn is_worth_a_line(&mut self, step: &StepReport) -> bool {
        let every = self.steps.div_ceil(LINES).max(1);
        let is_one = step.step.is_multiple_of(every) || self.silent_seconds >= SILENCE;
        let is_worth = self.noted == 1 || is_one || self.done.number() == self.steps;
        if is_worth {
            self.silent_seconds = 0.0;
        }
        is_worth
    }

    /// Describes the whole run, on one line.
    pub(crate) fn summary(&self) -> String {
        let Some(first) = self.first_loss else {
            return "no steps to train".to_owned();
        };
        let took = match self.seconds {
            seconds if seconds < 120.0 => format!("{seconds:.1} s"),
            seconds => duration(seconds),
        };
        format!(
            "{} in {took}, loss {first:.3} to {:.3}, {} tokens/s",
            counted(self.noted, "step"),
            self.last_loss,
            with_prefix(self.tokens as f64 / self.seconds.max(1e-9)),
        )
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn step(step: u64, loss: f64) -> StepReport {
        StepReport {
            step,
            loss,
            held_out_loss: None,
            learning_rate: 1e-3,
            gradient_norm: 1.0,
            tokens: 4000,
            targets: 4000,
            padded: 0,
            preferences: None,
            seconds: 0.5,
            cost: None,
            counted: 8,
            replayed: 0,
            all_reduce_seconds: None,
            duplicated: 0,
            peers: 4,
        }
    }

    #[test]
    fn a_step_says_how_far_how_good_how_fast() {
        let mut rate = TrainingRate { steps: 41, ..TrainingRate::default() };
        rate.note(&step(0, 5.5));
        assert_eq!(
            rate.describe(&step(0, 5.5)),
            "1/41  loss 5.500  8.00k tokens/s  4 peers  20 s left"
        );
        rate.note(&step(1, 2.25));
        assert_eq!(rate.summary(), "2 steps in 1.0 s, loss 5.500 to 2.250, 8.00k tokens/s");
    }

    #[test]
    fn without_a_terminal_a_long_run_has_few_lines() {
        // The last one takes more than an hour: a line after half a minute.
        let all = [(0, 0), (1, 1), (15, 15), (20, 20), (150, 20), (1200, 21), (10_000, 181)];
        for (steps, lines) in all {
            let mut rate = TrainingRate { steps, ..TrainingRate::default() };
            let printed = (0..steps)
                .filter(|&index| {
                    let step = step(index, 1.0);
                    rate.note(&step);
                    rate.is_worth_a_line(&step)
                })
                .count();
            assert_eq!(printed, lines, "of {steps} steps");
        }
    }

    #[test]
    fn each_step_of_a_long_run_that_takes_long_is_printed() {
        let mut rate = TrainingRate { steps: 405, ..TrainingRate::default() };
        for index in 0..4 {
            let step = StepReport { seconds: 60.0, ..step(index, 1.0) };
            rate.note(&step);
            assert!(rate.is_worth_a_line(&step), "step {index}");
        }
        assert!(rate.describe(&step(3, 1.0)).ends_with("  6 h 41 min left"));
        assert!(rate.summary().starts_with("4 steps in 4 min, "));
    }

    #[test]
    fn a_peer_that_comes_late_prints_its_first_step() {
        let mut rate = TrainingRate { steps: 100_000, ..TrainingRate::default() };
        for (index, printed) in [(11, true), (12, false), (15_000, true)] {
            let step = step(index, 1.0);
            rate.note(&step);
            assert_eq!(rate.is_worth_a_line(&step), printed, "step {index}");
        }
    }

    #[test]
    fn a_run_of_no_steps_has_a_summary() {
        assert_eq!(TrainingRate::default().summary(), "no steps to train");
    }
}
