//! The tasks of a transport, and the two steps of their end: closing, then closed.

use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

/// The running tasks, and the signals that end them.
pub(super) struct Lifecycle {
    tasks: TaskTracker,
    /// Cancelled when closing begins: no new work starts.
    closing: CancellationToken,
    /// Cancelled when all tasks must stop.
    closed: CancellationToken,
}

impl Lifecycle {
    pub(super) fn new() -> Self {
        let closed = CancellationToken::new();
        Self { tasks: TaskTracker::new(), closing: closed.child_token(), closed }
    }

    /// Stops all tasks when dropped.
    pub(super) fn guard(&self) -> DropGuard {
        self.closed.clone().drop_guard()
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.is_cancelled()
    }

    /// Waits until no new work may start.
    pub(super) async fn closing(&self) {
        self.closing.cancelled().await;
    }

    /// Waits until all tasks must stop.
    pub(super) async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Ends the start of new work.
    pub(super) fn begin_close(&self) {
        self.closing.cancel();
        self.tasks.close();
    }

    /// Stops all tasks.
    pub(super) fn stop(&self) {
        self.closed.cancel();
    }

    /// Waits until all tasks have ended.
    pub(super) async fn ended(&self) {
        self.tasks.wait().await;
    }
}
