//! Slices of a layer's matrices: the same model as whole matrices up to rounding, and the same bits however
//! devices share the slices.

use std::sync::mpsc::channel;

use crate::common::islander::Islander;
use crate::common::{
    self, Trainer, assert_as_pytorch, key, manifest, overlap, samples, text, with_workers, write,
};
use shoal_engine::{Device, DeviceChoice, EngineError, Generator, Island};
use shoal_protocol::ids::{ContentHash, Microbatch, Stage, StageSpan, Step};
use shoal_protocol::manifest::{
    Activation, Biases, Boundary, BoundaryKind, DistanceCodec, Dtype, InnerMoments, LayerAttention,
    Lora, LoraTarget, Manifest, Norm, Placement, Quantisation, QueryKeyNorm,
};

const STEPS: u64 = 20;

/// Steps in which bits are compared: the last ones are after the warm-up.
const COMPARED: u64 = 6;

/// A run whose heads can be cut into 2 or 4 slices; two queries read each key.
pub(crate) fn divisible() -> Manifest {
    let mut manifest = manifest();
    (manifest.model.heads, manifest.model.key_value_heads) = (8, 4);
    manifest.training.steps = STEPS;
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
pub(crate) fn difference(manifest: &Manifest, slices: u16) -> f64 {
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
        // Each partial product keeps 8 bits: 0.003 was measured.
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
    let mut normed_together = divisible();
    normed_together.model.block.query_key_norm = QueryKeyNorm::All;
    normed_together.model.block.placement = Placement::After;
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
    for manifest in [tied, normed, normed_together, biased, repeated] {
        let off = difference(&manifest, 2);
        assert!(off < 1e-3, "{:?}: {off}", manifest.model.block);
    }
}

/// Adapters of some matrices, or of all, beside a frozen model.
fn adapted(targets: &[LoraTarget], base: Option<Quantisation>) -> Manifest {
    let mut manifest = divisible();
    manifest.training.stages = 2;
    manifest.lora = Some(Lora { rank: 3, alpha: 6.0, targets: targets.to_vec(), base });
    // Adapters begin at zero, and move visibly in a few steps.
    manifest.optimizer.learning_rate = 1e-2;
    manifest
}

#[test]
fn adapters_beside_slices_have_the_losses_of_those_beside_whole_matrices() {
    let some = [LoraTarget::KProj, LoraTarget::OProj, LoraTarget::UpProj];
    for (targets, base) in
        [(&LoraTarget::ALL[..], None), (&some, None), (&some, Some(Quantisation::Nf4))]
    {
        let [whole, sliced] = [1, 4].map(|slices| trained(&adapted(targets, base), slices).0);
        assert!(whole[0] - whole[STEPS as usize - 1] > 0.02, "they learn: {whole:?}");
        let off = whole.iter().zip(&sliced).map(|(whole, sliced)| (whole - sliced).abs());
        let off = off.fold(0.0, f64::max);
        assert!(off < 1e-3, "{targets:?}: {off}");
    }
}

#[test]
fn devices_that_share_slices_compute_the_bits_of_one_beside_a_frozen_model() {
    let some = [LoraTarget::QProj, LoraTarget::VProj, LoraTarget::DownProj];
    let nf4 = Some(Quantisation::Nf4);
    for (targets, dtype, base, devices) in [
        (&LoraTarget::ALL[..], Dtype::F32, None, &[2, 4][..]),
        (&some, Dtype::Bf16, None, &[2]),
        (&LoraTarget::ALL, Dtype::F32, nf4, &[2, 4]),
        (&some, Dtype::Bf16, nf4, &[2]),
    ] {
        let mut manifest = adapted(targets, base);
        manifest.model.slices = 4;
        manifest.training.dtype = dtype;
        compare(&manifest, devices);
    }
}

#[test]
fn a_run_goes_on_in_other_slices() {
    let [whole, sliced] = [1, 4].map(|slices| {
        let mut manifest = divisible();
        manifest.model.slices = slices;
        manifest
    });
    assert_eq!(sliced.check_goes_on_from(&whole), Ok(()));
    assert_eq!(whole.check_goes_on_from(&sliced), Ok(()));
    let parameters = |manifest: &Manifest| shoal_engine::parameters(manifest, Stage(0));
    assert_eq!(parameters(&whole), parameters(&sliced));
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

/// Trains a run on one device and on several that share its slices, and compares states.
pub(crate) fn compare(manifest: &Manifest, devices: &[usize]) {
    compare_of(manifest, devices, false);
}

/// Asserts that two and four devices which share four slices have the bits of one, in the run that `change` makes.
pub(crate) fn assert_bits_of_one_device(change: impl Fn(&mut Manifest)) {
    for (stages, dtype, recompute) in [(1, Dtype::F32, false), (2, Dtype::Bf16, true)] {
        let mut manifest = divisible();
        change(&mut manifest);
        manifest.model.slices = 4;
        manifest.training.stages = stages;
        manifest.training.dtype = dtype;
        manifest.training.recompute = recompute;
        compare(&manifest, &[2, 4]);
    }
}

/// Like [`compare`], perhaps of packed documents.
fn compare_of(manifest: &Manifest, devices: &[usize], packed: bool) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest.clone();
    let one = samples(&mut manifest, folder.path(), &text());
    let mut alone = Trainer { packed, ..Trainer::new(&manifest, one) };
    let islander = |devices: &usize| {
        let samples = samples(&mut manifest.clone(), folder.path(), &text());
        let mut island = Islander::new(&manifest, samples, *devices);
        island.packed = packed;
        island
    };
    let mut islands: Vec<Islander> = devices.iter().map(islander).collect();
    for step in 0..manifest.training.steps.min(COMPARED) {
        let (loss, _) = alone.step(step);
        for island in &mut islands {
            let found = island.step(step);
            // Of packed documents a trainer's loss is of the targets, an island's of all tokens.
            assert!(
                packed || (found - loss).abs() < 1e-6,
                "step {step}: {found} instead of {loss}"
            );
        }
    }
    for island in &islands {
        for (stage, state) in island.states() {
            let expected = alone.engine.state(stage).expect("hosted");
            assert!(state == expected, "{} devices have another state", island.devices);
        }
    }
}

#[test]
fn devices_that_share_slices_compute_the_bits_of_one_within_documents() {
    for (dtype, window) in [(Dtype::F32, None), (Dtype::Bf16, Some(5))] {
        let mut manifest = divisible();
        (manifest.model.slices, manifest.training.stages) = (2, 3);
        manifest.training.dtype = dtype;
        let layer = LayerAttention { rotary: Some(0), window };
        manifest.model.block.layers = vec![layer; manifest.model.layers as usize];
        compare_of(&manifest, &[2, 4], true);
        // Whole matrices, of which each device computes with all.
        manifest.model.slices = 1;
        compare_of(&manifest, &[2], true);
    }
}

#[test]
fn devices_that_share_slices_compute_the_bits_of_one() {
    // Four devices for two slices are two groups of two.
    for (slices, devices) in [(2, &[2, 4][..]), (4, &[2, 4])] {
        for (stages, dtype) in
            [(1, Dtype::F32), (1, Dtype::Bf16), (3, Dtype::F32), (3, Dtype::Bf16)]
        {
            let mut manifest = divisible();
            manifest.model.slices = slices;
            manifest.training.stages = stages;
            manifest.training.dtype = dtype;
            compare(&manifest, devices);
        }
    }
}

#[test]
fn devices_that_share_slices_compute_the_bits_of_one_in_every_block() {
    let mut tied = divisible();
    tied.model.block.tied = true;
    tied.training.staleness = 1;
    tied.training.stages = 2;
    let mut normed = divisible();
    normed.model.block.query_key_norm = QueryKeyNorm::Head;
    normed.model.block.placement = Placement::Both;
    normed.training.dtype = Dtype::Bf16;
    let mut normed_together = divisible();
    normed_together.model.block.query_key_norm = QueryKeyNorm::All;
    normed_together.model.block.placement = Placement::After;
    let mut biased = divisible();
    let all = Biases { query_key_value: true, attention_output: true, feed_forward: true };
    biased.model.block.biases = all;
    biased.model.block.placement = Placement::Parallel;
    biased.training.recompute = true;
    biased.training.stages = 2;
    biased.optimizer.rule = common::muon();
    for mut manifest in [tied, normed, normed_together, biased] {
        manifest.model.slices = 4;
        compare(&manifest, &[2]);
    }
}

#[test]
fn devices_that_share_slices_compute_the_bits_of_one_within_a_subspace() {
    for (dtype, tied) in [(Dtype::F32, false), (Dtype::Bf16, true)] {
        let mut manifest = divisible();
        manifest.training.stages = 3;
        manifest.training.dtype = dtype;
        manifest.model.block.tied = tied;
        manifest.model.boundary = Some(Boundary { kind: BoundaryKind::Subspace, width: 8 });
        if !tied {
            let all = Biases { query_key_value: true, attention_output: true, feed_forward: true };
            manifest.model.block.biases = all;
            assert!(difference(&manifest, 4) < 1e-3);
        }
        manifest.model.slices = 4;
        manifest.check().expect("a run");
        compare(&manifest, &[2, 4]);
    }
}

#[test]
fn groups_of_devices_compute_the_bits_of_one() {
    let mut tied = divisible();
    tied.model.block.tied = true;
    tied.training.staleness = 1;
    tied.training.stages = 2;
    let mut reduced = divisible();
    reduced.model.boundary = Some(Boundary { kind: BoundaryKind::Subspace, width: 8 });
    reduced.training.stages = 3;
    reduced.training.dtype = Dtype::Bf16;
    reduced.optimizer.rule = common::muon();
    let mut frozen = adapted(&LoraTarget::ALL, None);
    frozen.training.dtype = Dtype::Bf16;
    let workers = sliced_workers(InnerMoments::Zero, DistanceCodec::F32);
    let mut carried = sliced_workers(InnerMoments::Mean, DistanceCodec::Int8);
    carried.training.dtype = Dtype::Bf16;
    for (mut manifest, devices) in
        [(tied, 4), (reduced, 4), (frozen, 6), (workers, 4), (carried, 6)]
    {
        manifest.model.slices = 2;
        manifest.check().expect("a run");
        compare(&manifest, &[devices]);
    }
}

/// A run of three workers in four slices.
fn sliced_workers(moments: InnerMoments, codec: DistanceCodec) -> Manifest {
    let mut manifest = with_workers(divisible());
    manifest.model.slices = 4;
    let inner = manifest.inner.as_mut().expect("workers");
    (inner.moments, inner.codec) = (moments, codec);
    inner.steps = 3;
    manifest.training.steps = 4;
    manifest
}

#[test]
fn devices_that_train_workers_together_compute_the_bits_of_one() {
    for (moments, codec, dtype) in [
        (InnerMoments::Zero, DistanceCodec::F32, Dtype::F32),
        (InnerMoments::Zero, DistanceCodec::Int2, Dtype::Bf16),
        (InnerMoments::Mean, DistanceCodec::F32, Dtype::Bf16),
        (InnerMoments::Mean, DistanceCodec::Int8, Dtype::F32),
    ] {
        let mut manifest = sliced_workers(moments, codec);
        manifest.training.dtype = dtype;
        manifest.check().expect("a run");
        compare(&manifest, &[2, 4]);
    }
}

#[test]
fn devices_that_train_adapters_of_workers_together_compute_the_bits_of_one() {
    let mut manifest = sliced_workers(InnerMoments::Mean, DistanceCodec::Int8);
    let targets = LoraTarget::ALL.to_vec();
    manifest.lora = Some(Lora { rank: 2, alpha: 4.0, targets, base: Some(Quantisation::Nf4) });
    manifest.check().expect("a run");
    compare(&manifest, &[2]);
}

#[test]
fn devices_that_train_workers_together_while_sums_travel_compute_the_bits_of_one() {
    let mut manifest = sliced_workers(InnerMoments::Zero, DistanceCodec::Int4);
    manifest.training.dtype = Dtype::Bf16;
    let every = manifest.inner.as_ref().expect("workers").steps;
    overlap(&mut manifest, every);
    manifest.check().expect("a run");
    compare(&manifest, &[2]);
}

#[test]
fn devices_that_train_workers_together_compute_the_bits_of_one_by_every_rule() {
    for rule in [common::muon(), common::adafactor(), common::sgd()] {
        for codec in [DistanceCodec::F32, DistanceCodec::Int4] {
            let mut manifest = sliced_workers(InnerMoments::Mean, codec);
            manifest.model.block.tied = true;
            manifest.inner.as_mut().expect("workers").optimizer.rule = rule;
            compare(&manifest, &[4]);
        }
    }
}

#[test]
fn workers_in_slices_have_the_losses_of_those_in_whole_matrices() {
    let manifest = sliced_workers(InnerMoments::Mean, DistanceCodec::F32);
    assert!(difference(&manifest, 4) < 1e-3);
}

/// No device waits for one that gave up.
#[test]
fn a_gradient_out_of_range_is_the_same_error_of_all_devices() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = sliced_workers(InnerMoments::Zero, DistanceCodec::F32);
    manifest.training.gradient_fraction_bits = 56;
    manifest.inner.as_mut().expect("workers").microbatches = 128;
    let samples = samples(&mut manifest, folder.path(), &text());
    let batch = samples.batch(Step(0), Microbatch(0));
    let mut island = Islander::new(&manifest, samples, 2).island;
    let mut state = island.state(Stage(0)).expect("hosted");
    state.weights.iter_mut().for_each(|weight| *weight *= 1e3);
    let (results, passes) = channel();
    for device in island.devices_of_pass(0) {
        let (results, batch, state) = (results.clone(), batch.clone(), state.clone());
        let pass = move |engine: &mut shoal_engine::Engine| {
            engine.set_state(Stage(0), Step(0), &state).expect("the same stage");
            let key = key(0, Stage(0), 0);
            let result = engine.forward(key, &batch.inputs, Some(&batch.labels));
            results.send(result).expect("it is received");
        };
        island.run(device, None, pass).expect("it runs");
    }
    drop(results);
    let errors: Vec<String> =
        passes.iter().map(|pass| pass.expect_err("out of range").to_string()).collect();
    assert_eq!(errors.len(), 2);
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("accumulator's range"), "{}", errors[0]);
}

#[test]
fn devices_that_cannot_share_slices_equally_are_refused() {
    let mut manifest = divisible();
    manifest.model.slices = 4;
    let devices = [DeviceChoice::Cpu; 3];
    for (slices, count) in [(4, 3), (2, 3)] {
        manifest.model.slices = slices;
        let all = StageSpan::all(1);
        let error = Island::new(&manifest, all, &devices[..count], 1).expect_err("unequal");
        let refused = matches!(error, EngineError::SlicesOfDevices { devices: 3, .. });
        assert!(refused, "{slices} slices, {error}");
    }
}

#[test]
fn a_device_that_stops_ends_the_waits_of_the_others() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = divisible();
    manifest.model.slices = 2;
    let samples = samples(&mut manifest, folder.path(), &text());
    let batch = samples.batch(Step(0), Microbatch(0));
    let mut island = Islander::new(&manifest, samples, 2).island;
    let (results, passes) = channel();
    let pass = move |engine: &mut shoal_engine::Engine| {
        let result = engine.forward(key(0, Stage(0), 0), &batch.inputs, Some(&batch.labels));
        results.send(result).expect("it is received");
    };
    island.run(0, None, pass).expect("it runs");
    island.run(1, None, |_| panic!("as the test wants")).expect("it runs");
    let error = passes.recv().expect("the pass ends").expect_err("half of a product is missing");
    assert!(error.to_string().contains("another device of this peer has stopped"), "{error}");
}
