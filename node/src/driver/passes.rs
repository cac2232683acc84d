//! The passes of microbatches, on the engine of one device.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use shoal_engine::{Engine, EngineError, ForwardOutput};
use shoal_protocol::codec::Codec;
use shoal_protocol::ids::ClaimKey;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::FixedLoss;
use shoal_scheduler::action::{Task, TaskResult};

use super::payload::{Payloads, Tensor, Tensors};

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
        match *task {
            Task::Forward { key, .. } => self.forward(engine, key, &inputs[0]),
            Task::Backward { key, .. } => self.backward(engine, key, inputs.first()),
            Task::Accumulate { key, .. } => match engine.accumulate(key) {
                Ok(()) => Ok(TaskResult::Accumulated { key }),
                Err(error @ EngineError::BadGradient { .. }) => {
                    Ok(TaskResult::Diverged { key, reason: error.to_string() })
                }
                Err(error) => Err(error),
            },
            Task::Discard { key, .. } => {
                engine.discard(key);
                Ok(TaskResult::Discarded { key })
            }
            _ => unreachable!("{task:?} concerns all devices"),
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
        match engine.forward(key, &input.bytes, label_bytes) {
            // Of an update of a virtual worker's own.
            Err(error @ EngineError::BadGradient { .. }) => {
                Ok(TaskResult::Diverged { key, reason: error.to_string() })
            }
            Err(error) => Err(error),
            // The backward pass may be queued already, and finds its inputs.
            Ok(ForwardOutput::Loss { share, .. }) if !share.is_finite() => {
                Ok(TaskResult::Diverged { key, reason: format!("its loss is {share}") })
            }
            Ok(ForwardOutput::Loss { share, targets, padded }) => Ok(TaskResult::Forwarded {
                key,
                output: None,
                loss: Some(FixedLoss::from_nats(share.into(), targets, padded)),
            }),
            Ok(ForwardOutput::Activation(bytes)) => {
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
        std::thread::sleep(self.slow_down);
        let input_gradient = engine.backward(key, gradient.map(|tensors| &tensors[0].bytes))?;
        let codec = self.manifest.codec.activation_gradients;
        let keep = |bytes| self.payloads.log([self.boundary_tensor(codec, bytes)]);
        Ok(TaskResult::Returned { key, gradient: input_gradient.map(keep) })
    }

    /// Makes a tensor for a stage boundary.
    fn boundary_tensor(&self, codec: Codec, bytes: Bytes) -> Tensor {
        let shape = self.manifest.boundary_shape().to_vec();
        Tensor { element: codec.into(), shape, bytes }
    }
}
