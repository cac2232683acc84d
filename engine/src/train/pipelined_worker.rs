//! One stage of a virtual worker whose passes are exchanges: because several stages train it, each at a peer of its own,
//! or because it joins the newest meeting on its way, before one of them.
//!
//! Between stages an exchange is with the neighbours. The gradient of an update is clipped by its norm over all stages, so a
//! note travels with each tensor: the last gradient of an update brings the sum of the squares of the stages above,
//! to which this one adds its own; the first activation of the next update brings the whole sum, with which
//! the update is made before the pass. A last exchange without a pass makes the last update.

use bytes::Bytes;
use shoal_protocol::ids::{ClaimKey, Exchange, Microbatch, Step};
use shoal_protocol::message::FixedLoss;

use crate::error::{EngineError, Result};
use crate::model::microbatch::count_targets;
use crate::numeric::square_norm::square_norm;
use crate::optimizer::Update;
use crate::train::frozen::Frozen;
use crate::train::inner::{InnerTrainer, Losses, PipelinedWorker, mean_gradient};
use crate::train::stage::{ForwardOutput, WorkerForward};
use crate::weights::gradient::Piece;
use crate::weights::version::Weights;

/// Where an exchange is in a worker's work.
struct Place {
    /// The update, counted from the start of the run's step.
    update: u64,
    /// The pass of the update.
    pass: u32,
    /// Whether this exchange begins an update, or ends the last one.
    begins: bool,
    /// Whether the exchange has no pass.
    is_end: bool,
}

impl InnerTrainer {
    fn place(&self, exchange: Exchange) -> Place {
        let microbatches = self.manifest().training.microbatches;
        let update = u64::from(exchange.0 / microbatches);
        let pass = exchange.0 % microbatches;
        Place { update, pass, begins: pass == 0, is_end: update == self.updates() }
    }

    /// The number of a pass in the worker's own run.
    fn pass_key(&self, key: ClaimKey, place: &Place) -> ClaimKey {
        let step = Step(key.step.0 * self.updates() + place.update);
        ClaimKey { step, stage: key.stage, microbatch: Microbatch(place.pass) }
    }

    /// Runs the forward pass of an exchange; see [`crate::Engine::forward_worker`].
    pub(crate) fn forward_exchange(
        &mut self,
        (key, exchange): (ClaimKey, Exchange),
        (start, joined, frozen): (&Weights, Option<&Weights>, Option<&Frozen>),
        words: Option<[&Bytes; 2]>,
        note: f64,
    ) -> Result<WorkerForward> {
        let place = self.place(exchange);
        let mut worker = match self.pipelined.remove(&key) {
            Some(worker) => worker,
            None if exchange == Exchange(0) => {
                let model = self.begin(key.stage, start, frozen)?;
                let (losses, mean) = (Losses::default(), Bytes::new());
                PipelinedWorker { model, losses, targets: 0, mean, squares: 0.0 }
            }
            None => return Err(EngineError::NotInFlight(key)),
        };
        let output = self.prepare(&mut worker, (key, &place), note).and_then(|()| {
            if let Some(joined) = joined {
                worker.model.weights.move_by(joined, start)?;
            }
            self.forward_worker(&mut worker, (key, &place), words)
        });
        self.pipelined.insert(key, worker);
        output
    }

    /// Makes the update that is due before a forward pass.
    fn prepare(
        &self,
        worker: &mut PipelinedWorker,
        (key, place): (ClaimKey, &Place),
        note: f64,
    ) -> Result<()> {
        if key.stage.0 > 0 {
            worker.squares = note;
        }
        if !place.begins || place.update == 0 {
            return Ok(());
        }
        self.update_worker(worker, key, place.update - 1)
    }

    fn forward_worker(
        &self,
        worker: &mut PipelinedWorker,
        (key, place): (ClaimKey, &Place),
        words: Option<[&Bytes; 2]>,
    ) -> Result<WorkerForward> {
        let note = worker.squares;
        if place.is_end {
            let is_last = key.stage == self.manifest().last_stage();
            let loss = is_last.then(|| worker.losses.output());
            return Ok(WorkerForward { activation: None, note, loss });
        }
        let [input, labels] = words.ok_or(EngineError::MissingLabels(key))?;
        worker.targets += count_targets(self.manifest(), labels)?;
        let pass = self.pass_key(key, place);
        let output = worker.model.forward(pass, input, Some(labels))?;
        worker.losses.add(&output);
        let activation = match output {
            ForwardOutput::Activation(activation) => Some(activation),
            ForwardOutput::Loss { .. } => None,
        };
        Ok(WorkerForward { activation, note, loss: None })
    }

    /// Makes an update from the mean gradient of its passes, whose norm over all stages is known now.
    fn update_worker(
        &self,
        worker: &mut PipelinedWorker,
        key: ClaimKey,
        update: u64,
    ) -> Result<()> {
        let manifest = self.manifest();
        let step = Step(key.step.0 * self.updates() + update);
        let targets = std::mem::take(&mut worker.targets);
        let mean = std::mem::take(&mut worker.mean);
        let turn = worker.model.turn(step);
        worker.model.apply(&Update {
            step,
            count: self.count(step, update),
            gradients: &[&mean],
            gradient_norm: worker.squares.sqrt() * manifest.gradient_scale(targets),
            loss: FixedLoss::new(0, targets),
        })?;
        worker.model.clear(turn)
    }

    /// Runs the backward pass of an exchange; see [`crate::Engine::backward_worker`]. Returns the gradient of its input and
    /// the note that goes with it; after the last exchange also what is summed of the worker.
    pub(crate) fn backward_exchange(
        &mut self,
        (key, exchange): (ClaimKey, Exchange),
        weights: &Weights,
        gradient: Option<&Bytes>,
        note: f64,
    ) -> Result<(Option<Bytes>, f64, Option<Vec<Piece>>)> {
        let place = self.place(exchange);
        let mut worker = self.pipelined.remove(&key).ok_or(EngineError::NotInFlight(key))?;
        if place.is_end {
            let pieces = self.to_sum(&worker.model, key, weights)?;
            self.idle.push(worker.model);
            return Ok((None, 0.0, Some(pieces)));
        }
        let ran = self.backward_worker(&mut worker, self.pass_key(key, &place), gradient, note);
        self.pipelined.insert(key, worker);
        ran.map(|(gradient, note)| (gradient, note, None))
    }

    fn backward_worker(
        &self,
        worker: &mut PipelinedWorker,
        pass: ClaimKey,
        gradient: Option<&Bytes>,
        note: f64,
    ) -> Result<(Option<Bytes>, f64)> {
        let gradient = worker.model.backward(pass, gradient)?;
        worker.model.accumulate(pass)?;
        if pass.microbatch.0 + 1 < self.manifest().training.microbatches {
            return Ok((gradient, 0.0));
        }
        worker.mean = mean_gradient(self.manifest(), &worker.model, pass.step)?;
        worker.squares = note + square_norm(&worker.mean);
        Ok((gradient, worker.squares))
    }

    /// Drops a worker.
    pub(crate) fn discard(&mut self, key: ClaimKey) {
        self.idle.extend(self.pipelined.remove(&key).map(|worker| worker.model));
    }

    /// Drops the workers of the steps up to this one.
    pub(crate) fn discard_through(&mut self, step: Step) {
        let done: Vec<ClaimKey> =
            self.pipelined.keys().take_while(|key| key.step <= step).copied().collect();
        done.into_iter().for_each(|key| self.discard(key));
    }
}
