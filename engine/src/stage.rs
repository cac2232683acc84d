//! One stage of the model: its weights and its microbatches in flight.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use shoal_protocol::codec::{Codec, Rounding};
use shoal_protocol::ids::{ClaimKey, ContentHash, Stage, Step};
use shoal_protocol::manifest::Manifest;
use tch::{Kind, Tensor};

use crate::accumulator::Accumulator;
use crate::checkpoint::{StageState, hash_tensors};
use crate::codec;
use crate::device::Device;
use crate::error::{EngineError, Result};
use crate::init::fill_initial_weights;
use crate::model;
use crate::optimizer::Moments;
use crate::parameters::{Parameter, parameter_count, parameters};
use crate::shim;
use crate::tensor::{elements, elements_mut, floats, kind};
use crate::weights::Weights;

/// The result of a forward pass.
#[derive(Debug, Clone, PartialEq)]
pub enum ForwardOutput {
    /// The input of the next stage: `Manifest::boundary_shape` in the manifest's codec.
    Activation(Bytes),
    /// From the last stage: mean cross-entropy over the microbatch's tokens, in nats.
    Loss(f32),
}

/// One stage: weights, moments, accumulators, and microbatches in flight.
#[derive(Debug)]
pub(crate) struct StageModel {
    last: bool,
    manifest: Manifest,
    device: tch::Device,
    parameters: Vec<Parameter>,
    /// The version of the weights: the number of applied updates.
    version: Step,
    weights: Weights,
    /// The weights of the previous version, if the run's steps read them.
    stale: Option<Weights>,
    moments: Moments,
    /// One for each step that can run at the same time, used in turn.
    accumulators: Vec<Accumulator>,
    /// Forward passes without a backward pass yet.
    forwards: BTreeMap<ClaimKey, Kept>,
    /// Weight gradients that are neither accumulated nor discarded, in pieces of the flat vector.
    pending: BTreeMap<ClaimKey, Vec<Tensor>>,
}

/// The state kept of a forward pass.
#[derive(Debug)]
enum Kept {
    /// The graph from `leaf` (`None` in the first stage) to `output`.
    Graph { leaf: Option<Tensor>, output: Tensor },
    /// The input, to repeat the pass.
    Input(Bytes),
}

impl StageModel {
    /// Creates the stage with its initial weights.
    pub(crate) fn new(manifest: &Manifest, stage: Stage, device: Device) -> Result<Self> {
        let parameters = parameters(manifest, stage);
        let count = parameter_count(manifest, stage);
        let mut flat = Tensor::f_empty([count as i64], (Kind::Float, tch::Device::Cpu))?;
        fill_initial_weights(manifest, stage, elements_mut(&mut flat), device.threads);
        let flat = flat.f_to(device.torch)?;
        let stale = match manifest.training.staleness {
            0 => None,
            _ => Some(Weights::new(manifest, stage, flat.f_detach_copy()?)?),
        };
        let accumulator = |_| Accumulator::new(manifest, count, device.torch);
        Ok(Self {
            last: stage == manifest.last_stage(),
            manifest: manifest.clone(),
            device: device.torch,
            parameters,
            moments: Moments::new(count, device.torch)?,
            accumulators: (0..manifest.steps_at_once()).map(accumulator).collect::<Result<_>>()?,
            version: Step(0),
            weights: Weights::new(manifest, stage, flat)?,
            stale,
            forwards: BTreeMap::new(),
            pending: BTreeMap::new(),
        })
    }

    /// Runs the stage on one microbatch; see [`crate::Engine::forward`].
    pub(crate) fn forward(
        &mut self,
        key: ClaimKey,
        input: &Bytes,
        labels: Option<&Bytes>,
    ) -> Result<ForwardOutput> {
        if self.forwards.contains_key(&key) || self.pending.contains_key(&key) {
            return Err(EngineError::AlreadyInFlight(key));
        }
        let trains = key.microbatch.0 < self.manifest.training.microbatches;
        // The last stage begins its backward pass at once, so recomputation would save nothing
        // there.
        let keeps_graph = trains && (self.last || !self.manifest.training.recompute);
        let (leaf, output) = self.run(key, input, labels, keeps_graph)?;
        let result = if self.last {
            ForwardOutput::Loss(output.f_double_value(&[])? as f32)
        } else {
            let codec = self.manifest.codec.activations;
            ForwardOutput::Activation(codec::encode(&output, codec, Rounding::Nearest)?)
        };
        if keeps_graph {
            self.forwards.insert(key, Kept::Graph { leaf, output });
        } else if trains {
            self.forwards.insert(key, Kept::Input(input.clone()));
        }
        Ok(result)
    }

    /// The pass itself: returns the leaf that receives the input's gradient, and the output or
    /// loss.
    fn run(
        &self,
        key: ClaimKey,
        input: &[u8],
        labels: Option<&Bytes>,
        keeps_graph: bool,
    ) -> Result<(Option<Tensor>, Tensor)> {
        let _guard = (!keeps_graph).then(tch::no_grad_guard);
        let training = &self.manifest.training;
        let blocks = &self.weights_of(key)?.blocks;
        let (leaf, x) = match &blocks.embedding {
            Some(embedding) => {
                let tokens = self.tokens(input, "tokens")?;
                (None, model::embed(&tokens, embedding, training.dtype)?)
            }
            None => {
                let leaf = self
                    .boundary_tensor(input, self.manifest.codec.activations, "an activation")?
                    .f_to_kind(kind(training.dtype))?
                    .set_requires_grad(keeps_graph);
                (Some(leaf.shallow_clone()), leaf)
            }
        };
        let mut x = blocks.through(x)?;
        if let Some((norm, head)) = &blocks.head {
            let labels = labels.ok_or(EngineError::MissingLabels(key))?;
            let labels = self.tokens(labels, "labels")?.f_flatten(0, -1)?;
            x = model::loss(&model::logits(&x, norm, head, &blocks.shape)?, &labels)?;
        }
        Ok((leaf, x))
    }

    /// Runs the backward pass of one microbatch; see [`crate::Engine::backward`].
    pub(crate) fn backward(
        &mut self,
        key: ClaimKey,
        gradient: Option<&Bytes>,
    ) -> Result<Option<Bytes>> {
        let kept = self.forwards.get(&key).ok_or(EngineError::NotInFlight(key))?;
        let gradient = match (self.last, gradient) {
            (true, _) => None,
            (false, None) => return Err(EngineError::MissingGradient(key)),
            (false, Some(bytes)) => {
                let codec = self.manifest.codec.activation_gradients;
                let gradient = self.boundary_tensor(bytes, codec, "an activation gradient")?;
                Some(gradient.f_to_kind(kind(self.manifest.training.dtype))?)
            }
        };
        let rerun;
        let (leaf, output) = match kept {
            Kept::Graph { leaf, output } => (leaf, output),
            Kept::Input(input) => {
                rerun = self.run(key, input, None, true)?;
                (&rerun.0, &rerun.1)
            }
        };
        let blocks = &self.weights_of(key)?.blocks;
        let inputs: Vec<&Tensor> = blocks.all.iter().chain(leaf).collect();
        let mut gradients = shim::gradients(output, gradient.as_ref(), &inputs)?;
        let input_gradient = match leaf {
            None => None,
            Some(_) => {
                let last = gradients.pop().expect("one gradient per input");
                let codec = self.manifest.codec.activation_gradients;
                Some(codec::encode(&last, codec, self.manifest.gradient_rounding(key))?)
            }
        };
        for gradient in &mut gradients {
            *gradient = gradient.f_contiguous()?;
        }
        self.forwards.remove(&key);
        self.pending.insert(key, gradients);
        Ok(input_gradient)
    }

    /// Adds the pending weight gradients of one microbatch to the accumulator.
    pub(crate) fn accumulate(&mut self, key: ClaimKey) -> Result<()> {
        let gradients = self.pending.get(&key).ok_or(EngineError::NotInFlight(key))?;
        let turn = self.turn(key.step);
        self.accumulators[turn].add(key, gradients, &self.parameters)?;
        self.pending.remove(&key);
        Ok(())
    }

    /// The index of a step's accumulator.
    fn turn(&self, step: Step) -> usize {
        (step.0 % self.accumulators.len() as u64) as usize
    }

    /// The weights that the passes of this work item read.
    fn weights_of(&self, key: ClaimKey) -> Result<&Weights> {
        let Some(stale) = &self.stale else { return Ok(&self.weights) };
        let reads = self.manifest.reads(key.step);
        if reads == self.version {
            Ok(&self.weights)
        } else if reads.next() == self.version {
            Ok(stale)
        } else {
            Err(EngineError::WrongVersion { key, version: self.version })
        }
    }

    /// Drops all state of one microbatch.
    pub(crate) fn discard(&mut self, key: ClaimKey) {
        self.forwards.remove(&key);
        self.pending.remove(&key);
    }

    /// Passes a step's accumulated sums of a range of the flat vector to a function.
    pub(crate) fn read_sums<T>(
        &self,
        step: Step,
        range: Range<usize>,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        self.accumulators[self.turn(step)].read(range, read)
    }

    /// One optimizer update; see [`crate::Engine::apply`].
    pub(crate) fn apply(&mut self, step: Step, gradient: &[u8], global_norm: f64) -> Result<()> {
        let _guard = tch::no_grad_guard();
        let (expected, found) = (size_of::<f32>() * self.weights.flat.numel(), gradient.len());
        if expected != found {
            let what = "a stage's mean gradient";
            return Err(EngineError::WrongLength { what, expected, found });
        }
        let gradient = floats(gradient);
        if let Some(stale) = &mut self.stale {
            // Work that reads the previous version has been accumulated, or is dropped below.
            stale.set(&self.weights.flat)?;
            std::mem::swap(stale, &mut self.weights);
        }
        self.moments.apply(
            &mut self.weights.flat,
            &gradient,
            &self.parameters,
            &self.manifest,
            step,
            global_norm,
        )?;
        self.weights.follow()?;
        self.version = step.next();
        // Remaining microbatches of the step can no longer count.
        self.forwards.retain(|key, _| key.step > step);
        self.pending.retain(|key, _| key.step > step);
        let turn = self.turn(step);
        self.accumulators[turn].clear()
    }

    /// Clears the accumulators and drops everything in flight.
    pub(crate) fn reset(&mut self) -> Result<()> {
        self.forwards.clear();
        self.pending.clear();
        self.accumulators.iter_mut().try_for_each(Accumulator::clear)
    }

    /// Elements of the flat vector.
    pub(crate) fn parameter_count(&self) -> usize {
        self.weights.flat.numel()
    }

    /// A copy of the stage's state at its version.
    pub(crate) fn state(&self) -> Result<StageState> {
        let copy = |tensor: &Tensor| -> Result<Vec<f32>> {
            Ok(elements(&tensor.f_to(tch::Device::Cpu)?).to_vec())
        };
        Ok(StageState {
            weights: copy(&self.weights.flat)?,
            stale_weights: self.stale.as_ref().map(|stale| copy(&stale.flat)).transpose()?,
            first_moment: copy(&self.moments.first)?,
            second_moment: copy(&self.moments.second)?,
        })
    }

    /// Loads the stage's state of a version, and drops everything in flight.
    pub(crate) fn set_state(&mut self, version: Step, state: &StageState) -> Result<()> {
        let _guard = tch::no_grad_guard();
        self.weights.set(&Tensor::f_from_slice(&state.weights)?)?;
        if let Some(stale) = &mut self.stale {
            let values = state.stale_weights.as_ref().unwrap_or(&state.weights);
            stale.set(&Tensor::f_from_slice(values)?)?;
        }
        self.moments.first.f_copy_(&Tensor::f_from_slice(&state.first_moment)?)?;
        self.moments.second.f_copy_(&Tensor::f_from_slice(&state.second_moment)?)?;
        self.version = version;
        self.reset()
    }

    /// Hash of the stage's state at its version.
    pub(crate) fn state_hash(&self) -> Result<ContentHash> {
        let moments = [&self.moments.first, &self.moments.second];
        let weights = [&self.weights].into_iter().chain(&self.stale).map(|held| &held.flat);
        let host = |tensor: &Tensor| tensor.f_to(tch::Device::Cpu);
        let flat: Vec<Tensor> = weights.chain(moments).map(host).collect::<Result<_, _>>()?;
        let flat: Vec<&[f32]> = flat.iter().map(elements::<f32>).collect();
        Ok(hash_tensors("shoal stage state v1", &self.parameters, &flat))
    }

    /// A pass without a graph or codecs: returns the activation for the next stage, or logits, from
    /// token ids in the first stage and the previous stage's activation in others.
    pub(crate) fn infer(&self, input: &Tensor) -> Result<Tensor> {
        let _guard = tch::no_grad_guard();
        let blocks = &self.weights.blocks;
        let x = match &blocks.embedding {
            Some(embedding) => {
                let tokens = input.f_to(self.device)?;
                model::embed(&tokens, embedding, self.manifest.training.dtype)?
            }
            None => input.shallow_clone(),
        };
        let x = blocks.through(x)?;
        match &blocks.head {
            Some((norm, head)) => model::logits(&x, norm, head, &blocks.shape),
            None => Ok(x),
        }
    }

    /// Decodes an activation or gradient at a stage boundary.
    fn boundary_tensor(&self, bytes: &[u8], codec: Codec, what: &'static str) -> Result<Tensor> {
        let shape = self.manifest.boundary_shape().map(i64::from);
        codec::decode(bytes, codec, &shape, self.device, what)
    }

    /// Token ids `[B, T]` from u32, little-endian.
    fn tokens(&self, bytes: &[u8], what: &'static str) -> Result<Tensor> {
        let samples = i64::from(self.manifest.training.microbatch_size);
        let context = i64::from(self.manifest.model.context);
        let expected = 4 * (samples * context) as usize;
        if bytes.len() != expected {
            return Err(EngineError::WrongLength { what, expected, found: bytes.len() });
        }
        let vocabulary = self.manifest.model.vocabulary;
        let mut ids = Vec::with_capacity(expected / 4);
        for word in bytes.as_chunks::<4>().0 {
            let token = u32::from_le_bytes(*word);
            if token >= vocabulary {
                return Err(EngineError::UnknownToken { token, vocabulary });
            }
            ids.push(i64::from(token));
        }
        Ok(Tensor::f_from_slice(&ids)?.f_view([samples, context])?.f_to(self.device)?)
    }
}
