//! Imports a model in Hugging Face's format.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use shoal_protocol::ids::ContentHash;
use shoal_protocol::inside::holds;
use shoal_protocol::manifest::{Base, Model};

use super::index::{BaseFile, BaseIndex, FORMAT, INDEX};
use super::weights::{file_of, open, size_of_dtype, wrong_tensor};
use super::{BaseError, Result, staging};
use crate::family::tensors::{Location, is_constant, locate};
use crate::family::{self, Naming};
use crate::parameters::{HEAD, Parameter, all_parameters, source_of};
use crate::safetensors_file::{FileTensor, SafetensorsFile};

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

/// Imports the model in `source` as the base `out`, which is complete once it exists. With `untie`
/// a tied head becomes a weight of its own, with the embedding's values.
///
/// # Errors
/// If the model is incomplete, has an unknown shape, or the disk is full; `out` then does not exist.
pub fn import(source: &Path, out: &Path, untie: bool) -> Result<Imported> {
    staging::refuse_occupied(out)?;
    let mut config = read_config(source)?;
    let described = family::describe(&config)
        .map_err(|error| BaseError::Config { path: source.to_owned(), error })?;
    let naming = family::naming(&described.family).expect("a described family is in the table");
    let mut model = described.model;
    let untied = untie && model.block.tied;
    if untied {
        model.block.tied = false;
        config["tie_word_embeddings"] = Value::Bool(false);
    }
    let path = source.join("config.json");
    model.check().map_err(|error| BaseError::Shape { path, reason: error.to_string() })?;
    let staging = staging::begin(out, ".import-")?;
    let parameters = all_parameters(&model);
    let model_files = ModelFiles::open(source, naming, untied)?;
    model_files.refuse_unknown(&described.family, &parameters, &model)?;
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
    let index = BaseIndex { format: FORMAT, family, model, config, weights, others };
    let bytes = index.to_bytes();
    let path = staging.path().join(INDEX);
    fs::write(&path, &bytes).map_err(BaseError::io(&path))?;
    staging::publish(staging, out)?;
    let base =
        Base { index: ContentHash::of(&bytes), bytes: bytes.len() as u64, loads_weights: true };
    let parameters = parameters.iter().map(|parameter| parameter.len() as u64).sum();
    Ok(Imported { index, base, parameters })
}

fn read_config(source: &Path) -> Result<Value> {
    let path = source.join("config.json");
    read_json(&path)?.ok_or_else(|| BaseError::NotAModel { path: source.to_owned() })
}

/// The JSON in a file; `None` if there is none.
fn read_json(path: &Path) -> Result<Option<Value>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        other => other.map_err(BaseError::io(path))?,
    };
    let mut text = Vec::new();
    file.take(JSON_CAP + 1).read_to_end(&mut text).map_err(BaseError::io(path))?;
    if text.len() as u64 > JSON_CAP {
        return Err(BaseError::damaged(path, format!("it has over {JSON_CAP} bytes")));
    }
    let value = serde_json::from_slice(&text);
    value.map(Some).map_err(|error| BaseError::damaged(path, error))
}

fn copy_others(source: &Path, to: &Path, config: &Value) -> Result<Vec<BaseFile>> {
    let mut files = Vec::new();
    for name in OTHERS {
        let (from, path) = (source.join(name), to.join(name));
        if name == "config.json" {
            fs::write(&path, format!("{config:#}\n")).map_err(BaseError::io(&path))?;
        } else if from.exists() {
            refuse_outside(source, &from)?;
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
fn describe_file(folder: &Path, name: String) -> Result<BaseFile> {
    let path = folder.join(&name);
    let bytes = fs::metadata(&path).map_err(BaseError::io(&path))?.len();
    let mut hasher = blake3::Hasher::new();
    hasher.update_mmap(&path).map_err(BaseError::io(&path))?;
    Ok(BaseFile { name, bytes, hash: hasher.finalize().into() })
}

/// The safetensors files of a model.
struct ModelFiles {
    folder: PathBuf,
    files: Vec<SafetensorsFile>,
    naming: Naming,
    /// Whether the head takes the embedding's values.
    untied: bool,
}

impl ModelFiles {
    fn open(folder: &Path, naming: Naming, untied: bool) -> Result<Self> {
        let mut names = BTreeSet::new();
        let index = folder.join("model.safetensors.index.json");
        if let Some(value) = read_json(&index)? {
            let map = value.get("weight_map").and_then(Value::as_object);
            let map = map.ok_or_else(|| BaseError::damaged(&index, "it has no weight_map"))?;
            for name in map.values() {
                let name = name.as_str().filter(|name| {
                    // The name comes from a file and must not lead out of the folder.
                    Path::new(name).file_name() == Some((*name).as_ref())
                });
                let name = name.ok_or_else(|| BaseError::damaged(&index, "it names no file"))?;
                names.insert(name.to_owned());
            }
        } else {
            names.insert("model.safetensors".to_owned());
        }
        let files = names.iter().map(|name| open(&folder.join(name))).collect::<Result<_>>()?;
        Ok(Self { folder: folder.to_owned(), files, naming, untied })
    }

    /// A tensor, also without the prefix of the model, which some files of GPT-2 lack.
    fn tensor(&self, name: &str) -> Option<(&SafetensorsFile, FileTensor<'_>)> {
        let bare = name.strip_prefix("transformer.").unwrap_or(name);
        self.files
            .iter()
            .find_map(|file| Some((file, file.tensor(name).or_else(|| file.tensor(bare))?)))
    }

    fn location(&self, parameter: &Parameter, model: &Model) -> Location {
        let source = source_of(parameter, self.untied).to_owned();
        locate(self.naming, model, &Parameter { name: source, ..parameter.clone() })
    }

    /// Refuses a model with weights that would be ignored.
    fn refuse_unknown(&self, family: &str, parameters: &[Parameter], model: &Model) -> Result<()> {
        let mut known: BTreeSet<String> =
            parameters.iter().map(|parameter| self.location(parameter, model).tensor).collect();
        if model.block.tied || self.untied {
            let shape = vec![model.vocabulary as usize, model.hidden as usize];
            let head = Parameter { name: HEAD.to_owned(), shape, offset: 0 };
            known.insert(locate(self.naming, model, &head).tensor);
        }
        for file in &self.files {
            let unknown = |name: &&String| {
                let prefixed = format!("transformer.{name}");
                !known.contains(*name) && !known.contains(&prefixed) && !is_constant(name)
            };
            if let Some(tensor) = file.names().iter().find(unknown) {
                return Err(BaseError::UnknownTensor {
                    path: file.path().to_owned(),
                    tensor: tensor.clone(),
                    family: family.to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Writes some weights under the names of this engine.
    fn write(
        &self,
        to: &Path,
        name: &str,
        group: &[&Parameter],
        model: &Model,
    ) -> Result<BaseFile> {
        let mut data: Vec<(&Parameter, Dtype, Vec<u8>)> = Vec::new();
        for parameter in group {
            let location = self.location(parameter, model);
            let (file, tensor) = self.tensor(&location.tensor).ok_or_else(|| {
                let tensor = location.tensor.clone();
                BaseError::MissingTensor { path: self.folder.clone(), tensor }
            })?;
            let size = size_of_dtype(tensor.dtype).filter(|_| tensor.shape == location.shape);
            let size = size.ok_or_else(|| {
                wrong_tensor(file.path(), &location.tensor, tensor, &location.shape)
            })?;
            data.push((parameter, tensor.dtype, location.read(tensor.data, parameter, size)));
        }
        let name = format!("{name}.safetensors");
        let path = to.join(&name);
        let views = data.iter().map(|(parameter, dtype, bytes)| {
            let view = TensorView::new(*dtype, parameter.shape.clone(), bytes)
                .expect("the data has the length of its shape");
            (parameter.name.as_str(), view)
        });
        safetensors::serialize_to_file(views, None, &path)
            .map_err(|error| BaseError::io(&path)(std::io::Error::other(error)))?;
        describe_file(to, name)
    }
}
