//! The interface for the driver: the stages of one peer's span.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use bytes::Bytes;
use shoal_protocol::ids::{ClaimKey, ContentHash, Stage, StageSpan, Step, WeightGroup};
use shoal_protocol::manifest::Manifest;

use crate::accumulator::add_words;
use crate::checkpoint::{self, CheckpointFile, StageState};
use crate::device::Device;
use crate::error::{EngineError, Result};
use crate::optimizer::Update;
use crate::origin::Origin;
use crate::stage::{ForwardOutput, StageModel};

/// The tensor work of one peer. It belongs to one thread and never blocks on other peers.
#[derive(Debug)]
pub struct Engine {
    manifest: Manifest,
    device: Device,
    stages: BTreeMap<Stage, StageModel>,
}

impl Engine {
    /// Creates the span's stages, with their initial weights if those are drawn from the seed. A run
    /// that starts from files needs [`Engine::load`] or [`Engine::set_state`] before any pass.
    ///
    /// # Errors
    /// If the device has too little memory.
    ///
    /// # Panics
    /// If the run has no such stage.
    pub fn new(manifest: &Manifest, span: StageSpan, device: Device) -> Result<Self> {
        let mut stages = BTreeMap::new();
        for stage in span.stages() {
            stages.insert(stage, StageModel::new(manifest, stage, device)?);
        }
        Ok(Self { manifest: manifest.clone(), device, stages })
    }

    /// Number of hosted stages.
    #[must_use]
    pub fn hosted(&self) -> usize {
        self.stages.len()
    }

    /// Runs one stage on one microbatch.
    ///
    /// In the first stage, `input` holds token ids `[B, T]` as little-endian u32; in every other
    /// stage it is the activation of the previous stage. The last stage also needs `labels`,
    /// encoded like tokens. A held-out microbatch (its number is at least `training.microbatches`)
    /// leaves no state; any other is in flight until it is accumulated or discarded, or the step is
    /// applied.
    ///
    /// # Errors
    /// If the bytes have the wrong length or contain unknown tokens, the stage is not hosted, or
    /// the microbatch is already in flight here.
    pub fn forward(
        &mut self,
        key: ClaimKey,
        input: &Bytes,
        labels: Option<&Bytes>,
    ) -> Result<ForwardOutput> {
        self.stage_mut(key.stage)?.forward(key, input, labels)
    }

    /// Runs the backward pass of a microbatch after its forward pass.
    ///
    /// `gradient` is the gradient of the sent activation, in the same shape and dtype; the last
    /// stage needs none. Returns the gradient of the stage's input; `None` in the first stage. The
    /// weight gradients stay pending until [`Engine::accumulate`] or [`Engine::discard`].
    ///
    /// # Errors
    /// If there was no forward pass, or the gradient is missing or has the wrong length; the
    /// microbatch then stays in flight.
    pub fn backward(&mut self, key: ClaimKey, gradient: Option<&Bytes>) -> Result<Option<Bytes>> {
        self.stage_mut(key.stage)?.backward(key, gradient)
    }

    /// Adds a microbatch's pending weight gradients to the stage's accumulator.
    ///
    /// # Errors
    /// [`EngineError::BadGradient`] if fixed point cannot represent them; then none is added, and
    /// they stay pending.
    pub fn accumulate(&mut self, key: ClaimKey) -> Result<()> {
        self.stage_mut(key.stage)?.accumulate(key)
    }

    /// Drops all state of a microbatch: graph, input or pending weight gradients.
    pub fn discard(&mut self, key: ClaimKey) {
        if let Some(stage) = self.stages.get_mut(&key.stage) {
            stage.discard(key);
        }
    }

    /// Copies a step's accumulated sums of a range of a weight group, over all its hosted stages: i64,
    /// little-endian.
    ///
    /// # Errors
    /// If no stage of the group is hosted, or it has no such range.
    pub fn export(&self, weights: WeightGroup, step: Step, range: Range<usize>) -> Result<Bytes> {
        self.read_sums(weights, step, range, Bytes::copy_from_slice)
    }

    /// Passes the sums that [`Engine::export`] would copy to a function.
    ///
    /// # Errors
    /// If no stage of the group is hosted, or it has no such range.
    pub fn read_sums<T>(
        &self,
        weights: WeightGroup,
        step: Step,
        range: Range<usize>,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        let stages: Vec<Stage> = self.manifest.stages_of(weights).collect();
        let mut hosted = stages.iter().filter_map(|stage| self.stages.get(stage));
        let first = hosted.next().ok_or(EngineError::NotHosted(stages[0]))?;
        let Some(second) = hosted.next() else {
            return first.read_sums(weights, step, range, read);
        };
        let mut sums: Vec<i64> = first.read_sums(weights, step, range.clone(), |part| {
            part.as_chunks().0.iter().map(|word| i64::from_le_bytes(*word)).collect()
        })?;
        second.read_sums(weights, step, range, |part| add_words(&mut sums, part))?;
        Ok(read(bytemuck::cast_slice(&sums)))
    }

    /// Computes version `step + 1` of a stage's weights from the step's whole gradients, as returned by
    /// [`crate::FixedPoint::reduce`] for each of its weight groups. Then clears the step's accumulator
    /// and drops its microbatches in flight. If steps read weights without the newest update, the
    /// previous version is kept until the next one.
    ///
    /// # Errors
    /// If the stage is not hosted or a gradient has the wrong length.
    pub fn apply(&mut self, stage: Stage, update: &Update<'_>) -> Result<()> {
        self.stage_mut(stage)?.apply(update)
    }

    /// Clears a stage's accumulators and drops all its microbatches in flight.
    ///
    /// # Errors
    /// If the stage is not hosted.
    pub fn reset(&mut self, stage: Stage) -> Result<()> {
        self.stage_mut(stage)?.reset()
    }

    /// Hash of a stage's weights and moments: equal on all replicas of a version.
    ///
    /// # Errors
    /// If the stage is not hosted.
    pub fn state_hash(&self, stage: Stage) -> Result<ContentHash> {
        self.stage(stage)?.state_hash()
    }

    /// A copy of a stage's weights and moments.
    ///
    /// # Errors
    /// If the stage is not hosted.
    pub fn state(&self, stage: Stage) -> Result<StageState> {
        self.stage(stage)?.state()
    }

    /// Loads a stage's weights and moments of a version, and drops its microbatches in flight.
    ///
    /// # Errors
    /// If the stage is not hosted, or the state does not fit this stage.
    pub fn set_state(&mut self, stage: Stage, version: Step, state: &StageState) -> Result<()> {
        self.stage_mut(stage)?.set_state(version, state)
    }

    /// Whether a stage needs the base at any version: its frozen weights have no values yet.
    ///
    /// # Errors
    /// If the stage is not hosted.
    pub fn needs_base(&self, stage: Stage) -> Result<bool> {
        Ok(self.stage(stage)?.needs_base())
    }

    /// Loads what a stage takes from these files: its weights at the first version, its frozen weights, or
    /// both.
    ///
    /// # Errors
    /// If the stage is not hosted, or a file is missing or does not fit.
    pub fn load(&mut self, stage: Stage, origin: &Origin) -> Result<()> {
        self.stage_mut(stage)?.load(origin)
    }

    /// Adds a stage as [`Engine::new`] does, unless it is hosted already.
    ///
    /// # Errors
    /// If the device has too little memory.
    pub fn host(&mut self, stage: Stage) -> Result<()> {
        if !self.stages.contains_key(&stage) {
            self.stages.insert(stage, StageModel::new(&self.manifest, stage, self.device)?);
        }
        Ok(())
    }

    /// Removes a stage and its microbatches in flight.
    pub fn leave(&mut self, stage: Stage) {
        self.stages.remove(&stage);
    }

    /// Loads a stage's weights and moments of a version from files written by
    /// [`Engine::write_stage`], and drops its microbatches in flight.
    ///
    /// # Errors
    /// If the stage is not hosted, or the files are missing, damaged or belong to another stage.
    pub fn read_stage(&mut self, stage: Stage, version: Step, folder: &Path) -> Result<()> {
        let state = checkpoint::read_stage(folder, &self.manifest, stage)?;
        self.set_state(stage, version, &state)
    }

    /// Resets a stage to the first version, and drops its microbatches in flight. `origin` has the
    /// weights if the run starts from files.
    ///
    /// # Errors
    /// If the device has too little memory, or a file is missing or does not fit.
    pub fn restart(&mut self, stage: Stage, origin: &Origin) -> Result<()> {
        let (manifest, device) = (self.manifest.clone(), self.device);
        let mut initial = match self.stage_mut(stage)?.take_frozen() {
            Some(frozen) => StageModel::with_frozen(&manifest, stage, device, Some(frozen))?,
            None => StageModel::new(&manifest, stage, device)?,
        };
        initial.load(origin)?;
        *self.stage_mut(stage)? = initial;
        Ok(())
    }

    /// Writes a stage's part of a checkpoint into an existing `folder`.
    ///
    /// # Errors
    /// If the stage is not hosted or the file system fails.
    pub fn write_stage(&self, stage: Stage, folder: &Path) -> Result<Vec<CheckpointFile>> {
        Ok(checkpoint::write_stage(folder, &self.manifest, stage, &self.state(stage)?)?)
    }

    fn stage(&self, stage: Stage) -> Result<&StageModel> {
        self.stages.get(&stage).ok_or(EngineError::NotHosted(stage))
    }

    fn stage_mut(&mut self, stage: Stage) -> Result<&mut StageModel> {
        self.stages.get_mut(&stage).ok_or(EngineError::NotHosted(stage))
    }
}
