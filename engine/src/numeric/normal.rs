//! Normal numbers from random bits, many at a time.
//!
//! The transform of Box and Muller (1958) takes a logarithm, a sine and a cosine for every two numbers. This file
//! computes them without branches, so that the compiler uses the processor's vectors, and with the operations of
//! the `libm` crate (FreeBSD's `log`, `sin` and `cos`) in the same order. The bits are those of `libm::log` and
//! `libm::sincos` on every machine; a test compares them.

use crate::device::kernel::widest;

/// Pairs of numbers that are computed together.
const PAIRS: usize = 256;

/// A number in [0, 1) from the upper 53 bits.
#[inline(always)]
pub(crate) fn unit(bits: u64) -> f64 {
    // As a signed number, which it fits in, since processors without AVX-512 convert no unsigned ones.
    ((bits >> 11) as i64) as f64 / (1u64 << 53) as f64
}

widest! {
    /// Fills `normals` with numbers of mean 0 and a standard deviation, two for every two words of random bits. The
    /// last word counts for nothing where the number of normals is odd.
    pub(crate) fn fill_normal(bits: &[u64], normals: &mut [f32], deviation: f64) {
        for (bits, normals) in bits.chunks(2 * PAIRS).zip(normals.chunks_mut(2 * PAIRS)) {
            block(bits, normals, deviation);
        }
    }
}

#[inline(always)]
fn block(bits: &[u64], normals: &mut [f32], deviation: f64) {
    let mut radii = [0.0; PAIRS];
    let mut angles = [0.0; PAIRS];
    for ((radius, angle), pair) in radii.iter_mut().zip(&mut angles).zip(bits.as_chunks::<2>().0) {
        // In (0, 1], so that the logarithm is finite.
        *radius = 1.0 - unit(pair[0]);
        *angle = std::f64::consts::TAU * unit(pair[1]);
    }
    let mut sines = [0.0; PAIRS];
    let mut cosines = [0.0; PAIRS];
    for ((sine, cosine), angle) in sines.iter_mut().zip(&mut cosines).zip(&angles) {
        (*sine, *cosine) = sincos(*angle);
    }
    if angles.iter().fold(0, |near, angle| near | u64::from(is_near_axis(*angle))) != 0 {
        for ((sine, cosine), angle) in sines.iter_mut().zip(&mut cosines).zip(&angles) {
            if is_near_axis(*angle) {
                (*sine, *cosine) = libm::sincos(*angle);
            }
        }
    }
    for ((radius, sine), cosine) in radii.iter_mut().zip(&mut sines).zip(&mut cosines) {
        *radius = deviation * (-2.0 * log(*radius)).sqrt();
        *sine *= *radius;
        *cosine *= *radius;
    }
    for (pair, (cosine, sine)) in normals.chunks_mut(2).zip(cosines.iter().zip(&sines)) {
        pair[0] = *cosine as f32;
        if let Some(second) = pair.get_mut(1) {
            *second = *sine as f32;
        }
    }
}

/// `libm::log` of a number in (2^-1022, 1].
#[inline(always)]
fn log(x: f64) -> f64 {
    const LN2_HIGH: f64 = 0.6931471803691238;
    const LN2_LOW: f64 = 1.9082149292705877e-10;
    const LG1: f64 = 0.6666666666666735;
    const LG2: f64 = 0.3999999999940942;
    const LG3: f64 = 0.2857142874366239;
    const LG4: f64 = 0.22222198432149784;
    const LG5: f64 = 0.1818357216161805;
    const LG6: f64 = 0.15313837699209373;
    const LG7: f64 = 0.14798198605116586;
    // x = 2^k · (1 + f) with 1 + f in [√2/2, √2].
    let bits = x.to_bits() + ((0x3ff0_0000 - 0x3fe6_a09e) << 32);
    let k = f64::from((bits >> 52) as i32 - 0x3ff);
    let f = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) + (0x3fe6_a09e << 32)) - 1.0;
    let half_square = 0.5 * f * f;
    let s = f / (2.0 + f);
    let z = s * s;
    let w = z * z;
    let even = w * (LG2 + w * (LG4 + w * LG6));
    let odd = z * (LG1 + w * (LG3 + w * (LG5 + w * LG7)));
    let r = odd + even;
    s * (half_square + r) + k * LN2_LOW - half_square + f + k * LN2_HIGH
}

/// The upper half of a number's bits.
#[inline(always)]
fn high_word(x: f64) -> u64 {
    x.to_bits() >> 32
}

/// Whether an angle in [0, 2π) is so near a positive multiple of π/2 that [`sincos`] is not exact.
#[inline(always)]
fn is_near_axis(x: f64) -> bool {
    let high = high_word(x);
    (high == 0x3ff9_21fb) | (high == 0x4009_21fb) | (high == 0x4012_d97c) | (high == 0x4019_21fb)
}

/// `libm::sincos` of an angle in [0, 2π), unless [`is_near_axis`].
#[inline(always)]
fn sincos(x: f64) -> (f64, f64) {
    /// The first 33 bits of π/2, and the rest.
    const HALF_PI: f64 = 1.5707963267341256;
    const HALF_PI_REST: f64 = 6.077100506506192e-11;
    // The nearest multiple of π/2.
    let n = at_least(x, 0x3fe9_21fc)
        + at_least(x, 0x4002_d97d)
        + at_least(x, 0x400f_6a7b)
        + at_least(x, 0x4015_fdbd);
    // The lowest bits of 2^52 + n are n.
    let quadrant = (n + (1u64 << 52) as f64).to_bits();
    let z = x - n * HALF_PI;
    let rest = n * HALF_PI_REST;
    let y = z - rest;
    let tail = (z - y) - rest;
    let sine = kernel_sine(y, tail, n == 0.0).to_bits();
    let cosine = kernel_cosine(y, tail).to_bits();
    // Odd multiples exchange the two.
    let exchange = (sine ^ cosine) & (quadrant & 1).wrapping_neg();
    let negative_sine = (quadrant & 2) << 62;
    let negative_cosine = ((quadrant + 1) & 2) << 62;
    (
        f64::from_bits(sine ^ exchange ^ negative_sine),
        f64::from_bits(cosine ^ exchange ^ negative_cosine),
    )
}

/// 1 where the upper half of a positive number's bits is at least `high`, else 0.
#[inline(always)]
fn at_least(x: f64, high: u64) -> f64 {
    if x >= f64::from_bits(high << 32) { 1.0 } else { 0.0 }
}

/// Sine of `x + tail` in [-π/4, π/4].
#[inline(always)]
fn kernel_sine(x: f64, tail: f64, no_tail: bool) -> f64 {
    const S1: f64 = -0.16666666666666632;
    const S2: f64 = 0.00833333333332249;
    const S3: f64 = -0.0001984126982985795;
    const S4: f64 = 2.7557313707070068e-6;
    const S5: f64 = -2.5050760253406863e-8;
    const S6: f64 = 1.58969099521155e-10;
    let z = x * x;
    let w = z * z;
    let r = S2 + z * (S3 + z * S4) + z * w * (S5 + z * S6);
    let v = z * x;
    let without = x + v * (S1 + z * r);
    let with = x - ((z * (0.5 * tail - v * r) - tail) - v * S1);
    if no_tail { without } else { with }
}

/// Cosine of `x + tail` in [-π/4, π/4].
#[inline(always)]
fn kernel_cosine(x: f64, tail: f64) -> f64 {
    const C1: f64 = 0.0416666666666666;
    const C2: f64 = -0.001388888888887411;
    const C3: f64 = 2.480158728947673e-5;
    const C4: f64 = -2.7557314351390663e-7;
    const C5: f64 = 2.087572321298175e-9;
    const C6: f64 = -1.1359647557788195e-11;
    let z = x * x;
    let w = z * z;
    let r = z * (C1 + z * (C2 + z * C3)) + w * w * (C4 + z * (C5 + z * C6));
    let half = 0.5 * z;
    let w = 1.0 - half;
    w + (((1.0 - w) - half) + (z * r - x * tail))
}

#[cfg(test)]
mod tests {
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{RngCore, SeedableRng};

    use super::*;

    /// The same numbers, one pair at a time.
    fn expected(bits: &[u64], normals: &mut [f32], deviation: f64) {
        for (pair, bits) in normals.chunks_mut(2).zip(bits.as_chunks::<2>().0) {
            let radius = deviation * libm::sqrt(-2.0 * libm::log(1.0 - unit(bits[0])));
            let (sine, cosine) = libm::sincos(std::f64::consts::TAU * unit(bits[1]));
            for (normal, value) in pair.iter_mut().zip([radius * cosine, radius * sine]) {
                *normal = value as f32;
            }
        }
    }

    fn assert_expected(bits: &[u64], count: usize) {
        let (mut found, mut wanted) = (vec![0.0; count], vec![0.0; count]);
        fill_normal(bits, &mut found, 0.02);
        expected(bits, &mut wanted, 0.02);
        let unlike = found
            .iter()
            .zip(&wanted)
            .position(|(found, wanted)| found.to_bits() != wanted.to_bits());
        assert_eq!(unlike, None, "the first number that differs");
    }

    #[test]
    fn random_bits_give_the_numbers_of_libm() {
        let mut stream = ChaCha8Rng::seed_from_u64(3);
        let bits: Vec<u64> = (0..1 << 20).map(|_| stream.next_u64()).collect();
        for count in [1, 2, 511, 513, bits.len() - 1, bits.len()] {
            assert_expected(&bits[..count.next_multiple_of(2)], count);
        }
    }

    #[test]
    fn angles_near_an_axis_give_the_numbers_of_libm() {
        let one = 1u64 << 53;
        let mut bits = Vec::new();
        for eighth in 0..=8 {
            for distance in 0..40_000 {
                // Near by steps of one, and farther by larger ones.
                for away in [distance, distance * 37_777_777] {
                    let angles =
                        [(eighth * one / 8).checked_sub(away), Some(eighth * one / 8 + away)];
                    for angle in angles.into_iter().flatten().filter(|angle| *angle < one) {
                        bits.extend([(one - 1 - distance) << 11, angle << 11]);
                        bits.extend([(distance * distance) << 11, angle << 11]);
                    }
                }
            }
        }
        assert_expected(&bits, bits.len());
    }
}
