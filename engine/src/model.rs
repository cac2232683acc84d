//! The layers of a Llama-shaped decoder, as functions over weights.
//!
//! The arithmetic is that of `transformers`' `LlamaForCausalLM`, whose bf16 rounds more often.
//! Shapes: B samples of T tokens, H is the width of the residual stream, D the width of a head.

use shoal_protocol::manifest::{Dtype, Model};
use tch::{Device, Kind, Reduction, Tensor};

use crate::error::Result;
use crate::shim;
use crate::tensor::kind;

/// Weights of one decoder layer. Matrices are `[outputs, inputs]`; those with the same input are
/// adjacent in the flat vector and are used as one.
#[derive(Debug)]
pub(crate) struct Layer {
    /// `input_layernorm`.
    pub(crate) attention_norm: Tensor,
    /// `q_proj`, `k_proj` and `v_proj`.
    pub(crate) query_key_value: Tensor,
    /// `o_proj`.
    pub(crate) attention_output: Tensor,
    /// `post_attention_layernorm`.
    pub(crate) feed_forward_norm: Tensor,
    /// `gate_proj` and `up_proj`.
    pub(crate) gate_up: Tensor,
    /// `down_proj`.
    pub(crate) down: Tensor,
}

/// Constants shared by all layers.
#[derive(Debug)]
pub(crate) struct Shape {
    heads: i64,
    key_value_heads: i64,
    head_size: i64,
    /// Added to the mean square before its root, in every norm.
    pub(crate) epsilon: f64,
    /// Cosines and sines of each position's angles, f32 `[T, D / 2]`.
    cosine: Tensor,
    sine: Tensor,
}

impl Shape {
    /// For samples of at most `model.context` tokens.
    pub(crate) fn new(model: &Model, device: Device) -> Result<Self> {
        let head_size = i64::from(model.hidden / model.heads);
        let options = (Kind::Float, device);
        // Rotary embedding (Su et al., arXiv 2104.09864): a wavelength per pair of channels.
        let exponents = Tensor::f_arange_start_step(0, head_size, 2, options)?
            .f_div_scalar(head_size as f64)?;
        let frequencies =
            Tensor::f_pow_scalar(model.rope_theta, &exponents)?.f_reciprocal()?.f_unsqueeze(0)?;
        let positions = Tensor::f_arange(i64::from(model.context), options)?.f_unsqueeze(1)?;
        let angles = positions.f_mul(&frequencies)?;
        Ok(Self {
            heads: i64::from(model.heads),
            key_value_heads: i64::from(model.key_value_heads),
            head_size,
            epsilon: model.norm_epsilon,
            cosine: angles.f_cos()?,
            sine: angles.f_sin()?,
        })
    }
}

/// Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467), in f32.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    if x.device() == Device::Cpu {
        return shim::rms_norm(x, weight, epsilon);
    }
    let wide = x.f_to_kind(Kind::Float)?;
    let mean_square = wide.f_square()?.f_mean_dim(Some(&[-1i64][..]), true, Kind::Float)?;
    let scale = mean_square.f_add_scalar(epsilon)?.f_rsqrt()?;
    Ok(wide.f_mul(&scale)?.f_mul(weight)?.f_to_kind(x.kind())?)
}

/// Splits `[B, T, (heads + 2 · key_value_heads) · D]` into queries, keys and values `[B, T, heads,
/// D]`, and rotates each pair of channels `(c, c + D / 2)` of queries and keys by its position's
/// angle.
fn rotate(mixed: &Tensor, shape: &Shape) -> Result<[Tensor; 3]> {
    let (samples, tokens, _) = mixed.size3()?;
    let cosine = shape.cosine.f_narrow(0, 0, tokens)?;
    let sine = shape.sine.f_narrow(0, 0, tokens)?;
    if mixed.device() == Device::Cpu {
        return shim::rotate(mixed, [&cosine, &sine], shape.heads, shape.key_value_heads);
    }
    let turned = shape.heads + shape.key_value_heads;
    let heads = turned + shape.key_value_heads;
    let mixed = mixed.f_view([samples, tokens, heads, shape.head_size])?;
    let (cosine, sine) = (cosine.f_unsqueeze(1)?, sine.f_unsqueeze(1)?);
    let half = shape.head_size / 2;
    let straight = mixed.f_narrow(2, 0, turned)?;
    let low = straight.f_narrow(-1, 0, half)?;
    let high = straight.f_narrow(-1, half, half)?;
    let new_low = low.f_mul(&cosine)?.f_sub(&high.f_mul(&sine)?)?;
    let new_high = high.f_mul(&cosine)?.f_add(&low.f_mul(&sine)?)?;
    let rotated = Tensor::f_cat(&[new_low, new_high], -1)?.f_to_kind(mixed.kind())?;
    Ok([
        rotated.f_narrow(2, 0, shape.heads)?,
        rotated.f_narrow(2, shape.heads, shape.key_value_heads)?,
        mixed.f_narrow(2, turned, shape.key_value_heads)?,
    ])
}

/// Causal self-attention with grouped queries (Ainslie et al., arXiv 2305.13245) of `[B, T, H]`.
fn attention(x: &Tensor, layer: &Layer, shape: &Shape) -> Result<Tensor> {
    let mixed = x.f_linear(&layer.query_key_value, None::<Tensor>)?;
    let [queries, keys, values] = rotate(&mixed, shape)?;
    let grouped = shape.heads != shape.key_value_heads;
    let mixed = Tensor::f_scaled_dot_product_attention(
        &queries.f_transpose(1, 2)?,
        &keys.f_transpose(1, 2)?,
        &values.f_transpose(1, 2)?,
        None::<Tensor>,
        0.0,
        true,
        None,
        grouped,
    )?;
    let joined = mixed.f_transpose(1, 2)?.f_reshape(x.size())?;
    Ok(joined.f_linear(&layer.attention_output, None::<Tensor>)?)
}

/// SwiGLU (Shazeer, arXiv 2002.05202).
fn feed_forward(x: &Tensor, layer: &Layer) -> Result<Tensor> {
    let both = x.f_linear(&layer.gate_up, None::<Tensor>)?;
    let inner = if both.device() == Device::Cpu {
        shim::swiglu(&both)?
    } else {
        let width = both.size3()?.2 / 2;
        let gate = both.f_narrow(-1, 0, width)?.f_to_kind(Kind::Float)?.f_silu()?;
        gate.f_mul(&both.f_narrow(-1, width, width)?)?.f_to_kind(both.kind())?
    };
    Ok(inner.f_linear(&layer.down, None::<Tensor>)?)
}

/// One decoder layer, `[B, T, H]` to `[B, T, H]`.
pub(crate) fn decoder_layer(x: &Tensor, layer: &Layer, shape: &Shape) -> Result<Tensor> {
    let normal = rms_norm(x, &layer.attention_norm, shape.epsilon)?;
    let x = x.f_add(&attention(&normal, layer, shape)?)?;
    let normal = rms_norm(&x, &layer.feed_forward_norm, shape.epsilon)?;
    Ok(x.f_add(&feed_forward(&normal, layer)?)?)
}

/// Rows of the embedding, rounded to the dtype of the layers.
pub(crate) fn embed(tokens: &Tensor, embedding: &Tensor, dtype: Dtype) -> Result<Tensor> {
    Ok(Tensor::f_embedding(embedding, tokens, -1, false, false)?.f_to_kind(kind(dtype))?)
}

/// The last norm and the head: logits `[B, T, vocabulary]`.
pub(crate) fn logits(x: &Tensor, norm: &Tensor, head: &Tensor, shape: &Shape) -> Result<Tensor> {
    Ok(rms_norm(x, norm, shape.epsilon)?.f_linear(head, None::<Tensor>)?)
}

/// Mean cross-entropy over all tokens, in nats and f32. `labels` is `[B · T]`.
pub(crate) fn loss(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    let vocabulary = logits.size3()?.2;
    Ok(logits.f_view([-1, vocabulary])?.f_to_kind(Kind::Float)?.f_cross_entropy_loss(
        labels,
        None::<Tensor>,
        Reduction::Mean,
        -100,
        0.0,
    )?)
}
