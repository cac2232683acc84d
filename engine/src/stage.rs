//! One stage of the model: its weights, and the microbatches in flight in it.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use shoal_protocol::codec::{Codec, Rounding};
use shoal_protocol::ids::{ClaimKey, ContentHash, Stage, Step};
use shoal_protocol::manifest::{Dtype, Manifest};
use tch::{Kind, Tensor};

use crate::accumulator::Accumulator;
use crate::boundary::{self, Compress};
use crate::checkpoint::{StageState, hash_tensors};
use crate::codec;
use crate::device::Device;
use crate::error::{EngineError, Result};
use crate::init::initial_weights;
use crate::model::{self, Layer, Shape};
use crate::optimizer::Moments;
use crate::parameters::{Parameter, parameters};
use crate::shim;
use crate::tensor::{elements, kind};

/// What a forward pass gives.
#[derive(Debug, Clone, PartialEq)]
pub enum ForwardOutput {
    /// What the next stage reads: `Manifest::boundary_shape` in the manifest's codec.
    Activation(Bytes),
    /// From the last stage: mean cross-entropy over the microbatch's tokens, in nats.
    Loss(f32),
}

/// One stage: weights, moments, accumulator, and what is in flight.
#[derive(Debug)]
pub(crate) struct StageModel {
    last: bool,
    manifest: Manifest,
    device: tch::Device,
    parameters: Vec<Parameter>,
    /// All weights, f32.
    weights: Tensor,
    /// The same in bf16, when passes are computed in it.
    narrow: Option<Tensor>,
    blocks: Blocks,
    moments: Moments,
    accumulator: Accumulator,
    /// Forward passes whose backward pass is to come.
    forwards: BTreeMap<ClaimKey, Kept>,
    /// Weight gradients whose counting is to be decided, in pieces of the flat vector.
    pending: BTreeMap<ClaimKey, Vec<Tensor>>,
}

/// The weights as the layers use them: views into the flat vector.
#[derive(Debug)]
struct Blocks {
    shape: Shape,
    embedding: Option<Tensor>,
    /// Where what crosses boundaries is compressed: what makes it wide again.
    expand: Option<Tensor>,
    layers: Vec<Layer>,
    compress: Option<Compress>,
    head: Option<(Tensor, Tensor)>,
    /// Every view once, in the order of the flat vector.
    all: Vec<Tensor>,
}

/// What is kept of a forward pass.
#[derive(Debug)]
enum Kept {
    /// The graph from `leaf` (none in the first stage) to `output`.
    Graph { leaf: Option<Tensor>, output: Tensor },
    /// The input, to run the pass again.
    Input(Bytes),
}

impl StageModel {
    /// The stage with its initial weights.
    pub(crate) fn new(manifest: &Manifest, stage: Stage, device: Device) -> Result<Self> {
        let flat = initial_weights(manifest, stage);
        let weights = Tensor::f_from_slice(&flat)?.f_to(device.torch)?;
        let narrow = match manifest.training.dtype {
            Dtype::F32 => None,
            Dtype::Bf16 => Some(weights.f_to_kind(Kind::BFloat16)?),
        };
        let blocks = Blocks::new(manifest, stage, &weights, narrow.as_ref())?;
        Ok(Self {
            last: stage == manifest.last_stage(),
            manifest: manifest.clone(),
            device: device.torch,
            parameters: parameters(manifest, stage),
            moments: Moments::new(flat.len(), device.torch)?,
            accumulator: Accumulator::new(manifest, flat.len(), device.torch)?,
            weights,
            narrow,
            blocks,
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
        // The last stage turns round at once, so there a second forward pass would save nothing.
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

    /// The pass itself: the leaf that gets the input's gradient, and the output or loss.
    fn run(
        &self,
        key: ClaimKey,
        input: &[u8],
        labels: Option<&Bytes>,
        keeps_graph: bool,
    ) -> Result<(Option<Tensor>, Tensor)> {
        let _guard = (!keeps_graph).then(tch::no_grad_guard);
        let training = &self.manifest.training;
        let (leaf, x) = match &self.blocks.embedding {
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
        let mut x = self.blocks.through(x)?;
        if let Some((norm, head)) = &self.blocks.head {
            let labels = labels.ok_or(EngineError::MissingLabels(key))?;
            let labels = self.tokens(labels, "labels")?.f_flatten(0, -1)?;
            x = model::loss(&model::logits(&x, norm, head, &self.blocks.shape)?, &labels)?;
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
        let inputs: Vec<&Tensor> = self.blocks.all.iter().chain(leaf).collect();
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
        self.accumulator.add(key, gradients, &self.parameters)?;
        self.pending.remove(&key);
        Ok(())
    }

    /// Drops whatever is held of one microbatch.
    pub(crate) fn discard(&mut self, key: ClaimKey) {
        self.forwards.remove(&key);
        self.pending.remove(&key);
    }

    /// Has somebody read the accumulated sums of a range of the flat vector.
    pub(crate) fn read_sums<T>(
        &self,
        range: Range<usize>,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        self.accumulator.read(range, read)
    }

    /// One optimizer update; see [`crate::Engine::apply`].
    pub(crate) fn apply(&mut self, step: Step, gradient: &[u8], global_norm: f64) -> Result<()> {
        let _guard = tch::no_grad_guard();
        let shape = [self.weights.numel() as i64];
        let what = "a stage's mean gradient";
        let gradient = codec::decode(gradient, Codec::F32, &shape, self.device, what)?;
        self.moments.apply(
            &mut self.weights,
            &gradient,
            &self.parameters,
            &self.manifest,
            step,
            global_norm,
        )?;
        if let Some(narrow) = &mut self.narrow {
            narrow.f_copy_(&self.weights)?;
        }
        // What is left in flight read the old weights.
        self.reset()
    }

    /// Empties the accumulator and drops everything in flight.
    pub(crate) fn reset(&mut self) -> Result<()> {
        self.forwards.clear();
        self.pending.clear();
        self.accumulator.clear()
    }

    /// Elements of the flat vector.
    pub(crate) fn parameter_count(&self) -> usize {
        self.weights.numel()
    }

    /// A copy of weights and moments.
    pub(crate) fn state(&self) -> Result<StageState> {
        let copy = |tensor: &Tensor| -> Result<Vec<f32>> {
            Ok(elements(&tensor.f_to(tch::Device::Cpu)?).to_vec())
        };
        Ok(StageState {
            weights: copy(&self.weights)?,
            first_moment: copy(&self.moments.first)?,
            second_moment: copy(&self.moments.second)?,
        })
    }

    /// Takes over weights and moments, and drops everything in flight.
    pub(crate) fn set_state(&mut self, state: &StageState) -> Result<()> {
        let _guard = tch::no_grad_guard();
        self.weights.f_copy_(&Tensor::f_from_slice(&state.weights)?)?;
        self.moments.first.f_copy_(&Tensor::f_from_slice(&state.first_moment)?)?;
        self.moments.second.f_copy_(&Tensor::f_from_slice(&state.second_moment)?)?;
        if let Some(narrow) = &mut self.narrow {
            narrow.f_copy_(&self.weights)?;
        }
        self.reset()
    }

    /// Hash of weights and moments.
    pub(crate) fn state_hash(&self) -> Result<ContentHash> {
        let host = |tensor: &Tensor| tensor.f_to(tch::Device::Cpu);
        let flat = [host(&self.weights)?, host(&self.moments.first)?, host(&self.moments.second)?];
        let [weights, first, second] = [&flat[0], &flat[1], &flat[2]].map(elements::<f32>);
        Ok(hash_tensors("shoal stage state v1", &self.parameters, &[weights, first, second]))
    }

    /// A pass without a graph or codecs: what crosses to the next stage, or logits, of token ids in
    /// the first stage, else of what the stage before gave.
    pub(crate) fn infer(&self, input: &Tensor) -> Result<Tensor> {
        let _guard = tch::no_grad_guard();
        let x = match &self.blocks.embedding {
            Some(embedding) => {
                let tokens = input.f_to(self.device)?;
                model::embed(&tokens, embedding, self.manifest.training.dtype)?
            }
            None => input.shallow_clone(),
        };
        let x = self.blocks.through(x)?;
        match &self.blocks.head {
            Some((norm, head)) => model::logits(&x, norm, head, &self.blocks.shape),
            None => Ok(x),
        }
    }

    /// What crosses a stage boundary.
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

impl Blocks {
    /// Cuts the flat vectors. `narrow` holds the weights in what passes are computed in, where
    /// that is not f32; the embedding is always read in f32, whose gradient then adds up in f32.
    fn new(
        manifest: &Manifest,
        stage: Stage,
        weights: &Tensor,
        narrow: Option<&Tensor>,
    ) -> Result<Self> {
        let model = &manifest.model;
        let size = |value: u32| i64::from(value);
        let hidden = size(model.hidden);
        let keys = hidden / size(model.heads) * size(model.key_value_heads);
        let computed = narrow.unwrap_or(weights);
        let mut cutter = Cutter { offset: 0, all: Vec::new() };
        let matrix = [size(model.vocabulary), hidden];
        let embedding = match stage {
            Stage(0) => Some(cutter.cut(weights, &matrix)?),
            _ => None,
        };
        let expand = match boundary::before(manifest, stage) {
            Some(boundary) => Some(cutter.cut(computed, &[hidden, size(boundary.width)])?),
            None => None,
        };
        let mut layers = Vec::new();
        for _ in manifest.layers_of(stage) {
            layers.push(Layer {
                attention_norm: cutter.cut(computed, &[hidden])?,
                query_key_value: cutter.cut(computed, &[hidden + 2 * keys, hidden])?,
                attention_output: cutter.cut(computed, &[hidden, hidden])?,
                feed_forward_norm: cutter.cut(computed, &[hidden])?,
                gate_up: cutter.cut(computed, &[2 * size(model.intermediate), hidden])?,
                down: cutter.cut(computed, &[hidden, size(model.intermediate)])?,
            });
        }
        let compress = match boundary::after(manifest, stage) {
            Some(boundary) => {
                Some(Compress::cut(boundary, hidden, |shape| cutter.cut(computed, shape))?)
            }
            None => None,
        };
        let head = match stage == manifest.last_stage() {
            true => Some((cutter.cut(computed, &[hidden])?, cutter.cut(computed, &matrix)?)),
            false => None,
        };
        assert!(cutter.offset as usize == weights.numel(), "the blocks fill the flat vector");
        let shape = Shape::new(model, weights.device())?;
        Ok(Self { shape, embedding, expand, layers, compress, head, all: cutter.all })
    }

    /// From the embedding, or what crossed the boundary before, to what the head reads, or what
    /// crosses the next one.
    fn through(&self, input: Tensor) -> Result<Tensor> {
        let mut x = match &self.expand {
            Some(matrix) => boundary::expand(&input, matrix)?,
            None => input,
        };
        for layer in &self.layers {
            x = model::decoder_layer(&x, layer, &self.shape)?;
        }
        match &self.compress {
            Some(weights) => boundary::compress(&x, weights, &self.shape),
            None => Ok(x),
        }
    }
}

/// Takes one block after the other from the flat vectors.
struct Cutter {
    offset: i64,
    all: Vec<Tensor>,
}

impl Cutter {
    fn cut(&mut self, flat: &Tensor, shape: &[i64]) -> Result<Tensor> {
        let length = shape.iter().product();
        let view = flat.f_narrow(0, self.offset, length)?.f_view(shape)?;
        let leaf = view.f_detach()?.set_requires_grad(true);
        self.offset += length;
        self.all.push(leaf.shallow_clone());
        Ok(leaf)
    }
}
