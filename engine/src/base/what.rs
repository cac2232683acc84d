//! What a file or folder is that is no model, and what would do.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use super::{BaseError, Result};
use crate::model::parameters::HEAD;

/// The beginning of a pointer that Git LFS leaves in place of a file.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// The first bytes of a file.
pub(super) fn beginning(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(BaseError::io(path))?;
    file.take(POINTER.len() as u64).read_to_end(&mut bytes).map_err(BaseError::io(path))?;
    Ok(bytes)
}

/// Refuses a pointer of Git LFS.
pub(super) fn refuse_pointer(path: &Path, bytes: &[u8]) -> Result<()> {
    match bytes.starts_with(POINTER) {
        true => Err(BaseError::Pointer { path: path.to_owned() }),
        false => Ok(()),
    }
}

/// The names of a folder's files, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

const TO_SAFETENSORS: &str = "load it with transformers and write it with save_pretrained, which \
                              makes safetensors files";

/// What a folder without `config.json` has.
pub(super) fn folder_without_config(folder: &Path) -> String {
    if folder.extension().is_some_and(|end| end == "gguf") {
        return format!(
            "it is a GGUF file: import the model that it was made from, or {TO_SAFETENSORS}"
        );
    }
    let names = names(folder);
    if names.iter().any(|name| name == "adapter_config.json") {
        return "it has the adapters of a model (adapter_config.json): import that model, or the one \
                that PEFT's merge_and_unload makes of both"
            .to_owned();
    }
    if let Some(name) = names.iter().find(|name| name.ends_with(".gguf")) {
        return format!(
            "it has the GGUF file {name}: import the model that it was made from, or {TO_SAFETENSORS}"
        );
    }
    "give the folder of a model with its safetensors files".to_owned()
}

/// What a model's folder without safetensors files has.
pub(super) fn folder_without_weights(folder: &Path) -> String {
    let names = names(folder);
    let ends = [".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf"];
    let other = names.iter().find(|name| ends.iter().any(|end| name.ends_with(end)));
    let named = names.iter().find(|name| name.ends_with(".safetensors"));
    match (named, other) {
        (Some(name), _) => format!(
            "it has {name}: name a single file model.safetensors, or fetch \
             model.safetensors.index.json too"
        ),
        (None, Some(name)) => format!("it has {name}: {TO_SAFETENSORS}"),
        (None, None) => "fetch the whole model".to_owned(),
    }
}

/// What would do about a tensor that no such model has.
pub(super) fn unknown_tensor(name: &str) -> String {
    for prefix in ["_orig_mod.", "module."] {
        if name.starts_with(prefix) {
            return format!(
                "{prefix} was put before all names when a wrapped model was saved: take it off"
            );
        }
    }
    let ends = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
    if ends(&[".scales", ".biases", ".qweight", ".qzeros", ".g_idx", ".absmax", ".weight_scale"]) {
        return "its weights are quantised: import the unquantised model".to_owned();
    }
    if ends(&["_proj_blocks", "_proj_scales"]) {
        return "its experts are in MXFP4, and config.json has no quantization_config with quant_method = \"mxfp4\": \
                fetch the model's own config.json"
            .to_owned();
    }
    if ends(&[".experts.gate_up_proj", ".experts.down_proj"]) {
        return "its experts are one tensor: load it with transformers and write it with save_pretrained, \
                which names each expert"
            .to_owned();
    }
    if ends(&["score.weight", "score.bias", "v_head.summary.weight", "classifier.weight"]) {
        return "it is the head of a classifier or reward model: import a model with a language head"
            .to_owned();
    }
    if name.contains("lora_") {
        return "it is an adapter: merge it with PEFT's merge_and_unload".to_owned();
    }
    "check its config.json (the number of layers, biases), or import the model that it was made from"
        .to_owned()
}

/// What would do about a weight that no file has.
pub(super) fn missing_tensor(parameter: &str) -> &'static str {
    match parameter == HEAD {
        true => {
            "if the head is the embedding's, set tie_word_embeddings to true in config.json; \
             otherwise fetch the whole model"
        }
        false => {
            "fetch the whole model, or correct config.json (the number of layers or experts, biases)"
        }
    }
}

/// Why a text is no JSON; numbers that Python writes and JSON does not have are named.
pub(super) fn json_problem(text: &[u8], error: &serde_json::Error) -> String {
    if text.starts_with(b"\xef\xbb\xbf") {
        return "it begins with a byte order mark, which transformers refuses as well: save it as \
                UTF-8 without one"
            .to_owned();
    }
    let line = text.split(|byte| *byte == b'\n').nth(error.line().saturating_sub(1));
    let near = line.and_then(|line| line.get(error.column().saturating_sub(2)..)).unwrap_or(b"");
    for word in ["-Infinity", "Infinity", "NaN"] {
        if near.starts_with(word.as_bytes())
            || near.get(1..).is_some_and(|rest| rest.starts_with(word.as_bytes()))
        {
            let place = error.line();
            return format!("line {place} has {word}, which is no JSON: write null or a number");
        }
    }
    error.to_string()
}
