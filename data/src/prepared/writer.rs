//! Writes rows into shards.
//!
//! A shard grows as `LIST-NUMBER.partial` in the folder of unfinished work. When it has all its
//! rows it is closed under that name; [`ShardWriter::publish`] then moves it to its final name. The
//! caller saves the state between the two, so that a crash at any point loses nothing that the
//! saved state lists.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::INDEX_FILE;
use super::index::{Index, ShardEntry};
use super::layout::Layout;
use super::shard::Shard;
use crate::pack::{Counts, Row};

/// Buffer between rows and the file, in bytes.
const BUFFER_BYTES: usize = 1 << 20;

/// The progress of a list of shards.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct ListState {
    /// The shards that are closed.
    pub(crate) finished: Vec<ShardEntry>,
    /// Rows of the shard that grows.
    rows: u64,
    /// Labels of the shard that grows.
    counts: Counts,
}

/// The error of a file that cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}: {source}", path = path.display())]
pub struct WriteError {
    /// The file or folder.
    pub path: PathBuf,
    /// The error of the file system.
    pub source: io::Error,
}

impl WriteError {
    /// Adds the path to an error of the file system.
    pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { path, source }
    }
}

/// Renames a file, and makes that durable.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<(), WriteError> {
    fs::rename(from, to).map_err(WriteError::at(to))?;
    let folder = to.parent().unwrap_or(to);
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(WriteError::at(folder))
}

/// Writes the index of a folder under a temporary name, and renames it.
pub(crate) fn write_index(folder: &Path, index: &Index) -> Result<(), WriteError> {
    let (path, temporary) = (folder.join(INDEX_FILE), folder.join("index.json.new"));
    let mut file = File::create(&temporary).map_err(WriteError::at(&temporary))?;
    file.write_all(&index.bytes())
        .and_then(|()| file.sync_all())
        .map_err(WriteError::at(&temporary))?;
    rename(&temporary, &path)
}

/// Writes one list of shards.
pub(crate) struct ShardWriter {
    out: PathBuf,
    unfinished: PathBuf,
    list: &'static str,
    layout: Layout,
    rows_per_shard: u64,
    state: ListState,
    published: usize,
    file: Option<BufWriter<File>>,
    hasher: blake3::Hasher,
    buffer: Vec<u8>,
}

impl ShardWriter {
    /// Continues a list from a saved state: truncates the shard that grows to the rows that the
    /// state counts.
    pub(crate) fn resume(
        (out, unfinished): (&Path, &Path),
        list: &'static str,
        (layout, rows_per_shard): (Layout, u64),
        state: ListState,
    ) -> Result<Self, WriteError> {
        let mut writer = Self {
            out: out.to_owned(),
            unfinished: unfinished.to_owned(),
            list,
            layout,
            rows_per_shard,
            state,
            published: 0,
            file: None,
            hasher: blake3::Hasher::new(),
            buffer: Vec::new(),
        };
        if writer.state.rows > 0 {
            let path = writer.partial(writer.state.finished.len());
            writer.file = Some(writer.reopen(&path).map_err(WriteError::at(&path))?);
        }
        Ok(writer)
    }

    fn partial(&self, number: usize) -> PathBuf {
        self.unfinished.join(format!("{}-{number:06}.partial", self.list))
    }

    /// Opens the shard that grows behind its last row, and hashes the rows before.
    fn reopen(&mut self, path: &Path) -> io::Result<BufWriter<File>> {
        let length = self.state.rows.saturating_mul(self.layout.row_bytes() as u64);
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() < length {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is too short"));
        }
        file.set_len(length)?;
        let mut block = vec![0; BUFFER_BYTES];
        loop {
            let count = file.read(&mut block)?;
            if count == 0 {
                return Ok(BufWriter::with_capacity(BUFFER_BYTES, file));
            }
            self.hasher.update(&block[..count]);
        }
    }

    /// The state to be saved. Call [`ShardWriter::sync`] before.
    pub(crate) const fn state(&self) -> &ListState {
        &self.state
    }

    /// Appends a row. Returns whether the row completed a shard.
    pub(crate) fn write(&mut self, row: &Row) -> Result<bool, WriteError> {
        self.buffer.clear();
        self.layout.encode(row, &mut self.buffer);
        self.hasher.update(&self.buffer);
        let path = self.partial(self.state.finished.len());
        let file = match &mut self.file {
            Some(file) => file,
            closed => {
                let file = File::create(&path).map_err(WriteError::at(&path))?;
                closed.insert(BufWriter::with_capacity(BUFFER_BYTES, file))
            }
        };
        file.write_all(&self.buffer).map_err(WriteError::at(&path))?;
        self.state.rows += 1;
        self.state.counts.add(&row.counts());
        if self.state.rows < self.rows_per_shard {
            return Ok(false);
        }
        self.close()?;
        Ok(true)
    }

    /// Closes the shard that grows, if it has rows.
    pub(crate) fn close(&mut self) -> Result<(), WriteError> {
        self.sync()?;
        self.file = None;
        if self.state.rows > 0 {
            let Counts { targets, masked, padded } = self.state.counts;
            let (hash, rows) = (self.hasher.finalize().into(), self.state.rows);
            self.state.finished.push(ShardEntry { hash, rows, targets, masked, padded });
        }
        self.hasher.reset();
        self.state.rows = 0;
        self.state.counts = Counts::default();
        Ok(())
    }

    /// Makes all rows so far durable.
    pub(crate) fn sync(&mut self) -> Result<(), WriteError> {
        let path = self.partial(self.state.finished.len());
        let Some(file) = &mut self.file else { return Ok(()) };
        file.flush().and_then(|()| file.get_ref().sync_data()).map_err(WriteError::at(&path))
    }

    /// Moves closed shards to their final names.
    pub(crate) fn publish(&mut self) -> Result<(), WriteError> {
        for number in self.published..self.state.finished.len() {
            let (from, entry) = (self.partial(number), &self.state.finished[number]);
            let to = Shard::path_in(&self.out, entry);
            if from.exists() {
                rename(&from, &to)?;
            } else {
                // It was moved before an interruption.
                fs::metadata(&to).map_err(WriteError::at(&to))?;
            }
            self.published = number + 1;
        }
        Ok(())
    }
}
