//! Objects that go to a store in parts. A part that arrived is not sent again, by no later process either.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use futures::{StreamExt as _, TryStreamExt as _};
use object_store::multipart::{MultipartStore, PartId};
use object_store::{PutMultipartOptions, PutPayload};
use serde::{Deserialize, Serialize};
use shoal_engine::CheckpointFile;
use shoal_protocol::ids::ContentHash;

use super::error::BucketError;
use super::layout::StoredCheckpoint;
use super::store::{Bucket, attributes};
use super::upload::{PART, read_piece};
use crate::whole_file;

type Result<T> = std::result::Result<T, BucketError>;

/// The most parts of an object, for S3.
const MOST_PARTS: u64 = 10_000;

/// Parts on their way at a time; as many are in memory.
const CONCURRENT: usize = 4;

/// The longest record that is read.
const RECORD_CAP: u64 = 8 << 20;

/// An upload that has begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    /// The address of the archive, and the object's name in it.
    place: String,
    object: String,
    /// The content.
    hash: ContentHash,
    bytes: u64,
    /// The size of every part but the last, in bytes.
    part: u64,
    /// The store's name of the upload.
    upload: String,
    /// The store's names of the parts that arrived.
    parts: BTreeMap<u64, String>,
}

/// The size of the parts of an object of this size.
fn part_size(bytes: u64) -> u64 {
    PART.max(bytes.div_ceil(MOST_PARTS))
}

impl Record {
    fn read(path: &Path) -> Option<Self> {
        let length = fs::metadata(path).ok()?.len();
        let text = (length <= RECORD_CAP).then(|| fs::read(path).ok()).flatten()?;
        serde_json::from_slice(&text).ok()
    }

    fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_vec(self).expect("it has only string keys");
        whole_file::write(path, &text).map_err(BucketError::local(path))
    }

    /// Whether it is about this content at this place.
    fn is_about(&self, bucket: &Bucket, object: &str, file: &CheckpointFile) -> bool {
        self.place == bucket.place()
            && self.object == object
            && (self.hash, self.bytes, self.part) == (file.hash, file.bytes, part_size(file.bytes))
    }
}

/// The record of an object's upload.
fn record_path(records: &Path, bucket: &Bucket, object: &str) -> PathBuf {
    records.join(format!("{}.json", ContentHash::of(bucket.address(object).as_bytes())))
}

fn forget(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "not removed");
    }
}

/// Sends a file's missing parts, and makes an object of them.
pub(super) async fn send(
    bucket: &Bucket,
    records: &Path,
    (path, file): (&Path, &CheckpointFile),
    object: &str,
    sent: &AtomicU64,
) -> Result<()> {
    let store = bucket.parts().expect("the caller has looked");
    let record_path = record_path(records, bucket, object);
    let known = Record::read(&record_path).filter(|record| record.is_about(bucket, object, file));
    let record = match known {
        Some(record) => record,
        None => begin(bucket, store, object, file).await?,
    };
    record.write(&record_path)?;
    let done = send_parts(bucket, store, record, (path, &record_path), sent).await;
    if matches!(done, Err(BucketError::Lacks { .. })) {
        // The store has dropped the parts: the next attempt begins anew.
        forget(&record_path);
    }
    done?;
    forget(&record_path);
    Ok(())
}

async fn begin(
    bucket: &Bucket,
    store: &dyn MultipartStore,
    object: &str,
    file: &CheckpointFile,
) -> Result<Record> {
    let options =
        PutMultipartOptions { attributes: attributes(Some(file.hash)), ..Default::default() };
    let begun = store.create_multipart_opts(&bucket.path(object)?, options).await;
    Ok(Record {
        place: bucket.place().to_owned(),
        object: object.to_owned(),
        hash: file.hash,
        bytes: file.bytes,
        part: part_size(file.bytes),
        upload: begun.map_err(bucket.failed(object))?,
        parts: BTreeMap::new(),
    })
}

async fn send_parts(
    bucket: &Bucket,
    store: &dyn MultipartStore,
    mut record: Record,
    (path, record_path): (&Path, &Path),
    sent: &AtomicU64,
) -> Result<()> {
    let (object, upload) = (record.object.clone(), record.upload.clone());
    let (to, bytes, part) = (bucket.path(&object)?, record.bytes, record.part);
    let count = bytes.div_ceil(part);
    let missing: Vec<u64> = (0..count).filter(|one| !record.parts.contains_key(one)).collect();
    let one = |index: u64| {
        let (to, object, upload) = (&to, &object, &upload);
        async move {
            let start = index * part;
            let piece = read_piece(path, start, part.min(bytes - start)).await?;
            let put = store.put_part(to, upload, index as usize, PutPayload::from(piece)).await;
            Ok::<_, BucketError>((index, put.map_err(bucket.failed(object))?.content_id))
        }
    };
    let mut arriving = futures::stream::iter(missing).map(one).buffer_unordered(CONCURRENT);
    while let Some((index, id)) = arriving.try_next().await? {
        record.parts.insert(index, id);
        record.write(record_path)?;
        sent.fetch_add(1, Ordering::Relaxed);
    }
    drop(arriving);
    let parts = record.parts.values().map(|id| PartId { content_id: id.clone() }).collect();
    store.complete_multipart(&to, &upload, parts).await.map_err(bucket.failed(&object))?;
    sent.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// Gives up begun uploads of objects of other checkpoints.
pub(super) async fn forget_others(bucket: &Bucket, records: &Path, mine: &StoredCheckpoint) {
    let Ok(entries) = fs::read_dir(records) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let Some(record) = Record::read(&path) else { continue };
        let listed =
            |file: &CheckpointFile| record.is_about(bucket, &mine.object(&file.name), file);
        if record.place != bucket.place() || mine.index.files().iter().any(listed) {
            continue;
        }
        if let (Some(store), Ok(to)) = (bucket.parts(), bucket.path(&record.object))
            && let Err(error) = store.abort_multipart(&to, &record.upload).await
        {
            // The store drops the parts of unfinished uploads by its own rules.
            tracing::debug!(object = record.object, %error, "an unfinished upload is not removed");
        }
        forget(&path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_object_has_too_many_parts() {
        for bytes in [PART + 1, 1 << 30, 1 << 40, 5 << 40] {
            let part = part_size(bytes);
            assert!(part >= PART && bytes.div_ceil(part) <= MOST_PARTS, "{bytes}");
        }
    }

    #[test]
    fn a_record_is_of_one_content_at_one_place() {
        let folder = tempfile::tempdir().expect("a folder");
        let bucket = Bucket::in_folder(folder.path()).expect("a folder");
        let file =
            CheckpointFile { name: "a".into(), bytes: PART + 1, hash: ContentHash::of(b"a") };
        let record = Record {
            place: bucket.place().to_owned(),
            object: "checkpoint/a".to_owned(),
            hash: file.hash,
            bytes: file.bytes,
            part: PART,
            upload: "id".to_owned(),
            parts: BTreeMap::from([(1, "part".to_owned())]),
        };
        let path = record_path(folder.path(), &bucket, &record.object);
        record.write(&path).expect("written");
        assert_eq!(Record::read(&path), Some(record.clone()));
        assert!(record.is_about(&bucket, "checkpoint/a", &file));
        assert!(!record.is_about(&bucket, "checkpoint/b", &file));
        let other = CheckpointFile { hash: ContentHash::of(b"b"), ..file };
        assert!(!record.is_about(&bucket, "checkpoint/a", &other));
        fs::write(&path, "{").expect("written");
        assert_eq!(Record::read(&path), None);
    }
}
