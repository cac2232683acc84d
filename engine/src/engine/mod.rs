//! The interface for the driver: the stages of one peer's span.

mod audit;
pub(crate) mod fingerprint;
pub(crate) mod footprint;
mod needs;
pub(crate) mod origin;
mod routing;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use bytes::Bytes;
use shoal_protocol::ids::{ClaimKey, ContentHash, Exchange, Stage, StageSpan, Step, WeightGroup};
use shoal_protocol::manifest::{Manifest, Verdict};
use shoal_protocol::units;

use crate::checkpoint::{self, CheckpointFile, StageState};
use crate::device::exchange::Seat;
use crate::device::setup::Device;
use crate::engine::footprint::Footprint;
use crate::engine::origin::Origin;
use crate::error::{EngineError, Result};
use crate::numeric::fixed_point::add_words;
use crate::optimizer::Update;
use crate::swap::{Images, Part, Swap, SwapStats, Tiers, Use};
use crate::train::stage::{ForwardOutput, StageModel, WorkerForward};
use crate::weights::share::Share;

/// The tensor work of one peer. It belongs to one thread and never blocks on other peers.
#[derive(Debug)]
pub struct Engine {
    manifest: Manifest,
    device: Device,
    /// The part of each stage's weights that is updated here.
    share: Share,
    stages: BTreeMap<Stage, StageModel>,
    /// Where stages go that memory does not hold.
    tiers: Tiers,
    /// The tensors of all stages, since more were hosted than memory holds.
    swap: Option<RefCell<Swap>>,
    /// What passes read of all stages, if the device has that only while they run.
    images: Option<RefCell<Images>>,
    /// Sums that were set aside, by stage and turn.
    aside: BTreeMap<(Stage, usize), tch::Tensor>,
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
        Self::sharing(manifest, span, device, (Share::WHOLE, Tiers::default()))
    }

    /// Like [`Engine::new`], with tiers below the device. While it hosts more stages than the machine's memory holds,
    /// weights, optimizer state and accumulators are swapped. Where the device has only what passes read, those are in
    /// the machine's memory, and updates are computed there. Graphs are then not kept but computed again. No result
    /// depends on it.
    ///
    /// # Errors
    /// As [`Engine::new`]; if the disk has no room.
    ///
    /// # Panics
    /// If the run has no such stage, or has virtual workers, or the device has all of a GPU's stages and there is a tier
    /// below the memory.
    pub fn swapping(
        manifest: &Manifest,
        span: StageSpan,
        device: Device,
        tiers: Tiers,
    ) -> Result<Self> {
        assert!(
            device.torch == tch::Device::Cpu || tiers.device.is_some() || tiers.lower.is_none(),
            "only stages in the machine's memory are swapped"
        );
        assert!(manifest.inner.is_none(), "a virtual worker's weights are not swapped");
        Self::sharing(manifest, span, device, (Share::WHOLE, tiers))
    }

    /// Like [`Engine::swapping`], for one device of an island, which updates its share of the weights and has that share
    /// of the memory.
    pub(crate) fn sharing(
        manifest: &Manifest,
        span: StageSpan,
        device: Device,
        (share, tiers): (Share, Tiers),
    ) -> Result<Self> {
        let device = if tiers.device.is_some() { device.with_images() } else { device };
        let (manifest, stages) = (manifest.clone(), BTreeMap::new());
        let images = |budget| Images::new(device.torch, budget).map(RefCell::new);
        let images =
            tiers.for_weights(&manifest, share.devices_of_pass()).map(images).transpose()?;
        let aside = BTreeMap::new();
        let mut engine = Self { manifest, device, share, stages, tiers, swap: None, images, aside };
        let hosted: Vec<Stage> = span.stages().collect();
        engine.divide_memory(&hosted)?;
        span.stages().try_for_each(|stage| engine.host_in_memory(stage))?;
        engine.divide_memory(&hosted)?;
        Ok(engine)
    }

    /// Divides the memory for these stages: begins to swap where it does not hold them, and ends that where it does.
    fn divide_memory(&mut self, hosted: &[Stage]) -> Result<()> {
        let lower = self.tiers.lower.as_ref();
        let budget = lower.and_then(|lower| lower.budget(&self.manifest, hosted, &self.share));
        if let (Some(lower), Some(budget), None) = (lower, budget, &self.swap) {
            let mut swap = Swap::create(&lower.folder, budget)?;
            for (stage, model) in &self.stages {
                swap.adopt(*stage, model.swappable(false))?;
            }
            self.swap = Some(RefCell::new(swap));
        }
        if let Some(swap) = &self.swap {
            swap.borrow_mut().set_budget(budget.unwrap_or(units::Bytes(u64::MAX)));
        }
        let is_divided = budget.is_some() || self.images.is_some();
        let recomputes = is_divided || self.manifest.training.recompute;
        self.stages.values_mut().for_each(|model| model.recomputes = recomputes);
        Ok(())
    }

    /// Divides the memory for the stages that are hosted now.
    fn divide_memory_again(&mut self) -> Result<()> {
        let hosted: Vec<Stage> = self.stages.keys().copied().collect();
        self.divide_memory(&hosted)
    }

    /// The run.
    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Whether the machine's memory does not hold all hosted stages.
    #[must_use]
    pub fn swaps(&self) -> bool {
        self.tiers.lower.as_ref().is_some_and(|lower| lower.swaps(self.stages.len()))
    }

    /// What was swapped; `None` if everything was in memory all the time.
    #[must_use]
    pub fn swap_stats(&self) -> Option<SwapStats> {
        let of_memory = self.swap.as_ref().map(|swap| swap.borrow().stats());
        let of_device = self.images.as_ref().map(|images| images.borrow().stats());
        of_memory.into_iter().chain(of_device).reduce(SwapStats::and)
    }

    /// What the device's tensors take, without sums that it shares with others.
    pub(crate) fn footprint(&self) -> Footprint {
        let mut all = Footprint::default();
        self.stages.values().for_each(|stage| stage.add_to(&mut all));
        if !self.share.is_apart() {
            all.sums = units::Bytes(0);
        }
        all.images = self.images.as_ref().map_or(units::Bytes(0), |images| images.borrow().most());
        all
    }

    /// Clears an accumulator of a stage.
    pub(crate) fn clear(&mut self, stage: Stage, turn: usize) -> Result<()> {
        let place = (stage, Part::Sums(turn));
        match &self.swap {
            Some(swap) if swap.borrow().holds(place) => swap.borrow_mut().clear(place),
            _ => self.stage_mut(stage)?.clear(turn),
        }
    }

    /// Number of hosted stages.
    #[must_use]
    pub fn hosted(&self) -> usize {
        self.stages.len()
    }

    /// Runs one stage on one microbatch.
    ///
    /// In the first stage, `input` holds token ids `[B, T]` as little-endian u32; in every other
    /// stage it is the activation of the previous stage. The last stage also needs `labels`, the words of
    /// [`Manifest::with_tokens`]; so does every other but the first in a run whose boundaries are in a
    /// subspace. A held-out microbatch (its number is at least `training.microbatches`)
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
        self.need_pass(key.stage)?;
        self.stage_mut(key.stage)?.forward(key, input, labels)
    }

    /// Runs the backward pass of a microbatch after its forward pass.
    ///
    /// `gradient` is the gradient of the sent activation, in the same shape and dtype; the last
    /// stage needs none. Returns the gradient of the stage's input; `None` in the first stage. The
    /// weight gradients stay pending until [`Engine::accumulate`] or [`Engine::discard`]: those of large matrices, in a
    /// stage that returns a gradient, as two factors, so that it is returned sooner.
    ///
    /// # Errors
    /// If there was no forward pass, or the gradient is missing or has the wrong length; the
    /// microbatch then stays in flight.
    pub fn backward(&mut self, key: ClaimKey, gradient: Option<&Bytes>) -> Result<Option<Bytes>> {
        self.need_pass(key.stage)?;
        self.stage_mut(key.stage)?.backward(key, gradient)
    }

    /// Runs one stage forward in an exchange of a virtual worker that has them: `words` are its input and labels as in
    /// [`Engine::forward`], and none in the last exchange. `note` came with the activation; the first stage needs none.
    /// The exchanges of a worker come in order, and those of one update may be under way together. A worker that joins
    /// the newest meeting on its way adds what that changed before its exchange.
    ///
    /// # Errors
    /// As [`Engine::forward`]; if an earlier exchange is missing, or the update before has numbers out of range.
    pub fn forward_worker(
        &mut self,
        key: ClaimKey,
        exchange: Exchange,
        words: Option<[&Bytes; 2]>,
        note: f64,
    ) -> Result<WorkerForward> {
        self.need_pass(key.stage)?;
        self.stage_mut(key.stage)?.forward_worker((key, exchange), words, note)
    }

    /// Runs the backward pass of an exchange after its forward pass: `gradient` is as in [`Engine::backward`], and `note`
    /// came with it. Returns the gradient of the stage's input and the note for the stage before. How far
    /// the worker came stays pending after the last exchange, until [`Engine::accumulate`] or [`Engine::discard`].
    ///
    /// # Errors
    /// As [`Engine::backward`]; [`EngineError::BadGradient`] if fixed point cannot represent its gradient.
    pub fn backward_worker(
        &mut self,
        key: ClaimKey,
        exchange: Exchange,
        gradient: Option<&Bytes>,
        note: f64,
    ) -> Result<(Option<Bytes>, f64)> {
        self.need_pass(key.stage)?;
        self.stage_mut(key.stage)?.backward_worker((key, exchange), gradient, note)
    }

    /// A pass has failed here: other devices that compute it wait for this one no longer. To be called once the error is
    /// known, since theirs say only that a device has stopped.
    pub fn end_together(&self) {
        self.share.seat().into_iter().for_each(Seat::end);
    }

    /// Computes what the backward pass left of a microbatch's weight gradients, and adds them to the stage's accumulator.
    ///
    /// # Errors
    /// [`EngineError::BadGradient`] if fixed point cannot represent them; then none is added, and
    /// they stay pending.
    pub fn accumulate(&mut self, key: ClaimKey) -> Result<()> {
        self.need(key.stage, Use::Sums(key.step), true)?;
        self.stage_mut(key.stage)?.accumulate(key)
    }

    /// Whether backward passes of a stage leave products to [`Engine::accumulate`].
    #[must_use]
    pub fn leaves_products(&self, stage: Stage) -> bool {
        self.stages.get(&stage).is_some_and(StageModel::leaves_products)
    }

    /// Whether the run's guard leaves out gradients that fixed point cannot represent, and skips their step.
    #[must_use]
    pub fn leaves_out_broken(&self, stage: Stage) -> bool {
        self.stages.get(&stage).is_some_and(StageModel::leaves_out)
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
        let mut hosted = stages.iter().copied().filter(|stage| self.stages.contains_key(stage));
        let first = hosted.next().ok_or(EngineError::NotHosted(stages[0]))?;
        let second = hosted.next();
        let Some(second) = second else {
            let mut places = self.stage(first)?.touches(Use::Sums(step));
            if let Some(swap) = &self.swap {
                let mean = self.means().place_if_swapped(weights)?;
                places.extend(mean);
                let mut swap = swap.borrow_mut();
                swap.need(&places, false)?;
                // The function may write to the mean.
                mean.into_iter().for_each(|mean| swap.change(mean));
            }
            return self.stage(first)?.read_sums(weights, step, range, read);
        };
        self.need(first, Use::Sums(step), false)?;
        let mut sums: Vec<i64> =
            self.stage(first)?.read_sums(weights, step, range.clone(), |part| {
                part.as_chunks().0.iter().map(|word| i64::from_le_bytes(*word)).collect()
            })?;
        self.need(second, Use::Sums(step), false)?;
        let second = self.stage(second)?;
        second.read_sums(weights, step, range, |part| add_words(&mut sums, part))?;
        self.means().need_if_swapped(weights)?;
        Ok(read(bytemuck::cast_slice(&sums)))
    }

    /// Computes version `step + 1` of a stage's weights from the step's whole gradients, as returned by
    /// [`crate::FixedPoint::reduce`] for each of its weight groups. Then clears the step's accumulator
    /// and drops its microbatches in flight. If steps read weights without the newest update, the
    /// previous version is kept until the next one. A step that the run's guard skips leaves them as they are.
    ///
    /// # Errors
    /// If the stage is not hosted or a gradient has the wrong length.
    pub fn apply(&mut self, stage: Stage, update: &Update<'_>) -> Result<Verdict> {
        self.need_update(stage)?;
        let hosted = self.stage_mut(stage)?;
        let verdict = hosted.apply(update)?;
        let turn = hosted.turn(update.step);
        self.clear(stage, turn)?;
        Ok(verdict)
    }

    /// Clears a stage's accumulators and drops all its microbatches in flight.
    ///
    /// # Errors
    /// If the stage is not hosted.
    pub fn reset(&mut self, stage: Stage) -> Result<()> {
        self.stage_mut(stage)?.drop_in_flight();
        (0..self.manifest.steps_at_once() as usize).try_for_each(|turn| self.clear(stage, turn))
    }

    /// Hash of a stage's weights and optimizer state: equal on all replicas of a version.
    ///
    /// # Errors
    /// If the stage is not hosted.
    pub fn state_hash(&self, stage: Stage) -> Result<ContentHash> {
        self.need(stage, Use::State, false)?;
        self.stage(stage)?.state_hash()
    }

    /// A copy of a stage's weights and optimizer state.
    ///
    /// # Errors
    /// If the stage is not hosted.
    pub fn state(&self, stage: Stage) -> Result<StageState> {
        self.need(stage, Use::State, false)?;
        self.stage(stage)?.state()
    }

    /// Loads a stage's weights and optimizer state of a version, and drops its microbatches in flight.
    ///
    /// # Errors
    /// If the stage is not hosted, or the state does not fit this stage.
    pub fn set_state(&mut self, stage: Stage, version: Step, state: &StageState) -> Result<()> {
        self.need(stage, Use::Update, true)?;
        self.stage_mut(stage)?.set_state(version, state)?;
        self.reset(stage)
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
        if let Some(base) = &origin.base {
            let adapts = self.manifest.lora.is_some();
            self.need(stage, if adapts { Use::Frozen } else { Use::Update }, true)?;
            self.stage_mut(stage)?.load_base(base)?;
        }
        if let Some(start) = &origin.start {
            self.need(stage, Use::Update, true)?;
            self.stage_mut(stage)?.load_start(start)?;
        }
        Ok(())
    }

    /// Adds a stage as [`Engine::new`] does, unless it is hosted already.
    ///
    /// # Errors
    /// If the device has too little memory.
    pub fn host(&mut self, stage: Stage) -> Result<()> {
        if self.stages.contains_key(&stage) {
            return Ok(());
        }
        let hosted: Vec<Stage> = self.stages.keys().copied().chain([stage]).collect();
        self.divide_memory(&hosted)?;
        self.host_in_memory(stage)?;
        self.divide_memory(&hosted)
    }

    /// Adds a stage for which the memory is divided.
    fn host_in_memory(&mut self, stage: Stage) -> Result<()> {
        let model = StageModel::new(&self.manifest, stage, self.device, self.share.clone())?;
        self.take_in(stage, model)
    }

    /// Adds a stage with the weights of another device of the same memory.
    pub(crate) fn host_beside(&mut self, first: &StageModel) -> Result<()> {
        let model = StageModel::beside(first, (self.device, self.share.clone()))?;
        self.take_in(first.stage, model)?;
        self.divide_memory_again()
    }

    /// Hosts a stage without anything in its accumulators, in place of the one that was there.
    fn take_in(&mut self, stage: Stage, model: StageModel) -> Result<()> {
        if let Some(swap) = &self.swap {
            let mut swap = swap.borrow_mut();
            swap.forget(stage)?;
            swap.adopt(stage, model.swappable(true))?;
        }
        if let Some(images) = &self.images {
            images.borrow_mut().adopt(stage, model.images())?;
        }
        self.stages.insert(stage, model);
        Ok(())
    }

    /// Removes a stage and its microbatches in flight.
    ///
    /// # Errors
    /// If the file of swapped weights fails.
    pub fn leave(&mut self, stage: Stage) -> Result<()> {
        self.stages.remove(&stage);
        if let Some(images) = &self.images {
            images.borrow_mut().forget(stage)?;
        }
        if let Some(swap) = &self.swap {
            swap.borrow_mut().forget(stage)?;
        }
        self.divide_memory_again()
    }

    /// Loads a stage's weights and optimizer state of a version from files written by
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
        let (manifest, place) = (self.manifest.clone(), (self.device, self.share.clone()));
        self.need(stage, Use::Frozen, false)?;
        let frozen = self.stage_mut(stage)?.take_frozen();
        let initial = match frozen {
            Some(frozen) => {
                // Memory of a tier goes with the stage that was there.
                let is_lent = self.swap.is_some() || self.images.is_some();
                let frozen = if is_lent { frozen.copy(place.0)? } else { frozen };
                StageModel::with_frozen(&manifest, stage, place, Some(frozen))?
            }
            None => StageModel::new(&manifest, stage, place.0, place.1)?,
        };
        self.take_in(stage, initial)?;
        self.divide_memory_again()?;
        self.load(stage, origin)
    }

    /// Writes a stage's part of a checkpoint into an existing `folder`.
    ///
    /// # Errors
    /// If the stage is not hosted or the file system fails.
    pub fn write_stage(&self, stage: Stage, folder: &Path) -> Result<Vec<CheckpointFile>> {
        Ok(checkpoint::write_stage(folder, &self.manifest, stage, &self.state(stage)?)?)
    }

    pub(crate) fn stage(&self, stage: Stage) -> Result<&StageModel> {
        self.stages.get(&stage).ok_or(EngineError::NotHosted(stage))
    }

    pub(crate) fn stage_mut(&mut self, stage: Stage) -> Result<&mut StageModel> {
        self.stages.get_mut(&stage).ok_or(EngineError::NotHosted(stage))
    }
}
