//! `run.toml`: a user's description of a run, and its conversion to a manifest.
//!
//! The sections are those of the manifest, so that a value has the same name everywhere. Only
//! `[data]` differs: a user names a text, a manifest names tokens by their hash.

pub mod data_section;
mod guard_section;
mod lora_section;
pub mod loss_section;
mod model_section;
mod optimizer_section;
mod outer_section;
mod place;
mod start_section;
mod training_section;

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shoal_protocol::ids::ContentHash;
use shoal_protocol::limits;
use shoal_protocol::manifest::{
    Adam, Admission, AdmissionMode, Audit, Base, Block, Checkpoint, Codecs, Data, Dtype,
    Evaluation, Guard, Lora, Loss, Manifest, ManifestError, Model, Optimizer, Rule, Schedule,
    TokenWidth, Tokenizer, Tokens, Training,
};
use shoal_protocol::units::Bytes;
use toml::Spanned;

use self::data_section::DataSection;
pub use self::data_section::DataSource;
pub use self::data_section::{PreparedFolder, reads_bytes};
use self::model_section::ModelSection;
pub use self::outer_section::Outer;
use self::start_section::StartSection;
pub use self::start_section::StartSource;
pub use self::training_section::Epochs as TrainingEpochs;
use self::training_section::TrainingSection;

/// A user's description of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunConfig {
    /// The model.
    pub model: Model,
    /// The folder of the base that the model is from.
    pub base: Option<PathBuf>,
    /// Partition, batch, precision and schedule.
    pub training: Training,
    /// Passes over the data, from which the steps may follow instead of those of `training`.
    pub epochs: TrainingEpochs,
    /// Encodings of tensors and files on the wire.
    pub codec: Codecs,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Evaluations on the held-out text.
    pub evaluation: Evaluation,
    /// Checkpoints.
    pub checkpoint: Checkpoint,
    /// Admission of peers.
    pub admission: Admission,
    /// Adapters that are trained instead of the model's weights.
    pub lora: Option<Lora>,
    /// Work that is computed again before it counts.
    pub audit: Audit,
    /// What becomes of a step whose loss or gradient is far out.
    pub guard: Option<Guard>,
    /// Virtual workers; without them all peers make each step together.
    pub outer: Option<Outer>,
    /// The checkpoint of another run that this one goes on from.
    pub start: Option<StartSource>,
    /// The data that is trained on.
    pub data: DataSource,
}

/// Why a run configuration is not usable.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{path}: {error}; `shoal init` writes a run configuration", path = path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: std::io::Error,
    },
    /// The file exceeds the size limit.
    #[error("{path} is larger than {cap}: not a run configuration", path = path.display(),
            cap = limits::MANIFEST)]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// The file is not TOML, has unknown keys, or lacks keys.
    #[error("{path}:{line}: {reason}", path = path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The cause.
        reason: String,
    },
    /// A value is out of range.
    #[error("{path}{line}: {error}", path = path.display(), line = line.map_or_else(String::new, |line| format!(":{line}")))]
    Value {
        /// The file.
        path: PathBuf,
        /// The line of the value, from 1, if it is there.
        line: Option<usize>,
        /// The value, and its range.
        error: ManifestError,
    },
}

/// Reads the folders that a run configuration names.
pub trait Sources {
    /// The model of a base, whose context is the longest position, and its name in a manifest.
    fn base(&self, folder: &Path) -> Result<(Model, Base), String>;

    /// A checkpoint that a run goes on from.
    fn checkpoint(&self, folder: &Path) -> Result<StartSource, String>;

    /// What is to be known of prepared data.
    fn prepared(&self, folder: &Path) -> Result<PreparedFolder, String>;
}

/// The line of a place in a text, from 1.
fn line_of(text: &str, place: usize) -> usize {
    1 + text[..place.min(text.len())].matches('\n').count()
}

/// The file as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RunToml {
    model: Spanned<ModelSection>,
    training: Spanned<TrainingSection>,
    codec: Codecs,
    optimizer: Optimizer,
    evaluation: Evaluation,
    checkpoint: Checkpoint,
    #[serde(default = "invited")]
    admission: Admission,
    #[serde(default)]
    audit: Audit,
    guard: Option<Guard>,
    lora: Option<Spanned<Lora>>,
    outer: Option<Outer>,
    start: Option<Spanned<StartSection>>,
    data: Spanned<DataSection>,
}

impl RunConfig {
    /// Reads a file, as [`Self::parse`] its text.
    ///
    /// # Errors
    /// If it cannot be read, and as [`Self::parse`].
    pub fn load(path: &Path, sources: &dyn Sources) -> Result<Self, ConfigError> {
        Self::parse(&read_capped(path)?, path, sources)
    }

    /// Parses the file at this path and checks everything that does not depend on its text. A relative
    /// path in it starts at the file's folder. `sources` reads the folders that it names.
    ///
    /// # Errors
    /// If the text has unknown keys, a folder cannot be read, or a value is out of range.
    pub fn parse(text: &str, path: &Path, sources: &dyn Sources) -> Result<Self, ConfigError> {
        let file: RunToml = toml::from_str(text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start);
            let reason = place::describe(error.message());
            ConfigError::Malformed { path: path.to_owned(), line: line_of(text, start), reason }
        })?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let malformed = |place: Range<usize>| {
            let (path, line) = (path.to_owned(), line_of(text, place.start));
            move |reason| ConfigError::Malformed { path, line, reason }
        };
        let place = file.model.span();
        let model = file.model.into_inner().resolve(folder, sources);
        let (model, base) = model.map_err(malformed(place))?;
        let lora = file.lora.as_ref().map(Spanned::span);
        if let Some(place) = lora.filter(|_| !model.loads_weights()) {
            let reason = "lora trains beside the weights of a base: set model.from".to_owned();
            return Err(malformed(place)(reason));
        }
        let mut start = None;
        if let Some(section) = file.start {
            let place = section.span();
            let source = section.into_inner().resolve(folder, sources);
            start = Some(source.map_err(malformed(place))?);
        }
        let place = file.training.span();
        let training = file.training.into_inner().resolve();
        let (training, epochs) = training.map_err(malformed(place))?;
        let place = file.data.span();
        let data =
            file.data.into_inner().resolve(folder, sources).map_err(malformed(place.clone()))?;
        if data.folders().is_empty() && model.loads_weights() && !reads_bytes(&model) {
            let base = base.as_deref().unwrap_or(Path::new("BASE"));
            return Err(malformed(place)(data_section::not_prepared(
                base,
                data.path.as_deref(),
                model.context,
            )));
        }
        let config = Self {
            model,
            base,
            training,
            epochs,
            codec: file.codec,
            optimizer: file.optimizer,
            evaluation: file.evaluation,
            checkpoint: file.checkpoint,
            admission: file.admission,
            audit: file.audit,
            guard: file.guard,
            lora: file.lora.map(Spanned::into_inner),
            outer: file.outer,
            start,
            data,
        };
        config.check().map_err(|error| ConfigError::Value {
            path: path.to_owned(),
            line: place::line_of_error(text, &error),
            error,
        })?;
        Ok(config)
    }

    /// Checks everything that does not depend on the text.
    ///
    /// # Errors
    /// If a value is out of range, or the checkpoint to go on from has another model.
    pub fn check(&self) -> Result<(), ManifestError> {
        let manifest = self.with_enough_tokens()?;
        manifest.check()?;
        self.check_warm_up()?;
        self.start.iter().try_for_each(|start| manifest.check_goes_on_from(&start.manifest))
    }

    /// Refuses a warm-up that is longer than a run whose steps are given: its rate never gets where it is to go.
    fn check_warm_up(&self) -> Result<(), ManifestError> {
        let (warmup, steps) = (self.optimizer.warmup_steps, self.training.steps);
        if warmup <= steps || matches!(self.epochs, TrainingEpochs::Of(_)) {
            return Ok(());
        }
        Err(ManifestError::OutOfRange {
            key: "optimizer.warmup_steps",
            value: warmup.to_string(),
            range: format!("at most training.steps = {steps}"),
        })
    }

    /// The manifest of the run, given the tokens of its text.
    ///
    /// # Errors
    /// If the values are invalid for these tokens.
    pub fn resolve(&self, data: Data) -> Result<Manifest, ManifestError> {
        let manifest = self.with_data(data)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// The manifest with the prepared data, or more tokens of text than any run needs.
    pub fn with_enough_tokens(&self) -> Result<Manifest, ManifestError> {
        if let Some(data) = self.data.rows() {
            return self.with_data(data);
        }
        let tokenizer = self.data.tokenizer;
        let (hash, width) = (ContentHash([0; 32]), TokenWidth::U8);
        self.with_data(Data::Text(Tokens { hash, count: 1 << 50, width, tokenizer }))
    }

    fn with_data(&self, data: Data) -> Result<Manifest, ManifestError> {
        let mut manifest = Manifest {
            model: self.model.clone(),
            training: self.training.clone(),
            codec: self.codec.clone(),
            optimizer: self.optimizer.clone(),
            evaluation: self.evaluation.clone(),
            checkpoint: self.checkpoint.clone(),
            data,
            admission: self.admission.clone(),
            lora: self.lora.clone(),
            start: None,
            inner: None,
            audit: self.audit,
            guard: self.guard,
        };
        if let TrainingEpochs::Of(epochs) = self.epochs {
            let done = self.start.as_ref().map_or(0, StartSource::updates);
            let shape = self.outer.map_or((1, 1), |outer| (outer.workers, outer.every));
            manifest.training.steps = training_section::steps(epochs, &manifest, done, shape);
        }
        self.outer.iter().try_for_each(|outer| outer.apply(&mut manifest))?;
        let start = self.start.as_ref().map(|source| source.start_of(&manifest));
        manifest.start = start.transpose()?;
        Ok(manifest)
    }

    /// The configuration as a commented file, which parses to the same configuration.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let Self { training, codec, optimizer, evaluation, checkpoint, .. } = self;
        let Self { admission, audit, guard, lora, outer, data, .. } = self;
        format!(
            include_str!("run_template.toml"),
            model = model_section::to_toml(&self.model, self.base.as_deref()),
            seed = training.seed,
            length = training_section::length_to_toml(training.steps, self.epochs),
            stages = training.stages,
            microbatches = training.microbatches,
            microbatch_size = training.microbatch_size,
            dtype = text_of(training.dtype),
            recompute = training.recompute,
            gradient_fraction_bits = training.gradient_fraction_bits,
            staleness = training.staleness,
            loss = loss_section::to_toml(&training.loss),
            activations = text_of(codec.activations),
            activation_gradients = text_of(codec.activation_gradients),
            gradient_rounding = text_of(codec.gradient_rounding),
            all_reduce = text_of(codec.all_reduce),
            chunks = text_of(codec.chunks),
            optimizer = optimizer_section::to_toml(optimizer),
            held_out = evaluation.held_out,
            evaluate_every = evaluation.every,
            evaluation_microbatches = evaluation.microbatches,
            checkpoint_every = checkpoint.every,
            checkpoint_interval = checkpoint.interval,
            checkpoint_keep = checkpoint.keep,
            admission = text_of(admission.mode),
            admission_key = match admission.key {
                Some(key) => format!("key = \"{key}\""),
                None => "# key = \"12D3KooW...\"".to_owned(),
            },
            audit_share = audit.share,
            audit_probation = audit.probation,
            guard = guard_section::to_toml(guard.as_ref()),
            lora = lora_section::to_toml(lora.as_ref()),
            outer = outer_section::to_toml(outer.as_ref()),
            start = start_section::to_toml(self.start.as_ref()),
            data = data_section::to_toml(data),
        )
    }
}

/// A run whose loss falls visibly within a minute or two on two processor cores.
impl Default for RunConfig {
    fn default() -> Self {
        Self {
            base: None,
            model: Model {
                vocabulary: Tokenizer::Bytes.vocabulary(),
                hidden: 128,
                layers: 4,
                heads: 4,
                key_value_heads: 2,
                intermediate: 352,
                slices: 1,
                context: 128,
                rope_theta: 10_000.0,
                norm_epsilon: 1e-5,
                initializer_range: 0.02,
                boundary: None,
                block: Block::default(),
                base: None,
            },
            training: Training {
                seed: 1,
                steps: 300,
                stages: 2,
                microbatches: 8,
                microbatch_size: 2,
                dtype: Dtype::F32,
                recompute: false,
                gradient_fraction_bits: 44,
                staleness: 0,
                loss: Loss::CrossEntropy,
            },
            epochs: TrainingEpochs::None,
            codec: Codecs::default(),
            optimizer: Optimizer {
                learning_rate: 1.5e-3,
                schedule: Schedule::Cosine { final_learning_rate: 1.5e-4 },
                warmup_steps: 20,
                weight_decay: 0.1,
                gradient_clip: 1.0,
                rule: Rule::Adamw(Adam { beta2: 0.95, ..Adam::DEFAULT }),
            },
            evaluation: Evaluation { held_out: 0.1, every: 50, microbatches: 8 },
            checkpoint: Checkpoint { every: 0, interval: 300, keep: 2 },
            admission: invited(),
            audit: Audit::NONE,
            guard: None,
            lora: None,
            outer: None,
            start: None,
            data: DataSource::default(),
        }
    }
}

/// Admission by ticket, whose issuer is the peer that starts the run.
fn invited() -> Admission {
    Admission { mode: AdmissionMode::Invite, key: None }
}

/// The value in TOML.
fn text_of(value: impl Serialize) -> String {
    toml::Value::try_from(value).expect("a name is text").to_string()
}

/// Reads the text of a run configuration.
pub fn read_capped(path: &Path) -> Result<String, ConfigError> {
    read_text(path, limits::MANIFEST).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => ConfigError::TooLarge { path: path.to_owned() },
        _ => ConfigError::Unreadable { path: path.to_owned(), error },
    })
}

/// Reads a text of at most `cap` bytes.
///
/// # Errors
/// Those of the file, and [`io::ErrorKind::FileTooLarge`] if it is longer.
pub fn read_text(path: &Path, cap: Bytes) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(cap.0 + 1).read_to_string(&mut text)?;
    if text.len() as u64 > cap.0 {
        let longer = format!("it is longer than {cap}");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, longer));
    }
    Ok(text)
}

/// For tests of the decoder, which read no other file.
#[cfg(any(test, fuzzing))]
struct NoSources;

#[cfg(any(test, fuzzing))]
impl Sources for NoSources {
    fn base(&self, folder: &Path) -> Result<(Model, Base), String> {
        Err(format!("{} is not read", folder.display()))
    }

    fn checkpoint(&self, folder: &Path) -> Result<StartSource, String> {
        Err(format!("{} is not read", folder.display()))
    }

    fn prepared(&self, folder: &Path) -> Result<PreparedFolder, String> {
        Err(format!("{} is not read", folder.display()))
    }
}

/// How the decoder of the file is tested.
#[cfg(any(test, fuzzing))]
pub const DECODER: shoal_protocol::decoder::Decoder = shoal_protocol::decoder::Decoder {
    name: "run_config",
    examples: || vec![RunConfig::default().to_toml().into_bytes()],
    check: |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return };
        let path = Path::new("run.toml");
        let Ok(config) = RunConfig::parse(text, path, &NoSources) else { return };
        let again = RunConfig::parse(&config.to_toml(), path, &NoSources);
        assert_eq!(again.ok().as_ref(), Some(&config), "it parses to itself");
    },
};

#[cfg(test)]
mod tests;
