//! Several devices as one engine: the same bits as one device.

use std::path::Path;

use shoal_engine::{Origin, Samples};
use shoal_protocol::ids::{Stage, Step};
use shoal_protocol::manifest::{
    Boundary, BoundaryKind, Dtype, InnerMoments, Lora, LoraTarget, Manifest, Quantisation,
};

use crate::common::islander::Islander;
use crate::common::{self, Trainer, manifest, samples, text};

/// Trains on one device and on islands of so many, each made by a function, and compares losses and states.
fn train_beside<const N: usize>(
    (folder, mut manifest): (&Path, Manifest),
    devices: [usize; N],
    make: fn(&Manifest, Samples, usize) -> Islander,
    steps: u64,
) -> (Trainer, [Islander; N]) {
    let mut samples = || samples(&mut manifest, folder, &text());
    let (one, others) = (samples(), devices.map(|count| (samples(), count)));
    let mut alone = Trainer::new(&manifest, one);
    let mut islands = others.map(|(samples, count)| make(&manifest, samples, count));
    for step in 0..steps {
        let (loss, _) = alone.step(step);
        for island in &mut islands {
            let found = island.step(step);
            assert!((found - loss).abs() < 1e-6, "step {step}: {found} instead of {loss}");
        }
    }
    let expected = alone.states();
    for island in &islands {
        assert!(island.states() == expected, "{} devices have another state", island.devices);
    }
    (alone, islands)
}

/// Trains on one device and on islands that divide the work of each stage.
pub(crate) fn compare(change: impl FnOnce(&mut Manifest)) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    manifest.training.stages = 2;
    manifest.training.microbatches = 7;
    change(&mut manifest);
    train_beside((folder.path(), manifest), [2, 4], Islander::new, 6);
}

/// Trains on one device and on some that divide the stages, and compares states.
fn compare_by_stage(change: impl FnOnce(&mut Manifest)) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    manifest.training.stages = 4;
    manifest.training.microbatches = 5;
    change(&mut manifest);
    let run = (folder.path(), manifest);
    let (alone, mut islands) = train_beside(run, [2, 3], Islander::by_stage, 4);
    let expected = alone.states();
    let written = common::write(&alone, 4, folder.path());
    for island in &mut islands {
        // Stages go, come back with what was drawn, and take what others wrote.
        for stage in expected.keys().copied() {
            island.island.leave(stage).expect("hosted");
            island.island.host(stage).expect("room");
            island.island.restart(stage, &Origin::default()).expect("room");
            assert!(island.states_of(stage) != expected[&stage]);
            island.island.read_stage(stage, Step(4), &written).expect("a whole part");
            assert!(island.states_of(stage) == expected[&stage]);
        }
    }
}

#[test]
fn devices_that_divide_the_stages_compute_the_bits_of_one() {
    compare_by_stage(|_| {});
    compare_by_stage(|manifest| {
        manifest.training.dtype = Dtype::Bf16;
        manifest.model.block.tied = true;
    });
    compare_by_stage(|manifest| manifest.training.staleness = 1);
    compare_by_stage(|manifest| manifest.optimizer.rule = common::muon());
}

#[test]
fn islands_compute_the_bits_of_one_device() {
    compare(|_| {});
}

#[test]
fn islands_compute_the_bits_of_one_device_in_bf16() {
    compare(|manifest| manifest.training.dtype = Dtype::Bf16);
}

#[test]
fn islands_compute_the_bits_of_one_device_with_two_versions() {
    compare(|manifest| manifest.training.staleness = 1);
}

#[test]
fn islands_compute_the_bits_of_one_device_with_a_tied_model() {
    compare(|manifest| {
        manifest.model.block.tied = true;
        manifest.training.stages = 3;
    });
}

#[test]
fn islands_compute_the_bits_of_one_device_with_adapters() {
    for (dtype, base) in
        [(Dtype::F32, None), (Dtype::Bf16, None), (Dtype::Bf16, Some(Quantisation::Nf4))]
    {
        compare(|manifest| {
            manifest.training.dtype = dtype;
            let targets = LoraTarget::ALL.to_vec();
            manifest.lora = Some(Lora { rank: 2, alpha: 4.0, targets, base });
        });
    }
}

#[test]
fn islands_compute_the_bits_of_one_device_with_every_kind_of_slots() {
    for rule in [common::muon(), common::adafactor(), common::sgd()] {
        compare(|manifest| manifest.optimizer.rule = rule);
    }
}

#[test]
fn islands_compute_the_bits_of_one_device_with_a_subspace() {
    compare(|manifest| {
        let boundary = Boundary { kind: BoundaryKind::Subspace, width: 6 };
        manifest.model.boundary = Some(boundary);
    });
}

#[test]
fn an_island_loads_what_one_device_wrote_and_begins_again() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    manifest.training.stages = 2;
    let mut make = || samples(&mut manifest, folder.path(), &text());
    let [one, other] = [make(), make()];
    let mut alone = Trainer::new(&manifest, one);
    let mut island = Islander::new(&manifest, other, 3);
    let initial = island.states();
    (0..3).for_each(|step| _ = alone.step(step));
    let written = common::write(&alone, 3, folder.path());
    // What was counted before belongs to no version that is loaded.
    let _ = island.step(0);
    for stage in manifest.stages() {
        island.island.read_stage(stage, Step(3), &written).expect("a whole part");
        assert!(island.states()[&stage] == alone.engine.state(stage).expect("hosted"));
    }
    alone.step(3);
    island.step(3);
    for stage in manifest.stages() {
        assert!(island.states()[&stage] == alone.engine.state(stage).expect("hosted"));
        island.island.restart(stage, &Origin::default()).expect("room");
    }
    assert!(island.states() == initial);
    island.island.leave(Stage(0)).expect("hosted");
    assert_eq!(island.island.hosted(), 1);
    assert!(island.island.state(Stage(0)).is_err());
    island.island.host(Stage(0)).expect("room");
    assert!(island.states() == initial);
}

#[test]
fn a_device_that_panics_is_an_error_of_later_work() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut island = Islander::new(&manifest, samples, 2);
    island.island.run(1, None, |_| panic!("as the test wants")).expect("it runs");
    let error = island.island.state(Stage(0)).expect_err("one device is gone");
    let stopped = format!("{} has stopped", common::devices(2)[1]);
    assert!(error.to_string().contains(&stopped), "{error}");
}

#[test]
fn islands_compute_the_bits_of_one_device_with_virtual_workers() {
    for moments in [InnerMoments::Zero, InnerMoments::Mean] {
        compare(|manifest| {
            manifest.training.stages = 1;
            manifest.training.microbatches = 5;
            *manifest = common::with_workers(manifest.clone());
            manifest.inner.as_mut().expect("workers").moments = moments;
        });
    }
}

#[test]
fn islands_compute_the_bits_of_one_device_with_adapters_of_virtual_workers() {
    compare(|manifest| {
        manifest.training.stages = 1;
        *manifest = common::with_workers(manifest.clone());
        manifest.lora =
            Some(Lora { rank: 2, alpha: 4.0, targets: LoraTarget::ALL.to_vec(), base: None });
    });
}
