//! Files of a folder that is pushed.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::digest::sha256_of;
use crate::error::HubError;
use crate::reference::is_inside;

/// The most files of one push.
const MOST_FILES: usize = 25_000;

/// Folders that belong to tools and are not pushed.
const LEFT_OUT: [&str; 2] = [".git", ".cache"];

/// Bytes at the start of a file from which the Hub decides how it is stored.
const SAMPLE: u64 = 512;

/// A file that is pushed.
#[derive(Debug)]
pub(crate) struct LocalFile {
    /// The path in the repository.
    pub(crate) path: String,
    /// The path on disk.
    pub(crate) local: PathBuf,
    /// Length in bytes.
    pub(crate) size: u64,
}

impl LocalFile {
    /// The start of the file.
    pub(crate) fn sample(&self) -> Result<Vec<u8>, HubError> {
        let mut bytes = Vec::new();
        self.open()?.take(SAMPLE).read_to_end(&mut bytes).map_err(HubError::io(&self.local))?;
        Ok(bytes)
    }

    /// The whole file, whose length is bounded by the caller.
    pub(crate) fn read(&self) -> Result<Vec<u8>, HubError> {
        let mut bytes = Vec::new();
        self.open()?.take(self.size).read_to_end(&mut bytes).map_err(HubError::io(&self.local))?;
        Ok(bytes)
    }

    /// The SHA-256 of the file.
    ///
    /// # Errors
    /// If the file cannot be read or its length has changed.
    pub(crate) fn sha256(&self) -> Result<[u8; 32], HubError> {
        let hash = sha256_of(self.open()?, &self.local)?;
        let length = fs::metadata(&self.local).map_err(HubError::io(&self.local))?.len();
        if length != self.size {
            return Err(refused(&self.local, "it changes during the push; push a copy"));
        }
        Ok(hash)
    }

    fn open(&self) -> Result<File, HubError> {
        File::open(&self.local).map_err(HubError::io(&self.local))
    }
}

/// The files of a folder, in the order of their paths. Links to files are followed, as the
/// snapshots of the cache need it; links to folders are not.
///
/// # Errors
/// If the folder cannot be read, has no or too many files, or a name that the Hub cannot have.
pub(crate) fn files_of(folder: &Path) -> Result<Vec<LocalFile>, HubError> {
    let mut folders = vec![(folder.to_owned(), String::new())];
    let mut files = Vec::new();
    while let Some((folder, prefix)) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(HubError::io(&folder))? {
            let entry = entry.map_err(HubError::io(&folder))?;
            let local = entry.path();
            let name = entry.file_name();
            let Some(name) = name.to_str() else {
                return Err(refused(&local, "its name is no UTF-8; rename it"));
            };
            let path = format!("{prefix}{name}");
            if !is_inside(&path) {
                return Err(refused(&local, "its name has control characters; rename it"));
            }
            let kind = entry.file_type().map_err(HubError::io(&local))?;
            if kind.is_dir() {
                if !LEFT_OUT.contains(&name) {
                    folders.push((local, format!("{path}/")));
                }
                continue;
            }
            let metadata = fs::metadata(&local).map_err(HubError::io(&local))?;
            if !metadata.is_file() {
                return Err(refused(&local, "it is neither a file nor a folder; remove it"));
            }
            files.push(LocalFile { path, local, size: metadata.len() });
            if files.len() > MOST_FILES {
                let place = folder.display().to_string();
                return Err(HubError::TooManyFiles { place, cap: MOST_FILES });
            }
        }
    }
    if files.is_empty() {
        return Err(refused(folder, "it has no files; name a folder with files"));
    }
    files.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(files)
}

fn refused(path: &Path, reason: &'static str) -> HubError {
    HubError::BadFolder { path: path.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn files_are_listed_with_links_and_without_those_of_tools() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        assert!(matches!(files_of(root), Err(HubError::BadFolder { .. })));
        fs::create_dir_all(root.join("sub/deep")).expect("a folder");
        fs::create_dir_all(root.join(".git")).expect("a folder");
        fs::write(root.join(".git/config"), "x").expect("written");
        fs::write(root.join("sub/deep/b"), "bb").expect("written");
        symlink("sub/deep/b", root.join("a")).expect("a link");
        let found = files_of(root).expect("listed");
        let found: Vec<_> = found.iter().map(|file| (file.path.as_str(), file.size)).collect();
        assert_eq!(found, [("a", 2), ("sub/deep/b", 2)]);
        symlink("sub", root.join("link")).expect("a link");
        let error = files_of(root).expect_err("a link to a folder").to_string();
        assert!(error.contains("neither a file nor a folder"), "{error}");
    }
}
