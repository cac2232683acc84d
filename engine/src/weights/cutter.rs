//! Cuts the flat vectors of a stage's weights into views by the weights' names.

use std::collections::BTreeMap;

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Lora, Manifest, Model, Norm};
use tch::Tensor;

use crate::error::Result;
use crate::model::adapter::{Adapter, AdapterSlices};
use crate::model::expert_loads::LayerLoads;
use crate::model::factor::Factor;
use crate::model::layer::{
    AttentionSlice, Dense, DenseSlice, Experts, ExpertsSlice, FeedForward, Latent, Layer, Linear,
    Matrices, NormWeights, Rows, Sliced, SlicedAdapters, SlicedExperts, SlicedFeedForward,
    StreamNorm, Whole,
};
use crate::model::layer_table::{
    AttentionTable, BIASES, DenseTable, ExpertsTable, FeedForwardTable, Joined, KEY_VALUE_NORM,
    LatentTable, Matrix, QUERY_NORM,
};
use crate::model::own_slices::OwnSlices;
use crate::model::parameters::{
    LayerNorms, Parameter, WeightPart, model_parameters, parameters, query_key_norm_widths,
};
use crate::model::routing::Biases;
use crate::numeric::nf4::Window;
use crate::weights::expert_biases::ExpertBiases;
use crate::weights::held::Held;
use crate::weights::leaves::{Leaf, Leaves};
use crate::weights::packed::Packed;

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
    /// Matrices that are packed, and not in `values`.
    pub(crate) packed: Option<&'a Packed>,
    pub(crate) biases: Option<&'a ExpertBiases>,
}

impl Source<'_> {
    /// The elements of `wide` from `offset` of the flat vector on, in this shape.
    pub(crate) fn wide(&self, offset: usize, shape: &[i64]) -> Result<Tensor> {
        cut(self.wide, locate(self.held, offset, 1).0, shape)
    }
}

/// The name of the weight of a layer's matrix.
fn weight_name(layer: u32, matrix: &str) -> String {
    format!("model.layers.{layer}.{matrix}.weight")
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
    /// The matrices of layers, if they are not in `flat`.
    packed: Option<&'a Packed>,
    /// The adapters, if those are trained, and the model's weights are frozen.
    adapters: Option<Adapters<'a>>,
    /// The biases of experts, and what one token counts in their gradient.
    biases: Option<&'a ExpertBiases>,
    unit: f32,
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
        let Source { values: flat, held, packed, biases, .. } = frozen.unwrap_or(trained);
        let offsets = offsets(model_parameters(manifest, stage));
        let unit = match manifest.model.moves_biases() {
            true => (-f32::from(manifest.training.gradient_fraction_bits)).exp2(),
            false => 0.0,
        };
        let leaves = Leaves::default();
        Self { flat, held, offsets, packed, adapters, biases, unit, leaves }
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
    fn adapter(&mut self, layer: u32, joined: &Joined) -> Result<Option<Adapter>> {
        let Some(Adapters { lora, flat, held, parameters }) = &self.adapters else {
            return Ok(None);
        };
        let leaves = &mut self.leaves;
        Adapter::cut(lora, layer, joined, |name, shape| {
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

    /// The adapters of each slice of a layer's joined matrix, which is cut into rows or columns. `slice` is that of one
    /// slice.
    fn sliced_adapter(
        &mut self,
        layer: u32,
        slice: &Joined,
        own: &OwnSlices,
    ) -> Result<Option<AdapterSlices>> {
        let Some(Adapters { lora, flat, held, parameters }) = &self.adapters else {
            return Ok(None);
        };
        let (leaves, mut shared) = (&mut self.leaves, BTreeMap::<String, Tensor>::new());
        let mut adapters = Vec::new();
        let mut of_rows = true;
        for number in own.numbers() {
            let adapter = Adapter::cut(lora, layer, slice, |name, shape| {
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

    /// Adjacent matrices of a layer as one, with their adapters.
    fn linear(&mut self, number: u32, joined: &Joined) -> Result<Linear> {
        let adapter = self.adapter(number, joined)?;
        let first = format!("model.layers.{number}.{}", joined.first());
        let shape = [joined.outputs(), joined.inputs].map(|extent| extent as i64);
        let weight = match self.packed_rows(number, joined, 0, 1) {
            Some(packed) => packed,
            None => Factor::plain(self.leaf(&format!("{first}.weight"), &shape)?),
        };
        let bias = self.joined_bias(number, joined)?;
        Ok(Linear { weight, bias, adapter })
    }

    /// The biases of adjacent matrices of a layer as one, if they have some.
    fn joined_bias(&mut self, number: u32, joined: &Joined) -> Result<Option<Tensor>> {
        let name = format!("model.layers.{number}.{}.bias", joined.first());
        let length = joined.outputs() as i64;
        joined.biased.then(|| self.leaf(&name, &[length])).transpose()
    }

    /// The rows of one of so many slices of adjacent matrices of a layer, if they are packed. `joined` is that of one slice.
    fn packed_rows(&self, number: u32, joined: &Joined, slice: usize, of: u16) -> Option<Factor> {
        let packed = self.packed?;
        let width = joined.inputs as i64;
        let part = |matrix: &Matrix| {
            let elements = matrix.outputs as i64 * width;
            let window = Window {
                weights: i64::from(of) * elements,
                first: slice as i64 * elements,
                rows: matrix.outputs as i64,
                width,
                stride: width,
            };
            (packed.section(&weight_name(number, &matrix.name)), window)
        };
        let (matrices, windows) = joined.matrices.iter().map(part).unzip();
        Some(Factor { matrices, windows })
    }

    /// A matrix of a layer without adapters.
    fn plain(&mut self, number: u32, joined: &Joined) -> Result<Tensor> {
        let name = weight_name(number, joined.first());
        self.leaf(&name, &[joined.outputs() as i64, joined.inputs as i64])
    }

    /// The elements of such a matrix for each group of tokens that this device has.
    fn of_groups(&mut self, number: u32, joined: &Joined, own: &OwnSlices) -> Result<Vec<Tensor>> {
        let name = weight_name(number, joined.first());
        let elements = [(joined.outputs() * joined.inputs) as i64];
        let groups = 0..own.numbers().len();
        groups.map(|group| self.leaf_of(&name, &elements, Some(group))).collect()
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

    /// The rows of one of so many slices of adjacent matrices of a layer. `joined` is that of one slice.
    fn joined_rows(&mut self, number: u32, joined: &Joined, slice: usize, of: u16) -> Result<Rows> {
        let weights = match self.packed_rows(number, joined, slice, of) {
            Some(packed) => packed,
            None => {
                let inputs = joined.inputs as i64;
                let rows = joined.matrices.iter().map(|matrix| {
                    let shape = [matrix.outputs as i64, inputs];
                    self.rows(&weight_name(number, &matrix.name), &shape, slice)
                });
                Factor { matrices: rows.collect::<Result<_>>()?, windows: Vec::new() }
            }
        };
        let mut biases = Vec::new();
        for matrix in joined.matrices.iter().filter(|_| joined.biased) {
            let name = format!("model.layers.{number}.{}.bias", matrix.name);
            biases.push(self.rows(&name, &[matrix.outputs as i64], slice)?);
        }
        Ok(Rows { weights, biases })
    }

    /// The columns of a slice of a matrix of a layer, which is cut into so many slices. `joined` is that of one slice.
    fn slice_columns(
        &mut self,
        number: u32,
        joined: &Joined,
        slice: usize,
        of: u16,
    ) -> Result<Factor> {
        let name = weight_name(number, joined.first());
        let (rows, width) = (joined.outputs() as i64, joined.inputs as i64);
        let (first, stride) = (slice as i64 * width, i64::from(of) * width);
        let Some(packed) = self.packed else {
            let columns = self.columns(&name, [rows, stride], [slice as i64, width])?;
            return Ok(Factor::plain(columns));
        };
        let window = Window { weights: rows * stride, first, rows, width, stride };
        Ok(Factor { matrices: vec![packed.section(&name)], windows: vec![window] })
    }

    /// The biases of a layer's experts, of which there are so many, if it has some.
    fn biases(&mut self, number: u32, experts: Option<usize>) -> Result<Option<Biases>> {
        let (Some(experts), Some(biases)) = (experts, self.biases) else { return Ok(None) };
        let offset = self.offsets[&format!("model.layers.{number}.{BIASES}")];
        let tensor = biases.of_layer(offset, experts)?;
        let tensor = tensor.set_requires_grad(self.adapters.is_none());
        let leaf = Leaf { offset, tensor, part: WeightPart::Whole };
        Ok(Some(Biases { values: self.keep(leaf, None), unit: self.unit }))
    }

    /// A slice of a feed-forward block.
    fn dense_slice(
        &mut self,
        number: u32,
        DenseTable { gate_up, down }: &DenseTable,
        slice: usize,
        of: u16,
    ) -> Result<DenseSlice> {
        Ok(DenseSlice {
            gate_up: self.joined_rows(number, gate_up, slice, of)?,
            down: self.slice_columns(number, down, slice, of)?,
        })
    }

    /// The feed-forward block of a layer in slices, with the table of one slice.
    fn sliced_feed_forward(
        &mut self,
        number: u32,
        table: &FeedForwardTable,
        of: u16,
        own: &OwnSlices,
    ) -> Result<SlicedFeedForward> {
        let ExpertsTable { router, experts, shared, biases } = match table {
            FeedForwardTable::Experts(table) => table,
            FeedForwardTable::Dense(table) => {
                let slices = own.numbers().map(|slice| self.dense_slice(number, table, slice, of));
                return Ok(SlicedFeedForward::Dense(slices.collect::<Result<_>>()?));
            }
        };
        let gate = shared.as_ref().and_then(|(_, gate)| gate.as_ref());
        let router = self.of_groups(number, router, own)?;
        let shared_gate =
            gate.map_or_else(|| Ok(Vec::new()), |gate| self.of_groups(number, gate, own))?;
        let mut slices = Vec::new();
        for slice in own.numbers() {
            let each = experts.iter().map(|table| self.dense_slice(number, table, slice, of));
            let experts = each.collect::<Result<_>>()?;
            let shared =
                shared.as_ref().map(|(table, _)| self.dense_slice(number, table, slice, of));
            slices.push(ExpertsSlice { experts, shared: shared.transpose()? });
        }
        let biases = self.biases(number, *biases)?;
        let loads = LayerLoads::default();
        let experts = SlicedExperts { router, shared_gate, slices, biases, loads };
        Ok(SlicedFeedForward::Experts(experts))
    }

    fn sliced_adapters(
        &mut self,
        number: u32,
        attention: &AttentionTable,
        feed_forward: &FeedForwardTable,
        own: &OwnSlices,
    ) -> Result<SlicedAdapters> {
        let query_key_value = self.sliced_adapter(number, &attention.query_key_value, own)?;
        let attention_output = self.sliced_adapter(number, &attention.output, own)?;
        let [gate_up, down] = match feed_forward {
            FeedForwardTable::Dense(DenseTable { gate_up, down }) => [
                self.sliced_adapter(number, gate_up, own)?,
                self.sliced_adapter(number, down, own)?,
            ],
            FeedForwardTable::Experts(_) => [None, None],
        };
        Ok(SlicedAdapters { query_key_value, attention_output, gate_up, down })
    }

    /// The matrices of a layer in slices, as far as this device computes with them.
    fn sliced(&mut self, model: &Model, number: u32, own: &OwnSlices) -> Result<Sliced> {
        let slice = model.slice();
        let attention = AttentionTable::of(&slice);
        let feed_forward = FeedForwardTable::of(&slice, number);
        let adapters = self.sliced_adapters(number, &attention, &feed_forward, own)?;
        let (of, biases, hidden) = (model.slices, model.block.biases, i64::from(model.hidden));
        let mut slices = Vec::new();
        for slice in own.numbers() {
            slices.push(AttentionSlice {
                query_key_value: self.joined_rows(number, &attention.query_key_value, slice, of)?,
                attention_output: self.slice_columns(number, &attention.output, slice, of)?,
            });
        }
        let feed_forward = self.sliced_feed_forward(number, &feed_forward, of, own)?;
        let mut bias = |name: &str, is_there: bool| -> Result<Vec<Tensor>> {
            let name = format!("model.layers.{number}.{name}.bias");
            let groups = if is_there { 0..own.numbers().len() } else { 0..0 };
            groups.map(|group| self.leaf_of(&name, &[hidden], Some(group))).collect()
        };
        Ok(Sliced {
            own: own.clone(),
            attention: slices,
            feed_forward,
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
        let sinks = (format!("{layer}.self_attn.sinks"), i64::from(model.heads));
        let sinks = model.block.sinks.then(|| self.leaf(&sinks.0, &[sinks.1])).transpose()?;
        Ok(Layer {
            attention: model.layer_attention(number),
            query_key_norms,
            sinks,
            matrices: match model.slices {
                1 => Matrices::Whole(self.whole(model, number)?),
                _ => Matrices::Sliced(self.sliced(model, number, own)?),
            },
            attention_input_norm: norm(self, norms.attention_input)?,
            attention_output_norm: norm(self, norms.attention_output)?,
            feed_forward_input_norm: norm(self, norms.feed_forward_input)?,
            feed_forward_output_norm: norm(self, norms.feed_forward_output)?,
        })
    }

    /// The matrices of a layer, with their adapters.
    fn whole(&mut self, model: &Model, number: u32) -> Result<Whole> {
        let attention = AttentionTable::of(model);
        let latent = attention.latent.as_ref().map(|table| self.latent(number, table));
        Ok(Whole {
            query_key_value: self.linear(number, &attention.query_key_value)?,
            latent: latent.transpose()?.map(Box::new),
            attention_output: self.linear(number, &attention.output)?,
            feed_forward: match FeedForwardTable::of(model, number) {
                FeedForwardTable::Dense(table) => FeedForward::Dense(self.dense(number, &table)?),
                FeedForwardTable::Experts(ExpertsTable { router, experts, shared, biases }) => {
                    let experts = experts.iter().map(|table| self.dense(number, table));
                    let experts = experts.collect::<Result<_>>()?;
                    let shared = shared.as_ref().map(|(table, gate)| -> Result<_> {
                        let gate = gate.as_ref().map(|gate| self.plain(number, gate));
                        Ok((self.dense(number, table)?, gate.transpose()?))
                    });
                    let shared = shared.transpose()?;
                    FeedForward::Experts(Experts {
                        router: self.plain(number, &router)?,
                        router_bias: self.joined_bias(number, &router)?,
                        experts,
                        shared,
                        biases: self.biases(number, biases)?,
                        loads: LayerLoads::default(),
                    })
                }
            },
        })
    }

    fn latent(&mut self, number: u32, table: &LatentTable) -> Result<Latent> {
        let mut behind = |name: &str, joined: &Joined| -> Result<(Tensor, Linear)> {
            let name = format!("model.layers.{number}.{name}.weight");
            Ok((self.leaf(&name, &[joined.inputs as i64])?, self.linear(number, joined)?))
        };
        let queries = table.queries.as_ref().map(|joined| behind(QUERY_NORM, joined));
        Ok(Latent {
            queries: queries.transpose()?,
            keys_values: behind(KEY_VALUE_NORM, &table.keys_values)?,
        })
    }

    /// A feed-forward block, or an expert.
    fn dense(&mut self, number: u32, table: &DenseTable) -> Result<Dense> {
        let gate_up = self.linear(number, &table.gate_up)?;
        Ok(Dense { gate_up, down: self.linear(number, &table.down)? })
    }
}
