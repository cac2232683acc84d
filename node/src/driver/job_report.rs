//! The results of the engine's jobs, and the reports of jobs that run on other threads.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use shoal_engine::{Footprint, StageRouting, SwapStats};
use shoal_protocol::ids::Stage;
use shoal_scheduler::action::{DeviceIndex, TaskResult};
use tokio::sync::mpsc;

/// The result of a job, and the time that it took.
#[derive(Debug)]
pub(crate) struct JobDone {
    pub(crate) result: anyhow::Result<TaskResult>,
    pub(crate) busy: Duration,
    /// What the engine swapped since the job before.
    pub(crate) swapped: SwapStats,
    /// What each device has now, if the job may have changed that.
    pub(crate) footprints: Option<Vec<Footprint>>,
    /// What the routers of the stage that the job updated did before.
    pub(crate) routing: Option<(Stage, StageRouting)>,
}

impl JobDone {
    /// The result of a job that neither swaps nor changes what devices have.
    pub(crate) fn of(result: anyhow::Result<TaskResult>, busy: Duration) -> Self {
        let swapped = SwapStats::default();
        Self { result, busy, swapped, footprints: None, routing: None }
    }
}

/// The report of a task that runs on the thread of one of several devices. Dropped without a result, because
/// the thread panicked or ended before the task, it reports an error.
#[derive(Debug)]
pub(super) struct Report {
    results: mpsc::Sender<JobDone>,
    device: DeviceIndex,
    is_sent: bool,
}

impl Report {
    pub(super) fn new(results: mpsc::Sender<JobDone>, device: DeviceIndex) -> Self {
        Self { results, device, is_sent: false }
    }

    /// Reports the result of a task that began at `start`.
    pub(super) fn send(mut self, start: Instant, result: anyhow::Result<TaskResult>) {
        self.is_sent = true;
        self.give(result, start.elapsed());
    }

    /// There is nothing to report, because another device reports the task.
    pub(super) fn keep(mut self) {
        self.is_sent = true;
    }

    fn give(&self, result: anyhow::Result<TaskResult>, busy: Duration) {
        // The receiver is gone only while the process ends.
        let _ = self.results.blocking_send(JobDone::of(result, busy));
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        if !self.is_sent {
            let number = self.device.0;
            let stopped = anyhow!("the thread of device {number} (counted from 0) has ended");
            self.give(Err(stopped), Duration::ZERO);
        }
    }
}
