//! The weights of a stage: names, shapes, and positions in one flat vector.
//!
//! A stage keeps all its weights in one contiguous f32 vector, in the order in which the layers use
//! them: embedding (first stage) or the expansion of an activation; the layers; norm and head (last
//! stage) or the compression of an activation. Accumulator, all-reduce, optimizer and hash work on
//! that vector. A tied head in another stage than the embedding has a copy of its matrix: a weight
//! group that both stages share (`shoal_protocol::manifest`, weight groups). In a run that trains
//! adapters, the flat vector has these alone, in the order of layers and matrices; the model's
//! weights are another vector, which is frozen and has the same order as above. The names are those of `transformers`' `LlamaForCausalLM`, with those of Gemma 3 and
//! OLMo 2 for norms that Llama lacks; names of trained boundaries begin with `shoal.boundary.` and
//! the stage that the activation leaves.

use std::ops::Range;

use shoal_protocol::ids::{Stage, WeightGroup};
use shoal_protocol::manifest::{
    BoundaryKind, Lora, Manifest, Model, Norm, Placement, QueryKeyNorm,
};

use crate::error::{EngineError, Result};
use crate::model::adapter::{self, Factor};
use crate::model::boundary;
use crate::model::layer_table::{
    self, AttentionTable, FeedForwardTable, Joined, SliceOf, slice_of,
};
use crate::optimizer::carried_elements;

/// Name of the embedding's matrix.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the table of trained positions.
pub(crate) const POSITIONS: &str = "model.embed_positions.weight";
/// Name of the last norm, without `.weight`.
pub(crate) const LAST_NORM: &str = "model.norm";
/// Name of the head's matrix.
pub(crate) const HEAD: &str = "lm_head.weight";

/// The last word of the name of a layer's sinks.
const SINKS: &str = "sinks";

/// One named weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Hugging Face's name, or `shoal.boundary.{stage}.` and its function there.
    pub name: String,
    /// Extents, outermost first; a matrix is `[outputs, inputs]`.
    pub shape: Vec<usize>,
    /// Index of its first element in the stage's flat vector.
    pub offset: usize,
}

impl Parameter {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements, which is never the case.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The range of its elements in the stage's flat vector.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len()
    }

    /// Whether weight decay applies: to matrices, not to vectors (norms and biases).
    #[must_use]
    pub fn decays(&self) -> bool {
        self.shape.len() > 1
    }

    /// Whether it is a matrix of a layer, or of an adapter beside one; not an embedding, a head or a trained
    /// boundary.
    #[must_use]
    pub fn is_layer_matrix(&self) -> bool {
        let name = self.name.strip_prefix(adapter::PREFIX).unwrap_or(&self.name);
        self.shape.len() == 2 && name.starts_with("model.layers.")
    }

    /// Whether it is the biases with which tokens choose a layer's experts. Their gradient is numbers of tokens: it is not
    /// part of the gradient's norm, and no optimizer sees it.
    #[must_use]
    pub fn is_biases_of_experts(&self) -> bool {
        self.name.ends_with(layer_table::BIASES)
    }

    /// Whether training from noise begins it with zeros: biases add nothing at first, and sinks are neither large nor small.
    pub(crate) fn begins_with_zeros(&self) -> bool {
        let last = self.name.rsplit('.').next();
        self.is_biases_of_experts() || matches!(last, Some("bias" | SINKS))
    }

    /// Whether it is a matrix of attention or of a feed-forward block, which a run may have packed in few bits while it is
    /// frozen.
    pub(crate) fn is_packable(&self) -> bool {
        self.is_layer_matrix() && layer_table::is_packable(layer_table::last_word(&self.name))
    }
}

/// The range of adjacent weights in the flat vector.
pub(crate) fn range_of(parameters: &[Parameter]) -> Range<usize> {
    let start = parameters.first().map_or(0, |first| first.offset);
    start..parameters.last().map_or(start, |last| last.range().end)
}

/// A part of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WeightPart {
    /// All of it.
    Whole,
    /// Rows that one slice has.
    Rows,
    /// Columns that one slice has, of rows that are so many elements apart.
    Columns(usize),
}

impl Parameter {
    /// The part that a slice has, in a run with slices.
    pub(crate) fn part_of_slice(&self) -> WeightPart {
        if self.name == EMBEDDING || self.name == HEAD {
            return WeightPart::Rows;
        }
        let mut words = self.name.rsplit('.');
        let (kind, mut module) = (words.next(), words.next());
        // An adapter's first matrix reads what the matrix reads, and its second writes what that writes.
        let factor = module.filter(|module| module.starts_with("lora_"));
        if factor.is_some() {
            module = words.next();
        }
        match (module.and_then(slice_of), kind, factor) {
            (Some(SliceOf::Rows), _, factor) if factor != Some("lora_A") => WeightPart::Rows,
            (Some(SliceOf::Columns), Some("weight"), factor) if factor != Some("lora_B") => {
                WeightPart::Columns(self.shape[1])
            }
            _ => WeightPart::Whole,
        }
    }
}

/// A growing list of weights.
#[derive(Default)]
struct List {
    parameters: Vec<Parameter>,
    length: usize,
}

impl List {
    fn add(&mut self, name: impl Into<String>, shape: &[usize]) {
        let parameter = Parameter { name: name.into(), shape: shape.to_vec(), offset: self.length };
        self.length += parameter.len();
        self.parameters.push(parameter);
    }

    fn norm(&mut self, name: &str, kind: Norm, width: usize) {
        self.add(format!("{name}.weight"), &[width]);
        if kind == Norm::Layer {
            self.add(format!("{name}.bias"), &[width]);
        }
    }

    /// Matrices that read the same input, then their biases.
    fn joined(&mut self, layer: &str, joined: &Joined) {
        for matrix in &joined.matrices {
            self.add(format!("{layer}.{}.weight", matrix.name), &[matrix.outputs, joined.inputs]);
        }
        for matrix in joined.matrices.iter().filter(|_| joined.biased) {
            self.add(format!("{layer}.{}.bias", matrix.name), &[matrix.outputs]);
        }
    }

    fn embedding(&mut self, model: &Model) {
        let (vocabulary, hidden) = (model.vocabulary as usize, model.hidden as usize);
        self.add(EMBEDDING, &[vocabulary, hidden]);
        if let Some(positions) = model.block.learned_positions {
            self.add(POSITIONS, &[positions as usize, hidden]);
        }
    }

    fn head(&mut self, model: &Model, has_matrix: bool) {
        let (vocabulary, hidden) = (model.vocabulary as usize, model.hidden as usize);
        self.norm(LAST_NORM, model.block.norm, hidden);
        if has_matrix {
            self.add(HEAD, &[vocabulary, hidden]);
        }
    }

    fn layer(&mut self, model: &Model, number: u32) {
        let (block, hidden) = (&model.block, model.hidden as usize);
        let attention = AttentionTable::of(model);
        let layer = format!("model.layers.{number}");
        let norms = LayerNorms::of(block.placement);
        let add_norm = |list: &mut Self, name: Option<&str>| {
            if let Some(name) = name {
                list.norm(&format!("{layer}.{name}"), block.norm, hidden);
            }
        };
        add_norm(self, norms.attention_input);
        self.joined(&layer, &attention.query_key_value);
        if let Some([queries, keys]) = query_key_norm_widths(model) {
            self.norm(&format!("{layer}.self_attn.q_norm"), Norm::Rms, queries);
            self.norm(&format!("{layer}.self_attn.k_norm"), Norm::Rms, keys);
        }
        if let Some(latent) = &attention.latent {
            for (name, width) in latent.norms() {
                self.norm(&format!("{layer}.{name}"), Norm::Rms, width);
            }
            latent.joined().for_each(|joined| self.joined(&layer, joined));
        }
        self.joined(&layer, &attention.output);
        if block.sinks {
            self.add(format!("{layer}.self_attn.{SINKS}"), &[model.heads as usize]);
        }
        add_norm(self, norms.attention_output);
        add_norm(self, norms.feed_forward_input);
        let feed_forward = FeedForwardTable::of(model, number);
        feed_forward.joined().into_iter().for_each(|joined| self.joined(&layer, joined));
        if let Some(experts) = feed_forward.biases() {
            self.add(format!("{layer}.{}", layer_table::BIASES), &[experts]);
        }
        add_norm(self, norms.feed_forward_output);
    }
}

impl List {
    /// The adapters of a layer. Those of the first factor that read the same input are adjacent.
    fn adapters(&mut self, model: &Model, lora: &Lora, layer: u32) {
        let rank = lora.rank as usize;
        for joined in layer_table::adapted(model, layer) {
            for factor in [Factor::A, Factor::B] {
                for (target, matrix) in joined.targets() {
                    if lora.targets.contains(&target) {
                        let of_a = factor == Factor::A;
                        let shape =
                            if of_a { [rank, joined.inputs] } else { [matrix.outputs, rank] };
                        self.add(adapter::name(layer, matrix, factor), &shape);
                    }
                }
            }
        }
    }
}

/// Names of a layer's norms, as far as it has them.
pub(crate) struct LayerNorms {
    pub(crate) attention_input: Option<&'static str>,
    pub(crate) attention_output: Option<&'static str>,
    pub(crate) feed_forward_input: Option<&'static str>,
    pub(crate) feed_forward_output: Option<&'static str>,
}

impl LayerNorms {
    pub(crate) fn of(placement: Placement) -> Self {
        let (input, attention) = (Some("input_layernorm"), Some("post_attention_layernorm"));
        let (before, after) =
            (Some("pre_feedforward_layernorm"), Some("post_feedforward_layernorm"));
        let [attention_input, attention_output, feed_forward_input, feed_forward_output] =
            match placement {
                Placement::Before | Placement::Parallel => [input, None, attention, None],
                Placement::After => [None, attention, None, after],
                Placement::Both => [input, attention, before, after],
            };
        Self { attention_input, attention_output, feed_forward_input, feed_forward_output }
    }
}

/// Widths of the norms of queries and keys, if there are any.
pub(crate) fn query_key_norm_widths(model: &Model) -> Option<[usize; 2]> {
    let head = model.head_size() as usize;
    match model.block.query_key_norm {
        QueryKeyNorm::None => None,
        QueryKeyNorm::Head => Some([head, head]),
        QueryKeyNorm::All => Some([model.query_width() as usize, model.key_width() as usize]),
    }
}

/// The trained weights of a stage in the order of its flat vector.
///
/// # Panics
/// If the run has no such stage.
#[must_use]
pub fn parameters(manifest: &Manifest, stage: Stage) -> Vec<Parameter> {
    let Some(lora) = &manifest.lora else { return model_parameters(manifest, stage) };
    let mut list = List::default();
    for layer in manifest.layers_of(stage) {
        list.adapters(&manifest.model, lora, layer);
    }
    list.parameters
}

/// The model's weights in a stage, in the order of their flat vector: those that are trained or, in
/// a run that trains adapters, frozen.
pub(crate) fn model_parameters(manifest: &Manifest, stage: Stage) -> Vec<Parameter> {
    let model = &manifest.model;
    let hidden = model.hidden as usize;
    let mut list = List::default();
    if stage == Stage(0) {
        list.embedding(model);
    }
    if let Some(trained) = boundary::before(manifest, stage) {
        let name = boundary::weight_name(Stage(stage.0 - 1), "expand");
        list.add(name, &[hidden, trained.width as usize]);
    }
    for layer in manifest.layers_of(stage) {
        list.layer(model, layer);
    }
    if let Some(trained) = boundary::after(manifest, stage) {
        let width = trained.width as usize;
        list.add(boundary::weight_name(stage, "input_norm"), &[hidden]);
        if trained.kind == BoundaryKind::Bottleneck {
            list.add(boundary::weight_name(stage, "compress"), &[width, hidden]);
        }
        list.add(boundary::weight_name(stage, "output_norm"), &[width]);
    }
    if stage == manifest.last_stage() {
        list.head(model, !model.block.tied || manifest.training.stages > 1);
    }
    list.parameters
}

/// The range of a weight group in the vector that replicas of a stage that has it sum up. Ranges of different groups
/// do not overlap, and together they are the vector.
pub(crate) fn range_in_stage(
    manifest: &Manifest,
    stage: Stage,
    weights: WeightGroup,
) -> Range<usize> {
    let count = summed_elements(manifest, stage);
    let shared = manifest.groups_of(stage).nth(1);
    let matrix = match shared {
        Some(_) => manifest.model.vocabulary as usize * manifest.model.hidden as usize,
        None => 0,
    };
    // The embedding is the first weight of its stage, the head's matrix the last.
    match (stage == Stage(0), shared == Some(weights)) {
        (true, true) => 0..matrix,
        (true, false) => matrix..count,
        (false, true) => count - matrix..count,
        (false, false) => 0..count - matrix,
    }
}

/// A range of a weight group as a range of the flat vector, in which the group is at this place.
///
/// # Errors
/// If the group has no such range.
pub(crate) fn range_within(group: &Range<usize>, range: Range<usize>) -> Result<Range<usize>> {
    let (expected, found) = (group.len(), range.end);
    if found > expected {
        let what = "a range of sums";
        return Err(EngineError::WrongLength { what, expected, found });
    }
    Ok(group.start + range.start..group.start + range.end)
}

/// Number of elements of the vector that replicas of a stage sum up: those of its weights, and of what workers carry.
#[must_use]
pub fn summed_elements(manifest: &Manifest, stage: Stage) -> usize {
    parameter_count(manifest, stage) + carried_elements(manifest, stage)
}

/// Number of elements that are summed for a weight group.
///
/// # Panics
/// If the run has no such group.
#[must_use]
pub fn group_elements(manifest: &Manifest, weights: WeightGroup) -> usize {
    let stage = manifest.stages_of(weights).next().expect("a group has a stage");
    range_in_stage(manifest, stage, weights).len()
}

/// The weight whose values a weight begins with: a head that is tied, or was, with the embedding's.
pub(crate) fn source_of(parameter: &Parameter, head_is_embedding: bool) -> &str {
    if head_is_embedding && parameter.name == HEAD { EMBEDDING } else { &parameter.name }
}

/// The weights of an uncut model without trained boundaries.
pub(crate) fn all_parameters(model: &Model) -> Vec<Parameter> {
    let mut list = List::default();
    list.embedding(model);
    (0..model.layers).for_each(|layer| list.layer(model, layer));
    list.head(model, !model.block.tied);
    list.parameters
}

/// Number of frozen weights of a stage.
#[must_use]
pub fn frozen_count(manifest: &Manifest, stage: Stage) -> usize {
    let frozen = manifest.lora.as_ref().map(|_| model_parameters(manifest, stage));
    frozen.iter().flatten().map(Parameter::len).sum()
}

/// Number of elements of a stage's flat vector.
#[must_use]
pub fn parameter_count(manifest: &Manifest, stage: Stage) -> usize {
    parameters(manifest, stage).iter().map(Parameter::len).sum()
}
