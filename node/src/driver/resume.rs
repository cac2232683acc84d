//! Where a run goes on that went on before: the newest checkpoint that its keeper still has whole.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use shoal_engine::Checkpoint;
use shoal_protocol::ids::{Era, PeerId, Stage, Step};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{LogRecord, StoredFile};
use shoal_scheduler::coordinator::Resume;

use super::home::Files;

/// The folder of a version's checkpoint.
pub(crate) fn checkpoint_folder(out: &Path, version: Step, last: bool) -> PathBuf {
    if last { out.join("checkpoint") } else { out.join(format!("checkpoints/version-{version}")) }
}

/// What the log says of a run: its newest era, and what to go on from if anything was ever committed.
/// The checkpoint's files are offered to others.
pub(crate) fn resume(
    records: &[LogRecord],
    manifest: &Manifest,
    out: &Path,
    files: &Files,
) -> (Era, Option<Resume>) {
    let eras = records.iter().filter_map(|record| match record {
        LogRecord::Commit(record) => Some(record.era),
        LogRecord::Rewind { era, .. } => Some(*era),
        LogRecord::Term(_) | LogRecord::View(_) | LogRecord::Checkpoint { .. } => None,
    });
    let era = eras.max().unwrap_or(Era(0));
    let began = |record: &LogRecord| !matches!(record, LogRecord::Term(_) | LogRecord::View(_));
    if !records.iter().any(began) {
        return (era, None);
    }
    let whole = records.iter().rev().find_map(|record| match record {
        LogRecord::Checkpoint { version, stages } => {
            let last = version.0 == manifest.training.steps;
            let folder = checkpoint_folder(out, *version, last);
            offer_whole(&folder, *version, stages, manifest, files)
                .map(|files| Resume { version: *version, files })
        }
        _ => None,
    });
    (era, Some(whole.unwrap_or(Resume { version: Step(0), files: BTreeMap::new() })))
}

/// Offers the files of a checkpoint, if the folder has all of them as they were written.
fn offer_whole(
    folder: &Path,
    version: Step,
    stages: &[(PeerId, Vec<StoredFile>)],
    manifest: &Manifest,
    files: &Files,
) -> Option<BTreeMap<Stage, Vec<StoredFile>>> {
    let checkpoint = Checkpoint::open(folder).ok()?;
    let ours = checkpoint.run() == manifest.run_id() && checkpoint.step() == version;
    let holds = |stored: &StoredFile| {
        let mut held = checkpoint.files().iter();
        held.any(|file| file.name == stored.name && file.hash == stored.hash)
    };
    if !ours || !stages.iter().flat_map(|(_, stored)| stored).all(holds) {
        return None;
    }
    if let Err(error) = checkpoint.verify() {
        tracing::warn!(%version, %error, "a checkpoint is not gone on from");
        return None;
    }
    for stored in stages.iter().flat_map(|(_, stored)| stored) {
        files.offer(stored.hash, folder.join(&stored.name));
    }
    let stored = stages.iter().map(|(_, stored)| stored.clone());
    Some((0..).map(Stage).zip(stored).collect())
}
