//! Checkpoints in buckets, for the commands that read them.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use shoal_engine::{Checkpoint, CheckpointError, checkpoint};
use shoal_protocol::ids::ContentHash;

use super::training;
use crate::bucket::{
    ArchivePlace, Bucket, BucketError, BucketUrl, StoredCheckpoint, fetch_all, fetch_model, verify,
};
use crate::driver::Staging;
use crate::exit::{Exit, ExitWith};
use crate::terminal::outln;

/// The exit code of an error.
pub(super) fn exit(error: &BucketError) -> Exit {
    match error {
        BucketError::Settings { .. }
        | BucketError::Missing { .. }
        | BucketError::Clock { .. }
        | BucketError::Expired { .. }
        | BucketError::Region { .. }
        | BucketError::OtherRun(_)
        | BucketError::Refused { .. } => Exit::Usage,
        BucketError::Lacks { .. }
        | BucketError::Damaged { .. }
        | BucketError::AllDamaged { .. }
        | BucketError::Checkpoint(_) => Exit::Corrupt,
        _ => Exit::Failed,
    }
}

/// Opens the bucket of an archive, if the archive is in one, and checks that it can be used.
///
/// # Errors
/// If the bucket does not exist, refuses a request, or does not answer.
pub(super) async fn open_archive(place: Option<&ArchivePlace>) -> anyhow::Result<Option<Bucket>> {
    let Some(ArchivePlace::Bucket(url)) = place else { return Ok(None) };
    let bucket = Bucket::open(url).exit_with(Exit::Usage)?;
    bucket.probe().await.exit_with(Exit::Usage)?;
    Ok(Some(bucket))
}

/// Runs a task about a bucket.
pub(super) fn with_bucket<T>(
    url: &BucketUrl,
    task: impl AsyncFnOnce(Bucket) -> Result<T, BucketError>,
) -> anyhow::Result<T> {
    let done = training::runtime()?.block_on(async { task(Bucket::open(url)?).await });
    done.or_else(|error: BucketError| {
        let exit = exit(&error);
        Err(error).exit_with(exit)
    })
}

/// Fetches a checkpoint, verifies it and puts it at `destination`. Returns its hash.
///
/// # Errors
/// If an object is missing or damaged, the store fails, or the destination cannot be written.
pub(super) async fn fetch(
    bucket: &Bucket,
    stored: &StoredCheckpoint,
    destination: &Path,
) -> Result<ContentHash, BucketError> {
    let staging = Staging::open(destination).map_err(BucketError::local(destination))?;
    fetch_all(bucket, stored, staging.folder()).await?;
    let to = destination.to_owned();
    let published = tokio::task::spawn_blocking(move || {
        let whole = Checkpoint::open(staging.folder())?;
        whole.verify()?;
        let hash = whole.hash()?;
        checkpoint::publish(staging.folder(), &to)?;
        Ok::<_, CheckpointError>(hash)
    });
    let published = published.await.map_err(std::io::Error::other);
    Ok(published.map_err(BucketError::local(destination))??)
}

/// Fetches the checkpoint that an address means, and prints its version and hash.
///
/// # Errors
/// If there is no whole checkpoint, or the store fails.
pub(super) fn fetch_checkpoint(url: &BucketUrl, out: &Path) -> anyhow::Result<()> {
    let (version, hash) = with_bucket(url, async |bucket| {
        let found = bucket.meant().await?;
        let hash = fetch(&bucket, &found, out).await?;
        Ok((found.index.step(), hash))
    })?;
    outln!("version {version} of the weights: {} ({hash})", out.display());
    Ok(())
}

/// Hashes every object of the checkpoint that an address means.
///
/// # Errors
/// If there is no whole checkpoint, or the store fails.
pub(super) fn verify_checkpoint(url: &BucketUrl) -> anyhow::Result<()> {
    let found = with_bucket(url, async |bucket| {
        let found = bucket.meant().await?;
        verify(&bucket, &found).await?;
        Ok(found)
    })?;
    let (version, run) = (found.index.step(), found.index.run());
    outln!("whole: version {version} of the weights of run {run}");
    Ok(())
}

/// The folder of a model; one in a bucket is fetched to the cache, unless it is there.
///
/// # Errors
/// If there is no whole checkpoint, the store fails, or there is no folder for the cache.
pub(super) fn model_folder(place: &ArchivePlace) -> anyhow::Result<PathBuf> {
    let url = match place {
        ArchivePlace::Folder(folder) => return Ok(folder.clone()),
        ArchivePlace::Bucket(url) => url,
    };
    let cache = cache().context("there is no folder for downloads: set XDG_CACHE_HOME")?;
    with_bucket(url, async |bucket| {
        let found = bucket.meant().await?;
        fetch_model(&bucket, &found, &cache).await
    })
}

/// `$XDG_CACHE_HOME/shoal/checkpoints` or `~/.cache/shoal/checkpoints`.
fn cache() -> Option<PathBuf> {
    let directory =
        |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = directory("XDG_CACHE_HOME").or_else(|| Some(directory("HOME")?.join(".cache")))?;
    Some(base.join("shoal/checkpoints"))
}
