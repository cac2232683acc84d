//! What the tensors of several devices take, beside the formulas.

use shoal_protocol::manifest::{
    DistanceCodec, Dtype, InnerLoop, InnerMoments, Lora, LoraTarget, Rule, Sgd,
};

use super::*;
use crate::cost::memory::{island_overhead, memory_floor, swapped_bytes, swapping_floor};
use crate::device::tensor::byte_count;
use crate::model::parameters::{Parameter, WeightPart, parameter_count, parameters};
use crate::swap::Part;
use crate::testing::manifest;

/// What each of so many workers has.
fn footprints(manifest: &Manifest, span: StageSpan, devices: usize) -> Vec<Footprint> {
    let devices = vec![DeviceChoice::Cpu; devices];
    let island =
        Several::new(manifest, span, (&devices, Arrangement::Passes), (1, Tiers::default()));
    island.expect("a small model").footprints()
}

/// Weights and what the optimizer keeps.
fn state_of(all: &[Footprint]) -> Bytes {
    all.iter().map(|one| one.weights + one.optimizer).sum()
}

#[test]
fn the_state_of_an_island_takes_the_stated_memory() {
    let mut manifest = manifest();
    manifest.training.stages = 2;
    manifest.model.key_value_heads = manifest.model.heads;
    let span = StageSpan::all(2);
    for (slices, dtype, staleness, devices) in [
        (1, Dtype::F32, 0, 2),
        (1, Dtype::Bf16, 0, 3),
        (1, Dtype::Bf16, 1, 2),
        (2, Dtype::F32, 1, 2),
        (2, Dtype::Bf16, 0, 2),
        (2, Dtype::F32, 0, 6),
        (2, Dtype::Bf16, 1, 4),
    ] {
        manifest.model.slices = slices;
        manifest.training.dtype = dtype;
        manifest.training.staleness = staleness;
        let all = footprints(&manifest, span, devices);
        // Gradient, accumulators and mean are no state.
        let count: usize = span.stages().map(|stage| parameter_count(&manifest, stage)).sum();
        let accumulators = 8 * manifest.steps_at_once();
        let floor = memory_floor(&manifest, span, 0) - Bytes(count as u64 * (8 + accumulators));
        let whole = |stage| {
            let is_whole = |one: &Parameter| one.part_of_slice() == WeightPart::Whole;
            let all = parameters(&manifest, stage);
            let whole = all.iter().filter(|one| slices == 1 || is_whole(one));
            whole.map(|one| one.len() as u64).sum::<u64>()
        };
        let whole = span.stages().map(whole).sum::<u64>();
        let groups = if slices == 1 { 1 } else { (devices / usize::from(slices)) as u64 };
        let further_groups = (groups - 1) * (count as u64 - whole);
        let gradients = 4 * ((devices as u64 - 1) * whole + further_groups);
        let sums = (groups - 1) * accumulators * count as u64;
        let further = island_overhead(&manifest, span, devices) - Bytes(gradients + sums);
        let name = format!("{slices} slices, {dtype:?}, {staleness} stale, {devices} workers");
        assert_eq!(state_of(&all), floor + further, "{name}");
        let sums = all.iter().map(|one| one.sums).sum::<Bytes>();
        assert_eq!(sums, Bytes(groups * accumulators * count as u64), "{name}");
    }
}

#[test]
fn what_devices_swap_takes_the_stated_room() {
    let mut manifest = manifest();
    manifest.training.stages = 2;
    manifest.model.key_value_heads = manifest.model.heads;
    manifest.model.slices = 2;
    let stages: Vec<Stage> = manifest.stages().collect();
    let adamw = manifest.optimizer.rule;
    let plain = Rule::Sgd(Sgd { momentum: 0.0, nesterov: false });
    for (devices, dtype, staleness, adapts, rule) in [
        (1, Dtype::F32, 0, false, adamw),
        (1, Dtype::F32, 0, false, plain),
        (1, Dtype::Bf16, 1, false, adamw),
        (2, Dtype::F32, 1, false, adamw),
        (2, Dtype::F32, 0, false, plain),
        (2, Dtype::Bf16, 0, false, adamw),
        (2, Dtype::Bf16, 0, true, adamw),
    ] {
        manifest.optimizer.rule = rule;
        manifest.training.dtype = dtype;
        manifest.training.staleness = staleness;
        manifest.lora = adapts.then(|| Lora {
            rank: 2,
            alpha: 4.0,
            targets: LoraTarget::ALL.to_vec(),
            base: None,
        });
        let name = format!("{devices} devices, {dtype:?}, {staleness} stale, {adapts}, {rule:?}");
        let choices = vec![DeviceChoice::Cpu; devices];
        let tiers = (1, Tiers::default());
        let island =
            Several::new(&manifest, StageSpan::all(2), (&choices, Arrangement::Passes), tiers);
        let island = island.expect("a small model");
        let engines = island.all().expect("workers");
        let bytes = |engine: &Lent<'_>, stage: Stage, of: &dyn Fn(Part) -> bool| -> u64 {
            let tensors = engine.stage(stage).expect("hosted").swappable(false);
            let tensors = tensors.iter().filter(|one| of(one.part));
            tensors.map(|one| byte_count(&one.tensor) as u64).sum()
        };
        let mean = |stage: &Stage| 4 * parameter_count(&manifest, *stage) as u64;
        // Means belong to no device, unless there is one.
        let of_one = u64::from(devices == 1);
        let mut least = 0;
        for engine in &engines {
            let most = stages.iter().map(|stage| {
                let is_weight = |part| !matches!(part, Part::Sums(_) | Part::Frozen);
                let update = bytes(engine, *stage, &is_weight) + of_one * mean(stage);
                let is_read = |part| !matches!(part, Part::Sums(_) | Part::Slot(_));
                let is_sum = |part| part == Part::Sums(0);
                let sums = bytes(engine, *stage, &is_sum) + of_one * mean(stage);
                update.max(sums).max(bytes(engine, *stage, &is_read))
            });
            least += most.max().expect("stages");
        }
        least += (1 - of_one) * stages.iter().map(mean).max().expect("stages");
        let floor = swapping_floor(&manifest, &stages, 1, devices);
        assert_eq!(floor.swapped, Bytes(least), "{name}");
        for stage in &stages {
            let all: u64 = engines.iter().map(|one| bytes(one, *stage, &|_| true)).sum();
            let stated = swapped_bytes(&manifest, *stage, devices);
            assert_eq!(Bytes(all + mean(stage)), stated, "{name}, stage {stage}");
        }
    }
}

#[test]
fn a_virtual_worker_of_several_devices_takes_the_stated_memory() {
    let mut manifest = manifest();
    manifest.model.key_value_heads = manifest.model.heads;
    let optimizer = manifest.optimizer.clone();
    let (codec, moments) = (DistanceCodec::F32, InnerMoments::Zero);
    manifest.inner =
        Some(InnerLoop { steps: 2, microbatches: 2, optimizer, codec, moments, overlap: 0 });
    let span = StageSpan::all(1);
    let count = parameter_count(&manifest, Stage(0)) as u64;
    for (slices, dtype, devices) in
        [(1, Dtype::F32, 2), (1, Dtype::Bf16, 2), (2, Dtype::F32, 2), (2, Dtype::Bf16, 2)]
    {
        manifest.model.slices = slices;
        manifest.training.dtype = dtype;
        let all = footprints(&manifest, span, devices);
        // The run's accumulators, and gradients and means, are no state.
        let floor = memory_floor(&manifest, span, 0) - Bytes(count * (8 + 8 + 4));
        let further = (devices - 1) as u64;
        let whole = |one: &&Parameter| one.part_of_slice() == WeightPart::Whole;
        let shared: u64 = match slices {
            1 => further * count * (4 + 4),
            _ => {
                let all = parameters(&manifest, Stage(0));
                let whole = all.iter().filter(whole).map(|one| one.len() as u64).sum::<u64>();
                further * 4 * (whole + count)
            }
        };
        let stated = floor + island_overhead(&manifest, span, devices) - Bytes(shared);
        let held = state_of(&all) + all.iter().map(|one| one.workers).sum();
        assert_eq!(held, stated, "{slices} slices, {dtype:?}");
    }
}

#[test]
fn workers_that_share_slices_divide_the_layers() {
    let mut manifest = manifest();
    manifest.training.stages = 3;
    manifest.model.layers = 3;
    manifest.model.key_value_heads = manifest.model.heads;
    manifest.model.slices = 2;
    manifest.training.dtype = Dtype::Bf16;
    let span = StageSpan::one(Stage(1));
    let [alone] = footprints(&manifest, span, 1)[..] else { panic!("one worker") };
    let halves = footprints(&manifest, span, 2);
    for half in &halves {
        // Only norms are on both, and shares are whole tensors.
        let is_half = |of: fn(&Footprint) -> Bytes| of(half).0 < of(&alone).0 * 11 / 20;
        assert!(is_half(|one| one.weights) && is_half(|one| one.optimizer), "{halves:?}");
        assert!(is_half(|one| one.sums), "{halves:?}");
    }
}
