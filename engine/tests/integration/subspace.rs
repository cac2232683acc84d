//! Boundaries in a subspace: what stays there, and that nothing but rounding is lost at a boundary.

use crate::common::{Trainer, adafactor, key, manifest, muon, samples, text};
use bytes::Bytes;
use shoal_engine::{
    EngineError, ForwardOutput, Parameter, StageState, group_elements, initial_weights, parameters,
};
use shoal_protocol::ids::{Stage, Step, WeightGroup};
use shoal_protocol::manifest::{Boundary, BoundaryKind, Dtype, Manifest, Placement};

const WIDTH: u32 = 6;

fn in_subspace(stages: u16) -> Manifest {
    let mut manifest = manifest();
    manifest.training.stages = stages;
    manifest.model.boundary = Some(Boundary { kind: BoundaryKind::Subspace, width: WIDTH });
    manifest
}

fn trainer(manifest: &mut Manifest) -> Trainer {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let samples = samples(manifest, folder.path(), &text());
    Trainer::new(manifest, samples)
}

/// The weights of a stage with their names.
fn named(manifest: &Manifest, stage: Stage, flat: &[f32]) -> Vec<(String, Vec<f64>)> {
    let listed = parameters(manifest, stage).into_iter();
    let values = |one: &Parameter| flat[one.range()].iter().map(|weight| f64::from(*weight));
    listed.map(|one| (one.name.clone(), values(&one).collect())).collect()
}

/// The columns of a matrix.
fn columns(values: &[f64], rows: usize) -> Vec<Vec<f64>> {
    let width = values.len() / rows;
    let column = |place| values.iter().skip(place).step_by(width).copied().collect();
    (0..width).map(column).collect()
}

/// Removes from a vector what lies along orthonormal ones; returns the length of the rest.
fn remove(vector: &mut [f64], basis: &[Vec<f64>]) -> f64 {
    // Twice, against rounding.
    for one in basis.iter().chain(basis) {
        let along: f64 = vector.iter().zip(one).map(|(value, axis)| value * axis).sum();
        vector.iter_mut().zip(one).for_each(|(value, axis)| *value -= along * axis);
    }
    length(vector)
}

fn length(vector: &[f64]) -> f64 {
    vector.iter().map(|value| value * value).sum::<f64>().sqrt()
}

/// The subspace, from the first attention's initial outputs.
fn basis(manifest: &Manifest) -> Vec<Vec<f64>> {
    let hidden = manifest.model.hidden as usize;
    let weights = named(manifest, Stage(0), &initial_weights(manifest, Stage(0)));
    let is_output = |name: &str| name == "model.layers.0.self_attn.o_proj.weight";
    let (_, output) = weights.iter().find(|(name, _)| is_output(name)).expect("there");
    let mut basis: Vec<Vec<f64>> = Vec::new();
    for mut column in columns(output, hidden) {
        let whole = length(&column);
        let rest = remove(&mut column, &basis);
        if rest > 1e-3 * whole {
            column.iter_mut().for_each(|value| *value /= rest);
            basis.push(column);
        }
    }
    assert_eq!(basis.len(), WIDTH as usize, "the dimensions of the subspace");
    basis
}

/// The largest part of these vectors, against the longest one, that lies outside of the subspace.
fn outside(vectors: Vec<Vec<f64>>, basis: &[Vec<f64>]) -> f64 {
    let longest = vectors.iter().map(|one| length(one)).fold(0.0, f64::max);
    assert!(longest > 0.0, "something was trained");
    let rests = vectors.into_iter().map(|mut one| remove(&mut one, basis));
    rests.fold(0.0, f64::max) / longest
}

/// Trains a run in a subspace, and checks where its weights are.
pub(crate) fn assert_stays_in_the_subspace(change: impl FnOnce(&mut Manifest)) {
    let mut manifest = in_subspace(3);
    change(&mut manifest);
    let basis = basis(&manifest);
    let (hidden, vocabulary) = (manifest.model.hidden as usize, manifest.model.vocabulary as usize);
    let initial = named(&manifest, Stage(0), &initial_weights(&manifest, Stage(0)));
    let mut trainer = trainer(&mut manifest);
    (0..6).for_each(|step| _ = trainer.step(step));
    for stage in manifest.stages() {
        let state = trainer.engine.state(stage).expect("hosted");
        for (name, values) in named(&manifest, stage, &state.weights) {
            if name.contains("o_proj") || name.contains("down_proj") {
                let outside = outside(columns(&values, hidden), &basis);
                match stage < manifest.last_stage() {
                    true => assert!(outside < 1e-6, "{name}: {outside}"),
                    false => assert!(outside > 0.5, "{name} is free: {outside}"),
                }
            }
            if name == "model.embed_tokens.weight" {
                let change = values.iter().zip(&initial[0].1).map(|(new, old)| new - old);
                let change: Vec<f64> = change.collect();
                let rows: Vec<_> = change.chunks(hidden).map(<[f64]>::to_vec).collect();
                let moved = rows.iter().filter(|row| length(row) > 0.0).count();
                assert!(moved > 20 && moved <= vocabulary, "{moved} rows have learnt");
                // An embedding of 0.02 is rounded to 2e-9, and has moved by at least 1e-3.
                let outside = outside(rows, &basis);
                assert!(outside < 1e-5, "{name}: {outside}");
            }
        }
    }
}

#[test]
fn weights_stay_in_the_subspace_with_every_kind_of_update() {
    assert_stays_in_the_subspace(|_| {});
    for rule in [muon(), adafactor()] {
        assert_stays_in_the_subspace(|manifest| manifest.optimizer.rule = rule);
    }
}

/// A plain model in one piece, with the weights of a trainer.
fn whole(of: &Trainer, step: u64) -> Trainer {
    let mut plain = of.manifest.clone();
    plain.model.boundary = None;
    plain.training.stages = 1;
    let mut whole = trainer(&mut plain);
    let weights = of.weights().into_iter().map(f32::from_bits).collect();
    let state = StageState { weights, ..StageState::default() };
    whole.engine.set_state(Stage(0), Step(step), &state).expect("the same weights");
    whole
}

#[test]
fn a_boundary_loses_nothing_but_rounding() {
    for placement in [Placement::Before, Placement::Parallel] {
        let mut manifest = in_subspace(3);
        manifest.model.block.placement = placement;
        manifest.model.block.biases.attention_output = true;
        manifest.model.block.biases.feed_forward = true;
        let mut cut = trainer(&mut manifest);
        for step in 0..6 {
            let mut whole = whole(&cut, step);
            let losses = [&mut cut, &mut whole].map(|trainer| trainer.forward(step, 0));
            assert!((losses[0] - losses[1]).abs() < 2e-6, "step {step}: {losses:?}");
            cut.backward(step, 0);
            whole.backward(step, 0);
            assert_same_gradients(&cut, &whole, step);
            (1..3).for_each(|microbatch| {
                cut.forward(step, microbatch);
                cut.backward(step, microbatch);
            });
            cut.finish(step);
        }
    }
}

/// Compares the gradients of all weights without a constraint.
fn assert_same_gradients(cut: &Trainer, whole: &Trainer, step: u64) {
    let all = 0..group_elements(&whole.manifest, WeightGroup(0));
    let floats = |bytes: &[u8]| -> Vec<f64> {
        let words = bytes.as_chunks::<8>().0.iter();
        words.map(|word| i64::from_le_bytes(*word) as f64).collect()
    };
    let of_whole = whole.engine.export(WeightGroup(0), Step(step), all).expect("hosted");
    let of_whole = floats(&of_whole);
    let mut start = 0;
    for stage in cut.manifest.stages() {
        let group = WeightGroup(stage.0);
        let all = 0..group_elements(&cut.manifest, group);
        let of_cut = floats(&cut.engine.export(group, Step(step), all).expect("hosted"));
        for parameter in parameters(&cut.manifest, stage) {
            let name = &parameter.name;
            let joins = name.contains("o_proj") || name.contains("down_proj");
            if name.contains("embed") || joins && stage < cut.manifest.last_stage() {
                continue;
            }
            let range = parameter.range();
            let ours = &of_cut[range.clone()];
            let theirs = &of_whole[start + range.start..start + range.end];
            let difference: Vec<f64> =
                ours.iter().zip(theirs).map(|(one, other)| one - other).collect();
            assert!(length(&difference) < 1e-4 * length(theirs), "{name} at step {step}");
        }
        start += of_cut.len();
    }
}

#[test]
fn more_boundaries_change_rounding_alone() {
    // The last of five layers is the last stage's in each of these cuts.
    let losses = [3, 4, 5].map(|stages| {
        let mut manifest = in_subspace(stages);
        manifest.model.layers = 5;
        let mut trainer = trainer(&mut manifest);
        (0..12).map(|step| trainer.step(step).0).collect::<Vec<_>>()
    });
    for other in &losses[1..] {
        for (one, other) in losses[0].iter().zip(other) {
            assert!((one - other).abs() < 1e-4, "{losses:?}");
        }
    }
    assert!(losses[0][11] < losses[0][0] - 0.3, "it learns: {losses:?}");
}

#[test]
fn bf16_and_lossy_codecs_learn_in_a_subspace() {
    let mut manifest = in_subspace(3);
    manifest.training.dtype = Dtype::Bf16;
    manifest.codec.activations = "int8".parse().expect("a codec");
    manifest.codec.activation_gradients = "int8".parse().expect("a codec");
    let mut trainer = trainer(&mut manifest);
    let losses: Vec<f64> = (0..20).map(|step| trainer.step(step).0).collect();
    assert!(losses[19] < losses[0] - 0.5, "{losses:?}");
}

#[test]
fn both_copies_of_a_tied_embedding_stay_the_same() {
    let mut manifest = in_subspace(3);
    manifest.model.block.tied = true;
    let mut trainer = trainer(&mut manifest);
    let losses: Vec<f64> = (0..6).map(|step| trainer.step(step).0).collect();
    let [first, last] = [Stage(0), manifest.last_stage()].map(|stage| {
        let state = trainer.engine.state(stage).expect("hosted");
        let listed = parameters(&manifest, stage);
        let is_matrix = |name: &str| name.contains("embed_tokens") || name == "lm_head.weight";
        let matrix = listed.iter().find(|one| is_matrix(&one.name)).expect("a copy");
        state.weights[matrix.range()].to_vec()
    });
    assert!(first == last, "the copies differ");
    assert!(losses[5] < losses[0], "{losses:?}");
}

#[test]
fn a_microbatch_crosses_as_coordinates_and_token_ids() {
    let mut manifest = in_subspace(2);
    let mut trainer = trainer(&mut manifest);
    let batch = trainer.samples.batch(Step(0), key(0, Stage(0), 0).microbatch);
    let labels = manifest.with_tokens(&batch.inputs, batch.labels.clone());
    let (first, second) = (key(0, Stage(0), 0), key(0, Stage(1), 0));
    let engine = &mut trainer.engine;
    // The first stage has the tokens.
    let Ok(ForwardOutput::Activation(activation)) = engine.forward(first, &batch.inputs, None)
    else {
        panic!("the first of two stages gives an activation")
    };
    assert_eq!(activation.len(), 2 * 16 * WIDTH as usize * 4);
    let refused = engine.forward(second, &activation, None);
    assert!(matches!(refused, Err(EngineError::MissingLabels(_))), "{refused:?}");
    let refused = engine.forward(second, &activation, Some(&batch.labels));
    assert!(matches!(refused, Err(EngineError::WrongLength { .. })), "{refused:?}");
    let mut foreign = labels.to_vec();
    let end = foreign.len();
    foreign[end - 4..].copy_from_slice(&256u32.to_le_bytes());
    let refused = engine.forward(second, &activation, Some(&Bytes::from(foreign)));
    assert!(matches!(refused, Err(EngineError::UnknownToken { token: 256, .. })), "{refused:?}");
    let output = engine.forward(second, &activation, Some(&labels));
    assert!(matches!(output, Ok(ForwardOutput::Loss { targets: 32, .. })), "{output:?}");
    let gradient = engine.backward(second, None).expect("a backward pass").expect("a gradient");
    assert_eq!(gradient.len(), activation.len());
    assert_eq!(engine.backward(first, Some(&gradient)).expect("a backward pass"), None);
}
