//! The choice of the next token.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::RngCore;

use crate::numeric::normal::unit;

/// A request for tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Number of tokens to add at most.
    pub tokens: usize,
    /// Seed of the random choice of tokens.
    pub seed: u64,
    /// Divisor of the logits; 0 always selects the likeliest token.
    pub temperature: f64,
    /// The least probability of the likeliest tokens that are chosen from, in (0, 1]; 1 chooses from
    /// all.
    pub top_p: f64,
    /// Tokens from this one on are never chosen: the model may have more than the tokenizer.
    pub vocabulary: u32,
    /// Tokens that end the text.
    pub ends: Vec<u32>,
}

impl Sampling {
    /// The likeliest token, the first of equals, or one drawn by softmax of `logits / temperature`
    /// from the nucleus: the fewest of the likeliest tokens whose probability is at least `top_p`
    /// (Holtzman et al., arXiv 1904.09751).
    pub(crate) fn choose(&self, logits: &[f32], random: &mut ChaCha8Rng) -> u32 {
        // Also without a need, so that each token takes one number.
        let random = unit(random.next_u64());
        let mut likeliest = 0;
        for (token, logit) in logits.iter().enumerate() {
            if *logit > logits[likeliest] {
                likeliest = token;
            }
        }
        if self.temperature <= 0.0 {
            return likeliest as u32;
        }
        let largest = f64::from(logits[likeliest]);
        let weight = |logit: &f32| libm::exp((f64::from(*logit) - largest) / self.temperature);
        let weights: Vec<f64> = logits.iter().map(weight).collect();
        let chosen = match self.top_p < 1.0 {
            true => draw(nucleus(&weights, self.top_p), random),
            false => draw(weights.into_iter().enumerate().collect(), random),
        };
        chosen.unwrap_or(likeliest) as u32
    }
}

/// The nucleus of weights, each with its index, likeliest first; of equals, those with smaller
/// indices.
fn nucleus(weights: &[f64], probability: f64) -> Vec<(usize, f64)> {
    let total: f64 = weights.iter().sum();
    // All weights up to this one are too small together to matter, so only the others are sorted.
    let negligible = (1.0 - probability) * total / weights.len() as f64;
    let all = weights.iter().copied().enumerate();
    let mut kept: Vec<_> = all.clone().filter(|(_, weight)| *weight > negligible).collect();
    kept.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    let mut sum = 0.0;
    let reached = kept.iter().position(|(_, weight)| {
        sum += weight;
        sum >= probability * total
    });
    kept.truncate(reached.map_or(kept.len(), |last| last + 1));
    kept
}

/// The index of a weight, with a probability in proportion to it. `random` is in [0, 1).
fn draw(weights: Vec<(usize, f64)>, random: f64) -> Option<usize> {
    let mut left = random * weights.iter().map(|(_, weight)| weight).sum::<f64>();
    for (index, weight) in weights {
        left -= weight;
        if left < 0.0 {
            return Some(index);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    fn indices(weights: &[f64], probability: f64) -> Vec<usize> {
        nucleus(weights, probability).into_iter().map(|(index, _)| index).collect()
    }

    #[test]
    fn a_nucleus_has_the_token_that_reaches_the_probability_and_none_after_it() {
        let weights = [1.0, 4.0, 2.0, 1.0];
        assert_eq!(indices(&weights, 1e-12), [1]);
        assert_eq!(indices(&weights, 0.5), [1]);
        assert_eq!(indices(&weights, 0.51), [1, 2]);
        assert_eq!(indices(&weights, 0.75), [1, 2]);
        assert_eq!(indices(&weights, 0.76), [1, 2, 0]);
        assert_eq!(indices(&weights, 0.999), [1, 2, 0, 3]);
    }

    #[test]
    fn of_equal_tokens_the_first_ones_are_kept() {
        assert_eq!(indices(&[1.0; 4], 0.5), [0, 1]);
        assert_eq!(indices(&[1.0; 4], 0.501), [0, 1, 2]);
        assert_eq!(indices(&[1.0; 4], 1e-9), [0]);
        assert_eq!(indices(&[1.0], 0.5), [0]);
        // Underflown probabilities are left out.
        assert_eq!(indices(&[0.0, 1.0, 0.0], 0.999_999), [1]);
    }

    fn chosen(logits: &[f32], temperature: f64, top_p: f64) -> BTreeSet<u32> {
        let sampling =
            Sampling { tokens: 1, seed: 0, temperature, top_p, vocabulary: 0, ends: Vec::new() };
        let mut random = ChaCha8Rng::seed_from_u64(5);
        (0..500).map(|_| sampling.choose(logits, &mut random)).collect()
    }

    #[test]
    fn tokens_are_drawn_from_the_nucleus_alone() {
        let logits = [0.0, 1.0, 1.0, -1.0];
        assert_eq!(chosen(&logits, 1.0, 1.0), BTreeSet::from([0, 1, 2, 3]));
        // Probabilities 0.14, 0.39, 0.39 and 0.05.
        assert_eq!(chosen(&logits, 1.0, 0.7), BTreeSet::from([1, 2]));
        assert_eq!(chosen(&logits, 1.0, 0.8), BTreeSet::from([0, 1, 2]));
        assert_eq!(chosen(&logits, 1.0, 1e-9), BTreeSet::from([1]));
        // The temperature comes first: it makes the likeliest two more likely.
        assert_eq!(chosen(&logits, 0.1, 0.9999), BTreeSet::from([1, 2]));
        assert_eq!(chosen(&logits, 0.0, 1.0), BTreeSet::from([1]));
    }
}
