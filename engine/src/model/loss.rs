//! Cross-entropy of the head's logits, in chunks of rows, so that a large vocabulary takes little
//! memory. A chunk's logits become their gradient in place.

use std::ops::Range;

use shoal_protocol::manifest::Preference;
use tch::{Kind, Tensor};

use crate::device::cuda::Kernels;
use crate::device::shim;
use crate::error::Result;
use crate::model::preference::{Pair, pair_losses};

/// Bytes of logits that exist at a time: at most this many, unless one row has more. It fixes the
/// order of the head gradient's sum.
const CHUNK_BYTES: usize = 1 << 27;

/// Marks a row whose target does not count.
pub(crate) const IGNORED: i64 = -100;

/// The loss, and its gradients if they were asked for.
#[derive(Debug)]
pub(crate) struct Loss {
    /// Sum over the counted rows divided by the number of all rows: f32, in nats.
    pub(crate) value: Tensor,
    pub(crate) gradients: Option<LossGradients>,
    /// Which completions are preferred, in a run on pairs.
    pub(crate) preferences: Preferences,
}

/// What a model prefers among the pairs of a microbatch.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Preferences {
    /// Pairs whose chosen completion has the larger reward.
    pub preferred: u64,
    /// The mean difference of rewards.
    pub margin: f32,
}

/// What the loss of some rows is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Objective<'a> {
    /// Their cross-entropy.
    CrossEntropy,
    /// That of the pairs that they are.
    Pairs(&'a Preference, &'a [Pair]),
}

/// The factors of rows' losses in the gradients.
pub(crate) enum RowWeights {
    /// The same for all.
    Same(f64),
    /// One for each: f32 `[N, 1]`.
    Each(Tensor),
}

impl RowWeights {
    fn of_chunk(&self, start: i64, length: i64) -> Result<Self> {
        Ok(match self {
            Self::Same(factor) => Self::Same(*factor),
            Self::Each(factors) => Self::Each(factors.f_narrow(0, start, length)?),
        })
    }
}

/// The gradients of a loss.
#[derive(Debug)]
pub(crate) struct LossGradients {
    pub(crate) rows: Tensor,
    /// Of the head, or of each slice of it; none of a frozen one.
    pub(crate) heads: Vec<Tensor>,
}

/// The loss of rows `[N, H]` under the head `[V, H]`. `targets` are ids, or [`IGNORED`]: i64 `[N]`.
pub(crate) fn loss_of(
    rows: &Tensor,
    head: &Tensor,
    targets: &Tensor,
    objective: Objective<'_>,
    with_gradients: bool,
) -> Result<Loss> {
    let vocabulary = head.size()[0] as usize;
    in_chunks((rows, targets), vocabulary, objective, with_gradients, |chunk, targets, wanted| {
        let mut logits = chunk.f_linear(head, None::<Tensor>)?;
        let Some((weights, heads)) = wanted else {
            return Ok((row_losses(&mut logits, targets, 0.0, false)?, None));
        };
        let scale = if let RowWeights::Same(scale) = weights { *scale } else { 1.0 };
        let losses = row_losses(&mut logits, targets, scale, true)?;
        let mut gradient = logits;
        if let RowWeights::Each(factors) = weights {
            // In f32, and then rounded.
            gradient = gradient.f_mul_(factors)?;
        }
        heads.add(0, head, &gradient, chunk)?;
        Ok((losses, Some(gradient.f_matmul(head)?)))
    })
}

/// The cross-entropy of each row under the head: f32 `[N]`, 0 where the target does not count.
pub(crate) fn losses_of_rows(rows: &Tensor, head: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let vocabulary = head.size()[0] as usize;
    let _guard = tch::no_grad_guard();
    let (losses, _) = pass_in_chunks((rows, targets), vocabulary, None, |chunk, targets, _| {
        let mut logits = chunk.f_linear(head, None::<Tensor>)?;
        Ok((row_losses(&mut logits, targets, 0.0, false)?, None))
    })?;
    Ok(losses)
}

/// The sums of the gradients of a head's matrices over all chunks.
pub(crate) struct HeadGradients {
    sums: Vec<Tensor>,
    /// Whether there is one chunk, so that nothing is added.
    alone: bool,
}

impl HeadGradients {
    /// Adds those of one chunk of rows, given the gradient of its logits. Matrices come in their order; a frozen one
    /// has none.
    pub(crate) fn add(
        &mut self,
        number: usize,
        matrix: &Tensor,
        of_logits: &Tensor,
        rows: &Tensor,
    ) -> Result<()> {
        if !matrix.requires_grad() {
            return Ok(());
        }
        let more = of_logits.f_tr()?.f_matmul(rows)?;
        match self.sums.get_mut(number) {
            None if self.alone => self.sums.push(more),
            None => self.sums.push(more.f_to_kind(Kind::Float)?),
            Some(sum) => _ = sum.f_add_(&more)?,
        }
        Ok(())
    }
}

/// The rows and targets of a chunk, and what its gradients need if they are asked for, to each row's loss and the rows'
/// gradient.
type Wanted<'a> = Option<(&'a RowWeights, &'a mut HeadGradients)>;

/// The loss of rows `[N, H]` from those of chunks of them.
pub(crate) fn in_chunks(
    (rows, targets): (&Tensor, &Tensor),
    vocabulary: usize,
    objective: Objective<'_>,
    with_gradients: bool,
    mut of_chunk: impl FnMut(&Tensor, &Tensor, Wanted<'_>) -> Result<(Tensor, Option<Tensor>)>,
) -> Result<Loss> {
    let _guard = tch::no_grad_guard();
    let mut pass = |weights| pass_in_chunks((rows, targets), vocabulary, weights, &mut of_chunk);
    let Objective::Pairs(preference, pairs) = objective else {
        let scale = 1.0 / rows.size2()?.0 as f64;
        let (losses, gradients) = pass(with_gradients.then_some(RowWeights::Same(scale)))?;
        let value = losses.f_sum(Kind::Double)?.f_mul_scalar(scale)?.f_to_kind(Kind::Float)?;
        return Ok(Loss { value, gradients, preferences: Preferences::default() });
    };
    // How much a row counts follows from all rows of its pair.
    let (losses, _) = pass(None)?;
    let found = pair_losses(preference, pairs, &losses)?;
    let mut gradients = None;
    if with_gradients {
        let factors = Tensor::f_from_slice(&found.weights)?.f_unsqueeze(1)?;
        (_, gradients) = pass(Some(RowWeights::Each(factors.f_to(rows.device())?)))?;
    }
    let value = Tensor::f_from_slice(&[found.mean as f32])?.f_squeeze()?;
    let preferences = Preferences { preferred: found.preferred, margin: found.margin as f32 };
    Ok(Loss { value, gradients, preferences })
}

/// The losses of all rows, chunk by chunk, and the gradients of their weighted sum if there are weights.
fn pass_in_chunks(
    (rows, targets): (&Tensor, &Tensor),
    vocabulary: usize,
    weights: Option<RowWeights>,
    mut of_chunk: impl FnMut(&Tensor, &Tensor, Wanted<'_>) -> Result<(Tensor, Option<Tensor>)>,
) -> Result<(Tensor, Option<LossGradients>)> {
    let (count, _) = rows.size2()?;
    let chunks = chunks(count as usize, vocabulary * rows.kind().elt_size_in_bytes());
    let mut heads = HeadGradients { sums: Vec::new(), alone: chunks.len() == 1 };
    let (mut losses, mut row_gradients) = (Vec::with_capacity(chunks.len()), Vec::new());
    for chunk in chunks {
        let (start, length) = (chunk.start as i64, chunk.len() as i64);
        let [part, targets] =
            [rows.f_narrow(0, start, length)?, targets.f_narrow(0, start, length)?];
        let weights =
            weights.as_ref().map(|weights| weights.of_chunk(start, length)).transpose()?;
        let wanted = weights.as_ref().map(|weights| (weights, &mut heads));
        let (of_rows, gradient) = of_chunk(&part, &targets, wanted)?;
        losses.push(of_rows);
        row_gradients.extend(gradient);
    }
    let gradients = match row_gradients.is_empty() {
        true => None,
        false => Some(LossGradients { rows: Tensor::f_cat(&row_gradients, 0)?, heads: heads.sums }),
    };
    Ok((Tensor::f_cat(&losses, 0)?, gradients))
}

/// The loss of each row of `logits` `[N, V]`: f32 `[N]`. With gradients, the logits become those of
/// the losses' sum times `scale`.
fn row_losses(
    logits: &mut Tensor,
    targets: &Tensor,
    scale: f64,
    with_gradients: bool,
) -> Result<Tensor> {
    if Kernels::are_on(logits.device()) {
        return shim::cross_entropy(logits, targets, scale, with_gradients);
    }
    row_losses_of_any_device(logits, targets, scale, with_gradients)
}

fn row_losses_of_any_device(
    logits: &mut Tensor,
    targets: &Tensor,
    scale: f64,
    with_gradients: bool,
) -> Result<Tensor> {
    let counts = targets.f_ge(0)?.f_to_kind(Kind::Float)?;
    let column = targets.f_clamp_min(0)?.f_unsqueeze(1)?;
    let wide = logits.f_to_kind(Kind::Float)?;
    let total = wide.f_logsumexp(&[1i64][..], true)?;
    let losses =
        total.f_sub(&wide.f_gather(1, &column, false)?)?.f_squeeze_dim(1)?.f_mul(&counts)?;
    if with_gradients {
        let mut gradient = wide.f_sub(&total)?.f_exp_()?;
        let ones = total.f_ones_like()?;
        gradient = gradient.f_scatter_add_(1, &column, &ones.f_neg()?)?;
        gradient = gradient.f_mul_(&counts.f_mul_scalar(scale)?.f_unsqueeze(1)?)?;
        logits.f_copy_(&gradient)?;
    }
    Ok(losses)
}

/// The most rows of a chunk.
pub(crate) fn chunk_rows(rows: usize, row_bytes: usize) -> usize {
    chunks(rows, row_bytes).iter().map(Range::len).max().unwrap_or(0)
}

/// Ranges of rows, as equal as possible.
fn chunks(rows: usize, row_bytes: usize) -> Vec<Range<usize>> {
    let most = (CHUNK_BYTES / row_bytes).max(1);
    let number = rows.div_ceil(most).max(1);
    (0..number).map(|index| index * rows / number..(index + 1) * rows / number).collect()
}

#[cfg(test)]
mod tests {
    use tch::{Device, Reduction};

    use super::*;
    use crate::device::tensor::elements;

    fn cross_entropy(
        x: &Tensor,
        head: &Tensor,
        targets: &Tensor,
        with_gradients: bool,
    ) -> Result<Loss> {
        loss_of(x, head, targets, Objective::CrossEntropy, with_gradients)
    }

    fn close(one: &Tensor, other: &Tensor, tolerance: f32) -> bool {
        let [one, other] = [one, other].map(|tensor| tensor.to_kind(Kind::Float).contiguous());
        let pairs = elements::<f32>(&one).iter().zip(elements::<f32>(&other));
        pairs.map(|(one, other)| (one - other).abs()).fold(0.0, f32::max) < tolerance
    }

    #[test]
    fn the_fused_loss_matches_that_of_any_device() {
        tch::manual_seed(1);
        for (kind, tolerance) in [(Kind::Float, 1e-6), (Kind::BFloat16, 1e-2)] {
            let logits = Tensor::randn([9, 1003], (Kind::Float, Device::Cpu)) * 8.0;
            let logits = logits.to_kind(kind);
            let targets = Tensor::from_slice(&[0, 1002, IGNORED, 3, 4, 5, IGNORED, 7, 8]);
            let (mut fused, mut plain) = (logits.copy(), logits.copy());
            let losses = row_losses(&mut fused, &targets, 0.5, true).expect("enough memory");
            let expected = row_losses_of_any_device(&mut plain, &targets, 0.5, true);
            assert!(close(&losses, &expected.expect("enough memory"), 1e-4));
            assert!(close(&fused, &plain, tolerance), "{kind:?}");
            let mut kept = logits.copy();
            let alone = row_losses(&mut kept, &targets, 0.5, false).expect("enough memory");
            assert_eq!((alone, kept), (losses, logits));
        }
    }

    #[test]
    fn chunks_cover_all_rows_within_the_cap() {
        for (rows, row_bytes) in [(1, 2), (1024, 1024), (1024, 303_872), (7, 1 << 24), (5, 1 << 28)]
        {
            let chunks = chunks(rows, row_bytes);
            let most = (CHUNK_BYTES / row_bytes).max(1);
            assert!(chunks.iter().all(|chunk| (1..=most).contains(&chunk.len())), "{chunks:?}");
            let covered: Vec<usize> = chunks.into_iter().flatten().collect();
            assert_eq!(covered, (0..rows).collect::<Vec<_>>());
        }
    }

    #[test]
    fn chunks_and_masks_match_one_large_cross_entropy() {
        tch::manual_seed(1);
        let (rows, vocabulary) = (40, 1 << 20);
        let options = (Kind::Float, Device::Cpu);
        let x = Tensor::randn([rows, 8], options).set_requires_grad(true);
        let head = Tensor::randn([vocabulary, 8], options).set_requires_grad(true);
        let targets: Vec<i64> =
            (0..rows).map(|row| if row % 3 == 0 { IGNORED } else { row * 1000 }).collect();
        let targets = Tensor::from_slice(&targets);
        assert!(chunks(rows as usize, 4 * vocabulary as usize).len() > 1);
        let ours = cross_entropy(&x, &head, &targets, true).expect("enough memory");
        let whole = x.linear(&head, None::<Tensor>).cross_entropy_loss(
            &targets,
            None::<Tensor>,
            Reduction::Sum,
            IGNORED,
            0.0,
        ) / rows as f64;
        let theirs = shim::gradients(&whole, None, &[&x, &head]).expect("a graph");
        // A sum over a million words in f32, whose rounding grows with the loss and with shorter vectors.
        let (value, expected) = (ours.value.double_value(&[]), whole.double_value(&[]));
        assert!((value - expected).abs() < 1e-5 * expected, "{value} instead of {expected}");
        let gradients = ours.gradients.expect("asked for");
        let [of_head] = &gradients.heads[..] else { panic!("one trained head") };
        assert!(close(&gradients.rows, &theirs[0], 1e-5) && close(of_head, &theirs[1], 1e-5));
        let plain = cross_entropy(&x, &head, &targets, false).expect("enough memory");
        assert_eq!(plain.value.double_value(&[]), ours.value.double_value(&[]));
        assert!(plain.gradients.is_none());
    }
}
