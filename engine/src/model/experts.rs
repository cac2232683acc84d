//! Mixtures of experts: a router chooses some of a layer's experts for each token, and adds their outputs (Shazeer et al.,
//! arXiv 1701.06538).
//!
//! Tokens are sorted by expert, so that an expert is one product over its own tokens. What experts gave is taken back by
//! the inverse permutation, and each token adds its results in the order of its choices: no sum depends on an order of
//! threads, forward or backward. No token is dropped. An expert without tokens has a gradient of zero.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::model::decoder::inner;
use crate::model::layer::{DenseSlice, Experts, ExpertsSlice, Rows, Shape, SlicedExperts};
use crate::model::own_slices::OwnSlices;
use crate::model::routing::Routing;
use crate::model::token_groups::TokenGroups;

/// The inner values of products `[N, gates and ups]`. Of no rows they are no rows, for which no kernel is launched, but a
/// part of the graph.
fn inner_of(both: &Tensor, shape: &Shape) -> Result<Tensor> {
    let (rows, width) = both.size2()?;
    if rows == 0 { Ok(both.f_narrow(-1, 0, width / 2)?) } else { inner(both, shape) }
}

/// What an expert of all tokens gives `x`, times the sigmoid of one number for each, which is f32.
fn weigh(output: &Tensor, logit: &Tensor) -> Result<Tensor> {
    let weight = logit.f_to_kind(Kind::Float)?.f_sigmoid()?;
    Ok(output.f_mul(&weight)?.f_to_kind(output.kind())?)
}

impl Experts {
    /// The mixture for `x`, `[B, T, H]`; see [`BalanceLoss`] for `counted`.
    pub(crate) fn apply(&self, x: &Tensor, shape: &Shape, counted: f64) -> Result<Tensor> {
        let of = shape.experts();
        let rows = x.f_flatten(0, 1)?;
        let logits = of.logits(&rows, &self.router, self.router_bias.as_ref())?;
        let (routing, weights) = match &self.biases {
            None => {
                let [experts, weights] = of.choose(&logits)?;
                let routing = Routing::new(&experts, of)?;
                match of.balance_loss {
                    None => (routing, weights),
                    Some(loss) => {
                        let logits = logits.f_to_kind(Kind::Float)?;
                        let [_, weights] = of.choose(&loss.add_to(&logits, &routing, counted)?)?;
                        (routing, weights)
                    }
                }
            }
            Some(biases) => {
                let choice = of.choose_biased(&logits, biases)?;
                let routing = Routing::new(&choice.experts, of)?;
                let logits = biases.count(&logits, &routing)?;
                (routing, of.weights(&logits, &choice)?)
            }
        };
        self.loads.note(&logits, &routing, of)?;
        let mut mixed = routing.mix(&rows, &weights, |expert, rows| {
            let expert = &self.experts[expert];
            expert.down.apply(&inner_of(&expert.gate_up.apply(rows)?, shape)?)
        })?;
        if let Some((expert, gate)) = &self.shared {
            let output = expert.down.apply(&inner(&expert.gate_up.apply(&rows)?, shape)?)?;
            let output = match gate {
                Some(gate) => weigh(&output, &rows.f_linear(gate, None::<Tensor>)?)?,
                None => output,
            };
            mixed = mixed.f_add(&output)?;
        }
        Ok(mixed.f_view_as(x)?)
    }
}

impl SlicedExperts {
    /// The mixture for the device's tokens, with constants of one slice: each slice has its share of the width inside
    /// every expert. The router of each group of tokens is by itself.
    pub(crate) fn apply(
        &self,
        x: &Tensor,
        shape: &Shape,
        own: &OwnSlices,
        groups: &TokenGroups<'_>,
        counted: f64,
    ) -> Result<Tensor> {
        let of = shape.experts();
        let width = x.size2()?.1;
        let products =
            |matrices: &[Tensor], product: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>| {
                // The gradients of all groups are added to each other before another's.
                groups.by_group(&x.f_view_as(x)?, |group, rows| {
                    product(rows, &matrices[group].f_view([-1, width])?)
                })
            };
        let of_all =
            |x: &Tensor| -> Result<Vec<Tensor>> { own.fan_out(&groups.all(x)?.f_flatten(0, 1)?) };
        let chosen = products(&self.router, &|rows, matrix| of.logits(rows, matrix, None))?;
        let chosen = of_all(&chosen.f_to_kind(Kind::Float)?)?;
        let shared = match self.shared_gate.is_empty() {
            true => Vec::new(),
            false => {
                let plain =
                    |rows: &Tensor, matrix: &Tensor| Ok(rows.f_linear(matrix, None::<Tensor>)?);
                of_all(&products(&self.shared_gate, &plain)?.f_to_kind(Kind::Float)?)?
            }
        };
        let biased = self.biases.as_ref();
        let biased = biased
            .map(|biases| -> Result<_> { Ok((biases, of.choose_biased(&chosen[0], biases)?)) })
            .transpose()?;
        let experts = match &biased {
            None => {
                let [experts, _] = of.choose(&chosen[0])?;
                experts
            }
            Some((_, choice)) => choice.experts.shallow_clone(),
        };
        let routing = Routing::new(&experts, of)?;
        self.loads.note(&chosen[0], &routing, of)?;
        let mut parts = Vec::with_capacity(self.slices.len());
        let all = of_all(x)?.into_iter().zip(chosen).zip(&self.slices);
        for (number, ((rows, logits), slice)) in all.enumerate() {
            let weights = match &biased {
                None => {
                    // Every slice has the same loss, and the first one counts.
                    let loss = of.balance_loss.filter(|_| number == 0 && own.counts_shared());
                    let logits = match loss {
                        Some(loss) => loss.add_to(&logits, &routing, counted)?,
                        None => logits,
                    };
                    let [_, weights] = of.choose(&logits)?;
                    weights
                }
                // Every slice chooses the same, and one counts.
                Some((biases, choice)) if number == 0 => {
                    of.weights(&biases.count(&logits, &routing)?, choice)?
                }
                Some((_, choice)) => of.weights(&logits, choice)?,
            };
            let part = slice.apply(&rows, (&routing, &weights), shared.get(number), shape)?;
            parts.push(groups.unflatten(&part)?);
        }
        groups.sum(&parts, &[])
    }
}

impl ExpertsSlice {
    /// This slice's term of the mixture for all tokens `[N, H]`, of which `shared` are the logits of the shared expert, if they weigh
    /// it.
    fn apply(
        &self,
        rows: &Tensor,
        (routing, weights): (&Routing, &Tensor),
        shared: Option<&Tensor>,
        shape: &Shape,
    ) -> Result<Tensor> {
        let mixed =
            routing.mix(rows, weights, |expert, rows| self.experts[expert].apply(rows, shape))?;
        match (&self.shared, shared) {
            (None, _) => Ok(mixed),
            (Some(expert), None) => Ok(mixed.f_add(&expert.apply(rows, shape)?)?),
            (Some(expert), Some(logit)) => {
                Ok(mixed.f_add(&weigh(&expert.apply(rows, shape)?, logit)?)?)
            }
        }
    }
}

impl DenseSlice {
    /// This slice's term of a block without biases, for rows `[N, H]`.
    fn apply(&self, rows: &Tensor, shape: &Shape) -> Result<Tensor> {
        let Rows { weights, .. } = &self.gate_up;
        let both = match weights.windows.is_empty() {
            true => {
                let each = weights.matrices.iter();
                let each = each.map(|matrix| Ok(rows.f_linear(matrix, None::<Tensor>)?));
                Tensor::f_cat(&each.collect::<Result<Vec<_>>>()?, -1)?
            }
            false => weights.linear(rows, None)?,
        };
        self.down.linear(&inner_of(&both, shape)?, None)
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::manifest::{Experts as Settings, Model};
    use tch::Device;

    use super::*;
    use crate::device::shim::gradients;
    use crate::device::tensor::elements;
    use crate::model::expert_loads::LayerLoads;
    use crate::model::factor::Factor;
    use crate::model::layer::{Dense, Linear};
    use crate::testing::manifest;

    const WIDTH: i64 = 8;

    /// A run's model with these experts, each as wide as the stream.
    fn model(count: u32, per_token: u32, renormalise: bool) -> Model {
        let mut model = manifest().model;
        model.block.experts =
            Some(Settings { renormalise, ..Settings::new(count, per_token, WIDTH as u32) });
        model
    }

    /// Numbers without a pattern, from 0 to 996.
    fn numbers(seed: i64) -> impl Iterator<Item = i64> {
        let mut state = seed;
        std::iter::from_fn(move || {
            state = (state * 16_807 + 11) % 2_147_483_647;
            Some(state % 997)
        })
    }

    fn floats(tensor: &Tensor) -> Vec<f32> {
        elements(&tensor.contiguous()).to_vec()
    }

    /// A matrix with one power of two in each row and each column, so that no product rounds a sum.
    fn exact_matrix(seed: i64) -> Tensor {
        let mut matrix = vec![0f32; (WIDTH * WIDTH) as usize];
        for row in 0..WIDTH {
            let column = (3 * row + seed) % WIDTH;
            let value = [1.0, -0.5, 2.0, -1.0][((row + seed) % 4) as usize];
            matrix[(row * WIDTH + column) as usize] = value;
        }
        Tensor::from_slice(&matrix).view([WIDTH, WIDTH])
    }

    fn linear(weight: Tensor) -> Linear {
        let weight = Factor::plain(weight.set_requires_grad(true));
        Linear { weight, bias: None, adapter: None }
    }

    /// Experts whose logits are `logit` times a channel of the token.
    fn exact_experts(count: i64, logit: f64) -> Experts {
        let expert = |number| Dense {
            gate_up: linear(Tensor::cat(&[exact_matrix(number), exact_matrix(number + 5)], 0)),
            down: linear(exact_matrix(number + 2)),
        };
        let router = Tensor::eye_m(count, WIDTH, (Kind::Float, Device::Cpu)) * logit;
        Experts {
            router: router.set_requires_grad(true),
            router_bias: None,
            experts: (0..count).map(expert).collect(),
            shared: None,
            biases: None,
            loads: LayerLoads::default(),
        }
    }

    /// Tokens of small integers, `[1, N, WIDTH]`, among which some logits are equal.
    fn tokens(count: i64) -> Tensor {
        let values = numbers(7).take((count * WIDTH) as usize);
        let values: Vec<f32> = values.map(|number| (number % 5) as f32 - 2.0).collect();
        Tensor::from_slice(&values).view([1, count, WIDTH])
    }

    /// The mixture of tokens and the gradient of each, given these tokens' numbers.
    fn rows_of(
        experts: &Experts,
        shape: &Shape,
        all: &Tensor,
        which: &[i64],
    ) -> Vec<[Vec<f32>; 2]> {
        let index = Tensor::from_slice(which);
        let x = all.index_select(1, &index).set_requires_grad(true);
        let mixed = experts.apply(&x, shape, 1.0).expect("a mixture");
        let weights = tokens(64).index_select(1, &index) + 0.5;
        let of_x = gradients(&mixed, Some(&weights), &[&x]).expect("a graph").remove(0);
        let row = |of: &Tensor, at| floats(&of.select(1, at));
        (0..which.len() as i64).map(|at| [row(&mixed, at), row(&of_x, at)]).collect()
    }

    #[test]
    fn a_tokens_bits_depend_on_no_other_token_and_on_no_order() {
        let all = tokens(64);
        let in_order: Vec<i64> = (0..64).collect();
        for (count, per_token, renormalise) in
            [(4, 2, true), (5, 3, false), (8, 1, true), (6, 6, true)]
        {
            let model = model(count, per_token, renormalise);
            let shape = Shape::new(&model, Device::Cpu).expect("small");
            let experts = exact_experts(i64::from(count), 0.75);
            let expected = rows_of(&experts, &shape, &all, &in_order);
            for seed in 1..6 {
                let mut order = in_order.clone();
                let mut dice = numbers(seed);
                order.sort_by_cached_key(|_| dice.next());
                // All in another order, and some of them alone.
                for which in [&order[..], &order[..17], &order[..1]] {
                    for (row, token) in rows_of(&experts, &shape, &all, which).iter().zip(which) {
                        assert_eq!(*row, expected[*token as usize], "token {token} of {which:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn an_expert_without_tokens_has_a_gradient_of_zero() {
        let shape = Shape::new(&model(6, 2, true), Device::Cpu).expect("small");
        // All logits are equal: every token has the first two experts.
        let experts = exact_experts(6, 0.0);
        let mixed = experts.apply(&tokens(9), &shape, 1.0).expect("a mixture");
        let matrix = |linear: &Linear| linear.weight.matrices[0].shallow_clone();
        let matrices = experts.experts.iter().flat_map(|one| [&one.gate_up, &one.down]);
        let matrices: Vec<Tensor> = matrices.map(matrix).collect();
        let inputs: Vec<&Tensor> = matrices.iter().chain([&experts.router]).collect();
        let found = gradients(&mixed, Some(&mixed.ones_like()), &inputs).expect("a graph");
        let is_zero = |tensor: &Tensor| floats(tensor).iter().all(|value| *value == 0.0);
        let zeros: Vec<bool> = found.iter().map(is_zero).collect();
        assert_eq!(zeros[..4], [false; 4]);
        assert_eq!(zeros[4..12], [true; 8]);
        assert!(!zeros[12], "the router learns");
        assert!(found.iter().zip(&inputs).all(|(one, of)| one.size() == of.size()));
    }
}
