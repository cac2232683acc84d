//! Lion (Chen et al., arXiv 2302.06675), in the order of its authors' PyTorch code.

use shoal_protocol::manifest::Lion;

use super::Terms;
use crate::device::kernel::widest;

/// The scalars of an update, rounded once to f32.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scalars {
    scale: f32,
    keep: f32,
    rate: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
}

impl Scalars {
    pub(super) fn new(lion: &Lion, terms: &Terms) -> Self {
        Self {
            scale: terms.scale,
            keep: (1.0 - terms.rate * terms.decay) as f32,
            rate: terms.rate as f32,
            beta1: lion.beta1 as f32,
            one_minus_beta1: (1.0 - lion.beta1) as f32,
            beta2: lion.beta2 as f32,
            one_minus_beta2: (1.0 - lion.beta2) as f32,
        }
    }
}

widest! {
    /// One pass over weights, gradient and momentum of equal length.
    pub(super) fn update(
        weights: &mut [f32],
        gradient: &[f32],
        momentum: &mut [f32],
        scalars: Scalars,
    ) {
        for ((weight, gradient), mean) in weights.iter_mut().zip(gradient).zip(momentum) {
            let gradient = gradient * scalars.scale;
            let direction = *mean * scalars.beta1 + gradient * scalars.one_minus_beta1;
            let up = if direction > 0.0 { scalars.rate } else { 0.0 };
            let down = if direction < 0.0 { scalars.rate } else { 0.0 };
            *weight = *weight * scalars.keep - (up - down);
            *mean = *mean * scalars.beta2 + gradient * scalars.one_minus_beta2;
        }
    }
}
