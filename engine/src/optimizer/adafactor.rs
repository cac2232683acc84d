//! Adafactor (Shazeer and Stern, arXiv 1804.04235), as in `torch.optim.Adafactor`: the second moment of a matrix
//! is the product of a vector for its rows and one for its columns.

use shoal_protocol::manifest::Adafactor;

use super::{Terms, norm, take_step};
use crate::device::kernel::widest;
use crate::numeric::square_norm::square_norm;

/// Updates a vector with its second moment.
pub(super) fn update_vector(
    adafactor: &Adafactor,
    terms: &Terms,
    weights: &mut [f32],
    gradient: &[f32],
    second: &mut [f32],
) {
    let share = newest_share(adafactor, terms);
    let mut change = vec![0.0; weights.len()];
    for ((second, gradient), change) in second.iter_mut().zip(gradient).zip(&mut change) {
        let gradient = gradient * terms.scale;
        *second += (gradient * gradient - *second) * share;
        *change = *second;
    }
    finish(adafactor, terms, weights, gradient, &mut change);
}

/// Updates a matrix with the factors of its second moment.
pub(super) fn update_matrix(
    adafactor: &Adafactor,
    terms: &Terms,
    weights: &mut [f32],
    gradient: &[f32],
    [rows, columns]: [&mut [f32]; 2],
) {
    let share = newest_share(adafactor, terms);
    let square_scale = f64::from(terms.scale) * f64::from(terms.scale);
    let (height, width) = (rows.len(), columns.len());
    let mut of_columns = vec![0f64; width];
    for (factor, row) in rows.iter_mut().zip(gradient.chunks_exact(width)) {
        let mean = square_norm(bytemuck::cast_slice(row)) * square_scale / width as f64;
        *factor += (mean as f32 - *factor) * share;
        add_squares(&mut of_columns, row);
    }
    for (factor, sum) in columns.iter_mut().zip(of_columns) {
        let mean = sum * square_scale / height as f64;
        *factor += (mean as f32 - *factor) * share;
    }
    let mean = rows.iter().map(|factor| f64::from(*factor)).sum::<f64>() / height as f64;
    let mean = mean.max(adafactor.epsilon);
    let mut change = vec![0.0; weights.len()];
    for (change, factor) in change.chunks_exact_mut(width).zip(rows) {
        let factor = (f64::from(*factor) / mean) as f32;
        for (change, column) in change.iter_mut().zip(&*columns) {
            *change = factor * column;
        }
    }
    finish(adafactor, terms, weights, gradient, &mut change);
}

/// Share of the newest squares in the second moment.
fn newest_share(adafactor: &Adafactor, terms: &Terms) -> f32 {
    libm::pow(terms.count as f64, -adafactor.decay_exponent) as f32
}

/// Turns a second moment into an update, and applies it.
fn finish(
    adafactor: &Adafactor,
    terms: &Terms,
    weights: &mut [f32],
    gradient: &[f32],
    change: &mut [f32],
) {
    let least = (adafactor.epsilon * adafactor.epsilon) as f32;
    normalise(change, gradient, terms.scale, least);
    let root_mean = |values: &[f32]| norm(values) / libm::sqrt(values.len() as f64);
    let excess = (root_mean(change) / adafactor.clip_threshold).max(1.0);
    let relative = terms.rate.min(1.0 / libm::sqrt(terms.count as f64));
    let scale = adafactor.scale_epsilon.max(root_mean(weights));
    let keep = (1.0 - terms.rate * terms.decay) as f32;
    take_step(weights, change, keep, (relative * scale / excess) as f32);
}

widest! {
    /// The order of additions to a sum is that of rows.
    fn add_squares(sums: &mut [f64], row: &[f32]) {
        for (sum, value) in sums.iter_mut().zip(row) {
            let value = f64::from(*value);
            *sum += value * value;
        }
    }
}

widest! {
    fn normalise(moment: &mut [f32], gradient: &[f32], scale: f32, least: f32) {
        for (moment, gradient) in moment.iter_mut().zip(gradient) {
            let second = if *moment > least { *moment } else { least };
            *moment = gradient * scale / second.sqrt();
        }
    }
}
