//! A training run on several devices of one peer.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::sync::mpsc::channel;

use bytes::Bytes;
use shoal_engine::{
    AllReduce, Engine, FixedPoint, ForwardOutput, Island, Samples, StageState, Tiers, Update,
    group_elements, passes_at_once,
};
use shoal_protocol::ids::{ClaimKey, Microbatch, Stage, StageSpan, Step, WeightGroup};
use shoal_protocol::manifest::Manifest;

use super::{each_update, in_documents, key};

/// One run on an island of so many workers of the processor.
pub(crate) struct Islander {
    pub(crate) manifest: Manifest,
    pub(crate) island: Island,
    samples: Samples,
    pub(crate) devices: usize,
    /// Whether they divide the stages.
    by_stage: bool,
    /// Whether samples are packed of documents.
    pub(crate) packed: bool,
    all_reduces: BTreeMap<WeightGroup, AllReduce>,
}

impl Islander {
    pub(crate) fn new(manifest: &Manifest, samples: Samples, devices: usize) -> Self {
        Self::with_tiers(manifest, samples, devices, Tiers::default())
    }

    /// With devices that divide the stages.
    pub(crate) fn by_stage(manifest: &Manifest, samples: Samples, devices: usize) -> Self {
        let span = StageSpan::all(manifest.training.stages);
        let island = Island::by_stage(manifest, span, &super::devices(devices), 1);
        let (manifest, island) = (manifest.clone(), island.expect("room"));
        let all_reduces = BTreeMap::new();
        Self { manifest, island, samples, devices, by_stage: true, packed: false, all_reduces }
    }

    pub(crate) fn with_tiers(
        manifest: &Manifest,
        samples: Samples,
        devices: usize,
        tiers: Tiers,
    ) -> Self {
        let span = StageSpan::all(manifest.training.stages);
        let island = Island::swapping(manifest, span, (&super::devices(devices), 1), tiers);
        let (manifest, island) = (manifest.clone(), island.expect("room in each tier"));
        let all_reduces = BTreeMap::new();
        Self { manifest, island, samples, devices, by_stage: false, packed: false, all_reduces }
    }

    /// Trains one step. Returns its mean loss.
    pub(crate) fn step(&mut self, step: u64) -> f64 {
        let all = self.count(step, 0..self.manifest.training.microbatches);
        let gradients: Vec<Bytes> =
            self.manifest.clone().weight_groups().map(|group| self.reduce(group, step)).collect();
        let targets = all.iter().map(|(_, targets)| targets).sum();
        each_update(&self.manifest, step, &gradients, targets, |stage, update| {
            self.island.need_update(stage).expect("room for a mean");
            let groups = self.manifest.groups_of(stage);
            let means: Vec<&[u8]> = groups.map(|group| self.all_reduces[&group].mean()).collect();
            assert!(means == update.gradients, "means are in memory again");
            let update = Update { gradients: &means, ..*update };
            self.island.apply(stage, &update).expect("a whole gradient");
        });
        all.iter().map(|(share, _)| f64::from(*share)).sum::<f64>() / all.len() as f64
    }

    /// Computes microbatches, and adds their gradients to the sums. Returns their shares of the loss and their targets.
    pub(crate) fn count(&mut self, step: u64, microbatches: Range<u32>) -> Vec<(f32, u64)> {
        let stages: Vec<Stage> = self.manifest.stages().collect();
        let (results, losses) = channel();
        for microbatch in microbatches {
            if self.by_stage {
                results.send(self.pass_by_stage(step, microbatch)).expect("it is received");
                continue;
            }
            // Unequal parts of the work.
            let passes = passes_at_once(&self.manifest, self.devices).expect("they suit the run");
            let place = (microbatch as usize / 2) % passes;
            let batch = self.samples.batch(Step(step), Microbatch(microbatch));
            let batch = if self.packed { in_documents(batch, step, microbatch) } else { batch };
            let labels = self.manifest.with_tokens(&batch.inputs, batch.labels);
            for (number, device) in self.island.devices_of_pass(place).enumerate() {
                let (stages, input, labels) =
                    (stages.clone(), batch.inputs.clone(), labels.clone());
                let results = (number == 0).then(|| results.clone());
                let passes = move |engine: &mut Engine| {
                    let loss = pass(engine, &stages, (step, microbatch), input, &labels);
                    if let Some(results) = results {
                        results.send(loss).expect("it is received");
                    }
                };
                self.island.run(device, None, passes).expect("a device");
            }
            for stage in &stages {
                let key = key(step, *stage, microbatch);
                let add = move |engine: &mut Engine| {
                    engine.accumulate(key).expect("gradients in range");
                };
                for device in self.island.devices_of_pass(place) {
                    self.island.run(device, Some(key), add).expect("a device");
                }
            }
        }
        drop(results);
        losses.iter().collect()
    }

    /// Both passes of a microbatch, of each stage on its device, and the additions of its gradients.
    fn pass_by_stage(&mut self, step: u64, microbatch: u32) -> (f32, u64) {
        let stages: Vec<Stage> = self.manifest.stages().collect();
        let batch = self.samples.batch(Step(step), Microbatch(microbatch));
        let labels = self.manifest.with_tokens(&batch.inputs, batch.labels);
        let (mut input, mut loss) = (batch.inputs, None);
        for stage in &stages {
            let (key, labels) = (key(step, *stage, microbatch), labels.clone());
            let forward = move |engine: &mut Engine| engine.forward(key, &input, Some(&labels));
            match self.run(*stage, None, forward).expect("a pass") {
                ForwardOutput::Activation(activation) => input = activation,
                ForwardOutput::Loss { share, targets, .. } => {
                    (loss, input) = (Some((share, targets)), Bytes::new());
                }
            }
        }
        let mut gradient = None;
        for stage in stages.iter().rev() {
            let key = key(step, *stage, microbatch);
            let backward = move |engine: &mut Engine| engine.backward(key, gradient.as_ref());
            gradient = self.run(*stage, None, backward).expect("a pass");
            self.run(*stage, Some(key), move |engine| engine.accumulate(key)).expect("in range");
        }
        loss.expect("the last stage has a loss")
    }

    /// Does work on the device of a stage, and waits for it.
    fn run<T: Send + 'static>(
        &mut self,
        stage: Stage,
        counts: Option<ClaimKey>,
        work: impl FnOnce(&mut Engine) -> T + Send + 'static,
    ) -> T {
        let (results, result) = channel();
        let work = move |engine: &mut Engine| results.send(work(engine)).expect("it is received");
        let device = stage.device_in_turn(self.devices);
        self.island.run(device, counts, work).expect("a device");
        result.recv().expect("a result")
    }

    /// The mean gradient of a weight group, of which one part is read here and one comes from another peer.
    fn reduce(&mut self, weights: WeightGroup, step: u64) -> Bytes {
        let state = match self.all_reduces.entry(weights) {
            Entry::Vacant(new) => new.insert(self.island.all_reduce(weights).expect("room")),
            Entry::Occupied(mut known) => {
                self.island.forget_mean(weights).expect("it is known");
                known.get_mut().begin();
                known.into_mut()
            }
        };
        let all = group_elements(&self.manifest, weights);
        let own = |sums: &[u8]| state.reduce(0..all / 3, sums, &[]).expect("one part");
        self.island.read_sums(weights, Step(step), 0..all / 3, own).expect("hosted");
        let fixed_point = FixedPoint::of(&self.manifest);
        let theirs = |sums: &[u8]| fixed_point.reduce(&[sums]).expect("one part");
        let theirs = self.island.read_sums(weights, Step(step), all / 3..all, theirs);
        self.island.need_mean(weights).expect("room for a mean");
        state.install(all / 3..all, &theirs.expect("hosted")).expect("the rest");
        Bytes::copy_from_slice(state.mean())
    }

    pub(crate) fn states_of(&self, stage: Stage) -> StageState {
        self.island.state(stage).expect("hosted")
    }

    pub(crate) fn states(&self) -> BTreeMap<Stage, StageState> {
        let state = |stage| (stage, self.island.state(stage).expect("hosted"));
        self.manifest.stages().map(state).collect()
    }
}

/// Both passes of a microbatch through all stages. Returns its share of the loss and its targets.
fn pass(
    engine: &mut Engine,
    stages: &[Stage],
    (step, microbatch): (u64, u32),
    mut input: Bytes,
    labels: &Bytes,
) -> (f32, u64) {
    let mut loss = None;
    for stage in stages {
        let key = key(step, *stage, microbatch);
        match engine.forward(key, &input, Some(labels)).expect("a pass") {
            ForwardOutput::Activation(activation) => input = activation,
            ForwardOutput::Loss { share, targets, .. } => loss = Some((share, targets)),
        }
    }
    let mut gradient: Option<Bytes> = None;
    for stage in stages.iter().rev() {
        let key = key(step, *stage, microbatch);
        gradient = engine.backward(key, gradient.as_ref()).expect("a pass");
    }
    loss.expect("the last stage gives a loss")
}
