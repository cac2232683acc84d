//! Values of packed matrices: a lookup among the 16 levels times the scale of a block.

use std::ffi::c_void;

use super::{BLOCK, GROUP, LEVELS, Places, SCALE_LEVELS, section_bytes};
#[cfg(target_arch = "x86_64")]
use crate::device::kernel::has_avx512;
use crate::numeric::fused::{Bf16, Number, by_kind, numbers_mut};

/// Writes values of a packed matrix of so many weights, from the `first` on.
///
/// # Panics
/// If the matrix has not so many, or the section is shorter than its own.
pub(crate) fn unpack<N: Number>(section: &[u8], weights: usize, first: usize, out: &mut [N]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512dq,avx512vl,avx512bw")]
        fn widest<N: Number>(section: &[u8], weights: usize, first: usize, out: &mut [N]) {
            let block = |codes: &_, scale, out: &mut _| block_of_avx512(codes, scale, out);
            values(section, [weights, first], out, block);
        }
        if has_avx512() {
            // SAFETY: the processor has these instructions.
            return unsafe { widest(section, weights, first, out) };
        }
    }
    values(section, [weights, first], out, block_of);
}

/// As [`unpack`], with a function for whole blocks.
#[inline(always)]
fn values<N: Number>(
    section: &[u8],
    [weights, first]: [usize; 2],
    mut out: &mut [N],
    block: impl Fn(&[u8; BLOCK / 2], f32, &mut [N; BLOCK]),
) {
    assert!(first + out.len() <= weights, "values of this matrix");
    let places = Places::of(weights);
    let codes = &section[places.codes..places.codes + weights.div_ceil(2)];
    let mut next = first;
    while !out.is_empty() {
        let count = out.len().min(BLOCK - next % BLOCK);
        let (part, rest) = out.split_at_mut(count);
        let scale = scale(section, places, next / BLOCK);
        match part.try_into() {
            Ok(whole) => {
                let codes = codes[next / 2..next / 2 + BLOCK / 2].try_into();
                block(codes.expect("half as many"), scale, whole);
            }
            Err(_) => some_of(codes, next, scale, part),
        }
        (out, next) = (rest, next + count);
    }
}

/// The scale of a block.
#[inline(always)]
fn scale(section: &[u8], places: Places, block: usize) -> f32 {
    let float = |at: usize| f32::from_le_bytes(section[at..at + 4].try_into().expect("four"));
    let level = SCALE_LEVELS[usize::from(section[places.scales + block])];
    level * float(places.magnitudes + 4 * (block / GROUP)) + float(0)
}

/// Values of a part of a block.
fn some_of<N: Number>(codes: &[u8], first: usize, scale: f32, out: &mut [N]) {
    let levels = LEVELS.map(|level| N::store(level * scale));
    for (index, value) in (first..).zip(out) {
        let code = codes[index / 2] >> if index % 2 == 0 { 4 } else { 0 };
        *value = levels[usize::from(code & 15)];
    }
}

/// All values of a block.
#[inline(always)]
fn block_of<N: Number>(codes: &[u8; BLOCK / 2], scale: f32, out: &mut [N; BLOCK]) {
    let levels = LEVELS.map(|level| N::store(level * scale));
    for (code, pair) in codes.iter().zip(out.as_chunks_mut::<2>().0) {
        *pair = [levels[usize::from(code >> 4)], levels[usize::from(code & 15)]];
    }
}

/// All values of a block, sixteen at a time. The levels are rounded before they are looked up.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl,avx512bw")]
fn block_of_avx512<N: Number>(codes: &[u8; BLOCK / 2], scale: f32, out: &mut [N; BLOCK]) {
    use std::arch::x86_64::*;

    let is_wide = size_of::<N>() == size_of::<f32>();
    // SAFETY: there are sixteen levels.
    let levels = unsafe { _mm512_loadu_ps(LEVELS.as_ptr()) };
    let exact = _mm512_mul_ps(levels, _mm512_set1_ps(scale));
    let bits = _mm512_castps_si512(exact);
    let table = if is_wide {
        bits
    } else {
        // As `Bf16::store`.
        let odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        let rounded = _mm512_add_epi32(bits, half);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        let is_nan = _mm512_cmp_ps_mask(exact, exact, _CMP_UNORD_Q);
        _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16)
    };
    for (codes, out) in codes.as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<16>().0) {
        let pairs = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(i64::from_le_bytes(*codes)));
        // The lower half of eight bytes gets the first number of a pair; only four bits of each half count.
        let numbers = _mm512_or_si512(_mm512_srli_epi64(pairs, 4), _mm512_slli_epi64(pairs, 32));
        let found = _mm512_permutexvar_epi32(numbers, table);
        // SAFETY: `out` has sixteen numbers of this size.
        unsafe {
            match is_wide {
                true => _mm512_storeu_si512(out.as_mut_ptr().cast(), found),
                false => {
                    _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(found));
                }
            }
        }
    }
}

/// A part of a packed matrix: rows of `width` values, which begin `stride` weights apart. The layout is that of
/// csrc/packed.h.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Window {
    /// Weights of the matrix.
    pub(crate) weights: i64,
    /// The first value.
    pub(crate) first: i64,
    pub(crate) rows: i64,
    pub(crate) width: i64,
    pub(crate) stride: i64,
}

/// Writes some rows of a window. SAFETY: the section is that of the window's matrix, which has all of the window, and
/// `out` has room for these rows.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn shoal_nf4_rows(
    bf16: bool,
    section: *const u8,
    window: *const Window,
    row: usize,
    rows: usize,
    out: *mut c_void,
) {
    let window = unsafe { *window };
    let [weights, first, width, stride] =
        [window.weights, window.first, window.width, window.stride].map(|count| count as usize);
    let section = unsafe { std::slice::from_raw_parts(section, section_bytes(weights)) };
    by_kind!(bf16, N => {
        let out = unsafe { numbers_mut::<N>(out, rows * width) };
        if stride == width {
            unpack(section, weights, first + row * width, out);
        } else {
            for (row, out) in (row..).zip(out.chunks_exact_mut(width)) {
                unpack(section, weights, first + row * stride, out);
            }
        }
    });
}
