//! Imports a model in Hugging Face's format.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde_json::Value;
use shoal_protocol::ids::ContentHash;
use shoal_protocol::inside::holds;
use shoal_protocol::manifest::{Base, Model, Quantisation};

use super::index::{BaseFile, BaseIndex, FORMAT, INDEX};
use super::model_files::ModelFiles;
use super::quantised::FileFormat;
use super::weights::file_of;
use super::{BaseError, Result, quantised, staging, what};
use crate::family;
use crate::model::parameters::{Parameter, all_parameters};

/// The most bytes of a JSON file of a model that are parsed.
const JSON_CAP: u64 = 64 << 20;

/// Files beside the weights that a base keeps as they are.
const OTHERS: [&str; 13] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "LICENSE",
    "NOTICE",
];

/// The key of `config.json` with the name of the model.
pub(super) const NAME: &str = "_name_or_path";

/// An imported model.
#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    /// The index of the base.
    pub index: BaseIndex,
    /// Its name in a manifest.
    pub base: Base,
    /// Number of weights.
    pub parameters: u64,
}

/// How a model is imported.
#[derive(Debug, Clone, Copy, Default)]
pub struct ImportOptions<'a> {
    /// A tied head becomes a weight of its own, with the embedding's values.
    pub untie: bool,
    /// The name that others find the model by. Adapters that are trained beside the base name it.
    pub name: Option<&'a str>,
    /// Packs the matrices of layers, which are then frozen ones of adapters. Those of a model that is quantised are taken as
    /// they are.
    pub pack: Option<Quantisation>,
}

/// Imports the model in `source` as the base `out`, which is complete once it exists. With `untie`
/// a tied head becomes a weight of its own, with the embedding's values.
///
/// # Errors
/// If the model is incomplete, has an unknown shape, or the disk is full; `out` then does not exist.
pub fn import(source: &Path, out: &Path, untie: bool) -> Result<Imported> {
    import_with(source, out, ImportOptions { untie, ..ImportOptions::default() })
}

/// As [`import`], with options.
///
/// # Errors
/// As [`import`]; and if the model is quantised in another way than `pack` says.
pub fn import_with(source: &Path, out: &Path, options: ImportOptions<'_>) -> Result<Imported> {
    let ImportOptions { untie, name, pack } = options;
    staging::refuse_occupied(out)?;
    let mut config = read_config(source)?;
    let quantised = quantised::take_format(&mut config);
    // What a file says there is where its author had the model, or the model that it was made from.
    match (config.as_object_mut(), name) {
        (Some(keys), Some(name)) => drop(keys.insert(NAME.to_owned(), name.into())),
        (Some(keys), None) => drop(keys.remove(NAME)),
        (None, _) => {}
    }
    let described = family::describe(&config)
        .map_err(|error| BaseError::Config { path: source.to_owned(), error })?;
    let naming = family::naming(&described.family).expect("a described family is in the table");
    let mut model = described.model;
    let mut model_files = ModelFiles::open(source, naming, quantised, pack)?;
    model_files.tie(&mut model, untie)?;
    if !model.block.tied {
        config["tie_word_embeddings"] = Value::Bool(false);
    }
    let path = source.join("config.json");
    model.check().map_err(|error| BaseError::Shape { path, reason: error.to_string() })?;
    let staging = staging::begin(out, ".import-")?;
    let parameters = all_parameters(&model);
    model_files.refuse_unknown(&described.family, &parameters, &model, described.more_layers)?;
    let mut groups: BTreeMap<String, Vec<&Parameter>> = BTreeMap::new();
    for parameter in &parameters {
        groups.entry(file_of(parameter)).or_default().push(parameter);
    }
    let layers = (0..model.layers).map(|layer| format!("layer-{layer:05}"));
    let order = ["embedding".to_owned()].into_iter().chain(layers).chain(["head".to_owned()]);
    let mut weights = Vec::new();
    for name in order {
        let group = &groups[&name];
        weights.push(model_files.write(staging.path(), &name, group, &model)?);
    }
    let others = copy_others(source, staging.path(), &config)?;
    let family = described.family;
    let packed = quantised.and_then(FileFormat::kept).or(pack);
    let index = BaseIndex { format: FORMAT, family, model, packed, config, weights, others };
    let bytes = index.to_bytes();
    let path = staging.path().join(INDEX);
    fs::write(&path, &bytes).map_err(BaseError::io(&path))?;
    staging::publish(staging, out)?;
    let base =
        Base { index: ContentHash::of(&bytes), bytes: bytes.len() as u64, loads_weights: true };
    let parameters = parameters.iter().map(|parameter| parameter.len() as u64).sum();
    Ok(Imported { index, base, parameters })
}

/// The shape of the model in a folder, of which nothing but `config.json` is read; its context is the longest position.
///
/// # Errors
/// If there is no such file, or no known family in it.
pub fn describe(source: &Path) -> Result<Model> {
    let mut config = read_config(source)?;
    quantised::take_format(&mut config);
    let described = family::describe(&config);
    let described =
        described.map_err(|error| BaseError::Config { path: source.to_owned(), error })?;
    Ok(described.model)
}

fn read_config(source: &Path) -> Result<Value> {
    let path = source.join("config.json");
    read_json(&path)?.ok_or_else(|| BaseError::NotAModel {
        path: source.to_owned(),
        found: what::folder_without_config(source),
    })
}

/// The JSON in a file; `None` if there is none.
pub(super) fn read_json(path: &Path) -> Result<Option<Value>> {
    let file = match File::open(path) {
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            return Ok(None);
        }
        other => other.map_err(BaseError::io(path))?,
    };
    let mut text = Vec::new();
    file.take(JSON_CAP + 1).read_to_end(&mut text).map_err(BaseError::io(path))?;
    if text.len() as u64 > JSON_CAP {
        return Err(BaseError::damaged(path, format!("it has over {JSON_CAP} bytes")));
    }
    what::refuse_pointer(path, &text)?;
    let value = serde_json::from_slice(&text);
    value.map(Some).map_err(|error| BaseError::damaged(path, what::json_problem(&text, &error)))
}

fn copy_others(source: &Path, to: &Path, config: &Value) -> Result<Vec<BaseFile>> {
    let mut files = Vec::new();
    for name in OTHERS {
        let (from, path) = (source.join(name), to.join(name));
        if name == "config.json" {
            fs::write(&path, format!("{config:#}\n")).map_err(BaseError::io(&path))?;
        } else if from.exists() {
            refuse_outside(source, &from)?;
            what::refuse_pointer(&from, &what::beginning(&from)?)?;
            fs::copy(&from, &path).map_err(BaseError::io(&from))?;
        } else {
            continue;
        }
        files.push(describe_file(to, name.to_owned())?);
    }
    Ok(files)
}

/// Refuses a link out of the folder: peers fetch the copy, and the folder may be a stranger's.
fn refuse_outside(folder: &Path, file: &Path) -> Result<()> {
    let folder = fs::canonicalize(folder).map_err(BaseError::io(folder))?;
    let target = fs::canonicalize(file).map_err(BaseError::io(file))?;
    match holds(&folder, &target) {
        true => Ok(()),
        false => Err(BaseError::Link { path: file.to_owned(), target }),
    }
}

/// Size and hash of a file.
pub(super) fn describe_file(folder: &Path, name: String) -> Result<BaseFile> {
    let path = folder.join(&name);
    let bytes = fs::metadata(&path).map_err(BaseError::io(&path))?.len();
    let mut hasher = blake3::Hasher::new();
    hasher.update_mmap(&path).map_err(BaseError::io(&path))?;
    Ok(BaseFile { name, bytes, hash: hasher.finalize().into() })
}
