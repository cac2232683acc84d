//! Low-rank adapters beside the frozen matrices of a layer (Hu et al., arXiv 2106.09685).

use shoal_protocol::manifest::{Lora, LoraTarget};
use tch::Tensor;

use crate::error::Result;
use crate::model::layer_table::{Joined, Matrix};
use crate::model::own_slices::OwnSlices;

/// Begins the names of adapters, as PEFT has them.
pub(crate) const PREFIX: &str = "base_model.model.";

/// Which of an adapter's two matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Factor {
    /// `[rank, inputs]`.
    A,
    /// `[outputs, rank]`.
    B,
}

/// PEFT's name of an adapter's matrix beside a matrix of a layer.
pub(crate) fn name(layer: u32, matrix: &Matrix, factor: Factor) -> String {
    name_beside(&format!("model.layers.{layer}.{}.weight", matrix.name), factor)
}

/// PEFT's name of an adapter's matrix beside a weight of the model.
pub(crate) fn name_beside(weight: &str, factor: Factor) -> String {
    let factor = if factor == Factor::A { "lora_A" } else { "lora_B" };
    format!("{PREFIX}{}.{factor}.weight", weight.trim_end_matches(".weight"))
}

/// The weight that an adapter's matrix is beside, by its name, and which of the two it is.
pub(crate) fn beside(name: &str) -> Option<(String, Factor)> {
    let factor = if is_first(name) { Factor::A } else { Factor::B };
    let (matrix, _) = name.strip_prefix(PREFIX)?.rsplit_once(".lora_")?;
    Some((format!("{matrix}.weight"), factor))
}

/// Whether a weight is the first matrix of an adapter, which begins with random values.
pub(crate) fn is_first(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(".lora_A.weight")
}

/// Whether a weight is the second matrix of an adapter, which begins with zeros.
pub(crate) fn is_second(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(".lora_B.weight")
}

/// The adapters of one joined matrix.
#[derive(Debug)]
pub(crate) struct Adapter {
    /// The first matrices below each other: `[targets · rank, inputs]`.
    first: Tensor,
    /// For each part of the joined matrix its second matrix `[outputs, rank]`, or its outputs if it
    /// has no adapter.
    parts: Vec<Part>,
    rank: i64,
    scale: f64,
}

#[derive(Debug)]
enum Part {
    Adapted(Tensor),
    Plain(i64),
}

impl Part {
    fn alias(&self) -> Self {
        match self {
            Self::Adapted(second) => Self::Adapted(second.shallow_clone()),
            Self::Plain(outputs) => Self::Plain(*outputs),
        }
    }
}

/// The adapters of one joined matrix in slices. Slices of its rows share the first matrices and have those rows of the
/// second ones; slices of its columns have those columns of the first and share the second.
#[derive(Debug)]
pub(crate) struct AdapterSlices {
    /// Of each slice, in order.
    slices: Vec<Adapter>,
    shares_first: bool,
}

impl AdapterSlices {
    /// The adapters of slices of a matrix's rows or, if not `of_rows`, of its columns. There is at least one.
    pub(crate) fn new(slices: Vec<Adapter>, of_rows: bool) -> Self {
        Self { slices, shares_first: of_rows }
    }

    /// The adapters for one pass, whose gradients of what slices share are added in the order of slices.
    pub(crate) fn of_pass(&self, own: &OwnSlices) -> Result<Vec<Adapter>> {
        let shared = match (&self.slices[0], self.shares_first) {
            (Adapter { first, .. }, true) => first,
            (Adapter { parts, .. }, false) => match &parts[..] {
                [Part::Adapted(second)] => second,
                _ => unreachable!("a matrix in columns is joined with no other"),
            },
        };
        let with = |(alias, slice): (Tensor, &Adapter)| {
            let Adapter { first, parts, rank, scale } = slice;
            let (rank, scale) = (*rank, *scale);
            match self.shares_first {
                true => {
                    let parts = parts.iter().map(Part::alias).collect();
                    Adapter { first: alias, parts, rank, scale }
                }
                false => {
                    let parts = vec![Part::Adapted(alias)];
                    Adapter { first: first.shallow_clone(), parts, rank, scale }
                }
            }
        };
        Ok(own.fan_out(shared)?.into_iter().zip(&self.slices).map(with).collect())
    }
}

impl Adapter {
    /// The adapters of a layer's joined matrix; `None` if it has none. `leaf` takes a trained matrix
    /// by its name and extents.
    pub(crate) fn cut(
        lora: &Lora,
        layer: u32,
        joined: &Joined,
        mut leaf: impl FnMut(&str, &[i64]) -> Result<Tensor>,
    ) -> Result<Option<Self>> {
        let rank = i64::from(lora.rank);
        let is_adapted = |target: LoraTarget| lora.targets.contains(&target);
        let mut adapted = joined.targets().filter(|(target, _)| is_adapted(*target));
        let Some((_, first)) = adapted.next() else { return Ok(None) };
        let count = 1 + adapted.count() as i64;
        let inputs = joined.inputs as i64;
        let mut parts = Vec::new();
        // The first matrices are adjacent.
        let first = leaf(&name(layer, first, Factor::A), &[count * rank, inputs])?;
        for (target, matrix) in joined.targets() {
            let outputs = matrix.outputs as i64;
            parts.push(match is_adapted(target) {
                true => Part::Adapted(leaf(&name(layer, matrix, Factor::B), &[outputs, rank])?),
                false => Part::Plain(outputs),
            });
        }
        Ok(Some(Self { first, parts, rank, scale: lora.alpha / f64::from(lora.rank) }))
    }

    /// The first matrices below each other.
    pub(crate) fn first(&self) -> &Tensor {
        &self.first
    }

    /// What the adapters add to the joined matrix's product with `x`.
    pub(crate) fn increase(&self, x: &Tensor) -> Result<Tensor> {
        self.increase_from(&x.f_linear(&self.first, None::<Tensor>)?)
    }

    /// The same, from the product of `x` with the first matrices.
    pub(crate) fn increase_from(&self, inner: &Tensor) -> Result<Tensor> {
        let inner = inner.f_mul_scalar(self.scale)?;
        let mut increases = Vec::with_capacity(self.parts.len());
        let mut start = 0;
        for part in &self.parts {
            increases.push(match part {
                Part::Adapted(second) => {
                    let own = inner.f_narrow(-1, start, self.rank)?;
                    start += self.rank;
                    own.f_linear(second, None::<Tensor>)?
                }
                Part::Plain(outputs) => {
                    let mut shape = inner.size();
                    *shape.last_mut().expect("a product has extents") = *outputs;
                    Tensor::f_zeros(shape, (inner.kind(), inner.device()))?
                }
            });
        }
        match increases.len() {
            1 => Ok(increases.remove(0)),
            _ => Ok(Tensor::f_cat(&increases, -1)?),
        }
    }
}
