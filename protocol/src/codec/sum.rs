//! The summation of weight gradients over a stage's replicas.

use std::fmt;
use std::str::FromStr;

use super::{Codec, UnknownCodec};
use crate::frame::Element;

/// The format of weight gradients in an all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub enum SumCodec {
    /// Fixed-point integers, whose sum is exact: the mean gradient, as f32, depends only on the
    /// batch.
    #[default]
    Exact,
    /// The same integers, and their sum as integers too instead of the mean as f32: fewer bytes where the
    /// integers were rounded to a few bits, and the same mean.
    Integers,
    /// Numbers in a codec, in both directions. Each member keeps the rounding error of its numbers
    /// and adds it in the next step (error feedback; Karimireddy et al., arXiv 1901.09847). The
    /// error is delayed rather than lost, unless the member dies.
    Rounded(Codec),
}

impl SumCodec {
    /// The elements that a member sends to the member that sums them.
    #[must_use]
    pub const fn part(self) -> Element {
        match self {
            Self::Exact | Self::Integers => Element::I64,
            Self::Rounded(codec) => Element::Number(codec),
        }
    }

    /// The elements of the result.
    #[must_use]
    pub const fn result(self) -> Element {
        match self {
            Self::Exact => Element::F32,
            Self::Integers => Element::I64,
            Self::Rounded(codec) => Element::Number(codec),
        }
    }

    /// Whether members send integers, whose sum does not depend on which are added first.
    #[must_use]
    pub const fn is_exact(self) -> bool {
        matches!(self, Self::Exact | Self::Integers)
    }

    /// Whether rounding errors are carried over to the next step.
    #[must_use]
    pub const fn loses(self) -> bool {
        !matches!(self, Self::Exact | Self::Integers | Self::Rounded(Codec::F32))
    }
}

/// The text in manifests: `exact`, `integers`, or a codec.
impl fmt::Display for SumCodec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact => f.write_str("exact"),
            Self::Integers => f.write_str("integers"),
            Self::Rounded(codec) => codec.fmt(f),
        }
    }
}

/// The error of a text that is not a sum codec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("an all-reduce is `exact`, as `integers` or in a codec, but {0}")]
pub struct UnknownSumCodec(#[from] UnknownCodec);

impl FromStr for SumCodec {
    type Err = UnknownSumCodec;

    fn from_str(text: &str) -> Result<Self, UnknownSumCodec> {
        match text {
            "exact" => Ok(Self::Exact),
            "integers" => Ok(Self::Integers),
            codec => Ok(Self::Rounded(codec.parse()?)),
        }
    }
}

impl serde::Serialize for SumCodec {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for SumCodec {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_codec_reads_back_its_own_text() {
        for text in ["exact", "integers", "f32", "bf16", "int8", "int8:1024"] {
            let codec: SumCodec = text.parse().expect("known");
            assert_eq!(codec.to_string(), text);
        }
        let error = "int9".parse::<SumCodec>().expect_err("unknown").to_string();
        assert!(error.contains("\"int9\" is not a codec"), "{error}");
    }
}
