//! The losses of pairs: what they are, and what their gradients are, given the log-probabilities of both completions.
//!
//! All is computed in f64 by the `libm` crate, so the bits are the same on every machine.

use std::ops::Range;

use shoal_protocol::manifest::{Preference, PreferenceKind};
use tch::{Kind, Tensor};

use crate::device::tensor::elements;
use crate::error::Result;

/// The mean log-probability of a token is at most this: a probability of 1 has infinite odds.
const MOST_CERTAIN: f64 = -1e-7;

/// One pair among the rows of a microbatch.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Pair {
    pub(crate) chosen: Completion,
    pub(crate) rejected: Completion,
}

impl Pair {
    /// The same pair behind some rows.
    pub(crate) fn behind(mut self, rows: usize) -> Self {
        for one in [&mut self.chosen, &mut self.rejected] {
            one.rows = one.rows.start + rows..one.rows.end + rows;
        }
        self
    }
}

/// One sequence of a pair.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Completion {
    /// Its rows.
    pub(crate) rows: Range<usize>,
    /// Rows with a target, at least one.
    pub(crate) targets: u64,
    /// The reference's log-probability of the targets; 0 where the loss needs none.
    pub(crate) reference: f32,
}

/// The loss of one pair.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PairLoss {
    loss: f64,
    /// Its derivatives by the log-probabilities of the chosen and the rejected completion.
    gradients: [f64; 2],
    /// The reward of the chosen completion minus that of the rejected one.
    margin: f64,
}

/// The loss of the pairs of a microbatch.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PairLosses {
    /// The mean over the pairs.
    pub(crate) mean: f64,
    /// Pairs whose chosen completion has the larger reward.
    pub(crate) preferred: u64,
    /// The mean difference of rewards.
    pub(crate) margin: f64,
    /// The factor of each row's cross-entropy in the gradient of the mean.
    pub(crate) weights: Vec<f32>,
}

/// The loss of pairs, from the cross-entropy of each row: f32, `[N]`, 0 where a row has no target. Rows are added in
/// their order.
pub(crate) fn pair_losses(
    preference: &Preference,
    pairs: &[Pair],
    of_rows: &Tensor,
) -> Result<PairLosses> {
    let of_rows = of_rows.f_to_kind(Kind::Float)?.f_to(tch::Device::Cpu)?.f_contiguous()?;
    let of_rows = elements::<f32>(&of_rows);
    let mut all =
        PairLosses { mean: 0.0, preferred: 0, margin: 0.0, weights: vec![0.0; of_rows.len()] };
    let share = 1.0 / pairs.len() as f64;
    for pair in pairs {
        let both = [&pair.chosen, &pair.rejected];
        let sums = both.map(|one| {
            let rows = &of_rows[one.rows.clone()];
            -rows.iter().fold(0.0, |sum, row| sum + f64::from(*row))
        });
        let PairLoss { loss, gradients, margin } = pair_loss(preference, pair, sums);
        all.mean += loss * share;
        all.margin += margin * share;
        all.preferred += u64::from(margin > 0.0);
        for (one, gradient) in both.into_iter().zip(gradients) {
            // A cross-entropy is minus a log-probability. Rows without a target have no gradient.
            all.weights[one.rows.clone()].fill((-gradient * share) as f32);
        }
    }
    Ok(all)
}

/// The loss of a pair whose completions have these log-probabilities.
fn pair_loss(preference: &Preference, pair: &Pair, sums: [f64; 2]) -> PairLoss {
    let Preference { kind, beta, gamma } = *preference;
    let counts = [&pair.chosen, &pair.rejected].map(|one| one.targets as f64);
    let references = [&pair.chosen, &pair.rejected].map(|one| f64::from(one.reference));
    let means = [sums[0] / counts[0], sums[1] / counts[1]];
    // Of a difference: the same gradient for both, per token if it is one of means.
    let opposed = |gradient: f64, counts: [f64; 2]| [gradient / counts[0], -gradient / counts[1]];
    match kind {
        PreferenceKind::Dpo => {
            let margin = beta * ((sums[0] - references[0]) - (sums[1] - references[1]));
            let gradients = opposed(-beta * sigmoid(-margin), [1.0; 2]);
            PairLoss { loss: softplus(-margin), gradients, margin }
        }
        PreferenceKind::Ipo => {
            let references = [references[0] / counts[0], references[1] / counts[1]];
            let difference = (means[0] - references[0]) - (means[1] - references[1]);
            let error = difference - 1.0 / (2.0 * beta);
            let gradients = opposed(2.0 * error, counts);
            PairLoss { loss: error * error, gradients, margin: beta * difference }
        }
        PreferenceKind::Simpo => {
            let margin = beta * (means[0] - means[1]);
            let over = margin - gamma;
            let gradients = opposed(-beta * sigmoid(-over), counts);
            PairLoss { loss: softplus(-over), gradients, margin }
        }
        PreferenceKind::Orpo => {
            let means = means.map(|mean| mean.min(MOST_CERTAIN));
            let odds = means.map(|mean| mean - libm::log(-libm::expm1(mean)));
            let ratio = odds[0] - odds[1];
            let of_ratio = -beta * sigmoid(-ratio);
            // The derivative of the logarithm of odds.
            let of_means = means.map(|mean| -of_ratio / libm::expm1(mean));
            let gradients = [(of_means[0] - 1.0) / counts[0], -of_means[1] / counts[1]];
            let loss = beta * softplus(-ratio) - means[0];
            PairLoss { loss, gradients, margin: beta * (means[0] - means[1]) }
        }
    }
}

/// The logarithm of `1 + e^x`.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + libm::log1p(libm::exp(-x.abs()))
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-x))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KINDS: [PreferenceKind; 4] =
        [PreferenceKind::Dpo, PreferenceKind::Ipo, PreferenceKind::Simpo, PreferenceKind::Orpo];

    fn pair(targets: [u64; 2], references: [f32; 2]) -> Pair {
        let [chosen, rejected] = [0, 1].map(|which: usize| {
            let (targets, reference) = (targets[which], references[which]);
            Completion { rows: which..which + 1, targets, reference }
        });
        Pair { chosen, rejected }
    }

    fn loss(kind: PreferenceKind, pair: &Pair, sums: [f64; 2]) -> PairLoss {
        let gamma = if kind == PreferenceKind::Simpo { 0.5 } else { 0.0 };
        pair_loss(&Preference { kind, beta: 0.3, gamma }, pair, sums)
    }

    proptest! {
        #[test]
        fn gradients_are_slopes_of_losses(
            targets in [1u64..40, 1u64..40],
            references in [-60f32..-1.0, -60f32..-1.0],
            sums in [-60f64..-1.0, -60f64..-1.0],
        ) {
            let pair = pair(targets, references);
            for kind in KINDS {
                let here = loss(kind, &pair, sums);
                for which in 0..2 {
                    let at = |by: f64| {
                        let mut sums = sums;
                        sums[which] += by;
                        loss(kind, &pair, sums).loss
                    };
                    let slope = (at(1e-4) - at(-1e-4)) / 2e-4;
                    let close = (slope - here.gradients[which]).abs() < 1e-5 * (1.0 + slope.abs());
                    prop_assert!(close, "{:?}: {} instead of {}", kind, here.gradients[which], slope);
                }
            }
        }
    }

    #[test]
    fn a_policy_that_is_its_reference_has_the_loss_of_a_coin() {
        let dpo = loss(PreferenceKind::Dpo, &pair([3, 4], [-7.0, -9.0]), [-7.0, -9.0]);
        assert_eq!((dpo.loss, dpo.margin), (std::f64::consts::LN_2, 0.0));
    }

    #[test]
    fn certain_completions_have_finite_losses() {
        for kind in KINDS {
            for sums in [[0.0, 0.0], [-1e4, 0.0], [0.0, -1e4]] {
                let found = loss(kind, &pair([1, 1], [0.0, 0.0]), sums);
                let numbers = [found.loss, found.gradients[0], found.gradients[1], found.margin];
                assert!(numbers.iter().all(|number| number.is_finite()), "{kind:?}: {found:?}");
            }
        }
    }
}
