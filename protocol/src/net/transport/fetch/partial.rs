//! A file that is not whole yet.
//!
//! It lies beside its destination under that name and `.part`, and stays there when the fetch or the
//! process ends before it is whole: the next fetch of the same destination goes on with it. What is in
//! it is believed only piece by piece, each by its hash, so a torn piece, a hole or another file's
//! bytes are fetched again, and no record of what came is kept. Its lock ends with the process.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Wanted;
use crate::pieces::{PieceHashes, piece_at, pieces};

/// What a partial file's name ends with.
pub const SUFFIX: &str = ".part";

/// An open partial file.
pub(super) struct Partial {
    pub(super) file: Arc<File>,
    path: PathBuf,
    /// Whether nobody goes on with it: another fetch has the lasting one.
    private: bool,
}

impl Partial {
    /// Opens what is left of an earlier fetch, or begins anew. Gives the pieces that are missing.
    pub(super) fn open(
        destination: &Path,
        wanted: Wanted,
        hashes: &PieceHashes,
    ) -> io::Result<(Self, BTreeSet<u64>)> {
        let all = (0..pieces(wanted.length)).collect();
        let path = with_suffix(destination, SUFFIX);
        let Some(file) = claim(&path)? else {
            // Two fetches of one file in one process: the second has its own, which goes with it.
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

    /// Gives the whole file its name.
    pub(super) fn publish(self, destination: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        std::fs::rename(&self.path, destination)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if self.private {
            // After `publish` there is nothing under this name any more.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn with_suffix(destination: &Path, suffix: &str) -> PathBuf {
    let mut name = destination.file_name().unwrap_or_default().to_owned();
    name.push(suffix);
    destination.with_file_name(name)
}

/// The file at this path, made if it is not there; `None` when another fetch has it.
fn claim(path: &Path) -> io::Result<Option<File>> {
    loop {
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // Who had it before may have published it just now: then this is the whole file.
        match std::fs::metadata(path) {
            Ok(named) if named.ino() == file.metadata()?.ino() => return Ok(Some(file)),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
}

/// The pieces that are not what they must be.
fn missing(file: &File, wanted: Wanted, hashes: &PieceHashes) -> io::Result<BTreeSet<u64>> {
    let mut missing = BTreeSet::new();
    let mut room = Vec::new();
    for piece in 0..pieces(wanted.length) {
        let (position, size) = piece_at(wanted.length, piece);
        room.resize(size, 0);
        file.read_exact_at(&mut room, position)?;
        if !hashes.holds(wanted.length, piece, &room) {
            missing.insert(piece);
        }
    }
    Ok(missing)
}
