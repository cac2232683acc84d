//! Exports a checkpoint in the format of its model's family.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use shoal_protocol::ids::{ContentHash, Stage};
use shoal_protocol::manifest::{Lora, Manifest};

use super::weights::{BaseFiles, StageFiles};
use super::{BaseError, Result, staging};
use crate::checkpoint::Checkpoint;
use crate::family::tensors::{Location, locate};
use crate::family::{self, Naming};
use crate::model::adapter::{self, Factor};
use crate::model::parameters::{Parameter, all_parameters, model_parameters, parameters};
use crate::numeric::nf4;

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
    pub(super) fn of_file(self) -> Dtype {
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

    pub(super) fn bytes(self, weights: &[f32]) -> Vec<u8> {
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
/// configuration and tokenizer. `out` is complete once it exists. Adapters are added to the weights of
/// `base`, which then has all its files.
///
/// # Errors
/// If the checkpoint is damaged or has trained boundaries, a file of the base is missing, the base is
/// not that of the adapters, or the disk is full; `out` then does not exist.
pub fn export(
    checkpoint: &Checkpoint,
    base: &BaseFiles,
    out: &Path,
    dtype: ExportDtype,
) -> Result<()> {
    staging::refuse_occupied(out)?;
    let manifest = checkpoint.manifest();
    if manifest.model.trained_boundary().is_some() {
        let reason = "the model has trained boundaries, which no family of models has: `shoal \
                      generate` reads the checkpoint as it is";
        return Err(BaseError::NotExportable { reason: reason.to_owned() });
    }
    if !base.index.fits(&manifest.model) {
        let reason = "the base has another shape than the checkpoint: give the base of its run";
        return Err(BaseError::NotExportable { reason: reason.to_owned() });
    }
    let of_run = manifest.model.base.map(|base| base.index);
    if manifest.lora.is_some() && of_run != Some(ContentHash::of(&base.index.to_bytes())) {
        let reason = "the adapters were trained beside another base: give the base of their run";
        return Err(BaseError::NotExportable { reason: reason.to_owned() });
    }
    write_model(&mut Stages::of_checkpoint(checkpoint, base), out, dtype)
}

/// Writes a complete base as a model, in the form in which [`export`] writes a checkpoint.
///
/// # Errors
/// If a file of the base is missing or damaged, or the disk is full; `out` then does not exist.
pub fn export_base(base: &BaseFiles, out: &Path, dtype: ExportDtype) -> Result<()> {
    staging::refuse_occupied(out)?;
    write_model(&mut Stages::of_base(base), out, dtype)
}

fn write_model(stages: &mut Stages<'_>, out: &Path, dtype: ExportDtype) -> Result<()> {
    let base = stages.base;
    let staging = staging::begin(out, ".export-")?;
    write_weights(stages, staging.path(), dtype)?;
    for file in base.index.others.iter().filter(|file| file.name != "config.json") {
        let to = staging.path().join(&file.name);
        let missing = || BaseError::MissingShard { path: file.name.clone().into() };
        let from = base.find(file).ok_or_else(missing)?;
        fs::copy(&from, &to).map_err(BaseError::io(&from))?;
    }
    let mut config = base.index.config.clone();
    set_dtype(&mut config, dtype);
    write_json(staging.path(), "config.json", &config)?;
    staging::publish(staging, out)
}

/// Names the dtype of the weights: in both spellings of the key, if both are there.
fn set_dtype(config: &mut Value, dtype: ExportDtype) {
    let old = "torch_dtype";
    let has_old = config.get(old).is_some();
    if has_old {
        config[old] = json!(dtype.name());
    }
    if !has_old || config.get("dtype").is_some() {
        config["dtype"] = json!(dtype.name());
    }
}

pub(super) fn write_json(folder: &Path, name: &str, value: &Value) -> Result<()> {
    let path = folder.join(name);
    fs::write(&path, format!("{value:#}\n")).map_err(BaseError::io(&path))
}

/// One tensor of the export, and the weights in it.
struct Tensor {
    shape: Vec<usize>,
    parts: Vec<(Parameter, Location)>,
    dtype: ExportDtype,
}

impl Tensor {
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

fn write_weights(stages: &mut Stages<'_>, to: &Path, dtype: ExportDtype) -> Result<()> {
    let model = stages.manifest.model.clone();
    let naming = family::naming(&stages.base.index.family).unwrap_or(Naming::Llama);
    let mut tensors: Vec<(String, Tensor)> = Vec::new();
    for parameter in all_parameters(&model) {
        let location = locate(naming, &model, &parameter);
        let last = tensors.iter_mut().find(|(name, _)| *name == location.tensor);
        match last {
            Some((_, tensor)) => tensor.parts.push((parameter, location)),
            None => {
                let (name, shape) = (location.tensor.clone(), location.shape.clone());
                // They choose experts, and `transformers` keeps them in f32 too.
                let is_wide = parameter.is_biases_of_experts();
                let dtype = if is_wide { ExportDtype::F32 } else { dtype };
                tensors.push((name, Tensor { shape, parts: vec![(parameter, location)], dtype }));
            }
        }
    }
    let mut files: Vec<Vec<(String, Tensor)>> = vec![Vec::new()];
    let (mut filled, mut total) = (0, 0);
    for (name, tensor) in tensors {
        let length = tensor.bytes();
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
    for (index, tensors) in files.into_iter().enumerate() {
        let file = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        map.extend(tensors.iter().map(|(name, _)| (name.clone(), file.clone())));
        write_file(stages, &to.join(&file), &tensors)?;
    }
    if count > 1 {
        let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
        write_json(to, "model.safetensors.index.json", &index)?;
    }
    Ok(())
}

fn write_file(stages: &mut Stages<'_>, path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    let mut all = Vec::new();
    for (name, tensor) in tensors {
        let (mut data, dtype) = (vec![0; tensor.bytes()], tensor.dtype);
        for (parameter, location) in &tensor.parts {
            let weights = dtype.bytes(&stages.weights(&parameter.name)?);
            location.write(&weights, parameter, dtype.size(), &mut data);
        }
        all.push((name, tensor, data));
    }
    // One key, so that the map has one order; the type is what safetensors takes.
    #[allow(clippy::disallowed_types)]
    let metadata = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let views = all.iter().map(|(name, tensor, data)| {
        let view = TensorView::new(tensor.dtype.of_file(), tensor.shape.clone(), data)
            .expect("the data has the length of its shape");
        (name.as_str(), view)
    });
    safetensors::serialize_to_file(views, Some(metadata), path)
        .map_err(|error| BaseError::io(path)(std::io::Error::other(error)))
}

/// The weights of a model, one stage in memory at a time.
struct Stages<'a> {
    manifest: Cow<'a, Manifest>,
    /// The checkpoint with them; without one they are those of the base.
    checkpoint: Option<&'a Checkpoint>,
    base: &'a BaseFiles,
    held: Option<Held>,
}

/// A stage in memory.
struct Held {
    /// The model's weights that it has.
    list: Vec<Parameter>,
    /// The trained weights: those, adapters, or none.
    trained: Vec<f32>,
    /// The adapters that were trained, and the files of the base, unless all weights were trained.
    adapters: Option<(Vec<Parameter>, StageFiles)>,
}

impl<'a> Stages<'a> {
    fn of_checkpoint(checkpoint: &'a Checkpoint, base: &'a BaseFiles) -> Self {
        let manifest = Cow::Borrowed(checkpoint.manifest());
        Self { manifest, checkpoint: Some(checkpoint), base, held: None }
    }

    fn of_base(base: &'a BaseFiles) -> Self {
        Self { manifest: Cow::Owned(base.manifest()), checkpoint: None, base, held: None }
    }

    fn weights(&mut self, name: &str) -> Result<Cow<'_, [f32]>> {
        let has = |list: &[Parameter]| list.iter().any(|parameter| parameter.name == name);
        if !self.held.as_ref().is_some_and(|held| has(&held.list)) {
            let manifest = &self.manifest;
            let all = manifest.stages().map(|stage| (stage, model_parameters(manifest, stage)));
            let (stage, list) =
                all.into_iter().find(|(_, list)| has(list)).expect("a stage has each weight");
            self.held = Some(self.hold(stage, list)?);
        }
        let held = self.held.as_ref().expect("it was just read");
        let parameter = held.list.iter().find(|parameter| parameter.name == name);
        let parameter = parameter.expect("the stage has it");
        let Some((adapters, files)) = &held.adapters else {
            return Ok(Cow::Borrowed(&held.trained[parameter.range()]));
        };
        // Adapters were trained beside what packing left of the base.
        let dtype = self.manifest.training.dtype;
        let is_packed = self.manifest.packs_base() && parameter.is_packable();
        let mut weights = match files.section(parameter)? {
            Some(section) if is_packed => nf4::values_in(dtype, section, parameter.len()),
            None if is_packed => nf4::rounded_in(dtype, &files.values(parameter)?),
            _ => files.values(parameter)?,
        };
        if let Some(lora) = &self.manifest.lora {
            add_adapter(&mut weights, parameter, lora, (adapters, &held.trained));
        }
        Ok(Cow::Owned(weights))
    }

    fn hold(&self, stage: Stage, list: Vec<Parameter>) -> Result<Held> {
        let manifest = &self.manifest;
        let Some(checkpoint) = self.checkpoint else {
            let files = StageFiles::open(self.base, manifest, stage)?;
            return Ok(Held { list, trained: Vec::new(), adapters: Some((Vec::new(), files)) });
        };
        let state = checkpoint
            .stage(stage)
            .map_err(|error| BaseError::NotExportable { reason: error.to_string() })?;
        let adapters = match manifest.lora {
            None => None,
            Some(_) => {
                let files = StageFiles::open(self.base, manifest, stage)?;
                Some((parameters(manifest, stage), files))
            }
        };
        Ok(Held { list, trained: state.weights, adapters })
    }
}

/// Adds `alpha / rank` times the product of a weight's adapter, if it has one.
fn add_adapter(
    weights: &mut [f32],
    parameter: &Parameter,
    lora: &Lora,
    (adapters, trained): (&[Parameter], &[f32]),
) {
    let factor = |factor| {
        let name = adapter::name_beside(&parameter.name, factor);
        adapters.iter().find(|adapter| adapter.name == name).map(|one| &trained[one.range()])
    };
    let (Some(a), Some(b)) = (factor(Factor::A), factor(Factor::B)) else { return };
    let (rank, inputs) = (lora.rank as usize, parameter.shape[1]);
    let scale = lora.alpha / f64::from(lora.rank);
    let mut sums = vec![0f64; inputs];
    for (row, b) in weights.chunks_exact_mut(inputs).zip(b.chunks_exact(rank)) {
        sums.fill(0.0);
        for (b, a) in b.iter().zip(a.chunks_exact(inputs)) {
            let b = f64::from(*b) * scale;
            sums.iter_mut().zip(a).for_each(|(sum, a)| *sum += b * f64::from(*a));
        }
        row.iter_mut()
            .zip(&sums)
            .for_each(|(weight, sum)| *weight = (f64::from(*weight) + sum) as f32);
    }
}
