//! Packs documents into rows of equal length.

mod best_fit;
mod concat;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::class::Class;
use crate::document::Document;

use best_fit::BestFit;
use concat::Concat;

/// The way in which documents are put into rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packing {
    /// Documents follow one another in a stream, which is cut every N tokens. Row `r` has the
    /// tokens `r * N ..= r * N + N` of the stream; the last row is padded.
    Concat,
    /// Documents stay whole where they fit into a row; rows are filled by best-fit decreasing.
    BestFit,
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Concat => "concat",
            Self::BestFit => "best-fit",
        })
    }
}

/// The error of a text that names no packing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no packing: use concat or best-fit")]
pub struct PackingError(String);

impl FromStr for Packing {
    type Err = PackingError;

    fn from_str(text: &str) -> Result<Self, PackingError> {
        match text {
            "concat" => Ok(Self::Concat),
            "best-fit" => Ok(Self::BestFit),
            other => Err(PackingError(other.to_owned())),
        }
    }
}

/// A row of N + 1 tokens and their classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The inputs are all tokens but the last, the labels all tokens but the first.
    pub tokens: Vec<u32>,
    /// The class of each token.
    pub classes: Vec<Class>,
}

/// The labels of one or more rows, by class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// Labels that are targets.
    pub targets: u64,
    /// Labels that are context only, or the first token of a document.
    pub masked: u64,
    /// Labels that are padding.
    pub padded: u64,
}

impl Counts {
    /// All labels; `None` on overflow.
    #[must_use]
    pub fn labels(&self) -> Option<u64> {
        self.targets.checked_add(self.masked)?.checked_add(self.padded)
    }

    /// Adds the labels of another row or shard.
    pub fn add(&mut self, other: &Self) {
        self.targets = self.targets.saturating_add(other.targets);
        self.masked = self.masked.saturating_add(other.masked);
        self.padded = self.padded.saturating_add(other.padded);
    }
}

impl Row {
    /// The labels of the row, by class.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for class in self.classes.iter().skip(1) {
            match class {
                Class::Target => counts.targets += 1,
                Class::Masked | Class::First => counts.masked += 1,
                Class::Padding => counts.padded += 1,
            }
        }
        counts
    }

    /// Appends padding up to `length` tokens.
    fn pad(&mut self, length: usize, pad: u32) {
        self.tokens.resize(length, pad);
        self.classes.resize(length, Class::Padding);
    }
}

/// Packs documents into rows. Its state between two documents can be saved and restored.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packer {
    /// Packs by concatenation.
    Concat(Concat),
    /// Packs by best-fit decreasing.
    BestFit(BestFit),
}

impl Packer {
    /// A packer of rows of `context` + 1 tokens, which pads with the token `pad`.
    #[must_use]
    pub fn new(packing: Packing, context: u32, pad: u32) -> Self {
        match packing {
            Packing::Concat => Self::Concat(Concat::new(context, pad)),
            Packing::BestFit => Self::BestFit(BestFit::new(context, pad)),
        }
    }

    /// Takes a document and appends the rows that are complete to `rows`.
    pub fn push(&mut self, document: &Document, rows: &mut Vec<Row>) {
        match self {
            Self::Concat(concat) => concat.push(document, rows),
            Self::BestFit(best_fit) => best_fit.push(document, rows),
        }
    }

    /// Appends the remaining rows to `rows`, padded.
    pub fn finish(&mut self, rows: &mut Vec<Row>) {
        match self {
            Self::Concat(concat) => concat.finish(rows),
            Self::BestFit(best_fit) => best_fit.finish(rows),
        }
    }
}
