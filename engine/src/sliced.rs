//! A layer's matrices in slices: partial products, which are added in the order of slices (Shoeybi et al.,
//! arXiv 1909.08053).
//!
//! A slice has its share of the rows of matrices that read the layer's input (heads, and channels inside the
//! feed-forward block) and the columns of the next matrix that read those, so its product is one term of the
//! whole product. Which device computes a slice changes no bit.

use tch::Tensor;

use crate::adapter::{Adapter, AdapterSlices};
use crate::attention::{Masks, attend};
use crate::error::Result;
use crate::layer::{Layer, Linear, Shape, Slice, Sliced};
use crate::model::inner;
use crate::sliced_norm::normalise;

impl Sliced {
    /// Causal self-attention of `[B, T, H]`, with constants of one slice.
    pub(crate) fn attention(
        &self,
        x: &Tensor,
        layer: &Layer,
        shape: &Shape,
        masks: &Masks,
    ) -> Result<Tensor> {
        let adapters = &self.adapters;
        let mut reads = self.adapters_of_pass(adapters.query_key_value.as_ref())?;
        let mut writes = self.adapters_of_pass(adapters.attention_output.as_ref())?;
        let of_slice = |(slice, x): (&Slice, Tensor)| -> Result<Tensor> {
            slice.query_key_value.joined(reads.next())?.apply(&x)
        };
        let mixed = self.slices.iter().zip(self.own.fan_out(x)?).map(of_slice);
        let mut mixed = mixed.collect::<Result<Vec<_>>>()?;
        if let Some(norms) = &layer.query_key_norms {
            mixed = normalise(&mixed, norms, shape, &self.own)?;
        }
        let part = |(slice, mixed): (&Slice, Tensor)| -> Result<Tensor> {
            let heads = attend(&mixed, layer.attention, shape, masks, None)?;
            product(&heads, &slice.attention_output, writes.next())
        };
        let parts = self.slices.iter().zip(mixed).map(part);
        let parts = parts.collect::<Result<Vec<_>>>()?;
        self.own.sum(&parts, self.attention_output_bias.as_ref())
    }

    /// The feed-forward block of `[B, T, H]`, with constants of one slice.
    pub(crate) fn feed_forward(&self, x: &Tensor, shape: &Shape) -> Result<Tensor> {
        let mut reads = self.adapters_of_pass(self.adapters.gate_up.as_ref())?;
        let mut writes = self.adapters_of_pass(self.adapters.down.as_ref())?;
        let part = |(slice, x): (&Slice, Tensor)| -> Result<Tensor> {
            let inner = inner(&x, &slice.gate_up.joined(reads.next())?, shape)?;
            product(&inner, &slice.down, writes.next())
        };
        let parts = self.slices.iter().zip(self.own.fan_out(x)?).map(part);
        let parts = parts.collect::<Result<Vec<_>>>()?;
        self.own.sum(&parts, self.down_bias.as_ref())
    }

    /// The adapters of each slice of a matrix for one pass, if it has some.
    fn adapters_of_pass(
        &self,
        of: Option<&AdapterSlices>,
    ) -> Result<impl Iterator<Item = Adapter> + use<>> {
        let adapters = of.map(|slices| slices.of_pass(&self.own)).transpose()?;
        Ok(adapters.unwrap_or_default().into_iter())
    }
}

/// A partial product, with what an adapter adds to it.
fn product(x: &Tensor, columns: &Tensor, adapter: Option<Adapter>) -> Result<Tensor> {
    let weight = columns.shallow_clone();
    Linear { weight, bias: None, adapter }.apply(x)
}
