//! Recommends how a pipeline runs whose devices each host a span of stages, and swap them where they do not
//! fit: one stage each is SWARM (arXiv 2301.11913), all stages is ATOM (arXiv 2403.10504).
//!
//! A device with `n` of `S` stages computes `n` times as long for a microbatch, and sends its activations
//! once instead of `n` times. Where the span does not fit, each stage is visited by `C` microbatches in a
//! row while the next one is loaded, so a visit takes as long as the longer of `C` passes and a load. What
//! of the loads passes do not hide is lost. Swapped stages keep no graphs: a backward pass computes its
//! forward pass again.

use std::time::Duration;

use super::advice::{Advice, MOST, Work, advise, settled};
use super::network::Link;

/// The link below a device's memory, and what it carries.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tier {
    /// Bytes per second, in each direction.
    pub rate: f64,
    /// Bytes of the whole model that passes read.
    pub weights: f64,
    /// Bytes of the whole model's accumulators.
    pub sums: f64,
}

/// The stages of the model and of each device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Stages of the model.
    pub stages: usize,
    /// Stages of a device; a divisor of `stages`.
    pub span: usize,
}

impl Cut {
    /// Devices that a microbatch passes.
    #[must_use]
    pub fn positions(self) -> usize {
        self.stages / self.span.max(1)
    }

    /// All spans of equal length, the shortest first.
    pub fn all(stages: usize) -> impl Iterator<Item = Self> {
        (1..=stages)
            .filter(move |span| stages.is_multiple_of(*span))
            .map(move |span| Self { stages, span })
    }
}

/// A recommendation for devices that host spans.
#[derive(Debug, Clone, PartialEq)]
pub struct SpanAdvice {
    /// Microbatches, windows and times. The passes contain all loads.
    pub advice: Advice,
    /// Microbatches of a visit; `None` if all stages of a span fit.
    pub visit: Option<u64>,
    /// Time of a step for which the engine waits for loads.
    pub exposed: Duration,
}

/// The best size of microbatches, and of visits, for `replicas` pipelines. `None` if no size fits, or a step
/// has too few tokens.
#[must_use]
pub fn advise_span(
    work: &Work,
    tier: Option<&Tier>,
    cut: Cut,
    replicas: usize,
    boundary: Option<Link>,
) -> Option<SpanAdvice> {
    let resident = Work { overhead: work.overhead * cut.span as f64, ..*work };
    if let Some(advice) = advise(&resident, cut.positions(), replicas, boundary) {
        return Some(SpanAdvice { advice, visit: None, exposed: Duration::ZERO });
    }
    let tier = tier.filter(|_| cut.span > 1)?;
    let least = work.least.max(1);
    let replicas = replicas.max(1) as u64;
    let samples = work.tokens / least;
    if samples < replicas {
        return None;
    }
    let own = samples.div_ceil(replicas) * least;
    let doubled = |from: u64| std::iter::successors(Some(from), |size| size.checked_mul(2));
    let sizes = doubled(least).take_while(|size| *size <= own);
    let sizes = sizes.filter(|size| own.div_ceil(*size) <= MOST);
    let all = sizes.flat_map(|size| {
        let count = own.div_ceil(size);
        let visits = doubled(1).take_while(move |visit| *visit < 2 * count);
        visits.map(move |visit| (size, count, visit.min(count)))
    });
    all.filter_map(|(size, count, visit)| swapped(work, tier, cut, (size, count, visit), boundary))
        .min_by_key(|found| found.advice.passes)
}

/// A step of `count` microbatches of `size` tokens, in visits of `visit`.
fn swapped(
    work: &Work,
    tier: &Tier,
    cut: Cut,
    (size, count, visit): (u64, u64, u64),
    boundary: Option<Link>,
) -> Option<SpanAdvice> {
    let (tokens, stages) = (size as f64, cut.stages as f64);
    let forward = tokens * work.forward / stages + work.overhead;
    let backward = forward + tokens * work.backward / stages + work.overhead;
    let loads = [tier.weights, tier.weights + tier.sums].map(|bytes| bytes / stages / tier.rate);
    // The stage at hand and the next one, and the graph of one microbatch.
    let memory = (2.0 * (tier.weights + tier.sums) + work.kept * tokens) / stages;
    if work.memory.is_some_and(|most| memory > most) {
        return None;
    }
    let passes = [forward, backward].map(|pass| pass * visit as f64);
    let visits = [passes[0].max(loads[0]), passes[1].max(loads[1])];
    let of_span = |seconds: f64| Duration::from_secs_f64(seconds * cut.span as f64);
    let activations = work.activation * tokens * visit as f64;
    let turns = count.div_ceil(visit);
    let outcome = settled((cut.positions(), turns), visits.map(of_span), boundary, activations);
    let lost = (visits[0] - passes[0] + visits[1] - passes[1]) * turns as f64;
    // An update loads all that it changes.
    let update = of_span(work.state / stages / tier.rate);
    let exposed = of_span(lost) + update;
    let positions = u32::try_from(cut.positions()).unwrap_or(u32::MAX);
    let advice = Advice {
        microbatch: size,
        microbatches: count,
        windows: outcome.peak.iter().map(|peak| peak * visit as usize).collect(),
        passes: outcome.time + update,
        computes: (outcome.busy / positions + update).saturating_sub(exposed),
        memory,
    };
    Some(SpanAdvice { advice, visit: Some(visit), exposed })
}

#[cfg(test)]
mod tests {
    use shoal_protocol::units::Rate;

    use super::*;

    /// Eight tokens; a second forward and two backward for each. All of the state does not fit, a quarter
    /// does.
    const WORK: Work = Work {
        tokens: 8,
        least: 1,
        forward: 1.0,
        backward: 2.0,
        overhead: 0.0,
        activation: 20.0,
        state: 400.0,
        kept: 0.0,
        memory: Some(100.0),
    };

    const TIER: Tier = Tier { rate: 100.0, weights: 50.0, sums: 100.0 };

    fn slow() -> Option<Link> {
        Some(Link { delay: Duration::ZERO, rate: Rate(1) })
    }

    fn advise_at(span: usize, tier: Tier, link: Option<Link>) -> Option<SpanAdvice> {
        advise_span(&WORK, Some(&tier), Cut { stages: 4, span }, 1, link)
    }

    #[test]
    fn spans_divide_the_stages() {
        let spans: Vec<usize> = Cut::all(12).map(|cut| cut.span).collect();
        assert_eq!(spans, [1, 2, 3, 4, 6, 12]);
        assert!(Cut::all(12).all(|cut| cut.positions() * cut.span == 12));
    }

    #[test]
    fn loads_hide_behind_enough_microbatches_and_links_do_not_matter() {
        let all = advise_at(4, TIER, slow()).expect("two stages fit");
        // A stage is loaded in 0.125 s and 0.375 s, behind 8 passes of 0.25 s and of 0.75 s. The update
        // loads 400 bytes: 4 s.
        assert_eq!(all.exposed, Duration::from_secs(4));
        assert_eq!(all.advice.passes, Duration::from_secs(8 + 24 + 4));
        assert_eq!(all.advice.computes, Duration::from_secs(32));
        let one = advise_at(1, TIER, slow()).expect("a stage fits");
        assert_eq!((one.visit, one.exposed), (None, Duration::ZERO));
        assert!(one.advice.passes > Duration::from_secs(160), "20 s a token on each link");
        let near = advise_at(1, TIER, None).expect("a stage fits");
        assert!(near.advice.passes < all.advice.passes / 2, "{near:?}");
    }

    #[test]
    fn a_slow_tier_costs_what_passes_do_not_hide() {
        let tier = Tier { rate: 1.0, ..TIER };
        let all = advise_at(4, tier, None).expect("two stages fit");
        // 12.5 s behind 8 · 0.25 and 37.5 s behind 8 · 0.75, at each of four stages, and the update.
        let lost = 4.0 * (12.5 - 2.0 + 37.5 - 6.0) + 400.0;
        assert_eq!((all.visit, all.exposed), (Some(8), Duration::from_secs_f64(lost)));
    }

    #[test]
    fn a_span_that_neither_fits_nor_swaps_is_not_recommended() {
        let cut = Cut { stages: 4, span: 4 };
        assert_eq!(advise_span(&WORK, None, cut, 1, None), None);
        let large = Tier { sums: 1000.0, ..TIER };
        assert_eq!(advise_at(4, large, None), None, "two stages do not fit");
        let roomy = Work { memory: None, ..WORK };
        let fits = advise_span(&roomy, None, cut, 1, None).expect("no limit");
        assert_eq!((fits.visit, fits.advice.passes), (None, Duration::from_secs(24)));
    }
}
