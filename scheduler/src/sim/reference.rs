//! The reference run without a swarm: one microbatch after the other, one stage after the other.

use std::collections::BTreeMap;
use std::sync::Arc;

use shoal_protocol::ids::{ClaimKey, ContentHash, Exchange, Microbatch, Stage, Step, WeightGroup};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::FixedLoss;

use super::integer_model::{self, Weights, Worker};
use super::scenario::Scenario;

/// The expected result of every step that has been reached. A run may be stopped long before its
/// end, so steps are computed on demand.
#[derive(Debug)]
pub(super) struct Reference {
    manifest: Arc<Manifest>,
    /// Elements of each weight group.
    elements: BTreeMap<WeightGroup, usize>,
    steps: Vec<ReferenceStep>,
    /// Each stage's file in every version's checkpoint.
    files: Vec<Vec<ContentHash>>,
    initial: Vec<Weights>,
}

/// The expected result of one step.
#[derive(Debug)]
pub(super) struct ReferenceStep {
    /// Each weight group's sums.
    sums: BTreeMap<WeightGroup, Vec<i64>>,
    pub(super) gradient_norm: f64,
    pub(super) loss: FixedLoss,
    pub(super) held_out_loss: Option<FixedLoss>,
    /// Each stage's weights after the step.
    pub(super) weights: Vec<Weights>,
}

impl Reference {
    pub(super) fn of(scenario: &Scenario) -> Self {
        let manifest = Arc::clone(&scenario.manifest);
        let initial: Vec<Weights> =
            manifest.stages().map(|stage| Weights::initial(&manifest, stage)).collect();
        let files = vec![file_hashes(manifest.first_version(), &initial)];
        let elements = scenario.parameters.clone();
        Self { manifest, elements, steps: Vec::new(), files, initial }
    }

    /// Computes the expected result of a step; `None` if the run has no such step.
    pub(super) fn reach(&mut self, step: Step) -> Option<&ReferenceStep> {
        if step.0 >= self.manifest.training.steps || step < self.manifest.first_version() {
            return None;
        }
        while self.reached(step).is_none() {
            let held = self.steps.last().map_or(&self.initial, |step| &step.weights);
            let next = Step(self.manifest.first_version().0 + self.steps.len() as u64);
            let done = one_step(&self.manifest, &self.elements, next, held);
            self.files.push(file_hashes(next.next(), &done.weights));
            self.steps.push(done);
        }
        self.reached(step)
    }

    /// The expected result of a step that was reached.
    pub(super) fn reached(&self, step: Step) -> Option<&ReferenceStep> {
        self.steps.get(self.place_of(step)?)
    }

    /// A stage's sums in a step that was reached.
    pub(super) fn sums(&self, step: &ReferenceStep, stage: Stage) -> Vec<i64> {
        stage_sums(&self.manifest, &step.sums, stage)
    }

    /// Each stage's file of a version that was reached.
    pub(super) fn files(&self, version: Step) -> Option<&[ContentHash]> {
        self.files.get(self.place_of(version)?).map(Vec::as_slice)
    }

    /// The place of a step or version, from the first of the run on.
    fn place_of(&self, step: Step) -> Option<usize> {
        Some(step.0.checked_sub(self.manifest.first_version().0)? as usize)
    }
}

fn file_hashes(version: Step, weights: &[Weights]) -> Vec<ContentHash> {
    let stages = (0..).map(Stage);
    stages
        .zip(weights)
        .map(|(stage, word)| integer_model::file_hash(version, stage, *word))
        .collect()
}

/// The sums of a stage's weight groups, one after the other.
fn stage_sums(
    manifest: &Manifest,
    sums: &BTreeMap<WeightGroup, Vec<i64>>,
    stage: Stage,
) -> Vec<i64> {
    manifest.groups_of(stage).flat_map(|weights| sums[&weights].iter().copied()).collect()
}

fn one_step(
    manifest: &Manifest,
    elements: &BTreeMap<WeightGroup, usize>,
    step: Step,
    held: &[Weights],
) -> ReferenceStep {
    let empty = |(weights, count): (&WeightGroup, &usize)| (*weights, vec![0; *count]);
    let mut sums: BTreeMap<WeightGroup, Vec<i64>> = elements.iter().map(empty).collect();
    let mut losses = BTreeMap::new();
    for microbatch in (0..manifest.microbatches_of(step.0)).map(Microbatch) {
        let key = ClaimKey { step, stage: Stage(0), microbatch };
        let (mut loss, parts) = one_microbatch(manifest, elements, key, held);
        let trains = microbatch.0 < manifest.training.microbatches;
        for (stage, part) in manifest.stages().zip(&parts).filter(|_| trains) {
            if manifest.skips_not_finite() && integer_model::is_broken(part) {
                loss.broken += 1;
                continue;
            }
            let mut part = &part[..];
            for weights in manifest.groups_of(stage) {
                let (own, rest) = part.split_at(elements[&weights]);
                let sums = sums.get_mut(&weights).expect("every group has sums");
                integer_model::add(sums, 0..own.len(), own);
                part = rest;
            }
        }
        losses.insert(microbatch, loss);
    }
    let held_out = losses.split_off(&Microbatch(manifest.training.microbatches));
    let square_norm = sums.values().fold(0.0, |sum, sums| sum + integer_model::summary(sums).1);
    let loss: FixedLoss = losses.into_values().sum();
    let gradient_norm = square_norm.sqrt() * manifest.gradient_scale(loss.targets);
    let update = |(held, stage): (&Weights, Stage)| {
        held.updated(&stage_sums(manifest, &sums, stage), gradient_norm, loss)
    };
    ReferenceStep {
        weights: held.iter().zip(manifest.stages()).map(update).collect(),
        sums,
        gradient_norm,
        loss,
        held_out_loss: (!held_out.is_empty()).then(|| held_out.into_values().sum()),
    }
}

/// The loss of a microbatch, and each stage's sums over its exchanges.
fn one_microbatch(
    manifest: &Manifest,
    elements: &BTreeMap<WeightGroup, usize>,
    key: ClaimKey,
    held: &[Weights],
) -> (FixedLoss, Vec<Vec<i64>>) {
    let elements_of = |stage| manifest.groups_of(stage).map(|weights| elements[&weights]).sum();
    let read = |weights: &Weights, exchange| {
        weights.read_by((key.step, exchange), key.step, manifest).expect("it is held")
    };
    let begin =
        |(stage, held): (Stage, &Weights)| Worker::new(read(held, Exchange(0)), elements_of(stage));
    let mut workers: Vec<Worker> = manifest.stages().zip(held).map(begin).collect();
    let mut loss = FixedLoss::default();
    for exchange in (0..manifest.exchanges_of(key.microbatch)).map(Exchange) {
        let mut inputs = vec![integer_model::samples(manifest.training.seed, key, exchange)];
        for (worker, held) in workers.iter_mut().zip(held) {
            let joined = manifest.joins_at(exchange).then(|| read(held, exchange));
            let ran = worker.forward(exchange, manifest.exchanges_at_once(), joined);
            let word = ran.expect("in order");
            inputs.push(integer_model::forward(word, inputs[inputs.len() - 1]));
        }
        let output = inputs.pop().expect("there is a stage");
        loss = [loss, integer_model::loss(output)].into_iter().sum();
        let mut gradient = integer_model::loss_gradient(output);
        for (worker, input) in workers.iter_mut().zip(inputs).rev() {
            let (word, all) = (worker.weights, worker.sums.len());
            let part = integer_model::weight_gradient(word, input, gradient, all);
            worker.backward(exchange, &part).expect("in order");
            gradient = integer_model::backward(word, input, gradient);
        }
    }
    (loss, workers.into_iter().map(|worker| worker.sums).collect())
}
