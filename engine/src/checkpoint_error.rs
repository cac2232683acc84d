//! Errors of checkpoints.

use std::path::{Path, PathBuf};

/// The file that describes the folder of a checkpoint.
pub(crate) const DESCRIPTION: &str = "shoal.json";

/// Why a checkpoint cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file system refused.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the file system said.
        source: std::io::Error,
    },
    /// The folder is no checkpoint.
    #[error("{path} is no checkpoint: it has no {DESCRIPTION}", path = path.display())]
    NotACheckpoint {
        /// The folder.
        path: PathBuf,
    },
    /// A file that is not what was written.
    #[error("{path} is damaged: {reason}; take another checkpoint", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What shows it.
        reason: String,
    },
    /// A file that the description names is not here.
    #[error("{name} of the checkpoint to go on from is not here")]
    Absent {
        /// Its name.
        name: String,
    },
    /// Weights that do not fit the manifest.
    #[error("{path} does not fit its manifest: {reason}", path = path.display())]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
}

impl CheckpointError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn damaged(path: &Path, reason: impl ToString) -> Self {
        Self::Damaged { path: path.to_owned(), reason: reason.to_string() }
    }
}
