//! Common parts of `start`, `join` and `local`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use shoal_engine::DeviceChoice;
use shoal_metrics::{Metrics, NodeState};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cli::HttpAddress;
use crate::data_dir::DataDir;
use crate::http::{HttpServer, Machine, Shown};
use crate::observers::Observers;
use crate::progress;
use crate::status::StatusWatch;
use crate::whole_file;

/// The most threads for network and scheduling. Tensor computation has its own.
const WORKERS: usize = 4;

/// A runtime for network and scheduling on half of the processor's threads; passes need the others.
pub(super) fn runtime() -> anyhow::Result<Runtime> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads((processors / 2).clamp(1, WORKERS))
        .enable_all()
        .build()
        .context("cannot start the runtime")
}

/// Writes `report.json` into a folder.
pub(super) fn write_report(observer: &Observers, folder: &Path) -> anyhow::Result<()> {
    let path = folder.join("report.json");
    observer.report().write(&path).with_context(|| format!("cannot write {}", path.display()))
}

/// The HTTP server of this process, and its metrics.
pub(super) struct Serving {
    pub(super) metrics: Metrics,
    stop: CancellationToken,
    tracker: TaskTracker,
    /// The server's address, and the file that holds it.
    at: Option<(SocketAddr, PathBuf)>,
}

impl Serving {
    /// Starts the server, with further names of this machine, if an address is set, and writes the address to the data directory.
    pub(super) async fn start(
        (address, hosts): (HttpAddress, &[String]),
        status: &StatusWatch,
        home: &DataDir,
        devices: &[DeviceChoice],
    ) -> anyhow::Result<Self> {
        let (stop, tracker) = (CancellationToken::new(), TaskTracker::new());
        let metrics = Metrics::new()?;
        metrics.node.state.choose(NodeState::Searching);
        let mut at = None;
        if let Some(address) = address.0 {
            let server = HttpServer::bind(address).await?.with_hosts(hosts.to_vec());
            let path = home.http_file();
            let address = server.address()?;
            publish(&path, &address.to_string())?;
            at = Some((address, path));
            let machine = Machine::new(devices, home.path());
            let shown = Shown { metrics: metrics.clone(), machine, status: status.clone() };
            tracker.spawn(server.serve(shown, stop.clone()));
        }
        tracker.close();
        Ok(Self { metrics, stop, tracker, at })
    }

    /// Prints the address of the web page.
    pub(super) fn announce(&self) {
        if let Some((address, _)) = &self.at {
            progress::say(&format!("web page: http://{address}/"));
        }
    }

    /// Finishes open requests and stops the server.
    pub(super) async fn close(self) {
        if let Some((_, path)) = self.at {
            // If the file stays, clients find that the address does not answer.
            let _ = std::fs::remove_file(path);
        }
        self.stop.cancel();
        self.tracker.wait().await;
    }
}

/// Writes an address to a file atomically, because scripts wait for it.
pub(super) fn publish(path: &Path, address: &str) -> anyhow::Result<()> {
    whole_file::write(path, format!("{address}\n").as_bytes())
        .with_context(|| format!("cannot write the address to {}", path.display()))
}
