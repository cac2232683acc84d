//! The challenge that a round's result poses to its members: the result must be the sum of what they gave.
//!
//! Every member projects its own sums and the result onto the same few pseudo-random directions, which follow from
//! the result's hash, and reports both. Projections are linear: those of all members' sums add up to that of the
//! result, but for rounding, if every piece is the sum of its parts. Who reduced a piece had to choose its numbers
//! before their hash, and with it the directions, was known (Fiat and Shamir, 1986); a change `d` that is `x` times as
//! long as the rounding errors stays unseen with a probability of about `x^-3`.

use super::RoundId;
use crate::ids::ContentHash;

/// Directions onto which a member projects.
pub const PROJECTIONS: usize = 3;

/// Groups of a round's members by whose pieces the projections are kept apart: a member is in the group of its place
/// modulo this number, so that a report stays small in a round of a thousand.
pub const OWNER_GROUPS: usize = 32;

/// Bits of a factor.
const FACTOR_BITS: u32 = 21;

/// What a member reports about the pieces of one group of owners.
#[derive(Debug, Clone, Copy, PartialEq, Default, bincode::Encode, bincode::Decode)]
pub struct RoundCheck {
    /// Projections of what it gave.
    pub own: [f64; PROJECTIONS],
    /// Projections of the result.
    pub result: [f64; PROJECTIONS],
    /// How far rounding may take the projections of the result from those of all members' sums, at most.
    pub slack: f64,
}

impl RoundCheck {
    /// Whether all of it is numbers, and the slack none below zero.
    #[must_use]
    pub fn is_finite(&self) -> bool {
        self.own.iter().chain(&self.result).all(|one| one.is_finite())
            && self.slack.is_finite()
            && self.slack >= 0.0
    }
}

/// Number of groups of owners in a round of so many members: none if there is nobody to check.
#[must_use]
pub fn owner_groups(members: usize) -> usize {
    if members < 2 { 0 } else { members.min(OWNER_GROUPS) }
}

/// The directions that follow from a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Challenge {
    keys: [u64; 2],
}

impl Challenge {
    /// The challenge of a round's whole result with this hash.
    #[must_use]
    pub fn of(round: RoundId, result: ContentHash) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("shoal round challenge v1");
        for word in [round.step.0, u64::from(round.weights.0), u64::from(round.attempt.0)] {
            hasher.update(&word.to_le_bytes());
        }
        hasher.update(&result.0);
        let mut keys = [[0; 8]; 2];
        hasher.finalize_xof().fill(keys.as_flattened_mut());
        Self { keys: keys.map(u64::from_le_bytes) }
    }

    /// The point at which [`super::SumsPrint`]s are taken.
    #[must_use]
    pub(super) fn point(&self) -> u64 {
        self.keys[0] ^ self.keys[1].rotate_left(32)
    }

    /// The factors of an element in the directions, within -1 and 1.
    #[must_use]
    #[inline(always)]
    pub fn factors(&self, element: u64) -> [f64; PROJECTIONS] {
        // SplitMix64 (Steele et al., 2014), with another key before its last mixing.
        let mut word = element.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(self.keys[0]);
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ self.keys[1];
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^= word >> 31;
        let half = 1i32 << (FACTOR_BITS - 1);
        let mask = (1u64 << FACTOR_BITS) - 1;
        std::array::from_fn(|direction| {
            let bits = (word >> (FACTOR_BITS * direction as u32)) & mask;
            f64::from(bits as i32 - half) * (1.0 / f64::from(half))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Attempt, Era, Step, Term, WeightGroup};

    fn challenge(hash: u8, step: u64) -> Challenge {
        let round = RoundId {
            era: Era(0),
            term: Term(1),
            step: Step(step),
            weights: WeightGroup(0),
            attempt: Attempt(0),
        };
        Challenge::of(round, ContentHash([hash; 32]))
    }

    #[test]
    fn factors_are_even_and_follow_from_the_result_and_the_round() {
        let count = 100_000;
        let (one, other) = (challenge(1, 3), challenge(2, 3));
        let (mut sums, mut squares, mut products) = ([0.0; 3], [0.0; 3], [0.0; 3]);
        for element in 0..count {
            let (factors, others) = (one.factors(element), other.factors(element));
            for direction in 0..PROJECTIONS {
                assert!(factors[direction].abs() <= 1.0);
                sums[direction] += factors[direction];
                squares[direction] += factors[direction].powi(2);
                products[direction] += factors[direction] * others[direction];
            }
        }
        for direction in 0..PROJECTIONS {
            let of = |sum: f64| sum / count as f64;
            assert!(of(sums[direction]).abs() < 0.01, "{sums:?}");
            assert!((of(squares[direction]) - 1.0 / 3.0).abs() < 0.01, "{squares:?}");
            assert!(of(products[direction]).abs() < 0.01, "{products:?}");
        }
        assert_ne!(challenge(1, 3), challenge(1, 4));
    }

    #[test]
    fn groups_are_as_many_as_members_up_to_a_limit() {
        assert_eq!([0, 1, 2, 31, 32, 1000].map(owner_groups), [0, 0, 2, 31, 32, 32]);
    }
}
