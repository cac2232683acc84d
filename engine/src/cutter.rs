//! Cuts the flat vectors of a stage's weights into views by the weights' names.

use std::collections::BTreeMap;

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Lora, LoraTarget, Manifest, Model, Norm};
use tch::Tensor;

use crate::adapter::{Adapter, AdapterSlices, JOINED};
use crate::error::Result;
use crate::held::Held;
use crate::layer::{
    Layer, Linear, Matrices, NormWeights, Rows, Slice, Sliced, SlicedAdapters, StreamNorm, Whole,
};
use crate::leaves::{Leaf, Leaves};
use crate::own_slices::OwnSlices;
use crate::parameters::{
    LayerNorms, Parameter, WeightPart, model_parameters, parameters, query_key_norm_widths,
};

/// The elements of a flat vector from `offset` on, in this shape.
fn cut(flat: &Tensor, offset: usize, shape: &[i64]) -> Result<Tensor> {
    let view = flat.f_narrow(0, offset as i64, shape.iter().product())?;
    Ok(view.f_view(shape)?.f_detach()?)
}

/// Where passes read weights, trained or frozen.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    /// In the dtype of passes: what is held, or the flat vector.
    pub(crate) values: &'a Tensor,
    pub(crate) held: Option<&'a Held>,
    /// Where an embedding is read in f32 unless it is in `embedding`: the same elements as in `values`, or all.
    pub(crate) wide: &'a Tensor,
    pub(crate) embedding: Option<&'a Tensor>,
}

impl Source<'_> {
    /// The elements of `wide` from `offset` of the flat vector on, in this shape.
    pub(crate) fn wide(&self, offset: usize, shape: &[i64]) -> Result<Tensor> {
        cut(self.wide, locate(self.held, offset, 1).0, shape)
    }
}

/// Where an element of the flat vector is held, and the elements from one row to the next there.
fn locate(held: Option<&Held>, element: usize, row: usize) -> (usize, usize) {
    held.map_or((element, row), |held| held.locate(element, row))
}

/// Takes views of the flat vectors by their weights' names.
pub(crate) struct Cutter<'a> {
    /// The model's weights, in the dtype of passes.
    flat: &'a Tensor,
    /// The weights that are in `flat`, if not all are.
    held: Option<&'a Held>,
    offsets: BTreeMap<String, usize>,
    /// The adapters, if those are trained, and the model's weights are frozen.
    adapters: Option<Adapters<'a>>,
    pub(crate) leaves: Leaves,
}

/// The flat vector of adapters, in the dtype of passes.
struct Adapters<'a> {
    lora: &'a Lora,
    flat: &'a Tensor,
    held: Option<&'a Held>,
    parameters: BTreeMap<String, Parameter>,
}

/// The offsets of weights by their names.
fn offsets(parameters: Vec<Parameter>) -> BTreeMap<String, usize> {
    parameters.into_iter().map(|parameter| (parameter.name, parameter.offset)).collect()
}

impl<'a> Cutter<'a> {
    pub(crate) fn new(
        manifest: &'a Manifest,
        stage: Stage,
        trained: Source<'a>,
        frozen: Option<Source<'a>>,
    ) -> Self {
        let Source { values, held, .. } = trained;
        let named = |parameter: Parameter| (parameter.name.clone(), parameter);
        let adapters = manifest.lora.as_ref().map(|lora| Adapters {
            lora,
            flat: values,
            held,
            parameters: parameters(manifest, stage).into_iter().map(named).collect(),
        });
        let Source { values: flat, held, .. } = frozen.unwrap_or(trained);
        let offsets = offsets(model_parameters(manifest, stage));
        Self { flat, held, offsets, adapters, leaves: Leaves::default() }
    }

    /// Whether the stage has a weight of the model.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.offsets.contains_key(name)
    }

    /// The index of a weight's first element in the flat vector.
    pub(crate) fn offset(&self, name: &str) -> usize {
        self.offsets[name]
    }

    /// A part of a weight of the model as a view for passes, which gets a gradient unless it is frozen: the elements
    /// from an offset on, in this shape.
    pub(crate) fn view(&self, offset: usize, shape: &[i64], part: WeightPart) -> Result<Leaf> {
        let (place, _) = locate(self.held, offset, 1);
        let tensor = cut(self.flat, place, shape)?.set_requires_grad(self.adapters.is_none());
        Ok(Leaf { offset, tensor, part })
    }

    /// Notes that a view is read by the layers, for a group of tokens only if there is one.
    fn keep(&mut self, leaf: Leaf, group: Option<usize>) -> Tensor {
        let tensor = leaf.tensor.shallow_clone();
        if self.adapters.is_none() {
            self.leaves.add(leaf, group);
        }
        tensor
    }

    /// A whole weight.
    pub(crate) fn leaf(&mut self, name: &str, shape: &[i64]) -> Result<Tensor> {
        self.leaf_of(name, shape, None)
    }

    /// A whole weight for a group of tokens only, if there is one.
    fn leaf_of(&mut self, name: &str, shape: &[i64], group: Option<usize>) -> Result<Tensor> {
        let leaf = self.view(self.offsets[name], shape, WeightPart::Whole)?;
        Ok(self.keep(leaf, group))
    }

    /// The adapters of a layer's joined matrix.
    fn adapter(
        &mut self,
        model: &Model,
        layer: u32,
        joined: &[LoraTarget],
    ) -> Result<Option<Adapter>> {
        let Some(Adapters { lora, flat, held, parameters }) = &self.adapters else {
            return Ok(None);
        };
        let leaves = &mut self.leaves;
        Adapter::cut(lora, model, layer, joined, |name, shape| {
            let offset = parameters[name].offset;
            let place = locate(*held, offset, 1).0;
            let tensor = cut(flat, place, shape)?.set_requires_grad(true);
            leaves.add(
                Leaf { offset, tensor: tensor.shallow_clone(), part: WeightPart::Whole },
                None,
            );
            Ok(tensor)
        })
    }

    /// The adapters of each slice of a layer's joined matrix, which is cut into rows or columns. `slice` is the model
    /// of one slice.
    fn sliced_adapter(
        &mut self,
        slice: &Model,
        layer: u32,
        joined: &[LoraTarget],
        own: &OwnSlices,
    ) -> Result<Option<AdapterSlices>> {
        let Some(Adapters { lora, flat, held, parameters }) = &self.adapters else {
            return Ok(None);
        };
        let (leaves, mut shared) = (&mut self.leaves, BTreeMap::<String, Tensor>::new());
        let mut adapters = Vec::new();
        let mut of_rows = true;
        for number in own.numbers() {
            let adapter = Adapter::cut(lora, slice, layer, joined, |name, shape| {
                let part = parameters[name].part_of_slice();
                if let Some(known) = shared.get(name) {
                    return Ok(known.shallow_clone());
                }
                let (rows, width) = (shape[0], shape[1]);
                let (skipped, all) = match part {
                    WeightPart::Whole => (0, width),
                    WeightPart::Rows => (number as i64 * rows * width, width),
                    WeightPart::Columns(all) => (number as i64 * width, all as i64),
                };
                of_rows &= !matches!(part, WeightPart::Columns(_));
                let offset = parameters[name].offset + skipped as usize;
                let (place, stride) = locate(*held, offset, all as usize);
                let strides = [stride as i64, 1];
                let view = flat.f_as_strided([rows, width], strides, Some(place as i64))?;
                let tensor = view.f_detach()?.set_requires_grad(true);
                leaves.add(Leaf { offset, tensor: tensor.shallow_clone(), part }, None);
                if part == WeightPart::Whole {
                    shared.insert(name.to_owned(), tensor.shallow_clone());
                }
                Ok(tensor)
            })?;
            adapters.extend(adapter);
        }
        Ok((!adapters.is_empty()).then(|| AdapterSlices::new(adapters, of_rows)))
    }

    /// A norm, for a group of tokens only if there is one.
    pub(crate) fn norm(
        &mut self,
        name: &str,
        model: &Model,
        group: Option<usize>,
    ) -> Result<NormWeights> {
        let width = [i64::from(model.hidden)];
        let weight = self.leaf_of(&format!("{name}.weight"), &width, group)?;
        let bias = match model.block.norm {
            Norm::Layer => Some(self.leaf_of(&format!("{name}.bias"), &width, group)?),
            Norm::Rms | Norm::RmsPlusOne => None,
        };
        Ok(NormWeights { weight, bias })
    }

    /// A norm of the residual stream.
    fn stream_norm(&mut self, name: &str, model: &Model, own: &OwnSlices) -> Result<StreamNorm> {
        let norms = match model.slices {
            1 => vec![self.norm(name, model, None)?],
            _ => {
                let groups = 0..own.numbers().len();
                let norms = groups.map(|group| self.norm(name, model, Some(group)));
                norms.collect::<Result<_>>()?
            }
        };
        Ok(StreamNorm(norms))
    }

    /// Adjacent matrices as one, named by the first, with their adapters.
    fn linear(
        &mut self,
        first: &str,
        shape: [i64; 2],
        biased: bool,
        adapter: Option<Adapter>,
    ) -> Result<Linear> {
        let weight = self.leaf(&format!("{first}.weight"), &shape)?;
        let bias = match biased {
            true => Some(self.leaf(&format!("{first}.bias"), &shape[..1])?),
            false => None,
        };
        Ok(Linear { weight, bias, adapter })
    }

    /// The rows of one slice of a matrix, or of its bias: `shape` is the slice's.
    fn rows(&mut self, name: &str, shape: &[i64], slice: usize) -> Result<Tensor> {
        let length: i64 = shape.iter().product();
        let offset = self.offsets[name] + slice * length as usize;
        let leaf = self.view(offset, shape, WeightPart::Rows)?;
        Ok(self.keep(leaf, None))
    }

    /// The rows of each slice of the head, `[V, H]`, that this device has.
    pub(crate) fn head_slices(
        &self,
        name: &str,
        matrix: [i64; 2],
        own: &OwnSlices,
    ) -> Result<Vec<Leaf>> {
        let [vocabulary, hidden] = matrix.map(|extent| extent as usize);
        let slice = |number| {
            let rows = own.rows_of(number, vocabulary);
            let offset = self.offsets[name] + rows.start * hidden;
            self.view(offset, &[rows.len() as i64, matrix[1]], WeightPart::Rows)
        };
        own.numbers().map(slice).collect()
    }

    /// The columns of one slice of a matrix `[rows, all]`.
    fn columns(
        &mut self,
        name: &str,
        [rows, all]: [i64; 2],
        [slice, width]: [i64; 2],
    ) -> Result<Tensor> {
        let offset = self.offsets[name] + (slice * width) as usize;
        let (place, stride) = locate(self.held, offset, all as usize);
        let strides = [stride as i64, 1];
        let view = self.flat.f_as_strided([rows, width], strides, Some(place as i64))?;
        let tensor = view.f_detach()?.set_requires_grad(self.adapters.is_none());
        Ok(self.keep(Leaf { offset, tensor, part: WeightPart::Columns(all as usize) }, None))
    }

    /// The rows of one slice of matrices that read the same input, with so many outputs in a slice.
    fn joined_rows(
        &mut self,
        layer: &str,
        parts: &[(&str, i64)],
        [inputs, slice]: [i64; 2],
        biased: bool,
    ) -> Result<Rows> {
        let slice = slice as usize;
        let (mut weights, mut biases) = (Vec::new(), Vec::new());
        for (part, outputs) in parts {
            weights.push(self.rows(
                &format!("{layer}.{part}.weight"),
                &[*outputs, inputs],
                slice,
            )?);
        }
        for (part, outputs) in parts.iter().filter(|_| biased) {
            biases.push(self.rows(&format!("{layer}.{part}.bias"), &[*outputs], slice)?);
        }
        Ok(Rows { weights, biases })
    }

    fn sliced_adapters(
        &mut self,
        slice: &Model,
        layer: u32,
        own: &OwnSlices,
    ) -> Result<SlicedAdapters> {
        let [query_key_value, attention_output, gate_up, down] = JOINED;
        Ok(SlicedAdapters {
            query_key_value: self.sliced_adapter(slice, layer, query_key_value, own)?,
            attention_output: self.sliced_adapter(slice, layer, attention_output, own)?,
            gate_up: self.sliced_adapter(slice, layer, gate_up, own)?,
            down: self.sliced_adapter(slice, layer, down, own)?,
        })
    }

    /// The matrices of a layer in slices, as far as this device computes with them.
    fn sliced(&mut self, model: &Model, layer: u32, own: &OwnSlices) -> Result<Sliced> {
        let adapters = self.sliced_adapters(&model.slice(), layer, own)?;
        let layer = &format!("model.layers.{layer}");
        let (hidden, block, slice) = (i64::from(model.hidden), &model.block, model.slice());
        let [queries, keys, inner] =
            [slice.query_width(), slice.key_width(), slice.intermediate].map(i64::from);
        let all = i64::from(model.slices);
        let projections =
            [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)];
        let gated = [("mlp.gate_proj", inner), ("mlp.up_proj", inner)];
        let gated = if block.ungated { &gated[1..] } else { &gated };
        let biases = block.biases;
        let mut slices = Vec::new();
        for number in own.numbers() {
            let number = number as i64;
            let reads = [hidden, number];
            let output = format!("{layer}.self_attn.o_proj.weight");
            let down = format!("{layer}.mlp.down_proj.weight");
            slices.push(Slice {
                query_key_value: self.joined_rows(
                    layer,
                    &projections,
                    reads,
                    biases.query_key_value,
                )?,
                attention_output: self.columns(
                    &output,
                    [hidden, all * queries],
                    [number, queries],
                )?,
                gate_up: self.joined_rows(layer, gated, reads, biases.feed_forward)?,
                down: self.columns(&down, [hidden, all * inner], [number, inner])?,
            });
        }
        let mut bias = |name: &str, is_there: bool| -> Result<Vec<Tensor>> {
            let name = format!("{layer}.{name}.bias");
            let groups = if is_there { 0..own.numbers().len() } else { 0..0 };
            groups.map(|group| self.leaf_of(&name, &[hidden], Some(group))).collect()
        };
        Ok(Sliced {
            own: own.clone(),
            slices,
            adapters,
            attention_output_bias: bias("self_attn.o_proj", biases.attention_output)?,
            down_bias: bias("mlp.down_proj", biases.feed_forward)?,
        })
    }

    pub(crate) fn layer(&mut self, model: &Model, number: u32, own: &OwnSlices) -> Result<Layer> {
        let layer = format!("model.layers.{number}");
        let norms = LayerNorms::of(model.block.placement);
        let norm = |cutter: &mut Self, name: Option<&str>| -> Result<Option<StreamNorm>> {
            name.map(|name| cutter.stream_norm(&format!("{layer}.{name}"), model, own)).transpose()
        };
        let query_key_norms = match query_key_norm_widths(model) {
            Some(widths) => {
                let [queries, keys] = widths.map(|width| width as i64);
                Some([
                    self.leaf(&format!("{layer}.self_attn.q_norm.weight"), &[queries])?,
                    self.leaf(&format!("{layer}.self_attn.k_norm.weight"), &[keys])?,
                ])
            }
            None => None,
        };
        Ok(Layer {
            attention: model.layer_attention(number),
            query_key_norms,
            matrices: match model.slices {
                1 => Matrices::Whole(self.whole(model, number, &layer)?),
                _ => Matrices::Sliced(self.sliced(model, number, own)?),
            },
            attention_input_norm: norm(self, norms.attention_input)?,
            attention_output_norm: norm(self, norms.attention_output)?,
            feed_forward_input_norm: norm(self, norms.feed_forward_input)?,
            feed_forward_output_norm: norm(self, norms.feed_forward_output)?,
        })
    }

    /// The matrices of a layer, with their adapters.
    fn whole(&mut self, model: &Model, number: u32, layer: &str) -> Result<Whole> {
        let (block, biases) = (&model.block, model.block.biases);
        let (hidden, inner) = (i64::from(model.hidden), i64::from(model.intermediate));
        let (queries, keys) = (i64::from(model.query_width()), i64::from(model.key_width()));
        let mut adapters = Vec::with_capacity(JOINED.len());
        for joined in JOINED {
            adapters.push(self.adapter(model, number, joined)?);
        }
        let mut adapters = adapters.into_iter();
        let mut adapter = || adapters.next().flatten();
        let first = format!("{layer}.self_attn.q_proj");
        let shape = [queries + 2 * keys, hidden];
        let query_key_value = self.linear(&first, shape, biases.query_key_value, adapter())?;
        let output = format!("{layer}.self_attn.o_proj");
        let shape = [hidden, queries];
        let attention_output = self.linear(&output, shape, biases.attention_output, adapter())?;
        let (first, rows) = match block.ungated {
            true => (format!("{layer}.mlp.up_proj"), inner),
            false => (format!("{layer}.mlp.gate_proj"), 2 * inner),
        };
        Ok(Whole {
            query_key_value,
            attention_output,
            gate_up: self.linear(&first, [rows, hidden], biases.feed_forward, adapter())?,
            down: self.linear(
                &format!("{layer}.mlp.down_proj"),
                [hidden, inner],
                biases.feed_forward,
                adapter(),
            )?,
        })
    }
}
