//! Virtual workers: what a worker does in a step, and the update of the weights at a meeting.

use std::fs;

use crate::common::{
    Trainer, key, manifest, muon, numbers, overlap, python, samples, text, with_workers, write,
};
use serde_json::{Value, json};
use shoal_engine::{Checkpoint, EngineError, FixedPoint, ForwardOutput, StageState, learning_rate};
use shoal_protocol::ids::{Microbatch, Stage, Step};
use shoal_protocol::manifest::{
    DistanceCodec, Dtype, InnerMoments, Lora, LoraTarget, Manifest, Rule, Sgd,
};

const OUTER_STEPS: u64 = 4;

/// Three workers that meet after every five updates of two microbatches.
fn workers() -> Manifest {
    let mut manifest = with_workers(manifest());
    manifest.training.steps = OUTER_STEPS;
    manifest
}

fn trainer(manifest: &mut Manifest) -> (Trainer, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let samples = samples(manifest, folder.path(), &text());
    (Trainer::new(manifest, samples), folder)
}

/// One worker's updates in an outer step as JSON, as steps of `reference.py`.
fn updates(trainer: &Trainer, step: u64, worker: u32) -> Vec<Value> {
    let of_worker = trainer.manifest.of_worker().expect("workers");
    let (microbatches, context) = (of_worker.training.microbatches, of_worker.model.context);
    let updates = u64::from(trainer.manifest.inner.as_ref().expect("workers").steps);
    let batch = trainer.samples.batch(Step(step), Microbatch(worker));
    let rows = |bytes: &[u8]| -> Vec<Vec<u32>> {
        let words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
        words.collect::<Vec<_>>().chunks(context as usize).map(<[u32]>::to_vec).collect()
    };
    let (inputs, labels) = (rows(&batch.inputs), rows(&batch.labels));
    let size = of_worker.training.microbatch_size as usize;
    let mut passes = inputs.chunks(size).zip(labels.chunks(size));
    let update = |update| {
        let pass = |(inputs, labels)| json!({ "inputs": inputs, "labels": labels });
        let of_update: Vec<Value> = passes.by_ref().take(microbatches as usize).map(pass).collect();
        let rate = learning_rate(&of_worker, Step(step * updates + update));
        json!({ "microbatches": of_update, "learning_rate": rate })
    };
    (0..updates).map(update).collect()
}

fn with_moments(moments: InnerMoments) -> Manifest {
    let mut manifest = workers();
    manifest.inner.as_mut().expect("workers").moments = moments;
    manifest
}

#[test]
fn a_pytorch_loop_with_workers_has_the_same_losses_and_weights() {
    for moments in [InnerMoments::Zero, InnerMoments::Mean] {
        compare_with_pytorch(with_moments(moments));
    }
    let mut manifest = workers();
    overlap(&mut manifest, 5);
    compare_with_pytorch(manifest);
}

#[test]
fn a_worker_that_joins_the_newest_meeting_on_its_way_is_that_of_a_pytorch_loop() {
    let mut manifest = workers();
    overlap(&mut manifest, 2);
    compare_with_pytorch(manifest);
}

fn compare_with_pytorch(mut manifest: Manifest) {
    let (mut trainer, folder) = trainer(&mut manifest);
    let first = write(&trainer, 0, folder.path());
    let all = |step| -> Vec<_> {
        (0..manifest.training.microbatches).map(|worker| updates(&trainer, step, worker)).collect()
    };
    let outer_steps: Vec<_> = (0..OUTER_STEPS).map(all).collect();
    let passes = manifest.passes() as f64;
    let losses: Vec<f64> = (0..OUTER_STEPS).map(|step| trainer.step(step).0 / passes).collect();
    let trained = write(&trainer, OUTER_STEPS, folder.path());
    let inner = &manifest.inner.as_ref().expect("workers").optimizer;
    let adam = inner.rule.adam().expect("AdamW");
    let run = json!({
        "checkpoint": first,
        "trained": trained,
        "outer_steps": outer_steps,
        "rate": 0.7,
        "momentum": 0.6,
        "carries_moments": manifest.carried_rule().is_some(),
        "overlap": manifest.inner.as_ref().expect("workers").overlap,
        "beta1": adam.beta1,
        "beta2": adam.beta2,
        "epsilon": adam.epsilon,
        "weight_decay": inner.weight_decay,
        "gradient_clip": inner.gradient_clip,
    });
    let path = folder.path().join("workers.json");
    fs::write(&path, run.to_string()).expect("writable");
    let theirs = python("workers.py", &[path.to_str().expect("a plain path")]);
    for (step, (ours, theirs)) in losses.iter().zip(numbers(&theirs["losses"])).enumerate() {
        assert!((ours - theirs).abs() < 1e-4, "outer step {step}: {ours} instead of {theirs}");
    }
    let [off, moved] = ["off", "moved"].map(|name| theirs[name].as_f64().expect("a number"));
    // The first update of new moments goes by the signs of gradients, and some of these are rounding errors.
    assert!(off < 1e-2 * moved, "weights are off by {off} after they moved by {moved}");
}

#[test]
fn a_worker_starts_from_the_steps_weights_whatever_was_done_before() {
    for moments in [InnerMoments::Zero, InnerMoments::Mean] {
        compare_orders(moments);
    }
}

fn compare_orders(moments: InnerMoments) {
    for (dtype, rule) in [(Dtype::F32, None), (Dtype::Bf16, None), (Dtype::F32, Some(muon()))] {
        let mut manifest = with_moments(moments);
        manifest.training.dtype = dtype;
        let inner = manifest.inner.as_mut().expect("workers");
        inner.optimizer.rule = rule.unwrap_or(inner.optimizer.rule);
        let sums = |order: &[u32]| {
            let (mut trainer, _folder) = trainer(&mut manifest.clone());
            for worker in order {
                let _ = trainer.forward(0, *worker);
                trainer.backward(0, *worker);
            }
            trainer.gradients(0)
        };
        assert!(sums(&[0, 1, 2]) == sums(&[2, 0, 1]), "{dtype:?}");
        // One that was given up leaves nothing behind.
        let (mut trainer, _folder) = trainer(&mut manifest.clone());
        let _ = trainer.forward(0, 1);
        trainer.engine.discard(key(0, Stage(0), 1));
        for worker in [1, 2, 0] {
            let _ = trainer.forward(0, worker);
            trainer.backward(0, worker);
        }
        assert!(trainer.gradients(0) == sums(&[0, 1, 2]), "{dtype:?}");
    }
}

#[test]
fn a_rounded_way_ends_near_the_exact_one() {
    for moments in [InnerMoments::Zero, InnerMoments::Mean] {
        compare_rounded(moments);
    }
}

fn compare_rounded(moments: InnerMoments) {
    let trained = |codec| {
        let mut manifest = with_moments(moments);
        manifest.inner.as_mut().expect("workers").codec = codec;
        let (mut trainer, _folder) = trainer(&mut manifest);
        let losses: Vec<f64> = (0..OUTER_STEPS).map(|step| trainer.step(step).0).collect();
        (trainer.weights(), losses[OUTER_STEPS as usize - 1] / manifest.passes() as f64)
    };
    let (exact, loss) = trained(DistanceCodec::F32);
    for (codec, most) in [(DistanceCodec::Int8, 0.01), (DistanceCodec::Int2, 0.1)] {
        let (weights, rounded) = trained(codec);
        assert!(weights != exact, "{codec:?} rounds");
        assert!((rounded - loss).abs() < most, "{codec:?}: {rounded} instead of {loss}");
    }
}

#[test]
fn carried_moments_are_in_a_checkpoint() {
    for rule in [None, Some(muon())] {
        let mut manifest = with_moments(InnerMoments::Mean);
        let inner = manifest.inner.as_mut().expect("workers");
        inner.optimizer.rule = rule.unwrap_or(inner.optimizer.rule);
        let (mut first, folder) = trainer(&mut manifest);
        (0..2).for_each(|step| _ = first.step(step));
        let checkpoint = Checkpoint::open(&write(&first, 2, folder.path())).expect("whole");
        let state = checkpoint.stage(Stage(0)).expect("whole");
        let hash = |trainer: &Trainer| trainer.engine.state_hash(Stage(0)).expect("hosted");
        let goes_on = |state: &StageState| {
            let (mut second, _folder) = trainer(&mut manifest.clone());
            second.engine.set_state(Stage(0), Step(2), state).expect("the same stage");
            let _ = second.step(2);
            hash(&second)
        };
        let _ = first.step(2);
        assert_eq!(goes_on(&state), hash(&first));
        for slot in state.slots.keys() {
            let mut without = state.clone();
            without.slots.remove(slot);
            assert_ne!(goes_on(&without), hash(&first), "{slot:?}");
        }
    }
}

/// A single worker whose last weights become the run's is a run without workers, but for a rounding of its way.
#[test]
fn a_worker_trains_adapters_beside_the_frozen_weights() {
    let mut manifest = workers();
    manifest.lora =
        Some(Lora { rank: 2, alpha: 4.0, targets: LoraTarget::ALL.to_vec(), base: None });
    manifest.training.microbatches = 1;
    manifest.optimizer.rule = Rule::Sgd(Sgd { momentum: 0.0, nesterov: false });
    manifest.optimizer.learning_rate = 1.0;
    manifest.check().expect("a run");
    let (mut meeting, _folder) = trainer(&mut manifest);
    let mut plain = meeting.manifest.of_worker().expect("workers");
    let (mut alone, _folder) = trainer(&mut plain);
    let begun = alone.weights();
    let passes = manifest.passes() as f64;
    let loss = meeting.step(0).0 / passes;
    let losses: Vec<f64> = (0..5).map(|step| alone.step(step).0).collect();
    let mean = losses.iter().sum::<f64>() / losses.len() as f64;
    assert!((loss - mean).abs() < 1e-5, "{loss} instead of {mean}");
    let off = |from: &[u32], to: &[u32]| {
        let floats =
            |bits: &[u32]| bits.iter().map(|bits| f32::from_bits(*bits)).collect::<Vec<_>>();
        let pairs = floats(from).into_iter().zip(floats(to));
        pairs.map(|(from, to)| (from - to).abs()).fold(0.0, f32::max)
    };
    let (met, trained) = (meeting.weights(), alone.weights());
    assert!(off(&begun, &trained) > 1e-3, "it trains");
    assert!(off(&met, &trained) < 1e-6, "{}", off(&met, &trained));
}

#[test]
fn held_out_microbatches_are_read_with_the_weights_of_the_step() {
    let mut manifest = workers();
    let (mut trainer, _folder) = trainer(&mut manifest);
    let held_out = manifest.training.microbatches;
    let before = trainer.forward(0, held_out);
    let _ = trainer.step(0);
    let after = trainer.forward(1, held_out);
    assert!(after < before, "{after} after {before}");
    let error = trainer.engine.backward(key(1, Stage(0), held_out), None);
    assert!(matches!(error, Err(EngineError::NotInFlight(_))), "it leaves no state");
}

#[test]
fn an_inner_gradient_out_of_range_is_named_and_changes_nothing() {
    let mut manifest = workers();
    manifest.training.gradient_fraction_bits = 56;
    manifest.inner.as_mut().expect("workers").microbatches = 128;
    let (mut trainer, _folder) = trainer(&mut manifest);
    let mut state = trainer.engine.state(Stage(0)).expect("hosted");
    state.weights.iter_mut().for_each(|weight| *weight *= 1e3);
    trainer.engine.set_state(Stage(0), Step(0), &state).expect("the same stage");
    let batch = trainer.samples.batch(Step(0), Microbatch(0));
    let key = key(0, Stage(0), 0);
    let error = trainer.engine.forward(key, &batch.inputs, Some(&batch.labels));
    assert!(matches!(error, Err(EngineError::BadGradient { .. })), "{error:?}");
    let all = FixedPoint::of(&manifest);
    let zeros = trainer.engine.read_sums(
        manifest.weight_groups().next().expect("a group"),
        Step(0),
        0..8,
        |sums| all.reduce(&[sums]).expect("one part"),
    );
    assert!(zeros.expect("hosted").iter().all(|byte| *byte == 0));
    assert!(!matches!(error, Ok(ForwardOutput::Loss { .. })));
}
