//! A stage's state: its weights, and what the optimizer keeps beside them.

use std::collections::BTreeMap;

use shoal_protocol::ids::{ContentHash, Step};
use tch::Tensor;

use super::StageModel;
use crate::checkpoint::{StageState, hash_tensors};
use crate::error::Result;
use crate::optimizer::{Slot, SlotLayout, SlotVector, layout};
use crate::parameters::Parameter;
use crate::tensor::elements;

impl StageModel {
    /// A copy of the stage's state at its version.
    pub(crate) fn state(&self) -> Result<StageState> {
        self.check_weights()?;
        Ok(StageState {
            weights: copied(&self.weights.flat)?,
            stale_weights: self.stale.iter().map(|one| copied(&one.flat)).collect::<Result<_>>()?,
            slots: self.own_slots()?,
        })
    }

    /// A copy of what the optimizer keeps here: of all weights, or of this share of an island.
    pub(crate) fn own_slots(&self) -> Result<BTreeMap<Slot, Vec<f32>>> {
        let slot = |vector: &SlotVector| Ok((vector.layout.slot, copied(&vector.flat)?));
        self.optimizer.slots.iter().map(slot).collect()
    }

    /// Begins anew from these weights, with an optimizer that has kept nothing yet.
    pub(crate) fn begin(&mut self, weights: &Tensor) -> Result<()> {
        let _guard = tch::no_grad_guard();
        self.weights.set(weights)?;
        for vector in &mut self.optimizer.slots {
            let _ = vector.flat.f_zero_()?;
        }
        for accumulator in &self.accumulators {
            accumulator.clear()?;
        }
        self.has_weights = true;
        self.drop_in_flight();
        Ok(())
    }

    /// Loads the stage's state of a version, and drops everything in flight.
    pub(crate) fn set_state(&mut self, version: Step, state: &StageState) -> Result<()> {
        let _guard = tch::no_grad_guard();
        self.weights.set(&Tensor::f_from_slice(&state.weights)?)?;
        for (age, stale) in self.stale.iter_mut().enumerate() {
            let values = state.stale_weights.get(age).unwrap_or(&state.weights);
            stale.set(&Tensor::f_from_slice(values)?)?;
        }
        let before = &self.parameters[..self.own.start];
        let skipped = layout(&self.manifest.optimizer.rule, before);
        for vector in &mut self.optimizer.slots {
            let slot = vector.layout.slot;
            let start =
                skipped.iter().find(|layout| layout.slot == slot).map_or(0, SlotLayout::len);
            match state.slots.get(&slot) {
                Some(values) => {
                    let own = &values[start..start + vector.layout.len()];
                    vector.flat.f_copy_(&Tensor::f_from_slice(own)?)?;
                }
                None => _ = vector.flat.f_zero_()?,
            }
        }
        self.version = version;
        self.has_weights = true;
        self.drop_in_flight();
        Ok(())
    }

    /// Hash of the stage's state at its version.
    pub(crate) fn state_hash(&self) -> Result<ContentHash> {
        let weights = [&self.weights].into_iter().chain(&self.stale);
        let weights = weights.map(|held| (&self.parameters[..], &held.flat));
        let slots = self.optimizer.slots.iter();
        let slots = slots.map(|vector| (&vector.layout.tensors[..], &vector.flat));
        let host = |(parameters, flat): (_, &Tensor)| -> Result<(&[Parameter], Tensor)> {
            Ok((parameters, flat.f_to(tch::Device::Cpu)?))
        };
        let flat: Vec<_> = weights.chain(slots).map(host).collect::<Result<_>>()?;
        let flat: Vec<(&[Parameter], &[f32])> =
            flat.iter().map(|(parameters, flat)| (*parameters, elements(flat))).collect();
        Ok(hash_tensors("shoal stage state v1", &flat))
    }
}

fn copied(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(elements(&tensor.f_to(tch::Device::Cpu)?).to_vec())
}
