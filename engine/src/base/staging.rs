//! A folder that is complete once it exists.

use std::fs::{self, File};
use std::path::Path;

use tempfile::TempDir;

use super::{BaseError, Result};

/// Refuses a destination that has files.
pub(super) fn refuse_occupied(out: &Path) -> Result<()> {
    match fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_some()) {
        true => Err(BaseError::Occupied { path: out.to_owned() }),
        false => Ok(()),
    }
}

/// Makes an empty folder beside `out`, which becomes `out` when it is published.
pub(super) fn begin(out: &Path, prefix: &str) -> Result<TempDir> {
    let parent = out.parent().filter(|path| !path.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(BaseError::io(parent))?;
    tempfile::Builder::new().prefix(prefix).tempdir_in(parent).map_err(BaseError::io(parent))
}

/// Flushes the folder's files and gives it its name.
pub(super) fn publish(staging: TempDir, out: &Path) -> Result<()> {
    for entry in fs::read_dir(staging.path()).map_err(BaseError::io(staging.path()))? {
        let path = entry.map_err(BaseError::io(staging.path()))?.path();
        File::open(&path).and_then(|file| file.sync_all()).map_err(BaseError::io(&path))?;
    }
    let from = staging.keep();
    // Readable as any folder that a user makes.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&from, mode).map_err(BaseError::io(&from))?;
    fs::rename(&from, out).map_err(BaseError::io(out))
}
