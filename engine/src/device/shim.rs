//! C++ functions that tch lacks (`csrc/shim.cpp`).

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::{EngineError, Result};

unsafe extern "C" {
    fn shoal_free(message: *mut c_char);
    fn shoal_torch_version() -> *const c_char;
    fn shoal_gradients(
        output: *mut C_tensor,
        output_gradient: *mut C_tensor,
        inputs: *const *mut C_tensor,
        count: usize,
        gradients: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_linear(
        x: *mut C_tensor,
        weight: *mut C_tensor,
        bias: *mut C_tensor,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_gradients_or_factors(
        output: *mut C_tensor,
        output_gradient: *mut C_tensor,
        inputs: *const *mut C_tensor,
        count: usize,
        gradients: *mut *mut C_tensor,
        rows: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_be_deterministic() -> *mut c_char;
    fn shoal_rms_norm(
        x: *mut C_tensor,
        weight: *mut C_tensor,
        epsilon: f64,
        offset: f64,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_rotate(
        mixed: *mut C_tensor,
        cosine: *mut C_tensor,
        sine: *mut C_tensor,
        heads: i64,
        key_value_heads: i64,
        results: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_swiglu(both: *mut C_tensor, result: *mut *mut C_tensor) -> *mut c_char;
    fn shoal_clamped_swiglu(both: *mut C_tensor, result: *mut *mut C_tensor) -> *mut c_char;
    fn shoal_cross_entropy(
        logits: *mut C_tensor,
        targets: *mut C_tensor,
        scale: f64,
        with_gradients: bool,
        losses: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_attend_documents(
        queries: *mut C_tensor,
        keys: *mut C_tensor,
        values: *mut C_tensor,
        sinks: *mut C_tensor,
        lengths: *const i64,
        documents: usize,
        starts: *mut C_tensor,
        window: i64,
        scale: f64,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_attend_with_sinks(
        queries: *mut C_tensor,
        keys: *mut C_tensor,
        values: *mut C_tensor,
        mask: *mut C_tensor,
        sinks: *mut C_tensor,
        scale: f64,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_add_gradient(
        input: *mut C_tensor,
        more: *mut C_tensor,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_count(
        logits: *mut C_tensor,
        biases: *mut C_tensor,
        counts: *mut C_tensor,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_permute(
        rows: *mut C_tensor,
        order: *mut C_tensor,
        inverse: *mut C_tensor,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_set_memory(tensor: *mut C_tensor, address: *mut c_void, bytes: usize) -> *mut c_char;
}

/// Checks the result of a shim function: null, or a message to be freed.
pub(crate) fn check(message: *mut c_char) -> Result<()> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: the shim returns null or a string of its own that ends with a zero.
    let text = unsafe { CStr::from_ptr(message) }.to_string_lossy();
    let line = text.lines().next().unwrap_or_default().to_owned();
    // SAFETY: it is freed once, and `text` is not used again.
    unsafe { shoal_free(message) };
    Err(EngineError::Torch(line))
}

pub(crate) fn pointer(tensor: &Tensor) -> *mut C_tensor {
    tensor.as_ptr().cast_mut()
}

/// A new tensor that a shim function writes.
pub(crate) fn new_tensor(write: impl FnOnce(*mut *mut C_tensor) -> *mut c_char) -> Result<Tensor> {
    let mut result = ptr::null_mut();
    check(write(&raw mut result))?;
    // SAFETY: on success it is a new tensor with no other owner.
    Ok(unsafe { Tensor::from_ptr(result) })
}

/// `count` new tensors that a shim function writes.
pub(crate) fn new_tensors(
    count: usize,
    write: impl FnOnce(*mut *mut C_tensor) -> *mut c_char,
) -> Result<Vec<Tensor>> {
    let mut results = vec![ptr::null_mut(); count];
    check(write(results.as_mut_ptr()))?;
    // SAFETY: on success each element is a new tensor with no other owner.
    Ok(results.into_iter().map(|result| unsafe { Tensor::from_ptr(result) }).collect())
}

/// Version of libtorch.
#[must_use]
pub fn torch_version() -> String {
    // SAFETY: it is a constant that ends with a zero.
    unsafe { CStr::from_ptr(shoal_torch_version()) }.to_string_lossy().into_owned()
}

/// Gradients of `output` with respect to each of `inputs`. Frees the graph.
///
/// `output_gradient` has the shape of `output`; without it `output` must be a scalar.
///
/// # Errors
/// If libtorch fails, for instance because an input is not part of the graph.
pub(crate) fn gradients(
    output: &Tensor,
    output_gradient: Option<&Tensor>,
    inputs: &[&Tensor],
) -> Result<Vec<Tensor>> {
    let inputs: Vec<*mut C_tensor> = inputs.iter().map(|input| pointer(input)).collect();
    let output_gradient = output_gradient.map_or(ptr::null_mut(), pointer);
    // SAFETY: all pointers are of live tensors, and both arrays have `inputs.len()` elements.
    new_tensors(inputs.len(), |results| unsafe {
        shoal_gradients(pointer(output), output_gradient, inputs.as_ptr(), inputs.len(), results)
    })
}

/// The product of `x` with a matrix `[outputs, inputs]`, plus a bias.
pub(crate) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let bias = bias.map_or(ptr::null_mut(), pointer);
    // SAFETY: the pointers are of live tensors or of the result, or null.
    new_tensor(|result| unsafe { shoal_linear(pointer(x), pointer(weight), bias, result) })
}

/// Like [`gradients`], but without the products that the gradients of weights of [`linear`] are. In the place of such a
/// gradient are its factors: that of the product's result, and the rows that the weight was multiplied with.
///
/// # Errors
/// As [`gradients`], and if two products have one weight.
pub(crate) fn gradients_or_factors(
    output: &Tensor,
    output_gradient: &Tensor,
    inputs: &[&Tensor],
) -> Result<Vec<(Tensor, Option<Tensor>)>> {
    let inputs: Vec<*mut C_tensor> = inputs.iter().map(|input| pointer(input)).collect();
    let (output, output_gradient) = (pointer(output), pointer(output_gradient));
    let (inputs, count) = (inputs.as_ptr(), inputs.len());
    let mut rows = vec![ptr::null_mut(); count];
    // SAFETY: all pointers are of live tensors, and all arrays have `count` elements.
    let gradients = new_tensors(count, |results| unsafe {
        let rows = rows.as_mut_ptr();
        shoal_gradients_or_factors(output, output_gradient, inputs, count, results, rows)
    })?;
    // SAFETY: each is null or a new tensor with no other owner.
    let of_input =
        |rows: *mut C_tensor| (!rows.is_null()).then(|| unsafe { Tensor::from_ptr(rows) });
    Ok(gradients.into_iter().zip(rows.into_iter().map(of_input)).collect())
}

/// Makes libtorch's results reproducible: deterministic kernels, no TF32, no reductions in reduced
/// precision.
pub(crate) fn be_deterministic() -> Result<()> {
    // SAFETY: it only sets libtorch's global switches.
    check(unsafe { shoal_be_deterministic() })
}

/// On the CPU: `x`, f32 or bf16, divided by its root mean square over the last dimension and
/// multiplied by `weight + offset`.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64, offset: f64) -> Result<Tensor> {
    // SAFETY: all pointers are of live tensors or of the result.
    new_tensor(|result| unsafe {
        shoal_rms_norm(pointer(x), pointer(weight), epsilon, offset, result)
    })
}

/// On the CPU: splits `[B, T, (heads + 2 · key_value_heads) · D]` into queries, keys and values of
/// `[B, T, heads, D]` and rotates the first R channels of the first two by the angles, whose cosines
/// and sines are f32 `[at least T, R / 2]`.
pub(crate) fn rotate(
    mixed: &Tensor,
    [cosine, sine]: [&Tensor; 2],
    heads: i64,
    key_value_heads: i64,
) -> Result<[Tensor; 3]> {
    // SAFETY: all pointers are of live tensors or of the three results.
    let results = new_tensors(3, |results| unsafe {
        shoal_rotate(
            pointer(mixed),
            pointer(cosine),
            pointer(sine),
            heads,
            key_value_heads,
            results,
        )
    })?;
    Ok(results.try_into().expect("three were asked for"))
}

/// On the CPU: silu of the first half of the last dimension, times the second half.
pub(crate) fn swiglu(both: &Tensor) -> Result<Tensor> {
    // SAFETY: all pointers are of live tensors or of the result.
    new_tensor(|result| unsafe { shoal_swiglu(pointer(both), result) })
}

/// Of gates g and values u in the halves of the last dimension, clamped to at most 7 and to ±7: `(u + 1) · g ·
/// sigmoid(1.702 g)`.
pub(crate) fn clamped_swiglu(both: &Tensor) -> Result<Tensor> {
    // SAFETY: all pointers are of live tensors or of the result.
    new_tensor(|result| unsafe { shoal_clamped_swiglu(pointer(both), result) })
}

/// On the CPU: the cross-entropy of each row of contiguous `logits`, f32 or bf16 `[N, V]`, as f32
/// `[N]`. `targets` are i64 `[N]` below V; where one is negative, the loss is 0. With gradients,
/// each logit becomes the gradient of the sum of losses times `scale` with respect to it.
pub(crate) fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    scale: f64,
    with_gradients: bool,
) -> Result<Tensor> {
    // SAFETY: all pointers are of live tensors or of the losses.
    new_tensor(|losses| unsafe {
        shoal_cross_entropy(pointer(logits), pointer(targets), scale, with_gradients, losses)
    })
}

/// Causal attention of queries `[N, heads, D]` to keys and values `[N, groups, D]` within documents of these lengths, whose
/// sum is N, and perhaps within a window: `[N, heads, D]`. `starts` has their first tokens and N, i32, for flash attention.
/// `sinks`, `[heads]`, has the sink of each head.
pub(crate) fn attend_documents(
    [queries, keys, values]: [&Tensor; 3],
    sinks: Option<&Tensor>,
    lengths: &[i64],
    starts: Option<&Tensor>,
    window: Option<u32>,
    scale: Option<f64>,
) -> Result<Tensor> {
    let [sinks, starts] = [sinks, starts].map(|there| there.map_or(ptr::null_mut(), pointer));
    let (window, scale) = (window.map_or(0, i64::from), scale.unwrap_or(f64::NAN));
    // SAFETY: all pointers are of live tensors, of the lengths or of the result.
    new_tensor(|result| unsafe {
        shoal_attend_documents(
            pointer(queries),
            pointer(keys),
            pointer(values),
            sinks,
            lengths.as_ptr(),
            lengths.len(),
            starts,
            window,
            scale,
            result,
        )
    })
}

/// Attention of queries `[B, heads, T, D]` to keys and values of as many heads that have sinks `[heads]`. A bool mask says
/// which keys are read; without one all are.
pub(crate) fn attend_with_sinks(
    [queries, keys, values]: [&Tensor; 3],
    mask: Option<&Tensor>,
    sinks: &Tensor,
    scale: Option<f64>,
) -> Result<Tensor> {
    let mask = mask.map_or(ptr::null_mut(), pointer);
    let [queries, keys, values, sinks] = [queries, keys, values, sinks].map(pointer);
    let scale = scale.unwrap_or(f64::NAN);
    // SAFETY: all pointers are of live tensors or of the result.
    new_tensor(|result| unsafe {
        shoal_attend_with_sinks(queries, keys, values, mask, sinks, scale, result)
    })
}

/// The tensor, to whose gradient a backward pass adds `more`, of its shape and dtype.
pub(crate) fn add_gradient(input: &Tensor, more: &Tensor) -> Result<Tensor> {
    // SAFETY: all pointers are of live tensors or of the result.
    new_tensor(|result| unsafe { shoal_add_gradient(pointer(input), pointer(more), result) })
}

/// The logits, of which a backward pass gives `counts` as the gradient of `biases`, both f32 of one size.
pub(crate) fn count(logits: &Tensor, biases: &Tensor, counts: &Tensor) -> Result<Tensor> {
    // SAFETY: all pointers are of live tensors or of the result.
    new_tensor(|result| unsafe {
        shoal_count(pointer(logits), pointer(biases), pointer(counts), result)
    })
}

/// The rows of `[N, ..]` in the order of a permutation, i64 `[N]`, whose inverse orders their gradients.
pub(crate) fn permute(rows: &Tensor, [order, inverse]: [&Tensor; 2]) -> Result<Tensor> {
    // SAFETY: all pointers are of live tensors or of the result.
    new_tensor(|result| unsafe {
        shoal_permute(pointer(rows), pointer(order), pointer(inverse), result)
    })
}

/// Gives a tensor, and all views of it, other memory on its device. Its owner keeps it at least until the
/// tensor gets another; with null, the tensor has none and must not be read.
pub(crate) fn set_memory(tensor: &mut Tensor, address: *mut c_void, bytes: usize) -> Result<()> {
    // SAFETY: the pointer is of a live tensor, and libtorch neither frees nor reads the memory here.
    check(unsafe { shoal_set_memory(pointer(tensor), address, bytes) })
}
