//! Stages whose weights a device has only while passes read them: the same bits as with everything on the device.

use shoal_engine::{
    EngineError, ForwardOutput, LowerTier, Origin, Tiers, device_floor, swapping_floor,
};
use shoal_protocol::ids::{Stage, Step};
use shoal_protocol::manifest::{
    Boundary, BoundaryKind, Dtype, Lora, LoraTarget, Manifest, Quantisation,
};
use shoal_protocol::units::Bytes;

use crate::common::islander::Islander;
use crate::common::{Trainer, device, four_stages, hashes, key, samples, text};

/// Memory of a device for so many stages' weights.
fn room_for(manifest: &Manifest, stages: u64) -> Bytes {
    let floor = device_floor(manifest, 1);
    floor.passes + Bytes(stages * floor.weights.0)
}

/// Trains a few steps with all on the device, and with room for the weights of one, two and all stages, the last time
/// with a disk below the memory. Compares losses and states.
pub(crate) fn compare(change: impl FnOnce(&mut Manifest)) {
    let (folder, mut manifest) = four_stages(change);
    let mut make = || samples(&mut manifest, folder.path(), &text());
    let [first, rest @ ..] = [make(), make(), make(), make(), make()];
    let mut resident = Trainer::new(&manifest, first);
    let losses: Vec<_> = (0..3).map(|step| resident.step(step)).collect();
    let expected = hashes(&resident.engine, &manifest);
    let stages: Vec<Stage> = manifest.stages().collect();
    let floor = swapping_floor(&manifest, &stages, manifest.training.microbatches, 1);
    let memory = floor.resident + floor.swapped + Bytes(8 * 4096);
    let lower = || LowerTier { folder: folder.path().to_owned(), memory, resident: 0 };
    let cases = [(1, false), (2, false), (4, false), (1, true)];
    for ((room, below), samples) in cases.iter().zip(rest) {
        let name = format!("room for {room}, a disk below: {below}");
        let tiers = Tiers { device: Some(room_for(&manifest, *room)), lower: below.then(lower) };
        let mut trainer = Trainer::with_tiers(&manifest, samples, tiers);
        for (step, loss) in losses.iter().enumerate() {
            assert_eq!(trainer.step(step as u64), *loss, "{name}, step {step}");
        }
        assert_eq!(hashes(&trainer.engine, &manifest), expected, "{name}");
        assert_eq!(trainer.engine.swaps(), *below, "{name}");
        let stats = trainer.engine.swap_stats().expect("weights were copied");
        assert!(stats.copied > Bytes(0) && (stats.read > Bytes(0)) == *below, "{name}: {stats:?}");
    }
}

#[test]
fn weights_that_pass_through_the_device_compute_the_bits_of_those_that_stay() {
    compare(|_| {});
}

#[test]
fn with_bf16_too() {
    compare(|manifest| manifest.training.dtype = Dtype::Bf16);
}

#[test]
fn with_two_versions_too() {
    compare(|manifest| {
        manifest.training.staleness = 1;
        manifest.training.dtype = Dtype::Bf16;
    });
}

#[test]
fn with_slices_and_tied_weights_too() {
    compare(|manifest| {
        manifest.model.slices = 2;
        manifest.model.block.tied = true;
    });
}

/// Devices that compute slices together, each with room for its part of one stage's weights, or of all; and replicas.
#[test]
fn several_devices_have_weights_only_while_passes_read_them() {
    let changes: [fn(&mut Manifest); 4] = [
        |_| {},
        |manifest| {
            manifest.training.dtype = Dtype::Bf16;
            manifest.training.staleness = 1;
            manifest.model.block.tied = true;
        },
        |manifest| {
            manifest.training.dtype = Dtype::Bf16;
            manifest.lora =
                Some(Lora { rank: 4, alpha: 8.0, targets: LoraTarget::ALL.to_vec(), base: None });
        },
        |manifest| {
            manifest.training.dtype = Dtype::Bf16;
            let targets = LoraTarget::ALL.to_vec();
            manifest.lora =
                Some(Lora { rank: 4, alpha: 8.0, targets, base: Some(Quantisation::Nf4) });
        },
    ];
    for (change, slices) in changes.into_iter().flat_map(|change| [(change, 1), (change, 2)]) {
        let (folder, mut manifest) = four_stages(|manifest| {
            manifest.model.slices = slices;
            change(manifest);
        });
        let mut make = || samples(&mut manifest, folder.path(), &text());
        let [first, rest @ ..] = [make(), make(), make()];
        let mut alone = Trainer::new(&manifest, first);
        let losses: Vec<f64> = (0..3).map(|step| alone.step(step).0).collect();
        let expected = alone.states();
        let floor = device_floor(&manifest, slices.into());
        for (room, samples) in [1, 4].into_iter().zip(rest) {
            let device = Some(floor.passes + Bytes(room * floor.weights.0));
            let tiers = Tiers { device, lower: None };
            let mut island = Islander::with_tiers(&manifest, samples, 2, tiers);
            for (step, loss) in losses.iter().enumerate() {
                let found = island.step(step as u64);
                assert!((found - loss).abs() < 1e-6, "step {step}: {found} instead of {loss}");
            }
            assert!(island.states() == expected, "{slices} slices, room for {room}");
            let copied = island.island.swap_stats().expect("weights were copied").copied;
            assert!(copied > Bytes(0));
        }
    }
}

#[test]
fn with_a_subspace_too() {
    let kind = BoundaryKind::Subspace;
    compare(|manifest| manifest.model.boundary = Some(Boundary { kind, width: 6 }));
}

#[test]
fn with_adapters_too() {
    for base in [None, Some(Quantisation::Nf4)] {
        compare(|manifest| {
            manifest.training.dtype = Dtype::Bf16;
            let targets = LoraTarget::ALL.to_vec();
            manifest.lora = Some(Lora { rank: 4, alpha: 8.0, targets, base });
        });
    }
}

/// The most tries until a copy ends before it is needed: a GPU copies beside this process.
const TRIES: usize = 100;

#[test]
fn weights_are_fetched_beside_the_pass_before() {
    let tries = if device().is_processor() { 1 } else { TRIES };
    assert!((0..tries).any(|_| is_fetched_in_time()), "the second stage's weights were there");
}

/// Whether the second stage's weights are there when the first pass is over.
fn is_fetched_in_time() -> bool {
    let (folder, mut manifest) = four_stages(|_| {});
    let samples = samples(&mut manifest, folder.path(), &text());
    let tiers = |stages| Tiers { device: Some(room_for(&manifest, stages)), lower: None };
    let mut trainer = Trainer::with_tiers(&manifest, samples, tiers(2));
    let late = |trainer: &Trainer| trainer.engine.swap_stats().expect("copied").late;
    trainer.engine.fetch_ahead(Stage(1), None);
    let batch = trainer.batch(0, 0);
    let first = trainer.engine.forward(key(0, Stage(0), 0), &batch.inputs, None);
    let ForwardOutput::Activation(activation) = first.expect("a first pass") else {
        panic!("an activation")
    };
    let before = late(&trainer);
    assert!(before > Bytes(0), "nothing was there for the first pass");
    trainer.engine.forward(key(0, Stage(1), 0), &activation, None).expect("a second pass");
    late(&trainer) == before
}

#[test]
fn checkpoints_restarts_and_leaving_work() {
    let (folder, mut manifest) = four_stages(|manifest| {
        let targets = LoraTarget::ALL.to_vec();
        manifest.lora = Some(Lora { rank: 2, alpha: 4.0, targets, base: Some(Quantisation::Nf4) });
    });
    let samples = samples(&mut manifest, folder.path(), &text());
    let tiers = Tiers { device: Some(room_for(&manifest, 1)), lower: None };
    let mut trainer = Trainer::with_tiers(&manifest, samples, tiers);
    let initial = hashes(&trainer.engine, &manifest);
    let loss = trainer.step(0);
    let trained = hashes(&trainer.engine, &manifest);
    let saved = tempfile::tempdir().expect("a temporary folder");
    for stage in manifest.stages() {
        trainer.engine.write_stage(stage, saved.path()).expect("room");
        trainer.engine.restart(stage, &Origin::default()).expect("room");
    }
    assert_eq!(hashes(&trainer.engine, &manifest), initial);
    assert_eq!(trainer.step(0), loss, "from the first version again");
    for stage in manifest.stages() {
        trainer.engine.read_stage(stage, Step(1), saved.path()).expect("just written");
    }
    assert_eq!(hashes(&trainer.engine, &manifest), trained);
    trainer.engine.leave(Stage(2)).expect("hosted");
    trainer.engine.host(Stage(2)).expect("room");
    assert_eq!(trainer.engine.state_hash(Stage(2)).expect("hosted"), initial[2]);
}

#[test]
fn a_device_that_cannot_hold_a_stage_says_so() {
    let (folder, mut manifest) = four_stages(|_| {});
    let samples = samples(&mut manifest, folder.path(), &text());
    let tiers = Tiers { device: Some(device_floor(&manifest, 1).passes), lower: None };
    let mut trainer = Trainer::with_tiers(&manifest, samples, tiers);
    let batch = trainer.batch(0, 0);
    let error = trainer.engine.forward(key(0, Stage(0), 0), &batch.inputs, None);
    let error = error.expect_err("there is room for no weights");
    assert!(matches!(error, EngineError::DeviceBudget { .. }), "{error}");
    assert!(error.to_string().contains("--device-memory"), "{error}");
}
