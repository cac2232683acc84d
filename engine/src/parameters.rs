//! The weights of a stage: names, shapes, and positions in one flat vector.
//!
//! A stage keeps all its weights in one contiguous f32 vector, in the order in which the layers use
//! them: embedding (first stage) or the expansion of an activation; for each layer
//! `input_layernorm`, `q_proj`, `k_proj`, `v_proj`, `o_proj`, `post_attention_layernorm`,
//! `gate_proj`, `up_proj`, `down_proj`; norm and head (last stage) or the compression of an
//! activation. Accumulator, all-reduce, optimizer and hash work on that vector. The names are those
//! of `transformers`' `LlamaForCausalLM`; names of trained boundaries, which Llama lacks, begin
//! with `shoal.boundary.` and the stage that the activation leaves.

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{BoundaryKind, Manifest};

use crate::boundary;

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
    pub fn range(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.len()
    }

    /// Whether weight decay applies: to matrices, not to the norms' vectors.
    #[must_use]
    pub fn decays(&self) -> bool {
        self.shape.len() > 1
    }
}

/// The weights of a stage in the order of its flat vector.
///
/// # Panics
/// If the run has no such stage.
#[must_use]
pub fn parameters(manifest: &Manifest, stage: Stage) -> Vec<Parameter> {
    let model = &manifest.model;
    let size = |value: u32| value as usize;
    let hidden = size(model.hidden);
    let queries = hidden;
    let keys = hidden / size(model.heads) * size(model.key_value_heads);
    let inner = size(model.intermediate);
    let mut list = Vec::new();
    let mut offset = 0;
    let mut add = |name: String, shape: &[usize]| {
        let parameter = Parameter { name, shape: shape.to_vec(), offset };
        offset += parameter.len();
        list.push(parameter);
    };
    if stage == Stage(0) {
        add("model.embed_tokens.weight".to_owned(), &[size(model.vocabulary), hidden]);
    }
    if let Some(trained) = boundary::before(manifest, stage) {
        let name = boundary::weight_name(Stage(stage.0 - 1), "expand");
        add(name, &[hidden, size(trained.width)]);
    }
    for layer in manifest.layers_of(stage) {
        let mut add = |part: &str, shape: &[usize]| {
            add(format!("model.layers.{layer}.{part}.weight"), shape);
        };
        add("input_layernorm", &[hidden]);
        add("self_attn.q_proj", &[queries, hidden]);
        add("self_attn.k_proj", &[keys, hidden]);
        add("self_attn.v_proj", &[keys, hidden]);
        add("self_attn.o_proj", &[hidden, queries]);
        add("post_attention_layernorm", &[hidden]);
        add("mlp.gate_proj", &[inner, hidden]);
        add("mlp.up_proj", &[inner, hidden]);
        add("mlp.down_proj", &[hidden, inner]);
    }
    if let Some(trained) = boundary::after(manifest, stage) {
        let width = size(trained.width);
        let mut add = |part: &str, shape: &[usize]| {
            add(boundary::weight_name(stage, part), shape);
        };
        add("input_norm", &[hidden]);
        if trained.kind == BoundaryKind::Bottleneck {
            add("compress", &[width, hidden]);
        }
        add("output_norm", &[width]);
    }
    if stage == manifest.last_stage() {
        add("model.norm.weight".to_owned(), &[hidden]);
        add("lm_head.weight".to_owned(), &[size(model.vocabulary), hidden]);
    }
    list
}

/// Number of elements of a stage's flat vector.
#[must_use]
pub fn parameter_count(manifest: &Manifest, stage: Stage) -> usize {
    parameters(manifest, stage).iter().map(Parameter::len).sum()
}
