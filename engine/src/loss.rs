//! Cross-entropy of the head's logits, in chunks of rows, so that a large vocabulary takes little
//! memory.

use std::ops::Range;

use tch::{Kind, Reduction, Tensor};

use crate::error::Result;
use crate::shim;

/// Logits that exist at a time: at most this many, unless one row has more. It fixes the order of
/// the head gradient's sum.
const CHUNK_LOGITS: usize = 1 << 23;

/// Marks a row whose target does not count.
pub(crate) const IGNORED: i64 = -100;

/// The loss, and its gradients if they were asked for.
#[derive(Debug)]
pub(crate) struct Loss {
    /// Sum over the counted rows divided by the number of all rows: f32, in nats.
    pub(crate) value: Tensor,
    pub(crate) gradients: Option<LossGradients>,
}

/// The gradients of a loss.
#[derive(Debug)]
pub(crate) struct LossGradients {
    pub(crate) rows: Tensor,
    /// None of a frozen head.
    pub(crate) head: Option<Tensor>,
}

/// The loss of rows `[N, H]` under the head `[V, H]`. `targets` are ids, or [`IGNORED`]: i64 `[N]`.
pub(crate) fn cross_entropy(
    rows: &Tensor,
    head: &Tensor,
    targets: &Tensor,
    with_gradients: bool,
) -> Result<Loss> {
    let (count, _) = rows.size2()?;
    let scale = 1.0 / count as f64;
    let chunks = chunks(count as usize, head.size2()?.0 as usize);
    let mut losses = Vec::with_capacity(chunks.len());
    let mut row_gradients = Vec::new();
    let mut head_gradient: Option<Tensor> = None;
    let alone = chunks.len() == 1;
    for chunk in chunks {
        let (start, length) = (chunk.start as i64, chunk.len() as i64);
        let part = rows.f_narrow(0, start, length)?.f_detach()?.set_requires_grad(with_gradients);
        let logits = part.f_linear(head, None::<Tensor>)?;
        let loss = logits
            .f_to_kind(Kind::Float)?
            .f_cross_entropy_loss(
                &targets.f_narrow(0, start, length)?,
                None::<Tensor>,
                Reduction::Sum,
                IGNORED,
                0.0,
            )?
            .f_mul_scalar(scale)?;
        if with_gradients {
            let inputs = if head.requires_grad() { &[&part, head][..] } else { &[&part] };
            let mut gradients = shim::gradients(&loss, None, inputs)?.into_iter();
            row_gradients.extend(gradients.next());
            if let Some(of_head) = gradients.next() {
                head_gradient = Some(match head_gradient.take() {
                    None if alone => of_head,
                    None => of_head.f_to_kind(Kind::Float)?,
                    Some(mut sum) => sum.f_add_(&of_head)?,
                });
            }
        }
        losses.push(loss.f_detach()?);
    }
    let value = Tensor::f_stack(&losses, 0)?.f_sum(Kind::Float)?;
    let gradients = match row_gradients.is_empty() {
        true => None,
        false => {
            let rows = Tensor::f_cat(&row_gradients, 0)?;
            Some(LossGradients { rows, head: head_gradient })
        }
    };
    Ok(Loss { value, gradients })
}

/// Ranges of rows, as equal as possible.
fn chunks(rows: usize, vocabulary: usize) -> Vec<Range<usize>> {
    let most = (CHUNK_LOGITS / vocabulary).max(1);
    let number = rows.div_ceil(most).max(1);
    (0..number).map(|index| index * rows / number..(index + 1) * rows / number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::elements;

    #[test]
    fn chunks_cover_all_rows_within_the_cap() {
        for (rows, vocabulary) in [(1, 2), (1024, 256), (1024, 151_936), (7, 1 << 20), (5, 1 << 24)]
        {
            let chunks = chunks(rows, vocabulary);
            let most = (CHUNK_LOGITS / vocabulary).max(1);
            assert!(chunks.iter().all(|chunk| (1..=most).contains(&chunk.len())), "{chunks:?}");
            let covered: Vec<usize> = chunks.into_iter().flatten().collect();
            assert_eq!(covered, (0..rows).collect::<Vec<_>>());
        }
    }

    #[test]
    fn chunks_and_masks_match_one_large_cross_entropy() {
        tch::manual_seed(1);
        let (rows, vocabulary) = (40, 1 << 18);
        let x = Tensor::randn([rows, 8], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        let options = (Kind::Float, tch::Device::Cpu);
        let head = Tensor::randn([vocabulary, 8], options).set_requires_grad(true);
        let targets: Vec<i64> =
            (0..rows).map(|row| if row % 3 == 0 { IGNORED } else { row * 1000 }).collect();
        let targets = Tensor::from_slice(&targets);
        assert!(chunks(rows as usize, vocabulary as usize).len() > 1);
        let ours = cross_entropy(&x, &head, &targets, true).expect("enough memory");
        let whole = x.linear(&head, None::<Tensor>).cross_entropy_loss(
            &targets,
            None::<Tensor>,
            Reduction::Sum,
            IGNORED,
            0.0,
        ) / rows as f64;
        let theirs = shim::gradients(&whole, None, &[&x, &head]).expect("a graph");
        let close = |one: &Tensor, other: &Tensor| {
            let pairs = elements::<f32>(one).iter().zip(elements::<f32>(other));
            pairs.map(|(one, other)| (one - other).abs()).fold(0.0, f32::max) < 1e-5
        };
        assert!((ours.value.double_value(&[]) - whole.double_value(&[])).abs() < 1e-5);
        let gradients = ours.gradients.expect("asked for");
        let of_head = gradients.head.expect("a trained head");
        assert!(close(&gradients.rows, &theirs[0]) && close(&of_head, &theirs[1]));
        let plain = cross_entropy(&x, &head, &targets, false).expect("enough memory");
        assert_eq!(plain.value.double_value(&[]), ours.value.double_value(&[]));
        assert!(plain.gradients.is_none());
    }
}
