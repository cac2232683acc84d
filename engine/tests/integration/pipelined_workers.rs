//! Virtual workers whose passes are exchanges: of several stages, or joined to the newest meeting on their way.

use crate::common::{Trainer, key, manifest, muon, overlap, samples, text, with_workers};
use shoal_engine::EngineError;
use shoal_protocol::ids::{ClaimKey, Exchange, Stage};
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

/// The losses of all outer steps, and the weights at the end.
fn trained(manifest: Manifest, at_once: u32) -> (Vec<f32>, Vec<u32>) {
    let (mut trainer, _folder) = trainer(manifest);
    let mut losses = Vec::new();
    for step in 0..OUTER_STEPS {
        for worker in 0..trainer.manifest.training.microbatches {
            losses.push(trainer.train_worker((step, worker), at_once));
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
    let lora = Lora { rank: 2, alpha: 4.0, targets: LoraTarget::ALL.to_vec(), base: None };
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
fn workers_join_a_meeting_on_their_way_with_the_same_bits_in_any_stages() {
    let joined = |stages, dtype, updates| {
        let manifest = workers(|manifest| {
            manifest.training.stages = stages;
            manifest.training.dtype = dtype;
            inner_clip(manifest, 0.0);
            overlap(manifest, updates);
            manifest.check().expect("a run");
        });
        trained(manifest, 2)
    };
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let whole = joined(1, dtype, 2);
        assert!(joined(3, dtype, 2) == whole, "{dtype:?}");
        assert!(joined(3, dtype, 3).1 != whole.1, "{dtype:?}: it matters when they join");
    }
}

/// If the meeting before changed nothing, it does not matter when a worker joins it.
#[test]
fn a_worker_that_joins_what_it_began_from_is_one_that_waited() {
    let first_step = |updates| {
        let (mut trainer, _folder) = trainer(workers(|manifest| overlap(manifest, updates)));
        let loss = trainer.train_worker((0, 1), 2);
        (loss, trainer.gradients(0))
    };
    assert!(first_step(2) == first_step(0));
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
        trainer.train_worker((0, 1), 2);
        trainer.gradients(0)
    };
    let undisturbed = sums(&|_| {});
    let given_up = sums(&|trainer| {
        for exchange in 0..5 {
            trainer.up((0, 1, exchange));
            if exchange < 4 {
                trainer.down((0, 1, exchange));
            }
        }
        let stages: Vec<Stage> = trainer.manifest.stages().collect();
        stages.into_iter().for_each(|stage| trainer.engine.discard(key(0, stage, 1)));
    });
    assert!(given_up == undisturbed);
    // Another worker is half way.
    let beside = sums(&|trainer| {
        for exchange in 0..3 {
            trainer.up((0, 2, exchange));
            trainer.down((0, 2, exchange));
        }
    });
    assert!(beside == undisturbed);
}

#[test]
fn an_exchange_without_those_before_it_is_refused() {
    let (mut trainer, _folder) = trainer(workers(|_| {}));
    let [tokens, labels] = trainer.words((0, 0, 1)).expect("a pass");
    let first: ClaimKey = key(0, Stage(0), 0);
    let engine = &mut trainer.engine;
    let refused = engine.forward_worker(first, Exchange(1), Some([&tokens, &labels]), 0.0);
    assert!(matches!(refused, Err(EngineError::NotInFlight(key)) if key == first), "{refused:?}");
    let refused = engine.backward_worker(first, Exchange(0), None, 0.0);
    assert!(matches!(refused, Err(EngineError::NotInFlight(key)) if key == first), "{refused:?}");
}
