//! The precision of tensors in transit.

use serde::{Deserialize, Serialize};

use super::{Dtype, Manifest};
use crate::codec::{Codec, Dither, Rounding, SumCodec};
use crate::ids::ClaimKey;

/// The precision of tensors in transit. Tensors are also rounded at a stage boundary inside one
/// peer, so the bits of the model do not depend on the assignment of stages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct Codecs {
    /// The codec of activations.
    pub activations: Codec,
    /// The codec of activation gradients.
    pub activation_gradients: Codec,
    /// The rounding of activation gradients; activations are rounded to the nearest code.
    pub gradient_rounding: GradientRounding,
    /// The codec of weight-gradient sums between the replicas of a stage.
    pub all_reduce: SumCodec,
    /// The lossless packing of file pieces for links: pieces must match their hashes.
    pub chunks: ChunkPacking,
}

/// The packing of file pieces for links.
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
    /// The packing with the shortest measured time to delivery.
    #[default]
    Auto,
    /// No packing.
    None,
    /// Zstd over byte planes, wherever that makes a piece smaller.
    Zstd,
}

impl Codecs {
    /// The same codec for all tensors that cross a stage boundary; weight gradients are summed
    /// exactly.
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

/// Lossless codecs.
impl Default for Codecs {
    fn default() -> Self {
        Self::all(Codec::F32)
    }
}

/// The lossless codec for tensors computed in a dtype.
impl From<Dtype> for Codec {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::Bf16,
        }
    }
}

/// The rounding of activation gradients.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(rename_all = "lowercase")]
pub enum GradientRounding {
    /// To the nearest code.
    Nearest,
    /// Up or down at random so that the mean is exact. The randomness depends on the seed and the
    /// claim.
    Stochastic,
}

impl Manifest {
    /// The rounding of the gradient of the input of `key`'s work.
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
