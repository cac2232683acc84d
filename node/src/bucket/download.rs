//! Reads checkpoints from a bucket. Every byte is hashed as it comes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use futures::stream::{self, Stream};
use futures::{StreamExt as _, TryStreamExt as _};
use shoal_engine::CheckpointFile;
use shoal_engine::checkpoint::INDEX;
use shoal_protocol::ids::ContentHash;
use shoal_protocol::net::transport::PARTIAL_SUFFIX;

use super::error::BucketError;
use super::layout::StoredCheckpoint;
use super::store::Bucket;

type Result<T> = std::result::Result<T, BucketError>;

/// Bytes of a request.
const PIECE: u64 = 8 << 20;

/// Requests at a time; as many pieces are in memory.
const CONCURRENT: usize = 4;

/// The bytes of an object from `start` on, in order.
fn pieces<'a>(
    bucket: &'a Bucket,
    object: &'a str,
    start: u64,
    size: u64,
) -> impl Stream<Item = Result<Bytes>> + 'a {
    let count = (size - start).div_ceil(PIECE);
    let range = move |index: u64| {
        let from = start + index * PIECE;
        from..(from + PIECE).min(size)
    };
    let one = move |index| bucket.piece(object, range(index));
    stream::iter(0..count).map(one).buffered(CONCURRENT)
}

fn check(bucket: &Bucket, object: &str, file: &CheckpointFile, found: ContentHash) -> Result<()> {
    if found == file.hash {
        return Ok(());
    }
    let reason = "its bytes have another hash".to_owned();
    Err(BucketError::Damaged { object: bucket.address(object), reason })
}

/// Hashes every object of a checkpoint, and stores nothing.
///
/// # Errors
/// If an object is missing or damaged, or the store fails.
pub(crate) async fn verify(bucket: &Bucket, stored: &StoredCheckpoint) -> Result<()> {
    for file in stored.index.files() {
        let object = stored.object(&file.name);
        let mut hasher = blake3::Hasher::new();
        let mut coming = std::pin::pin!(pieces(bucket, &object, 0, file.bytes));
        while let Some(piece) = coming.try_next().await? {
            hasher.update(&piece);
        }
        check(bucket, &object, file, hasher.finalize().into())?;
    }
    Ok(())
}

/// Fetches a file of a checkpoint into an existing folder. What an earlier attempt has fetched is not fetched again.
///
/// # Errors
/// If the object is missing or damaged, the store fails, or the folder cannot be written.
pub(crate) async fn fetch_file(
    bucket: &Bucket,
    stored: &StoredCheckpoint,
    file: &CheckpointFile,
    folder: &Path,
) -> Result<()> {
    let object = stored.object(&file.name);
    let name = &file.name;
    // The index is checked to name files of one folder; hidden files there are not its own.
    if name.starts_with('.') || name == INDEX {
        let reason = "it has the name of another file".to_owned();
        return Err(BucketError::Damaged { object: bucket.address(&object), reason });
    }
    let path = folder.join(name);
    if hash_of(&path).is_ok_and(|(hash, _)| hash == file.hash) {
        return Ok(());
    }
    let part = folder.join(format!("{name}{PARTIAL_SUFFIX}"));
    let mut hasher = blake3::Hasher::new();
    let start = resume(&part, file.bytes, &mut hasher).map_err(BucketError::local(&part))?;
    let mut output = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&part)
        .map_err(BucketError::local(&part))?;
    let mut coming = std::pin::pin!(pieces(bucket, &object, start, file.bytes));
    while let Some(piece) = coming.try_next().await? {
        hasher.update(&piece);
        output.write_all(&piece).map_err(BucketError::local(&part))?;
    }
    output.sync_all().map_err(BucketError::local(&part))?;
    if let Err(error) = check(bucket, &object, file, hasher.finalize().into()) {
        fs::remove_file(&part).map_err(BucketError::local(&part))?;
        return Err(error);
    }
    fs::rename(&part, &path).map_err(BucketError::local(&path))
}

/// The hash and the length of a file.
fn hash_of(path: &Path) -> io::Result<(ContentHash, u64)> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path)?)?;
    Ok((hasher.finalize().into(), hasher.count()))
}

/// Hashes what an earlier attempt has fetched of a file of `size` bytes. Returns its length.
fn resume(part: &Path, size: u64, hasher: &mut blake3::Hasher) -> io::Result<u64> {
    match fs::metadata(part) {
        Ok(about) if about.len() <= size => {
            hasher.update_reader(File::open(part)?.take(size))?;
            Ok(hasher.count())
        }
        Ok(_) => fs::remove_file(part).map(|()| 0),
        Err(_) => Ok(0),
    }
}

/// Fetches the files of a checkpoint with these hashes into an existing folder.
///
/// # Errors
/// If the bucket has no such checkpoint or file, and like [`fetch_file`].
pub(crate) async fn fetch_files(
    bucket: &Bucket,
    name: &str,
    hashes: &[ContentHash],
    folder: &Path,
) -> Result<()> {
    let place = || BucketError::NoCheckpoint { place: bucket.address(name) };
    let stored = bucket.checkpoint(name).await?.ok_or_else(place)?;
    for hash in hashes {
        let listed = stored.index.files().iter().find(|file| file.hash == *hash);
        fetch_file(bucket, &stored, listed.ok_or_else(place)?, folder).await?;
    }
    Ok(())
}

/// Fetches all files of a checkpoint into an existing folder, and its index last.
///
/// # Errors
/// Like [`fetch_file`].
pub(crate) async fn fetch_all(
    bucket: &Bucket,
    stored: &StoredCheckpoint,
    folder: &Path,
) -> Result<()> {
    for file in stored.index.files() {
        fetch_file(bucket, stored, file, folder).await?;
    }
    write_index(stored, folder)
}

fn write_index(stored: &StoredCheckpoint, folder: &Path) -> Result<()> {
    let path = folder.join(INDEX);
    fs::write(&path, &stored.text).map_err(BucketError::local(&path))
}

/// Fetches the files that text generation needs into a folder of the cache, and returns it.
///
/// # Errors
/// Like [`fetch_file`].
pub(crate) async fn fetch_model(
    bucket: &Bucket,
    stored: &StoredCheckpoint,
    cache: &Path,
) -> Result<PathBuf> {
    // The index names every file by its content, so its hash names the whole.
    let folder = cache.join(ContentHash::of(&stored.text).to_string());
    fs::create_dir_all(&folder).map_err(BucketError::local(&folder))?;
    let lock = File::open(&folder).map_err(BucketError::local(&folder))?;
    // Another process may fetch the same; its files are found afterwards.
    let lock = tokio::task::spawn_blocking(move || lock.lock().map(|()| lock));
    let _lock =
        lock.await.map_err(io::Error::other).flatten().map_err(BucketError::local(&folder))?;
    for file in stored.index.files().iter().filter(|file| !file.name.starts_with("optimizer-")) {
        fetch_file(bucket, stored, file, &folder).await?;
    }
    write_index(stored, &folder)?;
    Ok(folder)
}
