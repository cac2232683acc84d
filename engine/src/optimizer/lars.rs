//! LARS (You et al., arXiv 1708.03888): gradient descent with momentum, whose gradients have a norm relative to
//! that of their weights. Vectors are not scaled.

use shoal_protocol::manifest::{Lars, Sgd};

use super::{Terms, norm, sgd};

/// Updates one parameter.
pub(super) fn update(
    lars: &Lars,
    terms: &Terms,
    weights: &mut [f32],
    gradient: &[f32],
    momentum: Option<&mut [f32]>,
) {
    let trust = if terms.is_matrix { trust(lars, terms, weights, gradient) } else { 1.0 };
    let sgd = Sgd { momentum: lars.momentum, nesterov: false };
    sgd::update(weights, gradient, momentum, sgd::Scalars::new(&sgd, terms, trust));
}

/// Factor on the gradient with its decay; 1 where one of the norms is 0.
fn trust(lars: &Lars, terms: &Terms, weights: &[f32], gradient: &[f32]) -> f64 {
    let of_weights = norm(weights);
    let of_gradient = norm(gradient) * f64::from(terms.scale);
    if of_weights == 0.0 || of_gradient == 0.0 {
        return 1.0;
    }
    lars.trust_coefficient * of_weights / (of_gradient + of_weights * terms.decay + lars.epsilon)
}
