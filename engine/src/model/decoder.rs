//! The layers of a decoder, as functions over weights: one block, whose switches
//! (`shoal_protocol::manifest::Block`) cover the families of open models.
//!
//! The arithmetic is that of `transformers`, whose bf16 rounds more often. Shapes: B samples of T
//! tokens, H is the width of the residual stream, D the width of a head.

use shoal_protocol::manifest::{Activation, Dtype, Placement};
use tch::{Kind, Tensor};

use crate::device::cuda::Kernels;
use crate::device::shim;
use crate::device::tensor::kind;
use crate::error::Result;
use crate::model::attention::{attend, normalise_heads};
use crate::model::cache::LayerCache;
use crate::model::latent;
use crate::model::layer::{FeedForward, Layer, Matrices, Shape, StreamNorm};
use crate::model::norm::normalise;
use crate::model::token_groups::TokenGroups;
use crate::model::visibility::Visibility;

/// What `down` multiplies in the feed-forward block: `f(gate(x)) · up(x)` (Shazeer, arXiv 2002.05202), or
/// `f(up(x))`, of `[.., gates and ups]`.
pub(crate) fn inner(both: &Tensor, shape: &Shape) -> Result<Tensor> {
    if shape.ungated {
        return activate(both, shape.activation);
    }
    if shape.activation == Activation::ClampedSwiglu {
        return shim::clamped_swiglu(both);
    }
    if shape.activation == Activation::Silu && Kernels::are_on(both.device()) {
        return shim::swiglu(both);
    }
    let width = both.size().last().map_or(0, |width| width / 2);
    let gate = both.f_narrow(-1, 0, width)?.f_to_kind(Kind::Float)?;
    let gate = activate(&gate, shape.activation)?;
    Ok(gate.f_mul(&both.f_narrow(-1, width, width)?)?.f_to_kind(both.kind())?)
}

/// The feed-forward block.
fn feed_forward(
    x: &Tensor,
    layer: &Layer,
    shape: &Shape,
    groups: &TokenGroups,
    counted: f64,
) -> Result<Tensor> {
    match &layer.matrices {
        Matrices::Whole(whole) => match &whole.feed_forward {
            FeedForward::Dense(dense) => dense.down.apply(&inner(&dense.gate_up.apply(x)?, shape)?),
            FeedForward::Experts(experts) => experts.apply(x, shape, counted),
        },
        Matrices::Sliced(sliced) => sliced.feed_forward(x, shape.slice(), groups, counted),
    }
}

/// Causal self-attention; see [`attend`].
fn attention(
    x: &Tensor,
    layer: &Layer,
    shape: &Shape,
    groups: &TokenGroups,
    visibility: &Visibility,
    cache: Option<&mut LayerCache>,
) -> Result<Tensor> {
    let whole = match &layer.matrices {
        Matrices::Whole(whole) => whole,
        Matrices::Sliced(sliced) => {
            assert!(cache.is_none(), "text is generated with whole matrices");
            return sliced.attention(x, layer, shape.slice(), groups, visibility);
        }
    };
    let mut mixed = whole.query_key_value.apply(x)?;
    if let Some(norms) = &layer.query_key_norms {
        mixed = normalise_heads(&mixed, norms, shape)?;
    }
    if let Some(latent) = &whole.latent {
        mixed = latent.queries_keys_values(&mixed, shape)?;
    }
    let of_layer = (layer.attention, layer.sinks.as_ref());
    let mut read = attend(&mixed, of_layer, shape, visibility, cache)?;
    if whole.latent.is_some() {
        read = latent::values_of(&read, shape)?;
    }
    whole.attention_output.apply(&read)
}

fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    Ok(match activation {
        Activation::Silu => x.f_silu()?,
        Activation::Gelu => x.f_gelu("none")?,
        Activation::GeluTanh => x.f_gelu("tanh")?,
        Activation::ClampedSwiglu => unreachable!("it takes gates and values together"),
    })
}

/// Normalises if there is a norm.
fn through(
    x: &Tensor,
    norm: Option<&StreamNorm>,
    shape: &Shape,
    groups: &TokenGroups,
) -> Result<Tensor> {
    let Some(StreamNorm(weights)) = norm else { return Ok(x.shallow_clone()) };
    groups.by_group(x, |group, rows| normalise(rows, &weights[group], shape))
}

/// One decoder layer: the residual stream of the device's tokens before and after it; see [`attend`] for the cache.
pub(crate) fn decoder_layer(
    x: &Tensor,
    layer: &Layer,
    shape: &Shape,
    groups: &TokenGroups,
    visibility: &Visibility,
    cache: Option<&mut LayerCache>,
) -> Result<Tensor> {
    let through = |x: &Tensor, norm: &Option<StreamNorm>| through(x, norm.as_ref(), shape, groups);
    let normal = through(x, &layer.attention_input_norm)?;
    let attended = attention(&normal, layer, shape, groups, visibility, cache)?;
    let attended = through(&attended, &layer.attention_output_norm)?;
    let middle = x.f_add(&attended)?;
    let input = if shape.placement == Placement::Parallel { x } else { &middle };
    let normal = through(input, &layer.feed_forward_input_norm)?;
    let fed = feed_forward(&normal, layer, shape, groups, visibility.counted)?;
    let fed = through(&fed, &layer.feed_forward_output_norm)?;
    Ok(middle.f_add(&fed)?)
}

/// The residual stream's first value, rounded to the dtype of the layers: rows of the embedding
/// `[B, T, H]`, f32, with their scale and the trained positions of their tokens, `[T, H]` or `[B, T, H]`.
pub(crate) fn embed(
    rows: &Tensor,
    positions: Option<&Tensor>,
    shape: &Shape,
    dtype: Dtype,
) -> Result<Tensor> {
    let mut x = rows.shallow_clone();
    if let Some(scale) = shape.embedding_scale {
        x = x.f_mul_scalar(scale)?;
    }
    if let Some(positions) = positions {
        x = x.f_add(positions)?;
    }
    Ok(x.f_to_kind(kind(dtype))?)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// Both halves of numbers within the limits, at them and beyond; and the same by autograd in f64.
    #[test]
    fn a_clamped_gate_has_the_gradient_of_its_formula() {
        tch::manual_seed(6);
        for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 2e-2)] {
            let both = (Tensor::randn([40, 32], (Kind::Float, Device::Cpu)) * 6.0).to_kind(kind);
            let gradient = Tensor::randn([40, 16], (Kind::Float, Device::Cpu)).to_kind(kind);
            let passes = |both: &Tensor, apply: &dyn Fn(&Tensor) -> Tensor| {
                let both = both.detach().set_requires_grad(true);
                let output = apply(&both);
                let gradient = gradient.to_kind(output.kind());
                let found = shim::gradients(&output, Some(&gradient), &[&both]);
                [output.detach(), found.expect("a graph").remove(0)]
            };
            let found = passes(&both, &|both| shim::clamped_swiglu(both).expect("small"));
            let expected = passes(&both.to_kind(Kind::Double), &|both| {
                let gate = both.narrow(1, 0, 16).clamp_max(7.0);
                let up = both.narrow(1, 16, 16).clamp(-7.0, 7.0);
                (up + 1.0) * &gate * (&gate * 1.702).sigmoid()
            });
            for (one, other) in found.iter().zip(expected) {
                let off = (one.to_kind(Kind::Double) - &other).norm() / other.norm();
                assert!(off.double_value(&[]) < tolerance, "{kind:?}: {off:?}");
            }
        }
    }
}
