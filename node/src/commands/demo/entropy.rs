//! How much the frequencies of a text's tokens alone say about it.

use std::collections::BTreeMap;

/// Entropy of the tokens of a text taken one by one, in nats: the loss of a model that knows how
/// frequent each token is and nothing else.
pub(super) fn unigram_entropy(tokens: &[u32]) -> f64 {
    let mut counts = BTreeMap::<u32, u64>::new();
    for token in tokens {
        *counts.entry(*token).or_default() += 1;
    }
    let total = tokens.len() as f64;
    counts.values().map(|&count| count as f64 / total).map(|share| -share * share.ln()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entropy_is_that_of_frequencies() {
        assert_eq!(unigram_entropy(&[7, 7, 7]), 0.0);
        assert!((unigram_entropy(&[1, 2, 3, 4]) - 4f64.ln()).abs() < 1e-12);
        assert!((unigram_entropy(&[0, 0, 0, 1]) - 0.562_335_144_618_808).abs() < 1e-12);
        assert_eq!(unigram_entropy(&[]), 0.0);
    }
}
