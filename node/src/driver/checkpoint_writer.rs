//! The one thread that writes parts of checkpoints, so that the engine computes meanwhile.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use shoal_engine::checkpoint::write_stage;
use shoal_engine::{CheckpointError, CheckpointFile, StageState};
use shoal_protocol::ids::{Stage, Step};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::StoredFile;
use shoal_protocol::units;
use shoal_scheduler::action::TaskResult;
use tokio::sync::mpsc::Sender;

use super::chunks::Label;
use super::engine_thread::JobDone;
use super::home::Files;
use crate::fault_point::FaultPoint;

/// Where parts of checkpoints are written, and offered to others.
#[derive(Debug, Clone)]
pub(crate) struct Shelf {
    /// The run.
    pub(crate) manifest: Arc<Manifest>,
    /// Gets a folder for each version.
    pub(crate) stored: PathBuf,
    /// Where they are offered to others.
    pub(crate) files: Files,
}

/// A copy of a stage that is to be written.
struct Copied {
    version: Step,
    stage: Stage,
    state: StageState,
}

/// The thread's end, which ends when this is dropped and everything given is written.
#[derive(Debug)]
pub(crate) struct CheckpointWriter {
    copies: SyncSender<Copied>,
}

impl CheckpointWriter {
    /// Starts the thread, which says on `results` how each part ended. At most so many copies wait.
    pub(crate) fn start(
        shelf: Shelf,
        results: Sender<JobDone>,
        waiting: usize,
    ) -> std::io::Result<Self> {
        let (copies, queue) = sync_channel(waiting);
        let write = move || write_all(&shelf, &queue, &results);
        std::thread::Builder::new().name("checkpoint".into()).spawn(write)?;
        Ok(Self { copies })
    }

    /// Has a copy written. Waits while too many wait, as the disk cannot keep up.
    ///
    /// # Panics
    /// When the thread is gone, which ends only after this handle.
    pub(crate) fn give(&self, version: Step, stage: Stage, state: StageState) {
        let copied = Copied { version, stage, state };
        self.copies.send(copied).expect("the writer's thread takes every copy");
    }
}

fn write_all(shelf: &Shelf, queue: &Receiver<Copied>, results: &Sender<JobDone>) {
    for Copied { version, stage, state } in queue {
        let start = Instant::now();
        let result = match write(shelf, version, stage, &state) {
            Ok(files) => TaskResult::Stored { version, stage, files },
            Err(error) => {
                tracing::warn!(%version, %stage, %error, "a part of a checkpoint is not written");
                TaskResult::NotStored { version, stage }
            }
        };
        // Nobody listens any more when the process is about to end.
        let _ = results.blocking_send(JobDone { result: Ok(result), busy: start.elapsed() });
    }
}

fn write(
    shelf: &Shelf,
    version: Step,
    stage: Stage,
    state: &StageState,
) -> Result<Vec<StoredFile>, CheckpointError> {
    let folder = shelf.stored.join(version.to_string());
    make(&folder)?;
    let written = write_stage(&folder, &shelf.manifest, stage, state)?;
    let run = shelf.manifest.run_id();
    for CheckpointFile { name, hash, .. } in &written {
        let label = Label { run, hash: *hash };
        let path = folder.clone();
        label.write(&folder, name).map_err(|source| CheckpointError::Io { path, source })?;
    }
    let offer = |CheckpointFile { name, bytes, hash }| {
        shelf.files.offer(hash, folder.join(&name));
        StoredFile { name, hash, size: units::Bytes(bytes) }
    };
    let files = written.into_iter().map(offer).collect();
    FaultPoint::Storing.pass();
    Ok(files)
}

fn make(folder: &Path) -> Result<(), CheckpointError> {
    let path = folder.to_owned();
    std::fs::create_dir_all(folder).map_err(|source| CheckpointError::Io { path, source })
}
