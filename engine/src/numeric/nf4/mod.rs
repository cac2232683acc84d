//! Matrices in four bits for each weight: NF4 with double quantisation (QLoRA: Dettmers et al., arXiv 2305.14314), with the
//! values of bitsandbytes.
//!
//! A block of 64 weights, in the order of rows, has the numbers of the nearest of 16 levels, times the block's scale: its
//! largest magnitude. Scales, less the mean of all, are in turn the numbers of 256 levels times the largest magnitude of
//! 256 of them. A matrix is one *section* of bytes:
//!
//! | bytes | what |
//! |---|---|
//! | 4 | the mean of all scales, f32 |
//! | 4 for each 256 scales | their largest magnitude, f32 |
//! | 1 for each scale | the number of its level |
//! | 1 for two weights | the numbers of their levels, the first in the upper half |
//!
//! The mean is summed in f64, so that it is the same on all processors. That of bitsandbytes is summed by its device in
//! f32, and may differ in its last bit.

mod unpack;

use shoal_protocol::manifest::Dtype;

pub(crate) use self::unpack::{Window, unpack};
use crate::device::kernel::widest;
use crate::numeric::fused::{Bf16, Number};

/// Weights with one scale.
pub(crate) const BLOCK: usize = 64;

/// Scales with one magnitude.
pub(crate) const GROUP: usize = 256;

/// What a section's bytes are a multiple of.
pub(crate) const ALIGNMENT: usize = 64;

/// The levels of weights: quantiles of a normal distribution, with 0 and both ends.
pub(crate) const LEVELS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The least magnitude that is divided by.
const LEAST: f32 = 1e-38;

/// The bits of the levels of scales that have both signs, ascending (8-bit dynamic quantisation: Dettmers et al.,
/// arXiv 2110.02861). The others are 0 and 1.
#[rustfmt::skip]
const MAGNITUDES: [u32; 127] = [
    0x3513_a3b7, 0x365a_1a94, 0x3702_05ff, 0x37b2_4206, 0x3837_8034, 0x388a_efb3, 0x38ba_1f4b, 0x3923_d70b,
    0x398c_e705, 0x39c7_e283, 0x3a01_6f01, 0x3a1e_ecc1, 0x3a3c_6a80, 0x3a59_e83e, 0x3a77_65ff, 0x3aa7_ef9d,
    0x3af1_a9fc, 0x3b1d_b22d, 0x3b42_8f5c, 0x3b67_6c8a, 0x3b86_24dd, 0x3b98_9374, 0x3bab_020d, 0x3bbd_70a4,
    0x3bcf_df3b, 0x3be2_4dd3, 0x3bf4_bc6a, 0x3c03_9581, 0x3c0c_cccd, 0x3c16_0418, 0x3c1f_3b64, 0x3c3a_e148,
    0x3c68_f5c3, 0x3c8b_851f, 0x3ca2_8f5d, 0x3cb9_999a, 0x3cd0_a3d7, 0x3ce7_ae15, 0x3cfe_b852, 0x3d0a_e148,
    0x3d16_6667, 0x3d21_eb85, 0x3d2d_70a3, 0x3d38_f5c3, 0x3d44_7ae1, 0x3d50_0000, 0x3d5b_851f, 0x3d67_0a3d,
    0x3d72_8f5d, 0x3d7e_147b, 0x3d84_cccd, 0x3d8a_8f5d, 0x3d90_51eb, 0x3d96_147b, 0x3d9b_d70a, 0x3da1_999a,
    0x3da7_5c2a, 0x3dad_1eb8, 0x3db2_e148, 0x3db8_a3d7, 0x3dbe_6667, 0x3dc4_28f7, 0x3dc9_eb85, 0x3ddb_3334,
    0x3df8_0000, 0x3e0a_6666, 0x3e18_cccd, 0x3e27_3333, 0x3e35_999a, 0x3e44_0000, 0x3e52_6666, 0x3e60_cccd,
    0x3e6f_3333, 0x3e7d_9999, 0x3e86_0000, 0x3e8d_3334, 0x3e94_6666, 0x3e9b_999a, 0x3ea2_cccc, 0x3eaa_0000,
    0x3eb1_3333, 0x3eb8_6666, 0x3ebf_999a, 0x3ec6_cccc, 0x3ece_0000, 0x3ed5_3333, 0x3edc_6666, 0x3ee3_999a,
    0x3eea_cccc, 0x3ef2_0000, 0x3ef9_3332, 0x3f00_3333, 0x3f03_cccc, 0x3f07_6666, 0x3f0b_0000, 0x3f0e_999a,
    0x3f12_3334, 0x3f15_cccd, 0x3f19_6666, 0x3f1d_0000, 0x3f20_999a, 0x3f24_3334, 0x3f27_cccd, 0x3f2b_6666,
    0x3f2f_0000, 0x3f32_999a, 0x3f36_3334, 0x3f39_cccd, 0x3f3d_6666, 0x3f41_0000, 0x3f44_999a, 0x3f48_3333,
    0x3f4b_cccd, 0x3f4f_6666, 0x3f53_0000, 0x3f56_999a, 0x3f5a_3333, 0x3f5d_cccd, 0x3f61_6666, 0x3f65_0000,
    0x3f68_999a, 0x3f6c_3333, 0x3f6f_cccd, 0x3f73_6666, 0x3f77_0000, 0x3f7a_999a, 0x3f7e_3333,
];

/// The levels of scales, ascending.
pub(crate) const SCALE_LEVELS: [f32; 256] = {
    let mut levels = [0.0; 256];
    let mut index = 0;
    while index < MAGNITUDES.len() {
        let magnitude = f32::from_bits(MAGNITUDES[index]);
        levels[126 - index] = -magnitude;
        levels[128 + index] = magnitude;
        index += 1;
    }
    levels[255] = 1.0;
    levels
};

/// Bytes of the section of a matrix with so many weights.
pub(crate) fn section_bytes(weights: usize) -> usize {
    let Places { codes, .. } = Places::of(weights);
    (codes + weights.div_ceil(2)).next_multiple_of(ALIGNMENT)
}

/// Where the parts of a section begin; the mean is first.
#[derive(Debug, Clone, Copy)]
struct Places {
    /// Magnitudes of scales.
    magnitudes: usize,
    /// Numbers of the levels of scales.
    scales: usize,
    /// Numbers of the levels of weights.
    codes: usize,
}

impl Places {
    fn of(weights: usize) -> Self {
        let blocks = weights.div_ceil(BLOCK);
        let scales = 4 + 4 * blocks.div_ceil(GROUP);
        Self { magnitudes: 4, scales, codes: scales + blocks }
    }
}

/// The parts of a section, each as it is there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts<'a> {
    /// The mean of all scales.
    pub(crate) mean: f32,
    /// Magnitudes of scales.
    pub(crate) magnitudes: &'a [u8],
    /// Numbers of the levels of scales.
    pub(crate) scales: &'a [u8],
    /// Numbers of the levels of weights.
    pub(crate) codes: &'a [u8],
}

impl Parts<'_> {
    /// The section of a matrix of so many weights; `None` if a part has not the length of such a matrix.
    pub(crate) fn section(&self, weights: usize) -> Option<Vec<u8>> {
        let places = Places::of(weights);
        let lengths = [self.magnitudes.len(), self.scales.len(), self.codes.len()];
        let expected =
            [places.scales - places.magnitudes, places.codes - places.scales, weights.div_ceil(2)];
        if lengths != expected {
            return None;
        }
        let mean = self.mean.to_le_bytes();
        let mut section = [&mean, self.magnitudes, self.scales, self.codes].concat();
        section.resize(section_bytes(weights), 0);
        Some(section)
    }
}

/// Whether all values of a section are finite.
pub(crate) fn is_finite(section: &[u8], weights: usize) -> bool {
    let (floats, _) = section[..Places::of(weights).scales].as_chunks::<4>();
    floats.iter().all(|bytes| f32::from_le_bytes(*bytes).is_finite())
}

/// Between each two adjacent levels, their mean.
const fn middles<const N: usize, const M: usize>(levels: &[f32; N]) -> [f32; M] {
    let mut middles = [0.0; M];
    let mut index = 0;
    while index < M {
        middles[index] = (levels[index] + levels[index + 1]) / 2.0;
        index += 1;
    }
    middles
}

widest! {
    /// The numbers of the levels of weights, one after the other: how many middles are below each.
    fn levels_of_weights(scaled: &[f32], numbers: &mut [u8]) {
        const MIDDLES: [f32; 15] = middles(&LEVELS);
        numbers.fill(0);
        for middle in MIDDLES {
            for (number, value) in numbers.iter_mut().zip(scaled) {
                *number += u8::from(middle < *value);
            }
        }
    }
}

/// The same for scales.
fn levels_of_scales(scaled: &[f32], numbers: &mut [u8]) {
    const MIDDLES: [f32; 255] = middles(&SCALE_LEVELS);
    for (number, value) in numbers.iter_mut().zip(scaled) {
        *number = MIDDLES.partition_point(|middle| middle < value) as u8;
    }
}

/// The numbers of the nearest levels of values in parts of `length`, and the largest magnitude of each part. A last part
/// that is shorter is divided by it, others are multiplied with its reciprocal, as the reference does.
fn nearest(
    values: &[f32],
    length: usize,
    levels_of: impl Fn(&[f32], &mut [u8]),
    mut put: impl FnMut(usize, &[u8]),
) -> Vec<f32> {
    let (mut scaled, mut numbers) = ([0f32; GROUP], [0; GROUP]);
    let part = |(number, part): (usize, &[f32])| {
        let largest = part.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let (divisor, is_short) = (largest.max(LEAST), part.len() < length);
        let factor = 1.0 / divisor;
        let (scaled, numbers) = (&mut scaled[..part.len()], &mut numbers[..part.len()]);
        for (scaled, value) in scaled.iter_mut().zip(part) {
            let quotient = if is_short { value / divisor } else { value * factor };
            *scaled = quotient.clamp(-1.0, 1.0);
        }
        levels_of(scaled, numbers);
        put(number * length, numbers);
        if is_short { divisor } else { largest }
    };
    values.chunks(length).enumerate().map(part).collect()
}

/// Packs weights, the first of which is the first of a block. Returns their scales.
fn pack_blocks(weights: &[f32], codes: &mut [u8]) -> Vec<f32> {
    nearest(weights, BLOCK, levels_of_weights, |first, numbers| {
        for (code, pair) in codes[first / 2..].iter_mut().zip(numbers.chunks(2)) {
            *code = pair[0] << 4 | pair.get(1).unwrap_or(&0);
        }
    })
}

/// Packs the values of a matrix into its section, with so many threads.
///
/// # Panics
/// If the section has another length than [`section_bytes`].
pub(crate) fn pack(values: &[f32], section: &mut [u8], threads: usize) {
    pack_with(values, section, threads, |scales| {
        (scales.iter().copied().map(f64::from).sum::<f64>() / scales.len() as f64) as f32
    });
}

/// The section of a matrix with these values, packed with so many threads.
pub(crate) fn packed(values: &[f32], threads: usize) -> Vec<u8> {
    let mut section = vec![0; section_bytes(values.len())];
    pack(values, &mut section, threads);
    section
}

/// As [`pack`], with a function for the mean of scales.
fn pack_with(values: &[f32], section: &mut [u8], threads: usize, mean: impl Fn(&[f32]) -> f32) {
    assert_eq!(section.len(), section_bytes(values.len()), "a section of this matrix");
    let places = Places::of(values.len());
    let share = values.len().div_ceil(threads.max(1)).next_multiple_of(BLOCK).max(BLOCK);
    let (head, codes) = section.split_at_mut(places.codes);
    let mut scales = std::thread::scope(|scope| {
        let shares = values.chunks(share).zip(codes.chunks_mut(share / 2));
        let started: Vec<_> =
            shares.map(|(values, codes)| scope.spawn(move || pack_blocks(values, codes))).collect();
        let joined = started.into_iter().map(|one| one.join().expect("packing does not panic"));
        joined.flatten().collect::<Vec<f32>>()
    });
    let mean = mean(&scales);
    scales.iter_mut().for_each(|scale| *scale -= mean);
    head[..4].copy_from_slice(&mean.to_le_bytes());
    let magnitudes = nearest(&scales, GROUP, levels_of_scales, |first, numbers| {
        head[places.scales + first..][..numbers.len()].copy_from_slice(numbers);
    });
    let of_magnitudes = head[places.magnitudes..places.scales].chunks_exact_mut(4);
    for (bytes, magnitude) in of_magnitudes.zip(magnitudes) {
        bytes.copy_from_slice(&magnitude.to_le_bytes());
    }
}

/// What passes in a dtype read of a matrix that was packed, given the values of its base.
pub(crate) fn rounded_in(dtype: Dtype, values: &[f32]) -> Vec<f32> {
    match dtype {
        Dtype::F32 => rounded::<f32>(values),
        Dtype::Bf16 => {
            let narrow: Vec<f32> = values.iter().map(|value| Bf16::store(*value).load()).collect();
            rounded::<Bf16>(&narrow)
        }
    }
}

fn rounded<N: Number>(values: &[f32]) -> Vec<f32> {
    unpacked::<N>(&packed(values, 1), values.len())
}

/// What passes in a dtype read of the matrix of so many weights that has this section.
pub(crate) fn values_in(dtype: Dtype, section: &[u8], weights: usize) -> Vec<f32> {
    match dtype {
        Dtype::F32 => unpacked::<f32>(section, weights),
        Dtype::Bf16 => unpacked::<Bf16>(section, weights),
    }
}

fn unpacked<N: Number>(section: &[u8], weights: usize) -> Vec<f32> {
    let mut out = vec![N::store(0.0); weights];
    unpack(section, weights, 0, &mut out);
    out.into_iter().map(Number::load).collect()
}

#[cfg(test)]
pub(crate) mod tests;
