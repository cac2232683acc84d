//! What `start`, `join` and `local` share.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use shoal_engine::DeviceChoice;
use shoal_metrics::{Metrics, NodeState};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cli::HttpAddress;
use crate::driver::home::Home;
use crate::driver::observer::Observer;
use crate::http::{HttpServer, Machine, Shown};
use crate::progress;
use crate::status::StatusWatch;
use crate::whole_file;

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

/// What this process shows of itself over HTTP, for as long as it exists.
pub(super) struct Serving {
    pub(super) metrics: Metrics,
    stop: CancellationToken,
    tracker: TaskTracker,
    /// Where it listens, and the file that says so.
    at: Option<(SocketAddr, PathBuf)>,
}

impl Serving {
    /// Serves metrics and the board at an address, if there is to be one, and writes the address into
    /// the data directory.
    pub(super) async fn start(
        address: HttpAddress,
        status: &StatusWatch,
        home: &Home,
        device: DeviceChoice,
    ) -> anyhow::Result<Self> {
        let (stop, tracker) = (CancellationToken::new(), TaskTracker::new());
        let metrics = Metrics::new()?;
        metrics.node.state.choose(NodeState::Searching);
        let mut at = None;
        if let Some(address) = address.0 {
            let server = HttpServer::bind(address).await?;
            let path = home.http_file();
            let address = server.address()?;
            publish(&path, &address.to_string())?;
            at = Some((address, path));
            let machine = Machine::new(device);
            let shown = Shown { metrics: metrics.clone(), machine, status: status.clone() };
            tracker.spawn(server.serve(shown, stop.clone()));
        }
        tracker.close();
        Ok(Self { metrics, stop, tracker, at })
    }

    /// Says where the run can be seen, now that there is one.
    pub(super) fn announce(&self) {
        if let Some((address, _)) = &self.at {
            progress::say(&format!("shown at http://{address}/"));
        }
    }

    /// Answers what was asked and stops.
    pub(super) async fn close(self) {
        if let Some((_, path)) = self.at {
            // Who finds it all the same finds nobody there, and says so.
            let _ = std::fs::remove_file(path);
        }
        self.stop.cancel();
        self.tracker.wait().await;
    }
}

/// Writes an address where a script waits for it: whole at once.
pub(super) fn publish(path: &Path, address: &str) -> anyhow::Result<()> {
    whole_file::write(path, format!("{address}\n").as_bytes())
        .with_context(|| format!("the address cannot be written to {}", path.display()))
}
