//! Trains adapters beside tiny random models, exports them, and compares with PEFT.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::{Trainer, manifest, numbers, python, samples, text, write};
use serde_json::{Value, json};
use shoal_engine::base::{self, ExportDtype};
use shoal_engine::{BaseFiles, Checkpoint, Device, DeviceChoice, EngineError, Generator, Island};
use shoal_engine::{frozen_count, parameter_count};
use shoal_protocol::ids::StageSpan;
use shoal_protocol::manifest::{Dtype, Lora, LoraTarget, Manifest, Model, Quantisation};

const STEPS: u64 = 20;

/// Models, the last one with a tied head, and the matrices that have adapters.
const RUNS: [(&str, &[LoraTarget]); 5] = [
    ("llama", &LoraTarget::ALL),
    ("qwen3", &[LoraTarget::QProj, LoraTarget::VProj]),
    ("gemma3", &[LoraTarget::KProj, LoraTarget::OProj, LoraTarget::UpProj, LoraTarget::DownProj]),
    (
        "mixtral",
        &[LoraTarget::QProj, LoraTarget::GateProj, LoraTarget::UpProj, LoraTarget::DownProj],
    ),
    (
        "deepseek-v3",
        &[LoraTarget::OProj, LoraTarget::GateProj, LoraTarget::UpProj, LoraTarget::DownProj],
    ),
];

/// A run of three stages that trains adapters beside a base.
fn run_of(base: &base::Imported, targets: &[LoraTarget], format: Option<Quantisation>) -> Manifest {
    let mut manifest = manifest();
    let shape = base.index.model.clone();
    manifest.model = Model { context: 16, base: Some(base.base), ..shape };
    manifest.training.stages = 3;
    // Rates at which adapters move visibly in a few steps.
    manifest.optimizer.learning_rate = 1e-2;
    manifest.lora = Some(Lora { rank: 4, alpha: 8.0, targets: targets.to_vec(), base: format });
    manifest
}

struct Trained {
    losses: Vec<f64>,
    logits: Vec<f32>,
    run: Value,
}

fn train(
    place: &Path,
    source: &Path,
    (targets, format): (&[LoraTarget], Option<Quantisation>),
    tokens: &[u32],
) -> Trained {
    let folder = place.join("base");
    let imported = base::import(source, &folder, false).expect("imported");
    let files = BaseFiles::in_folder(&folder).expect("a base");
    let mut manifest = run_of(&imported, targets, format);
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
    let (untrained, first) = export(&trainer, 0, "first");
    // Adapters begin at zero: what they are merged into is what passes read of the base.
    let read = place.join("read");
    base::export(&untrained, &files, &read, ExportDtype::F32).expect("exported");
    let source = if format.is_some() { &read } else { source };
    let steps: Vec<Value> = (0..STEPS).map(|step| trainer.batches(step)).collect();
    let losses = (0..STEPS).map(|step| trainer.step(step).0).collect();
    let (checkpoint, trained) = export(&trainer, STEPS, "trained");
    let merged = place.join("merged");
    base::export(&checkpoint, &files, &merged, ExportDtype::F32).expect("exported");
    let device = Device::open(DeviceChoice::Cpu, 1).expect("a CPU");
    let last = place.join(format!("checkpoint-{STEPS}"));
    let mut generator = Generator::open_with_base(&last, Some(&folder), device).expect("whole");
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
    compare_with_peft(None);
}

/// The values of a packed base are those of bitsandbytes (`nf4`): PEFT's model has them in f32.
#[test]
fn adapters_train_and_merge_beside_a_packed_base_as_in_peft() {
    compare_with_peft(Some(Quantisation::Nf4));
}

fn compare_with_peft(format: Option<Quantisation>) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().to_str().expect("a plain path");
    let names = RUNS.map(|(name, _)| name);
    let made = python("families.py", &[&["make", path][..], &names].concat());
    let tokens: Vec<u32> = serde_json::from_value(made["tokens"].clone()).expect("tokens");
    let mut all = BTreeMap::new();
    for (name, targets) in RUNS {
        let place = folder.path().join(format!("{name}-work"));
        fs::create_dir(&place).expect("writable");
        all.insert(name, train(&place, &folder.path().join(name), (targets, format), &tokens));
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

#[test]
fn packed_matrices_take_half_a_byte_for_each_weight() {
    let mut manifest = manifest();
    (manifest.model.hidden, manifest.model.intermediate) = (256, 1024);
    manifest.training.dtype = Dtype::Bf16;
    manifest.training.stages = 1;
    let targets = LoraTarget::ALL.to_vec();
    let with = |base| {
        let mut manifest = manifest.clone();
        manifest.lora = Some(Lora { rank: 2, alpha: 4.0, targets: targets.clone(), base });
        manifest.check().expect("a run");
        manifest
    };
    let [whole, packed] = [None, Some(Quantisation::Nf4)].map(with);
    let frozen = |manifest: &Manifest| {
        let island = Island::new(manifest, StageSpan::all(1), &[DeviceChoice::Cpu], 1);
        island.expect("memory").footprints()[0].frozen.0
    };
    let model = &manifest.model;
    let [hidden, inner] = [model.hidden, model.intermediate].map(u64::from);
    let attention =
        2 * hidden * (hidden + u64::from(model.key_value_heads) * hidden / u64::from(model.heads));
    let weights = u64::from(model.layers) * (attention + 3 * hidden * inner);
    let saved = frozen(&whole) - frozen(&packed);
    let each = 2.0 - saved as f64 / weights as f64;
    assert!((0.515..0.52).contains(&each), "{each} bytes");
    // The largest matrix is unpacked for its product.
    let brief = 2 * 2 * hidden * inner;
    let [before, after] = [&whole, &packed].map(|manifest| memory(manifest).iter().sum::<u64>());
    assert_eq!(before - after, saved - brief);
}

/// The memory of each stage.
fn memory(manifest: &Manifest) -> Vec<u64> {
    let span = shoal_protocol::ids::StageSpan::one;
    let floor = |stage| shoal_engine::memory_floor(manifest, span(stage), 1).0;
    manifest.stages().map(floor).collect()
}
