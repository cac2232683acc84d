//! Gradient descent with momentum, in the order of `torch.optim.SGD`; LARS scales its gradients.

use shoal_protocol::manifest::Sgd;

use super::Terms;
use crate::device::kernel::widest;

/// The scalars of an update, rounded once to f32.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scalars {
    scale: f32,
    /// Share of the weights that is added to the gradient.
    decay: f32,
    /// Factor on that sum.
    trust: f32,
    momentum: f32,
    nesterov: bool,
    rate: f32,
}

impl Scalars {
    pub(super) fn new(sgd: &Sgd, terms: &Terms, trust: f64) -> Self {
        Self {
            scale: terms.scale,
            decay: terms.decay as f32,
            trust: trust as f32,
            momentum: sgd.momentum as f32,
            nesterov: sgd.nesterov,
            rate: terms.rate as f32,
        }
    }
}

/// Updates one parameter; without momentum there is no sum of gradients.
pub(super) fn update(
    weights: &mut [f32],
    gradient: &[f32],
    momentum: Option<&mut [f32]>,
    scalars: Scalars,
) {
    match momentum {
        Some(sums) => with_momentum(weights, gradient, sums, scalars),
        None => without_momentum(weights, gradient, scalars),
    }
}

widest! {
    fn with_momentum(weights: &mut [f32], gradient: &[f32], sums: &mut [f32], scalars: Scalars) {
        for ((weight, gradient), sum) in weights.iter_mut().zip(gradient).zip(sums) {
            let gradient = (gradient * scalars.scale + *weight * scalars.decay) * scalars.trust;
            *sum = *sum * scalars.momentum + gradient;
            let ahead = gradient + *sum * scalars.momentum;
            let step = if scalars.nesterov { ahead } else { *sum };
            *weight -= step * scalars.rate;
        }
    }
}

widest! {
    fn without_momentum(weights: &mut [f32], gradient: &[f32], scalars: Scalars) {
        for (weight, gradient) in weights.iter_mut().zip(gradient) {
            let gradient = (gradient * scalars.scale + *weight * scalars.decay) * scalars.trust;
            *weight -= gradient * scalars.rate;
        }
    }
}
