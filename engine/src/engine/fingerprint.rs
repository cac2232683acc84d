//! What decides the bits that this process computes, in one hash.

use bytes::Bytes;
use shoal_protocol::ids::{ClaimKey, ContentHash, Microbatch, Stage, StageSpan, Step, WeightGroup};
use shoal_protocol::manifest::{Block, Loss as LossKind, Manifest, Model};

use crate::device::card;
use crate::device::kernel;
use crate::device::mkl::MklDispatch;
use crate::device::setup::Device;
use crate::device::shim;
use crate::engine::Engine;
use crate::error::Result;
use crate::model::parameters::group_elements;
use crate::train::stage::ForwardOutput;

/// Hash of a known-answer forward and backward pass, the versions of this build and of libtorch, and what computes: of
/// a processor its instruction set, its threads and MKL's kernels, of a GPU its model and its driver. Peers with equal
/// fingerprints compute equal bits; others may not.
///
/// The passes are over a model of a fixed small shape in the run's dtype.
///
/// # Errors
/// When the device does not work.
pub fn fingerprint(manifest: &Manifest, device: Device) -> Result<ContentHash> {
    let manifest = known_model(manifest);
    let mut engine = Engine::new(&manifest, StageSpan::all(1), device)?;
    let tokens = manifest.training.microbatch_size * manifest.model.context;
    let words = |start: u32| -> Bytes {
        (start..start + tokens).flat_map(|token| (token % 251).to_le_bytes()).collect()
    };
    let key = ClaimKey { step: Step(0), stage: Stage(0), microbatch: Microbatch(0) };
    let output = engine.forward(key, &words(0), Some(&words(1)))?;
    let loss = match output {
        ForwardOutput::Loss { share, .. } => share,
        ForwardOutput::Activation(_) => unreachable!("the only stage is the last"),
    };
    engine.backward(key, None)?;
    engine.accumulate(key)?;
    let all = 0..group_elements(&manifest, WeightGroup(0));
    let mut hasher = blake3::Hasher::new_derive_key("shoal fingerprint v1");
    hasher.update(&loss.to_le_bytes());
    hasher.update(&engine.export(WeightGroup(0), Step(0), all)?);
    for part in [env!("CARGO_PKG_VERSION"), &shim::torch_version()]
        .into_iter()
        .chain(computer(device)?.iter().map(String::as_str))
    {
        hasher.update(part.as_bytes());
        hasher.update(&[0]);
    }
    Ok(hasher.finalize().into())
}

/// What decides the bits of a device's kernels. The number of a GPU in its machine and that machine's processor do not.
fn computer(device: Device) -> Result<Vec<String>> {
    if let tch::Device::Cuda(index) = device.torch {
        return Ok(vec![card::describe(index)?]);
    }
    let threads = device.threads().to_string();
    let kernels = [MklDispatch::of_this_process().name(), kernel::instruction_set()];
    Ok(kernels.into_iter().map(str::to_owned).chain([device.to_string(), threads]).collect())
}

/// A model of a few thousand weights with every kind of layer.
fn known_model(manifest: &Manifest) -> Manifest {
    let mut known = manifest.clone();
    known.model = Model {
        vocabulary: 256,
        hidden: 64,
        layers: 1,
        heads: 4,
        key_value_heads: 2,
        intermediate: 128,
        slices: 1,
        context: 32,
        boundary: None,
        block: Block::default(),
        base: None,
        ..known.model
    };
    known.start = None;
    known.inner = None;
    known.training.loss = LossKind::CrossEntropy;
    known.training.seed = 0;
    known.training.stages = 1;
    known.training.microbatch_size = 2;
    known.training.microbatches = 1;
    known.training.recompute = false;
    known
}
