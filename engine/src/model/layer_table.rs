//! The matrices of a decoder layer: one table for each kind of block, which says what a layer has and in which order. The
//! flat vector, its views, slices, adapters, operations and memory follow from it.

use shoal_protocol::manifest::{Experts, LoraTarget, Model};

/// A matrix `[outputs, inputs]` of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Matrix {
    /// Its name after that of the layer, without `.weight`.
    pub(crate) name: String,
    pub(crate) outputs: usize,
    /// The adapter that it may have.
    pub(crate) target: Option<LoraTarget>,
}

/// Adjacent matrices that read the same input and are one product; their biases follow them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Joined {
    pub(crate) matrices: Vec<Matrix>,
    pub(crate) inputs: usize,
    pub(crate) biased: bool,
}

impl Joined {
    fn new<const N: usize>(matrices: [(String, u32); N], inputs: u32) -> Self {
        let matrix = |(name, outputs)| Matrix { name, outputs: outputs as usize, target: None };
        let matrices = matrices.into_iter().map(matrix).collect();
        Self { matrices, inputs: inputs as usize, biased: false }
    }

    fn biased(self, biased: bool) -> Self {
        Self { biased, ..self }
    }

    /// The same, with an adapter for each matrix that is a target.
    fn adapted(mut self) -> Self {
        for matrix in &mut self.matrices {
            let last = last_word(&matrix.name);
            matrix.target = LoraTarget::ALL.into_iter().find(|one| one.matrix() == last);
        }
        self
    }

    /// Rows of the product's matrix.
    pub(crate) fn outputs(&self) -> usize {
        self.matrices.iter().map(|matrix| matrix.outputs).sum()
    }

    /// The name of the first matrix.
    pub(crate) fn first(&self) -> &str {
        &self.matrices[0].name
    }

    /// Its matrices that may have adapters, in order, and their targets.
    pub(crate) fn targets(&self) -> impl Iterator<Item = (LoraTarget, &Matrix)> {
        self.matrices.iter().filter_map(|matrix| Some((matrix.target?, matrix)))
    }
}

/// The matrices of attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AttentionTable {
    /// Queries, keys and values, or what latent attention has in their place: queries, or the numbers from which they follow;
    /// and those from which keys and values do, with the rotated channels of the keys.
    pub(crate) query_key_value: Joined,
    pub(crate) latent: Option<LatentTable>,
    pub(crate) output: Joined,
}

/// What makes queries, keys and values of few numbers of a token, each after a norm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LatentTable {
    /// None where queries are there already.
    pub(crate) queries: Option<Joined>,
    /// Of each head the channels of its key that are not rotated, then its value.
    pub(crate) keys_values: Joined,
}

/// Names of the norms in latent attention, after the layer's name and without `.weight`.
pub(crate) const QUERY_NORM: &str = "self_attn.q_a_layernorm";
pub(crate) const KEY_VALUE_NORM: &str = "self_attn.kv_a_layernorm";

impl LatentTable {
    /// Widths of the norms by name.
    pub(crate) fn norms(&self) -> impl Iterator<Item = (&'static str, usize)> + '_ {
        let queries = self.queries.iter().map(|joined| (QUERY_NORM, joined.inputs));
        queries.chain([(KEY_VALUE_NORM, self.keys_values.inputs)])
    }

    pub(crate) fn joined(&self) -> impl Iterator<Item = &Joined> {
        self.queries.iter().chain([&self.keys_values])
    }
}

impl AttentionTable {
    /// The same in every layer of a model.
    pub(crate) fn of(model: &Model) -> Self {
        let (queries, keys, biases) = (model.query_width(), model.key_width(), model.block.biases);
        let name = |part: &str| format!("self_attn.{part}");
        let output = Joined::new([(name("o_proj"), model.hidden)], model.value_width());
        let output = output.biased(biases.attention_output).adapted();
        let Some(latent) = model.block.latent else {
            let parts = [(name("q_proj"), queries), (name("k_proj"), keys), (name("v_proj"), keys)];
            let query_key_value = Joined::new(parts, model.hidden);
            let query_key_value = query_key_value.biased(biases.query_key_value).adapted();
            return Self { query_key_value, latent: None, output };
        };
        let first = match latent.queries {
            Some(numbers) => (name("q_a_proj"), numbers),
            None => (name("q_proj"), queries),
        };
        let shared = (name("kv_a_proj_with_mqa"), latent.keys_values + latent.rotated);
        let query_key_value = Joined::new([first, shared], model.hidden);
        let of_head = model.head_size() - latent.rotated + latent.value_size;
        let keys_values = [(name("kv_b_proj"), model.heads * of_head)];
        let of_queries = |numbers| Joined::new([(name("q_b_proj"), queries)], numbers);
        Self {
            query_key_value: query_key_value.biased(biases.query_key_value).adapted(),
            latent: Some(LatentTable {
                queries: latent.queries.map(of_queries),
                keys_values: Joined::new(keys_values, latent.keys_values),
            }),
            output,
        }
    }

    /// Its products in the order of the flat vector.
    pub(crate) fn joined(&self) -> impl Iterator<Item = &Joined> {
        let latent = self.latent.iter().flat_map(LatentTable::joined);
        [&self.query_key_value].into_iter().chain(latent).chain([&self.output])
    }
}

/// The matrices of a single feed-forward block, or of an expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DenseTable {
    /// The gate, unless the block has none, and the inner values.
    pub(crate) gate_up: Joined,
    pub(crate) down: Joined,
}

impl DenseTable {
    /// The block of this name and width.
    fn new(model: &Model, name: &str, inner: u32) -> Self {
        let part = |part: &str, outputs| (format!("{name}.{part}"), outputs);
        let (up, hidden) = (part("up_proj", inner), model.hidden);
        let gate_up = match model.block.ungated {
            true => Joined::new([up], hidden),
            false => Joined::new([part("gate_proj", inner), up], hidden),
        };
        Self { gate_up, down: Joined::new([part("down_proj", hidden)], inner) }
    }

    fn biased(self, biased: bool) -> Self {
        Self { gate_up: self.gate_up.biased(biased), down: self.down.biased(biased) }
    }

    fn adapted(self) -> Self {
        Self { gate_up: self.gate_up.adapted(), down: self.down.adapted() }
    }
}

/// The matrices of a mixture of experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExpertsTable {
    /// A logit for each expert.
    pub(crate) router: Joined,
    pub(crate) experts: Vec<DenseTable>,
    /// An expert of all tokens, and the product whose sigmoid weighs it, if one does.
    pub(crate) shared: Option<(DenseTable, Option<Joined>)>,
    /// A number for each expert, if tokens choose with biases.
    pub(crate) biases: Option<usize>,
}

/// Names of experts end in this and their number.
const EXPERTS: &str = "mlp.experts";
/// The biases with which tokens choose the experts of a layer, by DeepSeek-V3's name.
pub(crate) const BIASES: &str = "mlp.gate.e_score_correction_bias";

impl ExpertsTable {
    fn new(model: &Model, experts: &Experts) -> Self {
        let (hidden, biased) = (model.hidden, model.block.biases.feed_forward);
        let each = |number| {
            let table =
                DenseTable::new(model, &format!("{EXPERTS}.{number}"), experts.intermediate);
            table.biased(biased).adapted()
        };
        let shared = experts.shared_intermediate.map(|inner| {
            let gate = || Joined::new([("mlp.shared_expert_gate".to_owned(), 1)], hidden);
            let gate = experts.shared_gated.then(gate);
            (DenseTable::new(model, "mlp.shared_expert", inner), gate)
        });
        Self {
            router: Joined::new([("mlp.gate".to_owned(), experts.count)], hidden).biased(biased),
            experts: (0..experts.count).map(each).collect(),
            shared,
            biases: experts.has_biases().then_some(experts.count as usize),
        }
    }
}

/// The matrices of a feed-forward block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FeedForwardTable {
    Dense(DenseTable),
    Experts(ExpertsTable),
}

impl FeedForwardTable {
    /// That of a layer of a model.
    pub(crate) fn of(model: &Model, layer: u32) -> Self {
        if let Some(experts) = model.experts_of(layer) {
            return Self::Experts(ExpertsTable::new(model, experts));
        }
        let biased = model.block.biases.feed_forward;
        let table = DenseTable::new(model, "mlp", model.intermediate).biased(biased);
        // In a mixture it is experts that have adapters of these names, as in PEFT.
        Self::Dense(if model.block.experts.is_some() { table } else { table.adapted() })
    }

    /// The number of biases of experts, after all matrices in the flat vector; none without.
    pub(crate) fn biases(&self) -> Option<usize> {
        match self {
            Self::Dense(_) => None,
            Self::Experts(table) => table.biases,
        }
    }

    /// Its products in the order of the flat vector.
    pub(crate) fn joined(&self) -> Vec<&Joined> {
        match self {
            Self::Dense(DenseTable { gate_up, down }) => vec![gate_up, down],
            Self::Experts(ExpertsTable { router, experts, shared, biases: _ }) => {
                let mut all = vec![router];
                all.extend(experts.iter().flat_map(|expert| [&expert.gate_up, &expert.down]));
                if let Some((expert, gate)) = shared {
                    all.extend([&expert.gate_up, &expert.down]);
                    all.extend(gate);
                }
                all
            }
        }
    }
}

/// Products of layers that may have adapters, in the order of the flat vector: those of attention, then those of a single
/// feed-forward block, or of each expert that tokens choose.
pub(crate) fn adapted(model: &Model, layer: u32) -> Vec<Joined> {
    let AttentionTable { query_key_value, latent: _, output } = AttentionTable::of(model);
    let blocks = match FeedForwardTable::of(model, layer) {
        FeedForwardTable::Dense(table) => vec![table],
        FeedForwardTable::Experts(table) => table.experts,
    };
    let blocks = blocks.into_iter().flat_map(|DenseTable { gate_up, down }| [gate_up, down]);
    [query_key_value, output].into_iter().chain(blocks).collect()
}

/// Width of the feed-forward block of a layer for each token: with experts those that it has, together.
pub(crate) fn inner_width(model: &Model, layer: u32) -> u64 {
    let Some(experts) = model.experts_of(layer) else { return u64::from(model.intermediate) };
    let chosen = u64::from(experts.per_token) * u64::from(experts.intermediate);
    chosen + u64::from(experts.shared_intermediate.unwrap_or(0))
}

/// Bytes beside the inner values that a backward pass reads of a layer's experts, for each token, where a number of passes
/// has so many: the inputs and outputs of those that the token has; the shares of all experts in f32 as computed and as
/// sorted, with their numbers; and of each choice its weight in f32 and both its places. Each slice has them all. A router
/// in f32 reads its input in f32, once.
pub(crate) fn routed_bytes(model: &Model, layer: u32, size: u64) -> u64 {
    let Some(experts) = model.experts_of(layer) else { return 0 };
    let (each, hidden) = (u64::from(experts.per_token), u64::from(model.hidden));
    let shared = experts.shared_intermediate.map_or(0, |_| size * hidden + 8);
    let routed = each * (2 * size * hidden + 4 + 16) + (4 + 4 + 8) * u64::from(experts.count);
    let wide = if experts.wide_router && size < 4 { 4 * hidden } else { 0 };
    // The gradient of a loss that balances them, in f32, is in the first slice alone.
    let balance = if model.has_balance_loss() { 4 * u64::from(experts.count) } else { 0 };
    u64::from(model.slices) * (routed + shared) + wide + balance
}

/// Elements of the largest matrix of a layer's feed-forward block that has one gradient.
pub(crate) fn largest_product(model: &Model, layer: u32) -> u64 {
    let table = FeedForwardTable::of(model, layer);
    let elements = |joined: &Joined| (joined.outputs() * joined.inputs) as u64;
    table.joined().into_iter().map(elements).max().unwrap_or(0)
}

/// Elements of the largest product of a layer whose matrices slices divide.
pub(crate) fn largest_packed(model: &Model, layer: u32) -> u64 {
    let attention = AttentionTable::of(model);
    let elements = |joined: &Joined| (joined.outputs() * joined.inputs) as u64;
    let attention = attention.joined().map(elements).max().unwrap_or(0);
    // A router is smaller than an expert's matrices, or is read as it is.
    attention.max(largest_product(model, layer))
}

/// The share of tokens that a weight of a layer is multiplied with.
pub(crate) fn share_of_tokens(model: &Model, name: &str) -> f64 {
    match &model.block.experts {
        Some(experts) if name.contains(&format!(".{EXPERTS}.")) => {
            f64::from(experts.per_token) / f64::from(experts.count)
        }
        _ => 1.0,
    }
}

/// Whether the output of a matrix is added to the residual stream, perhaps times a number for each token.
pub(crate) fn joins_stream(name: &str) -> bool {
    [".o_proj.", ".down_proj."].iter().any(|part| name.contains(part))
}

/// Width of what a token's queries, keys and values follow from, and of what heads have read, in latent attention.
pub(crate) fn latent_width(model: &Model) -> u64 {
    let Some(latent) = model.block.latent else { return 0 };
    let numbers = latent.queries.unwrap_or(0) + latent.keys_values + latent.rotated;
    u64::from(numbers) + u64::from(model.value_width())
}

/// Whether a matrix of a layer, by the last word of its name, is one of those that a run may have packed.
pub(crate) fn is_packable(matrix: &str) -> bool {
    let latent = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"];
    slice_of(matrix).is_some() || latent.contains(&matrix)
}

/// The last word of a matrix's name, or of its weight's, which names it among those of a block.
pub(crate) fn last_word(name: &str) -> &str {
    let name = name.trim_end_matches(".weight");
    name.rsplit_once('.').map_or(name, |(_, last)| last)
}

/// What a slice has of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SliceOf {
    Rows,
    Columns,
}

/// How slices divide a matrix of a layer, by the last word of its name; `None` has all of it in every slice.
pub(crate) fn slice_of(matrix: &str) -> Option<SliceOf> {
    match matrix {
        "q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj" => Some(SliceOf::Rows),
        "o_proj" | "down_proj" => Some(SliceOf::Columns),
        _ => None,
    }
}
