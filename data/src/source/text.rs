//! Text files: each is one document.

use std::io::Read;
use std::path::PathBuf;

use super::files::{BYTE_ORDER_MARK, SourceFile, read_error, refuse_encoding};
use super::{RawContent, RawRow, ReadOptions, SourceError};

/// Longest block, in bytes.
const BLOCK_BYTES: usize = 1 << 20;

/// The blocks of a text file. A file of at most 1 MiB is one block. A longer one is cut after the
/// last end of a line in each MiB that text follows, else between two words, so that blocks can be
/// encoded in parallel and in constant memory.
pub(super) struct Blocks {
    path: PathBuf,
    reader: Box<dyn Read>,
    /// Bytes that are read but not yet returned.
    pending: Vec<u8>,
    offset: u64,
    number: u64,
    ended: bool,
}

impl Blocks {
    /// Opens a file behind its first `skip` blocks.
    pub(super) fn open(
        file: &SourceFile,
        skip: u64,
        options: &ReadOptions,
    ) -> Result<Self, SourceError> {
        let mut blocks = Self {
            path: file.path.clone(),
            reader: file.reader(&options.bytes_read)?,
            pending: Vec::new(),
            offset: 0,
            number: 0,
            ended: false,
        };
        while blocks.number < skip && blocks.block()?.is_some() {}
        Ok(blocks)
    }

    fn block(&mut self) -> Result<Option<RawRow>, SourceError> {
        if self.ended {
            return Ok(None);
        }
        let wanted = (BLOCK_BYTES + 1).saturating_sub(self.pending.len()) as u64;
        let read = self.reader.by_ref().take(wanted).read_to_end(&mut self.pending);
        read.map_err(read_error(&self.path))?;
        if self.number == 0 {
            refuse_encoding(&self.path, &self.pending)?;
            if self.pending.starts_with(BYTE_ORDER_MARK) {
                self.pending.drain(..BYTE_ORDER_MARK.len());
            }
        }
        let ends = self.pending.len() <= BLOCK_BYTES;
        let end = if ends { self.pending.len() } else { cut(&self.pending[..BLOCK_BYTES]) };
        let rest = self.pending.split_off(end);
        let bytes = std::mem::replace(&mut self.pending, rest);
        let text = String::from_utf8(bytes).map_err(|error| {
            let valid = error.utf8_error().valid_up_to() as u64;
            SourceError::Utf8 { path: self.path.clone(), offset: self.offset + valid }
        })?;
        self.offset += text.len() as u64;
        self.number += 1;
        self.ended = ends;
        let starts = self.number == 1;
        let content = RawContent::Block { text, starts, ends };
        Ok(Some(RawRow { number: self.number, content }))
    }
}

/// The best place to cut a text.
fn cut(text: &[u8]) -> usize {
    // The byte behind the cut must be known, and must not be a space: tokens contain the space
    // before a word, and runs of spaces.
    let places = |before: fn(u8) -> bool, after: fn(u8) -> bool| {
        (1..text.len()).rev().find(|at| before(text[at - 1]) && after(text[*at]))
    };
    let starts_character = |byte: u8| byte & 0xc0 != 0x80;
    places(|before| before == b'\n', |after| !after.is_ascii_whitespace())
        .or_else(|| places(|before| !before.is_ascii_whitespace(), |after| after == b' '))
        .or_else(|| places(|_| true, starts_character))
        .unwrap_or(text.len())
}

impl Iterator for Blocks {
    type Item = Result<RawRow, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        let block = self.block();
        self.ended |= block.is_err();
        block.transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::cut;

    #[test]
    fn texts_are_cut_between_lines_words_or_characters() {
        assert_eq!(cut(b"one\ntwo\nthree"), 8);
        assert_eq!(cut(b"one\n\ntwo\n\n"), 5);
        assert_eq!(cut(b"one two three"), 7);
        assert_eq!(cut("äöü".as_bytes()), 4);
        assert_eq!(cut(&[0x80; 4]), 4);
    }
}
