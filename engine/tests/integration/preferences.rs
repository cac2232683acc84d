//! Trains a tiny random model on pairs with each loss of preferences, and compares with PyTorch; splits of a step and
//! slices change nothing.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::{Trainer, manifest, numbers, python, samples, text, write};
use bytes::Bytes;
use serde_json::{Value, json};
use shoal_engine::base::{self, ExportDtype};
use shoal_engine::{
    BaseFiles, Batch, Checkpoint, Device, DeviceChoice, EngineError, ForwardOutput, Scorer,
    learning_rate,
};
use shoal_protocol::ids::{ContentHash, Stage, Step};
use shoal_protocol::label::Label;
use shoal_protocol::manifest::{
    Data, Dtype, Loss, Manifest, Model, Pairs, Preference, PreferenceKind, Prepared,
};

const STEPS: u64 = 20;
const CONTEXT: usize = 24;
const VOCABULARY: u64 = 60;

/// Different pairs, which are read again and again.
const PAIRS: u64 = 12;

/// The losses, with their factors.
const LOSSES: [Preference; 4] = [
    Preference { kind: PreferenceKind::Dpo, beta: 0.5, gamma: 0.0 },
    Preference { kind: PreferenceKind::Ipo, beta: 0.5, gamma: 0.0 },
    Preference { kind: PreferenceKind::Simpo, beta: 2.0, gamma: 0.5 },
    Preference { kind: PreferenceKind::Orpo, beta: 0.3, gamma: 0.0 },
];

/// A prompt with its chosen and its rejected completion.
struct Pair {
    prompt: Vec<u32>,
    completions: [Vec<u32>; 2],
}

impl Pair {
    /// The pair with this number: any tokens, of any lengths that fit into a row.
    fn new(number: u64) -> Self {
        let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut below = |most: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % most
        };
        let mut tokens = |least: u64, most: u64| -> Vec<u32> {
            let length = least + below(most - least + 1);
            (0..length).map(|_| below(VOCABULARY) as u32).collect()
        };
        Self { prompt: tokens(1, 4), completions: [tokens(1, 8), tokens(1, 8)] }
    }

    fn json(&self) -> Value {
        let [chosen, rejected] = &self.completions;
        json!({ "prompt": self.prompt, "chosen": chosen, "rejected": rejected })
    }

    /// A sequence, and which of its tokens count.
    fn sequence(&self, which: usize) -> (Vec<u32>, Vec<bool>) {
        let tokens = [&self.prompt[..], &self.completions[which]].concat();
        let counts = (0..tokens.len()).map(|place| place >= self.prompt.len()).collect();
        (tokens, counts)
    }

    /// The row of the pair: inputs, and labels with the reference's log-probabilities if there are any.
    fn encode(&self, reference: Option<[f32; 2]>) -> [Vec<u32>; 2] {
        let mut row: Vec<(u32, bool, bool)> = Vec::new();
        for which in 0..2 {
            let (tokens, counts) = self.sequence(which);
            let places = tokens.into_iter().zip(counts).enumerate();
            row.extend(places.map(|(place, (token, counts))| (token, counts, place == 0)));
        }
        let length = row.len();
        row.resize(CONTEXT + 1, (0, false, false));
        let label = |at: usize| {
            let (target, counts, _) = row[at + 1];
            let padding = at + 1 >= length;
            let starts_document = row[at].2 || at == length;
            Label { target: counts.then_some(target), starts_document, padding }.to_word()
        };
        let words = reference.into_iter().flatten().map(f32::to_bits);
        let labels = (0..CONTEXT).map(label).chain(words).collect();
        [row[..CONTEXT].iter().map(|(token, ..)| *token).collect(), labels]
    }
}

/// A run of three stages on pairs.
fn run_of(model: &Model, loss: Preference) -> Manifest {
    let mut manifest = manifest();
    manifest.model = Model { context: CONTEXT as u32, ..model.clone() };
    manifest.training.stages = 3;
    manifest.training.microbatch_size = 2;
    manifest.training.loss = Loss::Preference(loss);
    let base = model.base.expect("a base");
    manifest.data = Data::Prepared(Prepared {
        index: ContentHash([1; 32]),
        bytes: 1,
        rows: 120,
        held_out_rows: 1,
        context: CONTEXT as u32,
        vocabulary: VOCABULARY as u32,
        pairs: Some(Pairs { reference: Some(base.index) }),
    });
    manifest.check().expect("a run");
    manifest
}

/// The pairs of a microbatch.
fn pairs(manifest: &Manifest, step: u64, microbatch: u32) -> Vec<Pair> {
    let size = u64::from(manifest.training.microbatch_size);
    let first = (step * u64::from(manifest.training.microbatches) + u64::from(microbatch)) * size;
    (first..first + size).map(|number| Pair::new(number % PAIRS)).collect()
}

fn batch(manifest: &Manifest, pairs: &[Pair], scorer: &Scorer) -> Batch {
    let bytes =
        |words: Vec<u32>| -> Vec<u8> { words.into_iter().flat_map(u32::to_le_bytes).collect() };
    let (mut inputs, mut labels) = (Vec::new(), Vec::new());
    for pair in pairs {
        let reference = manifest.training.loss.needs_reference().then(|| references(pair, scorer));
        let [own, words] = pair.encode(reference);
        inputs.extend(bytes(own));
        labels.extend(bytes(words));
    }
    Batch { inputs: inputs.into(), labels: labels.into() }
}

fn references(pair: &Pair, scorer: &Scorer) -> [f32; 2] {
    [0, 1].map(|which| {
        let (tokens, counts) = pair.sequence(which);
        scorer.log_probability(&tokens, &counts).expect("a short text") as f32
    })
}

/// A tiny base, and a model that scores with it.
struct Start {
    folder: tempfile::TempDir,
    files: BaseFiles,
    model: Model,
    scorer: Scorer,
}

impl Start {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().to_str().expect("a plain path");
        python("families.py", &["make", path, "llama"]);
        let base = folder.path().join("base");
        let imported = base::import(&folder.path().join("llama"), &base, false).expect("imported");
        let model = Model { base: Some(imported.base), ..imported.index.model };
        let files = BaseFiles::in_folder(&base).expect("a base");
        let device = Device::open(DeviceChoice::Cpu, 1).expect("a processor");
        let scorer = Scorer::open(&base, model.context, Dtype::F32, device).expect("a base");
        Self { folder, files, model, scorer }
    }

    /// A trainer of these steps on pairs.
    fn trainer(&self, manifest: &Manifest, steps: u64, place: &Path) -> Trainer {
        std::fs::create_dir_all(place).expect("writable");
        let mut of_text = manifest.clone();
        of_text.training.loss = Loss::CrossEntropy;
        let samples = samples(&mut of_text, place, &text());
        let mut trainer = Trainer::from_base(manifest, samples, &self.files);
        for step in 0..steps {
            for microbatch in 0..manifest.training.microbatches {
                let pairs = pairs(manifest, step, microbatch);
                let batch = batch(manifest, &pairs, &self.scorer);
                trainer.given.insert((step, microbatch), batch);
            }
        }
        trainer
    }
}

/// Trains with a loss, and returns each step's loss and norm with what the script needs to repeat it.
fn train(start: &Start, loss: Preference) -> (Vec<(f64, f64)>, Value) {
    let manifest = run_of(&start.model, loss);
    let place = start.folder.path().join(loss.kind.name());
    let mut trainer = start.trainer(&manifest, STEPS, &place);
    let ours = (0..STEPS).map(|step| trainer.step(step)).collect();
    let checkpoint = Checkpoint::open(&write(&trainer, STEPS, &place)).expect("a checkpoint");
    let trained = place.join("trained");
    base::export(&checkpoint, &start.files, &trained, ExportDtype::F32).expect("exported");
    let step = |step: u64| {
        let microbatch = |number| -> Vec<Value> {
            pairs(&manifest, step, number).iter().map(Pair::json).collect()
        };
        let microbatches: Vec<_> = (0..manifest.training.microbatches).map(microbatch).collect();
        json!({ "microbatches": microbatches, "learning_rate": learning_rate(&manifest, Step(step)) })
    };
    let (optimizer, Preference { kind, beta, gamma }) = (&manifest.optimizer, loss);
    let adam = optimizer.rule.adam().expect("AdamW");
    let run = json!({
        "source": start.folder.path().join("llama"),
        "trained": trained,
        "loss": kind.name(),
        "beta": beta,
        "gamma": gamma,
        "steps": (0..STEPS).map(step).collect::<Vec<_>>(),
        "beta1": adam.beta1,
        "beta2": adam.beta2,
        "epsilon": adam.epsilon,
        "weight_decay": optimizer.weight_decay,
        "gradient_clip": optimizer.gradient_clip,
    });
    (ours, run)
}

#[test]
fn losses_of_preferences_train_as_in_pytorch() {
    let start = Start::new();
    let ours: BTreeMap<&str, _> =
        LOSSES.iter().map(|loss| (loss.kind.name(), train(&start, *loss))).collect();
    let runs: BTreeMap<_, _> = ours.iter().map(|(name, (_, run))| (name, run)).collect();
    let path = start.folder.path().join("runs.json");
    std::fs::write(&path, json!(runs).to_string()).expect("writable");
    let theirs = python("preferences.py", &[path.to_str().expect("a plain path")]);
    for (name, (steps, _)) in ours {
        let theirs = &theirs[name];
        let [losses, norms] = ["losses", "norms"].map(|key| numbers(&theirs[key]));
        for (step, ((loss, norm), (their_loss, their_norm))) in
            steps.iter().zip(losses.iter().zip(norms)).enumerate()
        {
            let case = format!("{name}, step {step}");
            assert!((loss - their_loss).abs() < 1e-4, "{case}: {loss} and {their_loss}");
            assert!((norm - their_norm).abs() < 1e-3 * their_norm, "{case}: {norm}, {their_norm}");
        }
        assert!(losses[STEPS as usize - 1] < losses[0], "{name}: {losses:?}");
        let figure = |key: &str| theirs[key].as_f64().expect("a number");
        assert!(figure("moved") > 1e-2, "{name}: the weights hardly moved");
        assert!(figure("off") < 2e-4, "{name}: the weights differ by {}", figure("off"));
        let references = theirs["references"].as_array().expect("a list");
        for (number, reference) in references.iter().enumerate() {
            let ours = references_of(&start, number as u64);
            for (ours, theirs) in ours.into_iter().zip(numbers(reference)) {
                assert!((f64::from(ours) - theirs).abs() < 1e-4, "{ours} and {theirs}");
            }
        }
    }
}

fn references_of(start: &Start, number: u64) -> [f32; 2] {
    references(&Pair::new(number % PAIRS), &start.scorer)
}

/// The gradient and the loss of the first step, and what it prefers.
fn first_step(start: &Start, manifest: &Manifest) -> (Vec<f32>, f64, (u64, f64)) {
    let name = format!("{}-{}", manifest.training.microbatches, manifest.model.slices);
    let mut trainer = start.trainer(manifest, 1, &start.folder.path().join(name));
    let microbatches = manifest.training.microbatches;
    let (mut loss, mut preferred, mut margin) = (0.0, 0, 0.0);
    for microbatch in 0..microbatches {
        let (share, preferences) = trainer.forward_preferring(0, microbatch);
        loss += f64::from(share) / f64::from(microbatches);
        preferred += preferences.preferred;
        margin += f64::from(preferences.margin) / f64::from(microbatches);
        trainer.backward(0, microbatch);
    }
    let gradients = trainer.gradients(0).concat();
    let floats = gradients.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    (floats.collect(), loss, (preferred, margin))
}

#[test]
fn splits_of_a_step_and_slices_change_no_gradient() {
    let start = Start::new();
    for loss in LOSSES {
        let whole = run_of(&start.model, loss);
        let (expected, expected_loss, preferences) = first_step(&start, &whole);
        let largest = expected.iter().fold(0.0f32, |most, one| most.max(one.abs()));
        for (microbatches, size, slices) in [(6, 1, 1), (2, 3, 1), (1, 6, 2)] {
            let mut split = whole.clone();
            split.training.microbatches = microbatches;
            split.training.microbatch_size = size;
            split.model.slices = slices;
            let (found, found_loss, found_preferences) = first_step(&start, &split);
            let off = expected.iter().zip(&found).map(|(one, other)| (one - other).abs());
            let off = off.fold(0.0, f32::max);
            let case = format!("{:?} in {microbatches} of {size}, {slices} slices", loss.kind);
            assert!(off < 1e-5 * largest.max(1.0), "{case}: gradients differ by {off}");
            assert!((found_loss - expected_loss).abs() < 1e-5, "{case}: {found_loss}");
            // Rewards beside a reference begin at 0, but for rounding.
            if !split.training.loss.needs_reference() {
                assert_eq!(found_preferences.0, preferences.0, "{case}");
            }
            assert!((found_preferences.1 - preferences.1).abs() < 1e-5, "{case}");
        }
    }
}

#[test]
fn samples_that_are_no_pairs_are_refused() {
    let start = Start::new();
    let manifest = run_of(&start.model, LOSSES[0]);
    let mut trainer = start.trainer(&manifest, 1, &start.folder.path().join("refused"));
    let batch = trainer.given[&(0, 0)].clone();
    let row = 4 * manifest.words_of_row() as usize;
    let refused = |trainer: &mut Trainer, change: &dyn Fn(&mut [u8])| {
        let mut labels = batch.labels.to_vec();
        change(&mut labels[row..]);
        let key = crate::common::key(0, Stage(0), 0);
        let found = trainer.engine.forward(key, &batch.inputs, Some(&Bytes::from(labels)));
        trainer.engine.discard(key);
        match found {
            Err(EngineError::NotAPair { sample }) => Some(sample),
            Err(error) => panic!("{error}"),
            Ok(ForwardOutput::Activation(_) | ForwardOutput::Loss { .. }) => None,
        }
    };
    assert_eq!(refused(&mut trainer, &|_| {}), None);
    // No document begins within the row.
    let one_document = |labels: &mut [u8]| {
        for word in labels[4..row - 8].as_chunks_mut::<4>().0 {
            let label =
                Label { starts_document: false, ..Label::from_word(u32::from_le_bytes(*word)) };
            *word = label.to_word().to_le_bytes();
        }
    };
    assert_eq!(refused(&mut trainer, &one_document), Some(1));
    let not_finite = |labels: &mut [u8]| labels[row - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    assert_eq!(refused(&mut trainer, &not_finite), Some(1));
}
