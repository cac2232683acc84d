//! Runs that go on from a checkpoint in another shape.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::{self, Trainer, assert_as_pytorch, manifest, samples, text, write};
use serde_json::{Value, json};
use shoal_engine::{Checkpoint, Origin, Slot, StartFiles, parameters};
use shoal_protocol::ids::{ContentHash, Microbatch, Step};
use shoal_protocol::manifest::{
    Adam, Boundary, BoundaryKind, Lora, LoraTarget, Manifest, Rule, Start,
};

/// The manifest of a run that goes on from a checkpoint, apart from what `change` changes.
fn later(folder: &Path, change: impl FnOnce(&mut Manifest)) -> Manifest {
    let checkpoint = Checkpoint::open(folder).expect("a checkpoint");
    let mut manifest = Manifest { start: None, ..checkpoint.manifest().clone() };
    change(&mut manifest);
    let (step, description) = (checkpoint.step(), checkpoint.description());
    let samples = manifest.samples_after(checkpoint.manifest(), step);
    let (checkpoint, bytes) = (description.hash, description.bytes);
    manifest.start = Some(Start { checkpoint, bytes, step, samples });
    manifest
}

/// The files of a checkpoint's folder by their hashes.
fn find(folder: &Path) -> impl Fn(&ContentHash) -> Option<PathBuf> + Send + Sync + 'static {
    let checkpoint = Checkpoint::open(folder).expect("a checkpoint");
    let place = |name: &String| folder.join(name);
    let files: BTreeMap<_, _> =
        checkpoint.files().iter().map(|file| (file.hash, place(&file.name))).collect();
    move |hash| files.get(hash).cloned()
}

fn start_files(manifest: &Manifest, folder: &Path) -> Result<StartFiles, String> {
    let description = fs::read(folder.join("shoal.json")).expect("readable");
    StartFiles::new(Arc::new(manifest.clone()), &description, find(folder))
}

/// A run that goes on from the checkpoint in a folder.
fn go_on(folder: &Path, change: impl FnOnce(&mut Manifest)) -> Trainer {
    let mut manifest = later(folder, change);
    let start = start_files(&manifest, folder).expect("a checkpoint of the same model");
    let place = tempfile::tempdir().expect("a temporary folder");
    let samples = samples(&mut manifest, place.path(), &text());
    let mut trainer = Trainer::new(&manifest, samples);
    let origin = Origin { base: None, start: Some(start) };
    for stage in manifest.stages() {
        trainer.engine.load(stage, &origin).expect("whole files");
    }
    trainer
}

/// A run that has done three steps.
fn trained(change: impl FnOnce(&mut Manifest)) -> Trainer {
    let mut manifest = manifest();
    manifest.model.layers = 6;
    manifest.training.stages = 3;
    change(&mut manifest);
    let place = tempfile::tempdir().expect("a temporary folder");
    let samples = samples(&mut manifest, place.path(), &text());
    let mut trainer = Trainer::new(&manifest, samples);
    for step in 0..3 {
        trainer.step(step);
    }
    trainer
}

/// The bits of each weight and of its moments.
fn by_name(trainer: &Trainer) -> BTreeMap<String, [Vec<u32>; 3]> {
    let mut all = BTreeMap::new();
    for stage in trainer.manifest.stages() {
        let state = trainer.engine.state(stage).expect("hosted");
        for parameter in parameters(&trainer.manifest, stage) {
            let moments = [Slot::FirstMoment, Slot::SecondMoment].map(|slot| &state.slots[&slot]);
            let vectors = [&state.weights, moments[0], moments[1]];
            let bits = vectors.map(|vector| {
                vector[parameter.range()].iter().map(|number| number.to_bits()).collect()
            });
            all.insert(parameter.name, bits);
        }
    }
    all
}

fn hashes(trainer: &Trainer) -> Vec<ContentHash> {
    let hash = |stage| trainer.engine.state_hash(stage).expect("hosted");
    trainer.manifest.stages().map(hash).collect()
}

/// Another number of stages has the same state, and so has the first number again.
fn assert_kept(first: &Trainer, stages: u16) {
    let place = tempfile::tempdir().expect("a temporary folder");
    let (earlier, again) = (place.path().join("earlier"), place.path().join("again"));
    fs::create_dir(&earlier).expect("writable");
    fs::create_dir(&again).expect("writable");
    let written = write(first, 3, &earlier);
    let second = go_on(&written, |manifest| {
        manifest.training.stages = stages;
        manifest.training.microbatches = 2;
    });
    let (before, mut after) = (by_name(first), by_name(&second));
    let moved = before.values().any(|[_, moment, _]| moment.iter().any(|bits| *bits != 0));
    assert!(moved, "there are no moments that could be lost");
    if first.manifest.model.block.tied && first.manifest.training.stages == 1 {
        let copy = after.remove("lm_head.weight").expect("the last stage has a copy");
        assert_eq!(copy, before["model.embed_tokens.weight"]);
    }
    assert!(before == after, "a weight or moment differs in {stages} stages");
    let third = go_on(&write(&second, 3, &again), |manifest| {
        manifest.training.stages = first.manifest.training.stages;
    });
    assert_eq!(hashes(first), hashes(&third));
}

#[test]
fn weights_and_moments_stay_in_other_stages_and_back() {
    assert_kept(&trained(|_| {}), 5);
}

#[test]
fn what_other_optimizers_keep_stays_in_other_stages_and_back() {
    for rule in [common::muon(), common::adafactor(), common::sgd()] {
        let first = trained(|manifest| {
            manifest.optimizer.rule = rule;
            manifest.model.block.tied = true;
        });
        let place = tempfile::tempdir().expect("a temporary folder");
        let (earlier, again) = (place.path().join("earlier"), place.path().join("again"));
        fs::create_dir(&earlier).expect("writable");
        fs::create_dir(&again).expect("writable");
        let second = go_on(&write(&first, 3, &earlier), |manifest| manifest.training.stages = 5);
        assert_ne!(hashes(&second).len(), hashes(&first).len());
        let third = go_on(&write(&second, 3, &again), |manifest| manifest.training.stages = 3);
        assert_eq!(hashes(&first), hashes(&third), "{rule:?}");
    }
}

#[test]
fn both_copies_of_a_tied_matrix_stay() {
    for (stages, others) in [(3, 5), (1, 4)] {
        let first = trained(|manifest| {
            manifest.training.stages = stages;
            manifest.model.block.tied = true;
        });
        assert_kept(&first, others);
    }
}

#[test]
fn adapters_and_their_moments_stay() {
    let targets = vec![LoraTarget::QProj, LoraTarget::DownProj];
    let lora = Lora { rank: 2, alpha: 4.0, targets, base: None };
    assert_kept(&trained(|manifest| manifest.lora = Some(lora)), 5);
}

#[test]
fn boundaries_stay_with_the_same_stages_alone() {
    for kind in [BoundaryKind::Bottleneck, BoundaryKind::Subspace] {
        let first = trained(|manifest| manifest.model.boundary = Some(Boundary { kind, width: 8 }));
        assert_kept(&first, 3);
        let place = tempfile::tempdir().expect("a temporary folder");
        let written = write(&first, 3, place.path());
        let manifest = later(&written, |manifest| manifest.training.stages = 2);
        let error = start_files(&manifest, &written).expect_err("refused");
        assert!(error.contains("the number of stages must stay"), "{error}");
    }
}

/// As one loop in PyTorch with the same changes at the same step.
#[test]
fn losses_go_on_as_in_a_pytorch_loop() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    manifest.model.layers = 5;
    manifest.training.stages = 3;
    let samples = samples(&mut manifest, place.path(), &text());
    let mut first = Trainer::new(&manifest, samples);
    let initial = write(&first, 0, place.path());
    let mut steps: Vec<Value> = (0..10).map(|step| first.batches(step)).collect();
    let mut ours: Vec<_> = (0..10).map(|step| first.step(step)).collect();
    let mut second = go_on(&write(&first, 10, place.path()), |manifest| {
        manifest.training.stages = 5;
        manifest.training.microbatches = 2;
        manifest.training.microbatch_size = 4;
        manifest.training.steps = 30;
        let adam = Adam { beta1: 0.8, beta2: 0.99, ..Adam::DEFAULT };
        manifest.optimizer.rule = Rule::Adamw(adam);
    });
    let mut rest: Vec<Value> = (10..20).map(|step| second.batches(step)).collect();
    rest[0]["betas"] = json!([0.8, 0.99]);
    steps.extend(rest);
    ours.extend((10..20).map(|step| second.step(step)));
    let last = write(&second, 20, place.path());
    assert_as_pytorch(&manifest, [&initial, &last], &steps, &ours);
}

#[test]
fn the_same_shape_goes_on_as_if_never_stopped() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut first = trained(|_| {});
    let mut second = go_on(&write(&first, 3, place.path()), |_| {});
    for step in 3..6 {
        assert_eq!(first.step(step), second.step(step));
    }
    assert_eq!(hashes(&first), hashes(&second));
}

/// A start has one version, so the first step of a run with stale reads lacks no update.
#[test]
fn the_first_step_of_a_run_with_stale_reads_reads_the_start() {
    for earlier in [0, 1] {
        let place = tempfile::tempdir().expect("a temporary folder");
        let first = trained(|manifest| manifest.training.staleness = earlier);
        let written = write(&first, 3, place.path());
        let [mut fresh, mut stale] =
            [0, 1].map(|staleness| go_on(&written, |run| run.training.staleness = staleness));
        for stage in stale.manifest.stages() {
            let state = stale.engine.state(stage).expect("hosted");
            assert_eq!(state.stale_weights, [state.weights]);
        }
        assert_eq!(fresh.step(3), stale.step(3));
        assert_eq!(by_name(&fresh), by_name(&stale));
        // From the second step on one update is missing.
        assert_ne!(fresh.step(4), stale.step(4));
    }
}

#[test]
fn no_sample_comes_twice_in_an_epoch_when_the_batch_changes() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let first = trained(|_| {});
    let second = go_on(&write(&first, 3, place.path()), |manifest| {
        manifest.training.microbatches = 5;
        manifest.training.microbatch_size = 1;
    });
    let starts = |trainer: &Trainer, step| -> Vec<u64> {
        let training = &trainer.manifest.training;
        let rows = 0..u64::from(training.microbatch_size);
        let microbatches = (0..training.microbatches).map(Microbatch);
        let start = |microbatch, row| trainer.samples.start(Step(step), microbatch, row);
        microbatches.flat_map(|one| rows.clone().map(move |row| start(one, row))).collect()
    };
    let mut together: Vec<u64> = (0..3).flat_map(|step| starts(&first, step)).collect();
    together.extend((3..10).flat_map(|step| starts(&second, step)));
    // The order of a run of one sample a step.
    let one = trained(|manifest| {
        manifest.training.microbatches = 1;
        manifest.training.microbatch_size = 1;
    });
    let order: Vec<u64> = (0..together.len() as u64).flat_map(|step| starts(&one, step)).collect();
    assert_eq!(together, order);
}

#[test]
fn what_does_not_fit_is_refused() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let first = trained(|_| {});
    let written = write(&first, 3, place.path());
    let refusal = |change: &dyn Fn(&mut Manifest)| {
        let manifest = later(&written, |manifest| change(manifest));
        start_files(&manifest, &written).expect_err("refused")
    };
    let error = refusal(&|manifest| manifest.model.hidden = 64);
    assert!(error.contains("model.hidden = 32 there and 64 here"), "{error}");
    let mut manifest = later(&written, |_| {});
    manifest.start.as_mut().expect("it goes on").step = Step(4);
    let error = start_files(&manifest, &written).expect_err("refused");
    assert!(error.contains("it is of version 3, and the run begins at 4"), "{error}");

    let manifest = later(&written, |manifest| manifest.training.stages = 6);
    let start = start_files(&manifest, &written).expect("it fits");
    let stage = manifest.last_stage();
    let wanted: Vec<_> = start.files_of(stage).expect("listed").into_iter().cloned().collect();
    let names: Vec<&str> = wanted.iter().map(|file| file.name.as_str()).collect();
    let expected = ["model-00003-of-00003.safetensors", "optimizer-00003-of-00003.safetensors"];
    assert_eq!(names, expected);
    assert_eq!(start.stages_with(&wanted[0]).len(), 2, "two stages share a file");
    let path = written.join(&wanted[1].name);
    let whole = fs::read(&path).expect("readable");
    let mut flipped = whole.clone();
    flipped[whole.len() - 1] ^= 1;
    for bytes in [&whole[..whole.len() - 8], &flipped] {
        fs::write(&path, bytes).expect("writable");
        let error = start.read_stage(stage).expect_err("damaged").to_string();
        assert!(error.contains("is damaged"), "{error}");
    }
    fs::remove_file(&path).expect("it is there");
    assert!(start.read_stage(stage).is_err());
}
