//! Slices of a layer's matrices: the same model as whole matrices up to rounding, and the same bits however
//! devices share the slices.

mod common;

use common::{Trainer, assert_as_pytorch, manifest, samples, text, write};
use shoal_engine::{Device, DeviceChoice, Generator};
use shoal_protocol::ids::ContentHash;
use shoal_protocol::manifest::{
    Activation, Biases, Dtype, Manifest, Norm, Placement, QueryKeyNorm,
};

const STEPS: u64 = 20;

/// A run whose heads can be cut into 2 or 4 slices; two queries read each key.
fn divisible() -> Manifest {
    let mut manifest = manifest();
    (manifest.model.heads, manifest.model.key_value_heads) = (8, 4);
    manifest
}

/// Losses of all steps, and a hash of each stage's state at the end, of the run in slices.
fn trained(manifest: &Manifest, slices: u16) -> (Vec<f64>, Vec<ContentHash>) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest.clone();
    manifest.model.slices = slices;
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer::new(&manifest, samples);
    let losses = (0..STEPS).map(|step| trainer.step(step).0).collect();
    let hash = |stage| trainer.engine.state_hash(stage).expect("hosted");
    (losses, manifest.stages().map(hash).collect())
}

/// The largest difference between the losses of the run in slices and with whole matrices.
fn difference(manifest: &Manifest, slices: u16) -> f64 {
    let [(whole, _), (sliced, _)] = [1, slices].map(|slices| trained(manifest, slices));
    assert!(whole[0] - whole[STEPS as usize - 1] > 0.5, "it learns: {whole:?}");
    assert_ne!(whole, sliced, "partial products round elsewhere");
    let differences = whole.iter().zip(&sliced).map(|(whole, sliced)| (whole - sliced).abs());
    differences.fold(0.0, f64::max)
}

#[test]
fn slices_have_the_losses_of_whole_matrices() {
    for slices in [2, 4] {
        let off = difference(&divisible(), slices);
        assert!(off < 1e-3, "{slices} slices: {off}");
    }
}

#[test]
fn slices_have_the_losses_of_whole_matrices_in_bf16() {
    let mut manifest = divisible();
    manifest.training.dtype = Dtype::Bf16;
    for slices in [2, 4] {
        let off = difference(&manifest, slices);
        // The losses themselves are rounded to about 0.02 in bf16.
        assert!(off < 1e-2, "{slices} slices: {off}");
    }
}

#[test]
fn slices_have_the_losses_of_whole_matrices_in_every_block() {
    let mut tied = divisible();
    tied.model.block.tied = true;
    tied.training.stages = 3;
    let mut normed = divisible();
    normed.model.block.query_key_norm = QueryKeyNorm::Head;
    normed.model.block.placement = Placement::Both;
    let mut biased = divisible();
    let all = Biases { query_key_value: true, attention_output: true, feed_forward: true };
    biased.model.block.biases = all;
    biased.model.block.norm = Norm::Layer;
    biased.model.block.ungated = true;
    biased.model.block.activation = Activation::Gelu;
    biased.model.block.placement = Placement::Parallel;
    let mut repeated = divisible();
    repeated.training.recompute = true;
    repeated.training.stages = 2;
    for manifest in [tied, normed, biased, repeated] {
        let off = difference(&manifest, 2);
        assert!(off < 1e-3, "{:?}: {off}", manifest.model.block);
    }
}

#[test]
fn slices_compute_the_same_bits_again() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let mut manifest = divisible();
        manifest.training.dtype = dtype;
        assert_eq!(trained(&manifest, 4), trained(&manifest, 4));
    }
}

#[test]
fn a_pytorch_loop_of_whole_matrices_has_the_same_losses() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = divisible();
    manifest.model.slices = 4;
    manifest.training.stages = 2;
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer::new(&manifest, samples);
    let place = write(&trainer, 0, folder.path());
    let batches: Vec<_> = (0..STEPS).map(|step| trainer.batches(step)).collect();
    let ours: Vec<_> = (0..STEPS).map(|step| trainer.step(step)).collect();
    let trained = write(&trainer, STEPS, folder.path());
    assert_as_pytorch(&manifest, [&place, &trained], &batches, &ours);
    // Text comes from whole matrices.
    let device = Device::open(DeviceChoice::Cpu, 1).expect("a CPU");
    let mut generator = Generator::open(&trained, device).expect("a checkpoint");
    let tokens: Vec<u32> = text()[..8].iter().map(|byte| u32::from(*byte)).collect();
    let at_once = generator.logits(&tokens).expect("logits");
    let last = generator.next_logits(&tokens).expect("logits");
    let apart = at_once[at_once.len() - last.len()..].iter().zip(&last);
    assert!(apart.map(|(one, other)| (one - other).abs()).fold(0.0, f32::max) < 1e-4);
}
