//! What a virtual worker does in a step of the run: updates of its own, from the step's weights.

use std::collections::BTreeMap;

use bytes::Bytes;
use shoal_protocol::codec::Dither;
use shoal_protocol::ids::{ClaimKey, Microbatch, Stage, Step};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::FixedLoss;

use crate::device::setup::Device;
use crate::device::tensor::bytes_of;
use crate::error::{EngineError, Result};
use crate::model::loss::Preferences;
use crate::model::parameters::{group_elements, parameters, range_of};
use crate::numeric::distance::{self, Rounding};
use crate::numeric::fixed_point::FixedPoint;
use crate::numeric::square_norm::square_norm;
use crate::optimizer::Update;
use crate::train::carried::CarriedMoments;
use crate::train::frozen::Frozen;
use crate::train::stage::{ForwardOutput, StageModel};
use crate::train::together::{Together, change_whole};
use crate::weights::gradient::Piece;
use crate::weights::held::Held;
use crate::weights::share::Share;
use crate::weights::version::Weights;

/// The model that a worker trains, of one step at a time. Nothing of it outlives the step but the moments that all
/// workers begin with.
#[derive(Debug)]
pub(crate) struct InnerTrainer {
    /// The run of a worker.
    manifest: Manifest,
    updates: u64,
    /// Bits of a number of the distance, if it is rounded.
    bits: Option<u32>,
    place: (Device, Share),
    /// Models of which no worker is trained now: the only one, where workers are trained one after the other.
    pub(crate) idle: Vec<StageModel>,
    /// Workers whose passes are exchanges.
    pub(crate) pipelined: BTreeMap<ClaimKey, PipelinedWorker>,
    /// The devices that train a worker with this one, if there are any.
    together: Option<Together>,
    /// What all workers' optimizers begin the step with, if not with zeros.
    pub(crate) moments: Option<CarriedMoments>,
}

/// One stage of a virtual worker whose passes are exchanges.
#[derive(Debug)]
pub(crate) struct PipelinedWorker {
    pub(crate) model: StageModel,
    pub(crate) losses: Losses,
    /// Targets of the passes of the update under way.
    pub(crate) targets: u64,
    /// The mean gradient of the update whose passes have all ended.
    pub(crate) mean: Bytes,
    /// The sum of its squares, with those of the stages above.
    pub(crate) squares: f64,
}

/// The loss over all passes of some updates.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Losses {
    share: f32,
    targets: u64,
    padded: u64,
}

impl Losses {
    /// Adds that of a pass, if it is the last stage's. Returns the number of its targets.
    pub(crate) fn add(&mut self, output: &ForwardOutput) -> u64 {
        let &ForwardOutput::Loss { share, targets, padded, .. } = output else { return 0 };
        self.share += share;
        self.targets += targets;
        self.padded += padded;
        targets
    }

    pub(crate) fn output(self) -> ForwardOutput {
        let Self { share, targets, padded } = self;
        // A worker learns from no pairs.
        ForwardOutput::Loss { share, targets, padded, preferences: Preferences::default() }
    }
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
        let moments = CarriedMoments::new(manifest, stage, device.state())?;
        // A device that computes whole passes trains a whole worker.
        let share = if together.is_some() { share.clone() } else { Share::WHOLE };
        let place = (device, share);
        let idle = vec![StageModel::of_worker(&of_worker, stage, place.clone(), frozen)?];
        let (updates, bits) = (inner.steps.into(), inner.codec.bits());
        let manifest = of_worker;
        Ok(Some(Self {
            manifest,
            updates,
            bits,
            place,
            idle,
            pipelined: BTreeMap::new(),
            together,
            moments,
        }))
    }

    /// The models of all workers.
    pub(crate) fn models(&self) -> impl Iterator<Item = &StageModel> {
        self.idle.iter().chain(self.pipelined.values().map(|worker| &worker.model))
    }

    /// The run of a worker.
    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Updates of a worker in a step of the run.
    pub(crate) fn updates(&self) -> u64 {
        self.updates
    }

    /// A model that begins from these weights, for a worker of this stage.
    pub(crate) fn begin(
        &mut self,
        stage: Stage,
        weights: &Weights,
        frozen: Option<&Frozen>,
    ) -> Result<StageModel> {
        let mut model = match self.idle.pop() {
            Some(model) => model,
            None => StageModel::of_worker(&self.manifest, stage, self.place.clone(), frozen)?,
        };
        model.begin(weights)?;
        if let Some(moments) = &self.moments {
            moments.begin(&mut model.optimizer, self.together.as_ref())?;
        }
        Ok(model)
    }

    /// The part of the vector that the workers sum which this device adds to, if not to all.
    pub(crate) fn counted(&self) -> Option<Held> {
        let own = self.together.as_ref()?.own();
        let first = range_of(&self.idle.first()?.parameters).end;
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
        words: [&Bytes; 2],
    ) -> Result<(ForwardOutput, Vec<Piece>)> {
        let mut model = self.begin(key.stage, weights, None)?;
        let trained = self.train_model(&mut model, key, weights, words);
        self.idle.push(model);
        trained
    }

    fn train_model(
        &self,
        model: &mut StageModel,
        key: ClaimKey,
        weights: &Weights,
        words: [&Bytes; 2],
    ) -> Result<(ForwardOutput, Vec<Piece>)> {
        let mut losses = Losses::default();
        for update in 0..self.updates {
            let step = Step(key.step.0 * self.updates + update);
            let passes = self.run_passes(model, (key.stage, step, update), words, &mut losses)?;
            self.update(model, (key.stage, step), update, passes)?;
        }
        Ok((losses.output(), self.to_sum(model, key, weights)?))
    }

    /// What is summed of a worker: the way back from its weights to the first, and the moments if they are carried.
    pub(crate) fn to_sum(
        &self,
        model: &StageModel,
        key: ClaimKey,
        weights: &Weights,
    ) -> Result<Vec<Piece>> {
        let rounded = self.bits.map(|bits| (bits, Dither::of(self.manifest.training.seed, key)));
        let mut pieces = Vec::from_iter(self.distance_from(model, weights, rounded)?);
        if let Some(moments) = &self.moments {
            let first = range_of(&model.parameters).end;
            let dither = rounded.map(|(_, dither)| dither);
            let (worker, together) = (&model.optimizer, self.together.as_ref());
            pieces.extend(moments.to_sum(worker, first, dither, together)?);
        }
        Ok(pieces)
    }

    /// How many updates an optimizer has made after this one, for its bias corrections.
    pub(crate) fn count(&self, step: Step, update: u64) -> u64 {
        if self.moments.is_some() { step.0 + 1 } else { update + 1 }
    }

    /// The way from the worker's weights to these, rounded if the manifest says so; of the weights that this device
    /// updates, if there are any.
    fn distance_from(
        &self,
        model: &StageModel,
        weights: &Weights,
        rounded: Option<(u32, Dither)>,
    ) -> Result<Option<Piece>> {
        let _guard = tch::no_grad_guard();
        let kept = weights.kept();
        let mut distance = weights.flat.f_sub(&model.weights.flat)?;
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
        &self,
        model: &mut StageModel,
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
            of_step += losses.add(&model.forward(key, &input, Some(&labels))?);
            let _ = model.backward(key, None)?;
            if let Err(error) = model.accumulate(key) {
                if self.together.is_none() {
                    return Err(error);
                }
                // The others learn of it at the end of the update, and wait for this device until then.
                model.discard(key);
                failed.get_or_insert(error);
            }
        }
        Ok((of_step, failed))
    }

    /// One update by the exact sum of the passes' gradients, as that of a run without workers.
    fn update(
        &self,
        model: &mut StageModel,
        (stage, step): (Stage, Step),
        update: u64,
        (targets, failed): (u64, Option<EngineError>),
    ) -> Result<()> {
        let (manifest, count) = (&self.manifest, self.count(step, update));
        let (fixed_point, turn) = (FixedPoint::of(manifest), model.turn(step));
        let gradient_norm =
            |mean: &[u8]| square_norm(mean).sqrt() * manifest.gradient_scale(targets);
        let update = |mean, gradient_norm| Update {
            step,
            count,
            gradients: mean,
            gradient_norm,
            loss: FixedLoss::new(0, targets),
        };
        if let Some(together) = &self.together {
            let key = ClaimKey { step, stage, microbatch: Microbatch(0) };
            together.agree(failed, key, &model.parameters)?;
            let mean = together.mean(&model.accumulators[turn], fixed_point)?;
            let mean = bytes_of(&mean);
            let (means, norm) = ([mean], gradient_norm(mean));
            let update = update(&means, norm);
            model.update_own(&update)?;
            let _guard = tch::no_grad_guard();
            together.take_updates(&mut model.weights)?;
            model.end_update(&update)?;
        } else {
            let mean = mean_gradient(manifest, model, step)?;
            model.apply(&update(&[&mean], gradient_norm(&mean)))?;
        }
        model.clear(turn)
    }
}

/// The mean gradient of a worker's step at one stage, by the exact sum of the passes' gradients.
pub(crate) fn mean_gradient(manifest: &Manifest, model: &StageModel, step: Step) -> Result<Bytes> {
    let weights = manifest.groups_of(model.stage).next().expect("a stage has weights");
    let all = 0..group_elements(manifest, weights);
    let fixed_point = FixedPoint::of(manifest);
    model.read_sums(weights, step, all, |sums| fixed_point.reduce(&[sums]))?
}
