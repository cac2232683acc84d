//! Exports the adapters of a checkpoint in PEFT's format.

use std::fs;
use std::path::Path;

use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use super::export::{ExportDtype, write_json};
use super::import::NAME;
use super::weights::BaseFiles;
use super::{BaseError, Result, staging};
use crate::checkpoint::Checkpoint;
use crate::model::adapter;
use crate::model::layer_table::last_word;
use crate::model::parameters::parameters;

/// Writes the adapters of a checkpoint into the folder `out`, which is complete once it exists. `base`
/// describes the model that they were trained beside, and `name` is where PEFT finds it: a repository or a
/// folder. Without one it is the name that the base was imported by.
///
/// # Errors
/// If the run trained all weights, the base has no name, the checkpoint is damaged, PEFT has no such adapters for the model's
/// family, or the disk is full; `out` then does not exist.
pub fn export_adapter(
    checkpoint: &Checkpoint,
    base: &BaseFiles,
    out: &Path,
    dtype: ExportDtype,
    name: Option<&str>,
) -> Result<()> {
    staging::refuse_occupied(out)?;
    let manifest = checkpoint.manifest();
    let refused = |reason: &str| BaseError::NotExportable { reason: reason.to_owned() };
    let Some(lora) = &manifest.lora else {
        return Err(refused("its run trained all weights and no adapters"));
    };
    if let Some(problem) = base.index.why_not_in_peft(&lora.targets) {
        let family = &base.index.family;
        return Err(refused(&format!("{family} {problem}: export the whole model with --merge")));
    }
    let own = base.index.config.get(NAME).and_then(Value::as_str);
    let Some(name) = name.or(own).filter(|name| !name.is_empty()) else {
        return Err(refused(
            "its adapters would name no model (base_model_name_or_path = null), so that PEFT does not \
             find it: give the repository or folder of the model with --base-model NAME",
        ));
    };
    let (mut tensors, mut modules) = (Vec::new(), Vec::<String>::new());
    for stage in manifest.stages() {
        let state = checkpoint.stage(stage).map_err(|error| refused(&error.to_string()))?;
        for parameter in parameters(manifest, stage) {
            let data = dtype.bytes(&state.weights[parameter.range()]);
            let (weight, factor) = adapter::beside(&parameter.name).expect("it has adapters alone");
            let weight = base.index.name_in_files(&weight);
            let matrix = last_word(&weight);
            if !modules.iter().any(|module| module == matrix) {
                modules.push(matrix.to_owned());
            }
            tensors.push((adapter::name_beside(&weight, factor), parameter.shape, data));
        }
    }
    let staging = staging::begin(out, ".export-")?;
    let path = staging.path().join("adapter_model.safetensors");
    let views = tensors.iter().map(|(name, shape, data)| {
        let view = TensorView::new(dtype.of_file(), shape.clone(), data)
            .expect("the data has the length of its shape");
        (name.as_str(), view)
    });
    safetensors::serialize_to_file(views, None, &path)
        .map_err(|error| BaseError::io(&path)(std::io::Error::other(error)))?;
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
        "inference_mode": true,
    });
    write_json(staging.path(), "adapter_config.json", &config)?;
    let model_files = ["config.json", "generation_config.json"];
    let others = base.index.others.iter();
    for file in others.filter(|file| !model_files.contains(&file.name.as_str())) {
        if let Some(from) = base.find(file) {
            fs::copy(&from, staging.path().join(&file.name)).map_err(BaseError::io(&from))?;
        }
    }
    staging::publish(staging, out)
}
