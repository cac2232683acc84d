//! The folder in which a checkpoint is collected, beside its destination.
//!
//! Its name follows from the destination. It stays when the process dies, so the next process goes on
//! with the files in it. A second fetch for the same destination has a folder of its own.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::resume::{folders_in, paths_in};

/// The beginning of the folder's name.
const PREFIX: &str = ".fetching-";

/// A folder for one fetch, locked for the lifetime of this value.
#[derive(Debug)]
pub(crate) struct Staging {
    folder: PathBuf,
    _lock: File,
    /// Removes the folder of a second fetch at its end.
    _private: Option<tempfile::TempDir>,
}

impl Staging {
    /// Opens the folder of an earlier fetch for the same destination, or a new one.
    ///
    /// # Errors
    /// When the parent cannot be written.
    pub(crate) fn open(destination: &Path) -> io::Result<Self> {
        let parent = parent_of(destination);
        fs::create_dir_all(parent)?;
        let name = destination.file_name().unwrap_or_default().to_string_lossy();
        let folder = parent.join(format!("{PREFIX}{name}"));
        fs::create_dir_all(&folder)?;
        let lock = File::open(&folder)?;
        if lock.try_lock().is_err() {
            let private = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
            let lock = File::open(private.path())?;
            lock.try_lock()?;
            let folder = private.path().to_owned();
            return Ok(Self { folder, _lock: lock, _private: Some(private) });
        }
        // An earlier process died while it made these links.
        for left in folders_in(&folder) {
            fs::remove_dir_all(left)?;
        }
        Ok(Self { folder, _lock: lock, _private: None })
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Removes folders of dead processes for other destinations in the same parent.
    pub(crate) fn forget_others(destination: &Path) {
        let parent = parent_of(destination);
        let mine = destination.file_name().unwrap_or_default().to_string_lossy();
        for folder in paths_in(parent) {
            let name = folder.file_name().unwrap_or_default().to_string_lossy();
            let other = name.strip_prefix(PREFIX).is_some_and(|of| of != mine);
            let abandoned = || File::open(&folder).is_ok_and(|lock| lock.try_lock().is_ok());
            if other
                && abandoned()
                && let Err(error) = fs::remove_dir_all(&folder)
            {
                tracing::warn!(folder = %folder.display(), %error, "not removed");
            }
        }
    }
}

fn parent_of(destination: &Path) -> &Path {
    destination.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_of_a_dead_process_is_used_again_or_removed() {
        let home = tempfile::tempdir().expect("a folder");
        let (one, other) = (home.path().join("one"), home.path().join("other"));
        let staging = Staging::open(&one).expect("made");
        fs::write(staging.folder().join("file"), "x").expect("written");
        let second = Staging::open(&one).expect("made");
        assert_ne!(second.folder(), staging.folder());
        drop(second);
        Staging::forget_others(&other);
        assert!(staging.folder().join("file").exists(), "it is in use");
        drop(staging);
        let again = Staging::open(&one).expect("it is there");
        assert!(again.folder().join("file").exists());
        drop(again);
        Staging::forget_others(&other);
        assert_eq!(fs::read_dir(home.path()).expect("readable").count(), 0);
    }
}
