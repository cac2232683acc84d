//! The norms of queries and keys in slices.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::model::attention::normalise_heads;
use crate::model::layer::Shape;
use crate::model::own_slices::OwnSlices;

/// Normalises the queries and keys of a device's slices, each `[B, T, (heads + 2 · key_value_heads) · D]` with the heads
/// of a slice: each head by itself, or all heads of all slices together, by the width of the norms' weights.
pub(crate) fn normalise(
    slices: &[Tensor],
    [queries, keys]: &[Tensor; 2],
    shape: &Shape,
    own: &OwnSlices,
) -> Result<Vec<Tensor>> {
    let weights = own.fan_out(queries)?.into_iter().zip(own.fan_out(keys)?);
    let weights = weights.map(|(queries, keys)| [queries, keys]);
    if queries.size1()? == shape.head_size {
        // The norms of single heads are the same in all slices.
        let of_slice =
            |(mixed, norms): (&Tensor, [Tensor; 2])| normalise_heads(mixed, &norms, shape);
        return slices.iter().zip(weights).map(of_slice).collect();
    }
    let widths = [shape.heads, shape.key_value_heads].map(|heads| heads * shape.head_size);
    let squares = slices.iter().map(|mixed| squares(mixed, widths));
    let squares = own.sum(&squares.collect::<Result<Vec<_>>>()?)?;
    let squares = own.fan_out(&squares)?;
    let all = own.numbers().zip(slices).zip(weights).zip(&squares);
    all.map(|(((number, mixed), norms), squares)| {
        let (mut parts, mut start) = (Vec::with_capacity(3), 0);
        for (place, (width, weight)) in widths.into_iter().zip(&norms).enumerate() {
            let part = mixed.f_narrow(2, start, width)?.f_to_kind(Kind::Float)?;
            let mean = squares.f_narrow(2, place as i64, 1)?.f_div_scalar(weight.size1()?)?;
            let scale = mean.f_add_scalar(shape.epsilon)?.f_rsqrt()?;
            let own = weight.f_narrow(0, number as i64 * width, width)?;
            let own = own.f_to_kind(Kind::Float)?.f_add_scalar(shape.norm_offset())?;
            parts.push(part.f_mul(&scale)?.f_mul(&own)?.f_to_kind(mixed.kind())?);
            start += width;
        }
        parts.push(mixed.f_narrow(2, start, widths[1])?);
        Ok(Tensor::f_cat(&parts, 2)?)
    })
    .collect()
}

/// The sums of squares of a slice's queries and of its keys, `[B, T, 2]`, f32.
fn squares(mixed: &Tensor, [queries, keys]: [i64; 2]) -> Result<Tensor> {
    let sum = |start, width| -> Result<Tensor> {
        let part = mixed.f_narrow(2, start, width)?.f_to_kind(Kind::Float)?;
        Ok(part.f_square()?.f_sum_dim_intlist(Some(&[-1i64][..]), true, Kind::Float)?)
    };
    Ok(Tensor::f_cat(&[sum(0, queries)?, sum(queries, keys)?], 2)?)
}
