//! The microbatches of a run on prepared data.

use std::ops::Range;
use std::sync::Arc;

use shoal_protocol::ids::{Microbatch, Step};
use shoal_protocol::label::Label;
use shoal_protocol::manifest::{Manifest, Prepared, SampleNumbers};

use crate::class::Class;
use crate::order::{Order, RowPlace};
use crate::pack::Row;
use crate::prepared::{Index, ShardEntry};

/// The microbatches of a run: which rows each has, and how rows are sent.
///
/// Training samples are numbered through the run, `(step · M + microbatch) · B + row`, where B is all that a
/// virtual worker reads in a step if there are workers, and through the runs that go on from it
/// ([`SampleNumbers`]); held-out microbatches have numbers from M on and read the held-out rows in order, the same
/// in every evaluation.
#[derive(Debug, Clone)]
pub struct Batches {
    index: Arc<Index>,
    order: Order,
    /// Rows of a microbatch to train on, and of one that is held out.
    rows: u64,
    held_out_rows: u64,
    microbatches: u64,
    numbers: SampleNumbers,
}

impl Batches {
    /// The microbatches of a run on this data.
    #[must_use]
    pub fn new(manifest: &Manifest, index: Arc<Index>) -> Self {
        Self {
            order: Order::new(manifest.training.seed, &index),
            index,
            rows: manifest.samples_of(Microbatch(0)),
            held_out_rows: u64::from(manifest.training.microbatch_size),
            microbatches: u64::from(manifest.training.microbatches),
            numbers: manifest.sample_numbers(),
        }
    }

    /// The data's index.
    #[must_use]
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// The rows of a microbatch: each the shard and its row. Empty for a held-out microbatch if the
    /// data holds nothing out.
    #[must_use]
    pub fn rows(&self, step: Step, microbatch: Microbatch) -> Vec<(&ShardEntry, u64)> {
        let trains = u64::from(microbatch.0) < self.microbatches;
        self.rows_of(step, microbatch, 0..if trains { self.rows } else { self.held_out_rows })
    }

    /// Some of the rows of a microbatch.
    #[must_use]
    pub fn rows_of(
        &self,
        step: Step,
        microbatch: Microbatch,
        rows: Range<u64>,
    ) -> Vec<(&ShardEntry, u64)> {
        let number = u64::from(microbatch.0);
        let (shards, first) = match number.checked_sub(self.microbatches) {
            Some(held_out) => (&self.index.held_out, held_out * self.held_out_rows),
            None => (&self.index.train, self.numbers.first_of(step, number)),
        };
        let place = |sample| -> Option<RowPlace> {
            match number < self.microbatches {
                true => Some(self.order.training(sample)),
                false => self.order.held_out(sample),
            }
        };
        let places = rows.map(|row| first + row).filter_map(place);
        places.map(|RowPlace { shard, row }| (&shards[shard], row)).collect()
    }

    /// The shards that some steps read, in the order of first use.
    #[must_use]
    pub fn shards(&self, from: Step, steps: u64) -> Vec<&ShardEntry> {
        let samples = steps.saturating_mul(self.numbers.per_step());
        let ahead = self.order.shards_ahead(self.numbers.first_of(from, 0), samples);
        ahead.into_iter().map(|shard| &self.index.train[shard]).collect()
    }
}

/// Inputs and labels of rows, as they are sent: `[B, T]` words each, u32, little-endian.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedRows {
    /// Token ids.
    pub inputs: Vec<u8>,
    /// Words of [`Label`].
    pub labels: Vec<u8>,
}

/// Encodes rows. Padding is a document of its own, so that no token reads it.
#[must_use]
pub fn encode_rows(rows: &[Row]) -> EncodedRows {
    let mut encoded = EncodedRows { inputs: Vec::new(), labels: Vec::new() };
    for Row { tokens, classes } in rows {
        let next = tokens.iter().zip(classes).skip(1);
        let before = [None].into_iter().chain(classes.iter().map(Some));
        for (((token, class), (target, next_class)), before) in
            tokens.iter().zip(classes).zip(next).zip(before)
        {
            let pads = *class == Class::Padding && before != Some(&Class::Padding);
            let label = Label {
                target: (*next_class == Class::Target).then_some(*target),
                starts_document: *class == Class::First || pads,
                padding: *next_class == Class::Padding,
            };
            encoded.inputs.extend(token.to_le_bytes());
            encoded.labels.extend(label.to_word().to_le_bytes());
        }
    }
    encoded
}

impl Index {
    /// The data's name in a manifest.
    #[must_use]
    pub fn prepared(&self) -> Prepared {
        Prepared {
            index: self.hash(),
            bytes: self.bytes().len() as u64,
            rows: self.train_totals.rows,
            held_out_rows: self.held_out_totals.rows,
            context: self.context,
            vocabulary: self.vocabulary,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_the_next_tokens_within_documents() {
        let classes = [
            Class::First,
            Class::Masked,
            Class::Target,
            Class::First,
            Class::Target,
            Class::Padding,
            Class::Padding,
        ];
        let row = Row { tokens: vec![10, 11, 12, 20, 21, 0, 0], classes: classes.to_vec() };
        let encoded = encode_rows(&[row]);
        let words = |bytes: &[u8]| -> Vec<u32> {
            bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
        };
        assert_eq!(words(&encoded.inputs), [10, 11, 12, 20, 21, 0]);
        let labels: Vec<Label> = words(&encoded.labels).into_iter().map(Label::from_word).collect();
        let label = |target, starts_document| Label { target, starts_document, padding: false };
        let expected = [
            label(None, true),
            label(Some(12), false),
            label(None, false),
            label(Some(21), true),
            Label { padding: true, ..label(None, false) },
            Label { padding: true, ..label(None, true) },
        ];
        assert_eq!(labels, expected);
    }
}
