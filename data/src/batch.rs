//! The microbatches of a run on prepared data.

use std::ops::Range;
use std::sync::Arc;

use shoal_protocol::ids::{Microbatch, Step};
use shoal_protocol::label::Label;
use shoal_protocol::manifest::{Manifest, Pairs, Prepared, SampleNumbers};

use crate::class::Class;
use crate::draw::{Draw, Drawn};
use crate::order::{Order, RowPlace};
use crate::pack::{Packing, PairLogProbs, Row};
use crate::prepared::{Index, ShardEntry};

/// The microbatches of a run: which rows each has, and how rows are sent.
///
/// Training samples are numbered through the run, `(step · M + microbatch) · B + row`, where B is all that a
/// virtual worker reads in a step if there are workers, and through the runs that go on from it
/// ([`SampleNumbers`]); held-out microbatches have numbers from M on and read the held-out rows in order, the same
/// in every evaluation. Of several data sets, [`Draw`] says from which one a sample is, and the how many-th of it.
#[derive(Debug, Clone)]
pub struct Batches {
    draw: Draw,
    /// The data sets, in the manifest's order.
    sources: Vec<Source>,
    /// Rows of a microbatch to train on, and of one that is held out.
    rows: u64,
    held_out_rows: u64,
    microbatches: u64,
    numbers: SampleNumbers,
    /// Whether the loss needs the log-probabilities of pairs.
    with_reference: bool,
}

/// One data set of a run.
#[derive(Debug, Clone)]
struct Source {
    index: Arc<Index>,
    order: Order,
}

/// A row of a microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchRow<'a> {
    /// The shard.
    pub shard: SourceShard<'a>,
    /// The row of the shard.
    pub row: u64,
}

/// A shard of one of a run's data sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceShard<'a> {
    /// Position of the data set among those of the manifest.
    pub source: usize,
    /// Its entry in the index of that data set.
    pub entry: &'a ShardEntry,
}

impl Batches {
    /// The microbatches of a run on prepared data, with the index of each of the manifest's data sets in their order.
    #[must_use]
    pub fn new(manifest: &Manifest, indexes: Vec<Index>) -> Self {
        let seed = manifest.training.seed;
        let source =
            |index: Index| Source { order: Order::new(seed, &index), index: Arc::new(index) };
        Self {
            draw: Draw::new(manifest),
            sources: indexes.into_iter().map(source).collect(),
            rows: manifest.samples_of(Microbatch(0)),
            held_out_rows: u64::from(manifest.training.microbatch_size),
            microbatches: u64::from(manifest.training.microbatches),
            numbers: manifest.sample_numbers(),
            with_reference: manifest.training.loss.needs_reference(),
        }
    }

    /// The index of a data set.
    #[must_use]
    pub fn index_of(&self, source: usize) -> &Arc<Index> {
        &self.sources[source].index
    }

    /// Encodes rows of a microbatch.
    #[must_use]
    pub fn encode(&self, rows: &[Row]) -> EncodedRows {
        encode_rows(rows, self.with_reference)
    }

    /// The rows of a microbatch. Empty for a held-out microbatch if the data holds nothing out.
    #[must_use]
    pub fn rows(&self, step: Step, microbatch: Microbatch) -> Vec<BatchRow<'_>> {
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
    ) -> Vec<BatchRow<'_>> {
        let number = u64::from(microbatch.0);
        let row = |row: u64| match number.checked_sub(self.microbatches) {
            Some(held_out) => self.held_out(held_out * self.held_out_rows + row),
            None => Some(self.training(self.numbers.first_of(step, number) + row)),
        };
        rows.filter_map(row).collect()
    }

    fn training(&self, sample: u64) -> BatchRow<'_> {
        let Drawn { source, sample } = self.draw.training(sample);
        let Source { index, order } = &self.sources[source];
        let RowPlace { shard, row } = order.training(sample);
        BatchRow { shard: SourceShard { source, entry: &index.train[shard] }, row }
    }

    fn held_out(&self, number: u64) -> Option<BatchRow<'_>> {
        let Drawn { source, sample } = self.draw.held_out(number);
        let Source { index, order } = &self.sources[source];
        let RowPlace { shard, row } = order.held_out(sample)?;
        Some(BatchRow { shard: SourceShard { source, entry: &index.held_out[shard] }, row })
    }

    /// The shards that some steps read: of each data set in the order of first use, and of several data sets in turn.
    #[must_use]
    pub fn shards(&self, from: Step, steps: u64) -> Vec<SourceShard<'_>> {
        let first = self.numbers.first_of(from, 0);
        let end = first.saturating_add(steps.saturating_mul(self.numbers.per_step()));
        let counts = self.draw.counts(first).into_iter().zip(self.draw.counts(end));
        let mut ahead = Vec::new();
        for (source, (Source { index, order }, (first, end))) in
            self.sources.iter().zip(counts).enumerate()
        {
            let shards = order.shards_ahead(first, end - first).into_iter().enumerate();
            ahead.extend(
                shards.map(|(turn, shard)| {
                    (turn, SourceShard { source, entry: &index.train[shard] })
                }),
            );
        }
        // A stable sort keeps the order of the data sets within a turn.
        ahead.sort_by_key(|(turn, _)| *turn);
        ahead.into_iter().map(|(_, shard)| shard).collect()
    }
}

/// Inputs and labels of rows, as they are sent: `[B, T]` words each, u32, little-endian; see
/// [`Manifest::words_of_row`] for labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedRows {
    /// Token ids.
    pub inputs: Vec<u8>,
    /// Words of [`Label`].
    pub labels: Vec<u8>,
}

/// Encodes rows, with the log-probabilities of their pairs behind the labels of each if the loss needs them. Padding is
/// a document of its own, so that no token reads it.
fn encode_rows(rows: &[Row], with_reference: bool) -> EncodedRows {
    let mut encoded = EncodedRows { inputs: Vec::new(), labels: Vec::new() };
    for Row { tokens, classes, reference } in rows {
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
        if with_reference {
            let words = reference.map_or([0; 2], PairLogProbs::words);
            encoded.labels.extend(words.into_iter().flat_map(u32::to_le_bytes));
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
            pairs: (self.packing == Packing::Pairs)
                .then_some(Pairs { reference: self.reference.map(|reference| reference.base) }),
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
        let row = Row::new(vec![10, 11, 12, 20, 21, 0, 0], classes.to_vec());
        let encoded = encode_rows(&[row], false);
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
