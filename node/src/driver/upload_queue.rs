//! Uploads of checkpoints, one at a time. Training never waits for them.

use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use shoal_protocol::ids::Step;

use super::background_results::{Background, FilesResult};
use crate::bucket::{Bucket, BucketError, Upload};
use crate::events::RunEvent;

/// The first and the longest pause between two attempts.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The upload in progress, and the checkpoint after it.
#[derive(Debug)]
pub(super) struct UploadQueue {
    /// How long an upload makes no progress before it is given up.
    patience: Duration,
    current: Option<Current>,
    /// The newest checkpoint that waits for its turn. An older one is left out.
    waiting: Option<(Step, Upload)>,
    /// The newest checkpoint that was given up, and the reason.
    lost: Option<(Step, String)>,
}

/// An upload in progress.
#[derive(Debug)]
struct Current {
    version: Step,
    upload: Upload,
    /// Failed attempts since the last progress.
    failures: u32,
    progress_at: Instant,
    warned: bool,
}

/// The outcome of an attempt.
#[derive(Debug)]
pub(super) enum Attempt {
    /// The bucket has the checkpoint.
    Uploaded(Step),
    /// It is tried again.
    Again,
    /// It is not tried again.
    Lost(Step),
}

/// The pause after a number of failures in a row.
fn pause(failures: u32) -> Duration {
    let doubled = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
    FIRST_PAUSE.saturating_mul(doubled).min(LONGEST_PAUSE)
}

impl UploadQueue {
    pub(super) fn new(patience: Duration) -> Self {
        Self { patience, current: None, waiting: None, lost: None }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.current.is_none()
    }

    /// Why this version's upload was given up, if it was.
    pub(super) fn lost(&self, version: Step) -> Option<&str> {
        self.lost.as_ref().filter(|(lost, _)| *lost == version).map(|(_, reason)| reason.as_str())
    }

    /// Whether a version's folder is read, or will be.
    pub(super) fn needs(&self, version: Step) -> bool {
        let waiting = self.waiting.iter().map(|(waiting, _)| *waiting);
        self.current.iter().map(|current| current.version).chain(waiting).any(|v| v == version)
    }

    /// Uploads a checkpoint, after the one in progress.
    pub(super) fn add(
        &mut self,
        bucket: &Bucket,
        background: &Background,
        version: Step,
        upload: Upload,
    ) {
        if self.needs(version) {
            return;
        }
        if self.current.is_none() {
            self.start(bucket, background, version, upload);
        } else if let Some((left_out, _)) = self.waiting.replace((version, upload)) {
            tracing::warn!(version = %left_out, bucket = bucket.place(), "a checkpoint is left out: a newer one \
                came before its upload");
        }
    }

    fn start(&mut self, bucket: &Bucket, background: &Background, version: Step, upload: Upload) {
        let progress_at = Instant::now();
        let current = Current { version, upload, failures: 0, progress_at, warned: false };
        current.attempt(bucket, background);
        self.current = Some(current);
    }

    /// Takes the outcome of an attempt. Returns also what is to be reported.
    pub(super) fn attempted(
        &mut self,
        bucket: &Bucket,
        background: &Background,
        sent: u64,
        outcome: Result<(), BucketError>,
    ) -> (Attempt, Option<RunEvent>) {
        let Some(mut current) = self.current.take() else { return (Attempt::Again, None) };
        let version = current.version;
        let Err(error) = outcome else {
            self.lost = self.lost.take().filter(|(lost, _)| *lost != version);
            self.start_waiting(bucket, background);
            let archive = bucket.place().to_owned();
            let event = RunEvent::Uploaded { version: version.0, archive };
            return (Attempt::Uploaded(version), Some(event));
        };
        let reason = error.to_string();
        if sent > 0 {
            (current.failures, current.progress_at) = (0, Instant::now());
        }
        current.failures = current.failures.saturating_add(1);
        let event = (!std::mem::replace(&mut current.warned, true)).then(|| {
            let (archive, reason) = (bucket.place().to_owned(), reason.clone());
            RunEvent::UploadFailed { version: version.0, archive, reason }
        });
        if self.waiting.is_some() || current.progress_at.elapsed() >= self.patience {
            self.lost = Some((version, reason));
            self.start_waiting(bucket, background);
            return (Attempt::Lost(version), event);
        }
        current.attempt(bucket, background);
        self.current = Some(current);
        (Attempt::Again, event)
    }

    fn start_waiting(&mut self, bucket: &Bucket, background: &Background) {
        if let Some((version, upload)) = self.waiting.take() {
            self.start(bucket, background, version, upload);
        }
    }
}

impl Current {
    fn attempt(&self, bucket: &Bucket, background: &Background) {
        let (upload, bucket) = (self.upload.clone(), bucket.clone());
        let wait = if self.failures == 0 { Duration::ZERO } else { pause(self.failures) };
        background.spawn(async move {
            tokio::time::sleep(wait).await;
            let sent = AtomicU64::new(0);
            let outcome = upload.run(&bucket, &sent).await;
            FilesResult::Uploaded { sent: sent.into_inner(), outcome }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(folder: &std::path::Path) -> Bucket {
        Bucket::in_folder(folder).expect("a folder")
    }

    fn upload(folder: &std::path::Path) -> Upload {
        let folder = folder.to_owned();
        Upload { records: folder.clone(), folder, name: "checkpoint".to_owned() }
    }

    fn refused() -> Result<(), BucketError> {
        Err(BucketError::Missing { place: "s3://b".to_owned() })
    }

    #[test]
    fn pauses_grow_up_to_the_longest() {
        let seconds: Vec<u64> = (1..8).map(|failures| pause(failures).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(pause(u32::MAX), LONGEST_PAUSE);
    }

    #[tokio::test]
    async fn one_warning_a_checkpoint_and_a_newer_one_takes_its_place() {
        let folder = tempfile::tempdir().expect("a folder");
        let (bucket, background) = (bucket(folder.path()), Background::new());
        let mut queue = UploadQueue::new(Duration::from_secs(600));
        queue.add(&bucket, &background, Step(1), upload(folder.path()));
        let (attempt, event) = queue.attempted(&bucket, &background, 0, refused());
        assert!(matches!((attempt, event), (Attempt::Again, Some(RunEvent::UploadFailed { .. }))));
        let (attempt, event) = queue.attempted(&bucket, &background, 0, refused());
        assert!(matches!((attempt, event), (Attempt::Again, None)));
        queue.add(&bucket, &background, Step(2), upload(folder.path()));
        queue.add(&bucket, &background, Step(3), upload(folder.path()));
        assert!(queue.needs(Step(1)) && !queue.needs(Step(2)) && queue.needs(Step(3)));
        let (attempt, _) = queue.attempted(&bucket, &background, 0, refused());
        assert!(matches!(attempt, Attempt::Lost(Step(1))));
        assert!(queue.lost(Step(1)).is_some());
        let (attempt, event) = queue.attempted(&bucket, &background, 1, Ok(()));
        assert!(matches!(attempt, Attempt::Uploaded(Step(3))));
        assert!(matches!(event, Some(RunEvent::Uploaded { version: 3, .. })));
        assert!(queue.is_empty());
    }

    #[tokio::test]
    async fn an_upload_without_progress_is_given_up() {
        let folder = tempfile::tempdir().expect("a folder");
        let (bucket, background) = (bucket(folder.path()), Background::new());
        let mut queue = UploadQueue::new(Duration::ZERO);
        queue.add(&bucket, &background, Step(1), upload(folder.path()));
        let (attempt, _) = queue.attempted(&bucket, &background, 0, refused());
        assert!(matches!(attempt, Attempt::Lost(Step(1))));
        assert!(queue.is_empty());
    }
}
