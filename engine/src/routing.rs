//! The router of a mixture: the experts that each token chooses, and the way of its row to them and back.

use shoal_protocol::manifest::{Model, Router};
use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::shim;
use crate::tensor::elements;

/// The constants of a model's experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertsShape {
    count: usize,
    per_token: i64,
    renormalise: bool,
}

impl ExpertsShape {
    pub(crate) fn of(model: &Model) -> Option<Self> {
        let experts = model.block.experts.as_ref()?;
        let Router::Softmax = experts.router;
        Some(Self {
            count: experts.count as usize,
            per_token: i64::from(experts.per_token),
            renormalise: experts.renormalise,
        })
    }

    /// The chosen experts of each token, best first, and their weights in f32, both `[N, per_token]`, of logits `[N,
    /// experts]`. Of equal experts the one with the lower number is chosen.
    pub(crate) fn choose(&self, logits: &Tensor) -> Result<[Tensor; 2]> {
        let shares = logits.f_softmax(-1, Kind::Float)?;
        let (sorted, experts) = shares.f_sort_stable(true, -1, true)?;
        let weights = sorted.f_narrow(-1, 0, self.per_token)?;
        let experts = experts.f_narrow(-1, 0, self.per_token)?;
        if !self.renormalise {
            return Ok([experts, weights]);
        }
        let sum = weights.f_sum_dim_intlist(Some(&[-1i64][..]), true, Kind::Float)?;
        Ok([experts, weights.f_div(&sum)?])
    }
}

/// The choices of tokens sorted by expert. A choice is a token's number times the experts of a token, plus the choice's
/// place among the token's.
#[derive(Debug, PartialEq, Eq)]
struct Sorted {
    /// The choices by expert, those of an expert in ascending order.
    order: Vec<i64>,
    /// The place of each choice in that order.
    inverse: Vec<i64>,
    /// Choices of each expert.
    counts: Vec<i64>,
}

impl Sorted {
    /// Sorts choices, each an expert's number below `experts`.
    fn new(choices: &[i64], experts: usize) -> Self {
        let mut counts = vec![0; experts];
        choices.iter().for_each(|expert| counts[*expert as usize] += 1);
        let mut next = Vec::with_capacity(experts);
        let mut start = 0;
        for count in &counts {
            next.push(start);
            start += count;
        }
        let (mut order, mut inverse) = (vec![0; choices.len()], vec![0; choices.len()]);
        for (choice, expert) in choices.iter().enumerate() {
            let place = &mut next[*expert as usize];
            order[*place as usize] = choice as i64;
            inverse[choice] = *place;
            *place += 1;
        }
        Self { order, inverse, counts }
    }
}

/// Where each token's choices are among those sorted by expert.
pub(crate) struct Routing {
    order: Tensor,
    inverse: Tensor,
    counts: Vec<i64>,
}

impl Routing {
    /// Of chosen experts `[N, per_token]`. The host waits for a GPU once, since the products depend on the counts.
    pub(crate) fn new(experts: &Tensor, shape: &ExpertsShape) -> Result<Self> {
        let device = experts.device();
        let choices = experts.f_detach()?.f_to(Device::Cpu)?.f_contiguous()?;
        let Sorted { order, inverse, counts } = Sorted::new(elements(&choices), shape.count);
        let tensor =
            |places: &[i64]| -> Result<Tensor> { Ok(Tensor::f_from_slice(places)?.f_to(device)?) };
        Ok(Self { order: tensor(&order)?, inverse: tensor(&inverse)?, counts })
    }

    /// What the chosen experts give each token of `x`, `[N, H]`, times their weights: `[N, H]` of `apply`'s outputs.
    pub(crate) fn mix(
        &self,
        x: &Tensor,
        weights: &Tensor,
        apply: impl Fn(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (tokens, width) = x.size2()?;
        let choices = weights.size2()?.1;
        let repeated = x.f_unsqueeze(1)?.f_expand([tokens, choices, width], true)?;
        let repeated = repeated.f_reshape([tokens * choices, width])?;
        let sorted = shim::permute(&repeated, [&self.order, &self.inverse])?;
        let of_experts = sorted.f_split_with_sizes(self.counts.as_slice(), 0)?;
        let outputs = of_experts.iter().enumerate().map(|(expert, rows)| apply(expert, rows));
        let outputs = Tensor::f_cat(&outputs.collect::<Result<Vec<_>>>()?, 0)?;
        let outputs = shim::permute(&outputs, [&self.inverse, &self.order])?;
        let outputs = outputs.f_view([tokens, choices, -1])?;
        let weighed = outputs.f_mul(&weights.f_unsqueeze(-1)?)?;
        let mut results = weighed.f_unbind(1)?.into_iter();
        let first = results.next().expect("a token has an expert");
        let sum = results.try_fold(first, |sum, result| sum.f_add(&result))?;
        Ok(sum.f_to_kind(x.kind())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers without a pattern, from 0 to 996.
    fn numbers(seed: i64) -> impl Iterator<Item = i64> {
        let mut state = seed;
        std::iter::from_fn(move || {
            state = (state * 16_807 + 11) % 2_147_483_647;
            Some(state % 997)
        })
    }

    #[test]
    fn of_equal_experts_the_lower_number_is_chosen() {
        let shape = ExpertsShape { count: 6, per_token: 3, renormalise: true };
        let choose = |logits: &[f32]| {
            let logits = Tensor::from_slice(logits).view([-1, 6]);
            let [experts, weights] = shape.choose(&logits).expect("small");
            let weights = elements::<f32>(&weights.contiguous()).to_vec();
            (elements::<i64>(&experts.contiguous()).to_vec(), weights)
        };
        let (experts, weights) = choose(&[0.0; 12]);
        assert_eq!(experts, [0, 1, 2, 0, 1, 2]);
        assert!(weights.iter().all(|weight| (weight - 1.0 / 3.0).abs() < 1e-6), "{weights:?}");
        assert_eq!(choose(&[1.0, 3.0, 1.0, 3.0, 2.0, 1.0]).0, [1, 3, 4]);
        assert_eq!(choose(&[1.0, 0.0, 1.0, 2.0, 1.0, 1.0]).0, [3, 0, 2]);
    }

    #[test]
    fn choices_are_sorted_by_expert_in_their_order() {
        for (count, experts) in [(0, 1), (1, 3), (200, 7), (64, 64)] {
            let choices: Vec<i64> =
                numbers(count + 1).take(count as usize).map(|number| number % experts).collect();
            let Sorted { order, inverse, counts } = Sorted::new(&choices, experts as usize);
            let mut expected: Vec<i64> = (0..count).collect();
            expected.sort_by_key(|choice| choices[*choice as usize]);
            assert_eq!(order, expected, "a stable sort");
            for (choice, place) in inverse.iter().enumerate() {
                assert_eq!(order[*place as usize], choice as i64);
            }
            assert_eq!(counts.iter().sum::<i64>(), count, "no token is dropped");
        }
    }
}
