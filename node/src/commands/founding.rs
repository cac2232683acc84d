//! A run whose log and data directories are lost continues from the newest checkpoint of its archives.
//!
//! The first peer fetches the checkpoint's files, marks the archives with the number of the new history, and writes
//! the founding of that history to its data directory. The coordinator makes it the first record of the log. From
//! there on everything is as after a return to a checkpoint: the peer offers the files, and others fetch them.

use std::path::Path;

use anyhow::Context as _;
use shoal_engine::CheckpointFile;
use shoal_protocol::ids::{PeerId, RunId, Step};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{Founding, StoredFile, StoredStage};
use shoal_protocol::units::Bytes;
use shoal_protocol::wire;

use super::bucket::{exit, fetch};
use crate::bucket::{Bucket, BucketError, StoredCheckpoint, fetch_file};
use crate::data_dir::DataDir;
use crate::driver::Archive;
use crate::driver::chunks::Label;
use crate::driver::resume::{KEPT, checkpoint_folder};
use crate::exit::ExitWith;
use crate::progress;
use crate::whole_file;

/// How the first peer of a run begins.
#[derive(Debug)]
pub(super) enum Beginning {
    /// As its log says; at version 0 if it is empty.
    Log,
    /// With a new history, unless the log has begun. The archive is given by the process that founds it.
    History(Founding, Option<String>),
    /// The archive has the run's last checkpoint, which is in the folder now.
    Complete,
}

/// A checkpoint in one of the archives.
struct Found<'a> {
    bucket: &'a Bucket,
    stored: StoredCheckpoint,
}

/// Finds out how a run begins. If nothing of it is in the data directory, its archives decide.
///
/// # Errors
/// If an archive cannot be read, a checkpoint cannot be fetched, or another process founds a history meanwhile.
pub(super) async fn beginning(
    home: &DataDir,
    manifest: &Manifest,
    archive: &Archive,
    me: PeerId,
) -> anyhow::Result<Beginning> {
    let folder = home.path().join("runs").join(manifest.run_id().to_string());
    let record = folder.join("founding");
    let known = read(&record)?;
    let begun = match known {
        Some(founding) => {
            let same = check_newest(archive, founding.number).await;
            same.map(|()| Beginning::History(founding, None))
        }
        None if folder.join("log").exists() => {
            check_newest(archive, 0).await.map(|()| Beginning::Log)
        }
        None => from_archives(home, manifest, archive, me).await,
    };
    let begun = begun.or_else(|error| {
        let exit = exit(&error);
        Err(error).exit_with(exit)
    })?;
    if let Beginning::History(founding, _) = &begun {
        let bytes = wire::encode(founding)?;
        std::fs::create_dir_all(&folder)
            .and_then(|()| whole_file::write(&record, &bytes))
            .with_context(|| format!("{} cannot be written", record.display()))?;
    }
    Ok(begun)
}

/// The founding that an earlier process wrote, if one did.
fn read(record: &Path) -> anyhow::Result<Option<Founding>> {
    if !record.exists() {
        return Ok(None);
    }
    let unusable = || {
        format!("{} cannot be used: remove it to continue from an archive again", record.display())
    };
    let bytes = std::fs::read(record).with_context(unusable)?;
    wire::decode(&bytes).map(Some).with_context(unusable)
}

/// The archives of the first peer.
fn archives(archive: &Archive) -> Result<Vec<Bucket>, BucketError> {
    let folder = archive.folder().is_dir().then(|| Bucket::in_folder(archive.folder()));
    Ok(folder.transpose()?.into_iter().chain(archive.bucket().cloned()).collect())
}

/// Checks that no other process continued the run in a history after this one.
async fn check_newest(archive: &Archive, number: u16) -> Result<(), BucketError> {
    for bucket in archives(archive)? {
        if bucket.newest_history().await? > number {
            return Err(BucketError::Continued { place: bucket.place().to_owned() });
        }
    }
    Ok(())
}

async fn from_archives(
    home: &DataDir,
    manifest: &Manifest,
    archive: &Archive,
    me: PeerId,
) -> Result<Beginning, BucketError> {
    let archives = archives(archive)?;
    let run = manifest.run_id();
    let Some(found) = newest(&archives, run).await? else { return Ok(Beginning::Log) };
    let (version, place) = (found.stored.index.step(), found.bucket.place().to_owned());
    if version.0 == manifest.training.steps {
        let destination = checkpoint_folder(archive.folder(), version, true);
        let here = archive.folder().display().to_string();
        if place != here {
            fetch(found.bucket, &found.stored, &destination).await?;
        }
        return Ok(Beginning::Complete);
    }
    progress::say(&format!("fetching version {version} of the weights from {place}"));
    let stages = fetch_stages(home, &found, me).await?;
    let number = mark(&archives, (run, version, me)).await?;
    Ok(Beginning::History(Founding { number, version, stages }, Some(place)))
}

/// The newest whole checkpoint of a run in all archives; at equal versions that of the first.
async fn newest(archives: &[Bucket], run: RunId) -> Result<Option<Found<'_>>, BucketError> {
    let mut newest: Option<Found<'_>> = None;
    for bucket in archives {
        let Some(stored) = bucket.newest(Some(run)).await? else { continue };
        let version = stored.index.step();
        // The initial weights need no checkpoint.
        let newer = newest.as_ref().map_or(Step(0), |found| found.stored.index.step()) < version;
        if newer {
            newest = Some(Found { bucket, stored });
        }
    }
    Ok(newest)
}

/// Fetches the files of all stages to where this peer keeps such files for others.
async fn fetch_stages(
    home: &DataDir,
    Found { bucket, stored }: &Found<'_>,
    me: PeerId,
) -> Result<Vec<StoredStage>, BucketError> {
    let (version, run) = (stored.index.step(), stored.index.run());
    let folder = home.path().join(KEPT).join(version.to_string());
    std::fs::create_dir_all(&folder).map_err(BucketError::local(&folder))?;
    let mut stages = Vec::new();
    for stage in stored.index.manifest().stages() {
        let files = stored.index.stage_files(stage);
        for file in &files {
            fetch_file(bucket, stored, file, &folder).await?;
            let label = Label { run, hash: file.hash };
            label.write(&folder, &file.name).map_err(BucketError::local(&folder))?;
        }
        stages.push(StoredStage {
            holders: vec![me],
            files: files.into_iter().map(stored_file).collect(),
        });
    }
    Ok(stages)
}

fn stored_file(CheckpointFile { name, bytes, hash }: CheckpointFile) -> StoredFile {
    StoredFile { name, hash, size: Bytes(bytes) }
}

/// Marks all archives with the next history. Returns its number.
async fn mark(archives: &[Bucket], founded: (RunId, Step, PeerId)) -> Result<u16, BucketError> {
    let mut last = 0;
    for bucket in archives {
        last = last.max(bucket.newest_history().await?);
    }
    let number = last.saturating_add(1);
    for bucket in archives {
        bucket.mark_history(number, founded).await?;
    }
    Ok(number)
}
