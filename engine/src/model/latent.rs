//! Multi-head latent attention (DeepSeek-AI, arXiv 2405.04434): queries, keys and values follow from a few numbers of a token.
//!
//! Attention gets them as of any model: heads of one width, whose first channels are rotated in pairs that lie half of these
//! apart. So the rotated channels of a head go before the others, those that are rotated together are moved apart, in queries
//! and keys alike, and values are filled up with zeros.

use shoal_protocol::manifest::LatentAttention;
use tch::Tensor;

use crate::error::Result;
use crate::model::layer::{Latent, Linear, Shape};
use crate::model::norm::rms_norm;

/// What is added to the mean square in the norms of latents, in every model.
const EPSILON: f64 = 1e-6;

impl Latent {
    /// Queries, keys and values, `[B, T, 3 · heads · D]`, of the layer's first product.
    pub(crate) fn queries_keys_values(&self, mixed: &Tensor, shape: &Shape) -> Result<Tensor> {
        let of = constants(shape);
        let rotated = i64::from(of.rotated);
        let numbers = i64::from(of.keys_values);
        let width = mixed.size3()?.2 - numbers - rotated;
        let behind = |(norm, matrix): &(Tensor, Linear), numbers: &Tensor| {
            matrix.apply(&rms_norm(&numbers.f_contiguous()?, norm, EPSILON, 0.0)?)
        };
        let first = mixed.f_narrow(2, 0, width)?;
        let queries = match &self.queries {
            Some(queries) => behind(queries, &first)?,
            None => first,
        };
        let both = behind(&self.keys_values, &mixed.f_narrow(2, width, numbers)?)?;
        let shared = mixed.f_narrow(2, width + numbers, rotated)?;

        let (heads, size) = (shape.heads, shape.head_size);
        let plain = size - rotated;
        let queries = by_head(&queries, heads)?;
        let both = by_head(&both, heads)?;
        let of_query = apart(&queries.f_narrow(3, plain, rotated)?, of)?;
        let of_key = apart(&by_head(&shared, 1)?, of)?;
        let (samples, tokens, ..) = queries.size4()?;
        let of_key = of_key.f_expand([samples, tokens, heads, rotated], true)?;
        let value_size = i64::from(of.value_size);
        let values = both.f_narrow(3, plain, value_size)?;
        let values = values.f_constant_pad_nd([0, size - value_size])?;
        let parts = [of_query, queries.f_narrow(3, 0, plain)?, of_key, both.f_narrow(3, 0, plain)?];
        let [of_query, rest_of_query, of_key, rest_of_key] = parts;
        let queries = Tensor::f_cat(&[of_query, rest_of_query], 3)?;
        let keys = Tensor::f_cat(&[of_key, rest_of_key], 3)?;
        let all = [queries, keys, values].map(|part| part.f_flatten(2, 3));
        let [queries, keys, values] = all;
        Ok(Tensor::f_cat(&[queries?, keys?, values?], 2)?)
    }
}

/// What heads have read, `[B, T, heads · D]`, without the zeros of their values.
pub(crate) fn values_of(read: &Tensor, shape: &Shape) -> Result<Tensor> {
    let value_size = i64::from(constants(shape).value_size);
    Ok(by_head(read, shape.heads)?.f_narrow(3, 0, value_size)?.f_flatten(2, 3)?)
}

fn constants(shape: &Shape) -> &LatentAttention {
    shape.latent.as_ref().expect("a layer with latent attention is of such a model")
}

/// `[B, T, heads · n]` as `[B, T, heads, n]`.
fn by_head(x: &Tensor, heads: i64) -> Result<Tensor> {
    let (samples, tokens, width) = x.size3()?;
    Ok(x.f_reshape([samples, tokens, heads, width / heads])?)
}

/// Rotated channels `[.., R]` in the order in which those that are rotated together are R / 2 apart.
fn apart(rotated: &Tensor, of: &LatentAttention) -> Result<Tensor> {
    if !of.interleaved {
        return Ok(rotated.shallow_clone());
    }
    let pairs = rotated.f_unflatten(-1, [i64::from(of.rotated) / 2, 2])?;
    Ok(pairs.f_transpose(-1, -2)?.f_flatten(-2, -1)?)
}
