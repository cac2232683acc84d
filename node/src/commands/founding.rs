//! A run whose log and data directories are lost continues from the newest checkpoint of its archives.
//!
//! The first peer fetches the checkpoint's files, marks the archives with the number of the new history, and writes
//! the founding of that history to its data directory. The coordinator makes it the first record of the log. From
//! there on everything is as after a return to a checkpoint: the peer offers the files, and others fetch them.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Context as _;
use shoal_engine::CheckpointFile;
use shoal_protocol::ids::{PeerId, RunId, Step};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{Founding, StoredFile, StoredStage};
use shoal_protocol::units::Bytes;
use shoal_protocol::wire;

use super::bucket::{exit, fetch};
use crate::bucket::{Bucket, BucketError, StoredCheckpoint, fetch_file, verify};
use crate::data_dir::DataDir;
use crate::driver::Archive;
use crate::driver::chunks::Label;
use crate::driver::resume::{KEPT, checkpoint_folder, part_folder};
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
    let mut damaged = BTreeSet::new();
    loop {
        let run = manifest.run_id();
        let Some(found) = newest(&archives, run, &damaged).await? else {
            // Version 0 instead of what the archives had would be a loss in silence.
            let lost = damaged.pop_last().map(|place| BucketError::AllDamaged { place });
            return lost.map_or(Ok(Beginning::Log), Err);
        };
        match from(home, manifest, (archive, &archives), &found, me).await {
            Err(error @ (BucketError::Damaged { .. } | BucketError::Checkpoint(_))) => {
                tracing::warn!(%error, "a checkpoint of an archive is damaged: trying an older one");
                damaged.insert(found.bucket.address(&found.stored.name));
            }
            begun => return begun,
        }
    }
}

/// Begins with a checkpoint of an archive.
async fn from(
    home: &DataDir,
    manifest: &Manifest,
    (archive, archives): (&Archive, &[Bucket]),
    found: &Found<'_>,
    me: PeerId,
) -> Result<Beginning, BucketError> {
    let run = manifest.run_id();
    let (version, place) = (found.stored.index.step(), found.bucket.place().to_owned());
    if version.0 == manifest.training.steps {
        let destination = checkpoint_folder(archive.folder(), version, true);
        let here = archive.folder().display().to_string();
        if place == here {
            verify(found.bucket, &found.stored).await?;
        } else {
            fetch(found.bucket, &found.stored, &destination).await?;
        }
        return Ok(Beginning::Complete);
    }
    progress::say(&format!("fetching version {version} of the weights from {place}"));
    let stages = fetch_stages(home, found, me).await?;
    let number = mark(archives, (run, version, me)).await?;
    Ok(Beginning::History(Founding { number, version, stages }, Some(place)))
}

/// The newest whole checkpoint of a run in all archives, without the damaged ones; at equal versions that of the first.
async fn newest<'a>(
    archives: &'a [Bucket],
    run: RunId,
    damaged: &BTreeSet<String>,
) -> Result<Option<Found<'a>>, BucketError> {
    let mut newest: Option<Found<'_>> = None;
    for bucket in archives {
        let Some(stored) = bucket.newest(Some(run), damaged).await? else { continue };
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
    let folder = part_folder(home.path(), KEPT, run).join(version.to_string());
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

#[cfg(test)]
mod tests {
    use shoal_engine::checkpoint::{write_index, write_stage};
    use shoal_engine::{Slot, StageState, parameter_count};
    use shoal_protocol::manifest::example;

    use super::*;

    /// Writes a checkpoint into an archive's folder.
    fn archived(archive: &Path, manifest: &Manifest, version: Step) {
        let folder = checkpoint_folder(archive, version, false);
        std::fs::create_dir_all(&folder).expect("a folder");
        let mut files = Vec::new();
        for stage in manifest.stages() {
            let vector = || vec![version.0 as f32; parameter_count(manifest, stage)];
            let state = StageState {
                weights: vector(),
                stale_weights: Vec::new(),
                slots: [Slot::FirstMoment, Slot::SecondMoment].map(|it| (it, vector())).into(),
            };
            files.extend(write_stage(&folder, manifest, stage, &state).expect("written"));
        }
        write_index(&folder, manifest, version, &files, None, &[]).expect("written");
    }

    /// Flips a bit in the middle of a file.
    fn damage(path: &Path) {
        let mut bytes = std::fs::read(path).expect("it exists");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(path, bytes).expect("written");
    }

    #[tokio::test]
    async fn a_flipped_bit_costs_a_version_and_not_the_run() {
        let (home, folder) = (tempfile::tempdir(), tempfile::tempdir());
        let (home, folder) = (home.expect("a folder"), folder.expect("a folder"));
        let (home, manifest) = (DataDir::open(home.path()).expect("free"), example::small());
        [2, 4].iter().for_each(|version| archived(folder.path(), &manifest, Step(*version)));
        let of = |version: u64| checkpoint_folder(folder.path(), Step(version), false);
        damage(&of(4).join("model-00001-of-00002.safetensors"));
        let archive = Archive::in_folder(folder.path().to_owned());
        let begun = from_archives(&home, &manifest, &archive, PeerId([1; 32])).await;
        let Ok(Beginning::History(founding, _)) = begun else { panic!("{begun:?}") };
        assert_eq!(founding.version, Step(2));
        damage(&of(2).join("optimizer-00002-of-00002.safetensors"));
        let home = tempfile::tempdir().expect("a folder");
        let home = DataDir::open(home.path()).expect("free");
        let begun = from_archives(&home, &manifest, &archive, PeerId([1; 32])).await;
        assert!(matches!(begun, Err(BucketError::AllDamaged { .. })), "{begun:?}");
    }
}
