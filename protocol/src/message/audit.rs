//! Audits: what members state about their work, and what a replica makes of it that computes it again.

use super::{Challenge, FixedLoss, Handed, HandoverHashes, InputId, RoundId, Signature};
use crate::ids::{ClaimKey, ContentHash, Era, Member, Microbatch, Stage, Step, Term};

/// Names the audit of a member's work at a stage in a step.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, bincode::Encode, bincode::Decode,
)]
pub struct AuditId {
    /// The era.
    pub era: Era,
    /// The term of the coordinator that orders the audit.
    pub term: Term,
    /// The step.
    pub step: Step,
    /// The stage.
    pub stage: Stage,
    /// The member whose work is computed again.
    pub of: Member,
}

impl AuditId {
    /// A microbatch of the audited work.
    #[must_use]
    pub fn key(&self, microbatch: Microbatch) -> ClaimKey {
        ClaimKey { step: self.step, stage: self.stage, microbatch }
    }
}

/// The work to compute again, and where its inputs are.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct AuditOrder {
    /// The audit.
    pub id: AuditId,
    /// The round of each of the stage's weight groups, in their order, with the hash of its result: they pose the
    /// challenge.
    pub rounds: Vec<(RoundId, ContentHash)>,
    /// The members that have the inputs in their output logs.
    pub holders: Vec<Member>,
    /// The microbatches, in order.
    pub work: Vec<AuditedWork>,
}

/// One microbatch to compute again, with its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct AuditedWork {
    /// The microbatch.
    pub microbatch: Microbatch,
    /// The activation; none at the first stage.
    pub activation: Option<AuditedInput>,
    /// The gradient; none at the last stage.
    pub gradient: Option<AuditedInput>,
}

/// An input of audited work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct AuditedInput {
    /// The place of its holder among those of the order.
    pub holder: u16,
    /// The hash of what the member took, as it states.
    pub hash: ContentHash,
}

/// What work comes to: stated by who did it, or found by who did it again.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct WorkDigest {
    /// Hash of what was taken.
    pub taken: ContentHash,
    /// Hash of what was made and handed on, and of the losses.
    pub made: ContentHash,
    /// The sums of weight gradients, of each of the stage's weight groups.
    pub sums: Vec<SumsPrint>,
}

/// What became of an audit at the replica that was ordered to make it.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum Finding {
    /// It computed the work.
    Computed {
        /// What the work comes to.
        digest: WorkDigest,
        /// The replica's signature of it.
        signature: Signature,
    },
    /// A holder sent an input that is not what the member took.
    OtherInput {
        /// The input.
        of: InputId,
        /// What was sent.
        sent: Handed,
    },
    /// It could not compute the work.
    NotComputed,
}

/// Digests handovers of microbatches, in order.
#[derive(Debug, Clone)]
pub struct HandoverDigest {
    taken: blake3::Hasher,
    made: blake3::Hasher,
}

impl Default for HandoverDigest {
    fn default() -> Self {
        Self {
            taken: blake3::Hasher::new_derive_key("shoal audit taken v1"),
            made: blake3::Hasher::new_derive_key("shoal audit made v1"),
        }
    }
}

impl HandoverDigest {
    /// Adds the next microbatch.
    pub fn add(&mut self, microbatch: Microbatch, hashes: HandoverHashes, loss: Option<FixedLoss>) {
        for (hasher, hashes) in [(&mut self.taken, hashes.taken), (&mut self.made, hashes.made)] {
            hasher.update(&microbatch.0.to_le_bytes());
            for hash in hashes {
                hasher.update(&[u8::from(hash.is_some())]);
                hasher.update(&hash.map_or([0; 32], |hash| hash.0));
            }
        }
        let FixedLoss { share, targets, padded, preferred, margin, broken } =
            loss.unwrap_or_default();
        self.made.update(&share.to_le_bytes());
        self.made.update(&targets.to_le_bytes());
        self.made.update(&padded.to_le_bytes());
        self.made.update(&preferred.to_le_bytes());
        self.made.update(&margin.to_le_bytes());
        self.made.update(&broken.to_le_bytes());
    }

    /// The digest of all of them, with their sums.
    #[must_use]
    pub fn with(self, sums: Vec<SumsPrint>) -> WorkDigest {
        let (taken, made) = (self.taken.finalize().into(), self.made.finalize().into());
        WorkDigest { taken, made, sums }
    }
}

/// The Mersenne prime 2^61 - 1.
const PRIME: u64 = (1 << 61) - 1;

/// A polynomial over the integers of a sum, at a point that follows from a round's result, modulo 2^61 - 1. Two
/// different sums of `n` integers have the same with a probability of `n / 2^61` at most, unless they were chosen
/// with knowledge of the point (Schwartz and Zippel).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, bincode::Encode, bincode::Decode,
)]
pub struct SumsPrint(pub u64);

/// Computes a [`SumsPrint`].
#[derive(Debug, Clone)]
pub struct SumsPrinter {
    /// The point to the powers 4, 3, 2 and 1.
    powers: [u64; 4],
    value: u64,
}

impl SumsPrinter {
    /// The print of no integers yet, at the point of a challenge.
    #[must_use]
    pub fn of(challenge: &Challenge) -> Self {
        let point = challenge.point() % PRIME;
        let square = product(point, point);
        Self { powers: [product(square, square), product(square, point), square, point], value: 0 }
    }

    /// Adds the next integers.
    pub fn add(&mut self, sums: &[i64]) {
        let [fourth, powers @ ..] = self.powers.map(u128::from);
        let (rows, rest) = sums.as_chunks::<4>();
        let mut value = self.value;
        for [first, second, third, last] in rows {
            let ahead = [first, second, third].map(|sum| u128::from(residue(*sum)));
            let ahead: u128 = ahead.iter().zip(powers).map(|(sum, power)| sum * power).sum();
            value = reduced(u128::from(value) * fourth + ahead + u128::from(residue(*last)));
        }
        for sum in rest {
            value = reduced(u128::from(value) * powers[2] + u128::from(residue(*sum)));
        }
        self.value = value;
    }

    /// The print of all integers added.
    #[must_use]
    pub fn print(&self) -> SumsPrint {
        SumsPrint(self.value)
    }
}

/// An integer modulo the prime.
#[inline(always)]
fn residue(sum: i64) -> u64 {
    let magnitude = sum.unsigned_abs();
    let residue = (magnitude & PRIME) + (magnitude >> 61);
    let residue = if residue >= PRIME { residue - PRIME } else { residue };
    if sum < 0 && residue > 0 { PRIME - residue } else { residue }
}

fn product(one: u64, other: u64) -> u64 {
    reduced(u128::from(one) * u128::from(other))
}

/// A number of less than 2^125 modulo the prime.
#[inline(always)]
fn reduced(number: u128) -> u64 {
    let folded = (number & u128::from(PRIME)) + (number >> 61);
    let folded = (folded & u128::from(PRIME)) + (folded >> 61);
    let folded = folded as u64;
    if folded >= PRIME { folded - PRIME } else { folded }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::{Attempt, WeightGroup};

    fn challenge(number: u8) -> Challenge {
        let (era, term, step) = (Era(0), Term(1), Step(1));
        let round = RoundId { era, term, step, weights: WeightGroup(0), attempt: Attempt(0) };
        Challenge::of(round, ContentHash([number; 32]))
    }

    /// The definition, in numbers that do not end.
    fn slowly(challenge: &Challenge, sums: &[i64]) -> u64 {
        let (prime, point) = (i128::from(PRIME), i128::from(challenge.point() % PRIME));
        let next = |value: i128, sum: &i64| (value * point + i128::from(*sum)).rem_euclid(prime);
        sums.iter().fold(0, next) as u64
    }

    proptest! {
        #[test]
        fn a_print_is_the_polynomial_however_the_integers_are_cut(
            number: u8, sums in prop::collection::vec(any::<i64>(), 0..50), cut in 0usize..50
        ) {
            let challenge = challenge(number);
            let mut printer = SumsPrinter::of(&challenge);
            let (first, second) = sums.split_at(cut.min(sums.len()));
            printer.add(first);
            printer.add(second);
            prop_assert_eq!(printer.print(), SumsPrint(slowly(&challenge, &sums)));
        }

        #[test]
        fn another_integer_shows(
            number: u8, mut sums in prop::collection::vec(any::<i64>(), 1..50), at: usize, by: i64
        ) {
            prop_assume!(by % (PRIME as i64) != 0);
            let print = |sums: &[i64]| {
                let mut printer = SumsPrinter::of(&challenge(number));
                printer.add(sums);
                printer.print()
            };
            let before = print(&sums);
            let at = at % sums.len();
            prop_assume!(sums[at].checked_add(by).is_some());
            sums[at] += by;
            prop_assert_ne!(print(&sums), before);
        }
    }

    #[test]
    fn the_ends_of_the_range_have_their_residues() {
        for sum in [i64::MIN, i64::MIN + 1, -1, 0, 1, PRIME as i64, PRIME as i64 + 1, i64::MAX] {
            let expected = i128::from(sum).rem_euclid(i128::from(PRIME));
            assert_eq!(i128::from(residue(sum)), expected, "{sum}");
        }
    }

    #[test]
    fn handovers_show_in_what_they_are_of() {
        let hash = |byte| Some(ContentHash([byte; 32]));
        let handover = HandoverHashes { taken: [hash(1), None], made: [None, None] };
        let digest = |handover, loss| {
            let mut digest = HandoverDigest::default();
            digest.add(Microbatch(3), handover, loss);
            digest.with(Vec::new())
        };
        let one = digest(handover, None);
        let other = digest(HandoverHashes { made: [hash(2), None], ..handover }, None);
        assert!(one.taken == other.taken && one.made != other.made);
        let gradient = digest(HandoverHashes { taken: [hash(1), hash(2)], ..handover }, None);
        assert!(one.taken != gradient.taken && one.made == gradient.made);
        assert_ne!(digest(handover, Some(FixedLoss::new(1, 1))).made, one.made);
    }
}
