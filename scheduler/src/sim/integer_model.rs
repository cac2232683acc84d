//! A model of integers. It computes exactly what the real model computes in floating point, so that
//! a microbatch lost or counted twice shows in the weights.
//!
//! A word represents a tensor. Every word depends on the weights and on all its inputs.

use std::ops::Range;

use shoal_protocol::ids::{ClaimKey, ContentHash, Exchange, Stage, Step};
use shoal_protocol::limits;
use shoal_protocol::manifest::{Manifest, Outlier, Verdict};
use shoal_protocol::message::{Challenge, FixedLoss, RoundCheck};

use crate::action::Owned;

/// How far sums of small integers in f64 may be off, relatively.
const ROUNDING: f64 = 1e-12;

/// Mixes words into one (the finaliser of MurmurHash3, word by word).
pub(super) fn mix(words: &[u64]) -> u64 {
    words.iter().fold(0x9e37_79b9_7f4a_7c15, |state, word| {
        let mut mixed = (state ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed ^= mixed >> 33;
        mixed = mixed.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        mixed ^ (mixed >> 29)
    })
}

/// A stage's weights at a version and, if the manifest allows stale reads, at those before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode)]
pub(super) struct Weights {
    pub(super) newest: u64,
    /// The newest first; `None` for those that no step reads.
    pub(super) before: [Option<u64>; limits::STALENESS as usize],
}

impl Weights {
    /// A stage's weights before the first step.
    pub(super) fn initial(manifest: &Manifest, stage: Stage) -> Self {
        let mut newest = mix(&[manifest.training.seed, 1, u64::from(stage.0)]);
        if let Some(start) = manifest.start {
            newest = mix(&[newest, 10, start.step.0]);
        }
        let is_read = |age| age < usize::from(manifest.training.staleness);
        let before = std::array::from_fn(|age| is_read(age).then_some(newest));
        Self { newest, before }
    }

    /// The weights after a step, which changes nothing if a gradient of it was broken.
    pub(super) fn updated(self, sums: &[i64], gradient_norm: f64, loss: FixedLoss) -> Self {
        let newest = match verdict(loss).is_skipped() {
            true => self.newest,
            false => updated(self.newest, sums, gradient_norm),
        };
        let mut before = self.before;
        let mut newer = self.newest;
        for held in before.iter_mut().flatten() {
            std::mem::swap(held, &mut newer);
        }
        Self { newest, before }
    }

    /// The weights that an exchange of a step reads, given those of a version.
    pub(super) fn read_by(
        self,
        (step, exchange): (Step, Exchange),
        version: Step,
        manifest: &Manifest,
    ) -> Option<u64> {
        let age = version.0.checked_sub(manifest.exchange_reads(step, exchange).0)?;
        let mut held = [self.newest].into_iter().chain(self.before.into_iter().flatten());
        held.nth(usize::try_from(age).ok()?)
    }
}

/// The samples of an exchange of a microbatch.
pub(super) fn samples(seed: u64, key: ClaimKey, exchange: Exchange) -> u64 {
    mix(&[seed, 2, key.step.0, u64::from(key.microbatch.0), u64::from(exchange.0)])
}

/// One stage of a virtual worker, whose weights follow from all of its passes before.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) weights: u64,
    /// The sums of all passes.
    pub(super) sums: Vec<i64>,
    pub(super) loss: FixedLoss,
    /// Whether it joins no weights, as an injected error.
    pub(super) stays: bool,
    forwarded: u32,
    returned: u32,
}

impl Worker {
    /// A worker that begins from these weights.
    pub(super) fn new(weights: u64, elements: usize) -> Self {
        let (sums, loss) = (vec![0; elements], FixedLoss::default());
        Self { weights, sums, loss, stays: false, forwarded: 0, returned: 0 }
    }

    /// A forward pass, which begins an update after `at_once` of them, and first joins the newest weights if they are
    /// given. Returns the weights that it reads.
    pub(super) fn forward(
        &mut self,
        exchange: Exchange,
        at_once: u32,
        joined: Option<u64>,
    ) -> Result<u64, String> {
        if exchange.0 != self.forwarded {
            return Err(format!("exchange {exchange} follows {} of a worker", self.forwarded));
        }
        if self.forwarded > 0 && self.forwarded.is_multiple_of(at_once) {
            if self.returned != self.forwarded {
                return Err("a worker's update begins before all gradients are back".to_owned());
            }
            self.weights = updated(self.weights, &self.sums, 0.0);
        }
        if let Some(newest) = joined.filter(|_| !self.stays) {
            self.weights = mix(&[11, self.weights, newest]);
        }
        self.forwarded += 1;
        Ok(self.weights)
    }

    /// A backward pass, with its weight gradient.
    pub(super) fn backward(&mut self, exchange: Exchange, part: &[i64]) -> Result<(), String> {
        if exchange.0 != self.returned {
            return Err(format!("gradient {exchange} follows {} of a worker", self.returned));
        }
        self.returned += 1;
        add(&mut self.sums, 0..part.len(), part);
        Ok(())
    }
}

/// A stage's output.
pub(super) fn forward(weights: u64, input: u64) -> u64 {
    mix(&[3, weights, input])
}

/// The loss and the number of targets, derived from the last stage's output.
pub(super) fn loss(output: u64) -> FixedLoss {
    FixedLoss::new((mix(&[4, output]) % (1 << 34)) as i64, output % 8)
}

/// The gradient at the last stage's output.
pub(super) fn loss_gradient(output: u64) -> u64 {
    mix(&[5, output])
}

/// Gradient of a stage's input.
pub(super) fn backward(weights: u64, input: u64, gradient: u64) -> u64 {
    mix(&[6, weights, input, gradient])
}

/// A stage's weight gradient, in small integers.
pub(super) fn weight_gradient(
    weights: u64,
    input: u64,
    gradient: u64,
    elements: usize,
) -> Vec<i64> {
    let state = mix(&[7, weights, input, gradient]);
    (0..elements as u64).map(|index| (mix(&[state, index]) % 2001) as i64 - 1000).collect()
}

/// Whether a stage's weight gradient stands for one that is not finite: one in thirty-two does.
pub(super) fn is_broken(part: &[i64]) -> bool {
    let words: Vec<u64> = part.iter().map(|number| *number as u64).collect();
    mix(&[12, mix(&words)]).is_multiple_of(32)
}

/// What becomes of a step with this loss.
pub(super) fn verdict(loss: FixedLoss) -> Verdict {
    match loss.broken {
        0 => Verdict::WHOLE,
        gradients => Verdict { rate: 0.0, outlier: Some(Outlier::NotFinite { gradients }) },
    }
}

/// Hash of a reduced gradient, and the sum of its squares in the order of its elements.
pub(super) fn summary(sums: &[i64]) -> (ContentHash, f64) {
    let mut hasher = blake3::Hasher::new();
    let mut square_norm = 0.0;
    for sum in sums {
        hasher.update(&sum.to_le_bytes());
        square_norm += (*sum as f64) * (*sum as f64);
    }
    (hasher.finalize().into(), square_norm)
}

/// Projections of a member's sums and of a reduced gradient, by groups of owners.
pub(super) fn checks(
    challenge: &Challenge,
    owned: &[Owned],
    sums: &[i64],
    result: &[i64],
) -> Vec<RoundCheck> {
    let groups = owned.iter().map(|owned| usize::from(owned.group) + 1).max().unwrap_or(0);
    let mut checks = vec![RoundCheck::default(); groups];
    for Owned { range, group, .. } in owned {
        let check = &mut checks[usize::from(*group)];
        for element in range.clone() {
            let (own, whole) = (sums[element] as f64, result[element] as f64);
            for (direction, factor) in challenge.factors(element as u64).into_iter().enumerate() {
                check.own[direction] += factor * own;
                check.result[direction] += factor * whole;
            }
            check.slack += (own.abs() + whole.abs()) * ROUNDING;
        }
    }
    checks
}

/// Weights after an update.
fn updated(weights: u64, sums: &[i64], gradient_norm: f64) -> u64 {
    sums.iter().fold(mix(&[8, weights, gradient_norm.to_bits()]), |weights, sum| {
        mix(&[weights, *sum as u64])
    })
}

/// The content of a stage's file in a checkpoint.
pub(super) fn file_hash(version: Step, stage: Stage, weights: Weights) -> ContentHash {
    let before = mix(&weights.before.map(|held| held.unwrap_or(0)));
    let words = [9, version.0, u64::from(stage.0), weights.newest, before];
    ContentHash::of(&mix(&words).to_le_bytes())
}

/// Adds integers to a range of a vector.
pub(super) fn add(sums: &mut [i64], range: Range<usize>, parts: &[i64]) {
    for (sum, part) in sums[range].iter_mut().zip(parts) {
        *sum += part;
    }
}
