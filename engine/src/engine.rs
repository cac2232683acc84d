//! What the driver calls: the stages of one peer's span.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use bytes::Bytes;
use shoal_protocol::ids::{ClaimKey, ContentHash, Stage, StageSpan, Step};
use shoal_protocol::manifest::Manifest;
use tch::{Kind, Tensor};

use crate::checkpoint::{self, CheckpointFile, StageState};
use crate::device::Device;
use crate::error::{EngineError, Result};
use crate::stage::{ForwardOutput, StageModel};
use crate::tensor::elements;

/// The tensor work of one peer. It belongs to one thread; nothing in it waits for anything.
#[derive(Debug)]
pub struct Engine {
    manifest: Manifest,
    device: Device,
    stages: BTreeMap<Stage, StageModel>,
}

impl Engine {
    /// The span's stages with their initial weights, which follow from the manifest alone.
    ///
    /// # Errors
    /// When the device has no room.
    ///
    /// # Panics
    /// When the run has no such stage.
    pub fn new(manifest: &Manifest, span: StageSpan, device: Device) -> Result<Self> {
        let mut stages = BTreeMap::new();
        for stage in span.stages() {
            stages.insert(stage, StageModel::new(manifest, stage, device)?);
        }
        Ok(Self { manifest: manifest.clone(), device, stages })
    }

    /// How many stages are hosted.
    #[must_use]
    pub fn hosted(&self) -> usize {
        self.stages.len()
    }

    /// Runs one stage on one microbatch.
    ///
    /// `input` is, in the first stage, token ids `[B, T]` as u32, little-endian, and in every
    /// other stage the activation that the stage before gave. The last stage also needs `labels`,
    /// encoded as tokens are. A held-out microbatch (its number is at least
    /// `training.microbatches`) leaves nothing behind; any other is then in flight until it is
    /// accumulated or discarded, or the step is applied.
    ///
    /// # Errors
    /// When the bytes have the wrong length or name unknown tokens, when the stage is not hosted,
    /// or when the microbatch is already in flight here.
    pub fn forward(
        &mut self,
        key: ClaimKey,
        input: &Bytes,
        labels: Option<&Bytes>,
    ) -> Result<ForwardOutput> {
        self.stage_mut(key.stage)?.forward(key, input, labels)
    }

    /// Runs the backward pass of a microbatch whose forward pass has been.
    ///
    /// `gradient` is that of the activation sent, in the same shape and dtype; the last stage
    /// needs none. Returns the gradient of the stage's input, which the first stage has not. The
    /// weight gradients stay pending until [`Engine::accumulate`] or [`Engine::discard`].
    ///
    /// # Errors
    /// When no forward pass has been, or the gradient is missing or has the wrong length; the
    /// microbatch then stays in flight.
    pub fn backward(&mut self, key: ClaimKey, gradient: Option<&Bytes>) -> Result<Option<Bytes>> {
        self.stage_mut(key.stage)?.backward(key, gradient)
    }

    /// Counts a microbatch: adds its pending weight gradients to the stage's accumulator.
    ///
    /// # Errors
    /// [`EngineError::BadGradient`] when fixed point cannot hold them; nothing is added then, and
    /// they stay pending.
    pub fn accumulate(&mut self, key: ClaimKey) -> Result<()> {
        self.stage_mut(key.stage)?.accumulate(key)
    }

    /// Drops whatever is held of a microbatch: graph, input or pending weight gradients.
    pub fn discard(&mut self, key: ClaimKey) {
        if let Some(stage) = self.stages.get_mut(&key.stage) {
            stage.discard(key);
        }
    }

    /// A step's accumulated sums of a range of the stage's flat vector: i64, little-endian.
    ///
    /// # Errors
    /// When the stage is not hosted or has no such range.
    pub fn export(&self, stage: Stage, step: Step, range: Range<usize>) -> Result<Bytes> {
        self.read_sums(stage, step, range, Bytes::copy_from_slice)
    }

    /// Has somebody read what [`Engine::export`] would copy.
    ///
    /// # Errors
    /// When the stage is not hosted or has no such range.
    pub fn read_sums<T>(
        &self,
        stage: Stage,
        step: Step,
        range: Range<usize>,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        self.stage(stage)?.read_sums(step, range, read)
    }

    /// Makes version `step + 1` of a stage's weights from the step's whole mean gradient (f32,
    /// little-endian, as [`crate::FixedPoint::reduce`] gives it) and its norm over all stages. Then
    /// empties the step's accumulator and drops what is in flight of it. Where steps read weights
    /// without the newest update, the version before stays until the next one.
    ///
    /// # Errors
    /// When the stage is not hosted or the gradient has the wrong length.
    pub fn apply(
        &mut self,
        stage: Stage,
        step: Step,
        gradient: &[u8],
        global_norm: f64,
    ) -> Result<()> {
        self.stage_mut(stage)?.apply(step, gradient, global_norm)
    }

    /// Empties a stage's accumulators and drops everything in flight in it.
    ///
    /// # Errors
    /// When the stage is not hosted.
    pub fn reset(&mut self, stage: Stage) -> Result<()> {
        self.stage_mut(stage)?.reset()
    }

    /// Elements of a stage's flat vector.
    ///
    /// # Errors
    /// When the stage is not hosted.
    pub fn parameters(&self, stage: Stage) -> Result<usize> {
        Ok(self.stage(stage)?.parameter_count())
    }

    /// Hash of a stage's weights and moments: equal on all replicas of a version.
    ///
    /// # Errors
    /// When the stage is not hosted.
    pub fn state_hash(&self, stage: Stage) -> Result<ContentHash> {
        self.stage(stage)?.state_hash()
    }

    /// A copy of a stage's weights and moments.
    ///
    /// # Errors
    /// When the stage is not hosted.
    pub fn state(&self, stage: Stage) -> Result<StageState> {
        self.stage(stage)?.state()
    }

    /// Takes over a stage's weights and moments at a version, and drops everything in flight in it.
    ///
    /// # Errors
    /// When the stage is not hosted, or the state is not that of this stage.
    pub fn set_state(&mut self, stage: Stage, version: Step, state: &StageState) -> Result<()> {
        self.stage_mut(stage)?.set_state(version, state)
    }

    /// Hosts one more stage, if it is not hosted yet, with its initial weights.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn host(&mut self, stage: Stage) -> Result<()> {
        if !self.stages.contains_key(&stage) {
            self.stages.insert(stage, StageModel::new(&self.manifest, stage, self.device)?);
        }
        Ok(())
    }

    /// Lets go of a stage, with everything in flight in it.
    pub fn leave(&mut self, stage: Stage) {
        self.stages.remove(&stage);
    }

    /// Takes over a stage's weights and moments at a version from files that [`Engine::write_stage`]
    /// wrote, and drops everything in flight in it.
    ///
    /// # Errors
    /// When the stage is not hosted, or the files are missing, damaged or another stage's.
    pub fn read_stage(&mut self, stage: Stage, version: Step, folder: &Path) -> Result<()> {
        let state = checkpoint::read_stage(folder, &self.manifest, stage)?;
        self.set_state(stage, version, &state)
    }

    /// Takes a stage back to its initial weights, and drops everything in flight in it.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn restart(&mut self, stage: Stage) -> Result<()> {
        let initial = StageModel::new(&self.manifest, stage, self.device)?;
        *self.stage_mut(stage)? = initial;
        Ok(())
    }

    /// Writes a stage's part of a checkpoint into `folder`, which exists.
    ///
    /// # Errors
    /// When the stage is not hosted or the file system refuses.
    pub fn write_stage(&self, stage: Stage, folder: &Path) -> Result<Vec<CheckpointFile>> {
        Ok(checkpoint::write_stage(folder, &self.manifest, stage, &self.state(stage)?)?)
    }

    /// Logits `[T, vocabulary]` of one sample of at most `context` tokens, where the span is every
    /// stage. Nothing is rounded between stages.
    pub(crate) fn logits(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        let wide: Vec<i64> = tokens.iter().map(|token| i64::from(*token)).collect();
        let mut x = Tensor::f_from_slice(&wide)?.f_unsqueeze(0)?;
        for stage in self.manifest.stages() {
            x = self.stage(stage)?.infer(&x)?;
        }
        let logits = x.f_to_kind(Kind::Float)?.f_to(tch::Device::Cpu)?.f_contiguous()?;
        Ok(elements(&logits).to_vec())
    }

    fn stage(&self, stage: Stage) -> Result<&StageModel> {
        self.stages.get(&stage).ok_or(EngineError::NotHosted(stage))
    }

    fn stage_mut(&mut self, stage: Stage) -> Result<&mut StageModel> {
        self.stages.get_mut(&stage).ok_or(EngineError::NotHosted(stage))
    }
}
