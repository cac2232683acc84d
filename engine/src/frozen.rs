//! The model's weights in a run that trains adapters: loaded once, and never changed.

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::Manifest;
use tch::Tensor;

use crate::base::StageFiles;
use crate::device::Device;
use crate::error::Result;
use crate::init::fill_initial_weights;
use crate::parameters::{Parameter, model_parameters};
use crate::tensor::kind;

/// The frozen weights of a stage.
#[derive(Debug)]
pub(crate) struct Frozen {
    /// One after the other, in the dtype of passes.
    pub(crate) flat: Tensor,
    parameters: Vec<Parameter>,
    has_values: bool,
}

impl Frozen {
    /// The frozen weights of a stage, without values if the run loads them from a base. `None` if the
    /// run trains all weights.
    pub(crate) fn new(manifest: &Manifest, stage: Stage, device: Device) -> Result<Option<Self>> {
        if manifest.lora.is_none() {
            return Ok(None);
        }
        let parameters = model_parameters(manifest, stage);
        let count: usize = parameters.iter().map(Parameter::len).sum();
        let kind = kind(manifest.training.dtype);
        let drawn = !manifest.model.loads_weights();
        let flat = if drawn {
            let mut values = vec![0.0; count];
            fill_initial_weights(manifest, &parameters, &mut values, device.threads);
            Tensor::f_from_slice(&values)?.f_to_kind(kind)?.f_to(device.torch)?
        } else {
            Tensor::f_zeros([count as i64], (kind, device.torch))?
        };
        Ok(Some(Self { flat, parameters, has_values: drawn }))
    }

    /// The same values in memory of their own.
    pub(crate) fn copy(&self) -> Result<Self> {
        let (flat, parameters) = (self.flat.f_detach_copy()?, self.parameters.clone());
        Ok(Self { flat, parameters, has_values: self.has_values })
    }

    /// Whether the weights have values.
    pub(crate) fn has_values(&self) -> bool {
        self.has_values
    }

    /// Takes the values of a base, one weight at a time.
    pub(crate) fn load(&mut self, files: &StageFiles) -> Result<()> {
        let _guard = tch::no_grad_guard();
        for parameter in &self.parameters {
            let values = Tensor::f_from_slice(&files.values(parameter)?)?;
            let (start, length) = (parameter.offset as i64, parameter.len() as i64);
            self.flat.f_narrow(0, start, length)?.f_copy_(&values)?;
        }
        self.has_values = true;
        Ok(())
    }
}
