//! What a virtual worker does in a step of the run: updates of its own, from the step's weights.

use bytes::Bytes;
use shoal_protocol::codec::Dither;
use shoal_protocol::ids::{ClaimKey, Microbatch, Stage, Step};
use shoal_protocol::manifest::Manifest;
use tch::Tensor;

use crate::carried::CarriedMoments;
use crate::device::Device;
use crate::distance::{self, Rounding};
use crate::error::Result;
use crate::fixed_point::FixedPoint;
use crate::gradient::Piece;
use crate::optimizer::Update;
use crate::parameters::group_elements;
use crate::share::Share;
use crate::square_norm::square_norm;
use crate::stage::{ForwardOutput, StageModel};
use crate::tensor::elements_mut;

/// The model that a worker trains, of one step at a time. Nothing of it outlives the step but the moments that all
/// workers begin with.
#[derive(Debug)]
pub(crate) struct InnerTrainer {
    /// The run of a worker.
    manifest: Manifest,
    updates: u64,
    /// Bits of a number of the distance, if it is rounded.
    bits: Option<u32>,
    model: StageModel,
    /// What all workers' optimizers begin the step with, if not with zeros.
    pub(crate) moments: Option<CarriedMoments>,
}

/// The loss over all passes of some updates.
#[derive(Debug, Default)]
struct Losses {
    share: f32,
    targets: u64,
    padded: u64,
}

impl InnerTrainer {
    /// The trainer of a run's workers; `None` if it has none.
    pub(crate) fn new(manifest: &Manifest, stage: Stage, device: Device) -> Result<Option<Self>> {
        let (Some(inner), Some(of_worker)) = (&manifest.inner, manifest.of_worker()) else {
            return Ok(None);
        };
        let model = StageModel::without_weights(&of_worker, stage, (device, Share::WHOLE))?;
        let (updates, bits) = (inner.steps.into(), inner.codec.bits());
        let moments = CarriedMoments::new(manifest, stage, device.state())?;
        Ok(Some(Self { manifest: of_worker, updates, bits, model, moments }))
    }

    /// Makes all updates of a worker in a step, from these weights and with the tokens and labels of all its
    /// passes. Returns the loss over all of them, and what is summed: the way back from the last weights to the first,
    /// and the moments if they are carried.
    pub(crate) fn train(
        &mut self,
        key: ClaimKey,
        weights: &Tensor,
        [input, labels]: [&Bytes; 2],
    ) -> Result<(ForwardOutput, Vec<Piece>)> {
        let mut losses = Losses::default();
        self.model.begin(weights)?;
        if let Some(moments) = &self.moments {
            moments.begin(&mut self.model.optimizer)?;
        }
        for update in 0..self.updates {
            let step = Step(key.step.0 * self.updates + update);
            let targets =
                self.run_passes((key.stage, step, update), [input, labels], &mut losses)?;
            let count = if self.moments.is_some() { step.0 + 1 } else { update + 1 };
            self.update((key.stage, step), count, targets)?;
        }
        let rounded = self.bits.map(|bits| (bits, Dither::of(self.manifest.training.seed, key)));
        let distance = self.distance_from(weights, rounded)?;
        let mut pieces = vec![Piece::dense(0, &distance)?];
        if self.moments.is_some() {
            let first = weights.numel();
            let moments = CarriedMoments::to_sum(
                &self.model.optimizer,
                first,
                rounded.map(|(_, dither)| dither),
            )?;
            pieces.push(Piece::dense(first, &Tensor::f_from_slice(&moments)?)?);
        }
        let Losses { share, targets, padded } = losses;
        Ok((ForwardOutput::Loss { share, targets, padded }, pieces))
    }

    /// The way from the worker's weights to these, rounded if the manifest says so.
    fn distance_from(&self, weights: &Tensor, rounded: Option<(u32, Dither)>) -> Result<Tensor> {
        let _guard = tch::no_grad_guard();
        let mut distance = weights.f_sub(&self.model.weights.flat)?;
        if let Some((bits, dither)) = rounded {
            distance = distance.f_to(tch::Device::Cpu)?;
            let rounding = Rounding::Random { dither, first: 0 };
            distance::round(elements_mut(&mut distance), bits, rounding);
        }
        Ok(distance)
    }

    /// Runs the passes of one update and adds up their gradients. Returns the number of targets.
    fn run_passes(
        &mut self,
        (stage, step, update): (Stage, Step, u64),
        words: [&Bytes; 2],
        losses: &mut Losses,
    ) -> Result<u64> {
        let microbatches = self.manifest.training.microbatches;
        let bytes = 4 * self.manifest.tokens_per_microbatch() as usize;
        let mut of_step = 0;
        for microbatch in 0..microbatches {
            let pass = update as usize * microbatches as usize + microbatch as usize;
            let place = pass * bytes..(pass + 1) * bytes;
            let [input, labels] = words.map(|words| words.slice(place.clone()));
            let key = ClaimKey { step, stage, microbatch: Microbatch(microbatch) };
            let output = self.model.forward(key, &input, Some(&labels))?;
            if let ForwardOutput::Loss { share, targets, padded } = output {
                losses.share += share;
                losses.targets += targets;
                losses.padded += padded;
                of_step += targets;
            }
            let _ = self.model.backward(key, None)?;
            self.model.accumulate(key)?;
        }
        Ok(of_step)
    }

    /// One update by the exact sum of the passes' gradients, as that of a run without workers.
    fn update(&mut self, (stage, step): (Stage, Step), count: u64, targets: u64) -> Result<()> {
        let (manifest, model) = (&self.manifest, &mut self.model);
        let fixed_point = FixedPoint::of(manifest);
        let mut means = Vec::new();
        for weights in manifest.groups_of(stage) {
            let elements = group_elements(manifest, weights);
            let mean = model
                .read_sums(weights, step, 0..elements, |sums| fixed_point.reduce(&[sums]))??;
            means.push(mean);
        }
        let gradients: Vec<&[u8]> = means.iter().map(|mean| &mean[..]).collect();
        let square: f64 = gradients.iter().map(|mean| square_norm(mean)).sum();
        let gradient_norm = square.sqrt() * manifest.gradient_scale(targets);
        model.apply(&Update { step, count, gradients: &gradients, gradient_norm, targets })?;
        model.clear(model.turn(step))
    }
}
