//! Exports a checkpoint in the format of its model's family.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use super::weights::BaseFiles;
use super::{BaseError, Result, staging};
use crate::checkpoint::Checkpoint;
use crate::family::tensors::{Location, locate};
use crate::family::{self, Naming};
use crate::parameters::{Parameter, all_parameters, parameters};

/// The most bytes of weights in a file.
const FILE_BYTES: usize = 2 << 30;

/// The number format of exported weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportDtype {
    /// 32-bit IEEE, as trained.
    F32,
    /// Rounded to 16 bits, to nearest even.
    Bf16,
}

impl ExportDtype {
    fn of_file(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }

    fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    fn bytes(self, weights: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 => bytemuck::cast_slice(weights).to_vec(),
            Self::Bf16 => weights
                .iter()
                .flat_map(|weight| half::bf16::from_f32(*weight).to_bits().to_le_bytes())
                .collect(),
        }
    }
}

/// Writes the model of a checkpoint into the folder `out`, in its family's names, with the base's
/// configuration and tokenizer. `out` is complete once it exists.
///
/// # Errors
/// If the checkpoint is damaged or has trained boundaries, a file of the base is missing, or the disk
/// is full; `out` then does not exist.
pub fn export(
    checkpoint: &Checkpoint,
    base: &BaseFiles,
    out: &Path,
    dtype: ExportDtype,
) -> Result<()> {
    staging::refuse_occupied(out)?;
    let manifest = checkpoint.manifest();
    if manifest.model.boundary.is_some() {
        let reason = "the model has trained boundaries, which no family of models has: `shoal \
                      generate` reads the checkpoint as it is";
        return Err(BaseError::NotExportable { reason: reason.to_owned() });
    }
    if !base.index.fits(&manifest.model) {
        let reason = "the base has another shape than the checkpoint: give the base of its run";
        return Err(BaseError::NotExportable { reason: reason.to_owned() });
    }
    let staging = staging::begin(out, ".export-")?;
    write_weights(checkpoint, base, staging.path(), dtype)?;
    for file in base.index.others.iter().filter(|file| file.name != "config.json") {
        let to = staging.path().join(&file.name);
        let missing = || BaseError::MissingShard { path: file.name.clone().into() };
        let from = base.find(file).ok_or_else(missing)?;
        fs::copy(&from, &to).map_err(BaseError::io(&from))?;
    }
    let mut config = base.index.config.clone();
    let key = if config.get("torch_dtype").is_some() { "torch_dtype" } else { "dtype" };
    config[key] = json!(dtype.name());
    write_json(staging.path(), "config.json", &config)?;
    staging::publish(staging, out)
}

fn write_json(folder: &Path, name: &str, value: &Value) -> Result<()> {
    let path = folder.join(name);
    fs::write(&path, format!("{value:#}\n")).map_err(BaseError::io(&path))
}

/// One tensor of the export, and the weights in it.
struct Tensor {
    shape: Vec<usize>,
    parts: Vec<(Parameter, Location)>,
}

fn write_weights(
    checkpoint: &Checkpoint,
    base: &BaseFiles,
    to: &Path,
    dtype: ExportDtype,
) -> Result<()> {
    let manifest = checkpoint.manifest();
    let naming = family::naming(&base.index.family).unwrap_or(Naming::Llama);
    let mut tensors: Vec<(String, Tensor)> = Vec::new();
    for parameter in all_parameters(&manifest.model) {
        let location = locate(naming, &manifest.model, &parameter);
        let last = tensors.iter_mut().find(|(name, _)| *name == location.tensor);
        match last {
            Some((_, tensor)) => tensor.parts.push((parameter, location)),
            None => {
                let (name, shape) = (location.tensor.clone(), location.shape.clone());
                tensors.push((name, Tensor { shape, parts: vec![(parameter, location)] }));
            }
        }
    }
    let bytes = |tensor: &Tensor| tensor.shape.iter().product::<usize>() * dtype.size();
    let mut files: Vec<Vec<(String, Tensor)>> = vec![Vec::new()];
    let (mut filled, mut total) = (0, 0);
    for (name, tensor) in tensors {
        let length = bytes(&tensor);
        if filled + length > FILE_BYTES && filled > 0 {
            files.push(Vec::new());
            filled = 0;
        }
        filled += length;
        total += length;
        files.last_mut().expect("there is a file").push((name, tensor));
    }
    let count = files.len();
    let mut map = BTreeMap::new();
    let mut stages = Stages::new(checkpoint);
    for (index, tensors) in files.into_iter().enumerate() {
        let file = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        map.extend(tensors.iter().map(|(name, _)| (name.clone(), file.clone())));
        write_file(&mut stages, &to.join(&file), &tensors, dtype)?;
    }
    if count > 1 {
        let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
        write_json(to, "model.safetensors.index.json", &index)?;
    }
    Ok(())
}

fn write_file(
    stages: &mut Stages<'_>,
    path: &Path,
    tensors: &[(String, Tensor)],
    dtype: ExportDtype,
) -> Result<()> {
    let mut all = Vec::new();
    for (name, tensor) in tensors {
        let mut data = vec![0; tensor.shape.iter().product::<usize>() * dtype.size()];
        for (parameter, location) in &tensor.parts {
            let weights = dtype.bytes(stages.weights(&parameter.name)?);
            location.write(&weights, parameter, dtype.size(), &mut data);
        }
        all.push((name, &tensor.shape, data));
    }
    // One key, so that the map has one order; the type is what safetensors takes.
    #[allow(clippy::disallowed_types)]
    let metadata = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let views = all.iter().map(|(name, shape, data)| {
        let view = TensorView::new(dtype.of_file(), (*shape).clone(), data)
            .expect("the data has the length of its shape");
        (name.as_str(), view)
    });
    safetensors::serialize_to_file(views, Some(metadata), path)
        .map_err(|error| BaseError::io(path)(std::io::Error::other(error)))
}

/// The weights of a checkpoint, one stage in memory at a time.
struct Stages<'a> {
    checkpoint: &'a Checkpoint,
    /// The stage in memory: its parameters and weights.
    held: Option<(Vec<Parameter>, Vec<f32>)>,
}

impl<'a> Stages<'a> {
    fn new(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, held: None }
    }

    fn weights(&mut self, name: &str) -> Result<&[f32]> {
        let manifest = self.checkpoint.manifest();
        let has = |list: &[Parameter]| list.iter().any(|parameter| parameter.name == name);
        if !self.held.as_ref().is_some_and(|(list, _)| has(list)) {
            let all = manifest.stages().map(|stage| (stage, parameters(manifest, stage)));
            let (stage, list) =
                all.into_iter().find(|(_, list)| has(list)).expect("a stage has each weight");
            let state = self
                .checkpoint
                .stage(stage)
                .map_err(|error| BaseError::NotExportable { reason: error.to_string() })?;
            self.held = Some((list, state.weights));
        }
        let (list, weights) = self.held.as_ref().expect("it was just read");
        let parameter = list.iter().find(|parameter| parameter.name == name);
        Ok(&weights[parameter.expect("the stage has it").range()])
    }
}
