//! The passes of microbatches, on the engine of one device.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use shoal_engine::{Engine, EngineError, ForwardOutput, Preferences, WorkerForward};
use shoal_protocol::codec::Codec;
use shoal_protocol::frame::Element;
use shoal_protocol::ids::{ClaimKey, Exchange};
use shoal_protocol::manifest::{Manifest, NOTE};
use shoal_protocol::message::FixedLoss;
use shoal_scheduler::action::{Task, TaskResult};

use super::payload::{Payloads, Tensor, Tensors};
use super::wrong_work;
use crate::fault_point::FaultPoint;

/// What a device needs for passes besides its engine.
#[derive(Debug, Clone)]
pub(super) struct Passes {
    pub(super) manifest: Arc<Manifest>,
    pub(super) payloads: Payloads,
    /// Extra time for each pass, to model a slow peer.
    pub(super) slow_down: Duration,
}

impl Passes {
    /// Carries out a task that concerns one device.
    ///
    /// # Panics
    /// When the task concerns all devices.
    pub(super) fn carry_out(
        &self,
        engine: &mut Engine,
        task: &Task,
        inputs: &[Tensors],
    ) -> Result<TaskResult, EngineError> {
        let result = match *task {
            Task::Forward { key, exchange, .. } if self.has_exchanges(key) => {
                self.forward_worker(engine, (key, exchange), &inputs[0])
            }
            Task::Backward { key, exchange, .. } if self.has_exchanges(key) => {
                self.backward_worker(engine, (key, exchange), inputs.first())
            }
            Task::Forward { key, .. } => self.forward(engine, key, &inputs[0]),
            Task::Backward { key, .. } => self.backward(engine, key, inputs.first()),
            Task::Accumulate { key, .. } if wrong_work::leaves_out(key) => {
                engine.discard(key);
                Ok(TaskResult::Accumulated { key, broken: false })
            }
            Task::Accumulate { key, .. } => self.accumulate(engine, key),
            Task::Discard { key, .. } => {
                engine.discard(key);
                Ok(TaskResult::Discarded { key })
            }
            _ => unreachable!("{task:?} concerns all devices"),
        };
        match (result, task) {
            // Of this gradient, or of an update of a virtual worker's own.
            (
                Err(error @ EngineError::BadGradient { .. }),
                Task::Forward { key, .. }
                | Task::Backward { key, .. }
                | Task::Accumulate { key, .. },
            ) => Ok(TaskResult::Diverged { key: *key, reason: error.to_string() }),
            (result, _) => result,
        }
    }

    /// Computes this device's part of a task that another device carries out and reports; returns what the
    /// other cannot know.
    pub(super) fn assist(
        &self,
        engine: &mut Engine,
        task: &Task,
        inputs: &[Tensors],
    ) -> Result<Option<TaskResult>, EngineError> {
        match *task {
            Task::Forward { key, .. } => {
                let labels = inputs[0].get(1).map(|labels| &labels.bytes);
                match engine.forward(key, &inputs[0][0].bytes, labels) {
                    // All have the same error of a virtual worker's update.
                    Ok(_) | Err(EngineError::BadGradient { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            Task::Backward { key, .. } => {
                engine.backward(key, inputs.first().map(|tensors| &tensors[0].bytes))?;
            }
            _ => {
                let result = self.carry_out(engine, task, inputs)?;
                return Ok(Some(result).filter(|it| matches!(it, TaskResult::Diverged { .. })));
            }
        }
        Ok(None)
    }

    fn forward(
        &self,
        engine: &mut Engine,
        key: ClaimKey,
        tensors: &Tensors,
    ) -> Result<TaskResult, EngineError> {
        std::thread::sleep(self.slow_down);
        let (input, labels) = (tensors[0].clone(), tensors.get(1).cloned());
        let label_bytes = labels.as_ref().map(|labels| &labels.bytes);
        match engine.forward(key, &input.bytes, label_bytes)? {
            ForwardOutput::Loss { share, targets, padded, preferences } => {
                let trains = key.microbatch.0 < self.manifest.training.microbatches;
                let goes_on = trains && engine.leaves_out_broken(key.stage);
                Ok(loss_result(key, (share, goes_on), (targets, padded), preferences))
            }
            ForwardOutput::Activation(bytes) => {
                let bytes = wrong_work::handed_on(key, bytes);
                let codec = self.manifest.codec.activations;
                let mut tensors = vec![self.boundary_tensor(codec, bytes)];
                tensors.extend(labels);
                let output = self.payloads.log(tensors);
                Ok(TaskResult::Forwarded { key, output: Some(output), loss: None })
            }
        }
    }

    fn backward(
        &self,
        engine: &mut Engine,
        key: ClaimKey,
        gradient: Option<&Tensors>,
    ) -> Result<TaskResult, EngineError> {
        std::thread::sleep(self.slow_down - self.left_to_addition(engine, key));
        let input_gradient = engine.backward(key, gradient.map(|tensors| &tensors[0].bytes))?;
        let codec = self.manifest.codec.activation_gradients;
        let keep = |bytes| self.payloads.log([self.boundary_tensor(codec, bytes)]);
        let (gradient, leaves) = (input_gradient.map(keep), engine.leaves_products(key.stage));
        Ok(TaskResult::Returned { key, gradient, leaves })
    }

    fn accumulate(&self, engine: &mut Engine, key: ClaimKey) -> Result<TaskResult, EngineError> {
        std::thread::sleep(self.left_to_addition(engine, key));
        FaultPoint::Adding.pass();
        match engine.accumulate(key) {
            Err(EngineError::BadGradient { .. }) if engine.leaves_out_broken(key.stage) => {
                engine.discard(key);
                Ok(TaskResult::Accumulated { key, broken: true })
            }
            added => added.map(|()| TaskResult::Accumulated { key, broken: false }),
        }
    }

    /// The extra time of a backward pass that comes with the addition of its weight gradients: half of it, where the engine
    /// leaves their products to that.
    fn left_to_addition(&self, engine: &Engine, key: ClaimKey) -> Duration {
        let leaves = engine.leaves_products(key.stage) && !self.has_exchanges(key);
        if leaves { self.slow_down / 2 } else { Duration::ZERO }
    }

    /// Whether the passes of this work's virtual worker are exchanges.
    fn has_exchanges(&self, key: ClaimKey) -> bool {
        self.manifest.exchanges_of(key.microbatch) > 1
    }

    /// The forward pass of an exchange. A tensor of a virtual worker has a note behind it, and the last exchange nothing
    /// else; the samples of the first stage have none.
    fn forward_worker(
        &self,
        engine: &mut Engine,
        (key, exchange): (ClaimKey, Exchange),
        tensors: &Tensors,
    ) -> Result<TaskResult, EngineError> {
        std::thread::sleep(self.slow_down);
        let (words, note) = match &tensors[..] {
            [input, labels, rest @ ..] => (Some([input, labels]), rest.first()),
            rest => (None, rest.first()),
        };
        let bytes = words.map(|words| words.map(|tensor| &tensor.bytes));
        let note = note.map_or(0.0, read_note);
        let WorkerForward { activation, note, loss } =
            engine.forward_worker(key, exchange, bytes, note)?;
        if let Some(ForwardOutput::Loss { share, targets, padded, preferences }) = loss {
            return Ok(loss_result(key, (share, false), (targets, padded), preferences));
        }
        if key.stage == self.manifest.last_stage() {
            return Ok(TaskResult::Forwarded { key, output: None, loss: None });
        }
        let codec = self.manifest.codec.activations;
        let activation = activation.map(|bytes| self.boundary_tensor(codec, bytes));
        let labels = words.map(|[_, labels]| labels.clone());
        let tensors = activation.into_iter().chain(labels).chain([note_tensor(note)]);
        let output = self.payloads.log(tensors.collect::<Vec<_>>());
        Ok(TaskResult::Forwarded { key, output: Some(output), loss: None })
    }

    /// The backward pass of an exchange.
    fn backward_worker(
        &self,
        engine: &mut Engine,
        (key, exchange): (ClaimKey, Exchange),
        tensors: Option<&Tensors>,
    ) -> Result<TaskResult, EngineError> {
        std::thread::sleep(self.slow_down);
        let (gradient, note) = match tensors.map_or(&[][..], |tensors| &tensors[..]) {
            [gradient, note] => (Some(&gradient.bytes), Some(note)),
            rest => (None, rest.first()),
        };
        let note = note.map_or(0.0, read_note);
        let (gradient, note) = engine.backward_worker(key, exchange, gradient, note)?;
        if key.stage.0 == 0 {
            return Ok(TaskResult::Returned { key, gradient: None, leaves: false });
        }
        let codec = self.manifest.codec.activation_gradients;
        let gradient = gradient.map(|bytes| self.boundary_tensor(codec, bytes));
        let tensors: Vec<_> = gradient.into_iter().chain([note_tensor(note)]).collect();
        let gradient = Some(self.payloads.log(tensors));
        Ok(TaskResult::Returned { key, gradient, leaves: false })
    }

    /// Makes a tensor for a stage boundary.
    fn boundary_tensor(&self, codec: Codec, bytes: Bytes) -> Tensor {
        let shape = self.manifest.boundary_shape().to_vec();
        Tensor { element: codec.into(), shape, bytes }
    }
}

/// The result of a forward pass of the last stage. `goes_on`: a loss that is not finite is left out of the step.
fn loss_result(
    key: ClaimKey,
    (share, goes_on): (f32, bool),
    (targets, padded): (u64, u64),
    Preferences { preferred, margin }: Preferences,
) -> TaskResult {
    // The backward pass may be queued already, and finds its inputs.
    if !share.is_finite() && goes_on {
        let loss = FixedLoss::from_nats(0.0, targets, padded).of_broken();
        return TaskResult::Forwarded { key, output: None, loss: Some(loss) };
    }
    if !share.is_finite() {
        return TaskResult::Diverged { key, reason: format!("its loss is {share}") };
    }
    let loss = FixedLoss::from_nats(share.into(), targets, padded);
    let loss = Some(loss.with_preferences(preferred, margin.into()));
    TaskResult::Forwarded { key, output: None, loss }
}

/// The tensor of a note.
fn note_tensor(note: f64) -> Tensor {
    Tensor::flat(Element::U8, NOTE, Bytes::copy_from_slice(&note.to_le_bytes()))
}

/// The note in a tensor, whose size was checked when it came.
fn read_note(tensor: &Tensor) -> f64 {
    f64::from_le_bytes(tensor.bytes[..].try_into().expect("the size of a note"))
}
