//! Stages that are swapped through little memory: the same bits as with everything in memory.

use shoal_engine::{
    ForwardOutput, LowerTier, Origin, Tiers, device_floor, group_elements, optimizer_elements,
    parameter_count, parameters, swapping_floor,
};
use shoal_protocol::ids::{Stage, Step, WeightGroup};
use shoal_protocol::manifest::{
    Boundary, BoundaryKind, Dtype, Lora, LoraTarget, Manifest, Quantisation, Rule, Sgd,
};
use shoal_protocol::units::Bytes;

use crate::common::islander::Islander;
use crate::common::{self, Trainer, four_stages, hashes, key, samples, text};

/// The least memory for the stages' tensors, in whole pages for each of a stage's tensors.
fn least(manifest: &Manifest) -> Bytes {
    let stages: Vec<Stage> = manifest.stages().collect();
    let floor = swapping_floor(manifest, &stages, 1, 1);
    floor.swapped + Bytes(8 * 4096)
}

/// Trains a few steps in all the memory and in the least, and compares losses and states.
pub(crate) fn compare(change: impl FnOnce(&mut Manifest)) {
    let (folder, mut manifest) = four_stages(change);
    let mut make = || samples(&mut manifest, folder.path(), &text());
    let [one, other] = [make(), make()];
    let mut resident = Trainer::new(&manifest, one);
    let memory = least(&manifest);
    let mut swapped = Trainer::swapping(&manifest, other, folder.path(), (memory, 0));
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
    let plain = Rule::Sgd(Sgd { momentum: 0.0, nesterov: false });
    for rule in [common::muon(), common::adafactor(), common::sgd(), plain] {
        compare(|manifest| manifest.optimizer.rule = rule);
    }
}

#[test]
fn checkpoints_restarts_and_leaving_work_where_stages_are_swapped() {
    let (folder, mut manifest) = four_stages(|_| {});
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer::swapping(&manifest, samples, folder.path(), (least(&manifest), 0));
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

/// Has a run train adapters.
fn adapt(manifest: &mut Manifest, base: Option<Quantisation>) {
    let targets = LoraTarget::ALL.to_vec();
    manifest.lora = Some(Lora { rank: 4, alpha: 8.0, targets, base });
}

/// Devices that compute slices together, each of which swaps its share.
#[test]
fn several_devices_swap_their_shares() {
    let changes: [fn(&mut Manifest); 8] = [
        |_| {},
        |manifest| manifest.training.dtype = Dtype::Bf16,
        |manifest| {
            manifest.training.dtype = Dtype::Bf16;
            manifest.training.staleness = 1;
            manifest.model.block.tied = true;
        },
        |manifest| {
            manifest.training.dtype = Dtype::Bf16;
            adapt(manifest, None);
        },
        |manifest| adapt(manifest, Some(Quantisation::Nf4)),
        |manifest| manifest.optimizer.rule = common::muon(),
        |manifest| {
            manifest.optimizer.rule = Rule::Sgd(Sgd { momentum: 0.0, nesterov: false });
        },
        |manifest| {
            // The embedding is more than half of its stage: the share of the first of four devices is nothing.
            (manifest.model.slices, manifest.model.key_value_heads) = (4, 4);
            manifest.model.intermediate = 24;
        },
    ];
    for (change, device_memory) in changes.into_iter().flat_map(|one| [(one, false), (one, true)]) {
        let (folder, mut manifest) = four_stages(|manifest| {
            manifest.model.slices = 2;
            change(manifest);
        });
        let mut make = || samples(&mut manifest, folder.path(), &text());
        let [one, other] = [make(), make()];
        let mut alone = Trainer::new(&manifest, one);
        let stages: Vec<Stage> = manifest.stages().collect();
        let devices = usize::from(manifest.model.slices);
        let embedding = parameters(&manifest, stages[0])[0].len();
        assert!(devices == 2 || 2 * embedding > parameter_count(&manifest, stages[0]));
        let floor = swapping_floor(&manifest, &stages, manifest.training.microbatches, devices);
        // Whole pages for each of a stage's tensors.
        let memory = floor.swapped + Bytes(devices as u64 * 9 * 4096);
        let lower = LowerTier {
            folder: folder.path().to_owned(),
            memory: floor.resident + memory,
            resident: 0,
        };
        let device = device_floor(&manifest, devices);
        let device = device_memory.then(|| device.passes + device.weights);
        let tiers = Tiers { device, lower: Some(lower) };
        let mut island = Islander::with_tiers(&manifest, other, devices, tiers);
        for step in 0..4 {
            let (loss, found) = (alone.step(step).0, island.step(step));
            assert!((found - loss).abs() < 1e-6, "step {step}: {found} instead of {loss}");
        }
        assert!(island.states() == alone.states());
        assert!(island.island.swaps());
        let stats = island.island.swap_stats().expect("they swap");
        assert!(stats.peak <= memory && stats.read > Bytes(0), "{stats:?} in {memory}");
        for one in island.island.footprints() {
            let held = one.weights + one.frozen + one.optimizer + one.sums;
            assert!(held > Bytes(0) && held < memory, "{one:?} in {memory}");
            let images = device_floor(&manifest, devices).weights;
            assert!(one.images <= images && (one.images > Bytes(0)) == device_memory, "{one:?}");
        }
        // A stage goes and comes again.
        let (saved, last) = (tempfile::tempdir().expect("a folder"), stages[3]);
        alone.engine.write_stage(last, saved.path()).expect("room");
        island.island.leave(last).expect("hosted");
        island.island.host(last).expect("room");
        island.island.read_stage(last, Step(4), saved.path()).expect("just written");
        assert!(island.states()[&last] == alone.engine.state(last).expect("hosted"));
    }
}

/// A stage comes during a step, so that all are swapped, and goes again: graphs and sums of before are still of use.
#[test]
fn stages_may_be_swapped_for_a_while() {
    let (folder, mut manifest) = four_stages(|_| {});
    let mut make = || samples(&mut manifest, folder.path(), &text());
    let [one, other] = [make(), make()];
    let mut whole = Trainer::new(&manifest, one);
    let room = (least(&manifest), 3);
    let mut part = Trainer::swapping(&manifest, other, folder.path(), room);
    let last = Stage(3);
    part.engine.leave(last).expect("hosted");
    for microbatch in 0..manifest.training.microbatches {
        let batch = part.batch(0, microbatch);
        whole.forward(0, microbatch);
        let mut input = batch.inputs;
        for stage in [0, 1, 2].map(Stage) {
            let output = part.engine.forward(key(0, stage, microbatch), &input, None);
            let Ok(ForwardOutput::Activation(activation)) = output else { panic!("{output:?}") };
            input = activation;
        }
        let swaps = microbatch % 2 == 0;
        if swaps {
            part.engine.host(last).expect("room");
        }
        assert_eq!(part.engine.swaps(), swaps);
        let key = |stage| key(0, stage, microbatch);
        let mut gradient = whole.engine.backward(key(last), None).expect("it was just forward");
        for stage in [2, 1, 0].map(Stage) {
            let [here, there] = [&mut part, &mut whole].map(|trainer| {
                let passed = trainer.engine.backward(key(stage), gradient.as_ref());
                trainer.engine.accumulate(key(stage)).expect("in range");
                passed.expect("it was just forward")
            });
            assert_eq!(here, there, "stage {stage}, microbatch {microbatch}");
            gradient = here;
        }
        if swaps {
            part.engine.leave(last).expect("hosted");
        }
    }
    for stage in [0, 1, 2] {
        let weights = WeightGroup(stage);
        let all = 0..group_elements(&manifest, weights);
        let sums = |trainer: &Trainer| trainer.engine.export(weights, Step(0), all.clone());
        assert_eq!(sums(&part).expect("hosted"), sums(&whole).expect("hosted"), "stage {stage}");
    }
    let stats = part.engine.swap_stats().expect("it swapped");
    assert!(stats.read > Bytes(0), "{stats:?}");
}
