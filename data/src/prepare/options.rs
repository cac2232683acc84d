//! The options of a preparation.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::PathBuf;

use crate::document::TrainOn;
use crate::pack::Packing;
use crate::source::{DEFAULT_LINE_BYTES, Format, RowKind, Split};
use crate::template::Date;

use super::PrepareError;

/// Most threads that encode.
const MAX_THREADS: usize = 1024;

/// The sources, the tokenizer and the settings of a preparation.
#[derive(Debug, Clone)]
pub struct PrepareOptions {
    /// Files, folders and patterns, in order.
    pub sources: Vec<String>,
    /// The model's folder, with the tokenizer.
    pub base: PathBuf,
    /// The split to take of folders that have several; `None` takes `train` where there is one.
    pub split: Option<Split>,
    /// The kind of rows of the sources.
    pub format: Format,
    /// The targets in chats, and in prompts with a completion.
    pub train_on: TrainOn,
    /// Inputs of a row.
    pub context: u32,
    /// The way in which documents are put into rows.
    pub pack: Packing,
    /// Share of the documents that is never trained on, from 0 to below 1.
    ///
    /// A document is held out if the BLAKE3 hash of its number (derivation context
    /// `shoal held-out documents v1`, a little-endian u64, counted from 0 over all sources), read
    /// as a fraction from its first 8 bytes, is below the share.
    pub held_out: f64,
    /// Size of a shard, about.
    pub shard_bytes: u64,
    /// Threads that encode; `None` for as many as there are cores.
    pub threads: Option<NonZero<usize>>,
    /// A chat template instead of the model's.
    pub chat_template: Option<PathBuf>,
    /// The date that the chat template sees as today.
    pub date: Option<Date>,
    /// Most bytes of a line of JSON.
    pub line_bytes: usize,
}

impl PrepareOptions {
    /// Options with all defaults.
    #[must_use]
    pub fn new(sources: Vec<String>, base: PathBuf, context: u32) -> Self {
        Self {
            sources,
            base,
            split: None,
            format: Format::Auto,
            train_on: TrainOn::Responses,
            context,
            pack: Packing::Concat,
            held_out: 0.0,
            shard_bytes: 64 << 20,
            threads: None,
            chat_template: None,
            date: None,
            line_bytes: DEFAULT_LINE_BYTES,
        }
    }

    /// The options for rows of a kind: pairs have a packing and targets of their own.
    pub(super) fn of_rows(self, kind: RowKind) -> Result<Self, PrepareError> {
        if kind != RowKind::Pair {
            return Ok(self);
        }
        if self.train_on != TrainOn::Responses {
            let (name, value) = ("train-on", self.train_on.to_string());
            let range = "responses where rows have `chosen` and `rejected`";
            return Err(PrepareError::Option { name, value, range });
        }
        Ok(Self { pack: Packing::Pairs, ..self })
    }

    pub(super) fn check(&self) -> Result<(), PrepareError> {
        let option = |name, value: String, range| Err(PrepareError::Option { name, value, range });
        if self.sources.is_empty() {
            return Err(PrepareError::NoSource);
        }
        if !(1..=1 << 20).contains(&self.context) {
            return option("context", self.context.to_string(), "1 to 1048576");
        }
        if !(0.0..1.0).contains(&self.held_out) {
            return option("held-out", self.held_out.to_string(), "from 0 to below 1");
        }
        if !(1..=1 << 34).contains(&self.shard_bytes) {
            return option("shard-bytes", self.shard_bytes.to_string(), "1 to 17179869184");
        }
        if self.threads.is_some_and(|threads| threads.get() > MAX_THREADS) {
            let threads = self.threads.map_or(0, NonZero::get);
            return option("threads", threads.to_string(), "1 to 1024");
        }
        if !(2..=1 << 30).contains(&self.line_bytes) {
            return option("line-bytes", self.line_bytes.to_string(), "2 to 1073741824");
        }
        Ok(())
    }

    /// The options that determine the result, by name. An interrupted preparation goes on only
    /// with the same ones.
    pub(super) fn arguments(&self) -> BTreeMap<String, String> {
        let date = self.date.map_or_else(|| "none".to_owned(), |date| date.to_string());
        [
            ("format", self.format.to_string()),
            ("train-on", self.train_on.to_string()),
            ("context", self.context.to_string()),
            ("pack", self.pack.to_string()),
            ("held-out", self.held_out.to_string()),
            ("shard-bytes", self.shard_bytes.to_string()),
            ("date", date),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
    }

    /// Whether document number `number` is held out.
    pub(super) fn holds_out(&self, number: u64) -> bool {
        Self::fraction(number) < self.held_out
    }

    /// The share from which on document number `number` is held out.
    pub(super) fn fraction(number: u64) -> f64 {
        let hash = blake3::Hasher::new_derive_key("shoal held-out documents v1")
            .update(&number.to_le_bytes())
            .finalize();
        let mut word = [0; 8];
        word.copy_from_slice(&hash.as_bytes()[..8]);
        // 53 bits are a fraction that a float holds exactly.
        (u64::from_le_bytes(word) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::PrepareOptions;

    #[test]
    fn documents_are_held_out_by_their_number() {
        let mut options = PrepareOptions::new(Vec::new(), "base".into(), 8);
        let held_out = |options: &PrepareOptions| -> Vec<u64> {
            (0..10_000).filter(|number| options.holds_out(*number)).collect()
        };
        assert!(held_out(&options).is_empty());
        options.held_out = 0.01;
        let few = held_out(&options);
        assert!((70..130).contains(&few.len()), "{}", few.len());
        // A change would move documents of finished data between the lists.
        assert_eq!(few[..4], [69, 92, 280, 383]);
        // A larger share holds out the same documents and more.
        options.held_out = 0.1;
        let more = held_out(&options);
        assert!((900..1100).contains(&more.len()), "{}", more.len());
        assert!(few.iter().all(|number| more.contains(number)));
    }
}
