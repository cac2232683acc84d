//! LAMB (You et al., arXiv 1904.00962): Adam's updates with the norms of their weights. Vectors are not scaled.

use shoal_protocol::manifest::Adam;

use super::{Terms, adamw, norm, take_step};
use crate::device::kernel::widest;

/// Updates one parameter.
pub(super) fn update(
    adam: &Adam,
    terms: &Terms,
    weights: &mut [f32],
    gradient: &[f32],
    moments: [&mut [f32]; 2],
) {
    // The rate is applied after the norm is known.
    let unit = Terms { rate: 1.0, decay: 0.0, ..*terms };
    let correction1 = (1.0 - libm::pow(adam.beta1, terms.count as f64)) as f32;
    let mut change = vec![0.0; weights.len()];
    let scalars = adamw::Scalars::new(adam, &unit);
    directions(&mut change, weights, gradient, moments, scalars, [correction1, terms.decay as f32]);
    let trust = if terms.is_matrix { trust(norm(weights), norm(&change)) } else { 1.0 };
    take_step(weights, &change, 1.0, (terms.rate * trust) as f32);
}

/// The ratio of the norms; 1 where one of them is 0.
fn trust(of_weights: f64, of_change: f64) -> f64 {
    if of_weights == 0.0 || of_change == 0.0 { 1.0 } else { of_weights / of_change }
}

widest! {
    fn directions(
        change: &mut [f32],
        weights: &[f32],
        gradient: &[f32],
        moments: [&mut [f32]; 2],
        scalars: adamw::Scalars,
        factors: [f32; 2],
    ) {
        let [first, second] = moments;
        let [correction1, decay] = factors;
        let moments = first.iter_mut().zip(second);
        let both = change.iter_mut().zip(weights);
        for (((change, weight), gradient), (first, second)) in both.zip(gradient).zip(moments) {
            let gradient = gradient * scalars.scale;
            *first += (gradient - *first) * scalars.one_minus_beta1;
            *second = *second * scalars.beta2 + gradient * gradient * scalars.one_minus_beta2;
            let denominator = second.sqrt() / scalars.root_correction2 + scalars.epsilon;
            *change = *first / correction1 / denominator + weight * decay;
        }
    }
}
