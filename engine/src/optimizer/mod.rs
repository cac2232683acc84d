//! Updates of a stage's flat vector, one file for each rule.
//!
//! Each element is updated by f32 IEEE operations in a fixed order, that of the rule's reference in PyTorch, and
//! sums over a weight have a fixed order, so replicas on any processor get the same bits. Scalars (learning rate,
//! bias corrections, clip scale, norms) are computed in f64 in Rust and rounded once to f32.

mod adafactor;
mod adamw;
mod balance;
pub(crate) mod guard;
mod lamb;
mod lars;
mod lion;
mod muon;
mod schedule;
mod sgd;
mod slots;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use shoal_protocol::ids::Step;
use shoal_protocol::manifest::{Manifest, Muon, Rule};
use shoal_protocol::message::FixedLoss;
use tch::{Device, Kind, Tensor};

pub use self::schedule::{clip_scale, learning_rate};
pub use self::slots::{Slot, optimizer_elements};
pub(crate) use self::slots::{SlotLayout, carried_elements, guard_layout, layout, layout_of_run};
use crate::device::kernel::widest;
use crate::device::tensor::elements_mut;
use crate::error::Result;
use crate::model::parameters::Parameter;
use crate::numeric::square_norm::square_norm;

/// One optimizer update.
#[derive(Debug, Clone, Copy)]
pub struct Update<'a> {
    /// The step that the gradient is of.
    pub step: Step,
    /// Updates since the optimizer had kept nothing, with this one.
    pub count: u64,
    /// The mean over all tokens, for each of the stage's weight groups in their order: f32,
    /// little-endian.
    pub gradients: &'a [&'a [u8]],
    /// Norm over all stages of the mean over targets.
    pub gradient_norm: f64,
    /// The step's loss, with its targets.
    pub loss: FixedLoss,
}

/// What the update of a weight depends on beside the rule's constants.
#[derive(Debug, Clone, Copy)]
struct Terms {
    /// Factor on the gradient: of clipping, and of the mean over targets.
    scale: f32,
    rate: f64,
    decay: f64,
    /// That of [`Update`].
    count: u64,
    is_matrix: bool,
    /// Threads for products of matrices.
    threads: usize,
}

impl Terms {
    fn new(
        manifest: &Manifest,
        (update, rate): (&Update<'_>, f64),
        is_matrix: bool,
        threads: usize,
    ) -> Self {
        let Update { step, count, gradient_norm, loss, .. } = *update;
        let optimizer = &manifest.optimizer;
        let scale = clip_scale(optimizer, gradient_norm) * manifest.gradient_scale(loss.targets);
        Self {
            scale: scale as f32,
            rate: learning_rate(manifest, step) * rate,
            decay: if is_matrix { optimizer.weight_decay } else { 0.0 },
            count,
            is_matrix,
            threads,
        }
    }

    /// The terms of the weights that Muon leaves to AdamW: the schedule is the same, from another rate.
    fn of_rest(self, muon: &Muon, learning_rate: f64) -> Self {
        let share = if learning_rate == 0.0 { 0.0 } else { self.rate / learning_rate };
        Self { rate: muon.rest_learning_rate * share, ..self }
    }
}

/// Norm of some numbers, in a fixed order of additions.
fn norm(values: &[f32]) -> f64 {
    libm::sqrt(square_norm(bytemuck::cast_slice(values)))
}

widest! {
    /// Shrinks weights by their decay, and takes a step against a change.
    fn take_step(weights: &mut [f32], change: &[f32], keep: f32, factor: f32) {
        for (weight, change) in weights.iter_mut().zip(change) {
            *weight = *weight * keep - change * factor;
        }
    }
}

/// One slot of a stage.
#[derive(Debug)]
pub(crate) struct SlotVector {
    pub(crate) layout: SlotLayout,
    /// All of its tensors, flat f32.
    pub(crate) flat: Tensor,
    /// The range of each weight's tensor, by the weight's offset in the stage.
    ranges: BTreeMap<usize, Range<usize>>,
}

impl SlotVector {
    /// Takes these values, or zeros.
    pub(crate) fn set(&mut self, values: Option<&[f32]>) -> Result<()> {
        match values {
            Some(values) => self.flat.f_copy_(&Tensor::f_from_slice(values)?)?,
            None => _ = self.flat.f_zero_()?,
        }
        Ok(())
    }

    /// The range of what belongs to the weights in a range of the stage's flat vector.
    pub(crate) fn part_of(&self, weights: &Range<usize>) -> Range<usize> {
        let mut parts = self.ranges.range(weights.clone()).map(|(_, range)| range);
        let Some(first) = parts.next() else { return 0..0 };
        first.start..parts.next_back().unwrap_or(first).end
    }
}

/// What the optimizer keeps beside a stage's weights. AdamW updates on the stage's device and keeps its moments
/// there; other rules update on the processor, whose sums have the same bits everywhere.
#[derive(Debug)]
pub(crate) struct OptimizerState {
    pub(crate) slots: Vec<SlotVector>,
    threads: usize,
}

impl OptimizerState {
    /// Zeros.
    pub(crate) fn new(
        rule: &Rule,
        parameters: &[Parameter],
        device: Device,
        threads: usize,
    ) -> Result<Self> {
        let place = if matches!(rule, Rule::Adamw(_)) { device } else { Device::Cpu };
        let offsets: BTreeMap<&str, usize> =
            parameters.iter().map(|one| (one.name.as_str(), one.offset)).collect();
        let vector = |layout: SlotLayout| -> Result<SlotVector> {
            let range = |tensor: &Parameter| (offsets[tensor.name.as_str()], tensor.range());
            let ranges = layout.tensors.iter().map(range).collect();
            let flat = Tensor::f_zeros([layout.len() as i64], (Kind::Float, place))?;
            Ok(SlotVector { layout, flat, ranges })
        };
        let slots = layout(rule, parameters).into_iter().map(vector).collect::<Result<_>>()?;
        Ok(Self { slots, threads })
    }

    /// Updates flat `weights`, of which the first is so far in the stage's flat vector, by the mean gradient
    /// of a step: ranges of that vector, none of which ends within a parameter. The update has this part of the
    /// schedule's rate.
    pub(crate) fn apply(
        &mut self,
        (weights, first): (&mut Tensor, usize),
        gradients: &[(Range<usize>, Cow<'_, [f32]>)],
        parameters: &[Parameter],
        manifest: &Manifest,
        (update, rate): (&Update<'_>, f64),
    ) -> Result<()> {
        let _guard = tch::no_grad_guard();
        let threads = self.threads;
        let terms =
            [false, true].map(|is_matrix| Terms::new(manifest, (update, rate), is_matrix, threads));
        let is_on_device = weights.device() != Device::Cpu;
        let mut copied = match is_on_device && !matches!(manifest.optimizer.rule, Rule::Adamw(_)) {
            true => Some(weights.f_to(Device::Cpu)?),
            false => None,
        };
        for (place, gradient) in gradients {
            let on_device = match is_on_device && copied.is_none() {
                true => Some(Tensor::f_from_slice(gradient)?.f_to(weights.device())?),
                false => None,
            };
            for parameter in parameters.iter().filter(|one| place.contains(&one.offset)) {
                if parameter.is_biases_of_experts() {
                    if !manifest.model.moves_biases() {
                        continue;
                    }
                    let flat = copied.as_ref().unwrap_or(&*weights);
                    let range = parameter.offset - place.start..parameter.range().end - place.start;
                    move_biases(flat, parameter.offset - first, &gradient[range], manifest)?;
                    continue;
                }
                let terms = terms[usize::from(parameter.decays())];
                let (start, length) = (parameter.offset - place.start, parameter.len());
                let range = parameter.offset - first..parameter.offset - first + length;
                if let Some(gradient) = &on_device {
                    let [start, at, length] = [start, range.start, length].map(|one| one as i64);
                    let gradient = gradient.f_narrow(0, start, length)?;
                    let weights = weights.f_narrow(0, at, length)?;
                    self.update_on_device(weights, &gradient, parameter, manifest, &terms)?;
                    continue;
                }
                let gradient = &gradient[start..start + length];
                let flat = copied.as_mut().unwrap_or(&mut *weights);
                let weights = &mut elements_mut(flat)[range];
                self.update(weights, gradient, parameter, manifest, &terms);
            }
        }
        if let Some(copied) = &copied {
            weights.f_copy_(copied)?;
        }
        Ok(())
    }

    /// Updates one parameter on the processor.
    fn update(
        &mut self,
        weights: &mut [f32],
        gradient: &[f32],
        parameter: &Parameter,
        manifest: &Manifest,
        terms: &Terms,
    ) {
        let learning_rate = manifest.optimizer.learning_rate;
        let mut slots = self.slices(parameter);
        match &manifest.optimizer.rule {
            Rule::Adamw(adam) => {
                let scalars = adamw::Scalars::new(adam, terms);
                adamw::update(weights, gradient, slots.moments(), scalars);
            }
            Rule::Sgd(sgd) => {
                let scalars = sgd::Scalars::new(sgd, terms, 1.0);
                sgd::update(weights, gradient, slots.find(Slot::Momentum), scalars);
            }
            Rule::Lion(lion) => {
                let scalars = lion::Scalars::new(lion, terms);
                lion::update(weights, gradient, slots.take(Slot::Momentum), scalars);
            }
            Rule::Muon(muon) if parameter.is_layer_matrix() => {
                let momentum = slots.take(Slot::Momentum);
                let extents = [parameter.shape[0], parameter.shape[1]];
                muon::update(muon, terms, weights, gradient, momentum, extents);
            }
            Rule::Muon(muon) => {
                let terms = terms.of_rest(muon, learning_rate);
                let scalars = adamw::Scalars::new(&muon.rest, &terms);
                adamw::update(weights, gradient, slots.moments(), scalars);
            }
            Rule::Lamb(adam) => lamb::update(adam, terms, weights, gradient, slots.moments()),
            Rule::Lars(lars) => {
                let momentum = slots.find(Slot::Momentum);
                lars::update(lars, terms, weights, gradient, momentum);
            }
            Rule::Adafactor(adafactor) if terms.is_matrix => {
                let factors = [Slot::RowFactor, Slot::ColumnFactor].map(|slot| slots.take(slot));
                adafactor::update_matrix(adafactor, terms, weights, gradient, factors);
            }
            Rule::Adafactor(adafactor) => {
                let second = slots.take(Slot::SecondMoment);
                adafactor::update_vector(adafactor, terms, weights, gradient, second);
            }
        }
    }

    /// What is kept for one parameter.
    fn slices(&mut self, parameter: &Parameter) -> Slices<'_> {
        let mut slices = BTreeMap::new();
        for SlotVector { layout, flat, ranges } in &mut self.slots {
            if let Some(range) = ranges.get(&parameter.offset) {
                slices.insert(layout.slot, &mut elements_mut(flat)[range.clone()]);
            }
        }
        Slices(slices)
    }

    /// AdamW's update of one parameter where weights and moments are on a device.
    fn update_on_device(
        &self,
        weights: Tensor,
        gradient: &Tensor,
        parameter: &Parameter,
        manifest: &Manifest,
        terms: &Terms,
    ) -> Result<()> {
        let Rule::Adamw(adam) = &manifest.optimizer.rule else {
            unreachable!("the weights of other rules are copied")
        };
        let moment = |slot: &SlotVector| {
            let range = &slot.ranges[&parameter.offset];
            slot.flat.f_narrow(0, range.start as i64, range.len() as i64)
        };
        let [first, second] = &self.slots[..] else { unreachable!("AdamW has two slots") };
        let moments = [moment(first)?, moment(second)?];
        let scalars = adamw::Scalars::new(adam, terms);
        adamw::update_on_device(weights, gradient, moments, scalars)
    }
}

/// Moves biases of experts, the first of which is so far in flat weights, by the mean of what each microbatch counted.
fn move_biases(weights: &Tensor, first: usize, means: &[f32], manifest: &Manifest) -> Result<()> {
    let mut kept = weights.f_narrow(0, first as i64, means.len() as i64)?;
    let mut biases = Tensor::f_empty([means.len() as i64], (Kind::Float, Device::Cpu))?;
    biases.f_copy_(&kept)?;
    balance::update(elements_mut(&mut biases), means, manifest);
    Ok(kept.f_copy_(&biases)?)
}

/// What is kept for one parameter, by slot.
struct Slices<'a>(BTreeMap<Slot, &'a mut [f32]>);

impl<'a> Slices<'a> {
    fn find(&mut self, slot: Slot) -> Option<&'a mut [f32]> {
        self.0.remove(&slot)
    }

    fn take(&mut self, slot: Slot) -> &'a mut [f32] {
        self.find(slot).expect("the layout has a tensor for this weight")
    }

    fn moments(&mut self) -> [&'a mut [f32]; 2] {
        [Slot::FirstMoment, Slot::SecondMoment].map(|slot| self.take(slot))
    }
}
