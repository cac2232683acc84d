//! Kernels, compiled for the processor, beside the loops that compute the same there.

use std::ffi::c_void;

use proptest::prelude::*;

use crate::fixed_point::{FixedPoint, add_bf16, add_f32};
use crate::testing::manifest;

unsafe extern "C" {
    fn shoal_accumulate_on_processor(
        bf16: bool,
        values: *const c_void,
        count: u64,
        width: u64,
        sums: *mut i64,
        stride: u64,
        scale: f64,
        largest: *mut u32,
        limit: u32,
    );
}

/// Adds rows of values to rows of sums that are a stride apart. Returns whether all are in range.
fn accumulate<T>(bf16: bool, values: &[T], [width, stride]: [usize; 2], sums: &mut [i64]) -> bool {
    let fixed_point = FixedPoint::of(&manifest());
    let limit = fixed_point.largest().to_bits();
    let mut largest = 0;
    assert!((values.len() / width - 1) * stride + width <= sums.len());
    // SAFETY: the values are of the dtype, and the sums have all rows.
    unsafe {
        shoal_accumulate_on_processor(
            bf16,
            values.as_ptr().cast(),
            values.len() as u64,
            width as u64,
            sums.as_mut_ptr(),
            stride as u64,
            fixed_point.scale,
            &raw mut largest,
            limit,
        );
    }
    largest <= limit
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
        before in -1i64 << 62..1i64 << 62,
    ) {
        let (width, stride) = (7, 7 + further);
        let fixed_point = FixedPoint::of(&manifest());
        let values = rows.concat();
        let narrow: Vec<u16> = values.iter().map(|value| (value.to_bits() >> 16) as u16).collect();
        let start = vec![before / 2; rows.len() * stride];
        let wide_of = |bits: u16| f32::from_bits(u32::from(bits) << 16);
        let good = |value: f32| fixed_point.check(value).is_ok();
        let mut expected = start.clone();
        let is_good = values.iter().all(|value| good(*value));
        if is_good {
            for (row, sums) in rows.iter().zip(expected.chunks_mut(stride)) {
                add_f32(&mut sums[..width], row, fixed_point.scale);
            }
        }
        let mut found = start.clone();
        prop_assert_eq!(accumulate(false, &values, [width, stride], &mut found), is_good);
        prop_assert_eq!(&found, &expected);

        expected.clone_from(&start);
        let is_good = narrow.iter().all(|bits| good(wide_of(*bits)));
        if is_good {
            for (row, sums) in narrow.chunks(width).zip(expected.chunks_mut(stride)) {
                add_bf16(&mut sums[..width], row, fixed_point.scale);
            }
        }
        found.clone_from(&start);
        prop_assert_eq!(accumulate(true, &narrow, [width, stride], &mut found), is_good);
        prop_assert_eq!(&found, &expected);
    }
}
