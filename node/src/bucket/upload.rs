//! Uploads a checkpoint: its files first, its index last.
//!
//! Every object has its hash in its metadata, so a repeated upload sends only what is missing. A large object goes
//! in parts; a record in the data directory names those that arrived.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use shoal_engine::checkpoint::INDEX;
use shoal_engine::{Checkpoint, CheckpointFile};

use super::error::BucketError;
use super::large_object;
use super::layout::StoredCheckpoint;
use super::store::Bucket;

type Result<T> = std::result::Result<T, BucketError>;

/// The size of a part, in bytes: the stores ask for 5 MiB at least. Smaller objects go in one request.
pub(super) const PART: u64 = 8 << 20;

/// A whole checkpoint in a folder, to be uploaded.
#[derive(Debug, Clone)]
pub(crate) struct Upload {
    /// The folder.
    pub(crate) folder: PathBuf,
    /// The name of the checkpoint's folder in the bucket.
    pub(crate) name: String,
    /// The folder for records of unfinished uploads.
    pub(crate) records: PathBuf,
}

impl Upload {
    /// Uploads what the bucket lacks. `sent` counts requests that brought something there.
    ///
    /// # Errors
    /// If the folder has no checkpoint, or the store fails. A repetition goes on where this one ended.
    pub(crate) async fn run(&self, bucket: &Bucket, sent: &AtomicU64) -> Result<()> {
        let index = Checkpoint::open(&self.folder)?;
        index.check_list()?;
        let path = self.folder.join(INDEX);
        let text: Bytes = std::fs::read(&path).map_err(BucketError::local(&path))?.into();
        let to = StoredCheckpoint { name: self.name.clone(), index, text };
        let index_object = to.object(INDEX);
        match bucket.checkpoint(&self.name).await {
            Ok(Some(there)) if there.text == to.text => return Ok(()),
            Ok(None) => {}
            // Another checkpoint, or one that lost objects: it must not be taken for this one while its files are
            // replaced.
            Ok(Some(_))
            | Err(
                BucketError::Checkpoint(_)
                | BucketError::Damaged { .. }
                | BucketError::Lacks { .. },
            ) => bucket.remove(&index_object).await?,
            Err(error) => return Err(error),
        }
        std::fs::create_dir_all(&self.records).map_err(BucketError::local(&self.records))?;
        large_object::forget_others(bucket, &self.records, &to).await;
        for file in to.index.files() {
            self.send(bucket, &to, file, sent).await?;
        }
        bucket.write(&index_object, to.text.clone(), None).await?;
        sent.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    async fn send(
        &self,
        bucket: &Bucket,
        to: &StoredCheckpoint,
        file: &CheckpointFile,
        sent: &AtomicU64,
    ) -> Result<()> {
        let (object, path) = (to.object(&file.name), self.folder.join(&file.name));
        let there = bucket.describe(&object).await?;
        if there.is_some_and(|there| there.size == file.bytes && there.hash == Some(file.hash)) {
            return Ok(());
        }
        if file.bytes > PART && bucket.parts().is_some() {
            return large_object::send(bucket, &self.records, (&path, file), &object, sent).await;
        }
        let bytes = read_piece(&path, 0, file.bytes).await?;
        bucket.write(&object, bytes, Some(file.hash)).await?;
        sent.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Reads a piece of a file.
pub(super) async fn read_piece(path: &Path, start: u64, length: u64) -> Result<Bytes> {
    use std::os::unix::fs::FileExt as _;
    let owned = path.to_owned();
    let read = tokio::task::spawn_blocking(move || {
        let mut bytes = vec![0; length as usize];
        std::fs::File::open(owned)?.read_exact_at(&mut bytes, start)?;
        Ok::<_, std::io::Error>(Bytes::from(bytes))
    });
    read.await.map_err(std::io::Error::other).flatten().map_err(BucketError::local(path))
}
