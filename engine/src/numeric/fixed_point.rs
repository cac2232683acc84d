//! The conversion of gradients to integers and back.
//!
//! A gradient `g` is represented by the integer `q = round(g · 2^bits)`, ties to even, where `bits`
//! is the manifest's `training.gradient_fraction_bits`: the resolution is `2^-bits`. Integer
//! addition is associative, so any replica may add any microbatch in any order. Each `|q|` must be
//! at most `(2^63 - 1) / M` for the run's `M` microbatches per step, each of which may have several gradients of a
//! weight, so the sum of a whole step fits in an i64 in any case: with 44 bits and 32 microbatches, gradients may reach
//! about 16 000.

use bytes::Bytes;
use shoal_protocol::manifest::Manifest;

use crate::device::kernel::widest;
use crate::error::{EngineError, GradientProblem, Result};

/// The conversion of gradients to integers and back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FixedPoint {
    /// Integers per unit: `2^bits`.
    pub(crate) scale: f64,
    /// Maximum magnitude of the integer of one gradient.
    limit: i64,
    /// Microbatches per step.
    microbatches: u32,
}

impl FixedPoint {
    /// The fixed-point format of a run.
    #[must_use]
    pub fn of(manifest: &Manifest) -> Self {
        let microbatches = manifest.training.microbatches;
        // A tied matrix gets a gradient as embedding and one as head; in a run with slices a norm gets one from each
        // group of tokens.
        let each = i64::from(manifest.model.block.tied) + 1;
        let gradients = i64::from(microbatches) * each.max(manifest.model.slices.into());
        Self {
            scale: f64::from(manifest.training.gradient_fraction_bits).exp2(),
            limit: i64::MAX / gradients,
            microbatches,
        }
    }

    /// Adds the complete sums of all replicas of a stage and converts the exact result to the mean
    /// gradient of the step.
    ///
    /// `parts` are i64, little-endian, of the same range of elements; the result is f32,
    /// little-endian. The exact sum is rounded to f64, divided by `2^bits · M` (rounded once more
    /// unless `M` is a power of two) and rounded to f32.
    ///
    /// # Errors
    /// If the parts differ in length or are not whole integers.
    pub fn reduce(&self, parts: &[impl AsRef<[u8]>]) -> Result<Bytes> {
        let first = parts.first().map_or(0, |part| part.as_ref().len());
        let mut means = vec![0f32; first / 8];
        self.means(parts, &mut means)?;
        Ok(Bytes::from_owner(Floats(means)))
    }

    /// Like [`FixedPoint::reduce`], into a slice.
    pub(crate) fn means(&self, parts: &[impl AsRef<[u8]>], means: &mut [f32]) -> Result<()> {
        let length = size_of::<i64>() * means.len();
        if let Some(part) = parts.iter().find(|part| part.as_ref().len() != length) {
            return Err(EngineError::UnequalParts { first: length, other: part.as_ref().len() });
        }
        let divisor = self.scale * f64::from(self.microbatches);
        if let [only] = parts {
            means_of(means, only.as_ref(), divisor);
            return Ok(());
        }
        let mut sums = [0i64; 1024];
        for (index, block) in means.chunks_mut(sums.len()).enumerate() {
            let start = index * size_of_val(&sums);
            let sums = &mut sums[..block.len()];
            sums.fill(0);
            for part in parts {
                add_words(sums, &part.as_ref()[start..start + size_of_val(sums)]);
            }
            means_of(block, bytemuck::cast_slice(sums), divisor);
        }
        Ok(())
    }

    /// What one member's sums (i64, little-endian) contribute to the mean, without rounding it to f32.
    ///
    /// # Errors
    /// If their lengths differ.
    pub(crate) fn contributions(&self, sums: &[u8], numbers: &mut [f64]) -> Result<()> {
        let length = size_of::<i64>() * numbers.len();
        if sums.len() != length {
            return Err(EngineError::UnequalParts { first: length, other: sums.len() });
        }
        contributions_of(numbers, sums, self.scale * f64::from(self.microbatches));
        Ok(())
    }

    /// The largest magnitude that the gradient of one microbatch may have.
    pub(crate) fn largest(&self) -> f32 {
        // Magnitudes are in the order of their bits.
        let (mut good, mut bad) = (0, f32::INFINITY.to_bits());
        while bad - good > 1 {
            let middle = good + (bad - good) / 2;
            match self.check(f32::from_bits(middle)) {
                Ok(()) => good = middle,
                Err(_) => bad = middle,
            }
        }
        f32::from_bits(good)
    }

    /// Whether the gradient of one microbatch may have this value.
    pub(crate) fn check(&self, value: f32) -> Result<(), GradientProblem> {
        if !value.is_finite() {
            return Err(GradientProblem::NotFinite);
        }
        let rounded = (f64::from(value.abs()) * self.scale).round_ties_even();
        // 2^63 itself is not an i64, and the cast would hide that.
        if rounded < i64::MAX as f64 && rounded as i64 <= self.limit {
            return Ok(());
        }
        Err(GradientProblem::OutOfRange {
            largest: f64::from(value.abs()),
            limit: self.limit as f64 / self.scale,
        })
    }
}

/// Exposes a vector of f32 as bytes without a copy.
struct Floats(Vec<f32>);

impl AsRef<[u8]> for Floats {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

pub(crate) fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

widest! {
    fn contributions_of(numbers: &mut [f64], sums: &[u8], divisor: f64) {
        let factor = 1.0 / divisor;
        for (number, sum) in numbers.iter_mut().zip(sums.as_chunks::<8>().0) {
            *number = i64::from_le_bytes(*sum) as f64 * factor;
        }
    }
}

widest! {
    /// Bits of the largest magnitude; those of infinity and NaN exceed all finite ones.
    pub(crate) fn largest_f32(values: &[u32]) -> u32 {
        values.iter().fold(0, |largest, bits| largest.max(bits & 0x7fff_ffff))
    }
}

widest! {
    /// Like [`largest_f32`].
    pub(crate) fn largest_bf16(values: &[u16]) -> u16 {
        values.iter().fold(0, |largest, bits| largest.max(bits & 0x7fff))
    }
}

widest! {
    /// Adds `round(value · scale)` to each sum; the values must be in range.
    pub(crate) fn add_f32(sums: &mut [i64], values: &[f32], scale: f64) {
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum = sum.wrapping_add(quantize(*value, scale));
        }
    }
}

widest! {
    /// Like [`add_f32`], from the bits of bf16.
    pub(crate) fn add_bf16(sums: &mut [i64], values: &[u16], scale: f64) {
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum = sum.wrapping_add(quantize(widen(*value), scale));
        }
    }
}

#[inline(always)]
fn quantize(value: f32, scale: f64) -> i64 {
    let rounded = (f64::from(value) * scale).round_ties_even();
    // SAFETY: [`FixedPoint::check`] has verified that the value is finite and below 2^63 in
    // magnitude.
    unsafe { rounded.to_int_unchecked() }
}

widest! {
    /// Adds little-endian i64 to sums; they cannot overflow since each part counts other
    /// microbatches.
    pub(crate) fn add_words(sums: &mut [i64], words: &[u8]) {
        for (sum, word) in sums.iter_mut().zip(words.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(i64::from_le_bytes(*word));
        }
    }
}

/// Divides little-endian i64 by a divisor. If it is a power of two, the faster multiplication by
/// its inverse gives the same result.
fn means_of(means: &mut [f32], sums: &[u8], divisor: f64) {
    let inverse = divisor.recip();
    let mantissa = (1 << (f64::MANTISSA_DIGITS - 1)) - 1;
    if divisor.to_bits() & mantissa == 0 && inverse.is_normal() {
        products_of(means, sums, inverse);
    } else {
        quotients_of(means, sums, divisor);
    }
}

widest! {
    fn products_of(means: &mut [f32], sums: &[u8], factor: f64) {
        for (mean, sum) in means.iter_mut().zip(sums.as_chunks::<8>().0) {
            *mean = (i64::from_le_bytes(*sum) as f64 * factor) as f32;
        }
    }
}

widest! {
    fn quotients_of(means: &mut [f32], sums: &[u8], divisor: f64) {
        for (mean, sum) in means.iter_mut().zip(sums.as_chunks::<8>().0) {
            *mean = (i64::from_le_bytes(*sum) as f64 / divisor) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::manifest;

    proptest! {
        #[test]
        fn every_processor_gives_the_same_integers(bits in prop::collection::vec(any::<u32>(), 1..100)) {
            let values: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
            let values: Vec<f32> = values.into_iter().filter(|value| value.abs() < 1e5).collect();
            let scale = 44f64.exp2();
            let mut sums = vec![0; values.len()];
            add_f32(&mut sums, &values, scale);
            for (sum, value) in sums.into_iter().zip(values) {
                prop_assert_eq!(sum, (f64::from(value) * scale).round_ties_even() as i64);
            }
        }
    }

    proptest! {
        #[test]
        fn a_mean_is_the_quotient_for_every_divisor(
            sums in prop::collection::vec(any::<i64>(), 1..100),
            bits in 0i32..60,
            microbatches in 1u32..40,
        ) {
            let divisor = f64::from(bits).exp2() * f64::from(microbatches);
            let mut means = vec![0.0; sums.len()];
            means_of(&mut means, bytemuck::cast_slice(&sums), divisor);
            for (mean, sum) in means.into_iter().zip(sums) {
                prop_assert_eq!(mean.to_bits(), ((sum as f64 / divisor) as f32).to_bits());
            }
        }
    }

    /// The gradients of a weight in one step, however many, cannot add up to more than an integer holds.
    #[test]
    fn several_gradients_of_a_microbatch_share_its_part_of_the_range() {
        let mut manifest = manifest();
        for (tied, slices, gradients) in [(false, 1, 1), (true, 1, 2), (true, 4, 4), (false, 4, 4)]
        {
            manifest.model.block.tied = tied;
            manifest.model.slices = slices;
            let FixedPoint { limit, microbatches, .. } = FixedPoint::of(&manifest);
            let most = i128::from(limit) * i128::from(microbatches) * gradients;
            assert!(most <= i128::from(i64::MAX) && most > i128::from(i64::MAX) - 100, "{most}");
        }
    }

    #[test]
    fn the_largest_gradient_is_in_range_and_the_next_is_not() {
        let fixed_point = FixedPoint::of(&manifest());
        let largest = fixed_point.largest();
        assert!(largest > 1e4 && fixed_point.check(largest).is_ok());
        assert!(fixed_point.check(largest.next_up()).is_err());
    }

    #[test]
    fn halves_round_to_even() {
        let mut sums = [0; 4];
        add_f32(&mut sums, &[0.5, 1.5, 2.5, -0.5], 1.0);
        assert_eq!(sums, [0, 2, 2, 0]);
    }

    #[test]
    fn bf16_counts_as_the_f32_of_the_same_value() {
        let values = [1.0f32, -2.5, 0.007_812_5];
        let bits = values.map(|value| (value.to_bits() >> 16) as u16);
        let (mut narrow, mut wide) = ([0; 3], [0; 3]);
        add_bf16(&mut narrow, &bits, 1024.0);
        add_f32(&mut wide, &values, 1024.0);
        assert_eq!(narrow, wide);
    }

    #[test]
    fn parts_of_different_lengths_are_refused() {
        let fixed_point = FixedPoint::of(&manifest());
        let part = |length| Bytes::from(vec![0; length]);
        assert!(fixed_point.reduce(&[part(16), part(8)]).is_err());
        assert!(fixed_point.reduce(&[part(12)]).is_err());
    }
}
