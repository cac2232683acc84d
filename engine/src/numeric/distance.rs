//! How far a virtual worker came, rounded to a few bits.
//!
//! Each block of [`BLOCK`] numbers is rounded to multiples of a power of two, so that the integers of its sum, which
//! travel, need few bits above the zeros that they end with. A number goes up or down at random, so that the errors of
//! workers cancel; the randomness is that of the worker's work, so a repetition gives the same.

use shoal_protocol::codec::Dither;

use crate::device::kernel::widest;

/// Numbers that share a power of two.
const BLOCK: usize = 64;

/// Which of two neighbouring multiples a number becomes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rounding {
    /// Either, so that the mean is right. The first number has this index among those of the dither.
    Random { dither: Dither, first: u32 },
    /// The larger.
    Up,
}

/// Rounds numbers to integers of so many bits, from 2 to 8, times a power of two for each block: the least with which
/// the largest magnitude fits. What is not finite stays.
pub(crate) fn round(numbers: &mut [f32], bits: u32, rounding: Rounding) {
    let most = ((1u32 << (bits - 1)) - 1) as f32;
    for (index, block) in numbers.chunks_mut(BLOCK).enumerate() {
        let largest = block.iter().fold(0f32, |largest, number| largest.max(number.abs()));
        if largest.is_normal() {
            let unit = unit(largest, most);
            match rounding {
                Rounding::Random { dither, first } => {
                    // The random bits of a vector of more than 2^32 numbers repeat.
                    let first = first.wrapping_add((index * BLOCK) as u32);
                    to_multiples(block, unit, first, dither);
                }
                Rounding::Up => up_to_multiples(block, unit),
            }
        }
    }
}

/// The least power of two of which `largest`, a normal number, is at most `most` times.
fn unit(largest: f32, most: f32) -> f32 {
    // The sign is clear, and without the mantissa it is a power of two.
    let mut unit = f32::from_bits(largest.to_bits() & 0x7f80_0000);
    while unit * 0.5 > f32::MIN_POSITIVE && largest / (unit * 0.5) <= most {
        unit *= 0.5;
    }
    if largest / unit <= most { unit } else { unit * 2.0 }
}

widest! {
    fn to_multiples(block: &mut [f32], unit: f32, first: u32, dither: Dither) {
        for (index, number) in block.iter_mut().enumerate() {
            let offset = dither.offset(first.wrapping_add(index as u32));
            *number = (*number / unit + offset).round_ties_even() * unit;
        }
    }
}

widest! {
    fn up_to_multiples(block: &mut [f32], unit: f32) {
        for number in block {
            *number = (*number / unit).ceil() * unit;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::key;

    fn random(microbatch: u32) -> Rounding {
        Rounding::Random { dither: Dither::of(1, key(microbatch)), first: 0 }
    }

    #[test]
    fn the_largest_magnitude_decides_the_unit() {
        let mut numbers = vec![0.0; BLOCK];
        numbers.extend([1.0, -0.296_875, 0.0]);
        let multiples = numbers.clone();
        round(&mut numbers, 8, random(0));
        // 1 is 64 of at most 127 units of 1/64, and 0.296875 is 19.
        assert_eq!(numbers, multiples);
        let mut numbers = [0.0; 3];
        round(&mut numbers, 4, random(0));
        assert_eq!(numbers, [0.0; 3]);
    }

    #[test]
    fn the_mean_over_workers_is_the_number() {
        let numbers: Vec<f32> = (0..BLOCK).map(|index| (index as f32 * 0.7).sin()).collect();
        let mut sums = vec![0f64; BLOCK];
        let workers = 4000;
        for worker in 0..workers {
            let mut rounded = numbers.clone();
            round(&mut rounded, 2, random(worker));
            assert!(rounded.iter().all(|one| [-1.0, 0.0, 1.0].contains(one)), "{rounded:?}");
            sums.iter_mut().zip(rounded).for_each(|(sum, one)| *sum += f64::from(one));
        }
        for (sum, number) in sums.into_iter().zip(numbers) {
            // Five standard deviations of a mean.
            let error = sum / f64::from(workers) - f64::from(number);
            assert!(error.abs() < 5.0 * 0.5 / f64::from(workers).sqrt(), "{error} at {number}");
        }
    }

    #[test]
    fn numbers_that_are_not_finite_stay() {
        let mut numbers = [1.0, f32::NAN, f32::INFINITY];
        round(&mut numbers, 8, random(0));
        assert!(numbers[1].is_nan() && numbers[2].is_infinite());
    }

    proptest! {
        #[test]
        fn a_rounded_number_is_a_few_units_and_near(
            numbers in prop::collection::vec(-1e3f32..1e3, 1..200),
            bits in 2u32..=8,
            up: bool,
        ) {
            let mut rounded = numbers.clone();
            round(&mut rounded, bits, if up { Rounding::Up } else { random(3) });
            let most = ((1u32 << (bits - 1)) - 1) as f32;
            for (before, after) in numbers.chunks(BLOCK).zip(rounded.chunks(BLOCK)) {
                let largest = before.iter().fold(0f32, |largest, number| largest.max(number.abs()));
                let unit = unit(largest, most);
                for (before, after) in before.iter().zip(after) {
                    prop_assert!((after / unit).fract() == 0.0 && (after / unit).abs() <= most);
                    prop_assert!((before - after).abs() <= unit && (!up || after >= before));
                }
            }
        }
    }
}
