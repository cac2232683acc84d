//! The model's weights in a run that trains adapters: loaded once, and never changed.

use std::collections::BTreeMap;
use std::ops::Range;

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::Manifest;
use tch::{Kind, Tensor};

use crate::base::StageFiles;
use crate::device::cuda::Kernels;
use crate::device::setup::Device;
use crate::device::tensor::{elements, kind};
use crate::error::{EngineError, Result};
use crate::model::own_slices::OwnSlices;
use crate::model::parameters::{Parameter, model_parameters};
use crate::numeric::nf4;
use crate::weights::cutter::Source;
use crate::weights::expert_biases::ExpertBiases;
use crate::weights::held::Held;
use crate::weights::image::Image;
use crate::weights::init::draw_one;
use crate::weights::packed::Packed;

/// The frozen weights of a stage.
#[derive(Debug)]
pub(crate) struct Frozen {
    /// One after the other, in the dtype of passes: all, or those that are held. Where matrices are packed, all is bytes:
    /// the other weights, and the sections of the packed ones.
    pub(crate) flat: Tensor,
    biases: Option<ExpertBiases>,
    /// Whether another device has the tensors too, and loads them.
    is_beside: bool,
    /// What passes read of them, if they are kept elsewhere.
    pub(crate) image: Option<Image>,
    /// What passes read, as views of `flat` or its image.
    read: Read,
    layout: Layout,
    parameters: Vec<Parameter>,
    threads: usize,
    has_values: bool,
}

/// Where weights are in the flat tensor.
#[derive(Debug, Clone)]
struct Layout {
    /// The weights that are not packed, in the dtype of passes.
    held: Held,
    kind: Kind,
    /// Where the sections of packed matrices begin, by name, and their bytes; none if no matrix is packed.
    sections: Option<BTreeMap<String, Range<usize>>>,
    /// Elements of the flat tensor.
    elements: usize,
}

/// Views of a flat tensor.
#[derive(Debug)]
struct Read {
    /// The weights that are not packed.
    values: Tensor,
    packed: Option<Packed>,
}

impl Layout {
    fn new(manifest: &Manifest, parameters: &[Parameter], own: &OwnSlices) -> Self {
        let kind = kind(manifest.training.dtype);
        if !manifest.packs_base() {
            let held = Held::of_passes(parameters, own);
            return Self { elements: held.len(), held, kind, sections: None };
        }
        let (packed, plain): (Vec<_>, Vec<_>) =
            parameters.iter().cloned().partition(Parameter::is_packable);
        let held = Held::of_some(&plain, own);
        let mut end = (held.len() * kind.elt_size_in_bytes()).next_multiple_of(nf4::ALIGNMENT);
        let section = |parameter: Parameter| {
            let start = end;
            end += nf4::section_bytes(parameter.len());
            (parameter.name, start..end)
        };
        let sections = Some(packed.into_iter().map(section).collect());
        Self { held, kind, sections, elements: end }
    }

    /// The kind of the flat tensor.
    fn flat_kind(&self) -> Kind {
        if self.sections.is_some() { Kind::Uint8 } else { self.kind }
    }

    /// Views of such a tensor.
    fn read(&self, flat: &Tensor) -> Result<Read> {
        let Some(sections) = &self.sections else {
            return Ok(Read { values: flat.shallow_clone(), packed: None });
        };
        let bytes = (self.held.len() * self.kind.elt_size_in_bytes()) as i64;
        let values = flat.f_narrow(0, 0, bytes)?.f_view_dtype(self.kind)?;
        let section = |(name, range): (&String, &Range<usize>)| -> Result<_> {
            let section = flat.f_narrow(0, range.start as i64, range.len() as i64)?;
            Ok((name.clone(), section.f_detach()?))
        };
        let sections = sections.iter().map(section).collect::<Result<_>>()?;
        let packed = Some(Packed(sections));
        Ok(Read { values, packed })
    }

    /// Takes what is held of a weight's values into such a tensor.
    fn take(
        &self,
        flat: &Tensor,
        parameter: &Parameter,
        values: &Tensor,
        threads: usize,
    ) -> Result<()> {
        let read = self.read(flat)?;
        let is_packed = parameter.is_packable();
        let Some(packed) = read.packed.filter(|_| is_packed) else {
            return self.held.take(&read.values, &parameter.range(), values);
        };
        // Passes would read these values if they were not packed.
        let values = values.f_to_kind(self.kind)?.f_to_kind(Kind::Float)?.f_contiguous()?;
        take_section(&packed, parameter, &nf4::packed(elements(&values), threads))
    }
}

/// Takes the section of a packed matrix.
fn take_section(packed: &Packed, parameter: &Parameter, section: &[u8]) -> Result<()> {
    Ok(packed.section(&parameter.name).f_copy_(&Tensor::f_from_slice(section)?)?)
}

/// Bytes that a device with these slices has of frozen weights.
pub(crate) fn layout_bytes(
    manifest: &Manifest,
    parameters: &[Parameter],
    own: &OwnSlices,
) -> usize {
    let layout = Layout::new(manifest, parameters, own);
    layout.elements * layout.flat_kind().elt_size_in_bytes()
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
        let missing = manifest.packs_base().then(|| Kernels::missing(device.torch));
        if let Some(reason) = missing.flatten() {
            return Err(EngineError::PackedBase { reason });
        }
        let _guard = tch::no_grad_guard();
        let parameters = model_parameters(manifest, stage);
        let layout = Layout::new(manifest, &parameters, own);
        let flat = device.zeros(layout.elements, layout.flat_kind())?;
        let biases = ExpertBiases::zeros(&parameters, device)?;
        let mut frozen = Self::of((flat, biases), false, (layout, parameters), device)?;
        frozen.has_values = !manifest.model.loads_weights();
        if frozen.has_values {
            for parameter in &frozen.parameters {
                frozen.take(parameter, &draw_one(manifest, parameter, device.threads)?)?;
            }
        }
        Ok(Some(frozen))
    }

    /// Frozen weights in these tensors.
    fn of(
        (flat, biases): (Tensor, Option<ExpertBiases>),
        is_beside: bool,
        (layout, parameters): (Layout, Vec<Parameter>),
        device: Device,
    ) -> Result<Self> {
        let image = device.has_images.then(|| Image::of([&flat], device.torch)).transpose()?;
        let read = layout.read(image.as_ref().map_or(&flat, Image::values))?;
        let threads = device.threads;
        let has_values = false;
        Ok(Self { flat, biases, is_beside, image, read, layout, parameters, threads, has_values })
    }

    /// The frozen weights of another device of the same memory.
    pub(crate) fn beside(first: &Self, device: Device) -> Result<Self> {
        let list = (first.layout.clone(), first.parameters.clone());
        let biases = first.biases.as_ref().map(ExpertBiases::handles);
        let frozen = Self::of((first.flat.shallow_clone(), biases), true, list, device)?;
        Ok(Self { has_values: first.has_values, ..frozen })
    }

    /// Where passes read them.
    pub(crate) fn source(&self) -> Source<'_> {
        let Read { values, packed } = &self.read;
        let held = Some(&self.layout.held);
        Source {
            values,
            held,
            wide: values,
            embedding: None,
            packed: packed.as_ref(),
            biases: self.biases.as_ref(),
        }
    }

    /// The same values in memory of their own.
    pub(crate) fn copy(&self, device: Device) -> Result<Self> {
        let mut flat = device.zeros(self.flat.numel(), self.flat.kind())?;
        flat.f_copy_(&self.flat)?;
        let mut biases = ExpertBiases::zeros(&self.parameters, device)?;
        if let (Some(own), Some(theirs)) = (&mut biases, &self.biases) {
            own.copy(theirs)?;
        }
        let list = (self.layout.clone(), self.parameters.clone());
        Ok(Self { has_values: self.has_values, ..Self::of((flat, biases), false, list, device)? })
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

    /// Takes a weight's values.
    fn take(&self, parameter: &Parameter, values: &Tensor) -> Result<()> {
        if let Some(biases) = &self.biases {
            biases.take(&parameter.range(), values)?;
        }
        self.layout.take(&self.flat, parameter, values, self.threads)
    }

    /// Takes the values of a base, one weight at a time.
    pub(crate) fn load(&mut self, files: &StageFiles) -> Result<()> {
        let _guard = tch::no_grad_guard();
        let packed = self.layout.read(&self.flat)?.packed;
        for parameter in self.parameters.iter().filter(|_| !self.is_beside) {
            if let (Some(packed), Some(section)) = (&packed, files.section(parameter)?) {
                take_section(packed, parameter, section)?;
                continue;
            }
            self.take(parameter, &Tensor::f_from_slice(&files.values(parameter)?)?)?;
        }
        self.has_values = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::manifest::{Dtype, Experts, Lora, LoraTarget};

    use super::*;
    use crate::device::setup::DeviceChoice;
    use crate::testing::manifest;

    #[test]
    fn biases_of_experts_are_as_a_file_has_them_where_passes_are_in_bf16() {
        let mut manifest = manifest();
        manifest.training.dtype = Dtype::Bf16;
        manifest.model.block.experts = Some(Experts { biased: true, ..Experts::new(4, 2, 8) });
        let targets = vec![LoraTarget::QProj];
        manifest.lora = Some(Lora { rank: 2, alpha: 4.0, targets, base: None });
        let device = Device::open(DeviceChoice::Cpu, 1).expect("a processor");
        let own = OwnSlices::new(&manifest.model, None);
        let frozen =
            Frozen::new(&manifest, Stage(0), device, &own).expect("small").expect("frozen");
        let parameters = model_parameters(&manifest, Stage(0));
        let biases = parameters.iter().find(|one| one.is_biases_of_experts()).expect("some");
        let values = [0.1f32, 0.2, 1.0 / 3.0, -0.7];
        frozen.take(biases, &Tensor::from_slice(&values)).expect("small");
        let copy = frozen.copy(device).expect("small");
        for frozen in [&frozen, &copy] {
            let read = frozen.source().biases.expect("some").of_layer(biases.offset, 4);
            assert_eq!(elements::<f32>(&read.expect("small")), values);
        }
    }
}
