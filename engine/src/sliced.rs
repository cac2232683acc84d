//! A layer's matrices in slices: partial products, which are added in the order of slices (Shoeybi et al.,
//! arXiv 1909.08053).
//!
//! A slice has its share of the rows of matrices that read the layer's input (heads, and channels inside the
//! feed-forward block) and the columns of the next matrix that read those, so its product is one term of the
//! whole product. Which device computes a slice changes no bit.

use tch::Tensor;

use crate::attention::{Heads, Masks, attend};
use crate::error::Result;
use crate::layer::{Layer, Shape, Slice, Sliced};
use crate::model::inner;

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
