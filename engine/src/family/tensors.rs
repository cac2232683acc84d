//! Where a family's files have each weight of this engine.
//!
//! Most families use Llama's names. Some fuse matrices, transpose them, or interleave heads; a
//! [`Location`] describes that, in both directions.

use shoal_protocol::manifest::Model;

use super::Naming;
use crate::model::parameters::{EMBEDDING, HEAD, LAST_NORM, POSITIONS, Parameter};

/// Where a file has a weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Location {
    /// The tensor's name in the file.
    pub(crate) tensor: String,
    /// The shape of the whole tensor.
    pub(crate) shape: Vec<usize>,
    /// The tensor's row of the weight's first row.
    start: usize,
    /// Rows of a head, the place of the weight's rows in each group, and the weights in a group, if
    /// the tensor has heads one after the other.
    interleaved: Option<[usize; 3]>,
    /// Whether the tensor is `[inputs, outputs]`.
    transposed: bool,
    /// The expert whose part it is, if the tensor has all of a layer, one after the other.
    expert: Option<usize>,
}

impl Location {
    fn whole(tensor: impl Into<String>, parameter: &Parameter) -> Self {
        Self {
            tensor: tensor.into(),
            shape: parameter.shape.clone(),
            start: 0,
            interleaved: None,
            transposed: false,
            expert: None,
        }
    }

    /// Rows from `start` of a tensor of `rows` rows.
    fn rows(tensor: impl Into<String>, parameter: &Parameter, start: usize, rows: usize) -> Self {
        let mut location = Self::whole(tensor, parameter);
        location.start = start;
        location.shape[0] = rows;
        location
    }

    /// The same in a tensor with the weights of all `experts`: the part of the one with this number.
    fn of_expert(mut self, expert: usize, experts: usize) -> Self {
        self.expert = Some(expert);
        self.shape.insert(0, experts);
        self
    }

    fn transposed(mut self) -> Self {
        self.transposed = self.shape.len() == 2;
        if self.transposed {
            self.shape.reverse();
        }
        self
    }

    /// Whether the tensor is the weight as it is.
    pub(crate) fn is_whole(&self, parameter: &Parameter) -> bool {
        let Self { tensor: _, shape, start, interleaved, transposed, expert } = self;
        let is_part = interleaved.is_some() || *transposed || expert.is_some();
        *shape == parameter.shape && *start == 0 && !is_part
    }

    /// The number of its expert, and outputs and inputs of one, if the tensor has matrices `[inputs, outputs]` of all experts.
    pub(crate) fn matrix_of_expert(&self) -> Option<(usize, [usize; 2])> {
        match (self.expert, self.shape.as_slice(), self.transposed) {
            (Some(expert), [_, inputs, outputs], true) => Some((expert, [*outputs, *inputs])),
            _ => None,
        }
    }

    /// The row, or the column of one that is transposed, which has a row of the weight.
    pub(crate) fn row(&self, row: usize) -> usize {
        match self.interleaved {
            None => self.start + row,
            Some([size, place, group]) => (row / size * group + place) * size + row % size,
        }
    }

    /// Calls `copy(place in the tensor, place in the weight, elements)` for runs of elements that are
    /// adjacent in both. `rows` and `width` are the weight's.
    fn runs(&self, rows: usize, width: usize, mut copy: impl FnMut(usize, usize, usize)) {
        let first =
            self.expert.map_or(0, |expert| expert * self.shape[1..].iter().product::<usize>());
        let columns = self.shape.last().filter(|_| self.transposed).copied().unwrap_or(width);
        for row in 0..rows {
            let there = self.row(row);
            if self.transposed {
                (0..width).for_each(|column| {
                    copy(first + column * columns + there, row * width + column, 1);
                });
            } else {
                copy(first + there * columns, row * width, width);
            }
        }
    }

    /// Copies the weight's elements, each of `size` bytes, out of the tensor's data.
    pub(crate) fn read(&self, data: &[u8], parameter: &Parameter, size: usize) -> Vec<u8> {
        let (rows, width) = extents(parameter);
        let mut weight = vec![0; parameter.len() * size];
        self.runs(rows, width, |from, to, count| {
            weight[to * size..(to + count) * size]
                .copy_from_slice(&data[from * size..(from + count) * size]);
        });
        weight
    }

    /// Copies the weight's elements into the tensor's data.
    pub(crate) fn write(&self, weight: &[u8], parameter: &Parameter, size: usize, data: &mut [u8]) {
        let (rows, width) = extents(parameter);
        self.runs(rows, width, |to, from, count| {
            data[to * size..(to + count) * size]
                .copy_from_slice(&weight[from * size..(from + count) * size]);
        });
    }
}

fn extents(parameter: &Parameter) -> (usize, usize) {
    (parameter.shape[0], parameter.shape.get(1).copied().unwrap_or(1))
}

/// Where a family's files have a weight.
pub(crate) fn locate(naming: Naming, model: &Model, parameter: &Parameter) -> Location {
    match naming {
        Naming::Llama => Location::whole(&parameter.name, parameter),
        Naming::Phi3 => phi3(model, parameter),
        Naming::NeoX => neox(model, parameter),
        Naming::Gpt2 => gpt2(model, parameter),
        Naming::Mixtral => mixtral(parameter),
        Naming::GptOss => gpt_oss(model, parameter),
        Naming::DeepSeek => {
            let name = parameter.name.replace("mlp.shared_expert.", "mlp.shared_experts.");
            Location::whole(name, parameter)
        }
    }
}

/// Index of queries, keys or values, and what the name is without it.
fn projection(name: &str) -> Option<(usize, [String; 2])> {
    let parts = ["q_proj", "k_proj", "v_proj"];
    let index = parts.iter().position(|part| name.contains(part))?;
    let (layer, kind) = name.split_once(&format!("self_attn.{}", parts[index]))?;
    Some((index, [layer.to_owned(), kind.to_owned()]))
}

fn phi3(model: &Model, parameter: &Parameter) -> Location {
    let name = &parameter.name;
    let (queries, keys) = (model.query_width() as usize, model.key_width() as usize);
    let inner = model.intermediate as usize;
    if let Some((index, [layer, kind])) = projection(name) {
        let start = [0, queries, queries + keys][index];
        let tensor = format!("{layer}self_attn.qkv_proj{kind}");
        return Location::rows(tensor, parameter, start, queries + 2 * keys);
    }
    for (part, start) in [("gate_proj", 0), ("up_proj", inner)] {
        if name.contains(part) {
            let tensor = name.replace(part, "gate_up_proj");
            return Location::rows(tensor, parameter, start, 2 * inner);
        }
    }
    Location::whole(name, parameter)
}

fn renamed(name: &str, names: &[(&str, &str)]) -> String {
    let changed = |name: String, (from, to): &(&str, &str)| name.replace(from, to);
    names.iter().fold(name.to_owned(), changed)
}

fn mixtral(parameter: &Parameter) -> Location {
    let names = [
        ("mlp.gate.", "block_sparse_moe.gate."),
        ("mlp.experts.", "block_sparse_moe.experts."),
        ("gate_proj", "w1"),
        ("up_proj", "w3"),
        ("down_proj", "w2"),
    ];
    Location::whole(renamed(&parameter.name, &names), parameter)
}

/// Gates and the values that they gate take turns, and matrices of experts are transposed.
fn gpt_oss(model: &Model, parameter: &Parameter) -> Location {
    let name = &parameter.name;
    let (Some(experts), Some((layer, rest))) =
        (&model.block.experts, name.split_once(".mlp.experts."))
    else {
        return Location::whole(name.replace(".mlp.gate.", ".mlp.router."), parameter);
    };
    let words: Vec<&str> = rest.split('.').collect();
    let [number, matrix, kind] = words[..] else { return Location::whole(name, parameter) };
    let number = number.parse().expect("experts have numbers");
    let end = if kind == "bias" { "_bias" } else { "" };
    let of = |tensor: &str, rows| {
        let tensor = format!("{layer}.mlp.experts.{tensor}{end}");
        Location::rows(tensor, parameter, 0, rows)
    };
    let rows = parameter.shape[0];
    let place = ["gate_proj", "up_proj"].iter().position(|part| *part == matrix);
    let mut location = match place {
        Some(_) => of("gate_up_proj", 2 * rows),
        None => of("down_proj", rows),
    };
    location.interleaved = place.map(|place| [1, place, 2]);
    location.transposed().of_expert(number, experts.count as usize)
}

fn neox(model: &Model, parameter: &Parameter) -> Location {
    let name = &parameter.name;
    let prefix = |layer: &str| layer.replace("model.layers", "gpt_neox.layers");
    if let Some((index, [layer, kind])) = projection(name) {
        let tensor = format!("{}attention.query_key_value{kind}", prefix(&layer));
        let rows = 3 * model.query_width() as usize;
        let mut location = Location::rows(tensor, parameter, 0, rows);
        location.interleaved = Some([model.head_size() as usize, index, 3]);
        return location;
    }
    let names = [
        (EMBEDDING, "gpt_neox.embed_in.weight"),
        (LAST_NORM, "gpt_neox.final_layer_norm"),
        (HEAD, "embed_out.weight"),
        ("model.layers", "gpt_neox.layers"),
        ("self_attn.o_proj", "attention.dense"),
        ("mlp.up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"),
    ];
    Location::whole(renamed(name, &names), parameter)
}

fn gpt2(model: &Model, parameter: &Parameter) -> Location {
    let name = &parameter.name;
    let prefix = |layer: &str| layer.replace("model.layers", "transformer.h");
    if let Some((index, [layer, kind])) = projection(name) {
        let hidden = model.hidden as usize;
        let tensor = format!("{}attn.c_attn{kind}", prefix(&layer));
        return Location::rows(tensor, parameter, index * hidden, 3 * hidden).transposed();
    }
    let names = [
        (EMBEDDING, "transformer.wte.weight"),
        (POSITIONS, "transformer.wpe.weight"),
        (LAST_NORM, "transformer.ln_f"),
        ("model.layers", "transformer.h"),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
        ("self_attn.o_proj", "attn.c_proj"),
        ("mlp.up_proj", "mlp.c_fc"),
        ("mlp.down_proj", "mlp.c_proj"),
    ];
    let location = Location::whole(renamed(name, &names), parameter);
    match name.contains("_proj") {
        true => location.transposed(),
        false => location,
    }
}

/// Whether a tensor of a file is a constant that this engine computes by itself.
pub(crate) fn is_constant(name: &str) -> bool {
    [
        ".rotary_emb.inv_freq",
        ".attn.bias",
        ".attn.masked_bias",
        ".attention.bias",
        ".attention.masked_bias",
    ]
    .iter()
    .any(|end| name.ends_with(end))
}
