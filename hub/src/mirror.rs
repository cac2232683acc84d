//! Downloads of files whose hashes are known: from plain mirrors, and of repositories.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::cache::CachedRepository;
use crate::client::Hub;
use crate::digest::FileHash;
use crate::error::HubError;
use crate::lock::Lock;
use crate::progress::Progress;
use crate::reference::Repository;
use crate::refusal::Subject;
use crate::transfer::Transfer;

impl Hub {
    /// Downloads a file whose BLAKE3 hash and length are known, unless it is there. What an
    /// earlier attempt has left in `<destination>.incomplete` is resumed. The server never
    /// receives the token, and offline mode does not concern it.
    ///
    /// # Errors
    /// If the server or the file system refuses, or the file does not match its hash. What has
    /// arrived stays for the next attempt.
    pub fn fetch_url(
        &self,
        url: &str,
        destination: &Path,
        hash: [u8; 32],
        length: u64,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), HubError> {
        let hash = FileHash::Blake3(hash);
        let transfer = Transfer {
            url: url.to_owned(),
            with_token: false,
            subject: Subject::Plain(url),
            file: url,
            length,
            hash: &hash,
            partial: &beside(destination, ".incomplete"),
        };
        self.fetch_to(destination, &transfer, progress)
    }

    /// Downloads a file of a repository at a commit whose SHA-256 and length are known, unless it is there: without a
    /// list of the repository's files, and beside the cache. What an earlier attempt has left in
    /// `<destination>.incomplete` is resumed.
    ///
    /// # Errors
    /// As [`Hub::fetch_url`], and in offline mode if the file is not there.
    pub fn fetch_file(
        &self,
        (repository, commit): (&Repository, &str),
        path: &str,
        destination: &Path,
        (sha256, length): ([u8; 32], u64),
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), HubError> {
        let hash = FileHash::Sha256(sha256);
        if !CachedRepository::has(destination, length) {
            self.online("a download")?;
        }
        let transfer = Transfer {
            url: self.file_url(repository, commit, path),
            with_token: true,
            subject: Subject::File(repository, path),
            file: path,
            length,
            hash: &hash,
            partial: &beside(destination, ".incomplete"),
        };
        self.fetch_to(destination, &transfer, progress)
    }

    /// Makes a transfer to a place beside the cache, unless its file is there.
    fn fetch_to(
        &self,
        destination: &Path,
        transfer: &Transfer<'_>,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), HubError> {
        if let Some(folder) = destination.parent() {
            fs::create_dir_all(folder).map_err(HubError::io(folder))?;
        }
        let lock = beside(destination, ".lock");
        let _held = Lock::take(&lock, self.config().timeouts.lock)?;
        let Transfer { file, length, hash, .. } = *transfer;
        if CachedRepository::has(destination, length) && hash.of_file(destination)? == *hash {
            progress(Progress { file, bytes: length, total: length });
            let _ = fs::remove_file(&lock);
            return Ok(());
        }
        transfer.run(&self.http, destination, progress)?;
        // A process that waits for the lock finds the file, so the lock has no further use.
        let _ = fs::remove_file(&lock);
        Ok(())
    }
}

/// The path with this at the end of its name.
fn beside(path: &Path, end: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(end);
    PathBuf::from(name)
}
