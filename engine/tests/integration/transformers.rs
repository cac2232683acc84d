//! Compares the engine with PyTorch and transformers.

use crate::common::{Trainer, assert_as_pytorch, manifest, numbers, python, samples, text, write};
use serde_json::json;
use shoal_engine::{Device, DeviceChoice, Generator};
use shoal_protocol::manifest::{Boundary, BoundaryKind, Manifest};

/// The bottleneck's width is not a divisor; both kinds leave a stage of two layers and stages of
/// one.
const BOUNDARIES: [Boundary; 2] = [
    Boundary { kind: BoundaryKind::Bottleneck, width: 13 },
    Boundary { kind: BoundaryKind::Maxout, width: 8 },
];

#[test]
fn transformers_computes_the_same_logits_from_a_checkpoint() {
    let mut manifest = manifest();
    manifest.training.stages = 3;
    assert_same_logits(manifest, "checkpoint.py");
}

#[test]
fn a_checkpoint_of_a_subspace_is_a_plain_llama() {
    let mut manifest = manifest();
    manifest.training.stages = 3;
    manifest.model.boundary = Some(Boundary { kind: BoundaryKind::Subspace, width: 6 });
    assert_same_logits(manifest, "checkpoint.py");
}

#[test]
fn a_checkpoint_with_trained_boundaries_matches_pytorch_and_is_not_a_llama() {
    for boundary in BOUNDARIES {
        let mut manifest = manifest();
        manifest.training.stages = 3;
        manifest.model.boundary = Some(boundary);
        assert_same_logits(manifest, "logits.py");
    }
}

/// Trains a run and compares the logits of its checkpoint with those of a script.
fn assert_same_logits(mut manifest: Manifest, script: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    manifest.model.context = 48;
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer::new(&manifest, samples);
    for step in 0..20 {
        trainer.step(step);
    }
    let place = write(&trainer, 20, folder.path());
    let tokens: Vec<u32> = text()[100..148].iter().map(|byte| u32::from(*byte)).collect();
    let device = Device::open(DeviceChoice::Cpu, 1).expect("a CPU");
    let ours = Generator::open(&place, device).expect("whole").logits(&tokens).expect("logits");
    let place = place.to_str().expect("a plain path");
    let theirs = numbers(&python(script, &[place, &json!(tokens).to_string()]));
    assert_eq!(ours.len(), theirs.len());
    let differences = ours.iter().zip(&theirs).map(|(ours, theirs)| f64::from(*ours) - theirs);
    let largest = differences.map(f64::abs).fold(0.0, f64::max);
    assert!(largest < 1e-4, "the logits differ by {largest}");
    let spread = theirs.iter().copied().fold(0.0, f64::max);
    assert!(spread > 0.5, "the model has learnt nothing that could differ: {spread}");
}

#[test]
fn a_pytorch_loop_has_the_same_losses() {
    let mut manifest = manifest();
    manifest.training.stages = 2;
    assert_same_losses(manifest, false);
}

#[test]
fn a_pytorch_loop_trains_the_same_boundaries() {
    for boundary in BOUNDARIES {
        let mut manifest = manifest();
        manifest.training.stages = 3;
        manifest.model.boundary = Some(boundary);
        assert_same_losses(manifest, false);
    }
}

#[test]
fn a_pytorch_loop_with_stale_weights_has_the_same_losses() {
    let mut manifest = manifest();
    manifest.training.stages = 2;
    manifest.training.staleness = 1;
    assert_same_losses(manifest, false);
}

#[test]
fn a_pytorch_loop_has_the_same_losses_of_packed_documents_with_masks() {
    let mut manifest = manifest();
    manifest.training.stages = 3;
    assert_same_losses(manifest, true);
}

#[test]
fn recomputed_passes_see_documents_and_masks() {
    let mut manifest = manifest();
    manifest.training.stages = 2;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let weights = |recompute, stages| {
        let mut manifest = manifest.clone();
        manifest.training.recompute = recompute;
        manifest.training.stages = stages;
        let samples = samples(&mut manifest, folder.path(), &text());
        let mut trainer = Trainer { packed: true, ..Trainer::new(&manifest, samples) };
        for step in 0..3 {
            trainer.step(step);
        }
        trainer.weights()
    };
    let kept = weights(false, 1);
    assert!(kept == weights(true, 3), "a recomputed pass differs");
}

/// Trains a run, and the same run in PyTorch alone, and compares losses, gradient norms and
/// weights.
fn assert_same_losses(mut manifest: Manifest, packed: bool) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer { packed, ..Trainer::new(&manifest, samples) };
    let place = write(&trainer, 0, folder.path());
    let batches: Vec<_> = (0..20).map(|step| trainer.batches(step)).collect();
    let ours: Vec<_> = (0..20).map(|step| trainer.step(step)).collect();
    let trained = write(&trainer, 20, folder.path());
    assert_as_pytorch(&manifest, [&place, &trained], &batches, &ours);
}
