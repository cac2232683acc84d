//! Reads rows of files, in constant memory.

mod compressed;
mod dialect;
mod files;
mod glob;
mod json;
mod lines;
mod pair;
mod parquet;
mod python;
mod row;
mod split;
mod text;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

pub use files::{Compression, Container, Found, SourceFile, find};
pub use json::{Json, Object};
pub use row::{Arguments, Format, FormatError, Messages, Row, RowKind};
pub use split::{Split, SplitError};

/// Most bytes of a line of JSON, unless another cap is given.
pub const DEFAULT_LINE_BYTES: usize = 16 << 20;

/// Why rows cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A file or folder cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// A file of a kind that is not read.
    #[error(
        "{path} is of no known kind: use .txt, .md, .json, .jsonl or .ndjson, each also with .gz or .zst, or .parquet", path = path.display()
    )]
    Kind {
        /// The file.
        path: PathBuf,
    },
    /// A folder or pattern without a file of a known kind.
    #[error(
        "{0} has no .txt, .md, .json, .jsonl or .parquet file: name another file, folder or pattern"
    )]
    NoFile(String),
    /// A file of a folder that is a link to a file elsewhere.
    #[error(
        "{path} is a link to {target}, which is not in {folder}: remove the link, and name {target} as a source of its own if it is training text", path = path.display(), target = target.display(), folder = folder.display()
    )]
    Link {
        /// The link.
        path: PathBuf,
        /// The file that it leads to.
        target: PathBuf,
        /// The folder that is a source.
        folder: PathBuf,
    },
    /// A file that is not UTF-8 but UTF-16.
    #[error("{path} is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`", path = path.display())]
    Encoding {
        /// The file.
        path: PathBuf,
    },
    /// A folder without files of the split that is asked for.
    #[error("{folder} has no split {split}, but {found}: name one with --split, or `--split all`", folder = folder.display())]
    NoSplit {
        /// The folder.
        folder: PathBuf,
        /// The split.
        split: &'static str,
        /// The splits that it has.
        found: String,
    },
    /// A compressed file that is far larger than it looks.
    #[error(
        "{path} has more than {most} bytes of text for each compressed byte, as no training text has: if it is meant, decompress it and name the result", path = path.display()
    )]
    Ratio {
        /// The file.
        path: PathBuf,
        /// The cap.
        most: u64,
    },
    /// A line that is longer than the cap.
    #[error("{path}, line {line}: more than {most} bytes; shorten it, or raise --line-bytes", path = path.display())]
    LongLine {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The cap.
        most: usize,
    },
    /// A line or row that is not JSON of the right form.
    #[error("{path}, line {line}: {reason}", path = path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The error of the parser.
        reason: String,
    },
    /// A row without the key.
    #[error("{path}, row {row}: no `{key}`; add it, or use another --format", path = path.display())]
    NoKey {
        /// The file.
        path: PathBuf,
        /// The row, from 1.
        row: u64,
        /// The key.
        key: &'static str,
    },
    /// A value of the wrong type.
    #[error("{path}, row {row}: `{key}` must be {expected}", path = path.display())]
    WrongType {
        /// The file.
        path: PathBuf,
        /// The row, from 1.
        row: u64,
        /// The key.
        key: &'static str,
        /// The right type.
        expected: &'static str,
    },
    /// A column that would be left out although it says something.
    #[error("{path}, row {row}: `{key}` is not trained on here: take the column or the row out", path = path.display())]
    Unused {
        /// The file.
        path: PathBuf,
        /// The row, from 1.
        row: u64,
        /// The key.
        key: &'static str,
    },
    /// A first row whose keys fit no format.
    #[error(
        "{path}: its first row has the keys {keys}, and none of `text`, `messages`, `conversations`, `prompt` with `completion`, or `instruction` with `output`; rename them", path = path.display()
    )]
    UnknownKeys {
        /// The file.
        path: PathBuf,
        /// The keys found.
        keys: String,
    },
    /// A text file that is not UTF-8.
    #[error("{path}: byte {offset} is not UTF-8; convert the file", path = path.display())]
    Utf8 {
        /// The file.
        path: PathBuf,
        /// Position of the invalid byte.
        offset: u64,
    },
    /// A Parquet file that is damaged, or has a feature that is not read.
    #[error("{path}, row {row}: not readable as Parquet: {reason}; write the file again", path = path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The row, from 1; 0 for the file's end, which describes it.
        row: u64,
        /// The error of the library.
        reason: String,
    },
}

/// One row as it is read, not yet parsed.
#[derive(Debug, Clone, PartialEq)]
pub struct RawRow {
    /// The line, row or block of the file, from 1.
    pub number: u64,
    /// The content.
    pub content: RawContent,
}

/// The content of a row.
#[derive(Debug, Clone, PartialEq)]
pub enum RawContent {
    /// A line of JSON.
    Line(Vec<u8>),
    /// The columns of a row of a table.
    Columns(Object),
    /// A block of a text file.
    Block {
        /// The text.
        text: String,
        /// Whether the document begins with the block.
        starts: bool,
        /// Whether the document ends with the block.
        ends: bool,
    },
}

impl RawRow {
    /// Size of the content in bytes, about.
    #[must_use]
    pub fn size(&self) -> usize {
        match &self.content {
            RawContent::Line(bytes) => bytes.len(),
            RawContent::Columns(columns) => {
                columns.iter().map(|(_, value)| value.text_bytes()).sum()
            }
            RawContent::Block { text, .. } => text.len(),
        }
    }
}

/// The rows of a file, in order.
pub type Rows = Box<dyn Iterator<Item = Result<RawRow, SourceError>>>;

/// How files are read.
#[derive(Debug, Clone)]
pub struct ReadOptions {
    /// Most bytes of a line of JSON.
    pub line_bytes: usize,
    /// Counts the bytes that have been read of all files.
    pub bytes_read: Arc<AtomicU64>,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self { line_bytes: DEFAULT_LINE_BYTES, bytes_read: Arc::default() }
    }
}

/// The rows of a file after the first `skip`.
///
/// # Errors
/// If the file cannot be opened.
pub fn open(
    file: &SourceFile,
    kind: RowKind,
    skip: u64,
    options: &ReadOptions,
) -> Result<Rows, SourceError> {
    Ok(match file.container {
        Container::Text => Box::new(text::Blocks::open(file, skip, options)?),
        Container::Lines => Box::new(lines::Lines::open(file, skip, options)?),
        Container::Parquet => Box::new(parquet::Table::open(file, kind, skip, options)?),
    })
}

/// The kind of rows that a format stands for. [`Format::Auto`] stands for the kind that has the keys
/// of the first row of the first table. Text files have texts in every format.
///
/// # Errors
/// If the first row cannot be read, or its keys fit no format.
pub fn detect(
    files: &[SourceFile],
    format: Format,
    options: &ReadOptions,
) -> Result<RowKind, SourceError> {
    if let Some(kind) = format.kind() {
        return Ok(kind);
    }
    for file in files {
        let found = match file.container {
            Container::Text => continue,
            Container::Lines => lines::first_keys(file, options)?,
            Container::Parquet => Some(parquet::columns(file)?),
        };
        if let Some(keys) = found {
            return RowKind::of_keys(&keys).ok_or_else(|| SourceError::UnknownKeys {
                path: file.path.clone(),
                keys: keys.join(", "),
            });
        }
    }
    Ok(RowKind::Text)
}
