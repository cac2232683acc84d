//! Codecs of few bits, with a scale per block.
//!
//! The loops are written for the compiler to vectorise. On x86-64 they are compiled a second time
//! for AVX2, which changes their speed but no bit of the result.

use super::{Block, Rounding, SCALE};

/// The bits of 2^-100: blocks of smaller numbers are encoded as zeros.
pub const TINY: u32 = (127 - 100) << 23;

/// The bits of infinity: those of finite magnitudes are smaller, those of NaN larger.
pub const NOT_FINITE: u32 = 0x7f80_0000;

/// The scale of a block with a number that is not finite.
const NAN: u32 = 0x7fc0_0000;

/// Adding and subtracting it rounds to nearest, ties to even, for magnitudes under 2^22. An integer
/// is read from the bits of the sum by subtracting the bits of this constant.
pub const MAGIC: f32 = 12_582_912.0;

/// The format of a block's codes.
pub(super) trait Codes {
    /// The code of a block's largest magnitude.
    const LIMIT: f32;

    /// The byte that encodes zeros.
    const ZEROS: u8;

    /// Bytes of `count` codes.
    fn bytes(count: usize) -> usize;

    /// Encodes each number multiplied by `by`. `offset` returns the dither of a number, or zero.
    fn encode(numbers: &[f32], by: f32, offset: impl Fn(usize) -> f32 + Copy, codes: &mut [u8]);

    /// Decodes the numbers.
    fn decode(codes: &[u8], scale: f32, numbers: &mut [f32]);
}

/// Signed bytes.
pub(super) struct Int8;

/// Signed nibbles.
pub(super) struct Int4;

/// E4M3.
pub(super) struct Fp8;

/// The integer nearest to `number`, clamped, because an offset of one half may exceed the limit.
#[inline(always)]
fn rounded(number: f32, limit: i32) -> i32 {
    let bits = (number + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32;
    bits.clamp(-limit, limit)
}

/// Encodes each number as one byte by `code`, from the scaled number and its dither.
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

/// Decodes each byte by `value`, multiplied by the scale.
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

/// Encodes a magnitude of at most 448, up to a rounding error. Adjacent codes are 2^20 floats
/// apart, or a step of 2^-9 at the smallest exponent.
#[inline(always)]
fn to_e4m3(number: f32, offset: f32) -> u8 {
    let bits = number.to_bits();
    let (sign, magnitude) = (bits >> 24 & 0x80, bits & 0x7fff_ffff);
    // Ties are rounded to even. With an offset there are no ties, and the offset is added.
    let even = if offset == 0.0 { magnitude >> 20 & 1 } else { 1 };
    let up = 0x7_ffff + even as i32 + rounded(offset * 1_048_576.0, (1 << 19) - 1);
    let normal = magnitude.wrapping_add_signed(up) >> 20;
    let normal = normal.wrapping_sub((127 - 7) << 3).min(0x7e);
    let small = f32::from_bits(magnitude) * 512.0 + offset;
    let small = rounded(small, 8).max(0) as u32;
    // 2^-6 is the smallest magnitude with an exponent of its own.
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

/// The largest magnitude as bits; numbers that are not finite compare larger than all finite ones.
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

/// Encodes numbers: first the scales of the blocks, then their codes.
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
            // SAFETY: the processor supports AVX2.
            return unsafe { with_avx2::<C>(numbers, block, rounding, bytes) };
        }
    }
    encode_all::<C>(numbers, block, rounding, bytes);
}

/// Decodes numbers.
pub(super) fn decode<C: Codes>(bytes: &[u8], block: Block, numbers: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn with_avx2<C: Codes>(bytes: &[u8], block: Block, numbers: &mut [f32]) {
            decode_all::<C>(bytes, block, numbers);
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor supports AVX2.
            return unsafe { with_avx2::<C>(bytes, block, numbers) };
        }
    }
    decode_all::<C>(bytes, block, numbers);
}
