//! Packing of pairs: one in a row.

use serde::{Deserialize, Serialize};

use super::Row;
use crate::document::Document;

/// Puts each pair into a row of its own: the chosen sequence, then the rejected one, then padding. A pair is never cut:
/// one that is longer than a row must be left out before.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Pairs {
    context: u32,
    pad: u32,
}

impl Pairs {
    pub(super) fn new(context: u32, pad: u32) -> Self {
        Self { context, pad }
    }

    pub(super) fn push(&self, pair: &Document, rows: &mut Vec<Row>) {
        let length = self.context as usize + 1;
        debug_assert!(pair.tokens.len() <= length, "longer pairs are left out");
        let mut row = Row::new(pair.tokens.clone(), pair.classes.clone());
        row.pad(length, self.pad);
        rows.push(row);
    }
}
