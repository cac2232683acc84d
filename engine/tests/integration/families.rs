//! Imports tiny random models of every family, trains them, exports them, and compares each step with
//! transformers.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::{Trainer, manifest, numbers, python, samples, text, write};
use safetensors::tensor::{Dtype, TensorView};
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

/// The tensors of a model's only file.
fn tensors(folder: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(folder.join("model.safetensors")).expect("one file");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("tensors");
    let of = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        (name, (view.shape().to_vec(), view.data().to_vec()))
    };
    tensors.tensors().into_iter().map(of).collect()
}

#[test]
fn what_predicts_further_tokens_is_left_out_and_biases_stay_as_they_are() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let place = folder.path().to_str().expect("a plain path");
    python("families.py", &["make", place, "deepseek-v3"]);
    let source = folder.path().join("deepseek-v3");
    let imported = |more: &str| {
        let mut tensors = tensors(&source);
        tensors.insert(more.to_owned(), (vec![1], vec![0; 4]));
        let views = tensors.iter().map(|(name, (shape, data))| {
            (name, TensorView::new(Dtype::F32, shape.clone(), data).expect("f32"))
        });
        let with = folder.path().join(format!("with {more}"));
        fs::create_dir(&with).expect("a folder");
        for file in ["config.json", "tokenizer.json"] {
            fs::copy(source.join(file), with.join(file)).expect("there");
        }
        safetensors::serialize_to_file(views, None, &with.join("model.safetensors"))
            .expect("space");
        base::import(&with, &folder.path().join(format!("base of {more}")), false)
    };
    // The model has layers 0 to 3, and one that predicts further tokens.
    let plain = base::import(&source, &folder.path().join("plain"), false).expect("a model").index;
    let with = imported("model.layers.4.shared_head.norm.weight").expect("a model").index;
    assert_eq!(with.weights, plain.weights);
    let error =
        imported("model.layers.5.shared_head.norm.weight").expect_err("it has no such layer");
    assert!(error.to_string().contains("model.layers.5."), "{error}");

    let files = BaseFiles::in_folder(&folder.path().join("plain")).expect("a base");
    let export = folder.path().join("export");
    base::export_base(&files, &export, ExportDtype::Bf16).expect("exported");
    let (before, after) = (tensors(&source), tensors(&export));
    let name = "model.layers.1.mlp.gate.e_score_correction_bias";
    assert_eq!(after[name], before[name]);
    let name = "model.layers.1.mlp.gate.weight";
    assert_eq!(2 * after[name].1.len(), before[name].1.len());
}

#[test]
fn a_mixture_is_exported_by_its_experts_names_without_loss() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let place = folder.path().to_str().expect("a plain path");
    let names =
        ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss", "deepseek-v2", "glm4-moe"];
    python("families.py", &[&["make", place][..], &names].concat());
    for name in names {
        let [base, export, again] =
            ["base", "export", "again"].map(|end| folder.path().join(format!("{name}-{end}")));
        let source = folder.path().join(name);
        let first = base::import(&source, &base, false).expect("a model").index;
        let files = BaseFiles::in_folder(&base).expect("a base");
        base::export_base(&files, &export, ExportDtype::F32).expect("exported");
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
        let [from, to] = match name {
            "deepseek-v2" => ["n_routed_experts", "num_experts"],
            "glm4-moe" => ["n_routed_experts", "num_local_experts"],
            _ if keys.contains_key("num_experts") => ["num_experts", "num_local_experts"],
            _ => ["num_local_experts", "num_experts"],
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
