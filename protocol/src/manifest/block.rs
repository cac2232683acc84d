//! The decoder block: switches that cover the families of open models.
//!
//! The default is Llama's. A base's `config.json` sets the others.

use serde::{Deserialize, Serialize};

use super::{Experts, Rotary};

/// How the decoder block differs from Llama's.
#[derive(
    Debug, Clone, Default, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(deny_unknown_fields, default)]
pub struct Block {
    /// Width of a head; `None` is `hidden / heads`.
    pub head_size: Option<u32>,
    /// The normalisation.
    pub norm: Norm,
    /// The place of the norms around attention and feed-forward.
    pub placement: Placement,
    /// The norm of queries and keys before their rotation.
    pub query_key_norm: QueryKeyNorm,
    /// The linear maps with a bias.
    pub biases: Biases,
    /// The function inside the feed-forward block.
    pub activation: Activation,
    /// Whether the feed-forward block has no gate: `down(f(up(x)))` instead of
    /// `down(f(gate(x)) · up(x))`.
    pub ungated: bool,
    /// Experts in place of the feed-forward block; `None` has a single block in every layer.
    pub experts: Option<Experts>,
    /// Queries, keys and values that follow from few numbers of a token; `None` has them from the stream.
    pub latent: Option<LatentAttention>,
    /// Whether each head has a sink: a trained number that takes part in the softmax over a token's keys, and has no value
    /// (Xiao et al., arXiv 2309.17453).
    pub sinks: bool,
    /// Factor on the products of queries and keys; `None` is `1 / √head_size`.
    pub attention_scale: Option<f64>,
    /// Factor on the embedding; `None` is 1.
    pub embedding_scale: Option<f64>,
    /// Rows of a table of trained positions that is added to the embedding; `None` has no table.
    pub learned_positions: Option<u32>,
    /// Whether the head multiplies by the embedding's matrix instead of its own.
    pub tied: bool,
    /// The rotary embeddings that layers choose from; empty is one over whole heads with
    /// `model.rope_theta`.
    pub rotary: Vec<Rotary>,
    /// What differs between layers, one entry a layer; empty is rotation by the first rotary
    /// embedding and full attention in every layer.
    pub layers: Vec<LayerAttention>,
}

/// Multi-head latent attention (DeepSeek-AI, arXiv 2405.04434). A head is `model.block.head_size` wide.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(deny_unknown_fields)]
pub struct LatentAttention {
    /// Numbers from which the queries of all heads follow; `None` has them from the stream.
    pub queries: Option<u32>,
    /// Numbers from which the keys and values of all heads follow.
    pub keys_values: u32,
    /// Channels of a head that are rotated, the last ones. All heads share those of the keys, which come from the stream.
    pub rotated: u32,
    /// Whether two neighbouring channels are rotated together, instead of two that are half of `rotated` apart.
    pub interleaved: bool,
    /// Width of a head's values.
    pub value_size: u32,
}

/// A normalisation over the last dimension.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(rename_all = "kebab-case")]
pub enum Norm {
    /// `x / rms(x) · w` (Zhang and Sennrich, arXiv 1910.07467).
    #[default]
    Rms,
    /// `x / rms(x) · (1 + w)`.
    RmsPlusOne,
    /// `(x - mean) / deviation · w + b` (Ba et al., arXiv 1607.06450).
    Layer,
}

/// The place of the norms around attention and feed-forward, each called `f` here.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// `x + f(norm(x))`.
    #[default]
    Before,
    /// `x + norm(f(x))`.
    After,
    /// `x + norm(f(norm(x)))`.
    Both,
    /// `x + attention(norm(x)) + feed_forward(norm(x))`, with a norm of its own each.
    Parallel,
}

/// The norm of queries and keys before their rotation.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(rename_all = "kebab-case")]
pub enum QueryKeyNorm {
    /// No norm.
    #[default]
    None,
    /// Over each head, with one weight for all heads.
    Head,
    /// Over all heads together.
    All,
}

/// The linear maps with a bias.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(deny_unknown_fields, default)]
pub struct Biases {
    /// Queries, keys and values.
    pub query_key_value: bool,
    /// The output of attention.
    pub attention_output: bool,
    /// All maps of the feed-forward block; with experts, those of each and the router.
    pub feed_forward: bool,
}

/// The function inside the feed-forward block.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// `x · sigmoid(x)`.
    #[default]
    Silu,
    /// `x · Φ(x)` (Hendrycks and Gimpel, arXiv 1606.08415).
    Gelu,
    /// The approximation of `x · Φ(x)` with tanh.
    GeluTanh,
    /// That of GPT-OSS: `x · sigmoid(1.702 · x)` of a gate of at most 7, times one more than what it gates, which is cut to
    /// ±7.
    ClampedSwiglu,
}

/// The attention of one layer.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(deny_unknown_fields)]
pub struct LayerAttention {
    /// Index of its rotary embedding; `None` rotates nothing.
    pub rotary: Option<u8>,
    /// A token reads itself and the `window - 1` tokens before; `None` reads all before.
    pub window: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::super::example::small;
    use super::super::{Manifest, ManifestError, Model, RotaryScaling};
    use super::*;

    fn with(change: impl FnOnce(&mut Model)) -> Result<(), ManifestError> {
        let mut manifest = small();
        change(&mut manifest.model);
        let read = Manifest::from_bytes(&manifest.to_bytes());
        assert!(read.is_err() || read == Ok(manifest.clone()), "it reads back");
        manifest.check()
    }

    #[test]
    fn a_block_with_every_switch_is_valid() {
        let valid = with(|model| {
            let scaling = RotaryScaling::Llama3 {
                factor: 8.0,
                low_frequency_factor: 1.0,
                high_frequency_factor: 4.0,
                original_positions: 64,
            };
            let rotary = Rotary { theta: 1e6, dimensions: 6, scaling };
            let layer = LayerAttention { rotary: Some(0), window: Some(4) };
            model.block = Block {
                head_size: Some(10),
                norm: Norm::RmsPlusOne,
                placement: Placement::Both,
                query_key_norm: QueryKeyNorm::Head,
                activation: Activation::GeluTanh,
                rotary: vec![rotary],
                layers: vec![layer; 5],
                ..Block::default()
            };
        });
        assert_eq!(valid, Ok(()));
    }

    #[test]
    fn invalid_switches_name_their_key() {
        let refusal = |change: fn(&mut Model)| with(change).expect_err("refused").to_string();
        let layer = |rotary| LayerAttention { rotary, window: None };
        assert_eq!(layer(None).window, None);
        let error = refusal(|model| {
            model.block.layers = vec![LayerAttention { rotary: Some(1), window: None }; 5];
        });
        assert!(error.contains("model.block.layers.rotary = 1"), "{error}");
        let error = refusal(|model| {
            model.block.layers = vec![LayerAttention { rotary: None, window: None }; 4];
        });
        assert!(error.contains("it must be model.layers = 5"), "{error}");
        let error = refusal(|model| {
            let scaling = RotaryScaling::None;
            model.block.rotary = vec![Rotary { theta: 1e4, dimensions: 7, scaling }];
        });
        assert!(error.contains("even and at most the head size of 8"), "{error}");
        let error = refusal(|model| {
            (model.block.activation, model.block.ungated) = (Activation::ClampedSwiglu, true);
        });
        assert!(error.contains("in a block without gates"), "{error}");
        let error = refusal(|model| model.block.learned_positions = Some(15));
        assert!(error.contains("model.context = 16"), "{error}");
    }
}
