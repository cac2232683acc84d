//! The router of a mixture: the experts that each token chooses, and the way of its row to them and back.

use shoal_protocol::manifest::{Model, Router};
use tch::{Device, Kind, Tensor};

use crate::device::shim;
use crate::device::tensor::elements;
use crate::error::Result;
use crate::model::balance_loss::BalanceLoss;

/// The constants of a model's experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertsShape {
    count: usize,
    per_token: i64,
    router: Router,
    /// Whether logits are computed in f32.
    is_wide: bool,
    renormalise: bool,
    scale: f64,
    /// Groups of experts, and those of which a token chooses.
    groups: Option<[i64; 2]>,
    /// What keeps them equally busy, if that is a loss.
    pub(crate) balance_loss: Option<BalanceLoss>,
}

impl ExpertsShape {
    pub(crate) fn of(model: &Model) -> Option<Self> {
        let experts = model.block.experts.as_ref()?;
        Some(Self {
            count: experts.count as usize,
            per_token: i64::from(experts.per_token),
            router: experts.router,
            is_wide: experts.wide_router,
            renormalise: experts.renormalise,
            scale: experts.scale,
            groups: experts.groups.map(|of| [i64::from(of.count), i64::from(of.chosen)]),
            balance_loss: BalanceLoss::of(model),
        })
    }

    /// The logits `[N, experts]` of rows `[N, H]`.
    pub(crate) fn logits(
        &self,
        rows: &Tensor,
        router: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        if !self.is_wide {
            return Ok(rows.f_linear(router, bias)?);
        }
        let wide = |tensor: &Tensor| tensor.f_to_kind(Kind::Float);
        Ok(wide(rows)?.f_linear(&wide(router)?, bias.map(wide).transpose()?)?)
    }

    /// The experts' shares of each token, in f32.
    fn shares(&self, logits: &Tensor) -> Result<Tensor> {
        match self.router {
            Router::Softmax => Ok(logits.f_softmax(-1, Kind::Float)?),
            Router::Sigmoid => Ok(logits.f_to_kind(Kind::Float)?.f_sigmoid()?),
        }
    }

    /// The logarithms of shares, in f32, divided by their sum.
    pub(crate) fn log_shares(&self, logits: &Tensor) -> Result<Tensor> {
        let logits = match self.router {
            Router::Softmax => logits.shallow_clone(),
            Router::Sigmoid => logits.f_to_kind(Kind::Float)?.f_log_sigmoid()?,
        };
        Ok(logits.f_log_softmax(-1, Kind::Float)?)
    }

    /// Like [`Self::choose`], with a bias for each expert that is added to its share for the choice alone.
    pub(crate) fn choose_biased(&self, logits: &Tensor, biases: &Biases) -> Result<BiasedChoice> {
        let _guard = tch::no_grad_guard();
        let biases = biases.values.f_to(logits.device())?;
        let shares = self.of_chosen_groups(&self.shares(logits)?.f_add(&biases)?)?;
        let order = shares.f_sort_stable(true, -1, true)?.1;
        // Places in the rows become places among the shares of all tokens.
        let (tokens, count) = order.size2()?;
        let starts = Tensor::f_arange(tokens, (Kind::Int64, logits.device()))?;
        let starts = starts.f_mul_scalar(count)?.f_unsqueeze(-1)?;
        let flat =
            |places: &Tensor| -> Result<Tensor> { Ok(places.f_add(&starts)?.f_flatten(0, 1)?) };
        let inverse = flat(&order.f_argsort(-1, false)?)?;
        let experts = order.f_narrow(-1, 0, self.per_token)?;
        Ok(BiasedChoice { experts, order: flat(&order)?, inverse })
    }

    /// The weights, in f32, of experts that were chosen with biases: of the shares without them.
    pub(crate) fn weights(&self, logits: &Tensor, choice: &BiasedChoice) -> Result<Tensor> {
        let shares = self.shares(logits)?;
        let rows = shares.f_view([-1, 1])?;
        let sorted = shim::permute(&rows, [&choice.order, &choice.inverse])?.f_view_as(&shares)?;
        self.normalised(sorted.f_narrow(-1, 0, self.per_token)?)
    }

    /// Weights of chosen experts, divided by their sums if the model does that, times its factor.
    fn normalised(&self, mut weights: Tensor) -> Result<Tensor> {
        if self.renormalise {
            let mut sum = weights.f_sum_dim_intlist(Some(&[-1i64][..]), true, Kind::Float)?;
            if self.router == Router::Sigmoid {
                // All may be zeros.
                sum = sum.f_add_scalar(1e-20)?;
            }
            weights = weights.f_div(&sum)?;
        }
        if self.scale != 1.0 {
            weights = weights.f_mul_scalar(self.scale)?;
        }
        Ok(weights)
    }

    /// The shares `[N, experts]`, of which those outside of each token's groups are minus infinity. A group counts by its best,
    /// with sigmoids by the sum of its best two.
    fn of_chosen_groups(&self, shares: &Tensor) -> Result<Tensor> {
        let Some([groups, chosen]) = self.groups else { return Ok(shares.shallow_clone()) };
        let by_group = shares.f_unflatten(-1, [groups, -1])?;
        let others = {
            let _guard = tch::no_grad_guard();
            let best = match self.router {
                Router::Softmax => by_group.f_amax([-1i64].as_slice(), false)?,
                Router::Sigmoid => {
                    let (best, _) = by_group.f_topk(2, -1, true, true)?;
                    best.f_select(-1, 0)?.f_add(&best.f_select(-1, 1)?)?
                }
            };
            let order = best.f_sort_stable(true, -1, true)?.1;
            order.f_argsort(-1, false)?.f_ge(chosen)?.f_unsqueeze(-1)?
        };
        Ok(by_group.f_masked_fill(&others, f64::NEG_INFINITY)?.f_flatten(-2, -1)?)
    }

    /// The chosen experts of each token, best first, and their weights in f32, both `[N, per_token]`, of logits `[N,
    /// experts]`. Of equal experts the one with the lower number is chosen.
    pub(crate) fn choose(&self, logits: &Tensor) -> Result<[Tensor; 2]> {
        let shares = self.of_chosen_groups(&self.shares(logits)?)?;
        let (sorted, experts) = shares.f_sort_stable(true, -1, true)?;
        let weights = sorted.f_narrow(-1, 0, self.per_token)?;
        let experts = experts.f_narrow(-1, 0, self.per_token)?;
        Ok([experts, self.normalised(weights)?])
    }
}

/// Experts that were chosen with biases.
pub(crate) struct BiasedChoice {
    /// Those of each token, best first, `[N, per_token]`.
    pub(crate) experts: Tensor,
    /// The places of all tokens' shares in the order of the biased ones, and the inverse.
    order: Tensor,
    inverse: Tensor,
}

/// The biases with which tokens choose a layer's experts.
#[derive(Debug)]
pub(crate) struct Biases {
    /// f32, one for each expert.
    pub(crate) values: Tensor,
    /// What one token counts in their gradient: the resolution of sums, so that each token is 1 there; nothing if they stay
    /// as they are.
    pub(crate) unit: f32,
}

impl Biases {
    /// The logits, of which a backward pass gives the tokens of each expert as the gradient of the biases.
    pub(crate) fn count(&self, logits: &Tensor, routing: &Routing) -> Result<Tensor> {
        if !self.values.requires_grad() {
            return Ok(logits.shallow_clone());
        }
        let counts: Vec<f32> =
            routing.counts.iter().map(|count| *count as f32 * self.unit).collect();
        let counts = Tensor::f_from_slice(&counts)?.f_to(self.values.device())?;
        shim::count(logits, &self.values, &counts)
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

    /// With so many choices of each expert, and of no rows.
    #[cfg(test)]
    pub(crate) fn of_counts(counts: &[i64]) -> Self {
        Self { order: Tensor::new(), inverse: Tensor::new(), counts: counts.to_vec() }
    }

    /// The choices of each expert.
    pub(crate) fn counts(&self) -> &[i64] {
        &self.counts
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

    fn shape(count: usize, per_token: i64, renormalise: bool) -> ExpertsShape {
        ExpertsShape {
            count,
            per_token,
            router: Router::Softmax,
            is_wide: false,
            renormalise,
            scale: 1.0,
            groups: None,
            balance_loss: None,
        }
    }

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
        let shape = shape(6, 3, true);
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
    fn tokens_choose_within_their_best_groups() {
        let mut shape = shape(6, 2, false);
        (shape.groups, shape.scale) = (Some([3, 1]), 2.5);
        // The best expert's group; of two equal groups the first; a group whose second is the smallest of all.
        let rows = [
            [0f32, 1.0, 3.0, 0.5, 2.0, 2.0],
            [1.0, 2.0, 0.0, 2.0, 2.0, 1.0],
            [5.0, -9.0, 4.0, 4.0, 4.0, 4.0],
        ];
        let logits = Tensor::from_slice(rows.as_flattened()).view([3, 6]).set_requires_grad(true);
        let [experts, weights] = shape.choose(&logits).expect("small");
        assert_eq!(elements::<i64>(&experts.contiguous()), [2, 3, 1, 0, 0, 1]);
        let shares = logits.detach().softmax(-1, Kind::Float) * 2.5;
        for (token, experts) in [[2, 3], [1, 0], [0, 1]].into_iter().enumerate() {
            for (place, expert) in experts.into_iter().enumerate() {
                let found = weights.double_value(&[token as i64, place as i64]);
                let expected = shares.double_value(&[token as i64, expert]);
                assert!((found - expected).abs() < 1e-6, "token {token}: {found}, {expected}");
            }
        }
        let found = shim::gradients(&weights, Some(&weights.ones_like()), &[&logits]);
        let found = found.expect("a graph").remove(0);
        assert!(elements::<f32>(&found.contiguous()).iter().all(|one| one.is_finite()));
        shape.groups = Some([3, 2]);
        let [experts, _] = shape.choose(&logits).expect("small");
        assert_eq!(elements::<i64>(&experts.contiguous()), [2, 4, 1, 3, 0, 2]);
    }

    #[test]
    fn biases_choose_experts_and_do_not_weigh_them() {
        for renormalise in [false, true] {
            let shape = shape(4, 2, renormalise);
            let rows = [[3f32, 1.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 5.0, 0.0, 5.0]];
            let logits = Tensor::from_slice(rows.as_flattened()).view([3, 4]);
            let biases = |values: &[f32]| Biases { values: Tensor::from_slice(values), unit: 0.5 };
            let read = |values: &[f32]| {
                let choice = shape.choose_biased(&logits, &biases(values)).expect("small");
                let experts = elements::<i64>(&choice.experts.contiguous()).to_vec();
                let weights = shape.weights(&logits, &choice).expect("small").contiguous();
                (experts, elements::<f32>(&weights).to_vec())
            };
            let [experts, weights] = shape.choose(&logits).expect("small");
            let plain = elements::<f32>(&weights.contiguous()).to_vec();
            assert_eq!(read(&[0.0; 4]), (elements(&experts.contiguous()).to_vec(), plain));
            // Experts 0 and 1 are never among the best two.
            let (experts, weights) = read(&[-2.0, -2.0, 0.0, 0.0]);
            assert_eq!(experts, [2, 3, 2, 3, 3, 2]);
            let shares = logits.softmax(-1, Kind::Float);
            let share = |token, expert| shares.double_value(&[token, expert]) as f32;
            let mut expected = [[2, 3], [2, 3], [3, 2]]
                .into_iter()
                .zip(0..)
                .flat_map(|(experts, token)| experts.map(|expert| share(token, expert)))
                .collect::<Vec<f32>>();
            if renormalise {
                for pair in expected.chunks_mut(2) {
                    let sum = pair[0] + pair[1];
                    pair.iter_mut().for_each(|weight| *weight /= sum);
                }
            }
            let close = |(one, other): (&f32, &f32)| (one - other).abs() < 1e-6;
            assert!(weights.iter().zip(&expected).all(close), "{weights:?} and {expected:?}");
        }
    }

    #[test]
    fn sigmoids_choose_within_groups_by_the_sum_of_two() {
        let mut shape = shape(6, 2, true);
        (shape.router, shape.is_wide) = (Router::Sigmoid, true);
        (shape.groups, shape.scale) = (Some([2, 1]), 2.5);
        // The best expert is in a group whose best two are worse together.
        let rows = [[4f32, -9.0, -9.0, 2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]];
        let logits = Tensor::from_slice(rows.as_flattened()).view([2, 6]);
        let [experts, weights] = shape.choose(&logits).expect("small");
        assert_eq!(elements::<i64>(&experts.contiguous()), [3, 4, 0, 1]);
        let sigmoid = |logit: f64| 1.0 / (1.0 + (-logit).exp());
        let expected = 2.5 * sigmoid(2.0) / (sigmoid(2.0) + sigmoid(1.0));
        assert!((weights.double_value(&[0, 0]) - expected).abs() < 1e-6);
        // Biases choose another expert, whose weight they do not change.
        let values = Tensor::from_slice(&[0f32, 0.0, 0.0, 0.0, -0.5, 0.0]);
        let choice = shape.choose_biased(&logits, &Biases { values, unit: 0.0 }).expect("small");
        assert_eq!(elements::<i64>(&choice.experts.contiguous()), [3, 5, 0, 1]);
        let weights = shape.weights(&logits, &choice).expect("small");
        let expected = 2.5 * 0.5 / (sigmoid(2.0) + 0.5);
        assert!((weights.double_value(&[0, 1]) - expected).abs() < 1e-6);
        // All shares are zeros.
        let logits = Tensor::full([1, 6], -200.0, (Kind::Float, Device::Cpu));
        let [_, weights] = shape.choose(&logits).expect("small");
        assert_eq!(elements::<f32>(&weights.contiguous()), [0.0, 0.0]);
        let shares = shape.log_shares(&logits).expect("small").exp();
        assert!((shares.double_value(&[0, 3]) - 1.0 / 6.0).abs() < 1e-6);
    }

    #[test]
    fn wide_logits_are_those_of_f32() {
        let mut shape = shape(2, 1, true);
        let rows = Tensor::from_slice(&[1f32, 1.0 / 256.0]).view([1, 2]).to_kind(Kind::BFloat16);
        let router =
            Tensor::from_slice(&[1f32, 0.0, 1.0, 0.5]).view([2, 2]).to_kind(Kind::BFloat16);
        let read = |shape: &ExpertsShape| shape.logits(&rows, &router, None).expect("small");
        assert_eq!(read(&shape).double_value(&[0, 1]), 1.0);
        shape.is_wide = true;
        assert_eq!(read(&shape).double_value(&[0, 1]), 1.0 + 1.0 / 512.0);
        assert_eq!(read(&shape).kind(), Kind::Float);
    }

    #[test]
    fn the_gradient_of_biases_is_the_number_of_tokens() {
        let shape = shape(3, 1, true);
        let logits = Tensor::from_slice(&[2f32, 0.0, 1.0, 2.0, 0.0, 1.0]).view([2, 3]);
        let logits = logits.set_requires_grad(true);
        let values = Tensor::from_slice(&[0f32, 0.0, 0.0]).set_requires_grad(true);
        let biases = Biases { values, unit: (-20f32).exp2() };
        let choice = shape.choose_biased(&logits, &biases).expect("small");
        let routing = Routing::new(&choice.experts, &shape).expect("small");
        for seed in [1.0, -7.0] {
            let counted = biases.count(&logits, &routing).expect("small");
            let output = counted.softmax(-1, Kind::Float);
            let of_output = output.ones_like() * seed;
            let inputs = [&logits, &biases.values];
            let found = shim::gradients(&output, Some(&of_output), &inputs).expect("a graph");
            let unit = (-20f32).exp2();
            assert_eq!(elements::<f32>(&found[1]), [2.0 * unit, 0.0, 0.0]);
        }
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
