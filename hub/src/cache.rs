//! The Hub's cache on disk, in the layout of Python's `huggingface_hub`.
//!
//! `blobs/` has files by their hash, `snapshots/<commit>/` has links to them by their paths,
//! `refs/` has the commit of each branch and tag, and `trees/` has the list of files of a commit.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use crate::client::{MOST_FILES, RemoteFile, is_commit};
use crate::digest::FileHash;
use crate::error::HubError;
use crate::reference::{Repository, is_inside};

/// The format of a list of files.
const TREE_FORMAT: u32 = 1;

/// The longest list of files, in bytes.
const LONGEST_TREE: u64 = 64 << 20;

/// A repository in the cache.
#[derive(Debug)]
pub(crate) struct CachedRepository {
    folder: PathBuf,
    locks: PathBuf,
}

/// A list of files as `huggingface_hub` writes it.
#[derive(Serialize, Deserialize)]
struct Tree {
    format_version: u32,
    files: BTreeMap<String, TreeFile>,
}

#[derive(Serialize, Deserialize)]
struct TreeFile {
    size: u64,
    blob_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lfs_sha256: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lfs_size: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    xet_hash: Option<String>,
}

impl CachedRepository {
    /// The folder of this repository in a cache.
    pub(crate) fn new(cache: &Path, repository: &Repository) -> Self {
        let name = repository.cache_folder();
        Self { folder: cache.join(&name), locks: cache.join(".locks").join(name) }
    }

    /// The file of the lock of the whole repository.
    pub(crate) fn lock(&self) -> PathBuf {
        self.locks.join("shoal.lock")
    }

    /// The file of the lock of one blob, which `huggingface_hub` takes too.
    pub(crate) fn blob_lock(&self, hash: &FileHash) -> PathBuf {
        self.locks.join(format!("{hash}.lock"))
    }

    /// The file of a blob.
    pub(crate) fn blob(&self, hash: &FileHash) -> PathBuf {
        self.folder.join("blobs").join(hash.to_string())
    }

    /// The file that holds the part of a blob that has arrived.
    pub(crate) fn partial(&self, hash: &FileHash) -> PathBuf {
        self.folder.join("blobs").join(format!("{hash}.incomplete"))
    }

    /// The folder of a snapshot.
    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Makes the folder of the blobs.
    pub(crate) fn create(&self) -> Result<(), HubError> {
        let blobs = self.folder.join("blobs");
        fs::create_dir_all(&blobs).map_err(HubError::io(&blobs))
    }

    /// Whether the file exists with this length.
    pub(crate) fn has(path: &Path, length: u64) -> bool {
        fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.len() == length)
    }

    /// Links a file of a snapshot to its blob.
    pub(crate) fn link(&self, commit: &str, file: &RemoteFile) -> Result<PathBuf, HubError> {
        let link = self.snapshot(commit).join(&file.path);
        if let Some(folder) = link.parent() {
            fs::create_dir_all(folder).map_err(HubError::io(folder))?;
        }
        let up = "../".repeat(2 + file.path.matches('/').count());
        let target = format!("{up}blobs/{}", file.hash);
        match fs::remove_file(&link) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(HubError::io(&link)(error));
            }
            _ => {}
        }
        symlink(target, &link).map_err(HubError::io(&link))?;
        Ok(link)
    }

    /// The commit that a branch or tag had when it was last downloaded.
    pub(crate) fn read_ref(&self, revision: &str) -> Option<String> {
        let mut text = String::new();
        let file = File::open(self.folder.join("refs").join(revision)).ok()?;
        file.take(1024).read_to_string(&mut text).ok()?;
        let commit = text.trim();
        is_commit(commit).then(|| commit.to_owned())
    }

    /// Records the commit of a branch or tag.
    pub(crate) fn write_ref(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if revision == commit || self.read_ref(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        write(&self.folder.join("refs").join(revision), commit.as_bytes())
    }

    /// The files of a commit, if their list is in the cache and is readable.
    pub(crate) fn read_tree(&self, commit: &str) -> Option<Vec<RemoteFile>> {
        let mut bytes = Vec::new();
        File::open(self.tree(commit)).ok()?.take(LONGEST_TREE).read_to_end(&mut bytes).ok()?;
        let tree: Tree = serde_json::from_slice(&bytes).ok()?;
        if tree.format_version != TREE_FORMAT || tree.files.len() > MOST_FILES {
            return None;
        }
        tree.files.into_iter().map(|(path, file)| file.into_remote(path)).collect()
    }

    /// Records the files of a commit.
    pub(crate) fn write_tree(&self, commit: &str, files: &[RemoteFile]) -> Result<(), HubError> {
        let files = files.iter().map(|file| (file.path.clone(), TreeFile::of(file))).collect();
        let tree = Tree { format_version: TREE_FORMAT, files };
        let path = self.tree(commit);
        let bytes =
            serde_json::to_vec_pretty(&tree).map_err(|error| HubError::io(&path)(error.into()))?;
        write(&path, &bytes)
    }

    /// The paths of the files that are in a snapshot, for a cache without a list of files.
    pub(crate) fn snapshot_files(&self, commit: &str) -> Option<Vec<(String, Option<u64>)>> {
        let root = self.snapshot(commit);
        let mut folders = vec![root.clone()];
        let mut files = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).ok()? {
                let entry = entry.ok()?;
                let path = entry.path();
                if entry.file_type().ok()?.is_dir() {
                    folders.push(path);
                } else {
                    files.push((path.strip_prefix(&root).ok()?.to_str()?.to_owned(), None));
                }
            }
        }
        files.sort();
        Some(files)
    }

    fn tree(&self, commit: &str) -> PathBuf {
        self.folder.join("trees").join(format!("{commit}.json"))
    }
}

impl TreeFile {
    fn of(file: &RemoteFile) -> Self {
        let lfs = matches!(file.hash, FileHash::Sha256(_));
        Self {
            size: file.size,
            blob_id: file.blob_id.clone(),
            lfs_sha256: lfs.then(|| file.hash.to_string()),
            lfs_size: lfs.then_some(file.size),
            xet_hash: file.xet_hash.clone(),
        }
    }

    fn into_remote(self, path: String) -> Option<RemoteFile> {
        let hash = match &self.lfs_sha256 {
            Some(text) => FileHash::sha256(text)?,
            None => FileHash::git_blob(&self.blob_id)?,
        };
        let size = self.lfs_size.unwrap_or(self.size);
        is_inside(&path).then_some(RemoteFile {
            path,
            size,
            hash,
            blob_id: self.blob_id,
            xet_hash: self.xet_hash,
        })
    }
}

/// Writes a file at once: readers see the old or the new one.
fn write(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(HubError::io(folder))?;
    let mut file = NamedTempFile::new_in(folder).map_err(HubError::io(path))?;
    file.write_all(bytes).map_err(HubError::io(path))?;
    file.persist(path).map_err(|error| HubError::io(path)(error.error))?;
    Ok(())
}
