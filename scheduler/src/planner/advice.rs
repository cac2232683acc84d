//! How large microbatches should be, and how many are in flight: for a placement at hand, the size with which a
//! step takes least, as the world of [`crate::schedule`] has it.
//!
//! Small microbatches fill a pipeline soon but pay for each pass; large ones leave engines idle at a step's ends and keep
//! more activations. Which weighs more follows from the stages, the links and the memory.

use std::time::Duration;

use shoal_protocol::units::Bytes;

use super::network::Link;
use crate::schedule::{Pipeline, settle};

/// Microbatches of a replica in a step, at most: beyond that none is worth being smaller.
const MOST: u64 = 256;

/// Of two sizes with which steps are no longer than this many times each other, the smaller is better: it keeps less.
const SAME: f64 = 1.01;

/// What a step computes and keeps, all stages together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Tokens of a step, those of all replicas.
    pub tokens: u64,
    /// Tokens of the smallest microbatch.
    pub least: u64,
    /// Seconds of a device for a token, forward and backward through the whole model.
    pub forward: f64,
    /// See `forward`.
    pub backward: f64,
    /// Seconds of each pass besides, however small it is.
    pub overhead: f64,
    /// Activations of a token at one boundary.
    pub activation: f64,
    /// Weights, gradients and moments of the whole model.
    pub state: f64,
    /// What the whole model keeps of a token until its backward pass.
    pub kept: f64,
    /// What a device has room for; none is no limit.
    pub memory: Option<f64>,
}

/// What is recommended for a placement.
#[derive(Debug, Clone, PartialEq)]
pub struct Advice {
    /// Tokens of a microbatch, and microbatches of each replica in a step.
    pub microbatch: u64,
    /// See `microbatch`.
    pub microbatches: u64,
    /// The most in flight at each stage.
    pub windows: Vec<usize>,
    /// From a step's first pass to the end of its last.
    pub passes: Duration,
    /// Of that, what engines compute.
    pub computes: Duration,
    /// Bytes of memory of the fullest device.
    pub memory: f64,
}

/// The best size of microbatches for so many stages of so many replicas whose slowest boundary is this link; none where
/// no size fits into memory, or a step has too few tokens for the replicas.
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
    // Who has most has this much of a step.
    let own = all.div_ceil(replicas) * least;
    let sizes = std::iter::successors(Some(least), |size| size.checked_mul(2));
    let sizes = sizes.take_while(|size| *size < 2 * own);
    let sizes = sizes.filter(|size| own.div_ceil(*size) <= MOST);
    let all = sizes.map(|size| with_size(work, (stages, own), size.min(own), boundary));
    let fits = |advice: &Advice| work.memory.is_none_or(|memory| advice.memory <= memory);
    let able: Vec<Advice> = all.filter(fits).collect();
    let least = able.iter().map(|advice| advice.passes).min()?;
    // The sizes grow.
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
    let activation = Bytes((work.activation * tokens) as u64);
    let pipeline = Pipeline {
        stages: stages.max(1),
        microbatches: microbatches as usize,
        forward: pass(work.forward),
        backward: pass(work.backward),
        delay: boundary.map_or(Duration::ZERO, |link| link.delay),
        transfer: boundary.map_or(Duration::ZERO, |link| link.transfer(activation)),
    };
    let (outcome, _) = settle(&pipeline);
    let most = outcome.peak.iter().copied().max().unwrap_or(0) as f64;
    let memory = (work.state + work.kept * tokens * most) / stages.max(1) as f64;
    let computes = outcome.busy / u32::try_from(stages.max(1)).unwrap_or(u32::MAX);
    let (windows, passes) = (outcome.peak, outcome.time);
    Advice { microbatch: size, microbatches, windows, passes, computes, memory }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::units::Rate;

    use super::*;

    /// Eight tokens, a second forward and two backward for each.
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
    fn on_one_device_large_microbatches_save_what_each_pass_costs() {
        let work = Work { overhead: 0.5, ..WORK };
        let advice = advise(&work, 1, 1, None).expect("it fits");
        // 8 (1.5 + 2.5) = 32, 4 (2.5 + 4.5) = 28, 2 (4.5 + 8.5) = 26, 8.5 + 16.5 = 25.
        assert_eq!((advice.microbatch, advice.passes), (8, Duration::from_secs(25)));
        assert_eq!(advice.memory, 26.0);
        // 10 + 2 · 2 = 14: two tokens at a time have room, four do not.
        let small = advise(&Work { memory: Some(14.0), ..work }, 1, 1, None).expect("it fits");
        assert_eq!((small.microbatch, small.passes), (2, Duration::from_secs(28)));
        assert_eq!(advise(&Work { memory: Some(11.0), ..work }, 1, 1, None), None);
    }

    #[test]
    fn in_a_pipeline_small_ones_fill_it_sooner() {
        let advice = advise(&WORK, 2, 1, None).expect("it fits");
        // Stages of 0.5 s and 1 s: eight of 1.5 s, and another for the second stage to begin and the first to
        // end. With one of eight tokens it would be 12 s at each.
        assert_eq!((advice.microbatch, advice.microbatches), (1, 8));
        assert_eq!(advice.passes, Duration::from_secs_f64(13.5));
        assert_eq!(advice.computes, Duration::from_secs(12));
    }

    #[test]
    fn two_replicas_have_half_of_a_step_each() {
        let advice = advise(&WORK, 2, 2, None).expect("it fits");
        // Four of 1.5 s and one.
        assert_eq!((advice.microbatches, advice.passes), (4, Duration::from_secs_f64(7.5)));
        assert_eq!(advise(&WORK, 1, 16, None), None, "half a token");
    }

    #[test]
    fn a_slow_link_sets_the_pace() {
        // Two seconds for a token's activation, and as long for its gradient on the other way.
        let link = Link { delay: Duration::ZERO, rate: Rate(10) };
        let work = Work { activation: 20.0, ..WORK };
        let advice = advise(&work, 2, 1, Some(link)).expect("it fits");
        // 0.5 + 8 · 2 + (0.5 + 1) + 2 + 1: the first pass, eight on the link, the last stage, back, the first again.
        assert_eq!((advice.microbatch, advice.passes), (1, Duration::from_secs_f64(21.0)));
        assert!(advice.windows[0] > 3, "more are in flight: {:?}", advice.windows);
    }
}
