//! Trains adapters beside tiny random models, exports them, and compares with PEFT.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::{Trainer, manifest, numbers, python, samples, text, write};
use serde_json::{Value, json};
use shoal_engine::base::{self, ExportDtype};
use shoal_engine::{BaseFiles, Checkpoint, Device, DeviceChoice, EngineError, Generator};
use shoal_engine::{frozen_count, parameter_count};
use shoal_protocol::manifest::{Dtype, Lora, LoraTarget, Manifest, Model};

const STEPS: u64 = 20;

/// Models, the last one with a tied head, and the matrices that have adapters.
const RUNS: [(&str, &[LoraTarget]); 3] = [
    ("llama", &LoraTarget::ALL),
    ("qwen3", &[LoraTarget::QProj, LoraTarget::VProj]),
    ("gemma3", &[LoraTarget::KProj, LoraTarget::OProj, LoraTarget::UpProj, LoraTarget::DownProj]),
];

/// A run of three stages that trains adapters beside a base.
fn run_of(base: &base::Imported, targets: &[LoraTarget]) -> Manifest {
    let mut manifest = manifest();
    let shape = base.index.model.clone();
    manifest.model = Model { context: 16, base: Some(base.base), ..shape };
    manifest.training.stages = 3;
    // Rates at which adapters move visibly in a few steps.
    manifest.optimizer.learning_rate = 1e-2;
    manifest.lora = Some(Lora { rank: 4, alpha: 8.0, targets: targets.to_vec(), base: None });
    manifest
}

struct Trained {
    losses: Vec<f64>,
    logits: Vec<f32>,
    run: Value,
}

fn train(place: &Path, source: &Path, targets: &[LoraTarget], tokens: &[u32]) -> Trained {
    let folder = place.join("base");
    let imported = base::import(source, &folder, false).expect("imported");
    let files = BaseFiles::in_folder(&folder).expect("a base");
    let mut manifest = run_of(&imported, targets);
    let samples = samples(&mut manifest, place, &text());
    let mut trainer = Trainer::from_base(&manifest, samples, &files);
    let export = |trainer: &Trainer, version, name: &str| {
        let checkpoint = write(trainer, version, place);
        let out = place.join(name);
        // The checkpoint describes its base.
        let described = BaseFiles::in_folder(&checkpoint).expect("a base's index");
        let checkpoint = Checkpoint::open(&checkpoint).expect("a checkpoint");
        let f32 = ExportDtype::F32;
        base::export_adapter(&checkpoint, &described, &out, f32, Some("a/model"))
            .expect("exported");
        let unnamed =
            base::export_adapter(&checkpoint, &described, &place.join("unnamed"), f32, None);
        let error = unnamed.expect_err("PEFT would not find its model").to_string();
        assert!(error.contains("--base-model NAME"), "{error}");
        (checkpoint, out)
    };
    let (_, first) = export(&trainer, 0, "first");
    let steps: Vec<Value> = (0..STEPS).map(|step| trainer.batches(step)).collect();
    let losses = (0..STEPS).map(|step| trainer.step(step).0).collect();
    let (checkpoint, trained) = export(&trainer, STEPS, "trained");
    let merged = place.join("merged");
    base::export(&checkpoint, &files, &merged, ExportDtype::F32).expect("exported");
    let device = Device::open(DeviceChoice::Cpu, 1).expect("a CPU");
    let last = place.join(format!("checkpoint-{STEPS}"));
    let generator = Generator::open_with_base(&last, Some(&folder), device).expect("whole");
    let logits = generator.logits(tokens).expect("logits");
    assert!(matches!(Generator::open(&last, device), Err(EngineError::NeedsBase { .. })));
    let optimizer = &manifest.optimizer;
    let adam = optimizer.rule.adam().expect("AdamW");
    let run = json!({
        "source": source,
        "first": first,
        "trained": trained,
        "merged": merged,
        "tokens": tokens,
        "steps": steps,
        "staleness": 0,
        "beta1": adam.beta1,
        "beta2": adam.beta2,
        "epsilon": adam.epsilon,
        "weight_decay": optimizer.weight_decay,
        "gradient_clip": optimizer.gradient_clip,
    });
    Trained { losses, logits, run }
}

fn largest_difference(ours: &[f32], theirs: &[f64]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let differences = ours.iter().zip(theirs).map(|(ours, theirs)| f64::from(*ours) - theirs);
    differences.map(f64::abs).fold(0.0, f64::max)
}

#[test]
fn adapters_train_and_merge_as_in_peft() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().to_str().expect("a plain path");
    let names = RUNS.map(|(name, _)| name);
    let made = python("families.py", &[&["make", path][..], &names].concat());
    let tokens: Vec<u32> = serde_json::from_value(made["tokens"].clone()).expect("tokens");
    let mut all = BTreeMap::new();
    for (name, targets) in RUNS {
        let place = folder.path().join(format!("{name}-work"));
        fs::create_dir(&place).expect("writable");
        all.insert(name, train(&place, &folder.path().join(name), targets, &tokens));
    }
    let runs: BTreeMap<_, _> = all.iter().map(|(name, trained)| (name, &trained.run)).collect();
    let path = folder.path().join("runs.json");
    fs::write(&path, json!(runs).to_string()).expect("writable");
    let theirs = python("lora.py", &[path.to_str().expect("a plain path")]);
    for (name, trained) in all {
        let theirs = &theirs[name];
        let steps = trained.losses.iter().zip(numbers(&theirs["losses"])).enumerate();
        for (step, (ours, loss)) in steps {
            assert!((ours - loss).abs() < 1e-3, "{name}, step {step}: {ours} and {loss}");
        }
        let figure = |key: &str| theirs[key].as_f64().expect("a number");
        assert!(figure("moved") > 0.02, "{name}: the adapters hardly moved");
        assert!(figure("off") < 2e-3, "{name}: the adapters differ by {}", figure("off"));
        assert!(figure("merged_off") < 1e-6, "{name}: merged {}", figure("merged_off"));
        for logits in ["logits", "merged_logits"] {
            let difference = largest_difference(&trained.logits, &numbers(&theirs[logits]));
            assert!(difference < 1e-4, "{name}: {logits} differ by {difference}");
        }
    }
}

#[test]
fn only_adapters_take_the_room_of_trained_weights() {
    let mut manifest = manifest();
    manifest.training.stages = 2;
    manifest.training.dtype = Dtype::Bf16;
    let all: Vec<usize> =
        manifest.stages().map(|stage| parameter_count(&manifest, stage)).collect();
    let before: Vec<u64> = memory(&manifest);
    manifest.lora =
        Some(Lora { rank: 2, alpha: 4.0, targets: LoraTarget::ALL.to_vec(), base: None });
    for (stage, count) in manifest.stages().zip(&all) {
        assert_eq!(frozen_count(&manifest, stage), *count);
        assert!(parameter_count(&manifest, stage) < count / 5);
    }
    for ((before, after), (stage, count)) in
        before.into_iter().zip(memory(&manifest)).zip(manifest.stages().zip(all))
    {
        // 30 bytes for each trained weight, 2 for each frozen one.
        let adapters = parameter_count(&manifest, stage);
        assert_eq!(before - after, (28 * count - 30 * adapters) as u64);
    }
}

/// The memory of each stage.
fn memory(manifest: &Manifest) -> Vec<u64> {
    let span = shoal_protocol::ids::StageSpan::one;
    let floor = |stage| shoal_engine::memory_floor(manifest, span(stage), 1).0;
    manifest.stages().map(floor).collect()
}
