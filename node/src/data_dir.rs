//! A peer's data directory: identity, lives and files, for one process at a time.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read as _};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use anyhow::Context as _;
use nix::fcntl::OFlag;
use shoal_protocol::ids::{ContentHash, Incarnation};
use shoal_protocol::net::identity::{Identity, IdentityError};
use shoal_protocol::net::transport::{FileSource, OpenFile};

use crate::exit::{Exit, ExitWith};
use crate::whole_file;

/// The most bytes that are read of a file with an address.
const ADDRESS: u64 = 256;

/// The file that a process of the directory locks.
const LOCK: &str = "lock";

/// Rights of a data directory: its owner's alone.
const PRIVATE: u32 = 0o700;

/// A data directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// The directory cannot be made or written.
    #[error("the data directory {path} cannot be used: {error}", path = path.display())]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// Another process uses the directory.
    #[error(
        "the data directory {path} is in use by another process: give each peer its own --data-dir",
        path = path.display()
    )]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// The lock of the directory is a link, which could lead to any file.
    #[error("{path} is a link, and must be a file: remove it", path = path.display())]
    LinkedLock {
        /// The lock's file.
        path: PathBuf,
    },
    /// A counter in the directory is no number.
    #[error(
        "{path} is damaged: remove the data directory to start as a new peer",
        path = path.display()
    )]
    Damaged {
        /// The counter's file.
        path: PathBuf,
    },
    /// The identity in the directory cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// An open data directory.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    /// The lock, for the lifetime of this value.
    _lock: File,
}

impl DataDir {
    /// Opens and locks a data directory; makes a missing one. What is in it (a key, a text, weights) is
    /// for its owner alone, and so is the directory: see [`make`] and [`tighten`].
    ///
    /// # Errors
    /// When the directory cannot be used, or another process uses it.
    pub fn open(path: &Path) -> Result<Self, DataDirError> {
        let unusable = |error| DataDirError::Unusable { path: path.to_owned(), error };
        make(path).map_err(unusable)?;
        tighten(path).map_err(unusable)?;
        let file = path.join(LOCK);
        let lock = open_lock(&file).map_err(|error| match file.is_symlink() {
            true => DataDirError::LinkedLock { path: file.clone() },
            false => unusable(error),
        })?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(DataDirError::Locked { path: path.to_owned() }),
            Err(TryLockError::Error(error)) => Err(unusable(error)),
        }
    }

    /// Returns the path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file with the address at which the peer answers over HTTP.
    #[must_use]
    pub fn http_file(&self) -> PathBuf {
        http_file(&self.path)
    }

    /// Returns this peer's identity; makes one the first time.
    ///
    /// # Errors
    /// When the identity cannot be read or written.
    pub fn identity(&self) -> Result<Identity, DataDirError> {
        Ok(Identity::load_or_create(&self.path.join("identity"))?)
    }

    /// Returns a new life of this peer.
    ///
    /// # Errors
    /// When the counter cannot be kept.
    pub fn next_incarnation(&self) -> Result<Incarnation, DataDirError> {
        self.count("incarnation").map(Incarnation)
    }

    /// Adds one to a counter and flushes it to the disk.
    fn count(&self, name: &str) -> Result<u64, DataDirError> {
        let path = self.path.join(name);
        let unusable = |error| DataDirError::Unusable { path: self.path.clone(), error };
        let last = match fs::read_to_string(&path) {
            Ok(text) => {
                text.trim().parse().map_err(|_| DataDirError::Damaged { path: path.clone() })?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0u64,
            Err(error) => return Err(unusable(error)),
        };
        let next = last.checked_add(1).ok_or(DataDirError::Damaged { path: path.clone() })?;
        whole_file::write(&path, format!("{next}\n").as_bytes()).map_err(unusable)?;
        File::open(&self.path).and_then(|folder| folder.sync_all()).map_err(unusable)?;
        Ok(next)
    }
}

/// Makes a missing data directory that only its owner can enter.
///
/// # Errors
/// If it cannot be made.
pub(crate) fn make(path: &Path) -> io::Result<()> {
    match path.is_dir() {
        true => Ok(()),
        false => DirBuilder::new().recursive(true).mode(PRIVATE).create(path),
    }
}

/// Takes the rights of other users on a data directory away, as an earlier version or a person made it.
/// A folder with other things is left as it is, with a warning: somebody may need it open.
fn tighten(path: &Path) -> io::Result<()> {
    let mode = fs::metadata(path)?.permissions().mode() & 0o777;
    if mode & !PRIVATE == 0 {
        return Ok(());
    }
    let is_own = ["identity", LOCK].iter().any(|name| path.join(name).exists())
        || fs::read_dir(path)?.next().is_none();
    let closed = is_own && fs::set_permissions(path, Permissions::from_mode(PRIVATE)).is_ok();
    let (path, mode) = (path.display(), format!("{mode:03o}"));
    if closed {
        tracing::info!(%path, %mode, "the data directory was open to other users, and is no longer");
    } else {
        tracing::warn!(%path, %mode, "other users can read the data directory: chmod 700 {path}");
    }
    Ok(())
}

/// Opens a file to lock it. It keeps what it holds, and a link to another file is refused: in a
/// directory that others can write, that file would be locked or emptied.
///
/// # Errors
/// If it cannot be opened or made.
pub(crate) fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags(OFlag::O_NOFOLLOW.bits()).open(path)
}

/// Returns the file with the address at which the peer of a data directory answers over HTTP.
#[must_use]
pub fn http_file(data_dir: &Path) -> PathBuf {
    data_dir.join("http")
}

/// Returns the address at which the peer of a data directory answers over HTTP.
///
/// # Errors
/// When the peer does not run.
pub(crate) fn shown_at(data_dir: &Path) -> anyhow::Result<SocketAddr> {
    let path = http_file(data_dir);
    let read = || -> io::Result<String> {
        let mut text = String::new();
        File::open(&path)?.take(ADDRESS).read_to_string(&mut text)?;
        Ok(text)
    };
    let text = read()
        .with_context(|| {
            let folder = data_dir.display();
            format!(
                "no peer that is shown over HTTP runs with --data-dir {folder}: start one, or give \
                 another --data-dir or the IP:PORT of a peer"
            )
        })
        .exit_with(Exit::Failed)?;
    let address = text.trim().parse();
    address.with_context(|| format!("{} is damaged: start the peer again", path.display()))
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

    /// Returns the path of an offered file.
    #[must_use]
    pub fn path(&self, hash: &ContentHash) -> Option<PathBuf> {
        self.paths.read().unwrap_or_else(PoisonError::into_inner).get(hash).cloned()
    }

    /// Withdraws the files of a folder.
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
        let home = DataDir::open(folder.path()).expect("free");
        assert!(matches!(DataDir::open(folder.path()), Err(DataDirError::Locked { .. })));
        drop(home);
        DataDir::open(folder.path()).expect("free again");
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it exists").permissions().mode() & 0o777
    }

    #[test]
    fn a_data_directory_is_for_its_owner() {
        let folder = tempfile::tempdir().expect("a folder");
        let new = folder.path().join("above/new");
        drop(DataDir::open(&new).expect("made"));
        assert_eq!((mode(&new), mode(&new.join("lock"))), (0o700, 0o600));
        // One of an earlier version is closed; a folder with other things stays open.
        fs::set_permissions(&new, Permissions::from_mode(0o755)).expect("changed");
        drop(DataDir::open(&new).expect("free"));
        assert_eq!(mode(&new), 0o700);
        let other = folder.path().join("other");
        fs::create_dir(&other).expect("a folder");
        fs::write(other.join("notes"), "mine").expect("written");
        fs::set_permissions(&other, Permissions::from_mode(0o755)).expect("changed");
        drop(DataDir::open(&other).expect("free"));
        assert_eq!(mode(&other), 0o755);
    }

    #[test]
    fn a_lock_empties_no_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let home = folder.path().join("home");
        let (precious, lock) = (folder.path().join("precious"), home.join("lock"));
        fs::write(&precious, "text").expect("written");
        fs::create_dir(&home).expect("a folder");
        std::os::unix::fs::symlink(&precious, &lock).expect("a link");
        let error = DataDir::open(&home).expect_err("a link");
        assert!(matches!(error, DataDirError::LinkedLock { .. }), "{error}");
        fs::remove_file(&lock).expect("removed");
        fs::write(&lock, "kept").expect("written");
        DataDir::open(&home).expect("a file");
        let read = |path: &Path| fs::read_to_string(path).expect("it exists");
        assert_eq!((read(&precious), read(&lock)), ("text".to_owned(), "kept".to_owned()));
    }

    #[test]
    fn every_life_is_new() {
        let folder = tempfile::tempdir().expect("a folder");
        let home = DataDir::open(folder.path()).expect("free");
        let first = home.next_incarnation().expect("counted");
        assert_eq!(home.next_incarnation().expect("counted"), first.next());
        fs::write(folder.path().join("incarnation"), "x").expect("written");
        assert!(matches!(home.next_incarnation(), Err(DataDirError::Damaged { .. })));
    }
}
