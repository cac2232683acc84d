//! The tokens of each microbatch: a pure function of the manifest, the step and the microbatch's
//! number.
//!
//! The text is cut into consecutive windows of `context` tokens. A sample has a window's tokens as
//! input, and the same shifted by one as labels. The last [`Manifest::held_out_tokens`] tokens are
//! never used for training. Training samples are numbered through the run, `(step · M + microbatch)
//! · B + row`, where B is all that a virtual worker reads in a step if there are workers, and through the runs that go on from it ([`SampleNumbers`]); sample `i` is in epoch `i
//! / windows`, and within each epoch a permutation keyed by seed and epoch takes every window once.
//! Held-out microbatches (numbers from M on) read the held-out windows in order, the same in every
//! evaluation.

use std::ops::Range;

use bytes::Bytes;
use shoal_protocol::ids::{Microbatch, Step};
use shoal_protocol::manifest::{Manifest, SampleNumbers};
use shoal_protocol::permutation::Permutation;

use crate::data::token_file::TokenFile;

/// The samples of one microbatch, `[B, T]` token ids each, u32, little-endian.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Input of the first stage.
    pub inputs: Bytes,
    /// Targets of the last stage: the token after each input.
    pub labels: Bytes,
}

/// The samples of a run.
#[derive(Debug)]
pub struct Samples {
    file: TokenFile,
    seed: u64,
    context: u64,
    /// Samples of a microbatch to train on, and of one that is held out.
    rows: u64,
    held_out_rows: u64,
    microbatches: u64,
    numbers: SampleNumbers,
    /// Number of training windows.
    windows: u64,
    /// First held-out token.
    held_out_start: u64,
    held_out_windows: u64,
}

impl Samples {
    /// Creates the samples of a run from its token file.
    ///
    /// # Panics
    /// If the file is not the manifest's, or the manifest has not been checked.
    #[must_use]
    pub fn new(manifest: &Manifest, file: TokenFile) -> Self {
        let tokens = manifest.text().expect("the run trains on a token file");
        assert!(file.tokens() == tokens, "the token file of another run");
        let context = u64::from(manifest.model.context);
        let held_out = manifest.held_out_tokens();
        let trained = tokens.count - held_out;
        // Every window is followed by one more token.
        let windows = |tokens: u64| tokens.saturating_sub(1) / context;
        assert!(windows(trained) > 0, "the manifest has been checked");
        Self {
            file,
            seed: manifest.training.seed,
            context,
            rows: manifest.samples_of(Microbatch(0)),
            held_out_rows: u64::from(manifest.training.microbatch_size),
            microbatches: u64::from(manifest.training.microbatches),
            numbers: manifest.sample_numbers(),
            windows: windows(trained),
            held_out_start: trained,
            held_out_windows: windows(held_out),
        }
    }

    /// The token file.
    #[must_use]
    pub fn file(&self) -> &TokenFile {
        &self.file
    }

    /// Position in the text of the first input token of one row.
    ///
    /// # Panics
    /// If a held-out microbatch is requested in a run without held-out text.
    #[must_use]
    pub fn start(&self, step: Step, microbatch: Microbatch, row: u64) -> u64 {
        let number = u64::from(microbatch.0);
        if number >= self.microbatches {
            assert!(self.held_out_windows > 0, "the run holds nothing out");
            let window =
                ((number - self.microbatches) * self.held_out_rows + row) % self.held_out_windows;
            return self.held_out_start + window * self.context;
        }
        let sample = self.numbers.first_of(step, number) + row;
        let (epoch, place) = (sample / self.windows, sample % self.windows);
        order(self.seed, epoch, self.windows).at(place) * self.context
    }

    /// Inputs and labels of one microbatch.
    ///
    /// # Panics
    /// Like [`Samples::start`].
    #[must_use]
    pub fn batch(&self, step: Step, microbatch: Microbatch) -> Batch {
        let trains = u64::from(microbatch.0) < self.microbatches;
        let rows = if trains { self.rows } else { self.held_out_rows };
        self.batch_of(step, microbatch, 0..rows)
    }

    /// Some rows of [`Samples::batch`].
    ///
    /// # Panics
    /// Like [`Samples::start`].
    #[must_use]
    pub fn batch_of(&self, step: Step, microbatch: Microbatch, rows: Range<u64>) -> Batch {
        let size = (4 * (rows.end - rows.start) * self.context) as usize;
        let mut inputs = Vec::with_capacity(size);
        let mut labels = Vec::with_capacity(size);
        for row in rows {
            let start = self.start(step, microbatch, row);
            inputs.extend(self.file.read(start, self.context).flat_map(u32::to_le_bytes));
            labels.extend(self.file.read(start + 1, self.context).flat_map(u32::to_le_bytes));
        }
        Batch { inputs: inputs.into(), labels: labels.into() }
    }
}

/// The order of an epoch's windows.
fn order(seed: u64, epoch: u64, windows: u64) -> Permutation {
    let mut hasher = blake3::Hasher::new_derive_key("shoal order of samples v1");
    hasher.update(&seed.to_le_bytes());
    hasher.update(&epoch.to_le_bytes());
    Permutation::new(*hasher.finalize().as_bytes(), windows)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_place_is_taken_once(seed: u64, epoch in 0u64..1000, size in 1u64..2000) {
            let permutation = super::order(seed, epoch, size);
            let mut places: Vec<u64> = (0..size).map(|place| permutation.at(place)).collect();
            places.sort_unstable();
            prop_assert!(places.into_iter().eq(0..size));
        }
    }

    #[test]
    fn epochs_have_different_orders() {
        let order = |epoch| {
            let permutation = super::order(1, epoch, 100);
            (0..100).map(|place| permutation.at(place)).collect::<Vec<_>>()
        };
        assert_ne!(order(0), order(1));
        assert_ne!(order(0), (0..100).collect::<Vec<_>>());
    }
}
