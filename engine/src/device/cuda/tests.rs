//! Kernels, compiled for the processor, beside the loops that compute the same there.

use std::ffi::{CString, c_char, c_void};

use half::bf16;
use proptest::prelude::*;

use super::Argument;
use crate::numeric::fixed_point::{FixedPoint, add_bf16, add_f32};
use crate::numeric::fused::{
    shoal_cross_entropy_rows, shoal_rms_norm_backward_rows, shoal_rms_norm_rows,
    shoal_rotate_backward_rows, shoal_rotate_rows, shoal_swiglu_backward_rows, shoal_swiglu_rows,
};
use crate::testing::manifest;
use crate::weights::gradient::{Piece, Rows, Values};

unsafe extern "C" {
    fn shoal_on_processor(name: *const c_char, places: *mut *mut c_void) -> bool;
}

/// What a kernel reads.
pub(crate) fn of<T>(values: &[T]) -> Argument {
    Argument::Address(values.as_ptr().cast_mut().cast())
}

/// What a kernel writes.
pub(crate) fn of_mut<T>(values: &mut [T]) -> Argument {
    Argument::Address(values.as_mut_ptr().cast())
}

/// Computes a kernel, whose arguments these must be.
pub(crate) fn on_processor<const N: usize>(name: &str, mut arguments: [Argument; N]) {
    let of_c = CString::new(name).expect("no zeros");
    let mut places = arguments.each_mut().map(Argument::place);
    // SAFETY: the caller's arguments are those of the kernel, with as many elements as it reads.
    assert!(unsafe { shoal_on_processor(of_c.as_ptr(), places.as_mut_ptr()) }, "no kernel {name}");
}

/// A number of a dtype for which there are kernels.
trait Number: Copy + PartialEq + std::fmt::Debug {
    const DTYPE: &str;
    const IS_BF16: bool;
    fn from(value: f32) -> Self;
    fn bits(self) -> u32;
}

impl Number for f32 {
    const DTYPE: &str = "f32";
    const IS_BF16: bool = false;

    fn from(value: f32) -> Self {
        value
    }

    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Number for bf16 {
    const DTYPE: &str = "bf16";
    const IS_BF16: bool = true;

    fn from(value: f32) -> Self {
        Self::from_f32(value)
    }

    fn bits(self) -> u32 {
        u32::from(self.to_bits())
    }
}

fn narrowed<N: Number>(values: &[f32]) -> Vec<N> {
    values.iter().map(|value| N::from(*value)).collect()
}

fn bits<N: Number>(values: &[N]) -> Vec<u32> {
    values.iter().map(|value| value.bits()).collect()
}

fn zeros<N: Number>(count: usize) -> Vec<N> {
    vec![N::from(0.0); count]
}

/// The name of a kernel for a dtype.
fn named<N: Number>(kernel: &str) -> String {
    format!("shoal_{kernel}_{}", N::DTYPE)
}

/// Adds rows of values to rows of sums that are a stride apart. Returns whether all are in range.
fn accumulate<N: Number>(values: &[N], [width, stride]: [usize; 2], sums: &mut [i64]) -> bool {
    let fixed_point = FixedPoint::of(&manifest());
    let limit = fixed_point.largest().to_bits();
    let mut largest = [0u32];
    assert!((values.len() / width - 1) * stride + width <= sums.len());
    let count = Argument::Count(values.len() as u64);
    on_processor(&named::<N>("largest"), [of(values), count, of_mut(&mut largest)]);
    let arguments = [
        of(values),
        count,
        Argument::Count(width as u64),
        of_mut(sums),
        Argument::Count(stride as u64),
        Argument::Number(fixed_point.scale),
        of(&largest),
        Argument::Bits(limit),
    ];
    on_processor(&named::<N>("add"), arguments);
    largest[0] <= limit
}

/// Any value, most of them of the size of gradients.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => -1e3f32..1e3,
        4 => -1e-9f32..1e-9,
        1 => any::<u32>().prop_map(f32::from_bits),
    ]
}

proptest! {
    #[test]
    fn gradients_are_added_as_on_a_processor(
        rows in prop::collection::vec(prop::collection::vec(value(), 7), 1..20),
        further in 0usize..5,
        before in -1i64 << 61..1i64 << 61,
    ) {
        let (width, stride) = (7, 7 + further);
        let fixed_point = FixedPoint::of(&manifest());
        let values = rows.concat();
        let narrow: Vec<bf16> = narrowed(&values);
        let start = vec![before; rows.len() * stride];
        let are_good = |all: &[f32]| all.iter().all(|value| fixed_point.check(*value).is_ok());
        let mut expected = start.clone();
        let is_good = are_good(&values);
        if is_good {
            for (row, sums) in rows.iter().zip(expected.chunks_mut(stride)) {
                add_f32(&mut sums[..width], row, fixed_point.scale);
            }
        }
        let mut found = start.clone();
        prop_assert_eq!(accumulate(&values, [width, stride], &mut found), is_good);
        prop_assert_eq!(&found, &expected);

        expected.clone_from(&start);
        let wide: Vec<f32> = narrow.iter().map(|value| value.to_f32()).collect();
        let is_good = are_good(&wide);
        if is_good {
            let of_bits: Vec<u16> = narrow.iter().map(|value| value.to_bits()).collect();
            for (row, sums) in of_bits.chunks(width).zip(expected.chunks_mut(stride)) {
                add_bf16(&mut sums[..width], row, fixed_point.scale);
            }
        }
        found.clone_from(&start);
        prop_assert_eq!(accumulate(&narrow, [width, stride], &mut found), is_good);
        prop_assert_eq!(&found, &expected);
    }

    #[test]
    fn rows_of_an_embedding_are_added_as_on_a_processor(
        tokens in prop::collection::vec(0i64..9, 1..30), from in 0i64..5, width in 1usize..6,
        values in prop::collection::vec(value(), 200), before in -1i64 << 61..1i64 << 61,
    ) {
        let gradients = &values[..tokens.len() * width];
        embedding_rows(&tokens, from..from + 4, gradients, before)?;
    }

    #[test]
    fn norms_are_those_of_a_processor(
        rows in 1usize..150, width in 1usize..70, offset in 0f32..1.0, seed in any::<u64>(),
    ) {
        norms::<f32>([rows, width], offset, seed)?;
        norms::<bf16>([rows, width], offset, seed)?;
    }

    #[test]
    fn rotations_are_those_of_a_processor(
        tokens in 1usize..9, samples in 1usize..3, heads in 1usize..4, key_value_heads in 1usize..3,
        size in 1usize..12, part in 0usize..7, seed in any::<u64>(),
    ) {
        let rotated = part.min(size / 2) * 2;
        let of = [tokens, heads, key_value_heads, size, rotated];
        rotations::<f32>(samples, of, seed)?;
        rotations::<bf16>(samples, of, seed)?;
    }

    #[test]
    fn gates_are_those_of_a_processor(rows in 1usize..9, inner in 1usize..40, seed in any::<u64>()) {
        gates::<f32>([rows, inner], seed)?;
        gates::<bf16>([rows, inner], seed)?;
    }

    #[test]
    fn losses_are_those_of_a_processor(
        targets in prop::collection::vec(-1i64..3, 1..6), width in 3usize..700, seed in any::<u64>(),
    ) {
        losses::<f32>(&targets, width, seed, 1e-5)?;
        losses::<bf16>(&targets, width, seed, 1e-2)?;
    }
}

/// Sums the gradients of the rows that tokens read, and adds them to sums of all rows.
fn embedding_rows(
    tokens: &[i64],
    held: std::ops::Range<i64>,
    gradients: &[f32],
    before: i64,
) -> Result<(), TestCaseError> {
    let width = gradients.len() / tokens.len();
    let tensor = tch::Tensor::from_slice(gradients).view([tokens.len() as i64, -1]);
    let piece = Piece::embedding(0, &held, tokens, &tensor).expect("small");
    let Values::Rows(Rows { indices, values: expected, .. }) = piece.values else { panic!("rows") };
    let numbers: Vec<i64> = indices.iter().map(|index| *index as i64).collect();
    let (mut starts, mut order) = (vec![0i64], Vec::new());
    for number in &numbers {
        let places = (0i64..).zip(tokens).filter(|(_, token)| **token - held.start == *number);
        order.extend(places.map(|(place, _)| place));
        starts.push(order.len() as i64);
    }
    let mut found = vec![f32::NAN; expected.len()];
    let [of_rows, of_width] = [numbers.len(), width].map(|count| Argument::Count(count as u64));
    let arguments = [of(gradients), of_rows, of_width, of(&starts), of(&order), of_mut(&mut found)];
    on_processor("shoal_embedding_rows", arguments);
    // NaN is one number, whatever its bits.
    let plain = |values: &[f32]| -> Vec<Option<u32>> {
        values.iter().map(|value| (!value.is_nan()).then_some(value.to_bits())).collect()
    };
    prop_assert_eq!(plain(&found), plain(&expected));

    let fixed_point = FixedPoint::of(&manifest());
    let is_good = found.iter().all(|value| fixed_point.check(*value).is_ok());
    let mut expected_sums = vec![before; 4 * width];
    if is_good {
        for (row, values) in indices.iter().zip(found.chunks(width)) {
            let sums = &mut expected_sums[row * width..(row + 1) * width];
            add_f32(sums, values, fixed_point.scale);
        }
    }
    let (mut largest, mut sums) = ([0u32], vec![before; 4 * width]);
    let count = Argument::Count(found.len() as u64);
    on_processor("shoal_largest_f32", [of(&found), count, of_mut(&mut largest)]);
    let arguments = [
        of(&found),
        of_rows,
        of_width,
        of(&numbers),
        of_mut(&mut sums),
        Argument::Number(fixed_point.scale),
        of(&largest),
        Argument::Bits(fixed_point.largest().to_bits()),
    ];
    on_processor("shoal_add_rows", arguments);
    prop_assert_eq!(sums, expected_sums);
    Ok(())
}

/// Numbers that follow from a seed.
fn random(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..count).map(|_| (next() - 0.5) * 40.0 * next() * next()).collect()
}

fn norms<N: Number>(
    [rows, width]: [usize; 2],
    offset: f32,
    seed: u64,
) -> Result<(), TestCaseError> {
    let count = rows * width;
    let x: Vec<N> = narrowed(&random(seed, count));
    let weight: Vec<N> = narrowed(&random(seed ^ 5, width));
    let (mut y, mut scales) = (zeros::<N>(count), zeros::<f32>(rows));
    // SAFETY of all: the tensors have these extents.
    unsafe {
        shoal_rms_norm_rows(
            N::IS_BF16,
            x.as_ptr().cast(),
            weight.as_ptr().cast(),
            y.as_mut_ptr().cast(),
            scales.as_mut_ptr().cast(),
            rows,
            width,
            1e-5,
            offset,
        );
    }
    let [of_rows, of_width] = [rows, width].map(|count| Argument::Count(count as u64));
    let (mut y_found, mut scales_found) = (zeros::<N>(count), zeros::<f32>(rows));
    let arguments = [
        of(&x),
        of_rows,
        of_width,
        of(&weight),
        of_mut(&mut y_found),
        of_mut(&mut scales_found),
        Argument::Float(1e-5),
        Argument::Float(offset),
    ];
    on_processor(&named::<N>("rms_norm"), arguments);
    prop_assert_eq!(bits(&y_found), bits(&y));
    prop_assert_eq!(bits(&scales_found), bits(&scales));

    norm_gradients([rows, width], offset, [&x, &weight], &scales, seed)
}

/// The backward pass of `norms`.
fn norm_gradients<N: Number>(
    [rows, width]: [usize; 2],
    offset: f32,
    [x, weight]: [&[N]; 2],
    scales: &[f32],
    seed: u64,
) -> Result<(), TestCaseError> {
    const BLOCK: usize = 64;
    let count = rows * width;
    let gradient: Vec<N> = narrowed(&random(seed ^ 77, count));
    let [of_rows, of_width] = [rows, width].map(|count| Argument::Count(count as u64));
    let mut x_gradient = zeros::<N>(count);
    let mut parts = zeros::<f32>(rows.div_ceil(BLOCK) * width);
    for (block, part) in parts.chunks_mut(width).enumerate() {
        let (row, rows) = (block * BLOCK, BLOCK.min(rows - block * BLOCK));
        let at = row * width..(row + rows) * width;
        // SAFETY: as above.
        unsafe {
            shoal_rms_norm_backward_rows(
                N::IS_BF16,
                gradient[at.clone()].as_ptr().cast(),
                x[at.clone()].as_ptr().cast(),
                weight.as_ptr().cast(),
                scales[row..].as_ptr().cast(),
                x_gradient[at].as_mut_ptr().cast(),
                part.as_mut_ptr().cast(),
                rows,
                width,
                offset,
            );
        }
    }
    let (mut x_found, mut parts_found) = (zeros::<N>(count), zeros::<f32>(parts.len()));
    let arguments = [
        of(&gradient),
        of_rows,
        of_width,
        of(x),
        of(weight),
        of(scales),
        of_mut(&mut x_found),
        Argument::Float(offset),
    ];
    on_processor(&named::<N>("rms_norm_backward"), arguments);
    let arguments = [
        of(&gradient),
        of_rows,
        of_width,
        of(x),
        of(scales),
        of_mut(&mut parts_found),
        Argument::Count(BLOCK as u64),
    ];
    on_processor(&named::<N>("rms_norm_weight"), arguments);
    prop_assert_eq!(bits(&x_found), bits(&x_gradient));
    prop_assert_eq!(bits(&parts_found), bits(&parts));
    Ok(())
}

fn rotations<N: Number>(
    samples: usize,
    of_heads: [usize; 5],
    seed: u64,
) -> Result<(), TestCaseError> {
    let [tokens, heads, key_value_heads, size, rotated] = of_heads;
    let rows = samples * tokens;
    let widths = [heads, key_value_heads, key_value_heads].map(|heads| heads * size);
    let width: usize = widths.iter().sum();
    let mixed: Vec<N> = narrowed(&random(seed, rows * width));
    let [cosine, sine] = [1, 2].map(|part| random(seed ^ part, tokens * rotated / 2));
    let angles = [&cosine, &sine].map(|table| table.as_ptr().cast::<c_void>());
    let mut parts = widths.map(|width| zeros::<N>(rows * width));
    let places = parts.each_mut().map(|part| part.as_mut_ptr().cast::<c_void>());
    let extents = (&raw const of_heads).cast();
    // SAFETY: the tensors have these extents.
    unsafe {
        shoal_rotate_rows(
            N::IS_BF16,
            mixed.as_ptr().cast(),
            &raw const places,
            &raw const angles,
            0,
            rows,
            extents,
        );
    }
    let [of_rows, of_width] = [rows, width].map(|count| Argument::Count(count as u64));
    let counts = Argument::Counts(of_heads.map(|count| count as u64));
    let mut found = widths.map(|width| zeros::<N>(rows * width));
    let [queries, keys, values] = found.each_mut().map(|part| of_mut(part));
    let arguments =
        [of(&mixed), of_rows, of_width, queries, keys, values, of(&cosine), of(&sine), counts];
    on_processor(&named::<N>("rotate"), arguments);
    prop_assert_eq!(
        found.each_ref().map(|part| bits(part)),
        parts.each_ref().map(|part| bits(part))
    );

    let (mut back, mut found) = (zeros::<N>(rows * width), zeros::<N>(rows * width));
    let places = parts.each_ref().map(|part| part.as_ptr().cast::<c_void>());
    // SAFETY: as above.
    unsafe {
        shoal_rotate_backward_rows(
            N::IS_BF16,
            &raw const places,
            back.as_mut_ptr().cast(),
            &raw const angles,
            0,
            rows,
            extents,
        );
    }
    let [queries, keys, values] = parts.each_ref().map(|part| of(part));
    let arguments = [
        queries,
        of_rows,
        of_width,
        keys,
        values,
        of_mut(&mut found),
        of(&cosine),
        of(&sine),
        counts,
    ];
    on_processor(&named::<N>("rotate_backward"), arguments);
    prop_assert_eq!(bits(&found), bits(&back));
    Ok(())
}

fn gates<N: Number>([rows, inner]: [usize; 2], seed: u64) -> Result<(), TestCaseError> {
    let both: Vec<N> = narrowed(&random(seed, 2 * rows * inner));
    let gradient: Vec<N> = narrowed(&random(seed ^ 3, rows * inner));
    let (mut out, mut slopes) = (zeros::<N>(rows * inner), zeros::<N>(2 * rows * inner));
    // SAFETY: the tensors have these extents.
    unsafe {
        shoal_swiglu_rows(N::IS_BF16, both.as_ptr().cast(), out.as_mut_ptr().cast(), rows, inner);
        shoal_swiglu_backward_rows(
            N::IS_BF16,
            gradient.as_ptr().cast(),
            both.as_ptr().cast(),
            slopes.as_mut_ptr().cast(),
            rows,
            inner,
        );
    }
    let [of_rows, of_inner] = [rows, inner].map(|count| Argument::Count(count as u64));
    let (mut found, mut slopes_found) = (zeros::<N>(out.len()), zeros::<N>(slopes.len()));
    on_processor(&named::<N>("swiglu"), [of(&both), of_rows, of_inner, of_mut(&mut found)]);
    let arguments = [of(&gradient), of_rows, of_inner, of(&both), of_mut(&mut slopes_found)];
    on_processor(&named::<N>("swiglu_backward"), arguments);
    prop_assert_eq!(bits(&found), bits(&out));
    prop_assert_eq!(bits(&slopes_found), bits(&slopes));
    Ok(())
}

/// A row's sum has other lanes on a GPU.
fn losses<N: Number + Into<f32>>(
    targets: &[i64],
    width: usize,
    seed: u64,
    precision: f32,
) -> Result<(), TestCaseError> {
    let (rows, scale) = (targets.len(), 0.25);
    let logits: Vec<N> = narrowed(&random(seed, rows * width));
    let (mut by_loops, mut by_kernel) = (logits.clone(), logits);
    let (mut expected, mut found) = (zeros::<f32>(rows), zeros::<f32>(rows));
    // SAFETY: the tensors have these extents.
    unsafe {
        shoal_cross_entropy_rows(
            N::IS_BF16,
            by_loops.as_mut_ptr().cast(),
            targets.as_ptr().cast(),
            expected.as_mut_ptr().cast(),
            rows,
            width,
            scale,
            true,
        );
    }
    let arguments = [
        of_mut(&mut by_kernel),
        Argument::Count(rows as u64),
        Argument::Count(width as u64),
        of(targets),
        of_mut(&mut found),
        Argument::Float(scale),
        Argument::Bits(1),
    ];
    on_processor(&named::<N>("cross_entropy"), arguments);
    for (found, expected) in found.iter().zip(&expected) {
        prop_assert!(
            (found - expected).abs() <= 1e-5 * (1.0 + expected.abs()),
            "{found} {expected}"
        );
    }
    for (found, expected) in by_kernel.into_iter().zip(by_loops) {
        let (found, expected): (f32, f32) = (found.into(), expected.into());
        let most = precision * expected.abs() + 1e-7;
        prop_assert!((found - expected).abs() <= most, "{found} instead of {expected}");
    }
    Ok(())
}
