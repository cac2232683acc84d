//! Imports tiny random models of every family, trains them, exports them, and compares each step with
//! transformers.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::{Trainer, manifest, numbers, python, samples, text, write};
use serde_json::{Value, json};
use shoal_engine::base::{self, ExportDtype};
use shoal_engine::{BaseFiles, Checkpoint, Device, DeviceChoice, Generator};
use shoal_protocol::manifest::Model;

const STEPS: u64 = 20;

/// A trained model, and what PyTorch needs to train it too.
struct Trained {
    losses: Vec<f64>,
    logits: Vec<f32>,
    run: Value,
}

#[test]
fn every_family_is_imported_trained_and_exported() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let made = python("families.py", &["make", folder.path().to_str().expect("a plain path")]);
    let tokens: Vec<u32> = serde_json::from_value(made["tokens"].clone()).expect("tokens");
    let mut all = BTreeMap::new();
    for (name, logits) in made["logits"].as_object().expect("models") {
        let source = folder.path().join(name);
        let place = folder.path().join(format!("{name}-work"));
        fs::create_dir(&place).expect("writable");
        let trained = train(&source, &place, false, &tokens, &numbers(logits));
        all.insert(name.clone(), trained);
        // Tied models, also with a head of their own.
        if ["qwen2", "gemma3"].contains(&name.as_str()) {
            let place = folder.path().join(format!("{name}-own-head-work"));
            fs::create_dir(&place).expect("writable");
            let trained = train(&source, &place, true, &tokens, &numbers(logits));
            all.insert(format!("{name}-own-head"), trained);
        }
    }
    let runs: BTreeMap<_, _> = all.iter().map(|(name, trained)| (name, &trained.run)).collect();
    let path = folder.path().join("runs.json");
    fs::write(&path, json!(runs).to_string()).expect("writable");
    let theirs = python("families.py", &["check", path.to_str().expect("a plain path")]);
    for (name, trained) in all {
        let theirs = &theirs[&name];
        for (step, (ours, loss)) in
            trained.losses.iter().zip(numbers(&theirs["losses"])).enumerate()
        {
            assert!((ours - loss).abs() < 1e-3, "{name}, step {step}: {ours} and {loss}");
        }
        let off = theirs["off"].as_f64().expect("a number");
        let furthest = &theirs["furthest"];
        assert!(off < 2e-3, "{name}: the weights differ by {off}, those of {furthest} most");
        assert_close(&name, &trained.logits, &numbers(&theirs["logits"]));
    }
}

#[test]
fn a_mixture_is_exported_by_its_experts_names_without_loss() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let place = folder.path().to_str().expect("a plain path");
    let names = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss"];
    python("families.py", &[&["make", place][..], &names].concat());
    for name in names {
        let [base, export, again] =
            ["base", "export", "again"].map(|end| folder.path().join(format!("{name}-{end}")));
        let source = folder.path().join(name);
        let first = base::import(&source, &base, false).expect("a model").index;
        let files = BaseFiles::in_folder(&base).expect("a base");
        base::export_base(&files, &export, ExportDtype::F32).expect("exported");
        let tensors = |folder: &Path| {
            let bytes = fs::read(folder.join("model.safetensors")).expect("one file");
            let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("tensors");
            let of = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
                (name, (view.shape().to_vec(), view.data().to_vec()))
            };
            tensors.tensors().into_iter().map(of).collect::<BTreeMap<_, _>>()
        };
        let (before, after) = (tensors(&source), tensors(&export));
        assert!(before == after, "{name}: {:?}", after.keys());
        let of_expert = match name {
            "mixtral" => ".experts.3.w2.weight",
            "gpt-oss" => ".experts.down_proj",
            _ => ".experts.3.down_proj.weight",
        };
        assert!(after.keys().any(|key| key.ends_with(of_expert)), "{name}: {:?}", after.keys());
        // The other spelling of the number of experts is the same model.
        let path = export.join("config.json");
        let config: Value = serde_json::from_slice(&fs::read(&path).expect("there")).expect("JSON");
        let mut keys = config.as_object().expect("keys").clone();
        let spellings = ["num_experts", "num_local_experts"];
        let [from, to] = match keys.contains_key(spellings[0]) {
            true => spellings,
            false => [spellings[1], spellings[0]],
        };
        // The class of Qwen2-MoE reads one of them.
        if name != "qwen2-moe" {
            let count = keys.remove(from).expect("a number of experts");
            keys.insert(to.to_owned(), count);
            fs::write(&path, json!(keys).to_string()).expect("writable");
        }
        let second = base::import(&export, &again, false).expect("a model").index;
        assert_eq!((second.model, second.weights), (first.model, first.weights), "{name}");
    }
}

fn assert_close(name: &str, ours: &[f32], theirs: &[f64]) {
    assert_eq!(ours.len(), theirs.len(), "{name}");
    let differences = ours.iter().zip(theirs).map(|(ours, theirs)| f64::from(*ours) - theirs);
    let largest = differences.map(f64::abs).fold(0.0, f64::max);
    assert!(largest < 1e-4, "{name}: the logits differ by {largest}");
    let spread = theirs.iter().copied().fold(0.0, f64::max);
    assert!(spread > 0.3, "{name}: the logits say nothing: {spread}");
}

fn train(source: &Path, place: &Path, untie: bool, tokens: &[u32], logits: &[f64]) -> Trained {
    let name = source.display().to_string();
    let folder = place.join("base");
    let imported = base::import(source, &folder, untie).unwrap_or_else(|e| panic!("{name}: {e}"));
    let files = BaseFiles::in_folder(&folder).expect("a base");
    let mut manifest = manifest();
    manifest.model = Model { context: 16, base: Some(imported.base), ..imported.index.model };
    manifest.training.stages = 3;
    let samples = samples(&mut manifest, place, &text());
    let mut trainer = Trainer::from_base(&manifest, samples, &files);
    let first = write(&trainer, 0, place);
    assert_close(&name, &logits_of(&first, tokens), logits);
    let steps: Vec<Value> = (0..STEPS).map(|step| trainer.batches(step)).collect();
    let losses = (0..STEPS).map(|step| trainer.step(step).0).collect();
    let last = write(&trainer, STEPS, place);
    let export = place.join("export");
    let checkpoint = Checkpoint::open(&last).expect("a checkpoint");
    // A checkpoint has all of the base that an export needs.
    let description = BaseFiles::in_folder(&last).expect("a base's index");
    base::export(&checkpoint, &description, &export, ExportDtype::F32).expect("exported");
    let optimizer = &manifest.optimizer;
    let adam = optimizer.rule.adam().expect("AdamW");
    let run = json!({
        "source": source,
        "export": export,
        "untied": untie,
        "tokens": tokens,
        "steps": steps,
        "staleness": 0,
        "beta1": adam.beta1,
        "beta2": adam.beta2,
        "epsilon": adam.epsilon,
        "weight_decay": optimizer.weight_decay,
        "gradient_clip": optimizer.gradient_clip,
    });
    Trained { losses, logits: logits_of(&last, tokens), run }
}

fn logits_of(checkpoint: &Path, tokens: &[u32]) -> Vec<f32> {
    let device = Device::open(DeviceChoice::Cpu, 1).expect("a CPU");
    Generator::open(checkpoint, device).expect("whole").logits(tokens).expect("logits")
}
