//! Rounding of numbers to codes.

use crate::ids::ClaimKey;

/// The rounding of numbers between two codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest code, ties to even.
    Nearest,
    /// To either code, with probabilities that make the expected value the number itself. Codecs
    /// without blocks still round to nearest.
    Stochastic(Dither),
}

/// Random numbers that depend only on a tensor's position in a run. They are reproducible, and no
/// state connects them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dither {
    pub(super) key: u32,
}

impl Dither {
    /// The dither of the activation gradient that the work `key` produces.
    #[must_use]
    pub fn of(seed: u64, key: ClaimKey) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("shoal stochastic rounding v1");
        hasher.update(&seed.to_le_bytes());
        hasher.update(&key.step.0.to_le_bytes());
        hasher.update(&key.stage.0.to_le_bytes());
        hasher.update(&key.microbatch.0.to_le_bytes());
        let hash = hasher.finalize();
        Self { key: u32::from_le_bytes(*hash.as_bytes().first_chunk().expect("32 bytes")) }
    }

    /// The key from which, together with a number's index in the tensor, the random bits follow.
    #[must_use]
    pub fn key(self) -> u32 {
        self.key
    }

    /// The random bits of number `index` of a tensor: a Weyl sequence through the 32-bit mixer
    /// `lowbias32` (C. Wellons, "Prospecting for hash functions", 2018).
    #[inline(always)]
    #[must_use]
    pub fn bits(self, index: u32) -> u32 {
        let mut bits = self.key.wrapping_add(index.wrapping_mul(0x9e37_79b9));
        bits ^= bits >> 16;
        bits = bits.wrapping_mul(0x7feb_352d);
        bits ^= bits >> 15;
        bits = bits.wrapping_mul(0x846c_a68b);
        bits ^ (bits >> 16)
    }

    /// The same bits as an offset from -1/2 to 1/2, a multiple of 2^-24.
    #[inline(always)]
    #[must_use]
    pub fn offset(self, index: u32) -> f32 {
        (self.bits(index) >> 8) as f32 * (1.0 / 16_777_216.0) - 0.5
    }
}
