//! A layer's matrices in slices: partial products, which are added in the order of slices (Shoeybi et al.,
//! arXiv 1909.08053).
//!
//! A slice has its share of the rows of matrices that read the layer's input (heads, and channels inside the
//! feed-forward block) and the columns of the next matrix that read those, so its product is one term of the
//! whole product. Which device computes a slice changes no bit.

use tch::Tensor;

use crate::error::Result;
use crate::model::adapter::{Adapter, AdapterSlices};
use crate::model::attention::attend;
use crate::model::decoder::inner;
use crate::model::factor::Factor;
use crate::model::layer::{
    AttentionSlice, DenseSlice, Layer, Linear, Rows, Shape, Sliced, SlicedFeedForward,
};
use crate::model::sliced_norm::normalise;
use crate::model::token_groups::{Product, TokenGroups};
use crate::model::visibility::Visibility;

impl Sliced {
    /// Causal self-attention of the device's tokens, with constants of one slice.
    pub(crate) fn attention(
        &self,
        x: &Tensor,
        layer: &Layer,
        shape: &Shape,
        groups: &TokenGroups<'_>,
        visibility: &Visibility,
    ) -> Result<Tensor> {
        let adapters = &self.adapters;
        let rows = self.attention.iter().map(|slice| &slice.query_key_value);
        let mut mixed = self.products(x, rows, adapters.query_key_value.as_ref(), groups)?;
        if let Some(norms) = &layer.query_key_norms {
            mixed = normalise(&mixed, norms, shape, &self.own)?;
        }
        let mut adapters = self.adapters_of_pass(adapters.attention_output.as_ref())?.into_iter();
        let part = |(slice, mixed): (&AttentionSlice, Tensor)| -> Result<Tensor> {
            let heads = attend(&mixed, (layer.attention, None), shape, visibility, None)?;
            partial(&heads, &slice.attention_output, adapters.next())
        };
        let parts = self.attention.iter().zip(mixed).map(part).collect::<Result<Vec<_>>>()?;
        groups.sum(&parts, &self.attention_output_bias)
    }

    /// The feed-forward block of the device's tokens, with constants of one slice; see [`BalanceLoss`] for `counted`.
    ///
    /// [`BalanceLoss`]: crate::model::balance_loss::BalanceLoss
    pub(crate) fn feed_forward(
        &self,
        x: &Tensor,
        shape: &Shape,
        groups: &TokenGroups<'_>,
        counted: f64,
    ) -> Result<Tensor> {
        let slices = match &self.feed_forward {
            SlicedFeedForward::Dense(slices) => slices,
            SlicedFeedForward::Experts(experts) => {
                return experts.apply(x, shape, &self.own, groups, counted);
            }
        };
        let rows = slices.iter().map(|slice| &slice.gate_up);
        let both = self.products(x, rows, self.adapters.gate_up.as_ref(), groups)?;
        let mut adapters = self.adapters_of_pass(self.adapters.down.as_ref())?.into_iter();
        let part = |(slice, both): (&DenseSlice, Tensor)| -> Result<Tensor> {
            partial(&inner(&both, shape)?, &slice.down, adapters.next())
        };
        let parts = slices.iter().zip(both).map(part).collect::<Result<Vec<_>>>()?;
        groups.sum(&parts, &self.down_bias)
    }

    /// The products of all tokens with rows of each slice, and what adapters add to them: `[B, T, outputs]`.
    fn products<'a>(
        &self,
        x: &Tensor,
        rows: impl Iterator<Item = &'a Rows>,
        adapters: Option<&AdapterSlices>,
        groups: &TokenGroups<'_>,
    ) -> Result<Vec<Tensor>> {
        let adapters = self.adapters_of_pass(adapters)?;
        let mut factors = Vec::with_capacity(2 * self.attention.len());
        for (number, Rows { weights, biases }) in rows.enumerate() {
            let Factor { matrices, windows } = weights;
            factors.push(Product { matrices, windows, biases });
            if let Some(adapter) = adapters.get(number) {
                let matrices = std::slice::from_ref(adapter.first());
                factors.push(Product { matrices, windows: &[], biases: &[] });
            }
        }
        let mut products = groups.products(x, &factors)?;
        if adapters.is_empty() {
            return Ok(products);
        }
        let adapted = |(pair, adapter): (&mut [Tensor], &Adapter)| {
            Ok(pair[0].f_add(&adapter.increase_from(&pair[1])?)?)
        };
        products.chunks_exact_mut(2).zip(&adapters).map(adapted).collect()
    }

    /// The adapters of each slice of a matrix for one pass; none if it has none.
    fn adapters_of_pass(&self, of: Option<&AdapterSlices>) -> Result<Vec<Adapter>> {
        of.map_or_else(|| Ok(Vec::new()), |slices| slices.of_pass(&self.own))
    }
}

/// A partial product, with what an adapter adds to it.
fn partial(x: &Tensor, columns: &Factor, adapter: Option<Adapter>) -> Result<Tensor> {
    Linear { weight: columns.alias(), bias: None, adapter }.apply(x)
}
