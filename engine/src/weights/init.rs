//! The initial weights of a run.
//!
//! Every weight depends only on the run's seed and its own name, so any peer can compute any stage
//! without communication, and the cut into stages does not matter. All arithmetic is in Rust (the
//! `libm` crate, not the system's library), so the bits are the same on every machine.

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Manifest, Norm};
use tch::{Kind, Tensor};

use crate::device::tensor::elements_mut;
use crate::error::Result;
use crate::model::parameters::{Parameter, parameter_count, parameters, source_of};
use crate::model::{adapter, boundary};
use crate::numeric::normal_stream::NormalStream;
use crate::subspace::Subspace;
use crate::weights::version::Weights;

/// Weights that are filled together: a power of two.
const CHUNK: usize = 1 << 16;

/// The initial flat vector of a stage. Norms begin as 1 and biases as 0; all others are normal with
/// standard deviation `model.initializer_range`. Trained boundaries have no residual path, so their
/// standard deviation preserves the magnitude of activations: one over the root of their number of
/// inputs. Of an adapter the second matrix begins as 0, and the first with the deviation that PEFT
/// draws it with: one over the root of three times its inputs. Weights that stay in a subspace begin with
/// their nearest values there.
#[must_use]
pub fn initial_weights(manifest: &Manifest, stage: Stage) -> Vec<f32> {
    let mut flat = vec![0.0; parameter_count(manifest, stage)];
    fill_initial_weights(manifest, &parameters(manifest, stage), &mut flat, 1);
    if let Some(subspace) = Subspace::of(manifest, stage) {
        subspace.constrain(&mut flat, 1);
    }
    flat
}

/// Draws the initial weights of a stage, for all these versions. Each tensor is drawn by itself, since a device may
/// have a small part of all of them.
pub(crate) fn draw_weights(
    manifest: &Manifest,
    parameters: &[Parameter],
    subspace: Option<&Subspace>,
    mut versions: Vec<&mut Weights>,
    threads: usize,
) -> Result<()> {
    let _guard = tch::no_grad_guard();
    for parameter in parameters {
        let mut values = draw_one(manifest, parameter, threads)?;
        if let Some(subspace) = subspace {
            subspace.constrain_tensor(parameter.range(), &mut values, threads)?;
        }
        for version in &mut versions {
            version.set_range(&parameter.range(), &values)?;
        }
    }
    Ok(())
}

/// The initial values of a weight before any constraint: flat f32, on the processor.
pub(crate) fn draw_one(
    manifest: &Manifest,
    parameter: &Parameter,
    threads: usize,
) -> Result<Tensor> {
    let length = parameter.len() as i64;
    let mut values = Tensor::f_zeros([length], (Kind::Float, tch::Device::Cpu))?;
    let drawn = std::slice::from_ref(parameter);
    fill_initial_weights(manifest, drawn, elements_mut(&mut values), threads);
    Ok(values)
}

/// Writes the initial values of these weights, one after the other, with several threads.
fn fill_initial_weights(
    manifest: &Manifest,
    parameters: &[Parameter],
    mut flat: &mut [f32],
    threads: usize,
) {
    let mut chunks = Vec::new();
    for parameter in parameters {
        let weights = flat.split_off_mut(..parameter.len()).expect("the parameters fill it");
        if parameter.shape.len() == 1 {
            // A norm multiplies by 1 at first, and a bias adds nothing.
            let from_zero = manifest.model.block.norm == Norm::RmsPlusOne;
            let is_zero = from_zero || parameter.begins_with_zeros();
            weights.fill(if is_zero { 0.0 } else { 1.0 });
            continue;
        }
        if adapter::is_second(&parameter.name) {
            weights.fill(0.0);
            continue;
        }
        let inputs = parameter.shape[1] as f64;
        let deviation = if boundary::owns(&parameter.name) {
            1.0 / libm::sqrt(inputs)
        } else if adapter::is_first(&parameter.name) {
            1.0 / libm::sqrt(3.0 * inputs)
        } else {
            manifest.model.initializer_range
        };
        let name = source_of(parameter, manifest.model.block.tied);
        let normals = NormalStream::new(manifest.training.seed, name, deviation);
        for (index, weights) in weights.chunks_mut(CHUNK).enumerate() {
            chunks.push(Chunk { normals, start: index * CHUNK, weights });
        }
    }
    let share = chunks.len().div_ceil(threads.max(1)).max(1);
    let mut shares = chunks.chunks_mut(share);
    let own = shares.next();
    std::thread::scope(|scope| {
        for share in shares {
            scope.spawn(move || share.iter_mut().for_each(Chunk::fill));
        }
        own.into_iter().flatten().for_each(Chunk::fill);
    });
}

/// Neighbouring weights of a parameter.
struct Chunk<'a> {
    normals: NormalStream,
    /// Index of the first in the parameter.
    start: usize,
    weights: &'a mut [f32],
}

impl Chunk<'_> {
    fn fill(&mut self) {
        self.normals.fill(self.start, self.weights);
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::WeightGroup;

    use super::*;
    use crate::model::parameters::group_elements;
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
    fn a_tied_head_begins_as_the_embedding() {
        let mut manifest = manifest();
        manifest.model.block.tied = true;
        let whole = initial_weights(&manifest, Stage(0));
        manifest.training.stages = 2;
        let first = initial_weights(&manifest, Stage(0));
        let last = initial_weights(&manifest, Stage(1));
        let matrix = group_elements(&manifest, WeightGroup(2));
        assert_eq!(last[last.len() - matrix..], first[..matrix]);
        assert_eq!([&first[..], &last[..last.len() - matrix]].concat(), whole);
    }

    #[test]
    fn threads_change_no_weight() {
        let mut manifest = manifest();
        // Matrices of several chunks, the last ones short.
        manifest.model.hidden = 384;
        manifest.model.vocabulary = 257;
        let alone = initial_weights(&manifest, Stage(0));
        for threads in [2, 3, 64] {
            let mut flat = vec![0.0; alone.len()];
            let all = parameters(&manifest, Stage(0));
            fill_initial_weights(&manifest, &all, &mut flat, threads);
            assert!(flat == alone, "{threads} threads");
        }
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
