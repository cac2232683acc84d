//! Causal self-attention, within documents and windows.

use shoal_protocol::manifest::LayerAttention;
use tch::{Device, Kind, Tensor};

use crate::device::cuda::Kernels;
use crate::device::shim;
use crate::error::Result;
use crate::model::cache::LayerCache;
use crate::model::layer::Shape;
use crate::model::norm::rms_norm;
use crate::model::rotary::Angles;
use crate::model::visibility::{Keys, Ranges, Visibility};

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
/// position's angle, the first token's by that of `past`.
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
/// With a cache, the tokens follow those whose keys and values it holds, and it gets theirs. `sinks`, `[heads]`, take part in
/// the softmax over keys.
pub(crate) fn attend(
    mixed: &Tensor,
    (attention, sinks): (LayerAttention, Option<&Tensor>),
    shape: &Shape,
    visibility: &Visibility,
    cache: Option<&mut LayerCache>,
) -> Result<Tensor> {
    let (samples, tokens, width) = mixed.size3()?;
    let past = visibility.past;
    let [queries, keys, values] = match visibility.angles(attention) {
        None => rotate(mixed, shape.angles(attention), past, shape)?,
        Some(angles) => {
            let parts = rotate(&mixed.f_view([1, -1, width])?, angles, 0, shape)?;
            let of_samples = |part: Tensor| -> Result<Tensor> {
                Ok(part.f_view([samples, tokens, -1, shape.head_size])?)
            };
            let [queries, keys, values] = parts.map(of_samples);
            [queries?, keys?, values?]
        }
    };
    let [keys, values] = match cache {
        Some(cache) => cache.extend([&keys, &values], attention.window)?,
        None => [keys, values],
    };
    let mask = match visibility.keys(attention) {
        Keys::OfDocument => {
            let mixed = within_documents(
                [&queries, &keys, &values],
                sinks,
                visibility.ranges(),
                (attention.window, shape.attention_scale),
            )?;
            return Ok(mixed.f_reshape([samples, tokens, -1])?);
        }
        Keys::Masked(mask) => Some(mask),
        Keys::Earlier => None,
    };
    if let Some(sinks) = sinks {
        let [keys, values] = [&keys, &values].map(|part| for_each_head(part, shape.heads));
        let parts = [&queries, &keys?, &values?].map(|part| part.f_transpose(1, 2));
        let [queries, keys, values] = parts;
        let parts = [&queries?, &keys?, &values?];
        let mixed = shim::attend_with_sinks(parts, mask, sinks, shape.attention_scale)?;
        return Ok(mixed.f_transpose(1, 2)?.f_reshape([samples, tokens, -1])?);
    }
    // The heads of a group read the same keys, so those of one token can take the place of tokens.
    // Then no key is copied for each head.
    let folds = past > 0 && tokens == 1;
    let queries = match folds {
        true => queries.f_view([samples, shape.key_value_heads, -1, shape.head_size])?,
        false => queries.f_transpose(1, 2)?,
    };
    let grouped = !folds && shape.heads != shape.key_value_heads;
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
        mask.is_none() && past == 0,
        shape.attention_scale,
        grouped && !repeats,
    )?;
    let mixed = if folds { mixed } else { mixed.f_transpose(1, 2)? };
    Ok(mixed.f_reshape([samples, tokens, -1])?)
}

/// Attention of `[B, T, heads, D]` within documents and perhaps windows: `[B · T, heads, D]`.
fn within_documents(
    parts: [&Tensor; 3],
    sinks: Option<&Tensor>,
    Ranges { lengths, starts }: &Ranges,
    (window, scale): (Option<u32>, Option<f64>),
) -> Result<Tensor> {
    let [queries, keys, values] = parts.map(|part| part.f_flatten(0, 1));
    let parts = [&queries?, &keys?, &values?];
    shim::attend_documents(parts, sinks, lengths, starts.as_ref(), window, scale)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::tensor::bytes_of;

    /// Lengths of documents: shorter and longer than a window's pieces, and than the kernel's.
    const LENGTHS: [i64; 6] = [3, 700, 1, 40, 301, 9];

    fn random(tokens: i64, heads: i64, size: i64, kind: Kind) -> Tensor {
        Tensor::randn([tokens, heads, size], (Kind::Float, Device::Cpu)).to_kind(kind)
    }

    /// Queries, keys, values, and the gradient of what they give.
    fn inputs([heads, groups, size]: [i64; 3], kind: Kind) -> [Tensor; 4] {
        let tokens = LENGTHS.iter().sum();
        [heads, groups, groups, heads].map(|heads| random(tokens, heads, size, kind))
    }

    /// The output, and the gradients of queries, keys and values.
    fn passes(
        [queries, keys, values, gradient]: &[Tensor; 4],
        attend: impl Fn([&Tensor; 3]) -> Tensor,
    ) -> Vec<Tensor> {
        let leaves = [queries, keys, values].map(|part| part.detach().set_requires_grad(true));
        let output = attend(leaves.each_ref());
        let found = shim::gradients(&output, Some(gradient), &leaves.each_ref());
        [output.detach()].into_iter().chain(found.expect("a graph")).collect()
    }

    /// Attention in documents with these sinks: the output, and the gradients of queries, keys, values and sinks.
    fn with_sinks(inputs: &[Tensor; 4], sinks: &Tensor, window: Option<u32>) -> Vec<Tensor> {
        let [queries, keys, values, gradient] = inputs;
        let leaves = [queries, keys, values, sinks];
        let leaves = leaves.map(|part| part.detach().set_requires_grad(true));
        let [queries, keys, values, sinks] = leaves.each_ref();
        let parts = [queries, keys, values];
        let output = shim::attend_documents(parts, Some(sinks), &LENGTHS, None, window, None);
        let output = output.expect("documents");
        let found = shim::gradients(&output, Some(gradient), &leaves.each_ref());
        [output.detach()].into_iter().chain(found.expect("a graph")).collect()
    }

    fn in_documents(inputs: &[Tensor; 4], lengths: &[i64], window: Option<u32>) -> Vec<Tensor> {
        let attend = |parts: [&Tensor; 3]| {
            shim::attend_documents(parts, None, lengths, None, window, None).expect("documents")
        };
        passes(inputs, attend)
    }

    /// The tokens that each token reads.
    fn visible(window: Option<u32>) -> Tensor {
        let numbers: Vec<i64> =
            (0..).zip(LENGTHS).flat_map(|(n, length)| vec![n; length as usize]).collect();
        let numbers = Tensor::from_slice(&numbers);
        let places = Tensor::arange(numbers.numel() as i64, (Kind::Int64, Device::Cpu));
        let distance = places.unsqueeze(1) - &places;
        let window = window.map_or(i64::MAX, i64::from);
        let near = distance.ge(0).logical_and(&distance.lt(window));
        near.logical_and(&numbers.unsqueeze(1).eq_tensor(&numbers))
    }

    /// The same, by the mask of all pairs, in f64.
    fn masked(inputs: &[Tensor; 4], window: Option<u32>) -> Vec<Tensor> {
        let mask = visible(window);
        let wide = inputs.each_ref().map(|part| part.to_kind(Kind::Double));
        passes(&wide, |[queries, keys, values]| {
            let heads = queries.size()[1];
            let each =
                |part: &Tensor| part.repeat_interleave_self_int(heads / part.size()[1], 1, None);
            let of = |part: &Tensor| part.transpose(0, 1).unsqueeze(0);
            let [queries, keys, values] = [of(queries), of(&each(keys)), of(&each(values))];
            let scale = 1.0 / (queries.size()[3] as f64).sqrt();
            let products = queries.matmul(&keys.transpose(2, 3)) * scale;
            let weights =
                products.masked_fill(&mask.logical_not(), f64::NEG_INFINITY).softmax(-1, None);
            weights.matmul(&values).squeeze_dim(0).transpose(0, 1)
        })
    }

    #[test]
    fn documents_have_the_attention_that_a_mask_gives() {
        tch::manual_seed(1);
        for (shape, kind, tolerance) in [
            ([4, 2, 16], Kind::Float, 1e-4),
            ([3, 3, 6], Kind::Float, 1e-4),
            ([4, 1, 24], Kind::BFloat16, 2e-2),
        ] {
            let inputs = inputs(shape, kind);
            for window in [None, Some(1), Some(7), Some(290), Some(5000)] {
                let found = in_documents(&inputs, &LENGTHS, window);
                for (which, (one, other)) in found.iter().zip(masked(&inputs, window)).enumerate() {
                    let off = (one.to_kind(Kind::Double) - &other).norm() / (1.0 + other.norm());
                    let off = f64::try_from(off).expect("a number");
                    assert!(off < tolerance, "{shape:?} {kind:?} {window:?}, {which}: {off}");
                }
            }
        }
    }

    /// With the sinks as one more key of a value of zeros, in f64.
    fn masked_with_sinks(inputs: &[Tensor; 4], sinks: &Tensor, window: Option<u32>) -> Vec<Tensor> {
        let leaves = [&inputs[0], &inputs[1], &inputs[2], sinks]
            .map(|part| part.to_kind(Kind::Double).detach().set_requires_grad(true));
        let [queries, keys, values, sinks] = leaves.each_ref();
        let heads = queries.size()[1];
        let each = |part: &Tensor| part.repeat_interleave_self_int(heads / part.size()[1], 1, None);
        let of = |part: &Tensor| part.transpose(0, 1);
        let (queries, keys, values) = (of(queries), of(&each(keys)), of(&each(values)));
        let scale = 1.0 / (queries.size()[2] as f64).sqrt();
        let products = queries.matmul(&keys.transpose(1, 2)) * scale;
        let products = products.masked_fill(&visible(window).logical_not(), f64::NEG_INFINITY);
        let tokens = products.size()[1];
        let all = Tensor::cat(&[products, sinks.view([-1, 1, 1]).expand([-1, tokens, 1], true)], 2);
        let output = of(&all.softmax(-1, None).narrow(2, 0, tokens).matmul(&values));
        let gradient = inputs[3].to_kind(Kind::Double);
        let found = shim::gradients(&output, Some(&gradient), &leaves.each_ref());
        [output.detach()].into_iter().chain(found.expect("a graph")).collect()
    }

    #[test]
    fn sinks_take_their_share_of_the_softmax() {
        tch::manual_seed(4);
        for (shape, kind, tolerance) in [
            ([4, 2, 16], Kind::Float, 1e-4),
            ([3, 3, 6], Kind::Float, 1e-4),
            ([4, 1, 24], Kind::BFloat16, 2e-2),
        ] {
            let inputs = inputs(shape, kind);
            let sinks = Tensor::randn([shape[0]], (Kind::Float, Device::Cpu)).to_kind(kind) * 2.0;
            for window in [None, Some(1), Some(7), Some(290), Some(5000)] {
                let found = with_sinks(&inputs, &sinks, window);
                let expected = masked_with_sinks(&inputs, &sinks, window);
                assert_eq!(found.len(), 5);
                for (which, (one, other)) in found.iter().zip(expected).enumerate() {
                    let off = (one.to_kind(Kind::Double) - &other).norm() / (1.0 + other.norm());
                    let off = f64::try_from(off).expect("a number");
                    assert!(off < tolerance, "{shape:?} {kind:?} {window:?}, {which}: {off}");
                }
            }
        }
    }

    /// The way of generated text, whose earlier keys are in a cache.
    #[test]
    fn sinks_take_the_same_share_by_a_mask() {
        tch::manual_seed(5);
        let inputs = inputs([4, 4, 8], Kind::Float);
        let sinks = Tensor::randn([4], (Kind::Float, Device::Cpu));
        let expected = with_sinks(&inputs, &sinks, Some(7)).swap_remove(0);
        let [queries, keys, values, _] = inputs.map(|part| part.unsqueeze(0).transpose(1, 2));
        let mask = visible(Some(7)).unsqueeze(0).unsqueeze(0);
        let parts = [&queries, &keys, &values];
        let found = shim::attend_with_sinks(parts, Some(&mask), &sinks, None).expect("small");
        let off = (found.squeeze_dim(0).transpose(0, 1) - expected).abs().max();
        assert!(off.double_value(&[]) < 1e-5, "{off:?}");
    }

    #[test]
    fn a_document_has_the_bits_that_it_has_alone() {
        tch::manual_seed(2);
        for (shape, kind) in
            [([4, 2, 16], Kind::Float), ([3, 1, 6], Kind::Float), ([3, 1, 10], Kind::BFloat16)]
        {
            let inputs = inputs(shape, kind);
            for window in [None, Some(7), Some(290)] {
                let together = in_documents(&inputs, &LENGTHS, window);
                let mut start = 0;
                for length in LENGTHS {
                    let own = |part: &Tensor| part.narrow(0, start, length).copy();
                    let alone = in_documents(&inputs.each_ref().map(own), &[length], window);
                    for (which, (one, other)) in alone.iter().zip(&together).enumerate() {
                        let equal = bytes_of(&one.contiguous()) == bytes_of(&own(other));
                        assert!(equal, "{shape:?} {kind:?} {window:?}, {length} tokens, {which}");
                    }
                    start += length;
                }
            }
        }
    }

    /// A sample of one document takes libtorch's own path, all samples at once.
    #[test]
    fn a_document_among_others_has_the_bits_of_a_sample_of_its_own() {
        tch::manual_seed(3);
        for kind in [Kind::Float, Kind::BFloat16] {
            let inputs = inputs([4, 2, 16], kind);
            let together = in_documents(&inputs, &LENGTHS, None);
            let own = |part: &Tensor| part.narrow(0, 3, 700).copy();
            let alone = passes(&inputs.each_ref().map(own), |parts| {
                let [queries, keys, values] = parts.map(|part| part.unsqueeze(0).transpose(1, 2));
                let none = None::<&Tensor>;
                Tensor::scaled_dot_product_attention(
                    &queries, &keys, &values, none, 0.0, true, None, true,
                )
                .transpose(1, 2)
                .squeeze_dim(0)
            });
            for (one, other) in alone.iter().zip(&together) {
                assert!(bytes_of(&one.contiguous()) == bytes_of(&own(other)), "{kind:?}");
            }
        }
    }

    #[test]
    fn wrong_lengths_are_refused() {
        let inputs = inputs([2, 2, 8], Kind::Float);
        let [queries, keys, values, _] = &inputs;
        for lengths in [&LENGTHS[1..], &[1054, 0], &[-1, 1055]] {
            let found =
                shim::attend_documents([queries, keys, values], None, lengths, None, None, None);
            let error = found.expect_err("not all tokens").to_string();
            assert!(error.contains("document"), "{error}");
        }
    }
}
