//! A training run in one thread: the driver's work without a network.

#![allow(dead_code, reason = "each test uses its part")]

mod exchanges;
pub(crate) mod islander;
#[path = "../../python/serve.rs"]
mod serve;
#[path = "../../../src/testing.rs"]
mod testing;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde_json::{Value, json};
use shoal_engine::checkpoint::write_index;
use shoal_engine::{
    BaseFiles, Batch, Device, DeviceChoice, Devices, Engine, FixedPoint, ForwardOutput, LowerTier,
    Origin, Preferences, Samples, StageState, Tiers, TokenFile, Update, data, device_floor,
    group_elements, group_square_norm, learning_rate, swapping_floor,
};
use shoal_protocol::ids::{ClaimKey, ContentHash, Microbatch, Stage, StageSpan, Step};
use shoal_protocol::label::Label;
use shoal_protocol::manifest::{
    Adafactor, Adam, Data, DistanceCodec, InnerLoop, InnerMoments, Manifest, Model, Muon,
    Optimizer, RateScale, Rule, Schedule, Sgd, Tokenizer,
};
use shoal_protocol::message::FixedLoss;
use shoal_protocol::units;

/// The small run of the crate's own tests, a little larger.
pub(crate) fn manifest() -> Manifest {
    let mut run = testing::manifest();
    run.model = Model {
        hidden: 32,
        layers: 4,
        heads: 4,
        key_value_heads: 2,
        intermediate: 48,
        context: 16,
        ..run.model
    };
    run.training.steps = 20;
    run.training.microbatches = 3;
    run.optimizer.warmup_steps = 4;
    run
}

/// A run of four stages, with its samples' folder.
pub(crate) fn four_stages(change: impl FnOnce(&mut Manifest)) -> (tempfile::TempDir, Manifest) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    manifest.training.stages = 4;
    change(&mut manifest);
    samples(&mut manifest, folder.path(), &text());
    (folder, manifest)
}

/// The state of each stage.
pub(crate) fn hashes(engine: &Engine, manifest: &Manifest) -> Vec<ContentHash> {
    manifest.stages().map(|stage| engine.state_hash(stage).expect("hosted")).collect()
}

/// The run with three workers that meet after every five updates of two microbatches.
pub(crate) fn with_workers(mut manifest: Manifest) -> Manifest {
    let outer = Optimizer {
        rule: Rule::Sgd(Sgd { momentum: 0.6, nesterov: true }),
        learning_rate: 0.7,
        warmup_steps: 0,
        schedule: Schedule::Constant,
        weight_decay: 0.0,
        gradient_clip: 0.0,
    };
    let optimizer = std::mem::replace(&mut manifest.optimizer, outer);
    let (codec, moments) = (DistanceCodec::F32, InnerMoments::Zero);
    manifest.inner =
        Some(InnerLoop { steps: 5, microbatches: 2, optimizer, codec, moments, overlap: 0 });
    manifest
}

/// Lets workers make so many updates from the weights of the meeting before.
pub(crate) fn overlap(manifest: &mut Manifest, updates: u32) {
    manifest.training.staleness = u8::from(updates > 0);
    manifest.inner.as_mut().expect("workers").overlap = updates;
}

/// Muon with the constants of its author.
pub(crate) fn muon() -> Rule {
    Rule::Muon(Muon {
        momentum: 0.95,
        nesterov: true,
        rate_scale: RateScale::Original,
        rest_learning_rate: 1e-3,
        rest: Adam::DEFAULT,
    })
}

/// Adafactor with the constants of its paper.
pub(crate) fn adafactor() -> Rule {
    Rule::Adafactor(Adafactor {
        decay_exponent: 0.8,
        epsilon: 1e-15,
        scale_epsilon: 1e-3,
        clip_threshold: 1.0,
    })
}

/// Gradient descent with momentum.
pub(crate) fn sgd() -> Rule {
    Rule::Sgd(Sgd { momentum: 0.9, nesterov: false })
}

/// Writes a text's token file into `folder`, adds it to the manifest and returns the samples.
pub(crate) fn samples(manifest: &mut Manifest, folder: &Path, text: &[u8]) -> Samples {
    let path = folder.join("tokens.bin");
    let tokens = data::write_tokens(text, Tokenizer::Bytes, &path).expect("writable");
    manifest.data = Data::Text(tokens.clone());
    manifest.check().expect("a valid manifest");
    Samples::new(manifest, TokenFile::open(&path, &tokens).expect("just written"))
}

/// Some text, long enough for the small run.
pub(crate) fn text() -> Vec<u8> {
    include_bytes!("../../../../LICENSE-APACHE").to_vec()
}

/// The devices of islands: workers of the processor, or those of `SHOAL_TEST_DEVICE` (as `cuda:0,cuda:1`) in turn.
pub(crate) fn devices(count: usize) -> Vec<DeviceChoice> {
    let named = std::env::var("SHOAL_TEST_DEVICE").unwrap_or_else(|_| "cpu".to_owned());
    let named: Devices = named.parse().expect("a list of devices");
    let named = named.resolve().expect("devices that work");
    named.into_iter().cycle().take(count).collect()
}

/// The device of trainers.
pub(crate) fn device() -> DeviceChoice {
    devices(1)[0]
}

/// The same tokens in documents of different lengths, with masked targets.
pub(crate) fn in_documents(batch: Batch, step: u64, microbatch: u32) -> Batch {
    let words = batch.labels.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    let label = |(place, target): (usize, u32)| {
        // Documents begin at irregular places, and about a third of the targets is masked.
        let starts_document = (place * 7 + step as usize) % 11 == 3;
        let masked = (place * 5 + microbatch as usize) % 7 < 2 || starts_document;
        Label { target: (!masked).then_some(target), starts_document, padding: false }
            .to_word()
            .to_le_bytes()
    };
    let labels: Vec<u8> = words.enumerate().flat_map(label).collect();
    Batch { labels: labels.into(), ..batch }
}

/// One run and its state.
pub(crate) struct Trainer {
    pub(crate) manifest: Manifest,
    pub(crate) engine: Engine,
    pub(crate) samples: Samples,
    /// The model that it starts from.
    pub(crate) base: Option<BaseFiles>,
    /// Whether samples are packed of documents of different lengths with masked targets.
    pub(crate) packed: bool,
    /// Factor on token ids, which spreads bytes over a larger vocabulary.
    pub(crate) spread: u32,
    /// Targets of each step's forward passes.
    pub(crate) targets: BTreeMap<u64, u64>,
    /// Microbatches in place of those of the samples.
    pub(crate) given: BTreeMap<(u64, u32), Batch>,
}

impl Trainer {
    pub(crate) fn new(manifest: &Manifest, samples: Samples) -> Self {
        let device = Device::open(device(), 1).expect("the device works");
        let span = StageSpan::all(manifest.training.stages);
        let engine = Engine::new(manifest, span, device).expect("room for a small model");
        Self::with_engine(manifest, samples, engine)
    }

    /// Like [`Trainer::new`], with its stages swapped within so much memory where there are more than `resident`.
    pub(crate) fn swapping(
        manifest: &Manifest,
        samples: Samples,
        folder: &Path,
        (memory, resident): (units::Bytes, usize),
    ) -> Self {
        let stages: Vec<Stage> = manifest.stages().collect();
        let floor = swapping_floor(manifest, &stages, manifest.training.microbatches, 1);
        let memory = floor.resident + memory;
        let lower = LowerTier { folder: folder.to_owned(), memory, resident };
        // On a GPU, stages are swapped where it has their weights only while passes read them.
        let device = (!device().is_processor()).then(|| {
            let floor = device_floor(manifest, 1);
            floor.passes + units::Bytes(floor.weights.0 * stages.len() as u64)
        });
        Self::with_tiers(manifest, samples, Tiers { device, lower: Some(lower) })
    }

    /// Like [`Trainer::new`], with tiers below the device.
    pub(crate) fn with_tiers(manifest: &Manifest, samples: Samples, tiers: Tiers) -> Self {
        let device = Device::open(device(), 1).expect("the device works");
        let span = StageSpan::all(manifest.training.stages);
        let engine = Engine::swapping(manifest, span, device, tiers);
        Self::with_engine(manifest, samples, engine.expect("room in each tier"))
    }

    /// With an engine that hosts all stages.
    pub(crate) fn with_engine(manifest: &Manifest, samples: Samples, engine: Engine) -> Self {
        Self {
            manifest: manifest.clone(),
            engine,
            samples,
            base: None,
            packed: false,
            spread: 1,
            targets: BTreeMap::new(),
            given: BTreeMap::new(),
        }
    }

    /// Like [`Trainer::new`], from the weights of a base.
    pub(crate) fn from_base(manifest: &Manifest, samples: Samples, base: &BaseFiles) -> Self {
        let mut trainer = Self::new(manifest, samples);
        for stage in manifest.stages() {
            let origin = Origin { base: Some(base.clone()), start: None };
            trainer.engine.load(stage, &origin).expect("a whole base");
        }
        trainer.base = Some(base.clone());
        trainer
    }

    /// The state of each stage.
    pub(crate) fn states(&self) -> BTreeMap<Stage, StageState> {
        let state = |stage| (stage, self.engine.state(stage).expect("hosted"));
        self.manifest.stages().map(state).collect()
    }

    /// The samples of a microbatch.
    pub(crate) fn batch(&self, step: u64, microbatch: u32) -> Batch {
        if let Some(given) = self.given.get(&(step, microbatch)) {
            return given.clone();
        }
        let batch = self.samples.batch(Step(step), Microbatch(microbatch));
        let batch = match self.spread {
            1 => batch,
            _ => {
                let spread = |bytes: &[u8]| -> Vec<u8> {
                    let words =
                        bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
                    let spread = |word| word * self.spread % self.manifest.model.vocabulary;
                    words.flat_map(|word| spread(word).to_le_bytes()).collect()
                };
                Batch { inputs: spread(&batch.inputs).into(), labels: spread(&batch.labels).into() }
            }
        };
        if self.packed { in_documents(batch, step, microbatch) } else { batch }
    }

    /// A step's samples as JSON, for `reference.py`.
    pub(crate) fn batches(&self, step: u64) -> Value {
        let context = self.manifest.model.context as usize;
        let words = |bytes: &[u8]| -> Vec<u32> {
            bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
        };
        let microbatch = |microbatch| {
            let batch = self.batch(step, microbatch);
            let inputs: Vec<Vec<u32>> =
                words(&batch.inputs).chunks(context).map(<[u32]>::to_vec).collect();
            let labels: Vec<Label> =
                words(&batch.labels).into_iter().map(Label::from_word).collect();
            let target = |label: &Label| label.target.map_or(-100, i64::from);
            let targets: Vec<Vec<i64>> =
                labels.chunks(context).map(|row| row.iter().map(target).collect()).collect();
            let mut value = json!({ "inputs": inputs, "labels": targets });
            if self.packed {
                let documents = labels.chunks(context).map(|row| {
                    let number = |count: &mut u32, label: &Label| {
                        *count += u32::from(label.starts_document);
                        Some(*count)
                    };
                    row.iter().scan(0, number).collect::<Vec<u32>>()
                });
                value["documents"] = json!(documents.collect::<Vec<_>>());
            }
            value
        };
        json!({
            "microbatches": (0..self.manifest.training.microbatches).map(microbatch).collect::<Vec<_>>(),
            "learning_rate": learning_rate(&self.manifest, Step(step)),
        })
    }

    /// Forward through all stages; returns the loss.
    pub(crate) fn forward(&mut self, step: u64, microbatch: u32) -> f32 {
        self.forward_preferring(step, microbatch).0
    }

    /// As [`Self::forward`]; also returns which completions of pairs are preferred.
    pub(crate) fn forward_preferring(&mut self, step: u64, microbatch: u32) -> (f32, Preferences) {
        let batch = self.batch(step, microbatch);
        let labels = self.manifest.with_tokens(&batch.inputs, batch.labels);
        let mut input = batch.inputs;
        for stage in self.manifest.stages() {
            match self.engine.forward(key(step, stage, microbatch), &input, Some(&labels)) {
                Ok(ForwardOutput::Activation(activation)) => input = activation,
                Ok(ForwardOutput::Loss { share, targets, preferences, .. }) => {
                    *self.targets.entry(step).or_default() += targets;
                    return (share, preferences);
                }
                Err(error) => panic!("{error}"),
            }
        }
        panic!("the last stage gives a loss")
    }

    /// Backward through all stages; counts the microbatch.
    pub(crate) fn backward(&mut self, step: u64, microbatch: u32) {
        let mut gradient: Option<Bytes> = None;
        for stage in self.manifest.stages().collect::<Vec<_>>().into_iter().rev() {
            let key = key(step, stage, microbatch);
            gradient = self.engine.backward(key, gradient.as_ref()).expect("a backward pass");
            self.engine.accumulate(key).expect("gradients in range");
        }
    }

    /// Reduces and applies; returns the global norm.
    pub(crate) fn finish(&mut self, step: u64) -> f64 {
        let gradients = self.gradients(step);
        self.apply(step, &gradients)
    }

    /// The mean gradient of every weight group.
    pub(crate) fn gradients(&self, step: u64) -> Vec<Bytes> {
        let fixed_point = FixedPoint::of(&self.manifest);
        let mean = |weights| {
            let all = 0..group_elements(&self.manifest, weights);
            let reduce = |sums: &[u8]| fixed_point.reduce(&[sums]).expect("one part");
            self.engine.read_sums(weights, Step(step), all, reduce).expect("hosted")
        };
        self.manifest.weight_groups().map(mean).collect()
    }

    /// Applies; returns the global norm.
    pub(crate) fn apply(&mut self, step: u64, gradients: &[Bytes]) -> f64 {
        let targets = self.targets.remove(&step).unwrap_or(0);
        each_update(&self.manifest, step, gradients, targets, |stage, update| {
            self.engine.apply(stage, update).expect("a whole gradient");
        })
    }

    /// Runs a whole step; returns its mean loss and the gradient's norm.
    pub(crate) fn step(&mut self, step: u64) -> (f64, f64) {
        let microbatches = self.manifest.training.microbatches;
        let mut loss = 0.0;
        for microbatch in 0..microbatches {
            if self.manifest.exchanges_of(Microbatch(microbatch)) > 1 {
                loss += f64::from(self.train_worker((step, microbatch), 1));
                continue;
            }
            loss += f64::from(self.forward(step, microbatch));
            self.backward(step, microbatch);
        }
        let scale = self.manifest.gradient_scale(self.targets[&step]);
        (loss / f64::from(microbatches) * scale, self.finish(step))
    }

    /// All weights in the order of an uncut model, as bits.
    pub(crate) fn weights(&self) -> Vec<u32> {
        let state = |stage| self.engine.state(stage).expect("hosted").weights;
        self.manifest.stages().flat_map(state).map(f32::to_bits).collect()
    }
}

/// Makes each stage's update from the mean gradients of all weight groups; returns the global norm.
pub(crate) fn each_update(
    manifest: &Manifest,
    step: u64,
    gradients: &[Bytes],
    targets: u64,
    mut apply: impl FnMut(Stage, &Update<'_>),
) -> f64 {
    let squares = manifest.weight_groups().zip(gradients);
    let squares = squares.map(|(weights, mean)| group_square_norm(manifest, weights, mean));
    let norm = squares.sum::<f64>().sqrt();
    let gradient_norm = norm * manifest.gradient_scale(targets);
    for stage in manifest.stages() {
        let groups = manifest.groups_of(stage);
        let gradients: Vec<&[u8]> =
            groups.map(|weights| &gradients[usize::from(weights.0)][..]).collect();
        let (step, count) = (Step(step), step + 1);
        apply(
            stage,
            &Update {
                step,
                count,
                gradients: &gradients,
                gradient_norm,
                loss: FixedLoss::new(0, targets),
            },
        );
    }
    gradient_norm
}

pub(crate) fn key(step: u64, stage: Stage, microbatch: u32) -> ClaimKey {
    ClaimKey { step: Step(step), stage, microbatch: Microbatch(microbatch) }
}

/// Runs a script of `tests/python` and parses the JSON that it prints.
pub(crate) fn python(script: &str, arguments: &[&str]) -> Value {
    let arguments: Vec<&OsStr> = arguments.iter().map(OsStr::new).collect();
    serve::run(&Path::new("engine/tests/python").join(script), &arguments)
}

/// The numbers of a JSON list.
pub(crate) fn numbers(value: &Value) -> Vec<f64> {
    let list = value.as_array().expect("a list");
    list.iter().map(|number| number.as_f64().expect("a number")).collect()
}

/// Writes a checkpoint.
pub(crate) fn write(trainer: &Trainer, step: u64, folder: &Path) -> PathBuf {
    let place = folder.join(format!("checkpoint-{step}"));
    fs::create_dir(&place).expect("writable");
    let mut files = Vec::new();
    for stage in trainer.manifest.stages() {
        files.extend(trainer.engine.write_stage(stage, &place).expect("writable"));
    }
    let base = trainer.base.as_ref();
    write_index(&place, &trainer.manifest, Step(step), &files, base, &[]).expect("writable");
    place
}

/// Trains from one checkpoint on in PyTorch alone, and compares losses and gradient norms, and the
/// weights at the end with those of another checkpoint.
pub(crate) fn assert_as_pytorch(
    manifest: &Manifest,
    [first, trained]: [&Path; 2],
    steps: &[Value],
    ours: &[(f64, f64)],
) {
    let adam = manifest.optimizer.rule.adam().expect("AdamW");
    let run = json!({
        "checkpoint": first,
        "trained": trained,
        "steps": steps,
        "staleness": manifest.training.staleness,
        "beta1": adam.beta1,
        "beta2": adam.beta2,
        "epsilon": adam.epsilon,
        "weight_decay": manifest.optimizer.weight_decay,
        "gradient_clip": manifest.optimizer.gradient_clip,
    });
    let path = trained.with_extension("reference.json");
    fs::write(&path, run.to_string()).expect("writable");
    let theirs = python("reference.py", &[path.to_str().expect("a plain path")]);
    let (losses, norms) = (numbers(&theirs["losses"]), numbers(&theirs["norms"]));
    assert_eq!(losses.len(), ours.len());
    let clip = manifest.optimizer.gradient_clip;
    assert!(norms.iter().any(|norm| *norm > clip), "nothing was clipped: {norms:?}");
    for (step, ((loss, norm), (our_loss, our_norm))) in
        losses.into_iter().zip(norms).zip(ours).enumerate()
    {
        assert!((our_loss - loss).abs() < 1e-3, "step {step}: {our_loss} and {loss}");
        assert!((our_norm - norm).abs() < 1e-2 * norm, "step {step}: {our_norm} and {norm}");
    }
    let [off, moved] = ["off", "moved"].map(|key| theirs[key].as_f64().expect("a number"));
    println!("the weights moved by {moved} and differ by {off}");
    assert!(off < 1e-2 * moved, "the weights moved by {moved} and differ by {off}");
}
