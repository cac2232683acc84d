//! Sums of weight gradients that are independent of the order and distribution of the work.
//!
//! A gradient `g` is represented by the integer `q = round(g · 2^bits)`, ties to even, where `bits`
//! is the manifest's `training.gradient_fraction_bits`: the resolution is `2^-bits`. Integer
//! addition is associative, so any replica may add any microbatch in any order. Each `|q|` must be
//! at most `(2^63 - 1) / M` for the run's `M` microbatches per step, so the sum of a whole step
//! fits in an i64 in any case: with 44 bits and 32 microbatches, gradients may reach about 16 000.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use shoal_protocol::ids::ClaimKey;
use shoal_protocol::limits;
use shoal_protocol::manifest::Manifest;
use tch::{Device, Kind, Tensor};

use crate::error::{EngineError, GradientProblem, Result};
use crate::gradient::{Piece, Rows, Values, columns_of};
use crate::kernel::widest;
use crate::parameters::Parameter;
use crate::tensor::{bytes_of, elements, elements_mut};

/// The conversion of gradients to integers and back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FixedPoint {
    /// Integers per unit: `2^bits`.
    scale: f64,
    /// Maximum magnitude of one microbatch's integer.
    limit: i64,
    /// Microbatches per step.
    microbatches: u32,
}

impl FixedPoint {
    /// The fixed-point format of a run.
    #[must_use]
    pub fn of(manifest: &Manifest) -> Self {
        let microbatches = manifest.training.microbatches;
        // A tied matrix gets a gradient as embedding and one as head.
        let gradients = i64::from(microbatches) * if manifest.model.block.tied { 2 } else { 1 };
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
}

/// Exposes a vector of f32 as bytes without a copy.
struct Floats(Vec<f32>);

impl AsRef<[u8]> for Floats {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

widest! {
    /// The contribution of one stage's mean gradient (f32, little-endian) to the gradient norm: its
    /// sum of squares, in f64.
    ///
    /// The order is fixed, so the bits do not depend on shares or threads: blocks of
    /// [`limits::ROUND_BLOCK_ELEMENTS`] elements from the stage's first; within a block, 16 running
    /// sums, each over every sixteenth element, added up in pairs; then the blocks in order. Bytes
    /// after the last whole f32 are ignored.
    pub fn square_norm(gradient: &[u8]) -> f64 {
        let mut total = 0.0;
        for block in gradient.chunks(4 * limits::ROUND_BLOCK_ELEMENTS) {
            let mut lanes = [0f64; 16];
            let mut rows = block.chunks_exact(4 * 16);
            for row in rows.by_ref() {
                for (lane, bytes) in lanes.iter_mut().zip(row.as_chunks::<4>().0) {
                    let value = f64::from(f32::from_le_bytes(*bytes));
                    *lane += value * value;
                }
            }
            for (lane, bytes) in lanes.iter_mut().zip(rows.remainder().as_chunks::<4>().0) {
                let value = f64::from(f32::from_le_bytes(*bytes));
                *lane += value * value;
            }
            for width in [8, 4, 2, 1] {
                for lane in 0..width {
                    lanes[lane] += lanes[lane + width];
                }
            }
            total += lanes[0];
        }
        total
    }
}

/// The sum of one stage's weight gradients over the microbatches counted so far. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Accumulator {
    fixed_point: FixedPoint,
    /// i64, flat, on the device.
    sums: Arc<Mutex<Tensor>>,
}

impl Accumulator {
    pub(crate) fn new(manifest: &Manifest, elements: usize, device: Device) -> Result<Self> {
        let sums = Tensor::f_zeros([elements as i64], (Kind::Int64, device))?;
        Ok(Self { fixed_point: FixedPoint::of(manifest), sums: Arc::new(Mutex::new(sums)) })
    }

    /// A handle of the tensor, whose memory may be elsewhere while nothing is added or read.
    pub(crate) fn tensor(&self) -> Tensor {
        self.lock().shallow_clone()
    }

    fn lock(&self) -> MutexGuard<'_, Tensor> {
        // Nothing panics between the changes of an addition.
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the gradient of one microbatch. All pieces are checked before any is added, so an error
    /// leaves the sums unchanged.
    pub(crate) fn add(
        &self,
        key: ClaimKey,
        gradient: &[Piece],
        parameters: &[Parameter],
    ) -> Result<()> {
        assert!(covers(gradient, parameters), "the gradients are not those of this stage");
        self.add_part(key, gradient, parameters)
    }

    /// Like [`Self::add`], of the part of the weights that one device computes the gradient of.
    pub(crate) fn add_part(
        &self,
        key: ClaimKey,
        gradient: &[Piece],
        parameters: &[Parameter],
    ) -> Result<()> {
        for piece in gradient {
            let largest = match &piece.values {
                Values::Dense(values) | Values::Columns(values, _) => largest(values)?,
                Values::Rows(rows) => f32::from_bits(largest_f32(bits_of(rows))),
            };
            if let Err(problem) = self.check_value(largest) {
                let at = self.first_bad(piece)?;
                let parameter = parameters.iter().find(|parameter| parameter.range().contains(&at));
                let tensor = parameter.map_or_else(String::new, |found| found.name.clone());
                return Err(EngineError::BadGradient { tensor, key, problem });
            }
        }
        let mut sums = self.lock();
        gradient.iter().try_for_each(|piece| self.add_piece(&mut sums, piece))
    }

    /// Whether a value is in range.
    fn check_value(&self, value: f32) -> Result<(), GradientProblem> {
        if !value.is_finite() {
            return Err(GradientProblem::NotFinite);
        }
        let rounded = (f64::from(value.abs()) * self.fixed_point.scale).round_ties_even();
        // 2^63 itself is not an i64, and the cast would hide that.
        if rounded < i64::MAX as f64 && rounded as i64 <= self.fixed_point.limit {
            return Ok(());
        }
        Err(GradientProblem::OutOfRange {
            largest: f64::from(value.abs()),
            limit: self.fixed_point.limit as f64 / self.fixed_point.scale,
        })
    }

    /// Index of the first element out of range.
    fn first_bad(&self, piece: &Piece) -> Result<usize> {
        let bad = |value: &f32| self.check_value(*value).is_err();
        let bad_of = |values: &Tensor| -> Result<usize> {
            let values = values.f_to_kind(Kind::Float)?.f_to(Device::Cpu)?.f_contiguous()?;
            Ok(elements::<f32>(&values).iter().position(bad).unwrap_or(0))
        };
        Ok(piece.offset
            + match &piece.values {
                Values::Dense(values) => bad_of(values)?,
                Values::Columns(values, stride) => {
                    let (at, width) = (bad_of(values)?, columns_of(values));
                    at / width * stride + at % width
                }
                Values::Rows(rows) => {
                    let at = rows.values.iter().position(bad).unwrap_or(0);
                    rows.indices[at / rows.width] * rows.width + at % rows.width
                }
            })
    }

    fn add_piece(&self, sums: &mut Tensor, piece: &Piece) -> Result<()> {
        let scale = self.fixed_point.scale;
        match &piece.values {
            Values::Dense(gradient) | Values::Columns(gradient, _)
                if sums.device() != Device::Cpu =>
            {
                let rounded = gradient.f_to_kind(Kind::Double)?.f_mul_scalar(scale)?.f_round()?;
                let (width, stride) = row_of(piece, gradient);
                let (rows, width) = ((gradient.numel() / width) as i64, width as i64);
                let place = Some(piece.offset as i64);
                let mut sums = sums.f_as_strided([rows, width], [stride as i64, 1], place)?;
                let rounded = rounded.f_to_kind(Kind::Int64)?;
                let _ = sums.f_add_(&rounded.f_view([rows, width])?)?;
            }
            Values::Dense(gradient) | Values::Columns(gradient, _) => {
                let (width, stride) = row_of(piece, gradient);
                let sums = elements_mut::<i64>(sums)[piece.range()].chunks_mut(stride);
                match gradient.kind() {
                    Kind::BFloat16 => {
                        let rows = elements(gradient).chunks(width);
                        sums.zip(rows).for_each(|(sums, row)| add_bf16(sums, row, scale));
                    }
                    _ => {
                        let rows = elements(gradient).chunks(width);
                        sums.zip(rows).for_each(|(sums, row)| add_f32(sums, row, scale));
                    }
                }
            }
            Values::Rows(rows) => {
                let sums = &mut elements_mut::<i64>(sums)[piece.offset..];
                for (index, values) in rows.indices.iter().zip(rows.values.chunks(rows.width)) {
                    let start = index * rows.width;
                    add_f32(&mut sums[start..start + rows.width], values, scale);
                }
            }
        }
        Ok(())
    }

    /// Passes the sums of a range of the flat vector to a function: i64, little-endian.
    pub(crate) fn read<T>(&self, range: Range<usize>, read: impl FnOnce(&[u8]) -> T) -> Result<T> {
        let sums = self.lock();
        let piece = sums.f_narrow(0, range.start as i64, range.len() as i64)?;
        let piece = piece.f_to(Device::Cpu)?;
        Ok(read(bytes_of(&piece)))
    }

    /// Moves all that another accumulator of the stage has here; this one is in the machine's memory.
    pub(crate) fn take(&self, other: &Self) -> Result<()> {
        assert!(!Arc::ptr_eq(&self.sums, &other.sums), "an accumulator is not moved to itself");
        let mut sums = self.lock();
        let all = 0..sums.numel();
        other.read(all, |part| add_words(elements_mut(&mut sums), part))?;
        other.clear()
    }

    /// Clears the sums for the next step.
    pub(crate) fn clear(&self) -> Result<()> {
        let _ = self.lock().f_zero_()?;
        Ok(())
    }
}

/// The elements of a row of a piece's gradient, and those from one row to the next. A dense piece is one row.
fn row_of(piece: &Piece, gradient: &Tensor) -> (usize, usize) {
    match piece.values {
        Values::Columns(_, stride) => (columns_of(gradient), stride),
        Values::Dense(_) | Values::Rows(_) => (gradient.numel(), gradient.numel()),
    }
}

/// Whether pieces cover all parameters, and no more. A tied matrix is covered twice if embedding and head are in
/// one stage.
fn covers(gradient: &[Piece], parameters: &[Parameter]) -> bool {
    let elements = parameters.last().map_or(0, |last| last.range().end);
    let mut ranges: Vec<Range<usize>> = gradient.iter().map(Piece::range).collect();
    ranges.sort_by_key(|range| range.start);
    let mut covered = 0;
    let whole = ranges.into_iter().all(|range| {
        let adjacent = range.start <= covered;
        covered = covered.max(range.end);
        adjacent
    });
    whole && covered == elements
}

/// The largest magnitude; not finite if any element is not.
fn largest(gradient: &Tensor) -> Result<f32> {
    Ok(match (gradient.device(), gradient.kind()) {
        (Device::Cpu, Kind::BFloat16) => widen(largest_bf16(elements(gradient))),
        (Device::Cpu, Kind::Float) => f32::from_bits(largest_f32(elements(gradient))),
        // The maximum of anything and NaN is NaN.
        _ => gradient.f_abs()?.f_max()?.f_double_value(&[])? as f32,
    })
}

fn bits_of(rows: &Rows) -> &[u32] {
    bytemuck::cast_slice(&rows.values)
}

fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

widest! {
    /// Bits of the largest magnitude; those of infinity and NaN exceed all finite ones.
    fn largest_f32(values: &[u32]) -> u32 {
        values.iter().fold(0, |largest, bits| largest.max(bits & 0x7fff_ffff))
    }
}

widest! {
    /// Like [`largest_f32`].
    fn largest_bf16(values: &[u16]) -> u16 {
        values.iter().fold(0, |largest, bits| largest.max(bits & 0x7fff))
    }
}

widest! {
    /// Adds `round(value · scale)` to each sum; the values must be in range.
    fn add_f32(sums: &mut [i64], values: &[f32], scale: f64) {
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum = sum.wrapping_add(quantize(*value, scale));
        }
    }
}

widest! {
    /// Like [`add_f32`], from the bits of bf16.
    fn add_bf16(sums: &mut [i64], values: &[u16], scale: f64) {
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum = sum.wrapping_add(quantize(widen(*value), scale));
        }
    }
}

#[inline(always)]
fn quantize(value: f32, scale: f64) -> i64 {
    let rounded = (f64::from(value) * scale).round_ties_even();
    // SAFETY: `Accumulator::check` has verified that the value is finite and below 2^63 in
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
    use crate::testing::{key, manifest};

    const COUNT: usize = 37;

    fn parameters() -> Vec<Parameter> {
        vec![
            Parameter { name: "one".to_owned(), shape: vec![30], offset: 0 },
            Parameter { name: "two".to_owned(), shape: vec![7], offset: 30 },
        ]
    }

    fn empty() -> Accumulator {
        Accumulator::new(&manifest(), COUNT, Device::Cpu).expect("small")
    }

    /// Values in two pieces, with a cut within a parameter.
    fn pieces(values: &[f32]) -> Vec<Piece> {
        let (one, two) = values.split_at(10);
        let piece = |offset, values| Piece::dense(offset, &Tensor::from_slice(values));
        vec![piece(0, one).expect("small"), piece(10, two).expect("small")]
    }

    fn sums(accumulator: &Accumulator) -> Bytes {
        accumulator.read(0..COUNT, Bytes::copy_from_slice).expect("the whole")
    }

    proptest! {
        #[test]
        fn order_and_distribution_do_not_matter(
            gradients in prop::collection::vec(
                prop::collection::vec(-1e4f32..1e4, COUNT..=COUNT), 6..=6),
            order in Just((0..6usize).collect::<Vec<_>>()).prop_shuffle(),
            cut in 0usize..=6,
        ) {
            let fixed_point = FixedPoint::of(&manifest());
            let one = empty();
            for (index, gradient) in gradients.iter().enumerate() {
                one.add(key(index as u32), &pieces(gradient), &parameters()).expect("in range");
            }
            let two = [empty(), empty()];
            for (place, index) in order.into_iter().enumerate() {
                let half = usize::from(place < cut);
                let gradient = pieces(&gradients[index]);
                two[half].add(key(index as u32), &gradient, &parameters()).expect("in range");
            }
            let whole = fixed_point.reduce(&[sums(&one)]).expect("one part");
            let split = fixed_point.reduce(&[sums(&two[0]), sums(&two[1])]).expect("equal parts");
            prop_assert_eq!(&whole, &split);
            for (index, mean) in whole.as_chunks::<4>().0.iter().enumerate() {
                let exact: f64 = gradients.iter().map(|g| f64::from(g[index])).sum::<f64>() / 6.0;
                let error = (f64::from(f32::from_le_bytes(*mean)) - exact).abs();
                prop_assert!(error <= exact.abs() * 1e-7 + 1e-12);
            }
        }

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
    fn a_gradient_out_of_range_is_named_and_changes_nothing() {
        let limit = (i64::MAX / 6) as f64 / 44f64.exp2();
        for (value, finite) in [
            (f32::NAN, false),
            (f32::NEG_INFINITY, false),
            (limit as f32 * 1.001, true),
            (f32::MIN, true),
        ] {
            let accumulator = empty();
            let mut gradient = vec![1.0; COUNT];
            accumulator.add(key(0), &pieces(&gradient), &parameters()).expect("in range");
            let before = sums(&accumulator);
            gradient[31] = value;
            let error = accumulator
                .add(key(3), &pieces(&gradient), &parameters())
                .expect_err("it does not fit");
            let EngineError::BadGradient { tensor, key: named, problem } = error else {
                panic!("{error}")
            };
            assert_eq!((tensor.as_str(), named), ("two", key(3)));
            assert_eq!(matches!(problem, GradientProblem::OutOfRange { .. }), finite);
            assert_eq!(sums(&accumulator), before);
        }
        let accumulator = empty();
        let largest = vec![limit as f32 * 0.999; COUNT];
        for index in 0..6 {
            accumulator.add(key(index), &pieces(&largest), &parameters()).expect("in range");
        }
        let mean = FixedPoint::of(&manifest()).reduce(&[sums(&accumulator)]).expect("one part");
        assert_eq!(mean[..4], largest[0].to_le_bytes());
    }

    #[test]
    fn parts_of_different_lengths_are_refused() {
        let fixed_point = FixedPoint::of(&manifest());
        let part = |length| Bytes::from(vec![0; length]);
        assert!(fixed_point.reduce(&[part(16), part(8)]).is_err());
        assert!(fixed_point.reduce(&[part(12)]).is_err());
    }

    #[test]
    fn the_norm_is_that_of_the_values() {
        let values: Vec<f32> = (0..10_000).map(|index| (index as f32).sin()).collect();
        let exact: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
        let norm = square_norm(bytemuck::cast_slice(&values));
        assert!((norm - exact).abs() < 1e-9 * exact);
    }
}
