//! The manifest of a run: all settings that determine the bits of the model, and the admission
//! rule.
//!
//! Two peers train together only if their manifests have the same hash. That hash names the run.

mod admission;
mod audit;
mod block;
mod boundary;
mod check;
mod codecs;
mod data;
pub mod example;
mod expert_layers;
mod experts;
mod guard;
mod inner;
mod lora;
mod mixture;
mod model;
mod optimizer;
mod preference;
mod rotary;
mod slices;
mod start;
mod weight_groups;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::frame::Element;
use crate::ids::{Microbatch, RunId, Stage, Step};
use crate::limits;
use crate::units::Bytes;
use crate::wire;

pub use admission::{Admission, AdmissionMode};
pub use audit::Audit;
pub use block::{
    Activation, Biases, Block, LatentAttention, LayerAttention, Norm, Placement, QueryKeyNorm,
};
pub use boundary::{Boundary, BoundaryKind};
pub use check::within;
pub use codecs::{ChunkPacking, Codecs, GradientRounding};
pub use data::{Data, Prepared, TokenWidth, Tokenizer, Tokens};
pub use experts::{Balance, ExpertGroups, Experts, Router};
pub use guard::{Guard, Outlier, Verdict};
pub use inner::{DistanceCodec, InnerLoop, InnerMoments, NOTE};
pub use lora::{Lora, LoraTarget, Quantisation};
pub use mixture::{MixedSource, Mixture, MixtureError, Phase, Weight};
pub use model::{Base, Model};
pub use optimizer::{
    Adafactor, Adam, Lars, Lion, Muon, Optimizer, RateScale, Rule, Schedule, Sgd, UnknownKey,
};
pub use preference::{Loss, Pairs, Preference, PreferenceError, PreferenceKind};
pub use rotary::{Rotary, RotaryScaling};
pub use start::{SampleNumbers, Start};

/// Bytes of one label, which travels beside its activation.
const LABEL_BYTES: u64 = 4;

/// One training job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Shape of the transformer.
    pub model: Model,
    /// Stages, batch and arithmetic.
    pub training: Training,
    /// The precision of tensors in transit.
    pub codec: Codecs,
    /// The optimizer that turns weight gradients into weights.
    pub optimizer: Optimizer,
    /// The frequency and size of evaluations on the held-out text.
    pub evaluation: Evaluation,
    /// The frequency and retention of checkpoints.
    pub checkpoint: Checkpoint,
    /// The tokens trained on.
    pub data: Data,
    /// The rule of admission.
    #[serde(default)]
    pub admission: Admission,
    /// Small matrices that are trained instead of the model's weights; `None` trains all weights.
    #[serde(default)]
    pub lora: Option<Lora>,
    /// The checkpoint of another run that this one goes on from; `None` begins at step 0.
    #[serde(default)]
    pub start: Option<Start>,
    /// What each microbatch does, in a run of virtual workers; `None` runs it once through the model.
    #[serde(default)]
    pub inner: Option<InnerLoop>,
    /// Work that is computed again before it counts.
    #[serde(default)]
    pub audit: Audit,
    /// What becomes of a step whose loss or gradient is far out; without it, every step counts.
    #[serde(default)]
    pub guard: Option<Guard>,
}

/// Number format of the forward and backward passes. Weights are always f32.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 32-bit IEEE.
    F32,
    /// 16-bit with the exponent of f32.
    Bf16,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Stages, batch and arithmetic of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct Training {
    /// Determines the initial weights and the order of samples.
    pub seed: u64,
    /// Version of the weights that the run ends with: its optimizer updates, and those before its
    /// start. With 0 it only writes the initial checkpoint.
    pub steps: u64,
    /// Pipeline stages; at most one per layer.
    pub stages: u16,
    /// Microbatches of one step.
    pub microbatches: u32,
    /// Samples of one microbatch.
    pub microbatch_size: u32,
    /// Number format of the passes.
    pub dtype: Dtype,
    /// Drop a forward pass's graph and run it again before the backward pass.
    pub recompute: bool,
    /// Weight gradients are rounded to multiples of 2^-gradient_fraction_bits.
    pub gradient_fraction_bits: u8,
    /// Updates that may be missing from the weights that a step reads, up to [`limits::STALENESS`]. All-reduces
    /// go one after the other; with 1, that of a step may take as long as all passes of the next step, and with
    /// more, single ones may take longer.
    #[serde(default)]
    pub staleness: u8,
    /// The loss that the run lowers.
    #[serde(default)]
    pub loss: Loss,
}

/// The frequency and size of evaluations on the held-out text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct Evaluation {
    /// Share of the text, at its end, that is never trained on.
    pub held_out: f64,
    /// Steps from one evaluation to the next; 0 disables evaluation.
    pub every: u64,
    /// Held-out microbatches of one evaluation.
    pub microbatches: u32,
}

/// The frequency and retention of checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// Commits from one checkpoint to the next; 0 makes none by their number.
    pub every: u64,
    /// Seconds from one checkpoint to the next, at most; 0 makes none by time. Unless it is 0, one is also made when
    /// the last host of a stage leaves in order.
    #[serde(default = "default_interval")]
    pub interval: u32,
    /// Newest complete checkpoints whose stages peers keep; archives keep all.
    #[serde(default = "default_keep")]
    pub keep: u32,
}

/// Five minutes of work may be lost.
fn default_interval() -> u32 {
    300
}

/// The newest checkpoint, and an older one in case the newest becomes unavailable.
fn default_keep() -> u32 {
    2
}

/// Errors of invalid manifests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// A number outside its range.
    #[error("{key} = {value} is out of range: it must be {range}")]
    OutOfRange {
        /// The position of the value, as `section.key`.
        key: &'static str,
        /// The given value.
        value: String,
        /// The permitted range.
        range: String,
    },
    /// The number of stages exceeds the number of layers.
    #[error(
        "training.stages = {stages} is more than model.layers = {layers}: a stage needs a layer"
    )]
    MoreStagesThanLayers {
        /// Requested number of stages.
        stages: u16,
        /// Number of layers.
        layers: u32,
    },
    /// A boundary in a model of one stage.
    #[error(
        "model.boundary compresses what crosses stage boundaries, and training.stages = 1 has \
         none: take model.boundary out, or ask for more stages"
    )]
    BoundaryOfOneStage,
    /// A subspace in a model whose embedding does not follow from the seed.
    #[error(
        "model.boundary of kind \"subspace\" draws the initial embedding from the seed at every stage, and \
         model.from takes it from a base: give model.like instead, or another kind of boundary"
    )]
    SubspaceOfBase,
    /// A subspace in a model whose layers add the output of a norm to the residual stream.
    #[error(
        "model.boundary of kind \"subspace\" constrains the matrices whose output joins the residual stream, \
         and this model has a norm after them: take another kind of boundary"
    )]
    SubspaceWithNorm,
    /// A subspace in a model that adds trained positions to the residual stream.
    #[error(
        "model.boundary of kind \"subspace\" sends what layers add to the embedding, and this model adds \
         trained positions too: take another kind of boundary"
    )]
    SubspaceWithPositions,
    /// Virtual workers beside something that they exclude.
    #[error("outer workers do not go with {other}: take one of them out")]
    WorkersWith {
        /// It.
        other: &'static str,
    },
    /// Audits in a run whose workers exchange tensors on their way.
    #[error(
        "audit does not go with outer workers of several stages: set audit.share = 0 and audit.probation = 0, or \
         training.stages = 1"
    )]
    AuditOfExchanges,
    /// Audits of steps with more microbatches than one order can list.
    #[error(
        "audit takes at most {} microbatches a step, and training.microbatches is {microbatches}: make each larger \
         (training.samples), or set audit.share = 0 and audit.probation = 0",
        limits::AUDITED_MICROBATCHES
    )]
    AuditOfMany {
        /// Microbatches of a step.
        microbatches: u32,
    },
    /// A guard of gradients that are not finite, in a run of workers.
    #[error(
        "guard.not_finite does not go with [outer]: a worker's own updates are not in the run's sums; set it to false"
    )]
    GuardOfWorkers,
    /// Adapters beside a boundary, which needs all weights trained.
    #[error(
        "lora freezes the model's weights, and model.boundary needs them to be trained: take one of them out"
    )]
    LoraWithBoundary,
    /// The text is too short for one sample to train on and, if requested, one to evaluate.
    #[error(
        "the text has {count} tokens; training on samples of {context} needs at least {needed}: \
         give more text, a smaller model.context or a smaller evaluation.held_out"
    )]
    TextTooShort {
        /// Tokens in the text.
        count: u64,
        /// Tokens of a sample.
        context: u32,
        /// Number of tokens that suffices.
        needed: u64,
    },
    /// Prepared data without held-out rows in a run that evaluates.
    #[error(
        "evaluation.every = {every}, and the data holds nothing out: prepare it with --held-out, or \
         set evaluation.every = 0"
    )]
    NothingHeldOut {
        /// Steps from one evaluation to the next.
        every: u64,
    },
    /// A start whose trained weights are not those of the run.
    #[error(
        "the checkpoint to go on from is of another model: model.{key} = {earlier} there and {here} \
         here"
    )]
    StartOfAnotherModel {
        /// The first key that differs.
        key: &'static str,
        /// The value of the checkpoint's run.
        earlier: String,
        /// The value of this run.
        here: String,
    },
    /// Adapters that the checkpoint lacks.
    #[error(
        "the checkpoint to go on from has no adapters, and this run trains some: take lora out, or \
         export its model and import it as a base"
    )]
    StartWithoutAdapters,
    /// A start whose optimizer keeps other vectors beside the weights.
    #[error(
        "the checkpoint to go on from has what {earlier} keeps, and this run has {here}: keep the kind (and, for sgd, \
         lars and [outer], whether there is momentum), or export its model and import it as a base"
    )]
    StartOfAnotherOptimizer {
        /// What updates the weights in the checkpoint's run.
        earlier: String,
        /// The same in this run.
        here: String,
    },
    /// A start without moments of workers, in a run whose workers begin with those of the step before.
    #[error(
        "the checkpoint to go on from has no moments of workers: set outer.moments = \"zero\", or export its \
         model and import it as a base"
    )]
    StartWithoutMoments,
    /// A checkpoint of other meetings of workers, between two of this run's.
    #[error(
        "the checkpoint to go on from has done {done} steps of a worker, and outer.every = {every}: go on from one \
         after a multiple of it, or change every"
    )]
    StartBetweenMeetings {
        /// Steps of a worker.
        done: u64,
        /// Those of one step of this run.
        every: u64,
    },
    /// A checkpoint of adapters in a run that trains all weights.
    #[error(
        "the checkpoint to go on from has adapters alone, and this run trains all weights: add its \
         lora section, or export its merged model and import it as a base"
    )]
    StartWithAdapters,
    /// Trained boundaries at other places.
    #[error(
        "the checkpoint to go on from has model.boundary between {earlier} stages, and this run has \
         {here}: boundaries are part of the model, so the number of stages must stay"
    )]
    StartWithBoundary {
        /// Stages of the checkpoint's run.
        earlier: u16,
        /// Stages of this run.
        here: u16,
    },
    /// A subspace that was drawn from another seed.
    #[error(
        "the checkpoint to go on from has model.boundary in a subspace drawn from training.seed = {earlier}, and \
         this run has {here}: keep the seed"
    )]
    StartWithOtherSubspace {
        /// Seed of the checkpoint's run.
        earlier: u64,
        /// Seed of this run.
        here: u64,
    },
    /// A start at or after the run's end.
    #[error(
        "training.steps = {steps} is the step at which the run ends, and the checkpoint to go on from \
         has done {done} steps: ask for more"
    )]
    StepsAreDone {
        /// The steps of the run, those of workers one by one.
        steps: u64,
        /// Steps of the checkpoint.
        done: u64,
    },
    /// A mixture that cannot be drawn from.
    #[error(transparent)]
    Mixture(Box<MixtureError>),
    /// A loss of preferences that the run cannot compute.
    #[error(transparent)]
    Preference(#[from] PreferenceError),
    /// The bytes are not the encoding of a manifest.
    #[error("not a run manifest: {0}")]
    Wire(#[from] wire::WireError),
}

impl Manifest {
    /// The name of the run.
    #[must_use]
    pub fn run_id(&self) -> RunId {
        let mut hasher = blake3::Hasher::new_derive_key("shoal run manifest v1");
        hasher.update(&self.to_bytes());
        hasher.finalize().into()
    }

    /// The encoding that is hashed and sent.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        wire::encode(self).expect("a manifest is far smaller than a control message")
    }

    /// Decodes and checks a manifest from a peer.
    ///
    /// # Errors
    /// If the bytes are not a manifest, or a value in it is invalid.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ManifestError> {
        let manifest: Self = wire::decode(bytes)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// The layers of a stage. All stages get equal shares; the first stages take the remainder,
    /// because the last one has the head.
    ///
    /// # Panics
    /// If the run has no such stage.
    #[must_use]
    pub fn layers_of(&self, stage: Stage) -> Range<u32> {
        let stages = u32::from(self.training.stages);
        let index = u32::from(stage.0);
        assert!(index < stages, "the run has no stage {stage}");
        let start = |index: u32| (index * self.model.layers).div_ceil(stages);
        start(index)..start(index + 1)
    }

    /// The version of the weights that a step reads: `step - staleness`, or the first version if that
    /// is later.
    #[must_use]
    pub fn reads(&self, step: Step) -> Step {
        let version = Step(step.0.saturating_sub(u64::from(self.training.staleness)));
        version.max(self.first_version())
    }

    /// Number of steps whose passes can run at the same time: the first uncommitted step, and later
    /// ones that read only committed weights.
    #[must_use]
    pub fn steps_at_once(&self) -> u64 {
        1 + u64::from(self.training.staleness)
    }

    /// Every stage in order.
    pub fn stages(&self) -> impl Iterator<Item = Stage> + use<> {
        (0..self.training.stages).map(Stage)
    }

    /// The stage with norm, head and loss.
    #[must_use]
    pub fn last_stage(&self) -> Stage {
        Stage(self.training.stages - 1)
    }

    /// Tokens that one step trains on.
    #[must_use]
    pub fn tokens_per_step(&self) -> u64 {
        u64::from(self.training.microbatches) * self.passes() * self.tokens_per_microbatch()
    }

    /// Whether step `step` also evaluates the held-out text.
    #[must_use]
    pub fn evaluates(&self, step: u64) -> bool {
        self.evaluation.every > 0 && step.is_multiple_of(self.evaluation.every)
    }

    /// Microbatches of step `step`, held-out ones included; those come last.
    #[must_use]
    pub fn microbatches_of(&self, step: u64) -> u32 {
        let held_out = if self.evaluates(step) { self.evaluation.microbatches } else { 0 };
        self.training.microbatches + held_out
    }

    /// The maximum number of tensors in the output log of a stage, as (activations, activation
    /// gradients). It is reached if one replica computes all microbatches of every step that can
    /// run. Each exchange of a microbatch, held out or not, has an activation; each of a training microbatch also
    /// has a gradient. The last stage sends no activations, the first no gradients.
    #[must_use]
    pub fn output_log(&self, stage: Stage) -> (u64, u64) {
        let exchanges = u64::from(self.exchanges_of(Microbatch(0)));
        let trained = u64::from(self.training.microbatches) * exchanges * self.steps_at_once();
        let all = trained + u64::from(self.evaluation.microbatches) * self.steps_at_once();
        let activations = if stage == self.last_stage() { 0 } else { all };
        (activations, if stage == Stage(0) { 0 } else { trained })
    }

    /// The size of the largest tensor of an output log.
    #[must_use]
    pub fn largest_logged(&self) -> Bytes {
        self.activation_bytes().max(self.gradient_bytes())
    }

    /// The maximum size of the tensors of one message: an activation with its labels, its gradient,
    /// or a piece of an all-reduce.
    #[must_use]
    pub fn largest_message(&self) -> Bytes {
        let sums = Element::I64.bytes_of(limits::ROUND_PIECE_ELEMENTS as u64);
        self.largest_logged().max(Bytes(sums.unwrap_or(u64::MAX)))
    }

    /// The maximum size of a stage's output log.
    #[must_use]
    pub fn output_log_bytes(&self, stage: Stage) -> Bytes {
        let (activations, gradients) = self.output_log(stage);
        Bytes(activations * self.activation_bytes().0 + gradients * self.gradient_bytes().0)
    }

    /// Factor on a step's gradient, which the passes divide by all tokens or pairs, for a mean over those that count.
    /// Exactly 1 if all count, or none is, or if it is a mean over workers.
    #[must_use]
    pub fn gradient_scale(&self, targets: u64) -> f64 {
        if targets == 0 || self.inner.is_some() {
            1.0
        } else {
            self.terms_per_step() as f64 / targets as f64
        }
    }

    /// Tokens of one pass.
    #[must_use]
    pub fn tokens_per_microbatch(&self) -> u64 {
        u64::from(self.training.microbatch_size) * u64::from(self.model.context)
    }
}

#[cfg(test)]
mod tests {
    use super::example::small;
    use super::*;

    #[test]
    fn a_manifest_reads_back_under_the_same_run_id() {
        let manifest = small();
        let read = Manifest::from_bytes(&manifest.to_bytes()).expect("valid");
        assert_eq!(read, manifest);
        assert_eq!(read.run_id(), manifest.run_id());
    }

    #[test]
    fn every_value_is_part_of_the_run_id() {
        let mut other = small();
        other.optimizer.weight_decay += 1e-9;
        assert_ne!(other.run_id(), small().run_id());
    }

    #[test]
    fn stages_share_all_layers_in_order() {
        for (layers, stages) in [(5, 2), (8, 8), (7, 3), (1, 1), (64, 7)] {
            let mut manifest = small();
            manifest.model.layers = layers;
            manifest.training.stages = stages;
            let cut: Vec<u32> = manifest.stages().flat_map(|s| manifest.layers_of(s)).collect();
            assert_eq!(cut, (0..layers).collect::<Vec<_>>());
            assert!(manifest.stages().all(|s| !manifest.layers_of(s).is_empty()));
        }
    }
}
