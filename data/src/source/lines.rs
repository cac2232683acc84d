//! Rows of JSON: a line each, or the items of one array.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;

use serde_json::Value;

use super::files::{BYTE_ORDER_MARK, SourceFile, read_error, refuse_encoding};
use super::{RawContent, RawRow, ReadOptions, SourceError, python};

/// Buffer of decompressed bytes.
const BUFFER_BYTES: usize = 1 << 18;

/// The lines of a file, or the items of its array. Blank lines are left out, but counted.
pub(super) struct Lines {
    path: PathBuf,
    reader: BufReader<Box<dyn Read>>,
    line: u64,
    most: usize,
    failed: bool,
    /// Whether the file is one array.
    is_array: bool,
}

/// Where a reader of an array is in one of its items.
#[derive(Default)]
struct Item {
    depth: u32,
    in_text: bool,
    escaped: bool,
    /// Whether the item has begun.
    begun: bool,
}

/// What a byte is to an item.
enum Step {
    Between,
    Inside,
    /// Inside, and the last.
    Last,
    /// Behind the item.
    Behind,
    /// The end of the array.
    End,
}

impl Item {
    fn step(&mut self, byte: u8) -> Step {
        if self.in_text {
            let ends = byte == b'"' && !self.escaped;
            self.escaped = byte == b'\\' && !self.escaped;
            self.in_text = !ends;
            return Step::Inside;
        }
        match byte {
            b' ' | b'\t' | b'\r' | b'\n' if !self.begun => return Step::Between,
            b',' if self.depth == 0 => {
                return if self.begun { Step::Behind } else { Step::Between };
            }
            b']' if self.depth == 0 => return Step::End,
            b'"' => self.in_text = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                self.begun = true;
                return if self.depth == 0 { Step::Last } else { Step::Inside };
            }
            _ => {}
        }
        self.begun = true;
        Step::Inside
    }
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
            is_array: false,
        };
        lines.begin()?;
        while lines.line < skip && lines.read_row(None)? {}
        Ok(lines)
    }

    /// Reads what is before the first row, and refuses a file in another encoding.
    fn begin(&mut self) -> Result<(), SourceError> {
        let block = self.reader.fill_buf().map_err(read_error(&self.path))?;
        refuse_encoding(&self.path, block)?;
        if block.starts_with(BYTE_ORDER_MARK) {
            self.reader.consume(BYTE_ORDER_MARK.len());
        }
        let block = self.reader.fill_buf().map_err(read_error(&self.path))?;
        let first = block.iter().position(|byte| !byte.is_ascii_whitespace());
        if let Some(first) = first
            && block[first] == b'['
        {
            self.is_array = true;
            self.reader.consume(first + 1);
        }
        Ok(())
    }

    fn read_row(&mut self, row: Option<&mut Vec<u8>>) -> Result<bool, SourceError> {
        if self.is_array { self.read_item(row) } else { self.read_line(row) }
    }

    /// Reads an item of the array, or passes over it. Returns false at the end of the array.
    fn read_item(&mut self, mut row: Option<&mut Vec<u8>>) -> Result<bool, SourceError> {
        self.line += 1;
        let mut item = Item::default();
        loop {
            let block = self.reader.fill_buf().map_err(read_error(&self.path))?;
            if block.is_empty() {
                let reason = "the array has no end: fetch the file again".to_owned();
                return Err(SourceError::Json { path: self.path.clone(), line: self.line, reason });
            }
            let (mut from, mut to, mut used, mut done) = (0, 0, block.len(), None);
            for (at, byte) in block.iter().enumerate() {
                match item.step(*byte) {
                    Step::Between => from = at + 1,
                    Step::Inside => to = at + 1,
                    Step::Last => (to, used, done) = (at + 1, at + 1, Some(true)),
                    Step::Behind => (used, done) = (at + 1, Some(true)),
                    // The end stays, so that it is found again behind the last item.
                    Step::End => (used, done) = (at, Some(item.begun)),
                }
                if done.is_some() {
                    break;
                }
            }
            if let Some(row) = &mut row {
                let content = block.get(from..to).unwrap_or_default();
                if row.len() + content.len() > self.most {
                    let (path, line) = (self.path.clone(), self.line);
                    return Err(SourceError::LongLine { path, line, most: self.most });
                }
                row.extend_from_slice(content);
            }
            self.reader.consume(used);
            if let Some(done) = done {
                return Ok(done);
            }
        }
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
            match self.read_row(Some(&mut line)) {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => {
                    self.failed = true;
                    return Some(Err(error));
                }
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
    let value = serde_json::from_slice(&line).or_else(|error| match python::to_json(&line) {
        Some(line) => serde_json::from_slice(&line),
        None => Err(error),
    });
    match value {
        Ok(Value::Object(columns)) => Ok(Some(columns.keys().cloned().collect())),
        Ok(_) => Err(json("it must be a JSON object".to_owned())),
        Err(error) => Err(json(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::{RawContent, ReadOptions, find};
    use super::Lines;

    fn rows(content: &str, skip: u64) -> Result<Vec<(u64, String)>, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.json");
        fs::write(&path, content).expect("writable");
        let found = find(&[path.display().to_string()], None).map_err(|error| error.to_string())?;
        let lines = Lines::open(&found.files[0], skip, &ReadOptions::default());
        lines
            .map_err(|error| error.to_string())?
            .map(|row| {
                let row = row.map_err(|error| error.to_string())?;
                let RawContent::Line(line) = row.content else { panic!("a line") };
                Ok((row.number, String::from_utf8(line).expect("UTF-8")))
            })
            .collect()
    }

    #[test]
    fn an_array_has_a_row_for_each_item() {
        let array = "\u{feff} [\n {\"a\": \"x ] , \\\" {\"},\n {\"a\": [1, {}]} , 7\n]\n";
        let all = [(1, "{\"a\": \"x ] , \\\" {\"}"), (2, "{\"a\": [1, {}]}"), (3, "7\n")];
        let all = all.map(|(number, text)| (number, text.to_owned())).to_vec();
        assert_eq!(rows(array, 0).expect("rows"), all);
        assert_eq!(rows(array, 1).expect("rows"), all[1..]);
        assert_eq!(rows("[]", 0).expect("none"), []);
        let error = rows("[{\"a\": 1}, {\"a\"", 0).expect_err("it is cut");
        assert!(error.contains("the array has no end"), "{error}");
    }

    #[test]
    fn other_encodings_are_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.jsonl");
        let utf16: Vec<u8> = "{\"a\": 1}".encode_utf16().flat_map(u16::to_le_bytes).collect();
        for bytes in [[&[0xff, 0xfe][..], &utf16].concat(), utf16] {
            fs::write(&path, bytes).expect("writable");
            let found = find(&[path.display().to_string()], None).expect("a file");
            let error = Lines::open(&found.files[0], 0, &ReadOptions::default());
            let error = error.err().expect("refused").to_string();
            assert!(error.contains("UTF-16") && error.contains("iconv"), "{error}");
        }
    }
}
