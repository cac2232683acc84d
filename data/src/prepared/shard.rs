//! Reads the rows of a shard.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use shoal_protocol::ids::ContentHash;

use super::SHARDS_FOLDER;
use super::index::{Index, ShardEntry};
use super::layout::{Layout, RowError};
use crate::pack::Row;

/// Why a shard cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// The file cannot be read.
    #[error("{path}: {source}; fetch or prepare the shard again", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// The file has another length than the index says.
    #[error("{path} has {found} bytes instead of {expected}: delete it and fetch it again", path = path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes found.
        found: u64,
        /// Bytes according to the index.
        expected: u64,
    },
    /// The file has other bytes than the index says.
    #[error("{path} does not have the hash {expected}: delete it and fetch it again", path = path.display())]
    Hash {
        /// The file.
        path: PathBuf,
        /// The hash in the index.
        expected: ContentHash,
    },
    /// A row number outside the shard.
    #[error("{path} has {rows} rows, and no row {row}", path = path.display())]
    NoRow {
        /// The file.
        path: PathBuf,
        /// The row.
        row: u64,
        /// Rows of the shard.
        rows: u64,
    },
    /// A row with invalid bytes.
    #[error("{path}, row {row}: {source}; delete it and fetch it again", path = path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// The row.
        row: u64,
        /// The error of the bytes.
        source: RowError,
    },
}

/// A shard in memory.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    map: Mmap,
    layout: Layout,
    entry: ShardEntry,
}

impl Shard {
    /// Maps a shard into memory and checks its length. [`Shard::check_hash`] checks its bytes.
    ///
    /// # Errors
    /// If it cannot be read or has another length.
    pub fn open(path: &Path, index: &Index, entry: &ShardEntry) -> Result<Self, ShardError> {
        let read = |source| ShardError::Read { path: path.to_owned(), source };
        let layout = index.layout();
        let file = File::open(path).map_err(read)?;
        let found = file.metadata().map_err(read)?.len();
        let expected = entry.rows.saturating_mul(layout.row_bytes() as u64);
        if found != expected || found == 0 {
            return Err(ShardError::Length { path: path.to_owned(), found, expected });
        }
        // SAFETY: shards are written elsewhere and renamed into place, never changed.
        let map = unsafe { Mmap::map(&file) }.map_err(read)?;
        Ok(Self { path: path.to_owned(), map, layout, entry: entry.clone() })
    }

    /// The path of a shard in a folder of prepared data.
    #[must_use]
    pub fn path_in(folder: &Path, entry: &ShardEntry) -> PathBuf {
        folder.join(SHARDS_FOLDER).join(format!("{}.shard", entry.hash))
    }

    /// Checks that the bytes have the hash that the index names.
    ///
    /// # Errors
    /// If they have not.
    pub fn check_hash(&self) -> Result<(), ShardError> {
        if ContentHash::of(&self.map) == self.entry.hash {
            return Ok(());
        }
        Err(ShardError::Hash { path: self.path.clone(), expected: self.entry.hash })
    }

    /// Number of rows.
    #[must_use]
    pub const fn rows(&self) -> u64 {
        self.entry.rows
    }

    /// The whole shard, to be sent to a peer.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Row number `row`.
    ///
    /// # Errors
    /// If the shard has no such row, or its bytes are invalid.
    pub fn row(&self, row: u64) -> Result<Row, ShardError> {
        if row >= self.entry.rows {
            return Err(ShardError::NoRow { path: self.path.clone(), row, rows: self.entry.rows });
        }
        let size = self.layout.row_bytes();
        let start = row as usize * size;
        self.layout.decode(&self.map[start..start + size]).map_err(|source| ShardError::Row {
            path: self.path.clone(),
            row,
            source,
        })
    }
}
