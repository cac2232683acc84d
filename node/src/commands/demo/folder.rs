//! The folder that a demo leaves behind.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};

use crate::data_dir::open_lock;
use crate::exit::{Exit, ExitWith};

/// Marks a folder as a demo's; locked while the demo runs.
const MARKER: &str = ".shoal-demo";

/// Everything else that a demo writes. Nothing else is ever removed.
const OUTPUTS: [&str; 9] = [
    "run.toml",
    "reference.toml",
    "text.txt",
    "report.json",
    "loss.svg",
    "checkpoint",
    "reference",
    "logs",
    "peers",
];

/// A folder that belongs to this demo, empty at first.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// Held until the demo ends.
    _lock: File,
}

impl Folder {
    /// Makes the folder, or empties that of an earlier demo.
    ///
    /// # Errors
    /// When it holds something else, or another demo is using it.
    pub(super) fn prepare(path: &Path) -> anyhow::Result<Self> {
        Self::claim(path).exit_with(Exit::Usage)
    }

    fn claim(path: &Path) -> anyhow::Result<Self> {
        let tell = || format!("the folder {} cannot be used", path.display());
        fs::create_dir_all(path).with_context(tell)?;
        let path = path.canonicalize().with_context(tell)?;
        let marker = path.join(MARKER);
        let is_ours = marker.is_file();
        if !is_ours && fs::read_dir(&path).with_context(tell)?.next().is_some() {
            bail!(
                "{} is not empty and not a demo's: choose another folder with --out",
                path.display()
            );
        }
        let lock = open_lock(&marker).with_context(tell)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(anyhow!("another demo is using {}", path.display()));
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(tell),
        }
        let folder = Self { path, _lock: lock };
        for name in OUTPUTS {
            remove(&folder.join(name)).with_context(tell)?;
        }
        for name in ["logs", "peers"] {
            fs::create_dir(folder.join(name)).with_context(tell)?;
        }
        Ok(folder)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }
}

fn remove(path: &Path) -> std::io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(about) if about.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_earlier_demo_wrote_is_replaced_and_nothing_else() {
        let parent = tempfile::tempdir().expect("a folder");
        let path = parent.path().join("deep/demo");
        let first = Folder::prepare(&path).expect("new");
        fs::write(first.join("report.json"), "old").expect("written");
        fs::write(first.join("notes.txt"), "mine").expect("written");
        fs::write(first.join("logs/peer-0.log"), "old").expect("written");
        drop(first);
        let second = Folder::prepare(&path).expect("an earlier demo's");
        assert!(!second.join("report.json").exists());
        assert!(!second.join("logs/peer-0.log").exists());
        assert_eq!(fs::read(second.join("notes.txt")).expect("still there"), b"mine");
    }

    #[test]
    fn a_folder_with_something_else_is_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("run.toml"), "mine").expect("written");
        let error = Folder::prepare(folder.path()).expect_err("not a demo's");
        assert!(error.to_string().contains("not empty"), "{error}");
        assert_eq!(fs::read(folder.path().join("run.toml")).expect("still there"), b"mine");
    }

    #[test]
    fn one_demo_at_a_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let held = Folder::prepare(folder.path()).expect("free");
        let error = Folder::prepare(folder.path()).expect_err("in use");
        assert!(error.to_string().contains("another demo"), "{error}");
        drop(held);
    }
}
