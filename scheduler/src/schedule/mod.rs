//! In which order a stage runs its passes: the schedules of the literature as tables, beside Shoal's window, in
//! one small world.
//!
//! With `S` stages, `M` microbatches and no time on links, GPipe (Huang et al. 2019, arXiv 1811.06965) and 1F1B
//! (Narayanan et al. 2021, arXiv 2104.04473) leave engines idle for `(S - 1) / (M + S - 1)` of a step; GPipe keeps
//! the activations of `M` microbatches, 1F1B at stage `s` those of `min(S - s, M)`, eager 1F1B (Zhuang et al.
//! 2023, On Optimizing the Communication of Model Parallelism, arXiv 2211.05322) those of
//! `min(2 (S - s) - 1, M)`.

#[cfg(test)]
mod tests;
mod window;
mod world;

use shoal_protocol::ids::Microbatch;

pub(crate) use self::window::first_window;
pub use self::world::{Outcome, Pipeline, Windows, run_table, run_windows, settle};

/// What an engine runs at a time.
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
    /// As many forward passes as there are stages from here to the last, then one of each in turn.
    OneForwardOneBackward,
    /// The same with about twice as many, so that a link may take as long as a pass.
    Eager,
}

impl Schedule {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::GPipe, Self::OneForwardOneBackward, Self::Eager];

    /// What a stage runs in a step of so many microbatches, in order. `behind` stages come after it.
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
