//! The order of a stage's passes: published schedules as tables, compared with Shoal's windows in a
//! small model.
//!
//! With `S` stages, `M` microbatches and no transfer time, GPipe (Huang et al. 2019, arXiv
//! 1811.06965) and 1F1B (Narayanan et al. 2021, arXiv 2104.04473) leave engines idle for `(S - 1) /
//! (M + S - 1)` of a step. GPipe keeps the activations of `M` microbatches, 1F1B at stage `s` those
//! of `min(S - s, M)`, and eager 1F1B (Zhuang et al. 2023, On Optimizing the Communication of Model
//! Parallelism, arXiv 2211.05322) those of `min(2 (S - s) - 1, M)`.

#[cfg(test)]
mod tests;
mod window;
mod world;

use shoal_protocol::ids::Microbatch;

pub(crate) use self::window::first_window;
pub use self::world::{Outcome, Pipeline, Windows, run_table, run_windows, settle};

/// A unit of work of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pass {
    /// A microbatch's forward pass.
    Forward(Microbatch),
    /// Its backward pass.
    Backward(Microbatch),
}

/// A schedule that is fixed before the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// All forward passes, then all backward passes.
    GPipe,
    /// One forward pass per stage from here to the last, then backward and forward passes in turn.
    OneForwardOneBackward,
    /// Like 1F1B with about twice as many leading forward passes, so that a transfer may take as
    /// long as a pass.
    Eager,
}

impl Schedule {
    /// All schedules.
    pub const ALL: [Self; 3] = [Self::GPipe, Self::OneForwardOneBackward, Self::Eager];

    /// The passes of a stage in a step, in order. `behind` is the number of later stages.
    #[must_use]
    pub fn table(self, behind: usize, microbatches: usize) -> Vec<Pass> {
        let ahead = match self {
            Self::GPipe => microbatches,
            Self::OneForwardOneBackward => behind + 1,
            Self::Eager => 2 * (behind + 1) - 1,
        };
        let mut table = Vec::with_capacity(2 * microbatches);
        let (mut forward, mut backward) = (all(microbatches), all(microbatches));
        table.extend(forward.by_ref().take(ahead).map(Pass::Forward));
        for microbatch in backward.by_ref() {
            table.push(Pass::Backward(microbatch));
            table.extend(forward.next().map(Pass::Forward));
        }
        table
    }
}

/// The microbatches of a step.
fn all(microbatches: usize) -> impl Iterator<Item = Microbatch> {
    (0..microbatches as u32).map(Microbatch)
}
