//! Atomic replacement of files.

use std::io::{self, Write};
use std::path::Path;

/// Writes a file atomically, readable by its owner only. Its bytes are on disk before it gets its
/// name.
///
/// # Errors
/// If the folder cannot be written, or the disk is full.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let mut file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}
