//! The initial weights of a run.
//!
//! Every weight depends only on the run's seed and its own name, so any peer can compute any stage
//! without communication, and the cut into stages does not matter. All arithmetic is in Rust (the
//! `libm` crate, not the system's library), so the bits are the same on every machine.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::Manifest;

use crate::boundary;
use crate::parameters::{Parameter, parameter_count, parameters};

/// The initial flat vector of a stage. The norms' weights are 1; all others are normal with
/// standard deviation `model.initializer_range`. Trained boundaries have no residual path, so their
/// standard deviation preserves the magnitude of activations: one over the root of their number of
/// inputs.
#[must_use]
pub fn initial_weights(manifest: &Manifest, stage: Stage) -> Vec<f32> {
    let mut flat = vec![1.0; parameter_count(manifest, stage)];
    for parameter in parameters(manifest, stage) {
        if parameter.shape.len() > 1 {
            let deviation = match boundary::owns(&parameter.name) {
                true => 1.0 / libm::sqrt(parameter.shape[1] as f64),
                false => manifest.model.initializer_range,
            };
            fill(manifest.training.seed, &parameter, deviation, &mut flat[parameter.range()]);
        }
    }
    flat
}

/// Normal numbers by the Box-Muller transform (1958) from a ChaCha8 stream whose key is the BLAKE3
/// hash of seed and name.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::manifest;

    #[test]
    fn the_cut_changes_no_weight() {
        let whole = initial_weights(&manifest(), Stage(0));
        let mut cut = manifest();
        cut.training.stages = 2;
        let parts: Vec<f32> = cut.stages().flat_map(|stage| initial_weights(&cut, stage)).collect();
        assert_eq!(whole, parts);
    }

    #[test]
    fn the_bits_are_the_same_on_every_machine() {
        let weights = initial_weights(&manifest(), Stage(0));
        let hash = blake3::hash(bytemuck::cast_slice(&weights));
        assert_eq!(hash.to_hex()[..16], *"d906111c71a3b0b8");
    }

    #[test]
    fn weights_are_normal() {
        let mut manifest = manifest();
        manifest.model.hidden = 128;
        let weights = &initial_weights(&manifest, Stage(0))[..256 * 128];
        let moment = |power| {
            let term = |weight: &f32| (f64::from(*weight) / 0.02).powi(power);
            weights.iter().map(term).sum::<f64>() / weights.len() as f64
        };
        assert!(moment(1).abs() < 0.03, "{}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.03, "{}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.2, "{}", moment(4));
    }
}
