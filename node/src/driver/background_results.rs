//! Tasks beside the event loop, and the results that they bring back.

use shoal_formats::scores::Scores;
use shoal_protocol::ids::{Member, PeerId, Stage, Step};
use shoal_protocol::message::LinkEstimate;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use super::checkpoint_collect::Collected;
use super::score_queue::ScoringError;
use crate::bucket::BucketError;

/// Results that wait for the event loop at most; a task with one more waits for room.
const QUEUE: usize = 64;

/// The result of a task beside the event loop.
#[derive(Debug)]
pub(super) enum BackgroundResult {
    /// Files of checkpoints that arrived here, or could not.
    Files(FilesResult),
    /// A logged tensor that could not be read back from the disk.
    LogLost(anyhow::Error),
    /// Measured links to some members.
    LatencyMeasured(Vec<(PeerId, LinkEstimate)>),
    /// Members whose processes have ended.
    Gone(Vec<Member>),
}

/// The result of bringing files of a checkpoint here.
#[derive(Debug)]
pub(super) enum FilesResult {
    /// A whole checkpoint in the archive's folder.
    Archived { version: Step, outcome: anyhow::Result<Collected> },
    /// An attempt to bring a checkpoint into a bucket, in which so many requests succeeded.
    Uploaded { sent: u64, outcome: Result<(), BucketError> },
    /// The scores of a checkpoint, or why there are none.
    Scored { outcome: Result<Scores, ScoringError> },
    /// A copy of a checkpoint's stage, kept for others.
    Kept { version: Step, stage: Stage, outcome: anyhow::Result<()> },
    /// A stage of a snapshot, fetched for this peer.
    Fetched { version: Step, stage: Stage, outcome: anyhow::Result<()> },
}

impl FilesResult {
    /// Returns whether a checkpoint could not be archived.
    pub(super) fn is_failed_checkpoint(&self) -> bool {
        matches!(self, Self::Archived { outcome: Err(_), .. })
    }

    /// Returns whether an attempt to upload a checkpoint failed.
    pub(super) fn is_failed_upload(&self) -> bool {
        matches!(self, Self::Uploaded { outcome: Err(_), .. })
    }
}

impl From<FilesResult> for Option<BackgroundResult> {
    fn from(result: FilesResult) -> Self {
        Some(BackgroundResult::Files(result))
    }
}

/// Owns the tasks beside the event loop and the queue of their results.
#[derive(Debug)]
pub(super) struct Background {
    results: mpsc::Sender<BackgroundResult>,
    queue: mpsc::Receiver<BackgroundResult>,
    tracker: TaskTracker,
}

impl Background {
    pub(super) fn new() -> Self {
        let (results, queue) = mpsc::channel(QUEUE);
        Self { results, queue, tracker: TaskTracker::new() }
    }

    /// Runs a task whose result, if it has one, comes out of [`Self::next`].
    pub(super) fn spawn<T: Into<Option<BackgroundResult>>>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) {
        let results = self.results.clone();
        self.tracker.spawn(async move {
            if let Some(result) = task.await.into() {
                // The receiver is gone only while the process ends.
                let _ = results.send(result).await;
            }
        });
    }

    /// Waits for the next result. Safe to cancel.
    pub(super) async fn next(&mut self) -> BackgroundResult {
        match self.queue.recv().await {
            Some(result) => result,
            // This value holds a sender itself.
            None => std::future::pending().await,
        }
    }

    /// Marks the set of tasks as complete.
    pub(super) fn close(&self) {
        self.tracker.close();
    }
}
