//! Numbers of tokens that are summed with gradients, and are not part of their norm.

use std::ops::Range;

use shoal_protocol::ids::WeightGroup;
use shoal_protocol::manifest::Manifest;

use crate::device::tensor::floats;
use crate::error::Result;
use crate::model::parameters::{Parameter, group_elements, parameters, range_in_stage};
use crate::numeric::square_norm::square_norm;
use crate::train::all_reduce::AllReduce;

/// The ranges of a weight group in which tokens are counted, in ascending order.
fn counts_in_group(manifest: &Manifest, weights: WeightGroup) -> Vec<Range<usize>> {
    let stage = manifest.stages_of(weights).next().expect("a group has a stage");
    let group = range_in_stage(manifest, stage, weights);
    let all = parameters(manifest, stage);
    let counts = all.iter().filter(|one| one.is_biases_of_experts()).map(Parameter::range);
    let counts = counts.filter(|one| group.start <= one.start && one.end <= group.end);
    counts.map(|one| one.start - group.start..one.end - group.start).collect()
}

/// The contribution of a weight group's mean gradient (f32, little-endian) to the gradient norm: [`square_norm`] without
/// the numbers of tokens that were summed with it.
///
/// # Panics
/// If the run has no such group.
#[must_use]
pub fn group_square_norm(manifest: &Manifest, weights: WeightGroup, gradient: &[u8]) -> f64 {
    square_norm_without(gradient, 0, &counts_in_group(manifest, weights))
}

impl AllReduce {
    /// Like [`Self::new`], for a weight group of the run.
    ///
    /// # Errors
    /// If there is too little memory.
    ///
    /// # Panics
    /// If the run has no such group.
    pub fn of_group(manifest: &Manifest, weights: WeightGroup) -> Result<Self> {
        let mut all_reduce = Self::new(manifest, group_elements(manifest, weights))?;
        all_reduce.counts = counts_in_group(manifest, weights);
        Ok(all_reduce)
    }
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

#[cfg(test)]
mod tests {
    use shoal_protocol::limits;

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
}
