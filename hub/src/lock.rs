//! Locks between processes, as files.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::error::HubError;

/// Time between two attempts to take a lock.
const POLL: Duration = Duration::from_millis(50);

/// A lock that ends with its value, or with the process.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of this file, and waits while another process holds it.
    ///
    /// # Errors
    /// If the wait takes longer than `longest`, or the file system refuses.
    pub(crate) fn take(path: &Path, longest: Duration) -> Result<Self, HubError> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(HubError::io(folder))?;
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(HubError::io(path))?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                Err(TryLockError::Error(error)) => return Err(HubError::io(path)(error)),
                Err(TryLockError::WouldBlock) => {}
            }
            let waited = start.elapsed();
            if waited >= longest {
                return Err(HubError::Locked { path: path.to_owned(), waited });
            }
            if waited < POLL {
                tracing::info!(lock = %path.display(), "waiting for another process");
            }
            sleep(POLL.min(longest - waited));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_held_once_and_the_wait_for_it_ends() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("locks").join("one");
        let held = Lock::take(&path, Duration::ZERO).expect("free");
        let refused = Lock::take(&path, Duration::from_millis(60));
        assert!(matches!(refused, Err(HubError::Locked { .. })), "{refused:?}");
        drop(held);
        Lock::take(&path, Duration::ZERO).expect("free again");
    }
}
