//! Virtual workers that several stages train together, exchange by exchange.

mod common;

use bytes::Bytes;
use common::{Trainer, key, manifest, muon, samples, text, with_workers};
use shoal_engine::{EngineError, ForwardOutput, WorkerForward};
use shoal_protocol::ids::{ClaimKey, Exchange, Microbatch, Stage, Step};
use shoal_protocol::manifest::{Dtype, InnerMoments, Lora, LoraTarget, Manifest};

const OUTER_STEPS: u64 = 3;

/// Three workers of three stages, that meet after every five updates of two microbatches.
fn workers(change: impl Fn(&mut Manifest)) -> Manifest {
    let mut manifest = with_workers(manifest());
    manifest.training.steps = OUTER_STEPS;
    manifest.training.stages = 3;
    change(&mut manifest);
    manifest
}

fn trainer(mut manifest: Manifest) -> (Trainer, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let samples = samples(&mut manifest, folder.path(), &text());
    (Trainer::new(&manifest, samples), folder)
}

/// The tokens and labels of an exchange; none of the last.
fn words(trainer: &Trainer, (step, worker, exchange): (u64, u32, u32)) -> Option<[Bytes; 2]> {
    let manifest = &trainer.manifest;
    let passes = manifest.passes_of_exchange(Microbatch(worker), Exchange(exchange));
    let size = u64::from(manifest.training.microbatch_size);
    let rows = u64::from(passes.start) * size..u64::from(passes.end) * size;
    let batch = trainer.samples.batch_of(Step(step), Microbatch(worker), rows);
    (!passes.is_empty()).then_some([batch.inputs, batch.labels])
}

/// Takes an exchange up through all stages.
fn up(trainer: &mut Trainer, work: (u64, u32, u32)) -> Option<ForwardOutput> {
    let (step, worker, exchange) = work;
    let words = words(trainer, work);
    let (mut input, mut note) = (words.clone().map(|[tokens, _]| tokens), 0.0);
    for stage in trainer.manifest.stages().collect::<Vec<_>>() {
        let labels = words.as_ref().map(|[_, labels]| labels);
        let words = input.as_ref().zip(labels).map(|(input, labels)| [input, labels]);
        let key = key(step, stage, worker);
        let ran = trainer.engine.forward_worker(key, Exchange(exchange), words, note);
        let WorkerForward { activation, note: next, loss } = ran.expect("a forward pass");
        (input, note) = (activation, next);
        if loss.is_some() {
            return loss;
        }
    }
    None
}

/// Takes an exchange down again.
fn down(trainer: &mut Trainer, (step, worker, exchange): (u64, u32, u32)) {
    let (mut gradient, mut note) = (None, 0.0);
    for stage in trainer.manifest.stages().collect::<Vec<_>>().into_iter().rev() {
        let (key, engine) = (key(step, stage, worker), &mut trainer.engine);
        let ran = engine.backward_worker(key, Exchange(exchange), gradient.as_ref(), note);
        (gradient, note) = ran.expect("a backward pass");
    }
}

/// Trains a worker, with the passes of an update under way together or one by one. Returns its loss.
fn train(trainer: &mut Trainer, step: u64, worker: u32, at_once: u32) -> f32 {
    let count = trainer.manifest.exchanges_of(Microbatch(worker));
    let mut loss = None;
    for first in (0..count).step_by(at_once as usize) {
        let some = first..(first + at_once).min(count);
        for exchange in some.clone() {
            loss = up(trainer, (step, worker, exchange)).or(loss);
        }
        for exchange in some {
            down(trainer, (step, worker, exchange));
        }
    }
    for stage in trainer.manifest.stages() {
        trainer.engine.accumulate(key(step, stage, worker)).expect("it is pending");
    }
    let Some(ForwardOutput::Loss { share, .. }) = loss else { panic!("it ends in a loss") };
    share
}

/// The losses of all outer steps, and the weights at the end.
fn trained(manifest: Manifest, at_once: u32) -> (Vec<f32>, Vec<u32>) {
    let (mut trainer, _folder) = trainer(manifest);
    let mut losses = Vec::new();
    for step in 0..OUTER_STEPS {
        for worker in 0..trainer.manifest.training.microbatches {
            losses.push(train(&mut trainer, step, worker, at_once));
        }
        trainer.finish(step);
    }
    (losses, trainer.weights())
}

/// The same with the whole model in one stage.
fn trained_whole(mut manifest: Manifest) -> (Vec<f32>, Vec<u32>) {
    manifest.training.stages = 1;
    let (mut trainer, _folder) = trainer(manifest);
    let mut losses = Vec::new();
    for step in 0..OUTER_STEPS {
        for worker in 0..trainer.manifest.training.microbatches {
            losses.push(trainer.forward(step, worker));
            trainer.backward(step, worker);
        }
        trainer.finish(step);
    }
    (losses, trainer.weights())
}

fn inner_clip(manifest: &mut Manifest, clip: f64) {
    manifest.inner.as_mut().expect("workers").optimizer.gradient_clip = clip;
}

#[test]
fn stages_train_a_worker_with_the_bits_of_the_whole_model() {
    let lora = Lora { rank: 2, alpha: 4.0, targets: LoraTarget::ALL.to_vec() };
    for (dtype, moments, lora) in [
        (Dtype::F32, InnerMoments::Zero, None),
        (Dtype::F32, InnerMoments::Mean, None),
        (Dtype::Bf16, InnerMoments::Zero, None),
        (Dtype::F32, InnerMoments::Mean, Some(lora)),
    ] {
        let manifest = workers(|manifest| {
            manifest.training.dtype = dtype;
            manifest.lora.clone_from(&lora);
            manifest.inner.as_mut().expect("workers").moments = moments;
            // Without it nothing depends on the order in which the stages' norms are added.
            inner_clip(manifest, 0.0);
        });
        let whole = trained_whole(manifest.clone());
        assert!(trained(manifest.clone(), 1) == whole, "{dtype:?}, {moments:?}, one by one");
        assert!(trained(manifest, 2) == whole, "{dtype:?}, {moments:?}, two at once");
    }
}

#[test]
fn a_worker_is_clipped_by_the_norm_of_all_stages() {
    let manifest = workers(|manifest| inner_clip(manifest, 0.01));
    let (losses, weights) = trained(manifest.clone(), 2);
    let (whole_losses, whole) = trained_whole(manifest.clone());
    let number = |bits: &u32| f32::from_bits(*bits);
    let off = weights.iter().zip(&whole).map(|(a, b)| (number(a) - number(b)).abs());
    assert!(off.fold(0.0, f32::max) < 1e-6);
    assert!(losses.iter().zip(&whole_losses).all(|(a, b)| (a - b).abs() < 1e-5), "{losses:?}");
    let unclipped = trained(workers(|manifest| inner_clip(manifest, 0.0)), 2);
    assert!(unclipped.1 != weights, "the clip changes something");
}

#[test]
fn a_worker_that_begins_anew_leaves_nothing_of_its_earlier_passes() {
    let manifest = workers(|manifest| {
        manifest.inner.as_mut().expect("workers").optimizer.rule = muon();
    });
    let sums = |disturb: &dyn Fn(&mut Trainer)| {
        let (mut trainer, _folder) = trainer(manifest.clone());
        disturb(&mut trainer);
        train(&mut trainer, 0, 1, 2);
        trainer.gradients(0)
    };
    let undisturbed = sums(&|_| {});
    let given_up = sums(&|trainer| {
        for exchange in 0..5 {
            up(trainer, (0, 1, exchange));
            if exchange < 4 {
                down(trainer, (0, 1, exchange));
            }
        }
        let stages: Vec<Stage> = trainer.manifest.stages().collect();
        stages.into_iter().for_each(|stage| trainer.engine.discard(key(0, stage, 1)));
    });
    assert!(given_up == undisturbed);
    // Another worker is half way.
    let beside = sums(&|trainer| {
        for exchange in 0..3 {
            up(trainer, (0, 2, exchange));
            down(trainer, (0, 2, exchange));
        }
    });
    assert!(beside == undisturbed);
}

#[test]
fn an_exchange_without_those_before_it_is_refused() {
    let (mut trainer, _folder) = trainer(workers(|_| {}));
    let [tokens, labels] = words(&trainer, (0, 0, 1)).expect("a pass");
    let first: ClaimKey = key(0, Stage(0), 0);
    let engine = &mut trainer.engine;
    let refused = engine.forward_worker(first, Exchange(1), Some([&tokens, &labels]), 0.0);
    assert!(matches!(refused, Err(EngineError::NotInFlight(key)) if key == first), "{refused:?}");
    let refused = engine.backward_worker(first, Exchange(0), None, 0.0);
    assert!(matches!(refused, Err(EngineError::NotInFlight(key)) if key == first), "{refused:?}");
}
