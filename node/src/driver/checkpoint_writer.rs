//! The one thread that writes parts of checkpoints, while the engine computes.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use shoal_engine::checkpoint::write_stage;
use shoal_engine::{CheckpointError, CheckpointFile, StageState};
use shoal_protocol::ids::{Stage, Step};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::StoredFile;
use shoal_protocol::units;
use shoal_scheduler::action::TaskResult;
use tokio::sync::mpsc::Sender;

use super::chunks::Label;
use super::job_report::JobDone;
use crate::data_dir::Files;
use crate::fault_point::FaultPoint;

/// Writes parts of checkpoints and offers them to other peers.
#[derive(Debug, Clone)]
pub(crate) struct PartWriter {
    pub(crate) manifest: Arc<Manifest>,
    /// The parent of one folder per version.
    pub(crate) stored: PathBuf,
    /// The files offered to other peers.
    pub(crate) files: Files,
    /// Whether the page cache may keep what was written. Its pages count towards the memory limit of a
    /// container, which a peer that swaps its stages has no room in.
    pub(crate) cached: bool,
    /// The stages whose last part was not written.
    pub(crate) failing: Arc<Mutex<BTreeSet<Stage>>>,
}

impl PartWriter {
    /// Writes a stage's part of a checkpoint, and offers its files. The first of several failures in a row is a
    /// warning: the coordinator asks again every second.
    pub(crate) fn write(&self, version: Step, stage: Stage, state: &StageState) -> TaskResult {
        let written = write(self, version, stage, state);
        let mut failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        match written {
            Ok(files) => {
                failing.remove(&stage);
                TaskResult::Stored { version, stage, files }
            }
            Err(error) => {
                if failing.insert(stage) {
                    tracing::warn!(
                        %version, %stage, %error,
                        "a part of a checkpoint is not written: it is tried again until it is"
                    );
                } else {
                    tracing::debug!(%version, %stage, %error, "a part is not written again");
                }
                TaskResult::NotStored { version, stage }
            }
        }
    }
}

/// A copy of a stage, to be written.
struct Copied {
    version: Step,
    stage: Stage,
    state: StageState,
}

/// The handle of the thread, which ends after the handle is dropped and every copy is written.
#[derive(Debug)]
pub(crate) struct CheckpointWriter {
    copies: SyncSender<Copied>,
}

impl CheckpointWriter {
    /// Starts the thread, which reports each part on `results`. At most `waiting` copies wait.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(crate) fn start(
        parts: PartWriter,
        results: Sender<JobDone>,
        waiting: usize,
    ) -> std::io::Result<Self> {
        let (copies, queue) = sync_channel(waiting);
        let write = move || write_all(&parts, &queue, &results);
        std::thread::Builder::new().name("checkpoint".into()).spawn(write)?;
        Ok(Self { copies })
    }

    /// Queues a copy. Blocks while too many wait, since the disk cannot keep up.
    ///
    /// # Panics
    /// When the thread has panicked.
    pub(crate) fn give(&self, version: Step, stage: Stage, state: StageState) {
        let copied = Copied { version, stage, state };
        self.copies.send(copied).expect("the writer's thread takes every copy");
    }
}

fn write_all(parts: &PartWriter, queue: &Receiver<Copied>, results: &Sender<JobDone>) {
    for Copied { version, stage, state } in queue {
        let start = Instant::now();
        let result = parts.write(version, stage, &state);
        // The receiver is gone only while the process ends.
        let _ = results.blocking_send(JobDone::of(Ok(result), start.elapsed()));
    }
}

fn write(
    parts: &PartWriter,
    version: Step,
    stage: Stage,
    state: &StageState,
) -> Result<Vec<StoredFile>, CheckpointError> {
    let folder = parts.stored.join(version.to_string());
    make(&folder)?;
    let written = write_stage(&folder, &parts.manifest, stage, state)?;
    let run = parts.manifest.run_id();
    for CheckpointFile { name, hash, .. } in &written {
        let label = Label { run, hash: *hash };
        let path = folder.clone();
        label.write(&folder, name).map_err(|source| CheckpointError::Io { path, source })?;
    }
    if !parts.cached {
        for CheckpointFile { name, .. } in &written {
            let path = folder.join(name);
            uncache(&path).map_err(|source| CheckpointError::Io { path, source })?;
        }
    }
    let offer = |CheckpointFile { name, bytes, hash }| {
        parts.files.offer(hash, folder.join(&name));
        StoredFile { name, hash, size: units::Bytes(bytes) }
    };
    let files = written.into_iter().map(offer).collect();
    FaultPoint::Storing.pass();
    Ok(files)
}

/// Takes a file that is on the disk out of the page cache.
fn uncache(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    Ok(posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?)
}

fn make(folder: &Path) -> Result<(), CheckpointError> {
    let path = folder.to_owned();
    std::fs::create_dir_all(folder).map_err(|source| CheckpointError::Io { path, source })
}
