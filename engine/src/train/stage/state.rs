//! A stage's state: its weights, and what the optimizer keeps beside them.

use std::collections::BTreeMap;

use shoal_protocol::ids::{ContentHash, Step};
use tch::Tensor;

use super::StageModel;
use crate::base::{BaseFiles, StageFiles, stage_weights};
use crate::checkpoint::{StageState, StartFiles, hash_tensors};
use crate::device::tensor::elements;
use crate::error::{EngineError, Result};
use crate::model::parameters::{Parameter, range_of};
use crate::optimizer::guard::GuardState;
use crate::optimizer::{Slot, SlotLayout, SlotVector, guard_layout, layout};
use crate::train::carried::CarriedMoments;
use crate::train::frozen::Frozen;
use crate::weights::version::Weights;

impl StageModel {
    /// The moments that the run carries for its workers, if it does.
    pub(crate) fn carried(&self) -> Option<&CarriedMoments> {
        self.inner.as_ref()?.moments.as_ref()
    }

    fn carried_mut(&mut self) -> Option<&mut CarriedMoments> {
        self.inner.as_mut()?.moments.as_mut()
    }

    /// Takes the moments for the run's workers, if it carries them, from the mean of what its replicas summed.
    pub(super) fn take_carried(&mut self, mean: &[f32]) -> Result<()> {
        let weights = range_of(&self.parameters).end;
        self.carried_mut().map_or(Ok(()), |carried| carried.take_means(&mean[weights..]))
    }

    /// A copy of the stage's state at its version: of all weights, or of this share of an island.
    pub(crate) fn state(&self) -> Result<StageState> {
        self.check_weights()?;
        let own = self.own_elements();
        let slot = |vector: &SlotVector| Ok((vector.layout.slot, copied(&vector.flat)?));
        let mut slots: BTreeMap<_, _> =
            self.optimizer.slots.iter().map(slot).collect::<Result<_>>()?;
        if let Some(carried) = self.carried() {
            slots.extend(carried.of_weights(&own)?);
        }
        // Of several devices the first has it.
        let guard = self.guard.as_ref().filter(|_| self.own.start == 0);
        slots.extend(guard.map(|guard| (Slot::Guard, guard.values())));
        Ok(StageState {
            weights: self.weights.read(&own)?,
            stale_weights: self.stale.iter().map(|one| one.read(&own)).collect::<Result<_>>()?,
            slots,
        })
    }

    /// Begins anew from these weights, with an optimizer that has kept nothing yet.
    pub(crate) fn begin(&mut self, weights: &Weights) -> Result<()> {
        let _guard = tch::no_grad_guard();
        self.weights.copy(weights)?;
        self.frozen.iter_mut().for_each(Frozen::note_loaded);
        for vector in &mut self.optimizer.slots {
            vector.set(None)?;
        }
        self.guard.iter_mut().for_each(|guard| guard.set(None));
        for accumulator in &self.accumulators {
            accumulator.clear()?;
        }
        self.has_weights = true;
        self.drop_in_flight();
        Ok(())
    }

    /// Whether the frozen weights have no values yet.
    pub(crate) fn needs_base(&self) -> bool {
        let has_values = self.frozen.as_ref().is_some_and(Frozen::has_values);
        self.manifest.lora.is_some() && !has_values
    }

    /// Removes the frozen weights if they have values, for a stage that takes the place of this one.
    pub(crate) fn take_frozen(&mut self) -> Option<Frozen> {
        self.frozen.take_if(|frozen| frozen.has_values())
    }

    /// Takes the first weights, or the frozen weights, from a base.
    pub(crate) fn load_base(&mut self, base: &BaseFiles) -> Result<()> {
        let _guard = tch::no_grad_guard();
        if let Some(frozen) = &mut self.frozen {
            return frozen.load(&StageFiles::open(base, &self.manifest, self.stage)?);
        }
        let weights = match self.weights.is_beside() {
            true => Vec::new(),
            false => stage_weights(base, &self.manifest, self.stage)?,
        };
        let state = StageState { weights, ..StageState::default() };
        self.set_state(self.manifest.first_version(), &state)
    }

    /// Takes the first weights and optimizer state from the checkpoint that the run goes on from.
    pub(crate) fn load_start(&mut self, start: &StartFiles) -> Result<()> {
        let state = start.read_stage(self.stage).map_err(EngineError::Start)?;
        self.set_state(self.manifest.first_version(), &state)
    }

    /// Loads the stage's state of a version, and drops everything in flight.
    pub(crate) fn set_state(&mut self, version: Step, state: &StageState) -> Result<()> {
        let _guard = tch::no_grad_guard();
        self.weights.set(&state.weights)?;
        for (age, stale) in self.stale.iter_mut().enumerate() {
            let values = state.stale_weights.get(age).unwrap_or(&state.weights);
            stale.set(values)?;
        }
        let before = &self.parameters[..self.own.start];
        let skipped = layout(&self.manifest.optimizer.rule, before);
        for vector in &mut self.optimizer.slots {
            let slot = vector.layout.slot;
            let start =
                skipped.iter().find(|layout| layout.slot == slot).map_or(0, SlotLayout::len);
            let values = state.slots.get(&slot);
            vector.set(values.map(|values| &values[start..start + vector.layout.len()]))?;
        }
        if let Some(carried) = self.carried_mut() {
            carried.set(&state.slots)?;
        }
        let remembered = state.slots.get(&Slot::Guard).map(Vec::as_slice);
        self.guard.iter_mut().for_each(|guard| guard.set(remembered));
        self.version = version;
        self.has_weights = true;
        self.drop_in_flight();
        Ok(())
    }

    /// Hash of the stage's state at its version.
    pub(crate) fn state_hash(&self) -> Result<ContentHash> {
        let weights = self.versions().map(|held| (&self.parameters[..], &held.flat));
        let slots = self.optimizer.slots.iter().map(|vector| (vector.layout.slot, vector));
        let carried = self.carried().into_iter().flat_map(CarriedMoments::vectors);
        let slots: BTreeMap<Slot, &SlotVector> = slots.chain(carried).collect();
        let slots = slots.values().map(|vector| (&vector.layout.tensors[..], &vector.flat));
        let host = |(parameters, flat): (_, &Tensor)| -> Result<(&[Parameter], Tensor)> {
            Ok((parameters, flat.f_to(tch::Device::Cpu)?))
        };
        let flat: Vec<_> = weights.chain(slots).map(host).collect::<Result<_>>()?;
        let mut flat: Vec<(&[Parameter], &[f32])> =
            flat.iter().map(|(parameters, flat)| (*parameters, elements(flat))).collect();
        let remembered = self.guard.as_ref().map(GuardState::values).unwrap_or_default();
        let layout = guard_layout(&self.manifest);
        flat.extend(layout.iter().map(|layout| (&layout.tensors[..], &remembered[..])));
        Ok(hash_tensors("shoal stage state v1", &flat))
    }
}

fn copied(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(elements(&tensor.f_to(tch::Device::Cpu)?).to_vec())
}
