//! The weights that a run starts from.
//!
//! Every weight follows from the run's seed and its own name alone, so that any peer makes any
//! stage without talking to anyone, and the cut into stages changes nothing. The arithmetic is in
//! Rust throughout (the `libm` crate, not the system's library), so the bits are the same on every
//! machine.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::Manifest;

use crate::parameters::{Parameter, parameter_count, parameters};

/// The initial flat vector of a stage: the norms' weights are 1, all others normal with standard
/// deviation `model.initializer_range`.
#[must_use]
pub fn initial_weights(manifest: &Manifest, stage: Stage) -> Vec<f32> {
    let mut flat = vec![1.0; parameter_count(manifest, stage)];
    for parameter in parameters(manifest, stage) {
        if parameter.shape.len() > 1 {
            let deviation = manifest.model.initializer_range;
            fill(manifest.training.seed, &parameter, deviation, &mut flat[parameter.range()]);
        }
    }
    flat
}

/// Normal numbers by the transform of Box and Muller (1958) from a ChaCha8 stream whose key is
/// the BLAKE3 hash of seed and name.
fn fill(seed: u64, parameter: &Parameter, deviation: f64, weights: &mut [f32]) {
    let mut hasher = blake3::Hasher::new_derive_key("shoal initial weights v1");
    hasher.update(&seed.to_le_bytes());
    hasher.update(parameter.name.as_bytes());
    let mut stream = ChaCha8Rng::from_seed(*hasher.finalize().as_bytes());
    for pair in weights.chunks_mut(2) {
        // In (0, 1], so that the logarithm is finite.
        let first = 1.0 - unit(stream.next_u64());
        let second = unit(stream.next_u64());
        let radius = deviation * libm::sqrt(-2.0 * libm::log(first));
        let (sine, cosine) = libm::sincos(std::f64::consts::TAU * second);
        for (weight, value) in pair.iter_mut().zip([radius * cosine, radius * sine]) {
            *weight = value as f32;
        }
    }
}

/// A number in [0, 1) from the upper 53 bits.
pub(crate) fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}
