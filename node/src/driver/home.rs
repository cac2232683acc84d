//! A peer's data directory: its identity, its lives and its files, for one process at a time.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use shoal_protocol::ids::{ContentHash, Incarnation};
use shoal_protocol::net::identity::{Identity, IdentityError};
use shoal_protocol::net::transport::{FileSource, OpenFile};

use crate::whole_file;

/// A data directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    /// It cannot be made or written.
    #[error("the data directory {path} cannot be used: {error}", path = path.display())]
    Unusable {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// Another process has it.
    #[error(
        "the data directory {path} is in use by another process: give each peer its own --data-dir",
        path = path.display()
    )]
    Locked {
        /// Which.
        path: PathBuf,
    },
    /// A counter in it is no number.
    #[error(
        "{path} is damaged: remove the data directory to start as a new peer",
        path = path.display()
    )]
    Damaged {
        /// Which file.
        path: PathBuf,
    },
    /// The identity in it cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// An open data directory.
#[derive(Debug)]
pub struct Home {
    path: PathBuf,
    /// Held as long as the process lives.
    _lock: File,
}

impl Home {
    /// Opens and locks a data directory, making it if it is not there.
    ///
    /// # Errors
    /// When it cannot be used, or another process uses it.
    pub fn open(path: &Path) -> Result<Self, HomeError> {
        let unusable = |error| HomeError::Unusable { path: path.to_owned(), error };
        fs::create_dir_all(path).map_err(unusable)?;
        let lock = File::create(path.join("lock")).map_err(unusable)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(HomeError::Locked { path: path.to_owned() }),
            Err(TryLockError::Error(error)) => Err(unusable(error)),
        }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file that says where the peer answers over HTTP.
    #[must_use]
    pub fn http_file(&self) -> PathBuf {
        http_file(&self.path)
    }

    /// Who this peer is; a new one the first time.
    ///
    /// # Errors
    /// When the identity cannot be read or written.
    pub fn identity(&self) -> Result<Identity, HomeError> {
        Ok(Identity::load_or_create(&self.path.join("identity"))?)
    }

    /// A life of this peer that no process had before.
    ///
    /// # Errors
    /// When the counter cannot be kept.
    pub fn next_incarnation(&self) -> Result<Incarnation, HomeError> {
        self.count("incarnation").map(Incarnation)
    }

    /// Adds one to a counter and has it on the disk before it is used.
    fn count(&self, name: &str) -> Result<u64, HomeError> {
        let path = self.path.join(name);
        let unusable = |error| HomeError::Unusable { path: self.path.clone(), error };
        let last = match fs::read_to_string(&path) {
            Ok(text) => {
                text.trim().parse().map_err(|_| HomeError::Damaged { path: path.clone() })?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0u64,
            Err(error) => return Err(unusable(error)),
        };
        let next = last.checked_add(1).ok_or(HomeError::Damaged { path: path.clone() })?;
        whole_file::write(&path, format!("{next}\n").as_bytes()).map_err(unusable)?;
        File::open(&self.path).and_then(|folder| folder.sync_all()).map_err(unusable)?;
        Ok(next)
    }
}

/// The file in a data directory that says where its peer answers over HTTP.
#[must_use]
pub fn http_file(data_dir: &Path) -> PathBuf {
    data_dir.join("http")
}

/// The files that other peers may fetch from this one.
#[derive(Debug, Clone, Default)]
pub struct Files {
    paths: Arc<RwLock<BTreeMap<ContentHash, PathBuf>>>,
}

impl Files {
    /// Offers a file.
    pub fn offer(&self, hash: ContentHash, path: PathBuf) {
        self.paths.write().unwrap_or_else(PoisonError::into_inner).insert(hash, path);
    }

    /// Where a file that is offered lies.
    #[must_use]
    pub fn path(&self, hash: &ContentHash) -> Option<PathBuf> {
        self.paths.read().unwrap_or_else(PoisonError::into_inner).get(hash).cloned()
    }

    /// No longer offers the files of a folder.
    pub fn withdraw(&self, folder: &Path) {
        let mut paths = self.paths.write().unwrap_or_else(PoisonError::into_inner);
        paths.retain(|_, path| !path.starts_with(folder));
    }
}

impl FileSource for Files {
    fn open(&self, hash: &ContentHash) -> Option<OpenFile> {
        let file = File::open(self.path(hash)?).ok()?;
        let length = file.metadata().ok()?.len();
        Some(OpenFile { file, length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_directory_serves_one_process() {
        let folder = tempfile::tempdir().expect("a folder");
        let home = Home::open(folder.path()).expect("free");
        assert!(matches!(Home::open(folder.path()), Err(HomeError::Locked { .. })));
        drop(home);
        Home::open(folder.path()).expect("free again");
    }

    #[test]
    fn every_life_is_a_new_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let home = Home::open(folder.path()).expect("free");
        let first = home.next_incarnation().expect("counted");
        assert_eq!(home.next_incarnation().expect("counted"), first.next());
        fs::write(folder.path().join("incarnation"), "x").expect("written");
        assert!(matches!(home.next_incarnation(), Err(HomeError::Damaged { .. })));
    }
}
