//! What is found out before a life in a run begins, each on a thread of its own: what earlier lives left, and
//! what the device does.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use shoal_engine::{Device, DeviceChoice};
use shoal_protocol::ids::{ContentHash, RunId};
use shoal_protocol::manifest::Manifest;

use super::home::Files;
use super::resume;

/// Offers what earlier lives left, on a thread of its own.
pub(super) async fn offer_kept(
    data_dir: PathBuf,
    archive: Option<PathBuf>,
    run: RunId,
    files: Files,
) -> anyhow::Result<usize> {
    let look = move || resume::offer_kept(&data_dir, archive.as_deref(), run, &files);
    tokio::task::spawn_blocking(look).await.context("the search for kept files panicked")
}

/// Computes what tells whether this process computes the same bits as others.
pub(super) async fn known_answers(
    manifest: Arc<Manifest>,
    device: DeviceChoice,
    threads: usize,
) -> anyhow::Result<ContentHash> {
    let compute = move || shoal_engine::fingerprint(&manifest, Device::open(device, threads)?);
    let computed = tokio::task::spawn_blocking(compute).await;
    Ok(computed.context("the known-answer pass panicked")??)
}

/// What the device can do.
pub(super) async fn peak_flops(
    manifest: &Manifest,
    device: DeviceChoice,
    threads: usize,
) -> anyhow::Result<f64> {
    let dtype = manifest.training.dtype;
    let measure = move || shoal_engine::peak_flops(Device::open(device, threads)?, dtype);
    let measured = tokio::task::spawn_blocking(measure).await;
    Ok(measured.context("the measurement of the device panicked")??)
}
