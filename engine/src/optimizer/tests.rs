//! Every rule and schedule beside its reference in PyTorch (`tests/python/optimizers.py`).

use serde_json::Value;
use tch::{Device, Tensor};

use super::*;
use crate::device::tensor::elements;
use crate::testing::manifest;

const GOLDEN: &str = include_str!("golden.json");

fn golden() -> Value {
    serde_json::from_str(GOLDEN).expect("the script prints JSON")
}

/// The numbers of `optimizers.py`, from -0.5 to 0.5.
fn numbers(mut seed: u32, count: usize, scale: f32) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((seed >> 8) as f32 / 16_777_216.0 - 0.5) * scale
    };
    (0..count).map(|_| next()).collect()
}

fn shapes(golden: &Value) -> Vec<Parameter> {
    let listed: Vec<(String, Vec<usize>)> =
        serde_json::from_value(golden["shapes"].clone()).expect("names with extents");
    let mut offset = 0;
    let parameter = |(name, shape)| {
        let parameter = Parameter { name, shape, offset };
        offset += parameter.len();
        parameter
    };
    listed.into_iter().map(parameter).collect()
}

/// Weights after the steps of a case.
struct Trained {
    parameters: Vec<Parameter>,
    weights: Tensor,
    state: OptimizerState,
    manifest: Manifest,
}

impl Trained {
    fn new(case: &Value, golden: &Value, threads: usize) -> Self {
        let mut manifest = manifest();
        manifest.training.steps = golden["steps"].as_u64().expect("a number");
        manifest.optimizer = serde_json::from_value(case["optimizer"].clone()).expect("valid");
        let parameters = shapes(golden);
        let count = parameters.iter().map(Parameter::len).sum();
        let rule = &manifest.optimizer.rule;
        let state = OptimizerState::new(rule, &parameters, Device::Cpu, threads).expect("small");
        let weights = Tensor::from_slice(&numbers(1, count, 0.25));
        Self { parameters, weights, state, manifest }
    }

    /// A step whose gradients come in ranges that are cut at `cuts`.
    fn step(&mut self, step: u64, cuts: &[usize]) {
        let count = self.weights.numel();
        let scale = if step.is_multiple_of(4) { 0.5 } else { 0.1875 };
        let gradient = numbers(100 + step as u32, count, scale);
        let update = Update {
            step: Step(step),
            count: step + 1,
            gradients: &[],
            gradient_norm: norm(&gradient),
            loss: FixedLoss::new(0, self.manifest.tokens_per_step()),
        };
        let starts = [0].iter().chain(cuts);
        let ranges = starts.zip(cuts.iter().chain([&count])).map(|(start, end)| *start..*end);
        let gradients: Vec<_> =
            ranges.map(|range| (range.clone(), gradient[range].into())).collect();
        let Self { parameters, weights, state, manifest } = self;
        state.apply((weights, 0), &gradients, parameters, manifest, (&update, 1.0)).expect("whole");
    }

    /// The largest distance of a weight's values from those of the reference, relative to their norm.
    fn distance(&self, theirs: &Value) -> f64 {
        let distance = |parameter: &Parameter| {
            let theirs: Vec<f64> =
                serde_json::from_value(theirs[&parameter.name].clone()).expect("numbers");
            let ours = &elements::<f32>(&self.weights)[parameter.range()];
            assert_eq!(ours.len(), theirs.len());
            let of = |value: f64| value * value;
            let pairs = ours.iter().zip(&theirs);
            let off: f64 = pairs.map(|(ours, theirs)| of(f64::from(*ours) - theirs)).sum();
            let all: f64 = theirs.iter().map(|theirs| of(*theirs)).sum();
            (off / all).sqrt()
        };
        self.parameters.iter().map(distance).fold(0.0, f64::max)
    }
}

#[test]
fn fifty_steps_of_every_rule_match_its_reference() {
    let golden = golden();
    let cases = golden["cases"].as_object().expect("cases by name");
    assert_eq!(cases.len(), 11);
    for (name, case) in cases {
        let mut trained = Trained::new(case, &golden, 1);
        let initial = trained.distance(&case["weights"]);
        (0..50).for_each(|step| trained.step(step, &[]));
        let off = trained.distance(&case["weights"]);
        println!("{name}: off by {off:.1e}, moved by {initial:.1e}");
        assert!(initial > 1e-2, "{name} moved by {initial:e}");
        // Newton-Schulz steps in bf16 are off by about 2^-8 of an update each.
        let bound = if name == "muon_bf16" { 2e-2 } else { 1e-6 };
        assert!(off < bound, "{name} is off by {off:e}");
    }
}

#[test]
fn every_schedule_matches_that_of_pytorch() {
    let golden = golden();
    let schedules = golden["schedules"].as_object().expect("schedules by name");
    assert_eq!(schedules.len(), 4);
    for (name, schedule) in schedules {
        let mut keys = schedule["keys"].clone();
        keys["weight_decay"] = 0.0.into();
        keys["gradient_clip"] = 0.0.into();
        let mut manifest = manifest();
        manifest.training.steps = 50;
        manifest.optimizer = serde_json::from_value(keys).expect("valid");
        let rates = schedule["rates"].as_array().expect("a list");
        assert_eq!(rates.len(), 50);
        for (step, rate) in rates.iter().enumerate() {
            let rate = rate.as_f64().expect("a number");
            let ours = learning_rate(&manifest, Step(step as u64));
            assert!((ours - rate).abs() < 1e-14, "{name}, step {step}: {ours} and {rate}");
        }
    }
}

#[test]
fn threads_and_a_cut_into_ranges_change_no_bit() {
    let golden = golden();
    for case in golden["cases"].as_object().expect("cases by name").values() {
        let bits = |threads, cuts: &[usize]| {
            let mut trained = Trained::new(case, &golden, threads);
            (0..3).for_each(|step| trained.step(step, cuts));
            elements::<f32>(&trained.weights).to_vec()
        };
        // After the embedding and after the first matrix.
        assert_eq!(bits(1, &[]), bits(3, &[72, 108]));
    }
}
