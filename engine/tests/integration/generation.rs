//! Generation with keys and values of earlier tokens: compared with transformers, and with passes
//! over the whole text.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Trainer, manifest, python, samples, text, write};
use serde_json::json;
use shoal_engine::{
    BaseFiles, BaseIndex, Device, DeviceChoice, Ending, EngineError, Generator, Sampling, base,
};
use shoal_protocol::manifest::Model;

/// The longest text of every model in families.py.
const POSITIONS: usize = 128;

fn open(folder: &Path) -> Generator {
    let device = Device::open(DeviceChoice::Cpu, 1).expect("a CPU");
    Generator::open(folder, device).expect("whole")
}

/// The likeliest tokens, until the model has no more positions.
fn continued(generator: &mut Generator, prompt: &[u32]) -> Vec<u32> {
    let ends = Vec::new();
    let sampling =
        Sampling { tokens: 1000, seed: 0, temperature: 0.0, top_p: 1.0, vocabulary: 300, ends };
    let mut generation = generator.generate(prompt, sampling).expect("a short prompt");
    let tokens = generation.by_ref().collect::<Result<_, _>>().expect("a small model");
    assert_eq!(generation.ending(), Some(Ending::Positions));
    tokens
}

#[test]
fn every_family_generates_the_same_tokens_as_transformers() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [models, varied] = ["models", "varied"].map(|name| folder.path().join(name));
    let [from, to] = [&models, &varied].map(|path| path.to_str().expect("a plain path"));
    fs::create_dir(&models).expect("writable");
    let made = python("families.py", &["make", from]);
    let prompt: Vec<u32> = serde_json::from_value(made["tokens"].clone()).expect("tokens");
    let theirs = python("generate.py", &[from, to, &json!(prompt).to_string()]);
    let theirs = theirs.as_object().expect("models");
    assert_eq!(theirs.len(), made["logits"].as_object().expect("models").len());
    for (name, tokens) in theirs {
        let expected: Vec<u32> = serde_json::from_value(tokens.clone()).expect("tokens");
        assert_eq!(expected.len(), POSITIONS - prompt.len(), "{name}");
        let different = expected.iter().collect::<BTreeSet<_>>().len();
        assert!(different > 20, "{name} says nothing: {expected:?}");
        let place = folder.path().join(name);
        fs::create_dir(&place).expect("writable");
        for untied in [false, true] {
            let base = place.join(format!("base-{untied}"));
            base::import(&varied.join(name), &base, untied).expect("a known family");
            assert_eq!(continued(&mut open(&base), &prompt), expected, "{name}");
        }
        let mut generator = open(&checkpoint(&place.join("base-true"), &place));
        assert_eq!(generator.positions(), POSITIONS, "{name}: samples are shorter");
        assert_eq!(continued(&mut generator, &prompt), expected, "{name} in three stages");
        let base = place.join("base");
        base::import(&models.join(name), &base, false).expect("a known family");
        assert_cache_changes_nothing(name, open(&base));
    }
}

/// A checkpoint of a run in three stages that has just started from a base.
fn checkpoint(base: &Path, place: &Path) -> PathBuf {
    let files = BaseFiles::in_folder(base).expect("a base");
    let (_, named) = BaseIndex::read(base).expect("a base");
    let mut manifest = manifest();
    manifest.model = Model { context: 16, base: Some(named), ..files.index.model.clone() };
    manifest.training.stages = 3;
    let samples = samples(&mut manifest, place, &text());
    write(&Trainer::from_base(&manifest, samples, &files), 0, place)
}

/// Reads a text in pieces of different lengths, goes back, and compares all logits with those of
/// one pass over it.
fn assert_cache_changes_nothing(name: &str, mut generator: Generator) {
    let text: Vec<u32> = (0..POSITIONS as u32).map(|place| place * 17 % 300).collect();
    let whole = generator.logits(&text).expect("logits");
    let vocabulary = whole.len() / text.len();
    let by_length = ["dynamic", "longrope"].iter().any(|kind| name.ends_with(kind));
    let ends = (1..8).chain([20, 21, 26, 70]).chain(71..=text.len()).chain([70, 70, 10, 12]);
    for end in ends {
        let ours = generator.next_logits(&text[..end]).expect("logits");
        let row = &whole[(end - 1) * vocabulary..end * vocabulary];
        // The length of a text decides the angles of all its tokens.
        let alone = by_length.then(|| generator.logits(&text[..end]).expect("logits"));
        let row = alone.as_ref().map_or(row, |alone| &alone[(end - 1) * vocabulary..]);
        let differences = ours.iter().zip(row).map(|(ours, whole)| (ours - whole).abs());
        let largest = differences.fold(0.0, f32::max);
        assert!(largest < 1e-5, "{name}, token {end}: the logits differ by {largest}");
    }
}

#[test]
fn a_long_prompt_is_read_in_parts_and_a_longer_one_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    manifest.model.context = 1100;
    manifest.training.stages = 2;
    manifest.training.microbatches = 1;
    manifest.training.microbatch_size = 1;
    let samples = samples(&mut manifest, folder.path(), &text());
    let trainer = Trainer::new(&manifest, samples);
    let mut generator = open(&write(&trainer, 0, folder.path()));
    let tokens: Vec<u32> = text()[..1101].iter().map(|byte| u32::from(*byte)).collect();
    let whole = generator.logits(&tokens[..1100]).expect("logits");
    let last = generator.next_logits(&tokens[..1100]).expect("logits");
    let pairs = last.iter().zip(&whole[whole.len() - last.len()..]);
    assert!(pairs.map(|(one, other)| (one - other).abs()).fold(0.0, f32::max) < 1e-5);
    let error = generator.next_logits(&tokens).expect_err("too long");
    assert!(matches!(error, EngineError::TextTooLong { tokens: 1101, positions: 1100 }), "{error}");
    // An unknown token changes nothing.
    let error = generator.next_logits(&[1, 300]).expect_err("there are 256 tokens");
    assert!(matches!(error, EngineError::UnknownToken { token: 300, .. }), "{error}");
    assert_eq!(generator.next_logits(&tokens[..1100]).expect("logits"), last);
}

#[test]
fn a_folder_without_a_model_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let device = Device::open(DeviceChoice::Cpu, 1).expect("a CPU");
    let error = Generator::open(folder.path(), device).expect_err("it is empty");
    assert!(matches!(error, EngineError::NotAModel { .. }), "{error}");
}
