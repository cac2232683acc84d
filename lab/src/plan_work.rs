//! The work and the memory of a step, for `shoal plan`: as a fleet's file describes them, or as they follow from a run.

use serde::Deserialize;
use shoal_protocol::limits;
use shoal_scheduler::planner::{Tier, Work};

use crate::fleet::Fleet;
use crate::fleet_error::{FleetError, LAYERS};

/// The `[training]` section of a fleet's file: the work and the memory of a step, and the budget.
/// docs/guide/sizes.md describes the keys.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Training {
    /// Tokens of a step.
    pub tokens: u64,
    /// Tokens of a sample, which is the smallest microbatch.
    sequence: u64,
    /// Seconds per token of a forward pass through the whole model. A backward pass takes twice
    /// that by default.
    forward: f64,
    backward: Option<f64>,
    /// Seconds of a pass besides the time per token.
    #[serde(default)]
    overhead: f64,
    /// Bytes of the whole model's weights and moments, and bytes per token that it stores until the
    /// backward pass.
    #[serde(default)]
    state: f64,
    #[serde(default)]
    kept: f64,
    /// Bytes of memory of a device.
    pub memory: Option<f64>,
    /// Bytes per second, each way, of the link from a device to the memory below it. Absent if devices swap
    /// nothing.
    host_link: Option<f64>,
    /// Layers of the model, in each of which slices meet.
    pub layers: Option<usize>,
    /// The most that an hour may cost, in the currency of the prices.
    pub budget: Option<f64>,
    /// 1 if a step's passes overlap the all-reduce of the step before.
    #[serde(default)]
    staleness: u8,
}

/// The work of a step of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunWork {
    /// Tokens of a step.
    pub tokens: u64,
    /// Tokens of a sample.
    pub sequence: u64,
    /// Floating-point operations of a token in a forward pass.
    pub forward: f64,
    /// Floating-point operations of a backward pass.
    pub backward: f64,
    /// Bytes of a step's activations at a boundary between stages.
    pub activations: f64,
    /// Bytes of all gradients in f32.
    pub gradient: f64,
    /// Bytes of weights and moments.
    pub state: f64,
    /// Bytes of a token between its passes.
    pub kept: f64,
    /// Layers of the model.
    pub layers: usize,
    /// Versions by which the weights of passes are late.
    pub staleness: u8,
    /// Whether some weights are frozen, so that the gradient does not tell the size of all.
    pub is_adapted: bool,
}

/// The `[device]` section of a fleet's file, which stands for `[training]` where a run is given.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceFigures {
    /// Floating-point operations a second that it reaches in passes.
    flops: f64,
    /// Seconds of a pass besides.
    #[serde(default)]
    overhead: f64,
    /// Bytes of memory, and bytes per second, each way, of the link to the memory below it.
    memory: Option<f64>,
    host_link: Option<f64>,
    /// The most that an hour may cost, in the currency of the prices.
    budget: Option<f64>,
}

impl DeviceFigures {
    /// The training of a run on such devices.
    ///
    /// # Errors
    /// If a figure is out of range.
    pub fn training(&self, work: &RunWork) -> Result<Training, FleetError> {
        if !(1e6..=1e20).contains(&self.flops) {
            return Err(FleetError::Flops);
        }
        if work.is_adapted && self.host_link.is_some() {
            return Err(FleetError::SwappedAdapters);
        }
        let training = Training {
            tokens: work.tokens,
            sequence: work.sequence,
            forward: work.forward / self.flops,
            backward: Some(work.backward / self.flops),
            overhead: self.overhead,
            state: work.state,
            kept: work.kept,
            memory: self.memory,
            host_link: self.host_link,
            layers: Some(work.layers),
            budget: self.budget,
            staleness: work.staleness,
        };
        training.check().map(|()| training)
    }
}

impl Training {
    /// Checks the figures.
    ///
    /// # Errors
    /// If one is out of range.
    pub fn check(&self) -> Result<(), FleetError> {
        let times = [self.forward, self.backward.unwrap_or(0.0), self.overhead];
        let bytes = [self.state, self.kept, self.memory.unwrap_or(0.0)];
        let valid = (1..=1 << 40).contains(&self.tokens)
            && (1..=self.tokens).contains(&self.sequence)
            && times.iter().all(|time| (0.0..=1e3).contains(time))
            && bytes.iter().all(|bytes| (0.0..=1e18).contains(bytes))
            && self.host_link.is_none_or(|rate| (1.0..=1e15).contains(&rate))
            && self.layers.is_none_or(|layers| (1..=LAYERS).contains(&layers))
            && self.budget.is_none_or(|budget| (0.0..=1e12).contains(&budget))
            && self.staleness <= limits::STALENESS;
        if valid { Ok(()) } else { Err(FleetError::Training) }
    }

    /// What the planner places on a fleet.
    pub fn work(&self, fleet: &Fleet) -> Work {
        Work {
            tokens: self.tokens,
            least: self.sequence,
            forward: self.forward,
            backward: self.backward.unwrap_or(2.0 * self.forward),
            overhead: self.overhead,
            activation: fleet.activations() / self.tokens as f64,
            state: self.state,
            kept: self.kept,
            memory: self.memory,
        }
    }
}

impl Training {
    /// The link below a device. Passes read weights of two bytes, accumulators have integers of eight, and
    /// the gradient numbers of four.
    pub fn tier(&self, fleet: &Fleet) -> Option<Tier> {
        let gradient = fleet.gradient();
        self.host_link.map(|rate| Tier { rate, weights: gradient / 2.0, sums: gradient * 2.0 })
    }

    /// Whether passes overlap the all-reduce of the step before.
    pub fn overlaps(&self) -> bool {
        self.staleness > 0
    }

    /// Seconds of a step with such passes and such an all-reduce.
    pub fn step(&self, passes: f64, all_reduce: f64) -> f64 {
        if self.overlaps() { passes.max(all_reduce) } else { passes + all_reduce }
    }
}

/// The tokens for a unit of currency; none if an hour costs nothing.
pub fn tokens_per_unit(tokens_per_second: f64, per_hour: f64) -> Option<f64> {
    (per_hour > 0.0).then(|| tokens_per_second * 3600.0 / per_hour)
}
