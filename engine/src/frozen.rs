//! The model's weights in a run that trains adapters: loaded once, and never changed.

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::Manifest;
use tch::Tensor;

use crate::base::StageFiles;
use crate::cutter::Source;
use crate::device::Device;
use crate::error::Result;
use crate::held::Held;
use crate::image::Image;
use crate::init::draw_one;
use crate::own_slices::OwnSlices;
use crate::parameters::{Parameter, model_parameters};
use crate::tensor::kind;

/// The frozen weights of a stage.
#[derive(Debug)]
pub(crate) struct Frozen {
    /// One after the other, in the dtype of passes: all, or those that are held.
    pub(crate) flat: Tensor,
    /// Whether another device has the tensor too, and loads it.
    is_beside: bool,
    /// What passes read of them, if they are kept elsewhere.
    pub(crate) image: Option<Image>,
    /// The weights that are in `flat`.
    held: Held,
    parameters: Vec<Parameter>,
    has_values: bool,
}

impl Frozen {
    /// The frozen weights of a stage that a device with these slices reads, without values if the run loads them from a
    /// base. `None` if the run trains all weights.
    pub(crate) fn new(
        manifest: &Manifest,
        stage: Stage,
        device: Device,
        own: &OwnSlices,
    ) -> Result<Option<Self>> {
        if manifest.lora.is_none() {
            return Ok(None);
        }
        let _guard = tch::no_grad_guard();
        let parameters = model_parameters(manifest, stage);
        let held = Held::of_passes(&parameters, own);
        let kind = kind(manifest.training.dtype);
        let flat = device.zeros(held.len(), kind)?;
        let image = image_of(&flat, device)?;
        let has_values = !manifest.model.loads_weights();
        let frozen = Self { flat, is_beside: false, image, held, parameters, has_values };
        if has_values {
            for parameter in &frozen.parameters {
                frozen.take(parameter, &draw_one(manifest, parameter, device.threads)?)?;
            }
        }
        Ok(Some(frozen))
    }

    /// The frozen weights of another device of the same memory.
    pub(crate) fn beside(first: &Self, device: Device) -> Result<Self> {
        let flat = first.flat.shallow_clone();
        let image = image_of(&flat, device)?;
        let (held, parameters) = (first.held.clone(), first.parameters.clone());
        Ok(Self { flat, is_beside: true, image, held, parameters, has_values: first.has_values })
    }

    /// Takes what is held of a weight's values.
    fn take(&self, parameter: &Parameter, values: &Tensor) -> Result<()> {
        self.held.take(&self.flat, &parameter.range(), values)
    }

    /// Where passes read them.
    pub(crate) fn source(&self) -> Source<'_> {
        let values = self.image.as_ref().map_or(&self.flat, Image::values);
        Source { values, held: Some(&self.held), wide: values, embedding: None }
    }

    /// The same values in memory of their own.
    pub(crate) fn copy(&self, device: Device) -> Result<Self> {
        let mut flat = device.zeros(self.flat.numel(), self.flat.kind())?;
        flat.f_copy_(&self.flat)?;
        let image = image_of(&flat, device)?;
        let (held, parameters) = (self.held.clone(), self.parameters.clone());
        Ok(Self { flat, is_beside: false, image, held, parameters, has_values: self.has_values })
    }

    /// Whether another device has the tensor too, and loads it.
    pub(crate) fn is_beside(&self) -> bool {
        self.is_beside
    }

    /// The other device of the same memory has loaded them.
    pub(crate) fn note_loaded(&mut self) {
        assert!(self.is_beside, "it loads its own");
        self.has_values = true;
    }

    /// Whether the weights have values.
    pub(crate) fn has_values(&self) -> bool {
        self.has_values
    }

    /// Takes the values of a base, one weight at a time.
    pub(crate) fn load(&mut self, files: &StageFiles) -> Result<()> {
        let _guard = tch::no_grad_guard();
        for parameter in self.parameters.iter().filter(|_| !self.is_beside) {
            self.take(parameter, &Tensor::f_from_slice(&files.values(parameter)?)?)?;
        }
        self.has_values = true;
        Ok(())
    }
}

/// What passes read of frozen weights, on a device that does not keep them.
fn image_of(flat: &Tensor, device: Device) -> Result<Option<Image>> {
    device.has_images.then(|| Image::of([flat], device.torch)).transpose()
}
