//! Packing by best-fit decreasing.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::Row;
use crate::class::Class;
use crate::document::Document;

/// Most tokens that wait for their row.
const WINDOW_TOKENS: usize = 1 << 21;
/// Most rows of one window.
const WINDOW_ROWS: usize = 512;
/// Fewest rows of one window, whatever their length.
const LEAST_WINDOW_ROWS: usize = 8;

/// Collects documents for a window of rows, then puts them into rows by best-fit decreasing.
///
/// A document longer than N + 1 tokens is cut into pieces that share one token, so that every
/// token but the first of the document is a label once. Each piece counts as a document of its
/// own: its first token has the class [`Class::First`]. Documents of one token have no label and
/// are dropped.
///
/// A window is packed when its pieces have as many tokens as its rows: the longest piece first,
/// equal lengths in order of arrival, each into the row with the least room that is enough, equal
/// room by age. The rest of each row is padded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BestFit {
    context: u32,
    pad: u32,
    waiting: usize,
    pieces: Vec<Document>,
}

impl BestFit {
    pub(super) fn new(context: u32, pad: u32) -> Self {
        Self { context, pad, waiting: 0, pieces: Vec::new() }
    }

    fn row_length(&self) -> usize {
        self.context as usize + 1
    }

    fn window(&self) -> usize {
        let rows = WINDOW_TOKENS / self.row_length();
        rows.clamp(LEAST_WINDOW_ROWS, WINDOW_ROWS) * self.row_length()
    }

    pub(super) fn push(&mut self, document: &Document, rows: &mut Vec<Row>) {
        let (context, length) = (self.context as usize, document.tokens.len());
        let mut start = 0;
        while start + 1 < length {
            let end = length.min(start + context + 1);
            let mut piece = Document {
                tokens: document.tokens[start..end].to_vec(),
                classes: document.classes[start..end].to_vec(),
            };
            piece.classes[0] = Class::First;
            self.waiting += piece.tokens.len();
            self.pieces.push(piece);
            if self.waiting >= self.window() {
                self.finish(rows);
            }
            start += context;
        }
    }

    pub(super) fn finish(&mut self, rows: &mut Vec<Row>) {
        self.waiting = 0;
        let mut pieces = std::mem::take(&mut self.pieces);
        // The sort is stable: equal lengths stay in order of arrival.
        pieces.sort_by_key(|piece| std::cmp::Reverse(piece.tokens.len()));
        let (first, length) = (rows.len(), self.row_length());
        let mut rooms: BTreeSet<(usize, usize)> = BTreeSet::new();
        for piece in pieces {
            let size = piece.tokens.len();
            let found = rooms.range((size, 0)..).next().copied();
            let (room, place) = found.unwrap_or_else(|| {
                rows.push(Row::new(Vec::new(), Vec::new()));
                (length, rows.len() - 1)
            });
            rooms.remove(&(room, place));
            rows[place].tokens.extend(piece.tokens);
            rows[place].classes.extend(piece.classes);
            if room > size {
                rooms.insert((room - size, place));
            }
        }
        for row in &mut rows[first..] {
            row.pad(length, self.pad);
        }
    }
}
