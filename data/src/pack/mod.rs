//! Packs documents into rows of equal length.

mod best_fit;
mod concat;
mod pairs;
mod row;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::document::Document;

use best_fit::BestFit;
use concat::Concat;
use pairs::Pairs;
pub(crate) use row::pair_of;
pub use row::{Counts, PairLogProbs, Row};

/// The way in which documents are put into rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packing {
    /// Documents follow one another in a stream, which is cut every N tokens. Row `r` has the
    /// tokens `r * N ..= r * N + N` of the stream; the last row is padded.
    Concat,
    /// Documents stay whole where they fit into a row; rows are filled by best-fit decreasing.
    BestFit,
    /// Each row has one pair of sequences: the chosen one, then the rejected one, then padding. Rows of pairs alone are
    /// put so.
    Pairs,
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Concat => "concat",
            Self::BestFit => "best-fit",
            Self::Pairs => "pairs",
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

/// Packs documents into rows. Its state between two documents can be saved and restored.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packer {
    /// Packs by concatenation.
    Concat(Concat),
    /// Packs by best-fit decreasing.
    BestFit(BestFit),
    /// Puts pairs into rows of their own.
    Pairs(Pairs),
}

impl Packer {
    /// A packer of rows of `context` + 1 tokens, which pads with the token `pad`.
    #[must_use]
    pub fn new(packing: Packing, context: u32, pad: u32) -> Self {
        match packing {
            Packing::Concat => Self::Concat(Concat::new(context, pad)),
            Packing::BestFit => Self::BestFit(BestFit::new(context, pad)),
            Packing::Pairs => Self::Pairs(Pairs::new(context, pad)),
        }
    }

    /// Takes a document and appends the rows that are complete to `rows`.
    pub fn push(&mut self, document: &Document, rows: &mut Vec<Row>) {
        match self {
            Self::Concat(concat) => concat.push(document, rows),
            Self::BestFit(best_fit) => best_fit.push(document, rows),
            Self::Pairs(pairs) => pairs.push(document, rows),
        }
    }

    /// Appends the remaining rows to `rows`, padded.
    pub fn finish(&mut self, rows: &mut Vec<Row>) {
        match self {
            Self::Concat(concat) => concat.finish(rows),
            Self::BestFit(best_fit) => best_fit.finish(rows),
            // Nothing waits.
            Self::Pairs(_) => {}
        }
    }
}
