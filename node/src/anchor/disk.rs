//! An anchor's two files, and the thread that writes them in order.
//!
//! `log` grows until a shorter one replaces it; `snapshot` is always replaced. A replacement is
//! written beside the file, flushed, and renamed over it, so that a reader finds the old or the new
//! file. A write is reported as done after it was flushed.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::AnchorError;

/// Queued writes. Raft waits for each of its own; snapshots come in between.
const QUEUE: usize = 64;

/// Called on the writing thread with the outcome of a write.
pub(super) type Done = Box<dyn FnOnce(io::Result<()>) + Send>;

/// The paths of an anchor's files.
#[derive(Debug, Clone)]
pub(super) struct Paths {
    folder: PathBuf,
}

impl Paths {
    pub(super) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    pub(super) fn log(&self) -> PathBuf {
        self.folder.join("log")
    }

    pub(super) fn snapshot(&self) -> PathBuf {
        self.folder.join("snapshot")
    }

    /// Replaces a file atomically: after a crash it is the old or the new one.
    pub(super) fn replace(&self, path: &Path, bytes: &[u8]) -> io::Result<File> {
        let beside = path.with_extension("new");
        let mut file = OpenOptions::new().create(true).write(true).truncate(true).open(&beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&beside, path)?;
        File::open(&self.folder)?.sync_all()?;
        Ok(file)
    }
}

enum Job {
    /// Appends to the log.
    Append(Vec<u8>),
    /// Replaces the log.
    Replace(Vec<u8>),
    /// Replaces the snapshot.
    Snapshot(Vec<u8>),
    /// Ends the thread.
    Stop,
}

/// Passes writes to the thread. After one write fails all later ones fail, because the state of the
/// disk is unknown.
#[derive(Clone)]
pub(super) struct Disk {
    jobs: SyncSender<(Job, Done)>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
    failure: Arc<Mutex<Option<AnchorError>>>,
}

impl Disk {
    /// Starts the thread, which appends at the end of the log.
    pub(super) fn start(paths: Paths, log: File) -> io::Result<Self> {
        let (jobs, to_do) = sync_channel(QUEUE);
        let failure = Arc::default();
        let thread = std::thread::Builder::new().name("anchor-log".into()).spawn({
            let failure = Arc::clone(&failure);
            move || work(&paths, log, &to_do, &failure)
        })?;
        Ok(Self { jobs, thread: Arc::new(Mutex::new(Some(thread))), failure })
    }

    pub(super) fn append(&self, bytes: Vec<u8>, done: Done) {
        self.give(Job::Append(bytes), done);
    }

    pub(super) fn replace_log(&self, bytes: Vec<u8>, done: Done) {
        self.give(Job::Replace(bytes), done);
    }

    pub(super) fn replace_snapshot(&self, bytes: Vec<u8>, done: Done) {
        self.give(Job::Snapshot(bytes), done);
    }

    /// The first write that failed. A second call returns none.
    pub(super) fn failure(&self) -> Option<AnchorError> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Waits for the queued writes and ends the thread.
    pub(super) fn stop(&self) {
        // The send waits for room in the queue; it fails if the thread is gone.
        drop(self.jobs.send((Job::Stop, Box::new(|_| ()))));
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that writes the anchor's log panicked");
        }
    }

    fn give(&self, job: Job, done: Done) {
        let ((_, done), error) = match self.jobs.try_send((job, done)) {
            Ok(()) => return,
            Err(TrySendError::Disconnected(job)) => (job, "the anchor's log is closed"),
            Err(TrySendError::Full(job)) => {
                (job, "the anchor's disk is too slow: its queue is full")
            }
        };
        done(Err(io::Error::other(error)));
    }
}

fn work(
    paths: &Paths,
    mut log: File,
    jobs: &Receiver<(Job, Done)>,
    failure: &Mutex<Option<AnchorError>>,
) {
    let mut failed = false;
    while let Ok((job, done)) = jobs.recv() {
        let (path, outcome) = match job {
            Job::Stop => return done(Ok(())),
            _ if failed => {
                done(Err(io::Error::other("an earlier write failed")));
                continue;
            }
            Job::Append(bytes) => {
                (paths.log(), log.write_all(&bytes).and_then(|()| log.sync_data()))
            }
            Job::Replace(bytes) => {
                (paths.log(), paths.replace(&paths.log(), &bytes).map(|new| log = new))
            }
            Job::Snapshot(bytes) => {
                (paths.snapshot(), paths.replace(&paths.snapshot(), &bytes).map(drop))
            }
        };
        if let Err(error) = &outcome {
            failed = true;
            let error = io::Error::new(error.kind(), error.to_string());
            *failure.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(AnchorError::Write { path, error });
        }
        done(outcome);
    }
}
