//! Codecs of 32 and 16 bits per number, without blocks.

use half::f16;
use half::slice::HalfFloatSliceExt;

/// Numbers converted at a time, by processor instructions if available.
const GROUP: usize = 256;

pub(super) fn encode_f32(numbers: &[f32], bytes: &mut [u8]) {
    for (to, number) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(numbers) {
        *to = number.to_le_bytes();
    }
}

pub(super) fn decode_f32(bytes: &[u8], numbers: &mut [f32]) {
    for (from, number) in bytes.as_chunks::<4>().0.iter().zip(numbers) {
        *number = f32::from_le_bytes(*from);
    }
}

pub(super) fn encode_bf16(numbers: &[f32], bytes: &mut [u8]) {
    for (to, number) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(numbers) {
        *to = bf16(*number).to_le_bytes();
    }
}

/// Rounds to nearest, ties to even; NaN stays NaN.
#[inline(always)]
fn bf16(number: f32) -> u16 {
    let bits = number.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    if number.is_nan() { 0x7fc0 } else { rounded as u16 }
}

pub(super) fn decode_bf16(bytes: &[u8], numbers: &mut [f32]) {
    for (from, number) in bytes.as_chunks::<2>().0.iter().zip(numbers) {
        *number = f32::from_bits(u32::from(u16::from_le_bytes(*from)) << 16);
    }
}

pub(super) fn encode_f16(numbers: &[f32], bytes: &mut [u8]) {
    let mut group = [f16::ZERO; GROUP];
    for (bytes, numbers) in bytes.chunks_mut(2 * GROUP).zip(numbers.chunks(GROUP)) {
        let group = &mut group[..numbers.len()];
        group.convert_from_f32_slice(numbers);
        for (to, number) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(group) {
            *to = number.to_le_bytes();
        }
    }
}

pub(super) fn decode_f16(bytes: &[u8], numbers: &mut [f32]) {
    let mut group = [f16::ZERO; GROUP];
    for (bytes, numbers) in bytes.chunks(2 * GROUP).zip(numbers.chunks_mut(GROUP)) {
        let group = &mut group[..numbers.len()];
        for (from, number) in bytes.as_chunks::<2>().0.iter().zip(&mut *group) {
            *number = f16::from_le_bytes(*from);
        }
        group.convert_to_f32_slice(numbers);
    }
}
