//! Moments that a run carries for its virtual workers from one meeting to the next.
//!
//! Every worker begins an outer step with the same moments. What it has at the end follows how far it came in the
//! vector that the workers sum, and the mean is what all begin the next step with. Means of squares travel as roots:
//! the squares of small gradients would be lost in the resolution of the sums.

use std::collections::BTreeMap;
use std::ops::Range;

use shoal_protocol::codec::Dither;
use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::Manifest;
use tch::{Device, Kind, Tensor};

use crate::device::tensor::elements;
use crate::error::Result;
use crate::model::parameters::parameters;
use crate::numeric::distance::{self, Rounding};
use crate::optimizer::{OptimizerState, Slot, SlotVector};
use crate::train::together::{Together, change_whole};
use crate::weights::gradient::Piece;

/// Bits of a carried number where the workers' ways are rounded: fewer would lose the small ones of a block.
const BITS: u32 = 8;

/// The carried moments of all weights of a stage.
#[derive(Debug)]
pub(crate) struct CarriedMoments {
    slots: Vec<SlotVector>,
}

impl CarriedMoments {
    /// Zeros; `None` if the run carries none.
    pub(crate) fn new(manifest: &Manifest, stage: Stage, device: Device) -> Result<Option<Self>> {
        let Some(rule) = manifest.carried_rule() else { return Ok(None) };
        let zeros = OptimizerState::new(rule, &parameters(manifest, stage), device, 1)?;
        Ok(Some(Self { slots: zeros.slots }))
    }

    /// A worker's optimizer begins with these moments, or with what this device updates of them.
    pub(crate) fn begin(
        &self,
        worker: &mut OptimizerState,
        together: Option<&Together>,
    ) -> Result<()> {
        for vector in &mut worker.slots {
            let carried = self.slots.iter().find(|one| one.layout.slot == vector.layout.slot);
            let carried = carried.expect("the slots of all weights have those of some");
            let part = own_part(carried, together);
            let part = carried.flat.f_narrow(0, part.start as i64, part.len() as i64)?;
            vector.flat.f_copy_(&part)?;
        }
        Ok(())
    }

    /// The places of what belongs to the weights in a range, in the vector that is summed. `first` is that of the first
    /// moment.
    pub(crate) fn places(
        &self,
        mut first: usize,
        own: &Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> {
        self.slots.iter().map(move |carried| {
            let part = carried.part_of(own);
            let place = first + part.start..first + part.end;
            first += carried.layout.len();
            place
        })
    }

    /// What a worker adds to the sums: its moments at the end of a step, with roots of squares, in the order of slots.
    /// They are rounded if the workers' ways are. `first` is their place in the vector that is summed. Of several devices
    /// each adds what it updates.
    pub(crate) fn to_sum(
        &self,
        worker: &OptimizerState,
        mut first: usize,
        dither: Option<Dither>,
        together: Option<&Together>,
    ) -> Result<Vec<Piece>> {
        let _guard = tch::no_grad_guard();
        let mut pieces = Vec::new();
        for carried in &self.slots {
            let (slot, part) = (carried.layout.slot, own_part(carried, together));
            let own = worker.slots.iter().find(|vector| vector.layout.slot == slot);
            let mut numbers = match own.map(|vector| &vector.flat) {
                Some(squares) if slot.is_of_squares() => squares.f_sqrt()?,
                // The next worker changes the vector.
                Some(moments) => moments.f_alias_copy()?,
                None => Tensor::f_zeros([0], (Kind::Float, Device::Cpu))?,
            };
            if let Some(dither) = dither {
                let rounding = match slot.is_of_squares() {
                    // A root that becomes zero beside a moment that does not would make an update without bound.
                    true => Rounding::Up,
                    false => Rounding::Random { dither, first: first as u32 },
                };
                let round = |all: &mut [f32]| distance::round(all, BITS, rounding);
                numbers = change_whole(&numbers, &part, together, round)?;
            }
            if !part.is_empty() {
                pieces.push(Piece::dense(first + part.start, &numbers)?);
            }
            first += carried.layout.len();
        }
        Ok(pieces)
    }

    /// Takes the means of what all workers added to the sums.
    pub(crate) fn take_means(&mut self, mut means: &[f32]) -> Result<()> {
        for SlotVector { layout, flat, .. } in &mut self.slots {
            let (own, rest) = means.split_at(layout.len());
            means = rest;
            let own = Tensor::f_from_slice(own)?;
            flat.f_copy_(&if layout.slot.is_of_squares() { own.f_square()? } else { own })?;
        }
        assert!(means.is_empty(), "the sums are of ways and moments");
        Ok(())
    }

    /// What is carried for the weights in a range of the stage's flat vector, by slot of the run.
    pub(crate) fn of_weights(&self, range: &Range<usize>) -> Result<BTreeMap<Slot, Vec<f32>>> {
        let part = |vector: &SlotVector| -> Result<_> {
            let all = vector.flat.f_to(Device::Cpu)?;
            let values = elements::<f32>(&all)[vector.part_of(range)].to_vec();
            Ok((vector.layout.slot.of_worker(), values))
        };
        self.slots.iter().map(part).collect()
    }

    /// Takes the values of a state of the stage, or zeros where it has none.
    pub(crate) fn set(&mut self, slots: &BTreeMap<Slot, Vec<f32>>) -> Result<()> {
        self.slots.iter_mut().try_for_each(|vector| {
            vector.set(slots.get(&vector.layout.slot.of_worker()).map(Vec::as_slice))
        })
    }

    /// The vectors with their slots of the run.
    pub(crate) fn vectors(&self) -> impl Iterator<Item = (Slot, &SlotVector)> {
        self.slots.iter().map(|vector| (vector.layout.slot.of_worker(), vector))
    }
}

/// The range of a slot that belongs to the weights which this device updates.
fn own_part(carried: &SlotVector, together: Option<&Together>) -> Range<usize> {
    together.map_or(0..carried.layout.len(), |together| carried.part_of(&together.own()))
}
