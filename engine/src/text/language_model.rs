//! A whole model that computes logits: weights alone, without the state of training.

use std::path::Path;

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Dtype, Manifest, Tokenizer};
use tch::{Kind, Tensor};

use crate::base::{self, BaseError, BaseFiles, BaseIndex, StageFiles};
use crate::checkpoint::Checkpoint;
use crate::checkpoint_error::DESCRIPTION;
use crate::device::setup::Device;
use crate::device::tensor::elements;
use crate::error::{EngineError, Result};
use crate::model::cache::LayerCache;
use crate::model::loss::{IGNORED, losses_of_rows};
use crate::model::norm::normalise;
use crate::model::parameters::{Parameter, parameters};
use crate::train::frozen::Frozen;
use crate::weights::place::WeightsPlace;
use crate::weights::version::Weights;

/// Tokens of a pass that fills a cache: its attention takes memory for each pair of tokens.
const CHUNK: usize = 512;

/// The keys and values of each stage's layers for one text.
pub(crate) type Cache = Vec<Vec<LayerCache>>;

/// A model: all stages, on one device.
#[derive(Debug)]
pub(crate) struct LanguageModel {
    /// `model.context` is the longest position.
    manifest: Manifest,
    device: Device,
    stages: Vec<Weights>,
    tokenizer: Option<Tokenizer>,
}

/// The base in a folder, if the manifest names it.
fn base_of(manifest: &Manifest, folder: &Path) -> Result<BaseFiles> {
    let (_, found) = BaseIndex::read(folder)?;
    if manifest.model.base.map(|base| base.index) != Some(found.index) {
        return Err(EngineError::OtherBase { path: folder.to_owned() });
    }
    Ok(BaseFiles::in_folder(folder)?)
}

/// Refuses weights that are NaN or infinite, with which every text would be empty.
fn refuse_broken(folder: &Path, manifest: &Manifest, stage: Stage, values: &[f32]) -> Result<()> {
    let is_broken = |parameter: &Parameter| {
        !values[parameter.range()].iter().fold(true, |fine, value| fine & value.is_finite())
    };
    match parameters(manifest, stage).into_iter().find(is_broken) {
        Some(parameter) => {
            let (path, tensor) = (folder.to_owned(), parameter.name);
            Err(BaseError::NotFinite { path, tensor }.into())
        }
        None => Ok(()),
    }
}

impl LanguageModel {
    /// Loads the model in a checkpoint's or a base's folder. A checkpoint of adapters needs the folder
    /// of the base that they were trained beside.
    pub(crate) fn open(folder: &Path, base: Option<&Path>, device: Device) -> Result<Self> {
        if folder.join(DESCRIPTION).exists() {
            return Self::of_checkpoint(folder, base, device);
        }
        if folder.join(base::INDEX).exists() {
            return Self::of_base(folder, Dtype::F32, device);
        }
        Err(EngineError::NotAModel { path: folder.to_owned() })
    }

    fn of_checkpoint(folder: &Path, base: Option<&Path>, device: Device) -> Result<Self> {
        let checkpoint = Checkpoint::open(folder)?;
        let mut manifest = checkpoint.manifest().clone();
        // Samples may be shorter than what the base can read.
        match BaseIndex::read(folder) {
            Ok((index, _)) if index.fits(&manifest.model) => {
                manifest.model.context = index.model.context;
            }
            Ok(_) | Err(BaseError::NotABase { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let tokenizer = manifest.text().map(|tokens| tokens.tokenizer);
        let base = match (&manifest.lora, base) {
            (None, _) => None,
            (Some(_), None) => return Err(EngineError::NeedsBase { path: folder.to_owned() }),
            (Some(_), Some(base)) => Some(base_of(&manifest, base)?),
        };
        let weights = |stage| Ok(checkpoint.weights(stage)?);
        Self::new((manifest, folder), device, tokenizer, weights, base.as_ref())
    }

    /// The base in a folder, with passes in this number format.
    pub(crate) fn of_base(folder: &Path, dtype: Dtype, device: Device) -> Result<Self> {
        let base = BaseFiles::in_folder(folder)?;
        let mut manifest = base.manifest();
        manifest.training.dtype = dtype;
        let shape = manifest.clone();
        let weights = |stage| Ok(base::stage_weights(&base, &shape, stage)?);
        Self::new((manifest, folder), device, None, weights, None)
    }

    fn new(
        (mut manifest, folder): (Manifest, &Path),
        device: Device,
        tokenizer: Option<Tokenizer>,
        weights: impl Fn(Stage) -> Result<Vec<f32>>,
        base: Option<&BaseFiles>,
    ) -> Result<Self> {
        // A pass for text is whole products: a model is the same, however it was trained.
        manifest.model.slices = 1;
        let mut stages = Vec::new();
        for stage in manifest.stages() {
            let values = weights(stage)?;
            refuse_broken(folder, &manifest, stage, &values)?;
            let place = WeightsPlace::whole(&manifest, stage, device);
            let mut frozen = Frozen::new(&manifest, stage, device, &place.own)?;
            if let (Some(frozen), Some(base)) = (&mut frozen, base) {
                frozen.load(&StageFiles::open(base, &manifest, stage)?)?;
            }
            let unchanged = frozen.as_ref().map(Frozen::source);
            let mut of_stage = Weights::zeros(&manifest, stage, unchanged, &place)?;
            of_stage.set(&values)?;
            stages.push(of_stage);
        }
        Ok(Self { manifest, device, stages, tokenizer })
    }

    /// The longest text that it can read, in tokens.
    pub(crate) fn positions(&self) -> usize {
        self.manifest.model.context as usize
    }

    /// Takes the rotary embeddings of texts of `length` tokens. Whether they are others than before, so that no cache is of
    /// use any more. A new model has those of its longest texts.
    pub(crate) fn fit_length(&mut self, length: usize) -> Result<bool> {
        let (model, length) = (&self.manifest.model, length.min(self.positions()) as u32);
        let mut changes = false;
        for stage in &mut self.stages {
            changes |= stage.blocks.shape.fit_length(model, length)?;
        }
        Ok(changes)
    }

    /// Number of tokens that it knows.
    pub(crate) fn vocabulary(&self) -> u32 {
        self.manifest.model.vocabulary
    }

    /// The tokenizer of the text that it was trained on; `None` if that is `tokenizer.json`.
    pub(crate) fn tokenizer(&self) -> Option<Tokenizer> {
        self.tokenizer
    }

    /// A cache of no tokens.
    pub(crate) fn cache(&self) -> Cache {
        let layers = |stage| self.manifest.layers_of(stage).map(|_| LayerCache::default());
        self.manifest.stages().map(|stage| layers(stage).collect()).collect()
    }

    /// Logits `[T, vocabulary]` that follow each token of a text.
    pub(crate) fn logits(&self, text: &[u32]) -> Result<Vec<f32>> {
        self.check(text)?;
        let _guard = tch::no_grad_guard();
        self.head(&self.through(text, None)?)
    }

    /// Logits that follow the last of some tokens, at least one, which follow those of the cache and
    /// join them.
    pub(crate) fn next_logits(&self, tokens: &[u32], cache: &mut Cache) -> Result<Vec<f32>> {
        self.check(tokens)?;
        let _guard = tch::no_grad_guard();
        let mut rows = None;
        for chunk in tokens.chunks(CHUNK) {
            rows = Some(self.through(chunk, Some(cache))?);
        }
        let rows = rows.expect("at least one token");
        let last = rows.size3()?.1 - 1;
        self.head(&rows.f_narrow(1, last, 1)?)
    }

    /// The log-probability of some tokens of a text, those that `counts` is true of, each given the tokens before it. The
    /// first token has none.
    pub(crate) fn log_probability(&self, text: &[u32], counts: &[bool]) -> Result<f64> {
        self.check(text)?;
        let Some((_, inputs)) = text.split_last().filter(|(_, inputs)| !inputs.is_empty()) else {
            return Ok(0.0);
        };
        let _guard = tch::no_grad_guard();
        let target = |(token, counts): (&u32, &bool)| match counts {
            true => i64::from(*token),
            false => IGNORED,
        };
        let targets: Vec<i64> = text.iter().zip(counts).skip(1).map(target).collect();
        let targets = Tensor::f_from_slice(&targets)?.f_to(self.device.torch)?;
        let (rows, head) = self.head_input(&self.through(inputs, None)?)?;
        let losses = losses_of_rows(&rows.f_flatten(0, 1)?, head, &targets)?;
        Ok(-losses.f_sum(Kind::Double)?.f_double_value(&[])?)
    }

    fn check(&self, tokens: &[u32]) -> Result<()> {
        let vocabulary = self.vocabulary();
        match tokens.iter().find(|token| **token >= vocabulary) {
            Some(token) => Err(EngineError::UnknownToken { token: *token, vocabulary }),
            None => Ok(()),
        }
    }

    /// Embeds tokens and runs all layers: the input of the head, `[1, T, H]`. Activations are not
    /// rounded between stages.
    fn through(&self, tokens: &[u32], mut cache: Option<&mut Cache>) -> Result<Tensor> {
        let wide: Vec<i64> = tokens.iter().map(|token| i64::from(*token)).collect();
        let mut x = Tensor::f_from_slice(&wide)?.f_unsqueeze(0)?.f_to(self.device.torch)?;
        for (index, Weights { blocks, .. }) in self.stages.iter().enumerate() {
            let layers = cache.as_deref_mut().map(|cache| cache[index].as_mut_slice());
            if let Some(embedding) = &blocks.embedding {
                let past = layers.as_ref().and_then(|layers| layers.first());
                let past = past.map_or(0, LayerCache::length);
                let rows = embedding.rows(&x)?;
                let dtype = self.manifest.training.dtype;
                x = embedding.embed(&rows, (past, None), &blocks.shape, dtype)?;
            }
            x = blocks.through(x, (None, 1.0), layers)?;
        }
        Ok(x)
    }

    /// The rows that the head reads, and the head.
    fn head_input(&self, rows: &Tensor) -> Result<(Tensor, &Tensor)> {
        let blocks = &self.stages.last().expect("a run has a stage").blocks;
        let head = blocks.head.as_ref().expect("the last stage has the head");
        let [matrix] = &head.matrices[..] else {
            unreachable!("a pass for text has whole matrices")
        };
        Ok((normalise(rows, &head.norm, &blocks.shape)?, &matrix.tensor))
    }

    /// The logits of rows `[1, T, H]`.
    fn head(&self, rows: &Tensor) -> Result<Vec<f32>> {
        let (rows, head) = self.head_input(rows)?;
        let logits = rows.f_linear(head, None::<Tensor>)?;
        let logits = logits.f_to_kind(Kind::Float)?.f_to(tch::Device::Cpu)?.f_contiguous()?;
        Ok(elements(&logits).to_vec())
    }
}
