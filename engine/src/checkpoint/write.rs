//! Writes checkpoints.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use shoal_protocol::ids::{ContentHash, Stage, Step};
use shoal_protocol::manifest::Manifest;

use super::{
    CheckpointError, CheckpointFile, DESCRIPTION, Description, FORMAT, StageState, optimizer_file,
    optimizer_tensors, weights_file,
};
use crate::base::{self, BaseFiles};
use crate::data::tokenizer;
use crate::model::parameters::{Parameter, parameters};

type Result<T> = std::result::Result<T, CheckpointError>;

/// Writes one stage's two files into an existing `folder` and waits until they are on the disk.
///
/// # Errors
/// If the file system fails.
///
/// # Panics
/// If the state does not fit this stage.
pub fn write_stage(
    folder: &Path,
    manifest: &Manifest,
    stage: Stage,
    state: &StageState,
) -> Result<Vec<CheckpointFile>> {
    let parameters = parameters(manifest, stage);
    let weights = named(&parameters, "", &state.weights);
    let tensors = optimizer_tensors(manifest, stage);
    let vectors = state.slots.values().chain(&state.stale_weights);
    let rest = tensors.iter().zip(vectors);
    let rest: Vec<_> =
        rest.flat_map(|((prefix, tensors), vector)| named(tensors, prefix, vector)).collect();
    Ok(vec![
        write_tensors(folder, weights_file(manifest, stage), &weights)?,
        write_tensors(folder, optimizer_file(manifest, stage), &rest)?,
    ])
}

/// The pieces of a flat vector under their names.
fn named<'a>(
    parameters: &[Parameter],
    prefix: &str,
    flat: &'a [f32],
) -> Vec<(String, TensorView<'a>)> {
    let view = |parameter: &Parameter| {
        let data = bytemuck::cast_slice(&flat[parameter.range()]);
        let view = TensorView::new(Dtype::F32, parameter.shape.clone(), data)
            .expect("the data has the length of its shape");
        (format!("{prefix}{}", parameter.name), view)
    };
    parameters.iter().map(view).collect()
}

fn write_tensors(
    folder: &Path,
    name: String,
    tensors: &[(String, TensorView<'_>)],
) -> Result<CheckpointFile> {
    let path = folder.join(&name);
    // A file of that name may have hard links: it is replaced and never changed.
    let new = folder.join(format!("{name}.new"));
    // One key, so that the map has one order; the type is what safetensors takes.
    #[allow(clippy::disallowed_types)]
    let metadata = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let tensors = tensors.iter().map(|(name, view)| (name, view));
    safetensors::serialize_to_file(tensors, Some(metadata), &new)
        .map_err(|error| CheckpointError::io(&new)(std::io::Error::other(error)))?;
    let file = File::open(&new).map_err(CheckpointError::io(&new))?;
    file.sync_all().map_err(CheckpointError::io(&new))?;
    fs::rename(&new, &path).map_err(CheckpointError::io(&path))?;
    let mut hasher = blake3::Hasher::new();
    hasher.update_mmap(&path).map_err(CheckpointError::io(&path))?;
    let bytes = file.metadata().map_err(CheckpointError::io(&path))?.len();
    Ok(CheckpointFile { name, bytes, hash: hasher.finalize().into() })
}

/// Writes all files that do not belong to a stage into `folder`, whose stage files are
/// `stage_files`. `step` is the version of the weights: the number of applied updates. A run that
/// starts from a base needs it: the folder gets its index, configuration and tokenizer. `texts` are
/// further files, by name.
///
/// # Errors
/// If the file system fails, or a file of the base is missing.
pub fn write_index(
    folder: &Path,
    manifest: &Manifest,
    step: Step,
    stage_files: &[CheckpointFile],
    base: Option<&BaseFiles>,
    texts: &[(&str, String)],
) -> Result<()> {
    let mut files = stage_files.to_vec();
    files.sort_by(|one, other| one.name.cmp(&other.name));
    files.push(write_json(folder, "model.safetensors.index.json", &index(manifest))?);
    files.push(write_json(folder, "config.json", &config(manifest, base))?);
    match base {
        Some(base) => files.extend(copy_description(folder, base)?),
        None => {
            let value = generation_config(manifest);
            files.push(write_json(folder, "generation_config.json", &value)?);
        }
    }
    if let (None, Some(tokens)) = (base, manifest.text()) {
        let config = tokenizer::tokenizer_config_json(manifest.model.context);
        let value = tokenizer::tokenizer_json(tokens.tokenizer);
        files.push(write_json(folder, "tokenizer.json", &value)?);
        files.push(write_json(folder, "tokenizer_config.json", &config)?);
    }
    for (name, text) in texts {
        files.push(write_file(folder, name, text.as_bytes())?);
    }
    let mut description = Description {
        format: FORMAT,
        run: manifest.run_id(),
        step,
        manifest: manifest.clone(),
        files,
        seal: ContentHash([0; 32]),
    };
    description.seal = description.expected_seal();
    write_file(folder, DESCRIPTION, &description.to_bytes())?;
    sync_folder(folder)
}

fn write_json(folder: &Path, name: &str, value: &Value) -> Result<CheckpointFile> {
    write_file(folder, name, format!("{value:#}\n").as_bytes())
}

fn write_file(folder: &Path, name: &str, bytes: &[u8]) -> Result<CheckpointFile> {
    let path = folder.join(name);
    let mut file = File::create(&path).map_err(CheckpointError::io(&path))?;
    file.write_all(bytes).map_err(CheckpointError::io(&path))?;
    file.sync_all().map_err(CheckpointError::io(&path))?;
    let hash = ContentHash::of(bytes);
    Ok(CheckpointFile { name: name.to_owned(), bytes: bytes.len() as u64, hash })
}

/// Writes the base's index, and its tokenizer and configuration but `config.json`.
fn copy_description(folder: &Path, base: &BaseFiles) -> Result<Vec<CheckpointFile>> {
    let mut files = vec![write_file(folder, base::INDEX, &base.index.to_bytes())?];
    for file in base.index.others.iter().filter(|file| file.name != "config.json") {
        let missing = || CheckpointError::damaged(Path::new(&file.name), "the base lacks it");
        let path = base.find(file).ok_or_else(missing)?;
        let bytes = fs::read(&path).map_err(CheckpointError::io(&path))?;
        files.push(write_file(folder, &file.name, &bytes)?);
    }
    Ok(files)
}

fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|file| file.sync_all()).map_err(CheckpointError::io(folder))
}

/// Renames a finished folder into place, replacing an existing checkpoint.
///
/// # Errors
/// If the file system fails, or `destination` is something other than a checkpoint.
pub fn publish(folder: &Path, destination: &Path) -> Result<()> {
    sync_folder(folder)?;
    let occupied = fs::read_dir(destination).is_ok_and(|mut entries| entries.next().is_some());
    if occupied {
        if !destination.join(DESCRIPTION).exists() {
            return Err(CheckpointError::NotACheckpoint { path: destination.to_owned() });
        }
        let mut old = destination.as_os_str().to_owned();
        old.push(".replaced");
        let old = PathBuf::from(old);
        // Left by a process that died here; `destination` is newer.
        if old.join(DESCRIPTION).exists() {
            fs::remove_dir_all(&old).map_err(CheckpointError::io(&old))?;
        }
        fs::rename(destination, &old).map_err(CheckpointError::io(destination))?;
        fs::rename(folder, destination).map_err(CheckpointError::io(destination))?;
        fs::remove_dir_all(&old).map_err(CheckpointError::io(&old))?;
    } else {
        fs::rename(folder, destination).map_err(CheckpointError::io(destination))?;
    }
    match destination.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => sync_folder(parent),
        _ => Ok(()),
    }
}

fn index(manifest: &Manifest) -> Value {
    let mut files = BTreeMap::new();
    let mut elements = 0;
    for stage in manifest.stages() {
        for parameter in parameters(manifest, stage) {
            elements += parameter.len();
            files.insert(parameter.name, weights_file(manifest, stage));
        }
    }
    json!({ "metadata": { "total_size": 4 * elements }, "weight_map": files })
}

/// The configuration of the base or of Llama, or another type for a model whose weights have other
/// names than in transformers, or are adapters alone, or that has experts and no base: it refuses to load that, instead of silently
/// ignoring weights.
fn config(manifest: &Manifest, base: Option<&BaseFiles>) -> Value {
    let mut config = match base {
        Some(base) => base.index.config.clone(),
        None => llama_config(manifest),
    };
    if base.is_some() {
        config["dtype"] = json!("float32");
    }
    let renamed = base.is_some_and(|base| !base.index.has_names_of_llama());
    // Llama has no experts, and their families differ from it in other ways too.
    let unknown = base.is_none() && manifest.model.block.experts.is_some();
    if unknown {
        config["experts"] = json!(manifest.model.block.experts);
    }
    if renamed || unknown || manifest.lora.is_some() || manifest.model.trained_boundary().is_some()
    {
        config["architectures"] = json!(["ShoalForCausalLM"]);
        config["model_type"] = json!("shoal");
    }
    if let Some(boundary) = manifest.model.trained_boundary() {
        let last = |stage| manifest.layers_of(stage).end - 1;
        let cut = manifest.stages().filter(|stage| *stage != manifest.last_stage());
        config["boundary"] = json!({
            "kind": boundary.kind,
            "width": boundary.width,
            "after_layers": cut.map(last).collect::<Vec<_>>(),
        });
    }
    config
}

fn llama_config(manifest: &Manifest) -> Value {
    let model = &manifest.model;
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": null,
        "dtype": "float32",
        "eos_token_id": null,
        "head_dim": model.head_size(),
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "initializer_range": model.initializer_range,
        "intermediate_size": model.intermediate,
        "max_position_embeddings": model.context,
        "mlp_bias": false,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.key_value_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": { "rope_theta": model.rope_theta, "rope_type": "default" },
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": false,
        "use_cache": true,
        "vocab_size": model.vocabulary,
    })
}

fn generation_config(manifest: &Manifest) -> Value {
    json!({ "do_sample": true, "max_length": manifest.model.context, "temperature": 0.8 })
}
