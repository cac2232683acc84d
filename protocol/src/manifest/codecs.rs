//! To how many bits a run rounds what travels.

use serde::{Deserialize, Serialize};

use super::{Dtype, Manifest};
use crate::codec::{Codec, Dither, Rounding, SumCodec};
use crate::ids::ClaimKey;

/// To how many bits what travels is rounded. At every stage boundary that happens also where both
/// stages are one peer's, so the bits of the model do not depend on who hosts what.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct Codecs {
    /// What activations travel as.
    pub activations: Codec,
    /// What their gradients travel as.
    pub activation_gradients: Codec,
    /// How those gradients are rounded; activations go to the nearest code.
    pub gradient_rounding: GradientRounding,
    /// As what the weight gradients of a stage's replicas are summed.
    pub all_reduce: SumCodec,
    /// How pieces of files are packed for links, without loss: they are what their hashes say.
    pub chunks: ChunkPacking,
}

/// How pieces of files are packed for links.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Default,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(rename_all = "lowercase")]
pub enum ChunkPacking {
    /// As is measured to be there soonest.
    #[default]
    Auto,
    /// Not at all.
    None,
    /// By zstd over byte planes, wherever that makes them smaller.
    Zstd,
}

impl Codecs {
    /// The same codec for all that crosses a stage boundary; weight gradients are summed exactly.
    #[must_use]
    pub const fn all(codec: Codec) -> Self {
        Self {
            activations: codec,
            activation_gradients: codec,
            gradient_rounding: GradientRounding::Nearest,
            all_reduce: SumCodec::Exact,
            chunks: ChunkPacking::Auto,
        }
    }
}

/// Nothing is lost.
impl Default for Codecs {
    fn default() -> Self {
        Self::all(Codec::F32)
    }
}

/// The codec that loses nothing of what is computed in a dtype.
impl From<Dtype> for Codec {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::Bf16,
        }
    }
}

/// How activation gradients are rounded.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(rename_all = "lowercase")]
pub enum GradientRounding {
    /// To the nearest code.
    Nearest,
    /// Up or down by chance, such that the mean is right; which depends on the seed and the place.
    Stochastic,
}

impl Manifest {
    /// How the gradient of the input of work at a place is rounded.
    #[must_use]
    pub fn gradient_rounding(&self, key: ClaimKey) -> Rounding {
        match self.codec.gradient_rounding {
            GradientRounding::Nearest => Rounding::Nearest,
            GradientRounding::Stochastic => {
                Rounding::Stochastic(Dither::of(self.training.seed, key))
            }
        }
    }
}
