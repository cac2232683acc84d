//! The difference of two tables of logits, and the losses of tokens by one.

/// The place where two tables of logits differ most.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Difference {
    /// Magnitude of the largest of their logits.
    pub(super) largest_logit: f64,
    /// Place of the token, from 0.
    pub(super) row: usize,
    /// Id whose logit differs most.
    pub(super) column: usize,
    pub(super) ours: f32,
    pub(super) theirs: f32,
}

impl Difference {
    /// Compares logits `[tokens, vocabulary]`, at least one, with others as little-endian f32. A number that is not
    /// finite differs infinitely.
    pub(super) fn of(ours: &[f32], theirs: &[u8], vocabulary: usize) -> Self {
        let theirs = theirs.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        let (mut place, mut most, mut largest_logit) = ((0, ours[0], 0.0), -1.0, 0.0);
        for (index, (ours, theirs)) in ours.iter().copied().zip(theirs).enumerate() {
            let off = distance(ours, theirs);
            if off > most {
                (most, place) = (off, (index, ours, theirs));
            }
            largest_logit = f64::max(largest_logit, f64::from(theirs.abs()));
        }
        let (index, ours, theirs) = place;
        let (row, column) = (index / vocabulary, index % vocabulary);
        Self { largest_logit, row, column, ours, theirs }
    }

    /// The largest difference as a share of the largest logit; infinite where a logit is not finite.
    pub(super) fn share(&self) -> f64 {
        match distance(self.ours, self.theirs) {
            0.0 => 0.0,
            off => off / self.largest_logit,
        }
    }
}

fn distance(ours: f32, theirs: f32) -> f64 {
    let off = (f64::from(ours) - f64::from(theirs)).abs();
    if off.is_finite() { off } else { f64::INFINITY }
}

/// The loss of each token of `ids` but the first, in nats, by the logits `[tokens, vocabulary]` of those before it.
pub(super) fn losses(logits: &[f32], ids: &[u32], vocabulary: usize) -> Vec<f64> {
    let loss = |(row, next): (&[f32], &u32)| {
        let most = row.iter().copied().fold(f32::MIN, f32::max);
        let total: f64 = row.iter().map(|logit| f64::from(logit - most).exp()).sum();
        total.ln() + f64::from(most - row[*next as usize])
    };
    logits.chunks(vocabulary).zip(&ids[1..]).map(loss).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn the_largest_difference_has_its_place() {
        let ours = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let found = Difference::of(&ours, &bytes(&[1.0, 2.5, 3.0, 4.0, -8.0, 6.25]), 3);
        assert_eq!((found.row, found.column, found.ours, found.theirs), (1, 1, 5.0, -8.0));
        assert_eq!(found.share(), 13.0 / 8.0);
        assert_eq!(Difference::of(&ours, &bytes(&ours), 3).share(), 0.0);
        assert_eq!(Difference::of(&[0.0], &bytes(&[0.0]), 1).share(), 0.0);
        for broken in [f32::NAN, f32::INFINITY] {
            let found = Difference::of(&[1.0, broken], &bytes(&[1.0, 2.0]), 2);
            assert_eq!((found.column, found.share()), (1, f64::INFINITY));
        }
    }

    #[test]
    fn losses_are_those_of_the_next_tokens() {
        let logits = [0.0, 0.0, 100.0, 0.0, 0.0, 1.0];
        let losses = losses(&logits, &[0, 1, 0, 0], 2);
        let expected = [2f64.ln(), 0.0, (1.0 + 1f64.exp()).ln()];
        assert_eq!(losses.len(), 3);
        for (found, expected) in losses.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{losses:?}");
        }
    }
}
