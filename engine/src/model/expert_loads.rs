//! How busy experts are: what training passes count for metrics. No result depends on it.

use std::cell::RefCell;
use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::model::routing::{ExpertsShape, Routing};

/// What one layer's router did in training passes since it was last read.
#[derive(Debug, Default)]
pub(crate) struct LayerLoads(RefCell<Noted>);

#[derive(Debug, Default)]
struct Noted {
    /// Choices of each expert.
    counts: Vec<u64>,
    tokens: u64,
    /// The sum of all tokens' entropies in nats, on the device.
    entropy: Option<Tensor>,
}

impl LayerLoads {
    /// Notes a pass, unless it is without gradients, as those of held-out samples and those that are repeated later.
    pub(crate) fn note(&self, logits: &Tensor, routing: &Routing, of: &ExpertsShape) -> Result<()> {
        if !logits.requires_grad() {
            return Ok(());
        }
        let _guard = tch::no_grad_guard();
        let logs = of.log_shares(logits)?;
        let entropy = logs.f_exp()?.f_mul(&logs)?.f_sum(Kind::Double)?.f_neg()?;
        let noted = &mut *self.0.borrow_mut();
        noted.entropy = Some(match noted.entropy.take() {
            Some(before) => before.f_add(&entropy)?,
            None => entropy,
        });
        noted.counts.resize(routing.counts().len(), 0);
        let counts = noted.counts.iter_mut().zip(routing.counts());
        counts.for_each(|(all, count)| *all += count.unsigned_abs());
        noted.tokens += logits.size2()?.0.unsigned_abs();
        Ok(())
    }

    /// Hands over what was noted.
    pub(crate) fn take(&self) -> Result<LayerRouting> {
        let Noted { counts, tokens, entropy } = self.0.take();
        let entropy = entropy.map_or(Ok(0.0), |sum| sum.f_double_value(&[]))?;
        Ok(LayerRouting { counts, tokens, entropy })
    }
}

/// What a layer's router did in some passes.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct LayerRouting {
    counts: Vec<u64>,
    tokens: u64,
    entropy: f64,
}

/// What the routers of a stage did in the training passes that a peer ran between two updates.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StageRouting(BTreeMap<usize, LayerRouting>);

impl StageRouting {
    /// Adds what a layer's router did, by its place in the stage.
    pub(crate) fn add(&mut self, place: usize, of_layer: LayerRouting) {
        if of_layer.tokens == 0 {
            return;
        }
        let LayerRouting { counts, tokens, entropy } = of_layer;
        let all = self.0.entry(place).or_default();
        all.counts.resize(counts.len(), 0);
        all.counts.iter_mut().zip(counts).for_each(|(all, count)| *all += count);
        all.tokens += tokens;
        all.entropy += entropy;
    }

    /// Adds what another device's passes did.
    pub(crate) fn join(&mut self, other: Self) {
        other.0.into_iter().for_each(|(place, of_layer)| self.add(place, of_layer));
    }

    /// The tokens of the busiest expert over the mean of its layer's experts: of the layer where that is most. 1 is balance;
    /// `None` without passes or experts.
    #[must_use]
    pub fn load(&self) -> Option<f64> {
        let load = |layer: &LayerRouting| {
            let (most, all) = (layer.counts.iter().max()?, layer.counts.iter().sum::<u64>());
            Some(*most as f64 * layer.counts.len() as f64 / all as f64)
        };
        self.0.values().filter_map(load).reduce(f64::max)
    }

    /// The entropy of a token's shares of the experts in nats, the mean over tokens and layers: the logarithm of the number
    /// of experts where all are equal, 0 where one has all. `None` without passes or experts.
    #[must_use]
    pub fn entropy(&self) -> Option<f64> {
        let tokens: u64 = self.0.values().map(|layer| layer.tokens).sum();
        let entropy: f64 = self.0.values().map(|layer| layer.entropy).sum();
        (tokens > 0).then(|| entropy / tokens as f64)
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::manifest::Experts;

    use super::*;
    use crate::testing::manifest;

    fn layer(counts: &[u64], tokens: u64, entropy: f64) -> LayerRouting {
        LayerRouting { counts: counts.to_vec(), tokens, entropy }
    }

    #[test]
    fn the_layer_with_the_busiest_expert_decides() {
        let mut stage = StageRouting::default();
        assert_eq!((stage.load(), stage.entropy()), (None, None));
        stage.add(0, layer(&[2, 2, 2, 2], 4, 4.0));
        stage.add(1, layer(&[], 0, 0.0));
        assert_eq!((stage.load(), stage.entropy()), (Some(1.0), Some(1.0)));
        let mut other = StageRouting::default();
        other.add(0, layer(&[2, 2, 2, 2], 4, 4.0));
        other.add(3, layer(&[8, 0, 0, 0], 4, 1.0));
        stage.join(other);
        assert_eq!((stage.load(), stage.entropy()), (Some(4.0), Some(0.75)));
    }

    #[test]
    fn passes_without_gradients_are_not_noted() {
        let loads = LayerLoads::default();
        let logits = Tensor::from_slice(&[0f32, 0.0, 0.0, 90.0]).view([2, 2]);
        let routing = Routing::of_counts(&[1, 1]);
        let mut model = manifest().model;
        model.block.experts = Some(Experts::new(2, 1, 8));
        let shape = ExpertsShape::of(&model).expect("experts");
        loads.note(&logits, &routing, &shape).expect("small");
        assert_eq!(loads.take().expect("small"), LayerRouting::default());
        let logits = logits.set_requires_grad(true);
        (0..2).for_each(|_| loads.note(&logits, &routing, &shape).expect("small"));
        let noted = loads.take().expect("small");
        assert_eq!((noted.counts, noted.tokens), (vec![2, 2], 4));
        assert!((noted.entropy - 2.0 * std::f64::consts::LN_2).abs() < 1e-6);
        assert_eq!(loads.take().expect("small"), LayerRouting::default());
    }
}
