//! `shoal local`: trains in one process without a network. This is the reference for every other run.

use std::sync::Arc;

use anyhow::Context;
use shoal_formats::config::RunConfig;
use shoal_metrics::Metrics;
use shoal_protocol::ids::{Incarnation, Member};
use shoal_protocol::message::StageChoice;
use shoal_protocol::net::identity::Identity;
use shoal_scheduler::coordinator::placing::rebalance::Rebalance;

use super::training;
use crate::cli::LocalArgs;
use crate::config_sources::OnDisk;
use crate::data_dir::Files;
use crate::dataset;
use crate::driver::resume::refuse_another_run;
use crate::driver::{self, AnchorStart, Archive, Leaving, ResourceLimits, RoleSetup, Setup};
use crate::exit::{Exit, ExitWith};
use crate::observers::Observers;
use crate::signals::Signals;

/// Trains alone: one peer hosts every stage and sends all messages to itself.
///
/// # Errors
/// If the configuration or text is invalid, or the run fails.
pub fn run(args: LocalArgs) -> anyhow::Result<()> {
    let LocalArgs { config, out, compute, memory, device_memory } = args;
    let config = RunConfig::load(&config, &OnDisk).exit_with(Exit::Usage)?;
    std::fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let scratch = tempfile::Builder::new()
        .prefix(".local-")
        .tempdir_in(&out)
        .with_context(|| format!("cannot write to {}", out.display()))?;
    let dataset = dataset::prepare_to_train(&config, scratch.path())?;
    refuse_another_run(&out, &dataset.manifest).exit_with(Exit::Usage)?;
    let files = Files::default();
    dataset.offer(&files);
    let mut observer =
        Observers::new(compute.events.as_ref(), compute.tensorboard.as_deref(), "local")?;
    let devices = compute.devices().exit_with(Exit::Usage)?;
    let setup = Setup {
        metrics: Metrics::new()?,
        watched: false,
        manifest: Arc::new(dataset.manifest),
        me: Member { peer: Identity::ephemeral().peer_id(), incarnation: Incarnation(1) },
        choice: StageChoice::All,
        longest: u16::MAX,
        devices,
        price: compute.price,
        island: None,
        name: None,
        limits: ResourceLimits { memory, device_memory, ..ResourceLimits::default() },
        slow_down: std::time::Duration::ZERO,
        data_dir: scratch.path().to_owned(),
        files,
        mirrors: Vec::new(),
        leaving: Leaving { preempt_file: None, drain_timeout: std::time::Duration::ZERO },
        network: None,
        role: RoleSetup {
            anchor: Some(AnchorStart::Founds),
            wait_for: 1,
            rebalance: Rebalance::Never,
            extend_after: std::time::Duration::MAX,
            archive: Some(Archive::in_folder(out.clone())),
            archive_patience: std::time::Duration::ZERO,
            on_checkpoint: None,
            founding: None,
            coordinator: None,
        },
    };
    training::runtime()?
        .block_on(async { driver::run(setup, &mut observer, &mut Signals::listen()?).await })?;
    training::write_report(&observer, &out)
}
