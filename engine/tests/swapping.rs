//! Stages that are swapped through little memory: the same bits as with everything in memory.

mod common;

use shoal_engine::{Engine, Origin, optimizer_elements, parameter_count, swapping_floor};
use shoal_protocol::ids::{ContentHash, Stage, StageSpan, Step};
use shoal_protocol::manifest::{Boundary, BoundaryKind, Dtype, Manifest};
use shoal_protocol::units::Bytes;

use self::common::{Trainer, manifest, samples, text};

/// A run of four stages, with its samples' folder.
fn run(change: impl FnOnce(&mut Manifest)) -> (tempfile::TempDir, Manifest) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    manifest.training.stages = 4;
    change(&mut manifest);
    samples(&mut manifest, folder.path(), &text());
    (folder, manifest)
}

/// The least memory for the stages' tensors, in whole pages for each of a stage's tensors.
fn least(manifest: &Manifest) -> Bytes {
    let floor = swapping_floor(manifest, StageSpan::all(manifest.training.stages), 1);
    floor.swapped + Bytes(8 * 4096)
}

fn hashes(engine: &Engine, manifest: &Manifest) -> Vec<ContentHash> {
    manifest.stages().map(|stage| engine.state_hash(stage).expect("hosted")).collect()
}

/// Trains a few steps in all the memory and in the least, and compares losses and states.
fn compare(change: impl FnOnce(&mut Manifest)) {
    let (folder, mut manifest) = run(change);
    let mut make = || samples(&mut manifest, folder.path(), &text());
    let [one, other] = [make(), make()];
    let mut resident = Trainer::new(&manifest, one);
    let memory = least(&manifest);
    let mut swapped = Trainer::swapping(&manifest, other, folder.path(), memory);
    for step in 0..4 {
        assert_eq!(resident.step(step), swapped.step(step), "step {step}");
    }
    assert_eq!(hashes(&resident.engine, &manifest), hashes(&swapped.engine, &manifest));
    let size = |stage| 3 * parameter_count(&manifest, stage) + optimizer_elements(&manifest, stage);
    let all: usize = manifest.stages().map(size).sum();
    let stats = swapped.engine.swap_stats().expect("it swaps");
    assert!(Bytes(4 * all as u64) > Bytes(2 * memory.0), "the state exceeds the memory twice");
    assert!(stats.peak <= memory && stats.read > Bytes(0), "{stats:?} in {memory}");
    assert_eq!(resident.engine.swap_stats(), None);
}

#[test]
fn swapped_stages_compute_the_bits_of_resident_ones() {
    compare(|_| {});
}

#[test]
fn swapped_stages_in_a_subspace_compute_the_bits_of_resident_ones() {
    let kind = BoundaryKind::Subspace;
    compare(|manifest| manifest.model.boundary = Some(Boundary { kind, width: 6 }));
}

#[test]
fn swapped_stages_in_bf16_compute_the_bits_of_resident_ones() {
    compare(|manifest| manifest.training.dtype = Dtype::Bf16);
}

#[test]
fn swapped_stages_with_two_versions_compute_the_bits_of_resident_ones() {
    compare(|manifest| manifest.training.staleness = 1);
}

#[test]
fn swapped_stages_of_a_tied_model_compute_the_bits_of_resident_ones() {
    compare(|manifest| manifest.model.block.tied = true);
}

#[test]
fn swapped_stages_with_other_optimizers_compute_the_bits_of_resident_ones() {
    for rule in [common::muon(), common::adafactor(), common::sgd()] {
        compare(|manifest| manifest.optimizer.rule = rule);
    }
}

#[test]
fn checkpoints_restarts_and_leaving_work_where_stages_are_swapped() {
    let (folder, mut manifest) = run(|_| {});
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer::swapping(&manifest, samples, folder.path(), least(&manifest));
    let initial = hashes(&trainer.engine, &manifest);
    trainer.step(0);
    let trained = hashes(&trainer.engine, &manifest);
    assert_ne!(initial, trained);
    let saved = tempfile::tempdir().expect("a temporary folder");
    for stage in manifest.stages() {
        trainer.engine.write_stage(stage, saved.path()).expect("room");
        trainer.engine.restart(stage, &Origin::default()).expect("room");
    }
    assert_eq!(hashes(&trainer.engine, &manifest), initial);
    for stage in manifest.stages() {
        trainer.engine.read_stage(stage, Step(1), saved.path()).expect("just written");
    }
    assert_eq!(hashes(&trainer.engine, &manifest), trained);
    trainer.engine.leave(Stage(2)).expect("hosted");
    assert!(trainer.engine.state_hash(Stage(2)).is_err());
    trainer.engine.host(Stage(2)).expect("room");
    assert_eq!(trainer.engine.state_hash(Stage(2)).expect("hosted"), initial[2]);
}
