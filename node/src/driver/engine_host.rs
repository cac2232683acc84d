//! The engine of this process: the thread that computes, and the tensors that it reads and makes.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use shoal_engine::{DeviceChoice, DeviceLinks, Island};
use shoal_protocol::ids::{Stage, StageSpan, Step};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::units::Bytes;
use shoal_scheduler::action::{PayloadId, Task};
use tokio::time::timeout;

use super::checkpoint_writer::PartWriter;
use super::context::Context;
use super::engine_thread::{EngineResources, EngineThread, Job};
use super::engine_waits::EngineWaits;
use super::job_report::JobDone;
use super::passes::Passes;
use super::payload::Payloads;
use super::resource_budget::ResourceBudget;
use super::resume::{FETCHED, STORED, part_folder};
use super::setup::PeerDevices;
use super::startup_probes::HostedRoom;

/// The longest wait for the end of the thread.
const CLOSING: Duration = Duration::from_secs(30);

/// Everything that the engine needs before its stages are known.
#[derive(Debug)]
pub(super) struct EngineSetup {
    pub(super) devices: PeerDevices,
    /// Extra time for each pass, to model a slow peer.
    pub(super) slow_down: Duration,
    pub(super) budget: ResourceBudget,
    pub(super) room: HostedRoom,
}

/// Owns the engine's thread and the tensors behind the scheduler's handles.
#[derive(Debug)]
pub(super) struct EngineHost {
    setup: EngineSetup,
    payloads: Payloads,
    /// Started with the admission to the run; never by a peer without stages.
    thread: Option<EngineThread>,
}

impl EngineHost {
    pub(super) fn new(setup: EngineSetup, manifest: &Manifest) -> Self {
        Self { setup, payloads: Payloads::new(manifest.audit.is_on()), thread: None }
    }

    pub(super) fn payloads(&self) -> &Payloads {
        &self.payloads
    }

    pub(super) fn budget(&self) -> &ResourceBudget {
        &self.setup.budget
    }

    /// Returns the memory that hosting these stages takes.
    pub(super) fn memory_for(&self, manifest: &Manifest, span: StageSpan) -> Bytes {
        self.setup.budget.memory_for(manifest, span, 1)
    }

    /// Starts the engine for these stages. It fetches missing files that the manifest names: the data for
    /// the first stage and, at the first version, those that the weights come from.
    ///
    /// # Errors
    /// When the disk has no room for the output log, or the system gives no thread.
    pub(super) fn start(
        &mut self,
        context: &Context,
        span: StageSpan,
        version: Step,
    ) -> anyhow::Result<()> {
        let EngineSetup { ref devices, slow_down, ref budget, ref room } = self.setup;
        let HostedRoom { most, tiers } = room.clone();
        let PeerDevices { each: devices, threads, divide_stages } = devices.clone();
        let spill = budget.spill_file(&context.manifest, span, most);
        let spill = spill.context("the disk has no room for the output log")?;
        self.payloads.spill_into(spill, budget.log_memory());
        let (manifest, payloads) = (context.manifest.clone(), self.payloads.clone());
        let own = |kind| part_folder(&context.data_dir, kind, context.manifest.run_id());
        let (stored, fetched) = (own(STORED), own(FETCHED));
        let (files, run_files) = (context.files.clone(), context.run_files());
        let make = move |waits: EngineWaits| {
            let samples = if span.contains(Stage(0)) {
                waits.wait(run_files.obtain_data())??;
                Some(run_files.open_samples(&waits)?)
            } else {
                None
            };
            let cached = tiers.lower.is_none();
            let mut engine = match divide_stages {
                true => Island::by_stage(&manifest, span, &devices, threads)?,
                false => Island::swapping(&manifest, span, (&devices, threads), tiers)?,
            };
            log_links(engine.links());
            log_kernels(&devices);
            for stage in span.stages() {
                let origin = run_files.obtain_origin(stage, version, true);
                engine.load(stage, &waits.wait(origin)??)?;
            }
            let passes = Passes { manifest: manifest.clone(), payloads, slow_down };
            let parts = PartWriter { manifest, stored, files, cached, failing: Arc::default() };
            Ok(EngineResources { engine, samples, run_files, waits, passes, parts, fetched })
        };
        self.thread = Some(EngineThread::start(make).context("no thread for the engine")?);
        Ok(())
    }

    /// Queues a task together with the tensors that it reads.
    pub(super) fn compute(&self, task: Task) {
        let ids: Vec<PayloadId> = match &task {
            Task::Forward { activation, .. } => activation.iter().copied().collect(),
            Task::Backward { gradient, .. } => gradient.iter().copied().collect(),
            Task::Export { parts, .. } | Task::Reduce { parts, .. } => parts.clone(),
            Task::Install { payload, .. } => vec![*payload],
            Task::Accumulate { .. }
            | Task::Discard { .. }
            | Task::FetchAhead { .. }
            | Task::Summarise { .. }
            | Task::SetSumsAside { .. }
            | Task::PrintSums { .. }
            | Task::PutSumsBack { .. }
            | Task::Apply { .. }
            | Task::Restore { .. }
            | Task::Leave { .. }
            | Task::Store { .. } => Vec::new(),
        };
        let inputs = ids.into_iter().map(|id| self.payloads.get(id)).collect();
        self.thread.as_ref().expect("a member has an engine").give(Job { task, inputs });
    }

    /// Waits for the next result of the engine; `None` after its thread panicked. Safe to cancel.
    pub(super) async fn next(&mut self) -> Option<JobDone> {
        match &mut self.thread {
            Some(thread) => thread.done().await,
            None => std::future::pending().await,
        }
    }

    /// Ends the thread, and waits until it has; not for a pass without end, or a disk that hangs.
    pub(super) async fn close(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if timeout(CLOSING, thread.close()).await.is_err() {
            tracing::warn!("the engine still computes or writes: its memory is free when it ends");
        }
    }
}

/// Says which GPUs compute with libtorch's kernels alone.
fn log_kernels(devices: &[DeviceChoice]) {
    for device in devices {
        if let Some(reason) = device.lacks_kernels() {
            tracing::warn!("{device} is slower than it could be: {reason}");
        }
    }
}

/// Says how GPUs that compute slices together exchange sums.
fn log_links(links: Option<&DeviceLinks>) {
    match links {
        None | Some(DeviceLinks::Memory) => {}
        Some(DeviceLinks::Nccl) => tracing::info!("the devices exchange sums by NCCL"),
        Some(DeviceLinks::Copies { reason }) => tracing::warn!(
            "the devices exchange sums by copies from one to the other, as NCCL does not work here: {reason}"
        ),
    }
}
