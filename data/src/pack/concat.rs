//! Packing by concatenation.

use serde::{Deserialize, Serialize};

use super::Row;
use crate::class::Class;
use crate::document::Document;

/// Cuts the stream of all documents every N tokens. The label of a row's last input is the first
/// input of the next row, so every token of the stream but the first is a label once. The last row
/// is padded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Concat {
    context: u32,
    pad: u32,
    tokens: Vec<u32>,
    classes: Vec<Class>,
}

impl Concat {
    pub(super) fn new(context: u32, pad: u32) -> Self {
        Self { context, pad, tokens: Vec::new(), classes: Vec::new() }
    }

    pub(super) fn push(&mut self, document: &Document, rows: &mut Vec<Row>) {
        self.tokens.extend_from_slice(&document.tokens);
        self.classes.extend_from_slice(&document.classes);
        let context = self.context as usize;
        let mut start = 0;
        while self.tokens.len() > start + context {
            rows.push(Row::new(
                self.tokens[start..=start + context].to_vec(),
                self.classes[start..=start + context].to_vec(),
            ));
            start += context;
        }
        self.tokens.drain(..start);
        self.classes.drain(..start);
    }

    pub(super) fn finish(&mut self, rows: &mut Vec<Row>) {
        let mut row = Row::new(std::mem::take(&mut self.tokens), std::mem::take(&mut self.classes));
        if row.tokens.len() > 1 {
            row.pad(self.context as usize + 1, self.pad);
            rows.push(row);
        }
    }
}
