//! What a virtual worker does in a step of the run: updates of its own, from the step's weights.

use bytes::Bytes;
use shoal_protocol::codec::Dither;
use shoal_protocol::ids::{ClaimKey, Microbatch, Stage, Step};
use shoal_protocol::manifest::Manifest;

use crate::carried::CarriedMoments;
use crate::device::Device;
use crate::distance::{self, Rounding};
use crate::error::{EngineError, Result};
use crate::fixed_point::FixedPoint;
use crate::frozen::Frozen;
use crate::gradient::Piece;
use crate::held::Held;
use crate::optimizer::Update;
use crate::parameters::{group_elements, parameters, range_of};
use crate::share::Share;
use crate::square_norm::square_norm;
use crate::stage::{ForwardOutput, StageModel};
use crate::tensor::bytes_of;
use crate::together::{Together, change_whole};
use crate::weights::Weights;

/// The model that a worker trains, of one step at a time. Nothing of it outlives the step but the moments that all
/// workers begin with.
#[derive(Debug)]
pub(crate) struct InnerTrainer {
    /// The run of a worker.
    manifest: Manifest,
    updates: u64,
    /// Bits of a number of the distance, if it is rounded.
    bits: Option<u32>,
    pub(crate) model: StageModel,
    /// The devices that train a worker with this one, if there are any.
    together: Option<Together>,
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
    /// The trainer of a run's workers, beside its frozen weights; `None` if it has none.
    pub(crate) fn new(
        manifest: &Manifest,
        stage: Stage,
        (device, share): (Device, &Share),
        frozen: Option<&Frozen>,
    ) -> Result<Option<Self>> {
        let (Some(inner), Some(of_worker)) = (&manifest.inner, manifest.of_worker()) else {
            return Ok(None);
        };
        let together = Together::new(&of_worker, &parameters(manifest, stage), share);
        // A device that computes whole passes trains a whole worker.
        let share = if together.is_some() { share.clone() } else { Share::WHOLE };
        let model = StageModel::of_worker(&of_worker, stage, (device, share), frozen)?;
        let (updates, bits) = (inner.steps.into(), inner.codec.bits());
        let moments = CarriedMoments::new(manifest, stage, device.state())?;
        Ok(Some(Self { manifest: of_worker, updates, bits, model, together, moments }))
    }

    /// The part of the vector that the workers sum which this device adds to, if not to all.
    pub(crate) fn counted(&self) -> Option<Held> {
        let own = self.together.as_ref()?.own();
        let first = range_of(&self.model.parameters).end;
        let carried = self.moments.iter().flat_map(|moments| moments.places(first, &own));
        Some(Held::ranges([own.clone()].into_iter().chain(carried)))
    }

    /// Makes all updates of a worker in a step, from these weights and with the tokens and labels of all its
    /// passes. Returns the loss over all of them, and what is summed: the way back from the last weights to the first,
    /// and the moments if they are carried.
    pub(crate) fn train(
        &mut self,
        key: ClaimKey,
        weights: &Weights,
        [input, labels]: [&Bytes; 2],
    ) -> Result<(ForwardOutput, Vec<Piece>)> {
        let mut losses = Losses::default();
        self.model.begin(weights)?;
        if let Some(moments) = &self.moments {
            moments.begin(&mut self.model.optimizer, self.together.as_ref())?;
        }
        for update in 0..self.updates {
            let step = Step(key.step.0 * self.updates + update);
            let passes =
                self.run_passes((key.stage, step, update), [input, labels], &mut losses)?;
            let count = if self.moments.is_some() { step.0 + 1 } else { update + 1 };
            self.update((key.stage, step), count, passes)?;
        }
        let rounded = self.bits.map(|bits| (bits, Dither::of(self.manifest.training.seed, key)));
        let mut pieces = Vec::from_iter(self.distance_from(weights, rounded)?);
        if let Some(moments) = &self.moments {
            let first = range_of(&self.model.parameters).end;
            let dither = rounded.map(|(_, dither)| dither);
            let (worker, together) = (&self.model.optimizer, self.together.as_ref());
            pieces.extend(moments.to_sum(worker, first, dither, together)?);
        }
        let Losses { share, targets, padded } = losses;
        Ok((ForwardOutput::Loss { share, targets, padded }, pieces))
    }

    /// The way from the worker's weights to these, rounded if the manifest says so; of the weights that this device
    /// updates, if there are any.
    fn distance_from(
        &self,
        weights: &Weights,
        rounded: Option<(u32, Dither)>,
    ) -> Result<Option<Piece>> {
        let _guard = tch::no_grad_guard();
        let kept = weights.kept();
        let mut distance = weights.flat.f_sub(&self.model.weights.flat)?;
        if let Some((bits, dither)) = rounded {
            let rounding = Rounding::Random { dither, first: 0 };
            distance = change_whole(&distance, &kept, self.together.as_ref(), |all| {
                distance::round(all, bits, rounding);
            })?;
        }
        if kept.is_empty() { Ok(None) } else { Piece::dense(kept.start, &distance).map(Some) }
    }

    /// Runs the passes of one update and adds up their gradients. Returns the number of targets and, where other devices
    /// go on, the first gradient that this one could not count.
    fn run_passes(
        &mut self,
        (stage, step, update): (Stage, Step, u64),
        words: [&Bytes; 2],
        losses: &mut Losses,
    ) -> Result<(u64, Option<EngineError>)> {
        let microbatches = self.manifest.training.microbatches;
        let bytes = 4 * self.manifest.tokens_per_microbatch() as usize;
        let (mut of_step, mut failed) = (0, None);
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
            if let Err(error) = self.model.accumulate(key) {
                if self.together.is_none() {
                    return Err(error);
                }
                // The others learn of it at the end of the update, and wait for this device until then.
                self.model.discard(key);
                failed.get_or_insert(error);
            }
        }
        Ok((of_step, failed))
    }

    /// One update by the exact sum of the passes' gradients, as that of a run without workers.
    fn update(
        &mut self,
        (stage, step): (Stage, Step),
        count: u64,
        (targets, failed): (u64, Option<EngineError>),
    ) -> Result<()> {
        let (manifest, model) = (&self.manifest, &mut self.model);
        let (fixed_point, turn) = (FixedPoint::of(manifest), model.turn(step));
        let gradient_norm =
            |mean: &[u8]| square_norm(mean).sqrt() * manifest.gradient_scale(targets);
        let update =
            |mean, gradient_norm| Update { step, count, gradients: mean, gradient_norm, targets };
        if let Some(together) = &self.together {
            let key = ClaimKey { step, stage, microbatch: Microbatch(0) };
            together.agree(failed, key, &model.parameters)?;
            let mean = together.mean(&model.accumulators[turn], fixed_point)?;
            let mean = bytes_of(&mean);
            model.update_own(&update(&[mean], gradient_norm(mean)))?;
            let _guard = tch::no_grad_guard();
            together.take_updates(&mut model.weights)?;
            model.end_update(step)?;
        } else {
            let weights = manifest.groups_of(stage).next().expect("a stage has weights");
            let all = 0..group_elements(manifest, weights);
            let mean =
                model.read_sums(weights, step, all, |sums| fixed_point.reduce(&[sums]))??;
            model.apply(&update(&[&mean], gradient_norm(&mean)))?;
        }
        model.clear(turn)
    }
}
