//! Normalisations over the last dimension.

use shoal_protocol::manifest::Norm;
use tch::{Kind, Tensor};

use crate::device::cuda::Kernels;
use crate::device::shim;
use crate::error::Result;
use crate::model::layer::{NormWeights, Shape};

/// Normalises `[.., H]`.
pub(crate) fn normalise(x: &Tensor, weights: &NormWeights, shape: &Shape) -> Result<Tensor> {
    match shape.norm {
        Norm::Rms | Norm::RmsPlusOne => {
            rms_norm(x, &weights.weight, shape.epsilon, shape.norm_offset())
        }
        Norm::Layer => Ok(x.f_layer_norm(
            weights.weight.size(),
            Some(&weights.weight),
            weights.bias.as_ref(),
            shape.epsilon,
            false,
        )?),
    }
}

/// Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467), in f32: `x / rms(x) ·
/// (weight + offset)`.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64, offset: f64) -> Result<Tensor> {
    if Kernels::are_on(x.device()) {
        return shim::rms_norm(x, weight, epsilon, offset);
    }
    // Both uses of it are one node of the graph: their gradients are added to each other before another's, however many
    // groups of tokens a device has.
    let wide = x.f_view_as(x)?.f_to_kind(Kind::Float)?;
    let mean_square = wide.f_square()?.f_mean_dim(Some(&[-1i64][..]), true, Kind::Float)?;
    let scale = mean_square.f_add_scalar(epsilon)?.f_rsqrt()?;
    let weight = weight.f_to_kind(Kind::Float)?.f_add_scalar(offset)?;
    Ok(wide.f_mul(&scale)?.f_mul(&weight)?.f_to_kind(x.kind())?)
}
