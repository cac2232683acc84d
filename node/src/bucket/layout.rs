//! The layout of an archive, in a folder and in a bucket alike:
//!
//! ```text
//! checkpoints/version-N/   each complete checkpoint before the last one
//! checkpoint/              the last one: the model
//! histories/N              who continued the run from this archive, and when
//! ```
//!
//! A checkpoint's index, `shoal.json`, is written last. A folder without it is no checkpoint.

use std::collections::BTreeSet;
use std::path::Path;

use shoal_engine::Checkpoint;
use shoal_engine::checkpoint::{INDEX, INDEX_CAP};
use shoal_protocol::ids::{RunId, Step};
use shoal_protocol::manifest::Manifest;

use super::error::BucketError;
use super::store::Bucket;
use crate::other_run::OtherRun;

type Result<T> = std::result::Result<T, BucketError>;

/// The folder of the last checkpoint, and of earlier ones.
const LAST: &str = "checkpoint";
const EARLIER: &str = "checkpoints";
const VERSION: &str = "version-";

/// The folder of a version's checkpoint in an archive. `last` is whether the run ends with it.
pub(crate) fn checkpoint_name(version: Step, last: bool) -> String {
    if last { LAST.to_owned() } else { format!("{EARLIER}/{VERSION}{version}") }
}

/// A checkpoint in a bucket whose index lists only objects that are there, in their sizes.
#[derive(Debug, Clone)]
pub(crate) struct StoredCheckpoint {
    /// Its folder's name in the bucket.
    pub(crate) name: String,
    /// Its index.
    pub(crate) index: Checkpoint,
    /// The bytes of the index.
    pub(crate) text: bytes::Bytes,
}

impl StoredCheckpoint {
    /// The name of one of its objects.
    pub(super) fn object(&self, file: &str) -> String {
        within(&self.name, file)
    }
}

/// The name of an object in a folder, where the bucket's own has no name.
fn within(folder: &str, file: &str) -> String {
    if folder.is_empty() { file.to_owned() } else { format!("{folder}/{file}") }
}

impl Bucket {
    /// The checkpoint in a folder; `None` without an index.
    ///
    /// # Errors
    /// If the index is damaged, an object that it lists is missing or has another size, or the store fails.
    pub(crate) async fn checkpoint(&self, name: &str) -> Result<Option<StoredCheckpoint>> {
        let index = within(name, INDEX);
        let Some(text) = self.read(&index, INDEX_CAP).await? else { return Ok(None) };
        let place = if name.is_empty() { self.place().to_owned() } else { self.address(name) };
        let found = Checkpoint::from_index(Path::new(&place), &text)?;
        found.check_list()?;
        let objects = if name.is_empty() { None } else { Some(self.list(name).await?) };
        let stored = StoredCheckpoint { name: name.to_owned(), index: found, text };
        for file in stored.index.files() {
            let object = stored.object(&file.name);
            let size = match &objects {
                Some(objects) => objects.get(&file.name).copied(),
                None => self.describe(&object).await?.map(|found| found.size),
            };
            let address = self.address(&object);
            let size = size.ok_or(BucketError::Lacks { object: address.clone() })?;
            if size != file.bytes {
                let reason = format!("it has {size} bytes instead of {}", file.bytes);
                return Err(BucketError::Damaged { object: address, reason });
            }
        }
        Ok(Some(stored))
    }

    /// The names of the folders that may be checkpoints, the newest first.
    async fn names(&self) -> Result<impl Iterator<Item = String> + use<>> {
        let version = |name: &String| name.strip_prefix(VERSION)?.parse::<u64>().ok();
        let mut versions: Vec<u64> =
            self.folders(EARLIER).await?.iter().filter_map(version).collect();
        versions.sort_unstable();
        let earlier =
            versions.into_iter().rev().map(|version| checkpoint_name(Step(version), false));
        Ok(std::iter::once(LAST.to_owned()).chain(earlier))
    }

    /// The newest whole checkpoint of an archive, of this run if one is given, other than the `damaged` ones. Unusable
    /// ones are passed over with a warning.
    ///
    /// # Errors
    /// If the store fails.
    pub(crate) async fn newest(
        &self,
        run: Option<RunId>,
        damaged: &BTreeSet<String>,
    ) -> Result<Option<StoredCheckpoint>> {
        for name in self.names().await?.filter(|name| !damaged.contains(&self.address(name))) {
            let found = match self.checkpoint(&name).await {
                Ok(found) => found,
                Err(
                    error @ (BucketError::Checkpoint(_)
                    | BucketError::Damaged { .. }
                    | BucketError::Lacks { .. }),
                ) => {
                    tracing::warn!(%error, "a checkpoint of an archive is of no use");
                    continue;
                }
                Err(error) => return Err(error),
            };
            let Some(found) = found else { continue };
            if run.is_none_or(|run| found.index.run() == run) {
                return Ok(Some(found));
            }
            let (place, other) = (self.address(&name), found.index.run());
            tracing::warn!(place, %other, "a checkpoint of another run is passed over");
        }
        Ok(None)
    }

    /// The checkpoint that an address means: the one in the folder itself, or the newest of an archive.
    ///
    /// # Errors
    /// If there is none, or it is not whole, or the store fails.
    pub(crate) async fn meant(&self) -> Result<StoredCheckpoint> {
        if let Some(found) = self.checkpoint("").await? {
            return Ok(found);
        }
        let none = || BucketError::NoCheckpoint { place: self.place().to_owned() };
        self.newest(None, &BTreeSet::new()).await?.ok_or_else(none)
    }

    /// Refuses an archive with checkpoints of another run, which those of this run would replace.
    ///
    /// # Errors
    /// If the archive has one, or the store fails.
    pub(crate) async fn refuse_another_run(&self, manifest: &Manifest) -> Result<()> {
        for name in self.names().await? {
            let index = within(&name, INDEX);
            let Some(text) = self.read(&index, INDEX_CAP).await? else { continue };
            let place = self.address(&name);
            if let Ok(found) = Checkpoint::from_index(Path::new(&place), &text) {
                OtherRun::refuse(&place, found.manifest(), manifest)?;
            }
        }
        Ok(())
    }
}
