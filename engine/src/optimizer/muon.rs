//! Muon (Jordan et al., kellerjordan.github.io/posts/muon) on the matrices of the layers: the momentum, with its
//! singular values made nearly equal by five Newton-Schulz steps.
//!
//! `torch.optim.Muon` computes the steps in bf16. Here they are in f32, by matrix products whose additions have a
//! fixed order ([`crate::numeric::product`]).

use shoal_protocol::manifest::{Muon, RateScale};

use super::{Terms, norm, take_step};
use crate::device::kernel::widest;
use crate::numeric::product::{Symmetry, multiply, transpose};

/// The authors' coefficients of the steps `a·X + (b·A + c·A²)·X` with `A = X·Xᵀ`.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.775, 2.0315];

/// Number of the steps.
const STEPS: usize = 5;

/// The least norm by which a matrix is divided.
const LEAST_NORM: f64 = 1e-7;

/// Updates a matrix of these extents.
pub(super) fn update(
    muon: &Muon,
    terms: &Terms,
    weights: &mut [f32],
    gradient: &[f32],
    momentum: &mut [f32],
    [rows, columns]: [usize; 2],
) {
    let mut direction = vec![0.0; weights.len()];
    let one_minus = (1.0 - muon.momentum) as f32;
    let ahead = if muon.nesterov { muon.momentum as f32 } else { 1.0 };
    look_ahead(&mut direction, gradient, momentum, [terms.scale, one_minus, ahead]);
    let direction = orthogonalise(direction, [rows, columns], terms.threads);
    let (m, n) = (rows as f64, columns as f64);
    let scale = match muon.rate_scale {
        RateScale::Original => libm::sqrt((m / n).max(1.0)),
        RateScale::MatchRmsAdamw => 0.2 * libm::sqrt(m.max(n)),
    };
    let keep = (1.0 - terms.rate * terms.decay) as f32;
    take_step(weights, &direction, keep, (terms.rate * scale) as f32);
}

/// Makes the singular values of a matrix nearly equal.
fn orthogonalise(matrix: Vec<f32>, [rows, columns]: [usize; 2], threads: usize) -> Vec<f32> {
    let is_tall = rows > columns;
    let mut x = if is_tall { transpose(&matrix, columns) } else { matrix };
    let (short, long) = (rows.min(columns), rows.max(columns));
    let size = norm(&x).max(LEAST_NORM) as f32;
    x.iter_mut().for_each(|value| *value /= size);
    let [a, b, c] = COEFFICIENTS;
    let mut gram = vec![0.0; short * short];
    let mut square = vec![0.0; short * short];
    let mut product = vec![0.0; short * long];
    for _ in 0..STEPS {
        let transposed = transpose(&x, long);
        multiply(&x, &transposed, &mut gram, long, Symmetry::Symmetric, threads);
        multiply(&gram, &gram, &mut square, short, Symmetry::Symmetric, threads);
        combine(&mut square, c, &gram, b);
        multiply(&square, &x, &mut product, short, Symmetry::None, threads);
        combine(&mut x, a, &product, 1.0);
    }
    if is_tall { transpose(&x, long) } else { x }
}

widest! {
    /// Updates the momentum, and looks ahead along it.
    fn look_ahead(direction: &mut [f32], gradient: &[f32], momentum: &mut [f32], factors: [f32; 3]) {
        let [scale, one_minus, ahead] = factors;
        for ((direction, gradient), mean) in direction.iter_mut().zip(gradient).zip(momentum) {
            let gradient = gradient * scale;
            *mean += (gradient - *mean) * one_minus;
            *direction = gradient + (*mean - gradient) * ahead;
        }
    }
}

widest! {
    /// `to = to · own + other · factor`.
    fn combine(to: &mut [f32], own: f32, other: &[f32], factor: f32) {
        for (to, other) in to.iter_mut().zip(other) {
            *to = *to * own + other * factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Different numbers without a pattern, from -0.5 to 0.5.
    fn numbers(count: usize) -> Vec<f32> {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 16_777_216.0 - 0.5
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn singular_values_become_nearly_one() {
        for [rows, columns] in [[12, 40], [40, 12], [16, 16], [1, 9]] {
            let matrix = orthogonalise(numbers(rows * columns), [rows, columns], 1);
            // The sum of squared singular values.
            let square = norm(&matrix).powi(2) / rows.min(columns) as f64;
            assert!((0.4..1.5).contains(&square), "{rows} x {columns}: {square}");
        }
    }

    #[test]
    fn a_matrix_of_zeros_stays_zero() {
        assert_eq!(orthogonalise(vec![0.0; 12], [3, 4], 1), [0.0; 12]);
    }

    #[test]
    fn threads_change_no_bit() {
        let run = |threads| orthogonalise(numbers(150 * 70), [150, 70], threads);
        let alone = run(1);
        assert!([2, 3, 8].into_iter().all(|threads| run(threads) == alone));
    }
}
