//! The update of biases that keep experts equally busy (Wang et al., arXiv 2408.15664): each moves by the same amount
//! towards its expert's share of the tokens.

use std::cmp::Ordering;

use shoal_protocol::manifest::{Experts, Manifest};

/// Updates a layer's biases by the mean over microbatches of what each counted, in units of the fixed-point format. Of
/// up to 2^23 tokens of an expert the mean gives back their exact number; of more, one within 2^-24 of it.
pub(super) fn update(biases: &mut [f32], means: &[f32], manifest: &Manifest) {
    let training = &manifest.training;
    let scale = f64::from(training.gradient_fraction_bits).exp2();
    let scale = scale * f64::from(training.microbatches);
    let count = |mean: &f32| (f64::from(*mean) * scale).round_ties_even() as i64;
    let counts: Vec<i64> = means.iter().map(count).collect();
    let experts = manifest.model.block.experts.as_ref();
    let rate = experts.map_or(Experts::BALANCE_RATE, |experts| experts.balance_rate);
    move_by(biases, &counts, rate as f32);
}

/// Raises the biases of experts with fewer tokens than the mean, and lowers those of experts with more.
fn move_by(biases: &mut [f32], counts: &[i64], rate: f32) {
    let total: i128 = counts.iter().map(|count| i128::from(*count)).sum();
    for (bias, count) in biases.iter_mut().zip(counts) {
        match (i128::from(*count) * counts.len() as i128).cmp(&total) {
            Ordering::Less => *bias += rate,
            Ordering::Equal => {}
            Ordering::Greater => *bias -= rate,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::fixed_point::FixedPoint;
    use crate::testing::manifest;

    #[test]
    fn biases_move_by_the_rate_towards_equal_counts() {
        let mut biases = [0.0, 0.5, -0.25, 1.0];
        move_by(&mut biases, &[3, 5, 4, 4], 0.125);
        assert_eq!(biases, [0.125, 0.375, -0.25, 1.0]);
        // Numbers that a peer made up.
        move_by(&mut biases, &[i64::MIN, i64::MAX, 0, 0], 0.125);
        assert_eq!(biases, [0.25, 0.25, -0.375, 0.875]);
        move_by(&mut biases, &[0; 4], 0.125);
        assert_eq!(biases, [0.25, 0.25, -0.375, 0.875]);
    }

    #[test]
    fn the_mean_gives_the_counts_back() {
        let mut manifest = manifest();
        manifest.training.microbatches = 7;
        for bits in [16, 44, 56] {
            manifest.training.gradient_fraction_bits = bits;
            // One token more than the mean, and one less.
            let counts = [(1i64 << 23) - 1, (1 << 23) - 2, (1 << 23) - 3];
            let sums: Vec<u8> = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
            let means = FixedPoint::of(&manifest).reduce(&[sums]).expect("one part");
            let mut biases = [0.0; 3];
            update(&mut biases, bytemuck::cast_slice(&means), &manifest);
            assert_eq!(biases, [-0.001, 0.0, 0.001]);
        }
    }
}
