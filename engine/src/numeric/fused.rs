//! The loops of the fused elementwise operations (`csrc/fused.cpp`) on the CPU.
//!
//! All computations are in f32 and are rounded once at the end. Sums run in sixteen fixed lanes, so
//! the bits do not depend on the width of the processor's vectors.

use std::ffi::c_void;

use crate::device::kernel::widest;

/// A number in memory that is computed with as f32.
pub(crate) trait Number: Copy {
    fn load(self) -> f32;
    fn store(value: f32) -> Self;
}

impl Number for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }

    #[inline(always)]
    fn store(value: f32) -> Self {
        value
    }
}

/// The bits of a bf16: the upper half of an f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Bf16(u16);

impl Number for Bf16 {
    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    /// Rounds to nearest, ties to even.
    #[inline(always)]
    fn store(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        // Rounding up would turn some NaN into infinity or zero.
        let quiet = bits | 0x0040_0000;
        Self(((if value.is_nan() { quiet } else { rounded }) >> 16) as u16)
    }
}

const LANES: usize = 16;

/// Sum of `term(i)` for `i` in `0..count`, in sixteen lanes added up in pairs.
#[inline(always)]
fn lane_sum(count: usize, term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let whole = count / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += term(start + lane);
        }
    }
    for index in whole..count {
        lanes[index - whole] += term(index);
    }
    for width in [8, 4, 2, 1] {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    lanes[0]
}

widest! {
    fn rms_norm<N: Number>(
        x: &[N],
        weight: &[N],
        y: &mut [N],
        scales: &mut [f32],
        constants: [f32; 2],
    ) {
        let [epsilon, offset] = constants;
        let width = weight.len();
        for ((x, y), scale) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(scales) {
            let square = lane_sum(width, |index| x[index].load() * x[index].load());
            *scale = 1.0 / (square / width as f32 + epsilon).sqrt();
            for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
                *y = N::store(x.load() * *scale * (weight.load() + offset));
            }
        }
    }
}

widest! {
    /// With `n = x · scale`, `w = weight + offset` and `y = n · w`: the weight's gradient is the sum
    /// of `gradient · n` over rows, and that of `x` is
    /// `scale · (gradient · w − n · mean(gradient · w · n))`.
    fn rms_norm_backward<N: Number>(
        operands: [&[N]; 3],
        scales: &[f32],
        x_gradient: &mut [N],
        weight_gradient: &mut [f32],
        offset: f32,
    ) {
        let [gradient, x, weight] = operands;
        let width = weight.len();
        weight_gradient.fill(0.0);
        let rows = gradient.chunks_exact(width).zip(x.chunks_exact(width));
        for (((gradient, x), out), scale) in
            rows.zip(x_gradient.chunks_exact_mut(width)).zip(scales)
        {
            let product = lane_sum(width, |index| {
                gradient[index].load() * (weight[index].load() + offset) * x[index].load()
            });
            let mean = product * scale / width as f32;
            for index in 0..width {
                let normal = x[index].load() * scale;
                let gradient = gradient[index].load();
                weight_gradient[index] += gradient * normal;
                let weighted = gradient * (weight[index].load() + offset);
                out[index] = N::store(scale * (weighted - normal * mean));
            }
        }
    }
}

/// Dimensions of a rotation, with the layout in csrc/fused.cpp.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Heads {
    tokens: usize,
    heads: usize,
    key_value_heads: usize,
    size: usize,
    /// Leading channels of a head that are rotated.
    rotated: usize,
}

impl Heads {
    fn query_width(self) -> usize {
        self.heads * self.size
    }

    fn key_width(self) -> usize {
        self.key_value_heads * self.size
    }

    fn width(self) -> usize {
        self.query_width() + 2 * self.key_width()
    }
}

/// Rotates the pairs of channels `(c, c + rotated / 2)` of each head in a row by its token's angles,
/// backwards if `sign` is -1, and copies the channels from `rotated` on.
#[inline(always)]
fn turn<N: Number>(from: &[N], to: &mut [N], angles: [&[f32]; 2], sign: f32, size: usize) {
    let [cosine, sine] = angles;
    let half = cosine.len();
    for (from, to) in from.chunks_exact(size).zip(to.chunks_exact_mut(size)) {
        let (from, rest) = from.split_at(2 * half);
        let (to, new_rest) = to.split_at_mut(2 * half);
        new_rest.copy_from_slice(rest);
        let (low, high) = from.split_at(half);
        let (new_low, new_high) = to.split_at_mut(half);
        for index in 0..half {
            let (low, high) = (low[index].load(), high[index].load());
            let sine = sine[index] * sign;
            new_low[index] = N::store(low * cosine[index] - high * sine);
            new_high[index] = N::store(high * cosine[index] + low * sine);
        }
    }
}

widest! {
    fn rotate<N: Number>(
        mixed: &[N],
        parts: [&mut [N]; 3],
        angles: [&[f32]; 2],
        first: usize,
        heads: Heads,
    ) {
        let [queries, keys, values] = parts;
        let [cosine, sine] = angles;
        let half = heads.rotated / 2;
        let rows = queries
            .chunks_exact_mut(heads.query_width())
            .zip(keys.chunks_exact_mut(heads.key_width()))
            .zip(values.chunks_exact_mut(heads.key_width()));
        for (row, (mixed, ((queries, keys), values))) in
            mixed.chunks_exact(heads.width()).zip(rows).enumerate()
        {
            let start = (first + row) % heads.tokens * half;
            let angles = [&cosine[start..start + half], &sine[start..start + half]];
            let (query, rest) = mixed.split_at(heads.query_width());
            let (key, value) = rest.split_at(heads.key_width());
            turn(query, queries, angles, 1.0, heads.size);
            turn(key, keys, angles, 1.0, heads.size);
            values.copy_from_slice(value);
        }
    }
}

widest! {
    fn rotate_backward<N: Number>(
        parts: [&[N]; 3],
        mixed: &mut [N],
        angles: [&[f32]; 2],
        first: usize,
        heads: Heads,
    ) {
        let [queries, keys, values] = parts;
        let [cosine, sine] = angles;
        let half = heads.rotated / 2;
        let rows = queries
            .chunks_exact(heads.query_width())
            .zip(keys.chunks_exact(heads.key_width()))
            .zip(values.chunks_exact(heads.key_width()));
        for (row, (mixed, ((queries, keys), values))) in
            mixed.chunks_exact_mut(heads.width()).zip(rows).enumerate()
        {
            let start = (first + row) % heads.tokens * half;
            let angles = [&cosine[start..start + half], &sine[start..start + half]];
            let (query, rest) = mixed.split_at_mut(heads.query_width());
            let (key, value) = rest.split_at_mut(heads.key_width());
            turn(queries, query, angles, -1.0, heads.size);
            turn(keys, key, angles, -1.0, heads.size);
            value.copy_from_slice(values);
        }
    }
}

/// e^x for |x| up to 87, to about 2 units in the last place, in operations that vectorise: x is
/// split into n · ln 2 + r, and e^r is its Taylor polynomial.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Adding and subtracting 1.5 · 2^23 rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.0, 87.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;
    let tail = 1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0)));
    let power = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * tail)));
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    power * f32::from_bits(exponent << 23)
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

widest! {
    fn swiglu<N: Number>(both: &[N], out: &mut [N], inner: usize) {
        for (both, out) in both.chunks_exact(2 * inner).zip(out.chunks_exact_mut(inner)) {
            let (gate, up) = both.split_at(inner);
            for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                let gate = gate.load();
                *out = N::store(gate * sigmoid(gate) * up.load());
            }
        }
    }
}

widest! {
    /// The derivative of silu is `s · (1 + x · (1 − s))` with `s = sigmoid(x)`.
    fn swiglu_backward<N: Number>(gradient: &[N], both: &[N], out: &mut [N], inner: usize) {
        let rows = gradient.chunks_exact(inner).zip(both.chunks_exact(2 * inner));
        for ((gradient, both), out) in rows.zip(out.chunks_exact_mut(2 * inner)) {
            let (gate, up) = both.split_at(inner);
            let (gate_out, up_out) = out.split_at_mut(inner);
            for index in 0..inner {
                let (gradient, gate) = (gradient[index].load(), gate[index].load());
                let share = sigmoid(gate);
                let slope = share * (1.0 + gate * (1.0 - share));
                gate_out[index] = N::store(gradient * up[index].load() * slope);
                up_out[index] = N::store(gradient * gate * share);
            }
        }
    }
}

/// The largest of some numbers, in sixteen lanes; NaN is passed over.
#[inline(always)]
fn largest<N: Number>(values: &[N]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = values.as_chunks::<LANES>();
    for values in whole {
        for (lane, value) in lanes.iter_mut().zip(values) {
            *lane = lane.max(value.load());
        }
    }
    let rest = rest.iter().map(|value| value.load());
    lanes.into_iter().chain(rest).fold(f32::NEG_INFINITY, f32::max)
}

widest! {
    /// With `p = softmax(row)`, a row's loss is `−ln p[target]` and its gradient `p − onehot(target)`.
    /// A negative target does not count: its loss and gradient are 0.
    fn cross_entropy<N: Number>(
        logits: &mut [N],
        targets: &[i64],
        losses: &mut [f32],
        scale: f32,
        with_gradients: bool,
    ) {
        let width = logits.len() / targets.len().max(1);
        for ((row, target), loss) in logits.chunks_exact_mut(width).zip(targets).zip(losses) {
            let Ok(target) = usize::try_from(*target) else {
                *loss = 0.0;
                if with_gradients {
                    row.fill(N::store(0.0));
                }
                continue;
            };
            let most = largest(row);
            let sum = lane_sum(width, |index| exp(row[index].load() - most));
            let of_target = row[target].load() - most;
            *loss = libm::logf(sum) - of_target;
            if with_gradients {
                let factor = scale / sum;
                for logit in row.iter_mut() {
                    *logit = N::store(exp(logit.load() - most) * factor);
                }
                row[target] = N::store(exp(of_target) * factor - scale);
            }
        }
    }
}

/// # Safety
/// `address` must point to `count` numbers that are not written during `'a`, or `count` be 0.
unsafe fn numbers<'a, N>(address: *const c_void, count: usize) -> &'a [N] {
    if count == 0 {
        return &[];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { std::slice::from_raw_parts(address.cast(), count) }
}

/// # Safety
/// `address` must point to `count` numbers that are not otherwise accessed during `'a`.
pub(crate) unsafe fn numbers_mut<'a, N>(address: *mut c_void, count: usize) -> &'a mut [N] {
    // SAFETY: guaranteed by the caller.
    unsafe { std::slice::from_raw_parts_mut(address.cast(), count) }
}

/// Calls a loop for the kind of number selected by `bf16`.
macro_rules! by_kind {
    ($bf16:expr, $kind:ident => $call:expr) => {
        if $bf16 {
            type $kind = Bf16;
            $call
        } else {
            type $kind = f32;
            $call
        }
    };
}
pub(crate) use by_kind;

// The functions that csrc/fused.cpp calls, on rows of contiguous tensors. SAFETY of all: it passes
// addresses of live tensors with the given extents, and no two calls write the same rows.

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn shoal_rms_norm_rows(
    bf16: bool,
    x: *const c_void,
    weight: *const c_void,
    y: *mut c_void,
    scales: *mut c_void,
    rows: usize,
    width: usize,
    epsilon: f32,
    offset: f32,
) {
    let count = rows * width;
    by_kind!(bf16, N => unsafe {
        rms_norm::<N>(
            numbers(x, count),
            numbers(weight, width),
            numbers_mut(y, count),
            numbers_mut(scales, rows),
            [epsilon, offset],
        );
    });
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn shoal_rms_norm_backward_rows(
    bf16: bool,
    gradient: *const c_void,
    x: *const c_void,
    weight: *const c_void,
    scales: *const c_void,
    x_gradient: *mut c_void,
    weight_gradient: *mut c_void,
    rows: usize,
    width: usize,
    offset: f32,
) {
    let count = rows * width;
    by_kind!(bf16, N => unsafe {
        rms_norm_backward::<N>(
            [numbers(gradient, count), numbers(x, count), numbers(weight, width)],
            numbers(scales, rows),
            numbers_mut(x_gradient, count),
            numbers_mut(weight_gradient, width),
            offset,
        );
    });
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn shoal_rotate_rows(
    bf16: bool,
    mixed: *const c_void,
    parts: *const [*mut c_void; 3],
    angles: *const [*const c_void; 2],
    first: usize,
    rows: usize,
    heads: *const Heads,
) {
    let (parts, angles, heads) = unsafe { (*parts, *angles, *heads) };
    let table = heads.tokens * heads.rotated / 2;
    let (query, key) = (rows * heads.query_width(), rows * heads.key_width());
    by_kind!(bf16, N => unsafe {
        rotate::<N>(
            numbers(mixed, rows * heads.width()),
            [
                numbers_mut(parts[0], query),
                numbers_mut(parts[1], key),
                numbers_mut(parts[2], key),
            ],
            angles.map(|angles| numbers(angles, table)),
            first,
            heads,
        );
    });
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn shoal_rotate_backward_rows(
    bf16: bool,
    parts: *const [*const c_void; 3],
    mixed: *mut c_void,
    angles: *const [*const c_void; 2],
    first: usize,
    rows: usize,
    heads: *const Heads,
) {
    let (parts, angles, heads) = unsafe { (*parts, *angles, *heads) };
    let table = heads.tokens * heads.rotated / 2;
    let (query, key) = (rows * heads.query_width(), rows * heads.key_width());
    by_kind!(bf16, N => unsafe {
        rotate_backward::<N>(
            [numbers(parts[0], query), numbers(parts[1], key), numbers(parts[2], key)],
            numbers_mut(mixed, rows * heads.width()),
            angles.map(|angles| numbers(angles, table)),
            first,
            heads,
        );
    });
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn shoal_swiglu_rows(
    bf16: bool,
    both: *const c_void,
    out: *mut c_void,
    rows: usize,
    inner: usize,
) {
    by_kind!(bf16, N => unsafe {
        swiglu::<N>(numbers(both, 2 * rows * inner), numbers_mut(out, rows * inner), inner);
    });
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn shoal_swiglu_backward_rows(
    bf16: bool,
    gradient: *const c_void,
    both: *const c_void,
    out: *mut c_void,
    rows: usize,
    inner: usize,
) {
    by_kind!(bf16, N => unsafe {
        swiglu_backward::<N>(
            numbers(gradient, rows * inner),
            numbers(both, 2 * rows * inner),
            numbers_mut(out, 2 * rows * inner),
            inner,
        );
    });
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn shoal_cross_entropy_rows(
    bf16: bool,
    logits: *mut c_void,
    targets: *const c_void,
    losses: *mut c_void,
    rows: usize,
    width: usize,
    scale: f32,
    with_gradients: bool,
) {
    by_kind!(bf16, N => unsafe {
        cross_entropy::<N>(
            numbers_mut(logits, rows * width),
            numbers(targets, rows),
            numbers_mut(losses, rows),
            scale,
            with_gradients,
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_of_the_last_place() {
        for index in -8700..=8700 {
            let x = index as f32 / 100.0;
            let exact = libm::exp(f64::from(x));
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 2.5e-7, "exp({x}) is off by {error:e}");
        }
    }

    #[test]
    fn bf16_rounds_to_nearest_even_and_keeps_nan() {
        for (value, bits) in [
            (1.0, 0x3f80),
            (f32::from_bits(0x3f80_8000), 0x3f80),
            (f32::from_bits(0x3f81_8000), 0x3f82),
            (f32::from_bits(0x3f80_8001), 0x3f81),
            (f32::INFINITY, 0x7f80),
        ] {
            assert_eq!(Bf16::store(value).0, bits);
        }
        assert!(Bf16::store(f32::from_bits(0x7fff_ffff)).load().is_nan());
    }
}
