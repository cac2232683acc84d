//! The shape of the model, and the weights that a run starts from.

use serde::{Deserialize, Serialize};

use super::block::{Activation, Block, LayerAttention, QueryKeyNorm};
use super::boundary::Boundary;
use super::rotary::{Rotary, RotaryScaling};
use super::{ManifestError, within};
use crate::ids::ContentHash;
use crate::limits;

/// The number of slices where the manifest names none: matrices are whole.
fn default_slices() -> u16 {
    1
}

/// A decoder-only transformer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Number of different tokens.
    pub vocabulary: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Decoder layers.
    pub layers: u32,
    /// Query heads; unless the block has a head size, they divide `hidden` into even parts.
    pub heads: u32,
    /// Key and value heads; they divide `heads`.
    pub key_value_heads: u32,
    /// Width inside the feed-forward block.
    pub intermediate: u32,
    /// Partial products of a layer's matrices, which are added in order; they divide `heads`, `key_value_heads`
    /// and `intermediate`. With 1, matrices are whole.
    #[serde(default = "default_slices")]
    pub slices: u16,
    /// Tokens of one sample.
    pub context: u32,
    /// Base of the rotary embedding's wavelengths.
    pub rope_theta: f64,
    /// Added to the mean square before its root.
    pub norm_epsilon: f64,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Layers that compress activations at stage boundaries; `None` sends activations unchanged.
    #[serde(default)]
    pub boundary: Option<Boundary>,
    /// How the decoder block differs from Llama's.
    #[serde(default)]
    pub block: Block,
    /// The model whose shape, and perhaps weights, a run starts from; `None` is a new model.
    #[serde(default)]
    pub base: Option<Base>,
}

/// An imported model, by content.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(deny_unknown_fields)]
pub struct Base {
    /// Hash of its index, which names the files of every layer.
    pub index: ContentHash,
    /// Bytes of its index.
    pub bytes: u64,
    /// Whether version 0 has its weights; otherwise they are drawn from the seed.
    pub loads_weights: bool,
}

impl Model {
    /// Whether the weights of version 0 are those of a base.
    #[must_use]
    pub fn loads_weights(&self) -> bool {
        self.base.is_some_and(|base| base.loads_weights)
    }

    /// Checks every value against its range.
    ///
    /// # Errors
    /// The first invalid value.
    pub fn check(&self) -> Result<(), ManifestError> {
        // Each slice has a part of the vocabulary.
        let least = u32::from(self.slices).max(2);
        within("model.vocabulary", self.vocabulary, least..=limits::VOCABULARY)?;
        within("model.hidden", self.hidden, 2..=limits::HIDDEN)?;
        within("model.layers", self.layers, 1..=limits::LAYERS)?;
        within("model.heads", self.heads, 1..=limits::HEADS)?;
        within("model.key_value_heads", self.key_value_heads, 1..=self.heads)?;
        within("model.intermediate", self.intermediate, 1..=limits::INTERMEDIATE)?;
        within("model.context", self.context, 1..=1 << 20)?;
        within("model.rope_theta", self.rope_theta, 1.0..=1e12)?;
        within("model.norm_epsilon", self.norm_epsilon, 1e-12..=1.0)?;
        within("model.initializer_range", self.initializer_range, 1e-6..=1.0)?;
        if self.block.head_size.is_none() && !self.hidden.is_multiple_of(2 * self.heads) {
            return Err(ManifestError::OutOfRange {
                key: "model.heads",
                value: self.heads.to_string(),
                range: format!("such that hidden / heads is even (hidden = {})", self.hidden),
            });
        }
        if !self.heads.is_multiple_of(self.key_value_heads) {
            return Err(ManifestError::OutOfRange {
                key: "model.key_value_heads",
                value: self.key_value_heads.to_string(),
                range: format!("a divisor of heads = {}", self.heads),
            });
        }
        self.check_slices()?;
        self.check_experts()?;
        if let Some(base) = self.base {
            within("bytes of the base's index", base.bytes, 1..=limits::BASE_INDEX.0)?;
        }
        self.check_latent()?;
        self.check_block()
    }

    /// Width of a head.
    #[must_use]
    pub fn head_size(&self) -> u32 {
        self.block.head_size.unwrap_or(self.hidden / self.heads)
    }

    /// Width of all queries.
    #[must_use]
    pub fn query_width(&self) -> u32 {
        self.heads * self.head_size()
    }

    /// Width of what the heads of a layer have read, together.
    #[must_use]
    pub fn value_width(&self) -> u32 {
        self.heads * self.block.latent.map_or(self.head_size(), |latent| latent.value_size)
    }

    /// Width of all keys, and of all values.
    #[must_use]
    pub fn key_width(&self) -> u32 {
        self.key_value_heads * self.head_size()
    }

    /// The rotary embeddings that layers choose from.
    #[must_use]
    pub fn rotaries(&self) -> Vec<Rotary> {
        if self.block.rotary.is_empty() {
            let (theta, dimensions) = (self.rope_theta, self.head_size());
            return vec![Rotary { theta, dimensions, scaling: RotaryScaling::None }];
        }
        self.block.rotary.clone()
    }

    /// The attention of a layer.
    #[must_use]
    pub fn layer_attention(&self, layer: u32) -> LayerAttention {
        let first = LayerAttention { rotary: Some(0), window: None };
        self.block.layers.get(layer as usize).copied().unwrap_or(first)
    }

    /// Checks latent attention against the rest of the model.
    fn check_latent(&self) -> Result<(), ManifestError> {
        let Some(latent) = self.block.latent else { return Ok(()) };
        let head_size = self.head_size();
        within("model.block.latent.queries", latent.queries.unwrap_or(1), 1..=limits::HIDDEN)?;
        within("model.block.latent.keys_values", latent.keys_values, 1..=limits::HIDDEN)?;
        within("model.block.latent.rotated", latent.rotated, 2..=head_size - 1)?;
        within("model.block.latent.value_size", latent.value_size, 1..=head_size)?;
        let is_partial = self.rotaries().iter().any(|one| one.dimensions != latent.rotated);
        let biased = self.block.biases.query_key_value && latent.queries.is_none();
        let refused = [
            (self.slices > 1, "absent where model.slices divides heads"),
            (self.key_value_heads != self.heads, "absent unless key_value_heads = heads"),
            (self.block.query_key_norm != QueryKeyNorm::None, "absent beside query_key_norm"),
            (is_partial, "absent unless rotary embeddings have the dimensions of latent.rotated"),
            (biased, "absent where queries from the stream have biases"),
        ];
        match refused.into_iter().find(|(is_so, _)| *is_so) {
            Some((_, range)) => Err(ManifestError::OutOfRange {
                key: "model.block.latent",
                value: "set".to_owned(),
                range: range.to_owned(),
            }),
            None => Ok(()),
        }
    }

    /// Checks the block against the rest of the model.
    fn check_block(&self) -> Result<(), ManifestError> {
        let block = &self.block;
        within("model.block.head_size", self.head_size(), 2..=limits::HEAD_SIZE)?;
        let rotaries = self.rotaries();
        within("model.block.rotary (number)", rotaries.len(), 1..=8)?;
        for rotary in &rotaries {
            rotary.check(self.head_size())?;
        }
        if !block.layers.is_empty() && block.layers.len() != self.layers as usize {
            return Err(ManifestError::OutOfRange {
                key: "model.block.layers (number)",
                value: block.layers.len().to_string(),
                range: format!("model.layers = {}", self.layers),
            });
        }
        for layer in &block.layers {
            let last = rotaries.len() - 1;
            within("model.block.layers.rotary", usize::from(layer.rotary.unwrap_or(0)), 0..=last)?;
            within("model.block.layers.window", layer.window.unwrap_or(1), 1..=u32::MAX)?;
        }
        if block.activation == Activation::ClampedSwiglu && block.ungated {
            return Err(ManifestError::OutOfRange {
                key: "model.block.activation",
                value: "clamped-swiglu".to_owned(),
                range: "another one in a block without gates".to_owned(),
            });
        }
        if let Some(positions) = block.learned_positions {
            within("model.context", self.context, 1..=positions)?;
            within("model.block.learned_positions", positions, 1..=1 << 20)?;
        }
        within("model.block.attention_scale", block.attention_scale.unwrap_or(1.0), 1e-6..=1e3)?;
        within("model.block.embedding_scale", block.embedding_scale.unwrap_or(1.0), 1e-6..=1e6)
    }
}
