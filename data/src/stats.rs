//! Shows prepared data: the text of rows by class, and the lengths of documents.

use std::fmt;
use std::path::Path;

use crate::class::Class;
use crate::pack::{Counts, Row};
use crate::prepared::{Index, Shard, ShardEntry, ShardError};
use crate::tokenizer::{TextTokenizer, TokenizerError};

/// Tokens of a row that follow one another and have the same part in the loss.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The class of the tokens; the first token of a document is a span of its own.
    pub class: Class,
    /// Number of tokens.
    pub tokens: usize,
    /// Their text. A character whose bytes are in two spans is shown as U+FFFD in both.
    pub text: String,
}

/// The text of a row, span by span.
///
/// # Errors
/// If the tokenizer cannot decode the tokens.
pub fn spans(row: &Row, tokenizer: &TextTokenizer) -> Result<Vec<Span>, TokenizerError> {
    let mut spans = Vec::new();
    let mut start = 0;
    for group in row.classes.chunk_by(|one, next| one == next && *one != Class::First) {
        let tokens = &row.tokens[start..start + group.len()];
        start += group.len();
        // Padding has no text.
        let class = group[0];
        let text = match class {
            Class::Padding => String::new(),
            _ => tokenizer.decode(tokens, false)?,
        };
        spans.push(Span { class, tokens: tokens.len(), text });
    }
    Ok(spans)
}

/// A span as text: targets as they are, context in `[...]`, a document's first token in `<...>`.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { class, tokens, text } = self;
        match class {
            Class::Target => f.write_str(text),
            Class::Masked => write!(f, "[{text}]"),
            Class::First => write!(f, "<{text}>"),
            Class::Padding => write!(f, "({tokens} tokens of padding)"),
        }
    }
}

/// Ranges of a distribution of lengths: 1, 2 to 3, 4 to 7, and so on.
const RANGES: usize = 33;

/// The number of lengths in each range of powers of two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lengths {
    counts: [u64; RANGES],
    sum: u64,
    longest: u64,
}

impl Default for Lengths {
    fn default() -> Self {
        Self { counts: [0; RANGES], sum: 0, longest: 0 }
    }
}

impl Lengths {
    /// Adds a length; 0 is left out.
    pub fn add(&mut self, length: u64) {
        if let Some(range) = length.checked_ilog2() {
            self.counts[(range as usize).min(RANGES - 1)] += 1;
            self.sum = self.sum.saturating_add(length);
            self.longest = self.longest.max(length);
        }
    }

    /// Number of lengths.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The mean length; 0 if there is none.
    #[must_use]
    pub fn mean(&self) -> f64 {
        match self.count() {
            0 => 0.0,
            count => self.sum as f64 / count as f64,
        }
    }

    /// The largest length.
    #[must_use]
    pub const fn longest(&self) -> u64 {
        self.longest
    }

    /// The ranges that have lengths, each with its smallest and largest length and the number.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        let ranges = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        ranges.map(|(range, count)| (1 << range, (2 << range) - 1, *count))
    }
}

/// Numbers of a list of shards.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stats {
    /// Rows read.
    pub rows: u64,
    /// Their labels, by class.
    pub counts: Counts,
    /// Tokens of documents, as far as they are in one row.
    pub documents: Lengths,
    /// Rows without a target.
    pub without_targets: u64,
}

impl Stats {
    /// Adds a row.
    pub fn add(&mut self, row: &Row) {
        let counts = row.counts();
        self.rows += 1;
        self.without_targets += u64::from(counts.targets == 0);
        self.counts.add(&counts);
        let used = row.classes.iter().take_while(|class| **class != Class::Padding).count();
        let starts = (1..used).filter(|at| row.classes[*at] == Class::First);
        let mut start = 0;
        for end in starts.chain([used]) {
            self.documents.add((end - start) as u64);
            start = end;
        }
    }

    /// The numbers of the first `most_rows` rows of a list of shards in the folder `data`.
    ///
    /// # Errors
    /// If a shard cannot be read or is invalid.
    pub fn of(
        data: &Path,
        index: &Index,
        shards: &[ShardEntry],
        most_rows: u64,
    ) -> Result<Self, ShardError> {
        let mut stats = Self::default();
        for entry in shards {
            let shard = Shard::open(&Shard::path_in(data, entry), index, entry)?;
            for row in 0..shard.rows().min(most_rows - stats.rows) {
                stats.add(&shard.row(row)?);
            }
            if stats.rows == most_rows {
                break;
            }
        }
        Ok(stats)
    }
}
