//! Whether a folder takes the checkpoints of a run, before the run begins.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use nix::sys::statvfs::statvfs;
use shoal_engine::{optimizer_elements, parameter_count};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::units::Bytes;

/// Bytes of the file that is written to see whether files can be.
const PROBE: usize = 4096;

/// A folder that does not take the checkpoints of a run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotWritable {
    /// It cannot be made or written.
    #[error(
        "checkpoints cannot be written to {folder}: {source}; make it writable, or give another folder (--out, \
         --archive)", folder = folder.display()
    )]
    Refused {
        /// The folder.
        folder: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// It has too little room.
    #[error(
        "a checkpoint takes {needs} and {folder} has {has}: make room, or give another folder (--out, --archive)",
        folder = folder.display()
    )]
    Full {
        /// The folder.
        folder: PathBuf,
        /// The size of one checkpoint.
        needs: Bytes,
        /// The free room.
        has: Bytes,
    },
}

/// Checks that a folder can be written and has room for a checkpoint of the run. Makes a missing folder.
///
/// # Errors
/// If it does not take one; the error names the folder and what to do.
pub(crate) fn check(folder: &Path, manifest: &Manifest) -> Result<(), NotWritable> {
    let refused = |source| NotWritable::Refused { folder: folder.to_owned(), source };
    std::fs::create_dir_all(folder).map_err(refused)?;
    let room = statvfs(folder).map_err(|error| refused(error.into()))?;
    let has = Bytes(room.blocks_available() * room.fragment_size());
    let needs = size_of(manifest);
    // A peer that starts again has its newest checkpoints here, and removes the oldest as it goes on.
    if has < needs && std::fs::read_dir(folder).map_err(refused)?.next().is_none() {
        return Err(NotWritable::Full { folder: folder.to_owned(), needs, has });
    }
    let probe = || {
        let mut file = tempfile::Builder::new().prefix(".probe-").tempfile_in(folder)?;
        file.write_all(&[0; PROBE])?;
        file.as_file().sync_all()
    };
    probe().map_err(refused)
}

/// The size of a checkpoint, without its small files.
fn size_of(manifest: &Manifest) -> Bytes {
    let numbers = |stage| parameter_count(manifest, stage) + optimizer_elements(manifest, stage);
    Bytes(4 * manifest.stages().map(|stage| numbers(stage) as u64).sum::<u64>())
}

#[cfg(test)]
mod tests {
    use shoal_protocol::manifest::example;

    use super::*;

    #[test]
    fn a_folder_that_takes_no_files_is_refused_before_the_run() {
        let folder = tempfile::tempdir().expect("a folder");
        let manifest = example::small();
        let new = folder.path().join("above/new");
        check(&new, &manifest).expect("made");
        assert_eq!(std::fs::read_dir(&new).expect("a folder").count(), 0, "the probe is removed");
        let file = folder.path().join("file");
        std::fs::write(&file, "").expect("written");
        let error = check(&file.join("out"), &manifest).expect_err("no folder");
        assert!(matches!(error, NotWritable::Refused { .. }), "{error}");
        // No file can be made here, by root either.
        let error = check(Path::new("/proc/self"), &manifest).expect_err("not a place for files");
        assert!(error.to_string().contains("--out"), "{error}");
    }

    #[test]
    fn a_checkpoint_is_at_least_its_weights() {
        let manifest = example::small();
        let weights: usize = manifest.stages().map(|stage| parameter_count(&manifest, stage)).sum();
        assert!(size_of(&manifest) >= Bytes(4 * weights as u64));
    }
}
