//! The biases with which tokens choose a stage's experts, in f32 also where passes are in bf16.

use std::ops::Range;

use tch::{Kind, Tensor};

use crate::device::setup::Device;
use crate::error::Result;
use crate::model::parameters::Parameter;
use crate::weights::held::Held;

/// A few numbers of a stage's flat vector. They stay where they are when a stage is swapped, and each device reads them.
#[derive(Debug)]
pub(crate) struct ExpertBiases {
    held: Held,
    values: Tensor,
}

impl ExpertBiases {
    /// The biases among these weights, all zero; `None` if there are none.
    pub(crate) fn zeros(parameters: &[Parameter], device: Device) -> Result<Option<Self>> {
        let biases = parameters.iter().filter(|one| one.is_biases_of_experts());
        let held = Held::ranges(biases.map(Parameter::range));
        match held.len() {
            0 => Ok(None),
            count => Ok(Some(Self { held, values: device.zeros(count, Kind::Float)? })),
        }
    }

    /// The same tensor.
    pub(crate) fn handles(&self) -> Self {
        Self { held: self.held.clone(), values: self.values.shallow_clone() }
    }

    /// Takes over other values of the same weights.
    pub(crate) fn copy(&mut self, other: &Self) -> Result<()> {
        Ok(self.values.f_copy_(&other.values)?)
    }

    /// Takes over what a range of the flat vector has of them.
    pub(crate) fn take(&self, range: &Range<usize>, values: &Tensor) -> Result<()> {
        self.held.take(&self.values, range, values)
    }

    /// A view of a layer's, from an offset of the flat vector on.
    pub(crate) fn of_layer(&self, offset: usize, experts: usize) -> Result<Tensor> {
        let (place, _) = self.held.locate(offset, 1);
        Ok(self.values.f_narrow(0, place as i64, experts as i64)?.f_detach()?)
    }
}
