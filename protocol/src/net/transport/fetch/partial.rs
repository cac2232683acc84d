//! An incomplete file.
//!
//! It lies beside its destination under the same name with the suffix `.part`. It stays there if
//! the fetch or the process ends early, and the next fetch of the same destination resumes it. Each
//! piece in it is verified by its hash, so truncated pieces, holes and bytes of other files are
//! fetched again. Progress is not recorded elsewhere. The file's lock ends with the process.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Wanted;
use crate::pieces::{PieceHashes, piece_at, pieces};

/// The suffix of a partial file's name.
pub const SUFFIX: &str = crate::inside::PARTIAL_SUFFIX;

/// An open partial file.
pub(super) struct Partial {
    pub(super) file: Arc<File>,
    path: PathBuf,
    /// Whether no later fetch resumes it, because another fetch holds the permanent file.
    private: bool,
}

impl Partial {
    /// Opens the remains of an earlier fetch, or creates a file. Returns the missing pieces.
    pub(super) fn open(
        destination: &Path,
        wanted: Wanted,
        hashes: &PieceHashes,
    ) -> io::Result<(Self, BTreeSet<u64>)> {
        let all = (0..pieces(wanted.length)).collect();
        let path = with_suffix(destination, SUFFIX);
        let Some(file) = open_locked(&path)? else {
            // A second fetch of the same file gets a file of its own, which is deleted at its end.
            static NUMBERS: AtomicU64 = AtomicU64::new(0);
            let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
            let suffix = format!(".{}-{number}{SUFFIX}", std::process::id());
            let path = with_suffix(destination, &suffix);
            let file = Arc::new(File::create(&path)?);
            let partial = Self { file, path, private: true };
            partial.file.set_len(wanted.length)?;
            return Ok((partial, all));
        };
        let empty = file.metadata()?.len() == 0;
        file.set_len(wanted.length)?;
        let missing = if empty { all } else { missing(&file, wanted, hashes)? };
        Ok((Self { file: Arc::new(file), path, private: false }, missing))
    }

    /// Renames the complete file to its destination.
    pub(super) fn publish(self, destination: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        std::fs::rename(&self.path, destination)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if self.private {
            // After `publish`, no file has this name.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn with_suffix(destination: &Path, suffix: &str) -> PathBuf {
    let mut name = destination.file_name().unwrap_or_default().to_owned();
    name.push(suffix);
    destination.with_file_name(name)
}

/// Opens and locks the file, creating it if needed; `None` if another fetch has locked it.
fn open_locked(path: &Path) -> io::Result<Option<File>> {
    loop {
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // The previous owner of the lock may just have published it: then this is the complete
        // file.
        match std::fs::metadata(path) {
            Ok(named) if named.ino() == file.metadata()?.ino() => return Ok(Some(file)),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
}

/// The pieces with wrong or missing bytes.
fn missing(file: &File, wanted: Wanted, hashes: &PieceHashes) -> io::Result<BTreeSet<u64>> {
    let mut missing = BTreeSet::new();
    let mut buffer = Vec::new();
    for piece in 0..pieces(wanted.length) {
        let (position, size) = piece_at(wanted.length, piece);
        buffer.resize(size, 0);
        file.read_exact_at(&mut buffer, position)?;
        if !hashes.holds(wanted.length, piece, &buffer) {
            missing.insert(piece);
        }
    }
    Ok(missing)
}
