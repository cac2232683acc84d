//! Packing changes no document: in a row with others each has the losses and the gradient that it has alone, in every
//! family. Neither does the cache of keys and values change what is generated.

mod models;

use std::collections::BTreeSet;
use std::env;
use std::path::Path;

use bytes::Bytes;
use shoal_engine::{Device, DeviceChoice, ForwardOutput, Generator, Sampling, family};
use shoal_protocol::label::Label;
use shoal_protocol::manifest::{Manifest, Model};

use self::models::{Dice, VOCABULARY};
use crate::common::{Trainer, key, manifest, samples, text, write};

/// Models a family, unless `SHOAL_PACKING` says otherwise; `SHOAL_SEED` is the seed of the first.
const MODELS: &str = "3";
/// Tokens of a row, and of the model's positions.
const CONTEXT: usize = 40;
/// Rows of a microbatch.
const ROWS: usize = 2;
/// The largest difference of a token's loss, in nats.
const TOLERANCE: f64 = 1e-5;

/// A document in a packed microbatch: tokens, and the token to predict at each if it counts.
#[derive(Debug, Clone)]
struct Document {
    tokens: Vec<u32>,
    targets: Vec<Option<u32>>,
    /// Row and place of its first token.
    row: usize,
    place: usize,
}

/// What a failure needs to be repeated.
struct Case {
    name: String,
    manifest: Manifest,
    documents: Vec<Document>,
}

/// Runs a check with the models that the environment asks for.
fn each_model(check: impl Fn(&Case, &mut Dice)) -> (usize, BTreeSet<&'static str>) {
    let of = |name, default: &str| -> u64 {
        let value = env::var(name).unwrap_or_else(|_| default.to_owned());
        value.parse().expect("a number")
    };
    let (count, first) = (of("SHOAL_PACKING", MODELS), of("SHOAL_SEED", "1"));
    let mut kinds = BTreeSet::new();
    for family in family::families() {
        for seed in first..first + count {
            let mut dice = Dice::new(family, seed);
            let model = models::draw(family, seed, CONTEXT, &mut dice);
            kinds.extend(models::kinds(&model));
            let name = format!("{family}, SHOAL_SEED={seed}");
            check(&case(name, model, &mut dice), &mut dice);
        }
    }
    (count as usize, kinds)
}

fn case(name: String, model: Model, dice: &mut Dice) -> Case {
    let documents: Vec<Document> = (0..ROWS).flat_map(|row| pack(row, dice)).collect();
    let mut manifest = manifest();
    let slices = dice.from(&[1, 2]);
    manifest.model = Model { slices, ..model };
    if manifest.model.check().is_err() {
        manifest.model.slices = 1;
    }
    let training = &mut manifest.training;
    training.stages = dice.from(&[1, 2, 3]);
    training.recompute = dice.from(&[false, true]);
    training.microbatch_size = ROWS as u32;
    training.microbatches = documents.len() as u32;
    let name = format!("{name}, {:?}", manifest.model.block);
    Case { name, manifest, documents }
}

/// The documents of a row: any lengths, the last one perhaps cut, and perhaps room for padding behind it.
fn pack(row: usize, dice: &mut Dice) -> Vec<Document> {
    let mut documents = Vec::new();
    let end = CONTEXT - dice.from(&[0, 0, 1, 5]);
    let mut place = 0;
    while place < end {
        let length = dice.from(&[1, 2, 3, 5, 8, 13, 21]).min(end - place);
        let tokens: Vec<u32> = (0..length).map(|_| dice.below(VOCABULARY)).collect();
        let follows = |at: usize, dice: &mut Dice| match tokens.get(at + 1) {
            Some(next) => Some(*next),
            // Only a document that is cut has a token behind its last.
            None => (place + length == CONTEXT).then(|| dice.below(VOCABULARY)),
        };
        let targets = (0..length).map(|at| follows(at, dice).filter(|_| dice.below(4) > 0));
        let targets = targets.collect();
        documents.push(Document { tokens: tokens.clone(), targets, row, place });
        place += length;
    }
    documents
}

/// The inputs and labels of a microbatch in which documents have these rows and places. All other tokens are padding.
fn batch(documents: &[Document]) -> (Vec<u32>, Vec<Label>) {
    let padding = |starts_document| Label { target: None, starts_document, padding: true };
    let mut inputs = vec![0; ROWS * CONTEXT];
    let mut labels = vec![padding(false); ROWS * CONTEXT];
    for document in documents {
        let start = document.row * CONTEXT + document.place;
        let targets = document.tokens.iter().zip(&document.targets);
        for (at, (token, target)) in targets.enumerate() {
            inputs[start + at] = *token;
            labels[start + at] =
                Label { target: *target, starts_document: at == 0, padding: false };
        }
        let behind = document.place + document.tokens.len();
        if behind < CONTEXT && labels[document.row * CONTEXT + behind].padding {
            labels[document.row * CONTEXT + behind] = padding(true);
        }
    }
    (inputs, labels)
}

/// The sum of the losses of a microbatch, in nats. A microbatch from `training.microbatches` on is held out.
fn loss(trainer: &mut Trainer, microbatch: u32, (inputs, labels): (Vec<u32>, Vec<Label>)) -> f64 {
    let bytes =
        |words: Vec<u32>| -> Bytes { words.into_iter().flat_map(u32::to_le_bytes).collect() };
    let mut input = bytes(inputs);
    let labels = bytes(labels.into_iter().map(Label::to_word).collect());
    let labels = trainer.manifest.with_tokens(&input, labels);
    for stage in trainer.manifest.stages() {
        let key = key(0, stage, microbatch);
        match trainer.engine.forward(key, &input, Some(&labels)).expect("a small pass") {
            ForwardOutput::Activation(activation) => input = activation,
            ForwardOutput::Loss { share, .. } => {
                return f64::from(share) * (ROWS * CONTEXT) as f64;
            }
        }
    }
    unreachable!("the last stage gives a loss")
}

fn trainer(case: &Case, folder: &Path) -> Trainer {
    let mut manifest = case.manifest.clone();
    let samples = samples(&mut manifest, folder, &text());
    Trainer::new(&manifest, samples)
}

fn generator(trainer: &Trainer, folder: &Path) -> Generator {
    let device = Device::open(DeviceChoice::Cpu, 1).expect("a CPU");
    Generator::open(&write(trainer, 0, folder), device).expect("a whole checkpoint")
}

/// The loss of each token of a document that is read by itself, in nats; 0 where none counts.
fn losses_alone(generator: &mut Generator, document: &Document) -> Vec<f64> {
    let logits = generator.logits(&document.tokens).expect("logits");
    let rows = logits.chunks(VOCABULARY as usize).zip(&document.targets);
    let loss = |(row, target): (&[f32], &Option<u32>)| {
        let most = row.iter().copied().fold(f32::MIN, f32::max);
        let total: f64 = row.iter().map(|logit| f64::from(logit - most).exp()).sum();
        target.map_or(0.0, |target| total.ln() + f64::from(most - row[target as usize]))
    };
    rows.map(loss).collect()
}

/// The documents, of which only one has targets: all of its own, or a single one.
fn with_targets_of(documents: &[Document], counted: usize, only: Option<usize>) -> Vec<Document> {
    let mut documents = documents.to_vec();
    for (number, document) in documents.iter_mut().enumerate() {
        for (at, target) in document.targets.iter_mut().enumerate() {
            target.take_if(|_| number != counted || only.is_some_and(|only| only != at));
        }
    }
    documents
}

fn check_losses(case: &Case, dice: &mut Dice) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut trainer = trainer(case, folder.path());
    let mut generator = generator(&trainer, folder.path());
    let held_out = case.manifest.training.microbatches;
    let mut most: f64 = 0.0;
    for (number, document) in case.documents.iter().enumerate() {
        let alone = losses_alone(&mut generator, document);
        let counted = document.targets.iter().flatten().count().max(1);
        let one = dice.below(alone.len() as u32) as usize;
        for (only, expected, counted) in
            [(None, alone.iter().sum::<f64>(), counted), (Some(one), alone[one], 1)]
        {
            let rows = batch(&with_targets_of(&case.documents, number, only));
            let packed = loss(&mut trainer, held_out, rows);
            let off = (packed - expected).abs() / counted as f64;
            assert!(
                off < TOLERANCE,
                "{}, document {number} of {} tokens at {} of row {}, target {only:?}: its loss is {packed}, \
                 and {expected} alone",
                case.name,
                document.tokens.len(),
                document.place,
                document.row,
            );
        }
        most = alone.into_iter().fold(most, f64::max);
    }
    assert!(most > 1.0, "{}: the losses say nothing", case.name);
}

#[test]
fn a_packed_document_has_the_losses_that_it_has_alone() {
    let (models, kinds) = each_model(check_losses);
    // Fewer models a family are a run by hand, to see one failure again.
    assert!(models < 3 || kinds.len() == models::KINDS, "only {kinds:?}");
}

/// The gradient of some microbatches, of every weight group in turn.
fn gradient(case: &Case, folder: &Path, microbatches: &[Vec<Document>]) -> Vec<f32> {
    let mut trainer = trainer(case, folder);
    for (number, documents) in (0..).zip(microbatches) {
        loss(&mut trainer, number, batch(documents));
        trainer.backward(0, number);
    }
    let gradients = trainer.gradients(0);
    let words = |bytes: &Bytes| bytes.as_chunks::<4>().0.to_vec();
    gradients.iter().flat_map(words).map(f32::from_le_bytes).collect()
}

/// Each document at the beginning of a row.
fn apart(documents: &[Document]) -> Vec<Vec<Document>> {
    let alone = |document: &Document| vec![Document { place: 0, ..document.clone() }];
    documents.iter().map(alone).collect()
}

fn check_gradient(case: &Case, _: &mut Dice) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let packed = gradient(case, folder.path(), std::slice::from_ref(&case.documents));
    let alone = gradient(case, folder.path(), &apart(&case.documents));
    let norm = |values: &mut dyn Iterator<Item = f32>| {
        values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt()
    };
    let off = norm(&mut packed.iter().zip(&alone).map(|(one, other)| one - other));
    let whole = norm(&mut alone.iter().copied());
    assert!(whole > 1e-3, "{}: the gradient says nothing", case.name);
    assert!(
        off < TOLERANCE * whole,
        "{}: the gradient of {} documents has the norm {whole}, and differs by {off} where they are packed",
        case.name,
        case.documents.len(),
    );
}

#[test]
fn a_packed_row_has_the_gradient_of_its_documents() {
    each_model(check_gradient);
}

fn check_generation(case: &Case, dice: &mut Dice) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let trainer = trainer(case, folder.path());
    let mut cached = generator(&trainer, folder.path());
    let mut before: Vec<u32> = Vec::new();
    for (number, document) in case.documents.iter().take(4).enumerate() {
        // The beginning of the text before, which the cache has, and another end.
        before.truncate(dice.below(before.len() as u32 + 1) as usize);
        let mut text = [&before[..], &document.tokens].concat();
        text.truncate(CONTEXT - 1);
        let sampling = Sampling {
            tokens: 6,
            seed: 0,
            temperature: 0.0,
            top_p: 1.0,
            vocabulary: VOCABULARY,
            ends: Vec::new(),
        };
        let generation = cached.generate(&text, sampling).expect("a short prompt");
        let tokens: Vec<u32> = generation.collect::<Result<_, _>>().expect("a small model");
        assert!(!tokens.is_empty(), "{}: nothing was generated", case.name);
        for (at, token) in tokens.into_iter().enumerate() {
            let whole = cached.logits(&text).expect("logits");
            let last = &whole[whole.len() - VOCABULARY as usize..];
            let most = last.iter().copied().fold(f32::MIN, f32::max);
            // Two tokens may be as likely as each other, but for rounding.
            assert!(
                f64::from(most - last[token as usize]) < TOLERANCE,
                "{}, document {number}, token {at}: {token} has the logit {}, and the likeliest {most}",
                case.name,
                last[token as usize],
            );
            text.push(token);
        }
        before = text;
    }
}

#[test]
fn a_cache_of_keys_and_values_changes_no_token() {
    each_model(check_generation);
}
