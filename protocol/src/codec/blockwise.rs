//! Codes of few bits, scaled block by block.
//!
//! The loops are written for the compiler to vectorise; on x86-64 they are compiled once more for
//! AVX2, which changes their speed and not one bit.

use super::{Block, Rounding, SCALE};

/// The bits of 2^-100: blocks of smaller numbers are coded as zeros.
pub const TINY: u32 = (127 - 100) << 23;

/// The bits of infinity: those of every finite magnitude are less, those of NaN more.
pub const NOT_FINITE: u32 = 0x7f80_0000;

/// The scale of a block with such a number.
const NAN: u32 = 0x7fc0_0000;

/// Adding and subtracting it rounds to nearest, ties to even, where the magnitude is under 2^22. As
/// bits it is the sum's that an integer is read from.
pub const MAGIC: f32 = 12_582_912.0;

/// What the codes of a block are.
pub(super) trait Codes {
    /// The code of a block's largest magnitude.
    const LIMIT: f32;

    /// A byte of zeros.
    const ZEROS: u8;

    /// Bytes of so many codes.
    fn bytes(count: usize) -> usize;

    /// Codes the numbers times `by`. `offset` gives each its dither, or zero.
    fn encode(numbers: &[f32], by: f32, offset: impl Fn(usize) -> f32 + Copy, codes: &mut [u8]);

    /// Gives back the numbers.
    fn decode(codes: &[u8], scale: f32, numbers: &mut [f32]);
}

/// Signed bytes.
pub(super) struct Int8;

/// Signed nibbles.
pub(super) struct Int4;

/// E4M3.
pub(super) struct Fp8;

/// The integer next to `number`, which an offset of a half may carry over the limit.
#[inline(always)]
fn rounded(number: f32, limit: i32) -> i32 {
    let bits = (number + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32;
    bits.clamp(-limit, limit)
}

/// One byte for each number, which `code` makes of it and its dither.
#[inline(always)]
fn encode_bytes(
    numbers: &[f32],
    by: f32,
    offset: impl Fn(usize) -> f32,
    codes: &mut [u8],
    code: impl Fn(f32, f32) -> u8,
) {
    for (index, (to, number)) in codes.iter_mut().zip(numbers).enumerate() {
        *to = code(number * by, offset(index));
    }
}

/// The number that `value` makes of each byte, times the scale.
#[inline(always)]
fn decode_bytes(codes: &[u8], scale: f32, numbers: &mut [f32], value: impl Fn(u8) -> f32) {
    for (code, number) in codes.iter().zip(numbers) {
        *number = value(*code) * scale;
    }
}

impl Codes for Int8 {
    const LIMIT: f32 = 127.0;
    const ZEROS: u8 = 0;

    #[inline(always)]
    fn bytes(count: usize) -> usize {
        count
    }

    #[inline(always)]
    fn encode(numbers: &[f32], by: f32, offset: impl Fn(usize) -> f32 + Copy, codes: &mut [u8]) {
        encode_bytes(numbers, by, offset, codes, |number, offset| {
            rounded(number + offset, 127) as u8
        });
    }

    #[inline(always)]
    fn decode(codes: &[u8], scale: f32, numbers: &mut [f32]) {
        decode_bytes(codes, scale, numbers, |code| f32::from(code as i8));
    }
}

impl Codes for Int4 {
    const LIMIT: f32 = 7.0;
    const ZEROS: u8 = 0x88;

    #[inline(always)]
    fn bytes(count: usize) -> usize {
        count.div_ceil(2)
    }

    #[inline(always)]
    fn encode(numbers: &[f32], by: f32, offset: impl Fn(usize) -> f32 + Copy, codes: &mut [u8]) {
        let (low, high) = numbers.split_at(codes.len());
        let nibble = |number: f32, index| (rounded(number * by + offset(index), 7) + 8) as u8;
        for (index, (code, low)) in codes.iter_mut().zip(low).enumerate() {
            *code = nibble(*low, index) | 8 << 4;
        }
        for (index, (code, high)) in codes.iter_mut().zip(high).enumerate() {
            *code = (*code & 15) | nibble(*high, low.len() + index) << 4;
        }
    }

    #[inline(always)]
    fn decode(codes: &[u8], scale: f32, numbers: &mut [f32]) {
        let (low, high) = numbers.split_at_mut(codes.len());
        let number = |nibble: u8| (f32::from(nibble) - 8.0) * scale;
        for (code, low) in codes.iter().zip(low) {
            *low = number(code & 15);
        }
        for (code, high) in codes.iter().zip(high) {
            *high = number(code >> 4);
        }
    }
}

impl Codes for Fp8 {
    const LIMIT: f32 = 448.0;
    const ZEROS: u8 = 0;

    #[inline(always)]
    fn bytes(count: usize) -> usize {
        count
    }

    #[inline(always)]
    fn encode(numbers: &[f32], by: f32, offset: impl Fn(usize) -> f32 + Copy, codes: &mut [u8]) {
        encode_bytes(numbers, by, offset, codes, to_e4m3);
    }

    #[inline(always)]
    fn decode(codes: &[u8], scale: f32, numbers: &mut [f32]) {
        decode_bytes(codes, scale, numbers, from_e4m3);
    }
}

/// The code of a magnitude of at most 448, give or take a rounding error. Between two codes lie 2^20
/// floats, or a step of 2^-9 where the exponent is smallest.
#[inline(always)]
fn to_e4m3(number: f32, offset: f32) -> u8 {
    let bits = number.to_bits();
    let (sign, magnitude) = (bits >> 24 & 0x80, bits & 0x7fff_ffff);
    // Ties to even; with an offset, which has no ties, up by it.
    let even = if offset == 0.0 { magnitude >> 20 & 1 } else { 1 };
    let up = 0x7_ffff + even as i32 + rounded(offset * 1_048_576.0, (1 << 19) - 1);
    let normal = magnitude.wrapping_add_signed(up) >> 20;
    let normal = normal.wrapping_sub((127 - 7) << 3).min(0x7e);
    let small = f32::from_bits(magnitude) * 512.0 + offset;
    let small = rounded(small, 8).max(0) as u32;
    // 2^-6, the smallest with an exponent of its own.
    let code = if magnitude < (127 - 6) << 23 { small } else { normal };
    (sign | code) as u8
}

#[inline(always)]
fn from_e4m3(code: u8) -> f32 {
    let (sign, magnitude) = (u32::from(code & 0x80) << 24, u32::from(code & 0x7f));
    let normal = f32::from_bits((magnitude << 20) + ((127 - 7) << 23));
    let small = (magnitude & 7) as f32 * (1.0 / 512.0);
    let value = if magnitude < 8 { small } else { normal };
    let value = if magnitude == 0x7f { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | sign)
}

/// The largest magnitude, as bits: what is not finite is larger than all that is.
#[inline(always)]
fn largest(numbers: &[f32]) -> u32 {
    numbers.iter().fold(0, |largest, number| largest.max(number.to_bits() & 0x7fff_ffff))
}

#[inline(always)]
fn encode_all<C: Codes>(numbers: &[f32], block: Block, rounding: Rounding, bytes: &mut [u8]) {
    let blocks = numbers.len().div_ceil(block.numbers());
    let (scales, codes) = bytes.split_at_mut(blocks * SCALE as usize);
    let codes = codes.chunks_mut(C::bytes(block.numbers()));
    let places = scales.as_chunks_mut::<4>().0.iter_mut().zip(codes);
    for (number, (values, (scale, codes))) in
        numbers.chunks(block.numbers()).zip(places).enumerate()
    {
        let first = number * block.numbers();
        let largest = largest(values);
        if !(TINY..NOT_FINITE).contains(&largest) {
            let of_block = if largest < TINY { 0 } else { NAN };
            *scale = of_block.to_le_bytes();
            codes.fill(C::ZEROS);
            continue;
        }
        let largest = f32::from_bits(largest);
        *scale = (largest / C::LIMIT).to_le_bytes();
        let by = C::LIMIT / largest;
        match rounding {
            Rounding::Nearest => C::encode(values, by, |_| 0.0, codes),
            Rounding::Stochastic(dither) => {
                let offset = |index: usize| dither.offset((first + index) as u32);
                C::encode(values, by, offset, codes);
            }
        }
    }
}

#[inline(always)]
fn decode_all<C: Codes>(bytes: &[u8], block: Block, numbers: &mut [f32]) {
    let blocks = numbers.len().div_ceil(block.numbers());
    let (scales, codes) = bytes.split_at(blocks * SCALE as usize);
    let codes = codes.chunks(C::bytes(block.numbers()));
    let places = scales.as_chunks::<4>().0.iter().zip(codes);
    for (values, (scale, codes)) in numbers.chunks_mut(block.numbers()).zip(places) {
        C::decode(codes, f32::from_le_bytes(*scale), values);
    }
}

/// Codes numbers: first the blocks' scales, then their codes.
pub(super) fn encode<C: Codes>(
    numbers: &[f32],
    block: Block,
    rounding: Rounding,
    bytes: &mut [u8],
) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn with_avx2<C: Codes>(
            numbers: &[f32],
            block: Block,
            rounding: Rounding,
            bytes: &mut [u8],
        ) {
            encode_all::<C>(numbers, block, rounding, bytes);
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has what it is compiled for.
            return unsafe { with_avx2::<C>(numbers, block, rounding, bytes) };
        }
    }
    encode_all::<C>(numbers, block, rounding, bytes);
}

/// Gives numbers back.
pub(super) fn decode<C: Codes>(bytes: &[u8], block: Block, numbers: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn with_avx2<C: Codes>(bytes: &[u8], block: Block, numbers: &mut [f32]) {
            decode_all::<C>(bytes, block, numbers);
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has what it is compiled for.
            return unsafe { with_avx2::<C>(bytes, block, numbers) };
        }
    }
    decode_all::<C>(bytes, block, numbers);
}
