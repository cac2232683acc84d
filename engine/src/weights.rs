//! A stage's weights at one version, and views into them for passes.

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Dtype, Manifest};
use tch::{Kind, Tensor};

use crate::boundary::{self, Compress};
use crate::error::Result;
use crate::model::{self, Layer, Shape};

/// A stage's weights at one version.
#[derive(Debug)]
pub(crate) struct Weights {
    /// All weights, flat f32.
    pub(crate) flat: Tensor,
    /// A bf16 copy, if passes are computed in bf16.
    narrow: Option<Tensor>,
    pub(crate) blocks: Blocks,
}

impl Weights {
    /// Takes over a flat vector, which lies on the stage's device.
    pub(crate) fn new(manifest: &Manifest, stage: Stage, flat: Tensor) -> Result<Self> {
        let narrow = match manifest.training.dtype {
            Dtype::F32 => None,
            Dtype::Bf16 => Some(flat.f_to_kind(Kind::BFloat16)?),
        };
        let blocks = Blocks::new(manifest, stage, &flat, narrow.as_ref())?;
        Ok(Self { flat, narrow, blocks })
    }

    /// Replaces the values.
    pub(crate) fn set(&mut self, values: &Tensor) -> Result<()> {
        self.flat.f_copy_(values)?;
        self.follow()
    }

    /// Updates the bf16 copy after a change of the flat vector.
    pub(crate) fn follow(&mut self) -> Result<()> {
        if let Some(narrow) = &mut self.narrow {
            narrow.f_copy_(&self.flat)?;
        }
        Ok(())
    }
}

/// The weights as views into the flat vector, for the layers.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) shape: Shape,
    pub(crate) embedding: Option<Tensor>,
    /// The matrix that expands a compressed activation at the beginning of the stage.
    expand: Option<Tensor>,
    layers: Vec<Layer>,
    compress: Option<Compress>,
    pub(crate) head: Option<(Tensor, Tensor)>,
    /// Every view once, in the order of the flat vector.
    pub(crate) all: Vec<Tensor>,
}

impl Blocks {
    /// Cuts the flat vectors. `narrow` holds the weights in the dtype of passes if that is not f32.
    /// The embedding is always read in f32, so that its gradient is summed in f32.
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

    /// Runs the layers: from the embedding or the previous stage's activation to the input of the
    /// head or the next stage's activation.
    pub(crate) fn through(&self, input: Tensor) -> Result<Tensor> {
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

/// Takes consecutive blocks from the flat vectors.
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
