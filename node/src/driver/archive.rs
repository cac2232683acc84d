//! The place of whole checkpoints.

use std::path::{Path, PathBuf};

use crate::bucket::Bucket;

/// The place where a peer archives whole checkpoints.
#[derive(Debug, Clone)]
pub struct Archive {
    folder: PathBuf,
    /// Whether checkpoints stay in the folder. If not, they stay until the bucket has them, or they are scored.
    keeps: bool,
    bucket: Option<Bucket>,
}

impl Archive {
    /// An archive in a folder: `checkpoint/` and the earlier `checkpoints/`.
    #[must_use]
    pub fn in_folder(folder: PathBuf) -> Self {
        Self { folder, keeps: true, bucket: None }
    }

    /// A folder that has checkpoints for a while.
    pub(crate) fn in_passing(folder: PathBuf) -> Self {
        Self { folder, keeps: false, bucket: None }
    }

    /// An archive in a bucket. Checkpoints are assembled in a folder on the way there.
    pub(crate) fn in_bucket(folder: PathBuf, bucket: Bucket) -> Self {
        Self { folder, keeps: false, bucket: Some(bucket) }
    }

    /// The same archive with a copy in a bucket.
    pub(crate) fn and_bucket(self, bucket: Option<Bucket>) -> Self {
        Self { bucket, ..self }
    }

    /// The folder in which checkpoints are assembled.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn keeps(&self) -> bool {
        self.keeps
    }

    pub(crate) fn bucket(&self) -> Option<&Bucket> {
        self.bucket.as_ref()
    }
}
