//! A stage's weights at one version.

use std::ops::Range;

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Dtype, Manifest};
use tch::{Kind, Tensor};

use crate::device::tensor::{elements, kind};
use crate::error::Result;
use crate::model::parameters::{EMBEDDING, parameter_count, parameters};
use crate::weights::blocks::Blocks;
use crate::weights::cutter::Source;
use crate::weights::expert_biases::ExpertBiases;
use crate::weights::held::Held;
use crate::weights::image::Image;
use crate::weights::place::WeightsPlace;

/// A stage's weights at one version.
#[derive(Debug)]
pub(crate) struct Weights {
    /// Trained weights, flat f32: all, or those that this device updates.
    pub(crate) flat: Tensor,
    /// Whether another device has these tensors too, and changes them as a whole.
    is_beside: bool,
    /// Their range in the stage's flat vector.
    kept: Range<usize>,
    /// What passes read instead of `flat`.
    copies: Option<Copies>,
    biases: Option<ExpertBiases>,
    /// What passes read of `flat` or of its copies, if they are computed elsewhere.
    image: Option<Image>,
    pub(crate) blocks: Blocks,
}

/// Copies of weights for passes.
#[derive(Debug)]
struct Copies {
    held: Held,
    /// The elements that are held, in the dtype of passes.
    values: Tensor,
    /// The embedding in f32 and its range in the flat vector, where neither `flat` nor `values` has it.
    embedding: Option<(Range<usize>, Tensor)>,
}

impl Copies {
    /// Copies of weights that are not all in `flat`, or that passes read in another dtype.
    fn new(manifest: &Manifest, stage: Stage, place: &WeightsPlace) -> Result<Option<Self>> {
        let dtype = manifest.training.dtype;
        let count = parameter_count(manifest, stage);
        let has_all = place.kept == (0..count);
        if has_all && dtype == Dtype::F32 {
            return Ok(None);
        }
        let held = place.held.clone();
        let embedding = match wide_embedding(manifest, stage, place).filter(|_| !has_all) {
            Some(range) => Some((range.clone(), place.device.zeros(range.len(), Kind::Float)?)),
            None => None,
        };
        Ok(Some(Self { values: place.device.zeros(held.len(), kind(dtype))?, held, embedding }))
    }

    /// The same tensors.
    fn handles(&self) -> Self {
        let embedding = self.embedding.as_ref();
        Self {
            held: self.held.clone(),
            values: self.values.shallow_clone(),
            embedding: embedding.map(|(range, values)| (range.clone(), values.shallow_clone())),
        }
    }

    /// Takes over what they have of a range of the flat vector.
    fn take(&self, range: &Range<usize>, values: &Tensor) -> Result<()> {
        self.held.take(&self.values, range, values)?;
        match &self.embedding {
            Some((place, copy)) if range.start <= place.start && place.end <= range.end => {
                let start = (place.start - range.start) as i64;
                let mut copy = copy.shallow_clone();
                Ok(copy.f_copy_(&values.f_narrow(0, start, place.len() as i64)?)?)
            }
            _ => Ok(()),
        }
    }
}

impl Weights {
    /// Zeros. `frozen` has the model's weights in a run that trains adapters.
    pub(crate) fn zeros(
        manifest: &Manifest,
        stage: Stage,
        frozen: Option<Source<'_>>,
        place: &WeightsPlace,
    ) -> Result<Self> {
        let kept = place.kept.clone();
        let flat = place.device.zeros(kept.len(), Kind::Float)?;
        let copies = Copies::new(manifest, stage, place)?;
        let biases = ExpertBiases::zeros(&parameters(manifest, stage), place.device)?;
        Self::of((flat, kept), (copies, biases), manifest, stage, frozen, place)
    }

    /// Weights in these tensors.
    fn of(
        (flat, kept): (Tensor, Range<usize>),
        (copies, biases): (Option<Copies>, Option<ExpertBiases>),
        manifest: &Manifest,
        stage: Stage,
        frozen: Option<Source<'_>>,
        place: &WeightsPlace,
    ) -> Result<Self> {
        let image = || {
            let values = copies.as_ref().map_or(&flat, |copies| &copies.values);
            let own = copies.as_ref().and_then(|copies| copies.embedding.as_ref());
            let embedding = match (own, wide_embedding(manifest, stage, place)) {
                (Some((_, own)), _) => Some(own.shallow_clone()),
                (None, range) => range.map(|range| part_of(&flat, &kept, &range)).transpose()?,
            };
            Image::of([values].into_iter().chain(&embedding), place.device.torch)
        };
        let image = place.device.has_images.then(image).transpose()?;
        let read = biases.as_ref();
        let source = Source { biases: read, ..source_of(&flat, copies.as_ref(), image.as_ref()) };
        let blocks = Blocks::new(manifest, stage, source, frozen, &place.own)?;
        Ok(Self { flat, is_beside: false, kept, copies, biases, image, blocks })
    }

    /// The weights of another device of the same memory.
    pub(crate) fn beside(
        first: &Self,
        manifest: &Manifest,
        stage: Stage,
        frozen: Option<Source<'_>>,
        place: &WeightsPlace,
    ) -> Result<Self> {
        let copies = first.copies.as_ref().map(Copies::handles);
        let kept = (first.flat.shallow_clone(), first.kept.clone());
        let biases = first.biases.as_ref().map(ExpertBiases::handles);
        let weights = Self::of(kept, (copies, biases), manifest, stage, frozen, place)?;
        Ok(Self { is_beside: true, ..weights })
    }

    /// Takes over the values of weights in the same place.
    pub(crate) fn copy(&mut self, other: &Self) -> Result<()> {
        assert_eq!(self.kept, other.kept, "both are in the same place");
        self.flat.f_copy_(&other.flat)?;
        if let (Some(own), Some(theirs)) = (&mut self.biases, &other.biases) {
            own.copy(theirs)?;
        }
        let (Some(own), Some(theirs)) = (&mut self.copies, &other.copies) else { return Ok(()) };
        own.values.f_copy_(&theirs.values)?;
        if let (Some((_, own)), Some((_, theirs))) = (&mut own.embedding, &theirs.embedding) {
            own.f_copy_(theirs)?;
        }
        Ok(())
    }

    /// Whether another device has the tensors too, and takes their values.
    pub(crate) fn is_beside(&self) -> bool {
        self.is_beside
    }

    /// Replaces the values of all weights, unless another device does.
    pub(crate) fn set(&mut self, values: &[f32]) -> Result<()> {
        if self.is_beside {
            return Ok(());
        }
        self.set_range(&(0..values.len()), &Tensor::f_from_slice(values)?)
    }

    /// Replaces the values of a range, which ends between tensors.
    pub(crate) fn set_range(&mut self, range: &Range<usize>, values: &Tensor) -> Result<()> {
        let kept = self.kept.start.max(range.start)..self.kept.end.min(range.end);
        if !kept.is_empty() {
            part_of(&self.flat, &self.kept, &kept)?.f_copy_(&part_of(values, range, &kept)?)?;
        }
        self.take_biases(range, values)?;
        match &self.copies {
            Some(copies) => copies.take(range, values),
            None => Ok(()),
        }
    }

    /// Takes over what a range of the flat vector has of the biases of experts.
    fn take_biases(&self, range: &Range<usize>, values: &Tensor) -> Result<()> {
        match &self.biases {
            Some(biases) => biases.take(range, values),
            None => Ok(()),
        }
    }

    /// Adds what changed between two weights in the same place.
    pub(crate) fn move_by(&mut self, to: &Self, from: &Self) -> Result<()> {
        assert!(self.kept == to.kept && self.kept == from.kept, "all are in the same place");
        let _guard = tch::no_grad_guard();
        let _ = self.flat.f_add_(&to.flat.f_sub(&from.flat)?)?;
        self.follow()
    }

    /// Updates the copies after a change of the flat vector.
    pub(crate) fn follow(&mut self) -> Result<()> {
        if self.is_beside {
            return Ok(());
        }
        self.take_biases(&self.kept, &self.flat)?;
        match &self.copies {
            Some(copies) => copies.take(&self.kept, &self.flat),
            None => Ok(()),
        }
    }

    /// Takes the values of a range over that another device updated. [`Self::follow`] ends the update.
    pub(crate) fn take(&mut self, range: &Range<usize>, updated: &Tensor) -> Result<()> {
        match &self.copies {
            Some(copies) if self.kept.start > range.start || self.kept.end < range.end => {
                self.take_biases(range, updated)?;
                copies.take(range, updated)
            }
            _ => Ok(part_of(&self.flat, &self.kept, range)?.f_copy_(updated)?),
        }
    }

    /// A view of a range of the weights that are kept.
    pub(crate) fn part(&self, range: &Range<usize>) -> Result<Tensor> {
        part_of(&self.flat, &self.kept, range)
    }

    /// A copy of a range of the weights that are kept.
    pub(crate) fn read(&self, range: &Range<usize>) -> Result<Vec<f32>> {
        if range.is_empty() {
            // A device whose share is nothing has no memory for it.
            return Ok(Vec::new());
        }
        Ok(elements(&part_of(&self.flat, &self.kept, range)?.f_to(tch::Device::Cpu)?).to_vec())
    }

    /// The range of the stage's flat vector that is kept in f32.
    pub(crate) fn kept(&self) -> Range<usize> {
        self.kept.clone()
    }

    /// What passes read, if they are computed elsewhere.
    pub(crate) fn image(&self) -> Option<&Image> {
        self.image.as_ref()
    }

    /// The copies in the dtype of passes.
    pub(crate) fn copied(&self) -> Option<&Tensor> {
        self.copies.as_ref().map(|copies| &copies.values)
    }

    /// The copy of the embedding in f32, beside those in another dtype.
    pub(crate) fn copied_embedding(&self) -> Option<&Tensor> {
        Some(&self.copies.as_ref()?.embedding.as_ref()?.1)
    }

    /// Whether passes read copies alone.
    pub(crate) fn copies_all(&self) -> bool {
        let is_wide = |copied: &Tensor| copied.kind() == Kind::Float;
        self.copied().is_some_and(is_wide) || self.copied_embedding().is_some()
    }
}

/// The range of an embedding that passes read in f32 beside other weights in their own dtype.
fn wide_embedding(manifest: &Manifest, stage: Stage, place: &WeightsPlace) -> Option<Range<usize>> {
    let is_read = stage == Stage(0) && manifest.lora.is_none();
    if !is_read || manifest.training.dtype == Dtype::F32 {
        return None;
    }
    let all = parameters(manifest, stage);
    let found = all.iter().find(|one| one.name == EMBEDDING);
    let embedding = found.expect("the first stage has an embedding");
    let (rows, width) = (embedding.shape[0], embedding.shape[1]);
    let rows = place.own.rows(rows);
    Some(embedding.offset + rows.start * width..embedding.offset + rows.end * width)
}

/// A part of values that are a range of a flat vector.
fn part_of(values: &Tensor, range: &Range<usize>, part: &Range<usize>) -> Result<Tensor> {
    assert!(range.start <= part.start && part.end <= range.end, "a part of what is here");
    Ok(values.f_narrow(0, (part.start - range.start) as i64, part.len() as i64)?)
}

/// Where passes read weights but the biases of experts.
fn source_of<'a>(
    flat: &'a Tensor,
    copies: Option<&'a Copies>,
    image: Option<&'a Image>,
) -> Source<'a> {
    let of = |values, held, wide, embedding| Source {
        values,
        held,
        wide,
        embedding,
        packed: None,
        biases: None,
    };
    if let Some(image) = image {
        let (values, held) = (image.values(), copies.map(|copies| &copies.held));
        return of(values, held, values, image.embedding());
    }
    let Some(Copies { held, values, embedding }) = copies else {
        return of(flat, None, flat, None);
    };
    let wide = if values.kind() == Kind::Float { values } else { flat };
    of(values, Some(held), wide, embedding.as_ref().map(|(_, embedding)| embedding))
}
