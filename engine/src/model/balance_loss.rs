//! The auxiliary loss that keeps a layer's experts equally busy (Lepikhin et al., arXiv 2006.16668; Fedus et al.,
//! arXiv 2101.03961).
//!
//! Of a microbatch of T tokens and E experts it is `E · Σ f · P`, where `f` is the tokens that chose the expert over T, and `P`
//! the mean of its shares. Only its gradient is computed: it is added to that of the router's logits in the layer's own
//! backward pass, so no number travels between stages.

use shoal_protocol::manifest::{Balance, Model};
use tch::{Kind, Tensor};

use crate::device::shim;
use crate::error::Result;
use crate::model::routing::Routing;

/// The auxiliary loss of a layer's experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BalanceLoss {
    /// Factor on the loss of each layer: the coefficient over the number of layers with experts.
    factor: f64,
}

impl BalanceLoss {
    /// That of a model's layers, if they have one.
    pub(crate) fn of(model: &Model) -> Option<Self> {
        let experts = model.block.experts.as_ref()?;
        if experts.balance != Balance::Loss {
            return None;
        }
        let layers = (0..model.layers).filter(|layer| model.experts_of(*layer).is_some()).count();
        Some(Self { factor: experts.balance_coefficient / layers as f64 })
    }

    /// The logits `[N, experts]`, f32, whose gradient gets that of the loss. `counted` is the share of the microbatch's terms
    /// that count towards the loss of the text, by which the microbatch counts here too.
    pub(crate) fn add_to(self, logits: &Tensor, routing: &Routing, counted: f64) -> Result<Tensor> {
        if !logits.requires_grad() {
            return Ok(logits.shallow_clone());
        }
        let gradient = {
            let _guard = tch::no_grad_guard();
            let (tokens, experts) = logits.size2()?;
            let tokens = tokens as f64;
            let scale = self.factor * counted * experts as f64 / (tokens * tokens);
            let loads = routing.counts().iter().map(|count| (*count as f64 * scale) as f32);
            let loads = Tensor::f_from_slice(&loads.collect::<Vec<_>>())?.f_to(logits.device())?;
            // Through the softmax: each share times what its load is above the token's mean.
            let shares = logits.f_softmax(-1, Kind::Float)?;
            let mean = shares.f_mul(&loads)?;
            let mean = mean.f_sum_dim_intlist(Some(&[-1i64][..]), true, Kind::Float)?;
            shares.f_mul(&loads.f_sub(&mean)?)?
        };
        shim::add_gradient(logits, &gradient)
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::manifest::Experts;
    use tch::Device;

    use super::*;
    use crate::device::tensor::elements;
    use crate::model::routing::ExpertsShape;
    use crate::testing::manifest;

    fn model(dense_layers: Vec<u32>) -> Model {
        let mut model = manifest().model;
        model.block.experts = Some(Experts {
            dense_layers,
            balance: Balance::Loss,
            balance_coefficient: 0.3,
            ..Experts::new(4, 2, 8)
        });
        model
    }

    #[test]
    fn the_gradient_is_that_of_the_loss_in_f64() {
        let model = model(vec![0]);
        let layers = f64::from(model.layers - 1);
        let shape = ExpertsShape::of(&model).expect("experts");
        let loss = BalanceLoss::of(&model).expect("a loss");
        let rows = [[3f32, 1.0, 2.0, 0.0], [1.0, 1.5, 1.0, 1.0], [0.0, 5.0, 0.0, 4.0]];
        let logits = Tensor::from_slice(rows.as_flattened()).view([3, 4]).set_requires_grad(true);
        let [experts, _] = shape.choose(&logits).expect("small");
        let routing = Routing::new(&experts, &shape).expect("small");
        assert_eq!(routing.counts(), [2, 2, 1, 1]);
        let counted = 0.75;
        let passed = loss.add_to(&logits, &routing, counted).expect("small");
        let found = shim::gradients(&passed, Some(&passed.ones_like()), &[&logits]);
        let found = found.expect("a graph").remove(0) - 1.0;
        let wide = logits.detach().to_kind(Kind::Double).set_requires_grad(true);
        let shares = wide.softmax(-1, Kind::Double).mean_dim(0, false, Kind::Double);
        let fractions = Tensor::from_slice(&[2f64, 2.0, 1.0, 1.0]) / 3.0;
        let value = (fractions * shares).sum(Kind::Double) * (4.0 * 0.3 / layers * counted);
        let expected = shim::gradients(&value, None, &[&wide]).expect("a graph").remove(0);
        let off = (found.to_kind(Kind::Double) - expected).abs().max().double_value(&[]);
        assert!(off < 1e-7, "{off}");
    }

    #[test]
    fn logits_without_a_gradient_stay_as_they_are() {
        let model = model(Vec::new());
        let shape = ExpertsShape::of(&model).expect("experts");
        let logits = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
        let [experts, _] = shape.choose(&logits).expect("small");
        let routing = Routing::new(&experts, &shape).expect("small");
        let loss = BalanceLoss::of(&model).expect("a loss");
        let passed = loss.add_to(&logits, &routing, 1.0).expect("small");
        assert_eq!(elements::<f32>(&passed), elements::<f32>(&logits));
        assert!(!passed.requires_grad());
    }
}
