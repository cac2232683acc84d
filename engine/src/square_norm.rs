//! The contribution of a stage to the gradient norm.

use std::ops::Range;

use shoal_protocol::ids::WeightGroup;
use shoal_protocol::limits;
use shoal_protocol::manifest::Manifest;

use crate::kernel::widest;
use crate::parameters::counts_in_group;
use crate::tensor::floats;

/// The contribution of a weight group's mean gradient (f32, little-endian) to the gradient norm: [`square_norm`] without
/// numbers of tokens that were summed with it.
///
/// # Panics
/// If the run has no such group.
#[must_use]
pub fn group_square_norm(manifest: &Manifest, weights: WeightGroup, gradient: &[u8]) -> f64 {
    square_norm_without(gradient, 0, &counts_in_group(manifest, weights))
}

/// [`square_norm`] of numbers, the first of which has this index, with zeros in some ranges.
pub(crate) fn square_norm_without(numbers: &[u8], first: usize, without: &[Range<usize>]) -> f64 {
    let end = first + numbers.len() / size_of::<f32>();
    let mut parts = without.iter().filter(|one| one.start < end && first < one.end).peekable();
    if parts.peek().is_none() {
        return square_norm(numbers);
    }
    let mut numbers = floats(numbers).into_owned();
    for part in parts {
        numbers[part.start.max(first) - first..part.end.min(end) - first].fill(0.0);
    }
    square_norm(bytemuck::cast_slice(&numbers))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_ranges_are_left_out_wherever_blocks_end() {
        let block = limits::ROUND_BLOCK_ELEMENTS;
        let values: Vec<f32> = (0..3 * block).map(|index| (index as f32).sin()).collect();
        let without = [5..9, block - 3..block + 4, 2 * block..2 * block + 1];
        let mut zeroed = values.clone();
        without.iter().for_each(|range| zeroed[range.clone()].fill(0.0));
        let expected = square_norm(bytemuck::cast_slice(&zeroed));
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        assert_eq!(square_norm_without(bytes, 0, &without), expected);
        let blocks = bytes.chunks(4 * block).enumerate();
        let blocks = blocks.map(|(number, one)| square_norm_without(one, number * block, &without));
        assert_eq!(blocks.fold(0.0, |sum, one| sum + one), expected);
        assert_ne!(square_norm(bytes), expected);
    }

    #[test]
    fn the_norm_is_that_of_the_values() {
        let values: Vec<f32> = (0..10_000).map(|index| (index as f32).sin()).collect();
        let exact: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
        let norm = square_norm(bytemuck::cast_slice(&values));
        assert!((norm - exact).abs() < 1e-9 * exact);
    }
}
