//! Causal self-attention, within documents and windows.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use shoal_protocol::manifest::LayerAttention;
use tch::{Device, Kind, Tensor};

use crate::cache::LayerCache;
use crate::cuda::Kernels;
use crate::error::Result;
use crate::layer::Shape;
use crate::norm::rms_norm;
use crate::rotary::Angles;
use crate::shim;

/// The tokens that each token of a microbatch may read, for every window that layers have.
#[derive(Debug)]
pub(crate) struct Masks {
    /// bool, `[B or 1, 1, T, past + T]`, by window; none where a token reads all keys that attention
    /// gets, up to its own.
    by_window: BTreeMap<Option<u32>, Option<Tensor>>,
    /// Tokens before these whose keys are in a cache.
    past: i64,
}

impl Masks {
    /// Masks for these layers. `documents` numbers the document of each token, i64 `[B, T]`; without
    /// it each sample is one document. `past` tokens before them are in a cache.
    pub(crate) fn new(
        layers: impl Iterator<Item = LayerAttention>,
        documents: Option<&Tensor>,
        [past, tokens]: [i64; 2],
        device: Device,
    ) -> Result<Self> {
        let mut by_window = BTreeMap::new();
        for layer in layers {
            if let Entry::Vacant(place) = by_window.entry(layer.window) {
                place.insert(mask(layer.window, documents, [past, tokens], device)?);
            }
        }
        Ok(Self { by_window, past })
    }

    fn of(&self, layer: LayerAttention) -> Option<&Tensor> {
        self.by_window.get(&layer.window)?.as_ref()
    }
}

fn mask(
    window: Option<u32>,
    documents: Option<&Tensor>,
    [past, tokens]: [i64; 2],
    device: Device,
) -> Result<Option<Tensor>> {
    let keys = past + tokens;
    let window = window.filter(|window| i64::from(*window) < keys);
    // A single token reads all keys that the cache gives it.
    let reads_all = tokens == 1 || past == 0 && window.is_none();
    if reads_all && documents.is_none() {
        return Ok(None);
    }
    let places = Tensor::f_arange(keys, (Kind::Int64, device))?;
    let distance = places.f_narrow(0, past, tokens)?.f_unsqueeze(1)?.f_sub(&places)?;
    let mut allowed = distance.f_ge(0)?;
    if let Some(window) = window {
        allowed = allowed.f_logical_and(&distance.f_lt(i64::from(window))?)?;
    }
    let mut allowed = allowed.f_view([1, 1, tokens, keys])?;
    if let Some(documents) = documents {
        let same = documents.f_unsqueeze(2)?.f_eq_tensor(&documents.f_unsqueeze(1)?)?;
        allowed = allowed.f_logical_and(&same.f_unsqueeze(1)?)?;
    }
    Ok(Some(allowed))
}

/// Normalises the queries and keys in `[B, T, (heads + 2 · key_value_heads) · D]`: each head by
/// itself or all heads together, by the width of the norms' weights.
pub(crate) fn normalise_heads(
    mixed: &Tensor,
    [queries, keys]: &[Tensor; 2],
    shape: &Shape,
) -> Result<Tensor> {
    let (samples, tokens, _) = mixed.size3()?;
    let (query_width, key_width) =
        (shape.heads * shape.head_size, shape.key_value_heads * shape.head_size);
    let normal = |start, width, weight: &Tensor| -> Result<Tensor> {
        let part = mixed.f_narrow(2, start, width)?;
        let part = part.f_reshape([samples, tokens, -1, weight.size1()?])?;
        Ok(rms_norm(&part, weight, shape.epsilon, shape.norm_offset())?
            .f_view([samples, tokens, width])?)
    };
    let parts = [
        normal(0, query_width, queries)?,
        normal(query_width, key_width, keys)?,
        mixed.f_narrow(2, query_width + key_width, key_width)?,
    ];
    Ok(Tensor::f_cat(&parts, 2)?)
}

/// Splits `[B, T, (heads + 2 · key_value_heads) · D]` into queries, keys and values `[B, T, heads,
/// D]`, and rotates each pair of channels `(c, c + R / 2)` of the first R of queries and keys by its
/// position's angle. The first token has the position `past`.
fn rotate(mixed: &Tensor, angles: &Angles, past: i64, shape: &Shape) -> Result<[Tensor; 3]> {
    let (samples, tokens, _) = mixed.size3()?;
    let cosine = angles.cosine.f_narrow(0, past, tokens)?;
    let sine = angles.sine.f_narrow(0, past, tokens)?;
    if Kernels::are_on(mixed.device()) {
        return shim::rotate(mixed, [&cosine, &sine], shape.heads, shape.key_value_heads);
    }
    let turned = shape.heads + shape.key_value_heads;
    let heads = turned + shape.key_value_heads;
    let mixed = mixed.f_view([samples, tokens, heads, shape.head_size])?;
    let half = cosine.size2()?.1;
    let (cosine, sine) = (cosine.f_unsqueeze(1)?, sine.f_unsqueeze(1)?);
    let straight = mixed.f_narrow(2, 0, turned)?;
    let low = straight.f_narrow(-1, 0, half)?;
    let high = straight.f_narrow(-1, half, half)?;
    let new_low = low.f_mul(&cosine)?.f_sub(&high.f_mul(&sine)?)?.f_to_kind(mixed.kind())?;
    let new_high = high.f_mul(&cosine)?.f_add(&low.f_mul(&sine)?)?.f_to_kind(mixed.kind())?;
    let rest = straight.f_narrow(-1, 2 * half, shape.head_size - 2 * half)?;
    let rotated = Tensor::f_cat(&[new_low, new_high, rest], -1)?;
    Ok([
        rotated.f_narrow(2, 0, shape.heads)?,
        rotated.f_narrow(2, shape.heads, shape.key_value_heads)?,
        mixed.f_narrow(2, turned, shape.key_value_heads)?,
    ])
}

/// Causal self-attention with grouped queries (Ainslie et al., arXiv 2305.13245): what each head of a layer, or of a slice,
/// read, `[B, T, heads · D]`, from normalised queries and keys, and values in `[B, T, (heads + 2 · key_value_heads) · D]`.
/// With a cache, the tokens follow those whose keys and values it holds, and it gets theirs.
pub(crate) fn attend(
    mixed: &Tensor,
    attention: LayerAttention,
    shape: &Shape,
    masks: &Masks,
    cache: Option<&mut LayerCache>,
) -> Result<Tensor> {
    let (samples, tokens, _) = mixed.size3()?;
    let angles = shape.angles(attention);
    let [queries, keys, values] = rotate(mixed, angles, masks.past, shape)?;
    let [keys, values] = match cache {
        Some(cache) => cache.extend([&keys, &values], attention.window)?,
        None => [keys, values],
    };
    // The heads of a group read the same keys, so those of one token can take the place of tokens.
    // Then no key is copied for each head.
    let folds = masks.past > 0 && tokens == 1;
    let queries = match folds {
        true => queries.f_view([samples, shape.key_value_heads, -1, shape.head_size])?,
        false => queries.f_transpose(1, 2)?,
    };
    let grouped = !folds && shape.heads != shape.key_value_heads;
    let mask = masks.of(attention);
    let repeats = grouped && !takes_groups(&queries, mask);
    let [keys, values] = match repeats {
        true => [for_each_head(&keys, shape.heads)?, for_each_head(&values, shape.heads)?],
        false => [keys, values],
    };
    let mixed = Tensor::f_scaled_dot_product_attention(
        &queries,
        &keys.f_transpose(1, 2)?,
        &values.f_transpose(1, 2)?,
        mask,
        0.0,
        mask.is_none() && masks.past == 0,
        shape.attention_scale,
        grouped && !repeats,
    )?;
    let mixed = if folds { mixed } else { mixed.f_transpose(1, 2)? };
    Ok(mixed.f_reshape([samples, tokens, -1])?)
}

/// Whether libtorch has a kernel for keys of groups of heads that makes no matrix of all pairs of tokens. On a GPU that
/// is flash attention, which takes no mask and no f32.
fn takes_groups(queries: &Tensor, mask: Option<&Tensor>) -> bool {
    queries.device() == Device::Cpu || mask.is_none() && queries.kind() != Kind::Float
}

/// Repeats the keys or values of each group, `[B, T, key_value_heads, D]`, for its heads: `[B, T, heads, D]`.
fn for_each_head(x: &Tensor, heads: i64) -> Result<Tensor> {
    let (samples, tokens, groups, size) = x.size4()?;
    let repeated =
        x.f_unsqueeze(3)?.f_expand([samples, tokens, groups, heads / groups, size], true)?;
    Ok(repeated.f_reshape([samples, tokens, heads, size])?)
}
