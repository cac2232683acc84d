//! What members report about their work: held claims, pass times and losses.

use std::num::NonZeroU16;
use std::time::Duration;

use super::Handover;
use crate::ids::{ClaimKey, Grant};

/// A claim as its holder knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct HeldClaim {
    /// The work.
    pub key: ClaimKey,
    /// The grant under which the sender holds it.
    pub grant: Grant,
    /// Whether the work is in the holder's accumulator (or, if held out, evaluated).
    pub done: bool,
    /// The loss, from the last stage, once the work is done.
    pub loss: Option<FixedLoss>,
    /// What was taken and made, once the work is done; empty in a run without audits.
    pub handover: Handover,
}

/// The durations of a microbatch's passes at one stage. Each is counted from the moment when the
/// engine could have begun: all inputs were there, and the previous pass had ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct PassTimes {
    /// The forward pass.
    pub forward: Duration,
    /// The backward pass, with the addition of its weight gradients; zero for a held-out microbatch.
    pub backward: Duration,
}

impl PassTimes {
    /// The time for each microbatch where so many devices run one at a time each.
    #[must_use]
    pub fn shared_by(self, devices: NonZeroU16) -> Self {
        let devices = u32::from(devices.get());
        Self { forward: self.forward / devices, backward: self.backward / devices }
    }
}

/// The loss of one microbatch, or a sum of losses. Integers make the sum independent of the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct FixedLoss {
    /// The targets' losses divided by the tokens of a microbatch, in units of 2^-32 nats.
    pub share: i64,
    /// Targets: tokens that count towards the loss, or pairs.
    pub targets: u64,
    /// Tokens that are followed by padding.
    pub padded: u64,
    /// Pairs whose chosen completion has the larger reward.
    pub preferred: u64,
    /// The differences of the pairs' rewards divided by the pairs of a microbatch, in the units of `share`.
    pub margin: i64,
    /// Gradients that are not finite or beyond the range of the sums, and count for nothing: of a microbatch, one for
    /// each stage.
    pub broken: u32,
}

impl FixedLoss {
    const UNIT: f64 = (1u64 << 32) as f64;

    /// A loss of so many units and targets, without padding.
    #[must_use]
    pub const fn new(share: i64, targets: u64) -> Self {
        Self { share, targets, padded: 0, preferred: 0, margin: 0, broken: 0 }
    }

    /// What a stage that computes no loss reports of a gradient that is not finite.
    pub const BROKEN: Self = Self { broken: 1, ..Self::new(0, 0) };

    /// The same loss, of a microbatch whose gradient here is not finite.
    #[must_use]
    pub fn of_broken(self) -> Self {
        Self { broken: 1, ..self }
    }

    /// Whether a stage may report this of its work: the last one a loss, any other at most a broken gradient.
    #[must_use]
    pub fn may_be(reported: Option<Self>, is_last: bool) -> bool {
        match (reported, is_last) {
            (Some(loss), true) => loss.broken <= 1,
            (None, is_last) => !is_last,
            (Some(loss), false) => loss == Self::BROKEN,
        }
    }

    /// Rounds the targets' losses divided by the tokens of a microbatch; saturates at 2^31 nats.
    #[must_use]
    pub fn from_nats(share: f64, targets: u64, padded: u64) -> Self {
        Self { padded, ..Self::new(Self::fixed(share), targets) }
    }

    /// The same, of pairs: how many prefer the chosen completion, and by how much on average.
    #[must_use]
    pub fn with_preferences(self, preferred: u64, margin: f64) -> Self {
        Self { preferred, margin: Self::fixed(margin), ..self }
    }

    fn fixed(number: f64) -> i64 {
        (number * Self::UNIT).round_ties_even() as i64
    }

    /// The mean loss per target, for microbatches of so many tokens or pairs; 0 without a target.
    #[must_use]
    pub fn mean(self, terms_per_microbatch: u64) -> f64 {
        self.mean_of(self.share, terms_per_microbatch)
    }

    /// The mean difference of the pairs' rewards, for microbatches of so many pairs.
    #[must_use]
    pub fn mean_margin(self, terms_per_microbatch: u64) -> f64 {
        self.mean_of(self.margin, terms_per_microbatch)
    }

    /// The share of pairs whose chosen completion has the larger reward.
    #[must_use]
    pub fn accuracy(self) -> f64 {
        if self.targets == 0 { 0.0 } else { self.preferred as f64 / self.targets as f64 }
    }

    fn mean_of(self, share: i64, terms_per_microbatch: u64) -> f64 {
        if self.targets == 0 {
            return 0.0;
        }
        let microbatches = self.targets as f64 / terms_per_microbatch as f64;
        share as f64 / Self::UNIT / microbatches
    }
}

impl std::iter::Sum for FixedLoss {
    /// A sum out of range, which only a peer that lies can cause, is the last number of the range.
    fn sum<I: Iterator<Item = Self>>(losses: I) -> Self {
        let (mut share, mut margin, mut sum) = (0_i128, 0_i128, Self::default());
        for loss in losses {
            share += i128::from(loss.share);
            margin += i128::from(loss.margin);
            sum.preferred = sum.preferred.saturating_add(loss.preferred);
            sum.targets = sum.targets.saturating_add(loss.targets);
            sum.padded = sum.padded.saturating_add(loss.padded);
            sum.broken = sum.broken.saturating_add(loss.broken);
        }
        let within = |sum: i128| sum.clamp(i64::MIN.into(), i64::MAX.into()) as i64;
        (sum.share, sum.margin) = (within(share), within(margin));
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_sum_to_the_same_in_any_order() {
        let losses: Vec<FixedLoss> =
            [5.545_177, 0.1, 3.75e-3].map(|loss| FixedLoss::from_nats(loss, 8, 0)).to_vec();
        let forward: FixedLoss = losses.iter().copied().sum();
        let backward: FixedLoss = losses.iter().rev().copied().sum();
        assert_eq!(forward, backward);
        assert!((forward.mean(8) - (5.545_177 + 0.1 + 3.75e-3) / 3.0).abs() < 1e-9);
        // A worker's loss is that of all its passes.
        let long = FixedLoss::from_nats(65_536.0 * 5.5, 65_536 * 8, 0);
        assert!((long.mean(8) - 5.5).abs() < 1e-9);
        // Whatever a peer says is no panic.
        let all = [i64::MAX, i64::MAX, -5, i64::MIN].map(|share| FixedLoss::new(share, u64::MAX));
        let of = |losses: &[FixedLoss]| losses.iter().copied().sum::<FixedLoss>();
        assert_eq!(of(&all[..2]), FixedLoss::new(i64::MAX, u64::MAX));
        assert_eq!(of(&all), FixedLoss::new(i64::MAX - 6, u64::MAX));
        let reversed: Vec<FixedLoss> = all.into_iter().rev().collect();
        assert_eq!(of(&reversed), of(&all));
    }
}
