//! A layer's matrices in slices: partial products, which are added in the order of slices (Shoeybi et al.,
//! arXiv 1909.08053).
//!
//! A slice has its share of the rows of matrices that read the layer's input (heads, and channels inside the
//! feed-forward block) and the columns of the next matrix that read those, so its product is one term of the
//! whole product. Which device computes a slice changes no bit.

use std::ops::Range;

use shoal_protocol::manifest::Model;
use tch::Tensor;

use crate::attention::{Heads, Masks, attend};
use crate::error::Result;
use crate::exchange::{Seat, fan_out, sum_in_order};
use crate::layer::{Layer, Linear, Shape};
use crate::model::inner;

/// The slices that a device computes.
#[derive(Debug, Clone)]
pub(crate) struct OwnSlices {
    /// The numbers of the slices.
    range: Range<usize>,
    /// The device's place among those that compute the others.
    seat: Option<Seat>,
}

impl OwnSlices {
    /// All slices of a model or, with a seat, those of one device. Seats divide slices.
    pub(crate) fn new(model: &Model, seat: Option<&Seat>) -> Self {
        let (index, count) = seat.map_or((0, 1), |seat| (seat.index(), seat.count()));
        let each = usize::from(model.slices) / count;
        Self { range: index * each..(index + 1) * each, seat: seat.cloned() }
    }

    /// The numbers of the slices.
    pub(crate) fn numbers(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Whether this device counts the gradients of weights that all devices compute with.
    pub(crate) fn counts_shared(&self) -> bool {
        self.range.start == 0
    }

    /// Whether the gradients of this device are those of all weights.
    pub(crate) fn are_all(&self) -> bool {
        self.seat.is_none()
    }

    fn fan_out(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        fan_out(x, self.range.len(), self.seat.as_ref())
    }

    /// The whole product, with its bias.
    fn sum(&self, parts: &[Tensor], bias: Option<&Tensor>) -> Result<Tensor> {
        let sum = sum_in_order(parts, self.seat.as_ref())?;
        bias.map_or_else(|| Ok(sum.shallow_clone()), |bias| Ok(sum.f_add(bias)?))
    }
}

/// Rows of several matrices that read the same input, and their biases.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) weights: Vec<Tensor>,
    pub(crate) biases: Vec<Tensor>,
}

impl Rows {
    /// The rows as one matrix.
    fn joined(&self) -> Result<Linear> {
        let join = |parts: &[Tensor]| -> Result<Option<Tensor>> {
            Ok(match parts {
                [] => None,
                [only] => Some(only.shallow_clone()),
                several => Some(Tensor::f_cat(several, 0)?),
            })
        };
        let weight = join(&self.weights)?.expect("at least one matrix");
        Ok(Linear { weight, bias: join(&self.biases)?, adapter: None })
    }
}

/// The weights of one slice of a layer.
#[derive(Debug)]
pub(crate) struct Slice {
    /// Rows of `q_proj`, `k_proj` and `v_proj`.
    pub(crate) query_key_value: Rows,
    /// Columns of `o_proj`.
    pub(crate) attention_output: Tensor,
    /// Rows of `gate_proj`, unless the block is ungated, and of `up_proj`.
    pub(crate) gate_up: Rows,
    /// Columns of `down_proj`.
    pub(crate) down: Tensor,
}

/// The matrices of a layer, as far as this device computes with them.
#[derive(Debug)]
pub(crate) struct Sliced {
    pub(crate) own: OwnSlices,
    /// In the order of their numbers.
    pub(crate) slices: Vec<Slice>,
    pub(crate) attention_output_bias: Option<Tensor>,
    pub(crate) down_bias: Option<Tensor>,
}

impl Sliced {
    /// Causal self-attention of `[B, T, H]`, with constants of one slice.
    pub(crate) fn attention(
        &self,
        x: &Tensor,
        layer: &Layer,
        shape: &Shape,
        masks: &Masks,
    ) -> Result<Tensor> {
        // The norms of single heads are the same in all slices.
        let mut norms = match &layer.query_key_norms {
            Some([queries, keys]) => {
                let [queries, keys] = [self.own.fan_out(queries)?, self.own.fan_out(keys)?];
                queries.into_iter().zip(keys).map(|(query, key)| [query, key]).collect()
            }
            None => Vec::new(),
        }
        .into_iter();
        let part = |(slice, x): (&Slice, Tensor)| -> Result<Tensor> {
            let (matrix, norms) = (slice.query_key_value.joined()?, norms.next());
            let heads =
                Heads { matrix: &matrix, norms: norms.as_ref(), attention: layer.attention };
            let mixed = attend(&x, &heads, shape, masks, None)?;
            Ok(mixed.f_linear(&slice.attention_output, None::<Tensor>)?)
        };
        let parts = self.slices.iter().zip(self.own.fan_out(x)?).map(part);
        let parts = parts.collect::<Result<Vec<_>>>()?;
        self.own.sum(&parts, self.attention_output_bias.as_ref())
    }

    /// The feed-forward block of `[B, T, H]`, with constants of one slice.
    pub(crate) fn feed_forward(&self, x: &Tensor, shape: &Shape) -> Result<Tensor> {
        let part = |(slice, x): (&Slice, Tensor)| -> Result<Tensor> {
            let inner = inner(&x, &slice.gate_up.joined()?, shape)?;
            Ok(inner.f_linear(&slice.down, None::<Tensor>)?)
        };
        let parts = self.slices.iter().zip(self.own.fan_out(x)?).map(part);
        let parts = parts.collect::<Result<Vec<_>>>()?;
        self.own.sum(&parts, self.down_bias.as_ref())
    }
}
