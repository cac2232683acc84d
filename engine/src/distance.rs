//! How far a virtual worker came, rounded to a few bits.
//!
//! Each block of [`BLOCK`] numbers is rounded to multiples of a power of two, so that the integers of its sum, which
//! travel, need few bits above the zeros that they end with. A rounded number is a function of its block alone.

use crate::kernel::widest;

/// Numbers that share a power of two.
const BLOCK: usize = 64;

/// Rounds numbers to integers of so many bits, from 2 to 8, times a power of two for each block: the least with which
/// the largest magnitude fits. What is not finite stays.
pub(crate) fn round(numbers: &mut [f32], bits: u32) {
    let most = ((1u32 << (bits - 1)) - 1) as f32;
    for block in numbers.chunks_mut(BLOCK) {
        let largest = block.iter().fold(0f32, |largest, number| largest.max(number.abs()));
        if largest.is_normal() {
            to_multiples(block, unit(largest, most), most);
        }
    }
}

/// The least power of two of which `largest`, a normal number, is at most `most` times, after rounding.
fn unit(largest: f32, most: f32) -> f32 {
    // The sign is clear, and without the mantissa it is a power of two.
    let mut unit = f32::from_bits(largest.to_bits() & 0x7f80_0000);
    while unit * 0.5 > f32::MIN_POSITIVE && largest / (unit * 0.5) < most + 0.5 {
        unit *= 0.5;
    }
    if largest / unit < most + 0.5 { unit } else { unit * 2.0 }
}

widest! {
    fn to_multiples(block: &mut [f32], unit: f32, most: f32) {
        for number in block {
            *number = (*number / unit).round_ties_even().clamp(-most, most) * unit;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_largest_magnitude_decides_the_unit() {
        let mut numbers = vec![0.0; BLOCK];
        numbers.extend([1.0, -0.3, 0.004]);
        round(&mut numbers, 8);
        // 1 is 64 of 127 units of 1/64; 0.3 is 19.2 of them.
        assert_eq!(numbers[BLOCK..], [1.0, -19.0 / 64.0, 0.0]);
        let mut numbers = [1.6, -0.9, 0.7];
        round(&mut numbers, 2);
        assert_eq!(numbers, [2.0, 0.0, 0.0]);
        let mut numbers = [0.0; 3];
        round(&mut numbers, 4);
        assert_eq!(numbers, [0.0; 3]);
    }

    #[test]
    fn numbers_that_are_not_finite_stay() {
        let mut numbers = [1.0, f32::NAN, f32::INFINITY];
        round(&mut numbers, 8);
        assert!(numbers[1].is_nan() && numbers[2].is_infinite());
    }

    proptest! {
        #[test]
        fn a_rounded_number_is_a_few_units_and_near(
            numbers in prop::collection::vec(-1e3f32..1e3, 1..200),
            bits in 2u32..=8,
        ) {
            let mut rounded = numbers.clone();
            round(&mut rounded, bits);
            let most = ((1u32 << (bits - 1)) - 1) as f32;
            for (before, after) in numbers.chunks(BLOCK).zip(rounded.chunks(BLOCK)) {
                let largest = before.iter().fold(0f32, |largest, number| largest.max(number.abs()));
                let unit = unit(largest, most);
                for (before, after) in before.iter().zip(after) {
                    prop_assert!((after / unit).fract() == 0.0 && (after / unit).abs() <= most);
                    prop_assert!((before - after).abs() <= 0.5 * unit);
                }
            }
        }
    }
}
