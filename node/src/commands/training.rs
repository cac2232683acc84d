//! What `start`, `join` and `local` share.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use shoal_metrics::{Metrics, NodeState};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::driver::observer::Observer;
use crate::metrics_server::MetricsServer;

/// Threads for links and decisions; the tensor work has its own.
const WORKERS: usize = 4;

/// The threads that links and decisions run on: half of the processor's, as a pass needs the rest.
pub(super) fn runtime() -> anyhow::Result<Runtime> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads((processors / 2).clamp(1, WORKERS))
        .enable_all()
        .build()
        .context("the runtime cannot start")
}

/// Writes `report.json` into a folder.
pub(super) fn write_report(observer: &Observer, folder: &Path) -> anyhow::Result<()> {
    let path = folder.join("report.json");
    observer.report().write(&path).with_context(|| format!("{} cannot be written", path.display()))
}

/// This process's metrics, served over HTTP for as long as it exists.
pub(super) struct Serving {
    pub(super) metrics: Metrics,
    stop: CancellationToken,
    tracker: TaskTracker,
}

impl Serving {
    /// Serves metrics at an address, if there is one.
    pub(super) async fn start(address: Option<SocketAddr>) -> anyhow::Result<Self> {
        let (stop, tracker) = (CancellationToken::new(), TaskTracker::new());
        let metrics = Metrics::new()?;
        metrics.node.state.choose(NodeState::Searching);
        if let Some(address) = address {
            let server = MetricsServer::bind(address).await?;
            let serving = server.serve(Arc::new(metrics.clone()), stop.clone());
            tracker.spawn(async move {
                if let Err(error) = serving.await {
                    tracing::warn!(error = format!("{error:#}"), "metrics are no longer served");
                }
            });
        }
        tracker.close();
        Ok(Self { metrics, stop, tracker })
    }

    /// Answers what was asked and stops.
    pub(super) async fn close(self) {
        self.stop.cancel();
        self.tracker.wait().await;
    }
}
