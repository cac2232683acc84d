//! Downloads of snapshots into the cache.

use std::path::PathBuf;

use crate::cache::CachedRepository;
use crate::client::{Hub, RemoteFile, is_commit};
use crate::error::HubError;
use crate::lock::Lock;
use crate::progress::Progress;
use crate::reference::{Reference, Repository};
use crate::refusal::Subject;
use crate::transfer::Transfer;

/// Files of a repository at one commit, in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The commit.
    pub commit: String,
    /// The folder, which has the files at their paths.
    pub folder: PathBuf,
    /// The files that the reference selects, in the order of their paths.
    pub files: Vec<SnapshotFile>,
}

/// A file of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotFile {
    /// The path in the repository.
    pub path: String,
    /// The path on disk.
    pub local: PathBuf,
    /// Length in bytes.
    pub size: u64,
}

impl Hub {
    /// Downloads the files that a reference selects, unless the cache has them. What an earlier
    /// attempt has left is resumed, and every file is checked against its hash.
    ///
    /// In offline mode, the snapshot of the last download is returned.
    ///
    /// # Errors
    /// If the Hub or the file system refuses, a file does not match its hash, or, in offline mode,
    /// the cache lacks a file. What has arrived stays in the cache.
    pub fn download(
        &self,
        reference: &Reference,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Snapshot, HubError> {
        self.download_where(reference, &|_| true, progress)
    }

    /// Like [`Hub::download`], of those files whose path `wants` selects too.
    ///
    /// # Errors
    /// Like [`Hub::download`].
    pub fn download_where(
        &self,
        reference: &Reference,
        wants: &dyn Fn(&str) -> bool,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Snapshot, HubError> {
        let repository = reference.repository();
        let cache = CachedRepository::new(&self.config().cache, repository);
        let of_reference = reference.selects();
        let selects = |path: &str| wants(path) && of_reference(path);
        if self.config().offline {
            return self.cached(&cache, reference, &selects);
        }
        let known = is_commit(reference.revision()).then(|| reference.revision().to_owned());
        let listed = known.and_then(|commit| Some((cache.read_tree(&commit)?, commit)));
        let (files, commit) = match listed {
            Some(found) => found,
            None => {
                let commit = self.resolve(repository, reference.revision())?;
                let listed = cache.read_tree(&commit).map_or_else(
                    || {
                        let files = self.list(repository, &commit)?;
                        cache.write_tree(&commit, &files)?;
                        Ok(files)
                    },
                    Ok,
                )?;
                (listed, commit)
            }
        };
        let wanted: Vec<RemoteFile> =
            files.into_iter().filter(|file| selects(&file.path)).collect();
        if wanted.is_empty() {
            return Err(self.nothing_selected(reference));
        }
        cache.create()?;
        let _lock = Lock::take(&cache.lock(), self.config().timeouts.lock)?;
        let mut done = Vec::with_capacity(wanted.len());
        for file in wanted {
            let local = self.obtain(&cache, repository, &commit, &file, progress)?;
            done.push(SnapshotFile { path: file.path, local, size: file.size });
        }
        cache.write_ref(reference.revision(), &commit)?;
        Ok(Snapshot { folder: cache.snapshot(&commit), commit, files: done })
    }

    /// The snapshot of the last download, without any request.
    fn cached(
        &self,
        cache: &CachedRepository,
        reference: &Reference,
        selects: &dyn Fn(&str) -> bool,
    ) -> Result<Snapshot, HubError> {
        let revision = reference.revision();
        let repository = reference.repository();
        let missing = || HubError::NotCached {
            repository: repository.to_string(),
            revision: revision.to_owned(),
            cache: self.config().cache.clone(),
        };
        let known = is_commit(revision).then(|| revision.to_owned());
        let commit = known.or_else(|| cache.read_ref(revision)).ok_or_else(missing)?;
        let files = match cache.read_tree(&commit) {
            Some(files) => files.into_iter().map(|file| (file.path, Some(file.size))).collect(),
            None => cache.snapshot_files(&commit).ok_or_else(missing)?,
        };
        let folder = cache.snapshot(&commit);
        let mut done = Vec::new();
        for (path, size) in files {
            if !selects(&path) {
                continue;
            }
            let local = folder.join(&path);
            let found = local.metadata().ok().filter(std::fs::Metadata::is_file);
            let found = found.map(|metadata| metadata.len());
            match found.filter(|length| size.is_none_or(|size| size == *length)) {
                Some(size) => done.push(SnapshotFile { path, local, size }),
                None => {
                    let repository = repository.to_string();
                    return Err(HubError::FileNotCached { file: path, repository });
                }
            }
        }
        if done.is_empty() {
            return Err(self.nothing_selected(reference));
        }
        Ok(Snapshot { commit, folder, files: done })
    }

    fn nothing_selected(&self, reference: &Reference) -> HubError {
        HubError::NothingSelected {
            pattern: reference.pattern().map_or_else(|| "*".to_owned(), ToString::to_string),
            repository: reference.repository().to_string(),
            url: format!("{}/tree/{}", self.page(reference.repository()), reference.revision()),
        }
    }

    /// Gets one file from the cache or the Hub, and returns its path in the snapshot.
    fn obtain(
        &self,
        cache: &CachedRepository,
        repository: &Repository,
        commit: &str,
        file: &RemoteFile,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<PathBuf, HubError> {
        let link = cache.snapshot(commit).join(&file.path);
        let done = Progress { file: &file.path, bytes: file.size, total: file.size };
        if CachedRepository::has(&link, file.size) {
            progress(done);
            return Ok(link);
        }
        let blob = cache.blob(&file.hash);
        if CachedRepository::has(&blob, file.size) {
            progress(done);
            return cache.link(commit, file);
        }
        let _lock = Lock::take(&cache.blob_lock(&file.hash), self.config().timeouts.lock)?;
        let transfer = Transfer {
            url: self.file_url(repository, commit, &file.path),
            with_token: true,
            subject: Subject::File(repository, &file.path),
            file: &file.path,
            length: file.size,
            hash: &file.hash,
            partial: &cache.partial(&file.hash),
        };
        transfer.run(&self.http, &blob, progress)?;
        cache.link(commit, file)
    }
}
