//! Lines of JSON.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;

use serde_json::Value;

use super::files::{SourceFile, read_error};
use super::{RawContent, RawRow, ReadOptions, SourceError};

/// Buffer of decompressed bytes.
const BUFFER_BYTES: usize = 1 << 18;

/// The lines of a file. Blank lines are left out, but counted.
pub(super) struct Lines {
    path: PathBuf,
    reader: BufReader<Box<dyn Read>>,
    line: u64,
    most: usize,
    failed: bool,
}

impl Lines {
    /// Opens a file behind its first `skip` lines.
    pub(super) fn open(
        file: &SourceFile,
        skip: u64,
        options: &ReadOptions,
    ) -> Result<Self, SourceError> {
        let mut lines = Self {
            path: file.path.clone(),
            reader: BufReader::with_capacity(BUFFER_BYTES, file.reader(&options.bytes_read)?),
            line: 0,
            most: options.line_bytes,
            failed: false,
        };
        while lines.line < skip && lines.read_line(None)? {}
        Ok(lines)
    }

    /// Reads a line without its end, or passes over it. Returns false at the end of the file.
    fn read_line(&mut self, mut line: Option<&mut Vec<u8>>) -> Result<bool, SourceError> {
        self.line += 1;
        let mut any = false;
        loop {
            let block = self.reader.fill_buf().map_err(read_error(&self.path))?;
            if block.is_empty() {
                return Ok(any);
            }
            any = true;
            let end = block.iter().position(|byte| *byte == b'\n');
            let content = &block[..end.unwrap_or(block.len())];
            if let Some(line) = &mut line {
                if line.len() + content.len() > self.most {
                    let (path, line) = (self.path.clone(), self.line);
                    return Err(SourceError::LongLine { path, line, most: self.most });
                }
                line.extend_from_slice(content);
            }
            let used = content.len() + usize::from(end.is_some());
            self.reader.consume(used);
            if end.is_some() {
                return Ok(true);
            }
        }
    }
}

impl Iterator for Lines {
    type Item = Result<RawRow, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.failed {
            let mut line = Vec::new();
            match self.read_line(Some(&mut line)) {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => {
                    self.failed = true;
                    return Some(Err(error));
                }
            }
            if self.line == 1 && line.starts_with("\u{feff}".as_bytes()) {
                line.drain(.."\u{feff}".len());
            }
            if !line.trim_ascii().is_empty() {
                return Some(Ok(RawRow { number: self.line, content: RawContent::Line(line) }));
            }
        }
        None
    }
}

/// The keys of the first row, in the order of the alphabet; `None` if there is no row.
pub(super) fn first_keys(
    file: &SourceFile,
    options: &ReadOptions,
) -> Result<Option<Vec<String>>, SourceError> {
    let options = ReadOptions { line_bytes: options.line_bytes, ..ReadOptions::default() };
    let Some(row) = Lines::open(file, 0, &options)?.next().transpose()? else {
        return Ok(None);
    };
    let RawContent::Line(line) = row.content else { return Ok(None) };
    let json = |reason| SourceError::Json { path: file.path.clone(), line: row.number, reason };
    match serde_json::from_slice(&line) {
        Ok(Value::Object(columns)) => Ok(Some(columns.keys().cloned().collect())),
        Ok(_) => Err(json("it must be a JSON object".to_owned())),
        Err(error) => Err(json(error.to_string())),
    }
}
