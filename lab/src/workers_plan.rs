//! Whether the devices of a choice train faster as virtual workers (`[outer]`), for `shoal plan`.

use serde::Serialize;

use crate::egress::Egress;
use crate::fleet::Fleet;
use crate::plan_work::{Training, tokens_per_unit};

/// Steps between two syncs to choose from.
const EVERY: [u32; 6] = [10, 20, 50, 100, 200, 500];

/// The part of a worker's time that a sync may take, if one of [`EVERY`] is enough for that.
const FOR_SYNCS: f64 = 0.05;

/// How much faster workers must be: they compute other weights than a run without them.
const GAIN: f64 = 1.25;

/// Bytes of a worker's state besides, for each weight: the sync's weights and its momentum.
const STATE: f64 = 8.0;

/// Figures of a choice without workers. Times are in seconds of a step.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Stages.
    pub stages: usize,
    /// Replicas of each stage.
    pub replicas: usize,
    /// Microbatches of each replica.
    pub microbatches: u64,
    /// The passes of a step.
    pub passes: f64,
    /// The all-reduce of a step.
    pub all_reduce: f64,
    /// Part of the time in which steps go on.
    pub available: f64,
    /// Price of the devices for an hour.
    pub price: f64,
    /// Bytes of the fullest device.
    pub memory: f64,
}

/// A choice as virtual workers, one of each pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WorkersChoice {
    /// Workers.
    pub workers: usize,
    /// Steps between two syncs.
    pub every: u32,
    /// Microbatches of a worker's step.
    pub microbatches: u64,
    /// Tokens that are trained in a second.
    pub tokens_per_second: f64,
    /// Price of an hour, with the bytes that leave their region.
    pub per_hour: f64,
    /// Tokens for a unit of the prices' currency; absent if an hour costs nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_currency_unit: Option<f64>,
}

impl WorkersChoice {
    /// The choice as workers; none if they are not faster by much, or do not fit.
    pub fn of(
        fleet: &Fleet,
        training: &Training,
        timing: &Timing,
        egress: &Egress,
    ) -> Option<Self> {
        let Timing { replicas, passes, all_reduce, available, .. } = *timing;
        // The gradient is in f32.
        let memory = timing.memory + STATE * fleet.gradient() / 4.0 / timing.stages as f64;
        if replicas < 2 || training.memory.is_some_and(|room| memory > room) {
            return None;
        }
        let enough = |every: &&u32| all_reduce / f64::from(**every) <= FOR_SYNCS * passes;
        let every = *EVERY.iter().find(enough).or(EVERY.last())?;
        let step = passes + all_reduce / f64::from(every);
        if training.step(passes, all_reduce) < GAIN * step {
            return None;
        }
        let tokens_per_second = available * training.tokens as f64 / step;
        let of_step = egress.passes + egress.all_reduce / f64::from(every);
        let per_hour = timing.price + of_step * available * 3600.0 / step;
        if training.budget.is_some_and(|budget| per_hour > budget) {
            return None;
        }
        Some(Self {
            workers: replicas,
            every,
            microbatches: timing.microbatches,
            tokens_per_second,
            per_hour,
            tokens_per_currency_unit: tokens_per_unit(tokens_per_second, per_hour),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLEET: &str = r#"stages = [1]
activations = 0
gradient = 4e9
within = { delay = 0, bandwidth = 1e9 }
region = [{ name = "home", devices = 4 }]
[training]
tokens = 1000
sequence = 1
forward = 0.001
memory = 30e9
"#;

    fn choice(all_reduce: f64, memory: f64) -> Option<WorkersChoice> {
        let fleet = Fleet::parse(FLEET).expect("a fleet");
        let training = fleet.training().expect("it has one");
        let timing = Timing {
            stages: 1,
            replicas: 4,
            microbatches: 8,
            passes: 2.0,
            all_reduce,
            available: 1.0,
            price: 2.0,
            memory,
        };
        WorkersChoice::of(&fleet, training, &timing, &Egress { passes: 0.0, all_reduce: 0.01 })
    }

    #[test]
    fn workers_sync_so_seldom_that_links_hardly_count() {
        let found = choice(8.0, 20e9).expect("it is four times as fast");
        // 8 s every 100 steps are 4% of their 200 s; every 50 they would be 8%.
        assert_eq!((found.workers, found.every, found.microbatches), (4, 100, 8));
        assert!((found.tokens_per_second - 1000.0 / 2.08).abs() < 1e-9, "{found:?}");
        let of_hour = 0.01 / 100.0 * 3600.0 / 2.08;
        assert!((found.per_hour - 2.0 - of_hour).abs() < 1e-9, "{found:?}");
        let slow = choice(1e4, 20e9).expect("it is faster");
        assert_eq!(slow.every, 500);
    }

    #[test]
    fn links_that_are_fast_enough_and_devices_that_are_full_need_none() {
        assert_eq!(choice(0.4, 20e9), None);
        assert_eq!(choice(8.0, 29e9), None, "8e9 bytes more do not fit");
    }
}
