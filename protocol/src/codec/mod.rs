//! The encoding of tensors as bytes.
//!
//! A [`Codec`] determines the precision of a tensor's numbers. It is set in the manifest and is the
//! same on every link. Its bytes depend only on the tensor and its position in the run: the
//! receiver reads the same numbers, whichever route the tensor takes and however often it is sent
//! again. The functions here are the reference; implementations on devices produce the same bytes.
//!
//! A [`packing::Packing`] reduces the bytes without loss, and may differ between links.
//!
//! # Formats
//!
//! All numbers are little-endian and in the tensor's order. `f32`, `bf16` and `f16` are the numbers
//! themselves, rounded to nearest, ties to even. `int8`, `int4` and `fp8` divide the tensor into
//! blocks of consecutive numbers, of which the last may be shorter. First come the scales of all
//! blocks, as f32, then their codes. With `a` the largest magnitude of a block:
//!
//! | codec | scale     | code                                                          | value        |
//! |-------|-----------|---------------------------------------------------------------|--------------|
//! | int8  | `a / 127` | a signed byte from -127 to 127                                | code · scale |
//! | int4  | `a / 7`   | from -7 to 7, plus 8; number `i` of a block of `n` is the low nibble of its byte `i` where `i < ⌈n/2⌉`, else the high nibble of byte `i - ⌈n/2⌉`; an odd block's last high nibble is 8 | (code - 8) · scale |
//! | fp8   | `a / 448` | E4M3 (1 sign, 4 exponent, 3 mantissa bits, bias 7, no infinity; Micikevicius et al., arXiv 2209.05433) | code · scale |
//!
//! A number `x` is encoded as `x · (L / a)`, with `L` 127, 7 or 448, rounded. Every operation is an
//! f32 operation of IEEE 754, so every machine produces the same bytes. A block with `a < 2^-100`
//! is encoded as zeros with a scale of zero. A block with a number that is not finite has the scale
//! NaN, so all its values decode to NaN: divergence stays visible.

mod blockwise;
mod choice;
mod narrow;
pub mod packing;
mod rounding;
mod sum;

use std::fmt;
use std::str::FromStr;

use blockwise::Codes;
pub use blockwise::{MAGIC, NOT_FINITE, TINY};
pub use choice::PackingChoice;
pub use rounding::{Dither, Rounding};
pub use sum::{SumCodec, UnknownSumCodec};

/// Bytes of a block's scale.
const SCALE: u64 = 4;

/// The precision of a tensor's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum Codec {
    /// 32-bit IEEE, which loses nothing.
    F32,
    /// 16-bit with the exponent of f32.
    Bf16,
    /// 16-bit IEEE: three more bits of precision than bf16, magnitudes up to 65504.
    F16,
    /// 8-bit integers, scaled by block.
    Int8(Block),
    /// 4-bit integers, scaled by block.
    Int4(Block),
    /// 8-bit numbers with 4 bits of exponent, scaled by block.
    Fp8(Block),
}

/// The number of consecutive numbers that share a scale: a power of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode)]
pub struct Block(u8);

/// Rejects invalid sizes, because the decoder computes lengths from the size before anything else
/// is checked.
impl<C> bincode::Decode<C> for Block {
    fn decode<D: bincode::de::Decoder<Context = C>>(
        decoder: &mut D,
    ) -> Result<Self, bincode::error::DecodeError> {
        let exponent = u8::decode(decoder)?;
        let unknown = bincode::error::DecodeError::Other("invalid block size");
        Self::of_exponent(exponent).ok_or(unknown)
    }
}

bincode::impl_borrow_decode!(Block);

impl Block {
    /// The block of a codec that names none.
    pub const DEFAULT: Self = Self(6);

    /// The valid exponents.
    const RANGE: std::ops::RangeInclusive<u8> = 4..=12;

    /// A block of `2^exponent` numbers; `None` if the exponent is not valid.
    #[must_use]
    pub fn of_exponent(exponent: u8) -> Option<Self> {
        Self::RANGE.contains(&exponent).then_some(Self(exponent))
    }

    /// The exponent of the power of two.
    #[must_use]
    pub fn exponent(self) -> u8 {
        self.0
    }

    /// Numbers in the block.
    #[must_use]
    pub fn numbers(self) -> usize {
        1 << self.0
    }
}

/// The encoded bytes have another length than the tensor requires.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{given} bytes for {numbers} numbers in {codec}, which need {expected}")]
pub struct WrongLength {
    /// The codec.
    pub codec: Codec,
    /// Number of the tensor's numbers.
    pub numbers: usize,
    /// Required bytes.
    pub expected: u64,
    /// Given bytes.
    pub given: usize,
}

impl Codec {
    /// Bytes of encoded numbers; `None` if they do not fit a u64.
    #[must_use]
    pub fn bytes_of(self, numbers: u64) -> Option<u64> {
        let codes = match self {
            Self::F32 => numbers.checked_mul(4)?,
            Self::Bf16 | Self::F16 => numbers.checked_mul(2)?,
            Self::Int8(_) | Self::Fp8(_) => numbers,
            // Only the last block may have an odd length.
            Self::Int4(_) => numbers.div_ceil(2),
        };
        let scales = match self.block() {
            Some(block) => numbers.div_ceil(block.numbers() as u64).checked_mul(SCALE)?,
            None => 0,
        };
        codes.checked_add(scales)
    }

    /// The block of the codec; `None` if it has no scales.
    #[must_use]
    pub fn block(self) -> Option<Block> {
        match self {
            Self::F32 | Self::Bf16 | Self::F16 => None,
            Self::Int8(block) | Self::Int4(block) | Self::Fp8(block) => Some(block),
        }
    }

    /// The code of a block's largest magnitude; `None` for codecs without blocks.
    #[must_use]
    pub fn limit(self) -> Option<f32> {
        match self {
            Self::F32 | Self::Bf16 | Self::F16 => None,
            Self::Int8(_) => Some(blockwise::Int8::LIMIT),
            Self::Int4(_) => Some(blockwise::Int4::LIMIT),
            Self::Fp8(_) => Some(blockwise::Fp8::LIMIT),
        }
    }

    /// Encodes numbers into a buffer of [`Codec::bytes_of`] bytes.
    ///
    /// # Panics
    /// If `bytes` has another length.
    pub fn encode(self, numbers: &[f32], rounding: Rounding, bytes: &mut [u8]) {
        let length = self.bytes_of(numbers.len() as u64);
        assert_eq!(length, Some(bytes.len() as u64), "room for all numbers");
        match self {
            Self::F32 => narrow::encode_f32(numbers, bytes),
            Self::Bf16 => narrow::encode_bf16(numbers, bytes),
            Self::F16 => narrow::encode_f16(numbers, bytes),
            Self::Int8(block) => {
                blockwise::encode::<blockwise::Int8>(numbers, block, rounding, bytes)
            }
            Self::Int4(block) => {
                blockwise::encode::<blockwise::Int4>(numbers, block, rounding, bytes)
            }
            Self::Fp8(block) => {
                blockwise::encode::<blockwise::Fp8>(numbers, block, rounding, bytes)
            }
        }
    }

    /// Decodes numbers.
    ///
    /// # Errors
    /// If the length of `bytes` does not match the number of numbers. All bytes of the right length
    /// are valid.
    pub fn decode(self, bytes: &[u8], numbers: &mut [f32]) -> Result<(), WrongLength> {
        let expected = self.bytes_of(numbers.len() as u64).expect("numbers in memory");
        if bytes.len() as u64 != expected {
            let (numbers, given) = (numbers.len(), bytes.len());
            return Err(WrongLength { codec: self, numbers, expected, given });
        }
        match self {
            Self::F32 => narrow::decode_f32(bytes, numbers),
            Self::Bf16 => narrow::decode_bf16(bytes, numbers),
            Self::F16 => narrow::decode_f16(bytes, numbers),
            Self::Int8(block) => blockwise::decode::<blockwise::Int8>(bytes, block, numbers),
            Self::Int4(block) => blockwise::decode::<blockwise::Int4>(bytes, block, numbers),
            Self::Fp8(block) => blockwise::decode::<blockwise::Fp8>(bytes, block, numbers),
        }
        Ok(())
    }

    fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Int8(_) => "int8",
            Self::Int4(_) => "int4",
            Self::Fp8(_) => "fp8",
        }
    }
}

/// The text in manifests: `f32`, `int8`, `int8:1024`.
impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.block() {
            None | Some(Block::DEFAULT) => f.write_str(self.name()),
            Some(block) => write!(f, "{}:{}", self.name(), block.numbers()),
        }
    }
}

/// The error of a text that is not a codec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a codec: it must be f32, bf16, f16, int8, int4 or fp8, the last three \
     optionally with a block as in int8:1024, a power of two from 16 to 4096"
)]
pub struct UnknownCodec(String);

impl FromStr for Codec {
    type Err = UnknownCodec;

    fn from_str(text: &str) -> Result<Self, UnknownCodec> {
        let unknown = || UnknownCodec(text.to_owned());
        let (name, block) = match text.split_once(':') {
            None => (text, None),
            Some((name, block)) => {
                let length: u32 = block.parse().map_err(|_| unknown())?;
                let exponent = length.is_power_of_two().then(|| length.trailing_zeros() as u8);
                (name, Some(exponent.and_then(Block::of_exponent).ok_or_else(unknown)?))
            }
        };
        let scaled = block.unwrap_or(Block::DEFAULT);
        match (name, block) {
            ("f32", None) => Ok(Self::F32),
            ("bf16", None) => Ok(Self::Bf16),
            ("f16", None) => Ok(Self::F16),
            ("int8", _) => Ok(Self::Int8(scaled)),
            ("int4", _) => Ok(Self::Int4(scaled)),
            ("fp8", _) => Ok(Self::Fp8(scaled)),
            _ => Err(unknown()),
        }
    }
}

impl serde::Serialize for Codec {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Codec {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests;
