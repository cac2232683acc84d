//! Steps that read weights without the newest update.

use crate::common::{self, Trainer, manifest, samples, text};
use shoal_engine::{EngineError, StageState};
use shoal_protocol::ids::{Microbatch, Stage, Step};
use shoal_protocol::manifest::Dtype;

const STEPS: u64 = 5;

/// A run of two stages with this staleness.
fn trainer(staleness: u8, dtype: Dtype, recompute: bool) -> Trainer {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    manifest.training.stages = 2;
    manifest.training.staleness = staleness;
    manifest.training.dtype = dtype;
    manifest.training.recompute = recompute;
    let samples = samples(&mut manifest, folder.path(), &text());
    Trainer::new(&manifest, samples)
}

fn states(trainer: &Trainer) -> Vec<StageState> {
    let state = |stage| trainer.engine.state(stage).expect("hosted");
    trainer.manifest.stages().map(state).collect()
}

fn set_states(trainer: &mut Trainer, version: u64, states: &[StageState]) {
    for (stage, state) in (0..).map(Stage).zip(states) {
        trainer.engine.set_state(stage, Step(version), state).expect("the same stage");
    }
}

/// The expected state of every version if each step's gradient is computed with a version so many updates
/// older: an engine without staleness gets the older weights for the passes and the newer ones
/// for the update.
fn reference(staleness: u8, dtype: Dtype) -> Vec<Vec<StageState>> {
    let mut trainer = trainer(0, dtype, false);
    let microbatches = trainer.manifest.training.microbatches;
    let mut versions = vec![states(&trainer)];
    for step in 0..STEPS {
        let gradients: Vec<_> = {
            let reads = step.saturating_sub(u64::from(staleness));
            set_states(&mut trainer, step, &versions[reads as usize]);
            for microbatch in 0..microbatches {
                trainer.forward(step, microbatch);
                trainer.backward(step, microbatch);
            }
            trainer.gradients(step)
        };
        set_states(&mut trainer, step, &versions[step as usize]);
        trainer.apply(step, &gradients);
        versions.push(states(&trainer));
    }
    versions
}

#[test]
fn passes_of_the_next_step_may_run_before_and_after_the_update() {
    for (dtype, recompute) in [(Dtype::F32, false), (Dtype::F32, true), (Dtype::Bf16, false)] {
        let mut trainer = trainer(1, dtype, recompute);
        let microbatches = trainer.manifest.training.microbatches;
        let all = |step| (0..microbatches).map(move |microbatch| (step, microbatch));
        let expected = reference(1, dtype);
        all(0).for_each(|(step, microbatch)| {
            trainer.forward(step, microbatch);
            trainer.backward(step, microbatch);
        });
        for step in 0..STEPS {
            // Of the next step, one microbatch is done, one is in progress and one has not begun.
            trainer.forward(step + 1, 1);
            trainer.forward(step + 1, 0);
            trainer.backward(step + 1, 0);
            trainer.finish(step);
            trainer.forward(step + 1, 2);
            trainer.backward(step + 1, 2);
            trainer.backward(step + 1, 1);
            let version = step + 1;
            for (here, expected) in states(&trainer).iter().zip(&expected[version as usize]) {
                assert_eq!(here.weights, expected.weights, "version {version}, {dtype:?}");
                assert_eq!(here.slots, expected.slots);
            }
            for (here, before) in states(&trainer).iter().zip(&expected[step as usize]) {
                assert_eq!(here.stale_weights, std::slice::from_ref(&before.weights));
            }
        }
    }
}

#[test]
fn passes_may_run_four_steps_ahead() {
    for (staleness, dtype) in [(2, Dtype::F32), (4, Dtype::Bf16), (4, Dtype::F32)] {
        let mut trainer = trainer(staleness, dtype, false);
        let microbatches = trainer.manifest.training.microbatches;
        let expected = reference(staleness, dtype);
        let pass = |trainer: &mut Trainer, step| {
            for microbatch in 0..microbatches {
                trainer.forward(step, microbatch);
                trainer.backward(step, microbatch);
            }
        };
        (0..u64::from(staleness)).for_each(|step| pass(&mut trainer, step));
        for step in 0..STEPS {
            pass(&mut trainer, step + u64::from(staleness));
            trainer.finish(step);
            let version = step + 1;
            for (here, expected) in states(&trainer).iter().zip(&expected[version as usize]) {
                assert_eq!(here.weights, expected.weights, "version {version}, {staleness} late");
                assert_eq!(here.stale_weights.len(), usize::from(staleness));
            }
        }
    }
}

#[test]
fn a_run_resumed_from_files_has_the_same_bits() {
    [1, 3].into_iter().for_each(assert_resumes);
}

fn assert_resumes(staleness: u8) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut first = trainer(staleness, Dtype::F32, false);
    let mut second = trainer(staleness, Dtype::F32, false);
    for step in 0..3 {
        first.step(step);
    }
    for stage in first.manifest.stages() {
        first.engine.write_stage(stage, folder.path()).expect("writable");
        second.engine.read_stage(stage, Step(3), folder.path()).expect("just written");
    }
    let hash = |trainer: &Trainer| {
        let stages = trainer.manifest.stages();
        stages.map(|stage| trainer.engine.state_hash(stage).expect("hosted")).collect::<Vec<_>>()
    };
    assert_eq!(hash(&first), hash(&second));
    assert_eq!(first.step(3), second.step(3));
    assert_eq!(hash(&first), hash(&second));
}

#[test]
fn a_step_with_missing_weights_is_refused() {
    let mut trainer = trainer(1, Dtype::F32, false);
    let batch = trainer.samples.batch(Step(2), Microbatch(0));
    let result = trainer.engine.forward(common::key(2, Stage(0), 0), &batch.inputs, None);
    assert!(matches!(result, Err(EngineError::WrongVersion { version: Step(0), .. })));
}
