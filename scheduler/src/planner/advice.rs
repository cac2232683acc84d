//! Recommends the size and number of microbatches for a placement: the size with the shortest step
//! in the model of [`crate::schedule`].
//!
//! Small microbatches fill a pipeline quickly but pay the overhead of each pass; large ones leave
//! engines idle at the ends of a step and keep more activations. The best compromise depends on the
//! stages, the links and the memory.

use std::time::Duration;

use shoal_protocol::units::Bytes;

use super::network::Link;
use crate::schedule::{Outcome, Pipeline, settle};

/// Maximum number of microbatches of a replica in a step: smaller ones have no benefit beyond that.
pub(super) const MOST: u64 = 256;

/// If the step times for two sizes differ by less than this factor, the smaller size is better: it
/// keeps less.
const SAME: f64 = 1.01;

/// Computation and memory of a step, for all stages together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Tokens of a step, for all replicas.
    pub tokens: u64,
    /// Tokens of the smallest microbatch.
    pub least: u64,
    /// Seconds of a device per token, forward and backward through the whole model.
    pub forward: f64,
    /// See `forward`.
    pub backward: f64,
    /// Constant seconds per pass.
    pub overhead: f64,
    /// Bytes of activations per token at one boundary.
    pub activation: f64,
    /// Bytes of weights, gradients and moments of the whole model.
    pub state: f64,
    /// Bytes that the whole model keeps per token until its backward pass.
    pub kept: f64,
    /// Bytes of memory of a device; `None` is unlimited.
    pub memory: Option<f64>,
}

/// A recommendation for a placement.
#[derive(Debug, Clone, PartialEq)]
pub struct Advice {
    /// Tokens of a microbatch, and microbatches of each replica in a step.
    pub microbatch: u64,
    /// See `microbatch`.
    pub microbatches: u64,
    /// Maximum number in flight at each stage.
    pub windows: Vec<usize>,
    /// Time from a step's first pass to the end of its last.
    pub passes: Duration,
    /// The part of it that engines compute.
    pub computes: Duration,
    /// Bytes of memory of the fullest device.
    pub memory: f64,
}

/// The best size of microbatches for `stages` stages of `replicas` replicas whose slowest boundary
/// is `link`; `None` if no size fits into memory, or a step has too few tokens for the replicas.
#[must_use]
pub fn advise(
    work: &Work,
    stages: usize,
    replicas: usize,
    boundary: Option<Link>,
) -> Option<Advice> {
    let least = work.least.max(1);
    let (all, replicas) = (work.tokens / least, replicas.max(1) as u64);
    if all < replicas {
        return None;
    }
    // The largest share of a step that a replica gets.
    let own = all.div_ceil(replicas) * least;
    let sizes = std::iter::successors(Some(least), |size| size.checked_mul(2));
    let sizes = sizes.take_while(|size| *size < 2 * own);
    let sizes = sizes.filter(|size| own.div_ceil(*size) <= MOST);
    let all = sizes.map(|size| with_size(work, (stages, own), size.min(own), boundary));
    let fits = |advice: &Advice| work.memory.is_none_or(|memory| advice.memory <= memory);
    let able: Vec<Advice> = all.filter(fits).collect();
    let least = able.iter().map(|advice| advice.passes).min()?;
    // The sizes are in ascending order.
    able.into_iter().find(|advice| advice.passes.as_secs_f64() <= least.as_secs_f64() * SAME)
}

fn with_size(
    work: &Work,
    (stages, own): (usize, u64),
    size: u64,
    boundary: Option<Link>,
) -> Advice {
    let tokens = size as f64;
    let pass = |seconds: f64| {
        Duration::from_secs_f64(tokens * seconds / stages.max(1) as f64 + work.overhead)
    };
    let microbatches = own.div_ceil(size);
    let passes = [work.forward, work.backward].map(pass);
    let activation = work.activation * tokens;
    let outcome = settled((stages.max(1), microbatches), passes, boundary, activation);
    let most = outcome.peak.iter().copied().max().unwrap_or(0) as f64;
    let memory = (work.state + work.kept * tokens * most) / stages.max(1) as f64;
    let computes = outcome.busy / u32::try_from(stages.max(1)).unwrap_or(u32::MAX);
    let (windows, passes) = (outcome.peak, outcome.time);
    Advice { microbatch: size, microbatches, windows, passes, computes, memory }
}

/// A step of a pipeline with so many positions and microbatches, once its windows no longer change: the times
/// of a forward and a backward pass, the link between two positions, and the bytes of an activation.
pub(super) fn settled(
    (positions, microbatches): (usize, u64),
    [forward, backward]: [Duration; 2],
    boundary: Option<Link>,
    activation: f64,
) -> Outcome {
    let transfer = |link: Link| link.transfer(Bytes(activation as u64));
    let pipeline = Pipeline {
        stages: positions,
        microbatches: microbatches as usize,
        forward,
        backward,
        delay: boundary.map_or(Duration::ZERO, |link| link.delay),
        transfer: boundary.map_or(Duration::ZERO, transfer),
    };
    settle(&pipeline).0
}

#[cfg(test)]
mod tests {
    use shoal_protocol::units::Rate;

    use super::*;

    /// Eight tokens, one second forward and two backward for each.
    const WORK: Work = Work {
        tokens: 8,
        least: 1,
        forward: 1.0,
        backward: 2.0,
        overhead: 0.0,
        activation: 0.0,
        state: 10.0,
        kept: 2.0,
        memory: None,
    };

    #[test]
    fn on_one_device_large_microbatches_save_overhead() {
        let work = Work { overhead: 0.5, ..WORK };
        let advice = advise(&work, 1, 1, None).expect("it fits");
        // 8 (1.5 + 2.5) = 32, 4 (2.5 + 4.5) = 28, 2 (4.5 + 8.5) = 26, 8.5 + 16.5 = 25.
        assert_eq!((advice.microbatch, advice.passes), (8, Duration::from_secs(25)));
        assert_eq!(advice.memory, 26.0);
        // 10 + 2 · 2 = 14: there is room for two tokens at a time, not for four.
        let small = advise(&Work { memory: Some(14.0), ..work }, 1, 1, None).expect("it fits");
        assert_eq!((small.microbatch, small.passes), (2, Duration::from_secs(28)));
        assert_eq!(advise(&Work { memory: Some(11.0), ..work }, 1, 1, None), None);
    }

    #[test]
    fn small_microbatches_fill_a_pipeline_sooner() {
        let advice = advise(&WORK, 2, 1, None).expect("it fits");
        // Stages of 0.5 s and 1 s: eight microbatches of 1.5 s, plus one for the second stage to
        // begin and the first to end. A single microbatch of eight tokens would take 12 s at each.
        assert_eq!((advice.microbatch, advice.microbatches), (1, 8));
        assert_eq!(advice.passes, Duration::from_secs_f64(13.5));
        assert_eq!(advice.computes, Duration::from_secs(12));
    }

    #[test]
    fn two_replicas_do_half_of_a_step_each() {
        let advice = advise(&WORK, 2, 2, None).expect("it fits");
        // Four of 1.5 s and one.
        assert_eq!((advice.microbatches, advice.passes), (4, Duration::from_secs_f64(7.5)));
        assert_eq!(advise(&WORK, 1, 16, None), None, "half a token");
    }

    #[test]
    fn a_slow_link_is_the_bottleneck() {
        // Two seconds for a token's activation, and as long for its gradient in the other
        // direction.
        let link = Link { delay: Duration::ZERO, rate: Rate(10) };
        let work = Work { activation: 20.0, ..WORK };
        let advice = advise(&work, 2, 1, Some(link)).expect("it fits");
        // 0.5 + 8 · 2 + (0.5 + 1) + 2 + 1: the first pass, eight transfers, the last stage, the
        // transfer back, the first stage again.
        assert_eq!((advice.microbatch, advice.passes), (1, Duration::from_secs_f64(21.0)));
        assert!(advice.windows[0] > 3, "more are in flight: {:?}", advice.windows);
    }
}
