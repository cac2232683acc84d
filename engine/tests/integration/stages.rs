//! Results must not depend on the cut into stages, on recomputation or on the order of
//! microbatches.

use std::collections::BTreeMap;

use crate::common::{Trainer, key, manifest, samples, text};
use bytes::Bytes;
use shoal_engine::{
    Device, DeviceChoice, EngineError, ForwardOutput, Slot, fingerprint, group_elements,
    initial_weights, parameters,
};
use shoal_protocol::ids::{Stage, Step, WeightGroup};
use shoal_protocol::manifest::{Boundary, BoundaryKind, Codecs, Dtype, Manifest};

/// Losses, norms and weights, as bits, after four steps of the run that `change` makes.
pub(crate) fn bits(change: impl FnOnce(&mut Manifest)) -> (Vec<(u64, u64)>, Vec<u32>) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    change(&mut manifest);
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer::new(&manifest, samples);
    let curve = (0..4).map(|step| trainer.step(step));
    (curve.map(|(loss, norm)| (loss.to_bits(), norm.to_bits())).collect(), trainer.weights())
}

/// Asserts that neither stages nor passes that are computed again change a bit of the run that `change` makes.
pub(crate) fn assert_equal_bits_of_cuts(change: impl Fn(&mut Manifest)) {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let bits = |stages, recompute| {
            bits(|manifest| {
                change(manifest);
                manifest.training.dtype = dtype;
                manifest.codec = Codecs::all(dtype.into());
                manifest.training.stages = stages;
                manifest.training.recompute = recompute;
                manifest.optimizer.gradient_clip = 0.0;
            })
            .1
        };
        let whole = bits(1, false);
        for (stages, recompute) in [(2, false), (4, true)] {
            assert!(bits(stages, recompute) == whole, "{dtype:?}, {stages} stages");
        }
    }
}

#[test]
fn the_cut_changes_no_bit() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let cut = |stages| {
            bits(|manifest| {
                manifest.training.dtype = dtype;
                manifest.codec = Codecs::all(dtype.into());
                manifest.training.stages = stages;
                // Each stage's part of the norm is summed separately, so the norm's last bits
                // depend on the cut; without clipping they do not affect the weights.
                manifest.optimizer.gradient_clip = 0.0;
            })
        };
        let (curve, weights) = cut(1);
        for stages in [2, 4] {
            let (cut_curve, cut_weights) = cut(stages);
            assert_eq!(weights, cut_weights);
            for ((loss, norm), (cut_loss, cut_norm)) in curve.iter().zip(&cut_curve) {
                assert_eq!(loss, cut_loss);
                let difference = f64::from_bits(*norm) - f64::from_bits(*cut_norm);
                assert!(difference.abs() < 1e-12);
            }
        }
    }
}

#[test]
fn recomputing_changes_no_bit() {
    let dtypes = [Dtype::F32, Dtype::Bf16];
    for (dtype, codec) in dtypes.into_iter().flat_map(|dtype| [(dtype, "bf16"), (dtype, "int8:16")])
    {
        let run = |recompute| {
            bits(|manifest| {
                manifest.training.dtype = dtype;
                manifest.codec = Codecs::all(codec.parse().expect("a codec"));
                manifest.training.stages = 3;
                manifest.training.recompute = recompute;
            })
        };
        assert_eq!(run(true), run(false));
    }
}

#[test]
fn recomputing_changes_no_bit_with_narrow_boundaries() {
    for (dtype, kind) in [
        (Dtype::F32, BoundaryKind::Bottleneck),
        (Dtype::F32, BoundaryKind::Maxout),
        (Dtype::Bf16, BoundaryKind::Bottleneck),
        (Dtype::Bf16, BoundaryKind::Maxout),
        (Dtype::F32, BoundaryKind::Subspace),
        (Dtype::Bf16, BoundaryKind::Subspace),
    ] {
        let run = |recompute| {
            bits(|manifest| {
                manifest.training.dtype = dtype;
                manifest.codec = Codecs::all("int8:16".parse().expect("a codec"));
                manifest.training.stages = 3;
                manifest.training.recompute = recompute;
                manifest.model.boundary = Some(Boundary { kind, width: 8 });
            })
        };
        assert_eq!(run(true), run(false));
    }
}

#[test]
fn trained_boundaries_change_no_other_initial_weight_and_all_their_weights_learn() {
    for kind in [BoundaryKind::Bottleneck, BoundaryKind::Maxout] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut manifest = manifest();
        manifest.training.stages = 3;
        let plain = weights_by_name(&manifest, |stage| initial_weights(&manifest, stage));
        manifest.model.boundary = Some(Boundary { kind, width: 8 });
        let samples = samples(&mut manifest, folder.path(), &text());
        let mut trainer = Trainer::new(&manifest, samples);
        let hosted = |trainer: &Trainer| {
            weights_by_name(&manifest, |stage| trainer.engine.state(stage).expect("hosted").weights)
        };
        let before = hosted(&trainer);
        for (name, weights) in &plain {
            assert_eq!(before.get(name), Some(weights), "{name}");
        }
        trainer.step(0);
        let after = hosted(&trainer);
        let own = before.iter().filter(|(name, _)| !plain.contains_key(*name));
        for (name, weights) in own.clone() {
            assert!(name.starts_with("shoal.boundary."), "{name}");
            let learnt = weights.iter().zip(&after[name]).filter(|(old, new)| old != new);
            // A feature may never have been the largest of its group.
            assert!(learnt.count() > weights.len() / 2, "{name} learns");
        }
        // Two boundaries: two norms, an expansion, and a bottleneck's matrix.
        assert_eq!(own.count(), if kind == BoundaryKind::Bottleneck { 8 } else { 6 });
    }
}

/// The weights of all stages under their names, as bits.
fn weights_by_name(
    manifest: &Manifest,
    of: impl Fn(Stage) -> Vec<f32>,
) -> BTreeMap<String, Vec<u32>> {
    let mut all = BTreeMap::new();
    for stage in manifest.stages() {
        let flat = of(stage);
        for parameter in parameters(manifest, stage) {
            let bits = flat[parameter.range()].iter().map(|weight| weight.to_bits());
            all.insert(parameter.name.clone(), bits.collect());
        }
    }
    all
}

#[test]
fn a_tied_model_is_the_same_in_one_stage_and_cut() {
    let trained = |stages| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut manifest = manifest();
        manifest.model.block.tied = true;
        manifest.training.stages = stages;
        // The global norm is a sum over other blocks where the vector is cut.
        manifest.optimizer.gradient_clip = 0.0;
        let samples = samples(&mut manifest, folder.path(), &text());
        let mut trainer = Trainer::new(&manifest, samples);
        let losses: Vec<u64> = (0..4).map(|step| trainer.step(step).0.to_bits()).collect();
        let state = |stage| trainer.engine.state(stage).expect("hosted");
        let weights = weights_by_name(&manifest, |stage| state(stage).weights);
        let moments =
            weights_by_name(&manifest, |stage| state(stage).slots[&Slot::SecondMoment].clone());
        (losses, [weights, moments])
    };
    let (losses, whole) = trained(1);
    for stages in [2, 3] {
        let (cut_losses, cut) = trained(stages);
        assert_eq!(cut_losses, losses, "{stages} stages");
        for (mut cut, whole) in cut.into_iter().zip(&whole) {
            let copy = cut.remove("lm_head.weight").expect("the last stage has a copy");
            assert_eq!(copy, cut["model.embed_tokens.weight"], "{stages} stages");
            assert_eq!(cut, *whole, "{stages} stages");
        }
    }
}

#[test]
fn several_in_flight_in_any_order_change_no_bit() {
    for recompute in [false, true] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut manifest = manifest();
        manifest.training.stages = 2;
        manifest.training.recompute = recompute;
        let mut trainers = [(), ()].map(|()| {
            let samples = samples(&mut manifest, folder.path(), &text());
            Trainer::new(&manifest, samples)
        });
        trainers[0].step(0);
        for microbatch in [2, 0, 1] {
            trainers[1].forward(0, microbatch);
        }
        for microbatch in [1, 2, 0] {
            trainers[1].backward(0, microbatch);
        }
        trainers[1].finish(0);
        assert_eq!(trainers[0].weights(), trainers[1].weights());
        for stage in manifest.stages() {
            let hash = |trainer: &Trainer| trainer.engine.state_hash(stage).expect("hosted");
            assert_eq!(hash(&trainers[0]), hash(&trainers[1]));
        }
    }
}

#[test]
fn both_dtypes_learn() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut manifest = manifest();
        manifest.training.dtype = dtype;
        let samples = samples(&mut manifest, folder.path(), &text());
        let mut trainer = Trainer::new(&manifest, samples);
        let held_out = manifest.training.microbatches;
        let before = trainer.forward(0, held_out);
        for step in 0..20 {
            trainer.step(step);
        }
        // The same microbatch again: it left no state.
        let after = trainer.forward(20, held_out);
        assert!(before > 5.3 && after < 4.5, "{before} to {after}");
    }
}

#[test]
fn a_discarded_microbatch_does_not_count() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer::new(&manifest, samples);
    trainer.forward(0, 0);
    let key = key(0, Stage(0), 0);
    trainer.engine.backward(key, None).expect("a backward pass");
    trainer.engine.discard(key);
    assert!(matches!(trainer.engine.accumulate(key), Err(EngineError::NotInFlight(_))));
    let all = 0..group_elements(&trainer.manifest, WeightGroup(0));
    let sums = trainer.engine.export(WeightGroup(0), Step(0), all).expect("hosted");
    assert!(sums.iter().all(|byte| *byte == 0));
    // It may be submitted again.
    trainer.forward(0, 0);
    trainer.backward(0, 0);
}

#[test]
fn malformed_tensors_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    manifest.training.stages = 2;
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer::new(&manifest, samples);
    let batch = trainer.samples.batch(key(0, Stage(0), 0).step, key(0, Stage(0), 0).microbatch);
    let (first, second) = (key(0, Stage(0), 0), key(0, Stage(1), 0));
    let engine = &mut trainer.engine;
    let short = batch.inputs.slice(4..);
    assert!(matches!(
        engine.forward(first, &short, None),
        Err(EngineError::WrongLength { what: "tokens", expected: 128, found: 124 })
    ));
    let unknown = Bytes::from(vec![255; 128]);
    assert!(matches!(
        engine.forward(first, &unknown, None),
        Err(EngineError::UnknownToken { token: u32::MAX, vocabulary: 256 })
    ));
    let Ok(ForwardOutput::Activation(activation)) = engine.forward(first, &batch.inputs, None)
    else {
        panic!("the first of two stages gives an activation")
    };
    assert_eq!(activation.len(), 2 * 16 * 32 * 4);
    assert!(matches!(
        engine.forward(second, &activation, None),
        Err(EngineError::MissingLabels(_))
    ));
    let labels = Some(&batch.labels);
    let short = activation.slice(1..);
    assert!(matches!(engine.forward(second, &short, labels), Err(EngineError::WrongLength { .. })));
    // At an odd address.
    let shifted = Bytes::from([&[0], &activation[..]].concat()).slice(1..);
    let Ok(ForwardOutput::Loss { share: loss, .. }) = engine.forward(second, &shifted, labels)
    else {
        panic!("the last stage gives a loss")
    };
    assert!((loss - 256f32.ln()).abs() < 0.2, "{loss}");
    assert!(matches!(
        engine.forward(second, &activation, labels),
        Err(EngineError::AlreadyInFlight(_))
    ));
    assert!(matches!(engine.backward(first, None), Err(EngineError::MissingGradient(_))));
    assert!(matches!(engine.backward(first, Some(&short)), Err(EngineError::WrongLength { .. })));
    let gradient = engine.backward(second, None).expect("a backward pass").expect("a gradient");
    assert_eq!(gradient.len(), activation.len());
    assert_eq!(engine.backward(first, Some(&gradient)).expect("a backward pass"), None);
    assert!(matches!(engine.backward(first, None), Err(EngineError::NotInFlight(_))));
    assert!(matches!(
        engine.forward(key(0, Stage(2), 0), &activation, None),
        Err(EngineError::NotHosted(Stage(2)))
    ));
    assert!(engine.export(WeightGroup(0), Step(0), 0..usize::MAX >> 8).is_err());
}

#[test]
fn divergence_names_the_tensor() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    manifest.training.gradient_fraction_bits = 56;
    manifest.training.microbatches = 32_768;
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer::new(&manifest, samples);
    // A weight so large that its gradients exceed 2^63 / 32768 / 2^56.
    let mut state = trainer.engine.state(Stage(0)).expect("hosted");
    let head = state.weights.len() - 256 * 32;
    state.weights[head..].iter_mut().enumerate().for_each(|(index, weight)| {
        *weight = if index % 7 == 0 { 1e6 } else { -1e6 };
    });
    trainer.engine.set_state(Stage(0), Step(0), &state).expect("the same stage");
    trainer.forward(0, 5);
    let key = key(0, Stage(0), 5);
    trainer.engine.backward(key, None).expect("a backward pass");
    match trainer.engine.accumulate(key) {
        Err(EngineError::BadGradient { tensor, key: named, .. }) => {
            assert!(tensor.starts_with("model.") || tensor.starts_with("lm_head"), "{tensor}");
            assert_eq!(named, key);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn equal_peers_have_equal_fingerprints() {
    let manifest = manifest();
    let print = |manifest| {
        let device = Device::open(DeviceChoice::Cpu, 1).expect("a CPU");
        fingerprint(manifest, device).expect("room")
    };
    let first = print(&manifest);
    assert_eq!(first, print(&manifest));
    let mut narrow = manifest.clone();
    narrow.training.dtype = Dtype::Bf16;
    assert_ne!(first, print(&narrow));
}

#[test]
fn a_missing_device_is_reported() {
    assert!(matches!("gpu".parse::<DeviceChoice>(), Err(EngineError::UnknownDevice(_))));
    assert_eq!("cuda:3".parse::<DeviceChoice>().expect("a device"), DeviceChoice::Cuda(3));
    let error = Device::open(DeviceChoice::Cuda(4096), 1).expect_err("no machine has so many");
    assert!(matches!(error, EngineError::NoCuda { index: 4096, .. }));
    assert_eq!(error.to_string().lines().count(), 1);
}
