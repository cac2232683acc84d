//! Streams of normal numbers that depend on the run's seed and a name alone, readable from any place.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use shoal_protocol::manifest::Manifest;

use crate::numeric::normal::fill_normal;

/// Words of random bits that are drawn together.
const WORDS: usize = 512;

/// The normal numbers of one name: a stream that can be read from any place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NormalStream {
    /// Key of a ChaCha8 stream.
    key: [u8; 32],
    deviation: f64,
}

impl NormalStream {
    /// The numbers of a seed and a name, whose BLAKE3 hash is the stream's key.
    pub(crate) fn new(seed: u64, name: &str, deviation: f64) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("shoal initial weights v1");
        hasher.update(&seed.to_le_bytes());
        hasher.update(name.as_bytes());
        Self { key: *hasher.finalize().as_bytes(), deviation }
    }

    /// The initial values of a weight of the model that is a matrix.
    pub(crate) fn of_weight(manifest: &Manifest, name: &str) -> Self {
        Self::new(manifest.training.seed, name, manifest.model.initializer_range)
    }

    /// Fills weights with normal numbers by the transform of Box and Muller (1958), from the place of number
    /// `start` in the stream: eight bytes for each number. `start` is even, since numbers are drawn in pairs.
    pub(crate) fn fill(&self, start: usize, weights: &mut [f32]) {
        let mut stream = ChaCha8Rng::from_seed(self.key);
        // A word of the stream has four bytes.
        stream.set_word_pos(2 * start as u128);
        let mut bits = [0u64; WORDS];
        for weights in weights.chunks_mut(WORDS) {
            let bits = &mut bits[..weights.len().next_multiple_of(2)];
            stream.fill_bytes(bytemuck::cast_slice_mut(bits));
            bits.iter_mut().for_each(|word| *word = u64::from_le(*word));
            fill_normal(bits, weights, self.deviation);
        }
    }
}
