//! The rules for names and links that must not lead out of a folder.
//!
//! Names come from peers and from files that strangers wrote; links come with folders that were
//! downloaded or unpacked. Everything that joins such a name to a folder uses [`is_plain_name`].

use std::path::Path;

/// The end of the names of files that are not complete yet.
pub const PARTIAL_SUFFIX: &str = ".part";

/// Whether a name is that of a file directly in a folder: one component of letters, digits, `-`,
/// `_` and `.`, not hidden, and not that of an unfinished file.
#[must_use]
pub fn is_plain_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with('.')
        && !name.ends_with(PARTIAL_SUFFIX)
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// Whether a file belongs to a folder. Both paths are canonical. The cache of the Hugging Face Hub
/// has the files of `REPOSITORY/snapshots/COMMIT` in `REPOSITORY/blobs`: these belong to the snapshot.
#[must_use]
pub fn holds(folder: &Path, file: &Path) -> bool {
    let snapshots =
        folder.ancestors().find(|above| above.file_name() == Some("snapshots".as_ref()));
    let blobs = snapshots.and_then(Path::parent).map(|repository| repository.join("blobs"));
    file.starts_with(folder) || blobs.is_some_and(|blobs| file.starts_with(blobs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_the_folder_are_not_plain() {
        for name in ["", ".", "..", "../x", "a/b", "/etc/passwd", ".hidden", "a\0", "a.part", "a\n"]
        {
            assert!(!is_plain_name(name), "{name:?}");
        }
        assert!(is_plain_name("model-00001-of-00002.safetensors"));
    }

    #[test]
    fn a_snapshot_of_the_hub_has_its_blobs() {
        let holds = |folder: &str, file: &str| holds(Path::new(folder), Path::new(file));
        assert!(holds("/a/b", "/a/b/c/d"));
        assert!(!holds("/a/b", "/a/bc") && !holds("/a/b", "/a/c/d"));
        assert!(holds("/hub/one/snapshots/0f/data", "/hub/one/blobs/77"));
        assert!(!holds("/hub/one/snapshots/0f/data", "/hub/two/blobs/77"));
        assert!(!holds("/hub/one/0f", "/hub/one/blobs/77"));
    }
}
