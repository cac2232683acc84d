//! Cross-entropy under a head in slices: each has the logits of some tokens of the vocabulary.
//!
//! Of each row a slice brings the largest logit, the sum of exponentials relative to it, and the target's logit. The
//! sums are added in the order of slices, relative to the largest of all, so which device computes a slice changes
//! no bit (the vocabulary's cut of Shoeybi et al., arXiv 1909.08053).

use std::ops::Range;

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::model::loss::{Loss, Objective, RowWeights, in_chunks};
use crate::model::own_slices::OwnSlices;

/// The head's slices that a device has.
pub(crate) struct SlicedHead<'a> {
    pub(crate) own: &'a OwnSlices,
    /// The tokens of each slice, and their rows `[tokens, H]` of the head.
    pub(crate) slices: &'a [(Range<i64>, Tensor)],
    /// Number of all tokens.
    pub(crate) vocabulary: usize,
}

impl SlicedHead<'_> {
    /// The loss of rows `[N, H]`; see [`crate::model::loss::loss_of`]. There is a gradient of each slice's rows of a trained
    /// head.
    pub(crate) fn loss_of(
        &self,
        (rows, targets): (&Tensor, &Tensor),
        objective: Objective<'_>,
        with_gradients: bool,
    ) -> Result<Loss> {
        let (all, vocabulary) = ((rows, targets), self.vocabulary);
        in_chunks(all, vocabulary, objective, with_gradients, |chunk, targets, wanted| {
            let (losses, slices) = self.chunk(chunk, targets)?;
            let Some((weights, heads)) = wanted else {
                return Ok((losses, None));
            };
            let mut of_rows = Vec::with_capacity(self.slices.len());
            for (number, ((_, head), slice)) in self.slices.iter().zip(slices).enumerate() {
                let gradient = slice.gradient()?;
                let gradient = match weights {
                    RowWeights::Same(scale) => gradient.f_mul_scalar(*scale)?,
                    RowWeights::Each(factors) => gradient.f_mul(factors)?,
                };
                let gradient = gradient.f_to_kind(rows.kind())?;
                heads.add(number, head, &gradient, chunk)?;
                of_rows.push(gradient.f_matmul(head)?);
            }
            Ok((losses, Some(self.own.sum(&of_rows)?)))
        })
    }

    /// The losses of some rows, and what their gradients follow from.
    fn chunk(&self, rows: &Tensor, targets: &Tensor) -> Result<(Tensor, Vec<SliceLogits>)> {
        let counts = targets.f_ge(0)?.f_to_kind(Kind::Float)?;
        let mut of_slices = Vec::with_capacity(self.slices.len());
        let mut summaries = Vec::with_capacity(self.slices.len());
        for (tokens, head) in self.slices {
            let logits = rows.f_linear(head, None::<Tensor>)?.f_to_kind(Kind::Float)?;
            let largest = logits.f_amax(&[1i64][..], true)?;
            let sum = logits.f_sub(&largest)?.f_exp_()?.f_sum_dim_intlist(
                &[1i64][..],
                true,
                Kind::Float,
            )?;
            let column = targets.f_sub_scalar(tokens.start)?.f_unsqueeze(1)?;
            let last = tokens.end - tokens.start - 1;
            let is_here = column.f_ge(0)?.f_logical_and(&column.f_le(last)?)?;
            let column = column.f_clamp(0, last)?;
            let absent = is_here.f_logical_not()?;
            let target = logits.f_gather(1, &column, false)?.f_masked_fill(&absent, 0.0)?;
            summaries.push(Tensor::f_cat(&[largest, sum, target], 1)?);
            of_slices.push((logits, column, is_here));
        }
        let all = self.own.all_parts(&summaries)?;
        let of_all = |column| -> Result<Vec<Tensor>> {
            all.iter().map(|one| Ok(one.f_narrow(1, column, 1)?)).collect()
        };
        let [largests, sums, found] = [of_all(0)?, of_all(1)?, of_all(2)?];
        let largest = Tensor::f_cat(&largests, 1)?.f_amax(&[1i64][..], true)?;
        let mut sum = largest.f_zeros_like()?;
        let mut target = largest.f_zeros_like()?;
        for ((of_slice, own), found) in sums.iter().zip(&largests).zip(&found) {
            let factor = own.f_sub(&largest)?.f_exp()?;
            sum = sum.f_add(&of_slice.f_mul(&factor)?)?;
            target = target.f_add(found)?;
        }
        let total = largest.f_add(&sum.f_log()?)?;
        let losses = total.f_sub(&target)?.f_squeeze_dim(1)?.f_mul(&counts)?;
        let counts = counts.f_unsqueeze(1)?;
        let slice = |(logits, column, is_here)| {
            let [total, counts] = [&total, &counts].map(Tensor::shallow_clone);
            SliceLogits { logits, column, is_here, total, counts }
        };
        Ok((losses, of_slices.into_iter().map(slice).collect()))
    }
}

/// The logits of some rows in one slice.
struct SliceLogits {
    /// f32, `[rows, tokens]`.
    logits: Tensor,
    /// Each row's target among them, and whether it is there: `[rows, 1]`.
    column: Tensor,
    is_here: Tensor,
    /// The logarithm of the sum of exponentials over all slices, and whether the row counts: `[rows, 1]`.
    total: Tensor,
    counts: Tensor,
}

impl SliceLogits {
    /// The gradient of the losses' sum with respect to the logits, f32.
    fn gradient(self) -> Result<Tensor> {
        let mut gradient = self.logits.f_sub(&self.total)?.f_exp_()?;
        let ones = self.is_here.f_to_kind(Kind::Float)?.f_neg()?;
        let mut gradient = gradient.f_scatter_add_(1, &self.column, &ones)?;
        Ok(gradient.f_mul_(&self.counts)?)
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::device::exchange::Seat;
    use crate::device::tensor::elements;
    use crate::model::loss::{IGNORED, loss_of as whole_loss};
    use crate::testing::manifest;

    const HIDDEN: i64 = 8;

    /// The slices of a head that seats, or one device, have.
    fn own(slices: u16, seat: Option<&Seat>) -> OwnSlices {
        let mut model = manifest().model;
        model.slices = slices;
        OwnSlices::new(&model, seat)
    }

    /// The loss and the gradients of rows and of a device's rows of the head.
    fn loss_of(own: &OwnSlices, rows: &Tensor, head: &Tensor, targets: &Tensor) -> [Vec<f32>; 3] {
        let vocabulary = head.size()[0] as usize;
        let slice = |number| {
            let tokens = own.rows_of(number, vocabulary);
            let of_slice = head.narrow(0, tokens.start as i64, tokens.len() as i64);
            (tokens.start as i64..tokens.end as i64, of_slice)
        };
        let slices: Vec<_> = own.numbers().map(slice).collect();
        let head = SlicedHead { own, slices: &slices, vocabulary };
        let loss = head.loss_of((rows, targets), Objective::CrossEntropy, true);
        let loss = loss.expect("enough memory");
        let gradients = loss.gradients.expect("asked for");
        let heads = Tensor::cat(&gradients.heads, 0);
        [loss.value, gradients.rows, heads].map(|one| {
            let one = one.to_kind(Kind::Float).contiguous();
            elements(&one).to_vec()
        })
    }

    fn apart(one: &[f32], other: &[f32]) -> f32 {
        assert_eq!(one.len(), other.len());
        one.iter().zip(other).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn slices_of_any_size_have_the_loss_of_the_whole_head_on_any_devices() {
        tch::manual_seed(2);
        for (vocabulary, kind, tolerance) in
            [(1003, Kind::Float, 1e-5), (7, Kind::BFloat16, 2e-2), (1 << 21, Kind::Float, 2e-4)]
        {
            let random = |shape: [i64; 2]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
            let rows = random([24, HIDDEN]).to_kind(kind);
            let head = random([vocabulary, HIDDEN]).to_kind(kind).set_requires_grad(true);
            let targets: Vec<i64> = (0..24)
                .map(|row| if row % 5 == 0 { IGNORED } else { row * 7919 % vocabulary })
                .collect();
            let targets = Tensor::from_slice(&targets);
            let whole = whole_loss(&rows, &head, &targets, Objective::CrossEntropy, true);
            let whole = whole.expect("enough memory");
            let gradients = whole.gradients.expect("asked for");
            let expected = [&whole.value, &gradients.rows, &gradients.heads[0]]
                .map(|one| elements::<f32>(&one.to_kind(Kind::Float).contiguous()).to_vec());
            let alone = loss_of(&own(4, None), &rows, &head, &targets);
            for (one, other) in alone.iter().zip(&expected) {
                assert!(apart(one, other) < tolerance, "{vocabulary}: {}", apart(one, other));
            }
            let seats = Seat::all(2);
            let both = std::thread::scope(|scope| {
                let start = |seat| {
                    let [rows, head, targets] = [&rows, &head, &targets].map(Tensor::shallow_clone);
                    scope.spawn(move || loss_of(&own(4, Some(seat)), &rows, &head, &targets))
                };
                let threads: Vec<_> = seats.iter().map(start).collect();
                threads.into_iter().map(|one| one.join().expect("no panic")).collect::<Vec<_>>()
            });
            for [value, of_rows, _] in &both {
                assert_eq!((value, of_rows), (&alone[0], &alone[1]), "{vocabulary}");
            }
            let heads: Vec<f32> = both.iter().flat_map(|[_, _, heads]| heads.clone()).collect();
            assert_eq!(heads, alone[2], "{vocabulary}");
        }
    }
}
