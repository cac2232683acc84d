//! What a peer is set up with, and the office that it holds in its run.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use shoal_engine::DeviceChoice;
use shoal_metrics::Metrics;
use shoal_protocol::ids::{Member, Term};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::StageChoice;
use shoal_protocol::net::transport::{Transport, TransportEvent};
use shoal_scheduler::coordinator::{Coordinator, CoordinatorConfig};
use tokio::sync::mpsc;

use super::commit_log::CommitLog;
use super::home::Files;
use super::resume::resume;
use crate::progress;

/// After how long the coordinator says again what shows no effect.
const RETRY: Duration = Duration::from_secs(1);

/// After how long an all-reduce without a result is tried again, at first.
const PATIENCE: Duration = Duration::from_secs(30);

/// What one peer needs to take part in a run.
pub struct Setup {
    /// The run.
    pub manifest: Arc<Manifest>,
    /// This peer in this life.
    pub me: Member,
    /// The stages it wants to host.
    pub choice: StageChoice,
    /// What to compute on.
    pub device: DeviceChoice,
    /// Processor threads.
    pub threads: usize,
    /// Waited in each pass, to model a slow peer.
    pub slow_down: Duration,
    /// Where its files go.
    pub data_dir: PathBuf,
    /// What it offers to others; the token file too, if it has it.
    pub files: Files,
    /// The links; none when it is alone.
    pub network: Option<Network>,
    /// When and how it leaves.
    pub leaving: Leaving,
    /// What it does for the run beyond hosting stages.
    pub office: Office,
    /// What it tells Prometheus.
    pub metrics: Metrics,
}

/// When and how a peer leaves before the run is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leaving {
    /// A file whose appearance says that the machine is about to be taken away.
    pub preempt_file: Option<PathBuf>,
    /// How long leaving in order may take.
    pub drain_timeout: Duration,
}

/// The links of a peer that is not alone.
pub struct Network {
    /// The data plane.
    pub transport: Transport,
    /// What happens on it.
    pub events: mpsc::Receiver<TransportEvent>,
    /// Where others reach it.
    pub addresses: Vec<SocketAddr>,
}

/// A peer's part in the agreement.
pub enum Office {
    /// It keeps the ledger and the commit log, and brings checkpoints together.
    Coordinator {
        /// Its term.
        term: Term,
        /// Members to wait for before the first step.
        wait_for: usize,
        /// Gets `checkpoint/` and, along the way, `checkpoints/`.
        out: PathBuf,
    },
    /// It obeys this coordinator.
    Member {
        /// Who.
        coordinator: Member,
    },
}

/// The office that a peer holds, ready for work.
pub(super) struct Holding {
    pub(super) term: Term,
    /// Who keeps the ledger; perhaps this peer.
    pub(super) obeys: Member,
    pub(super) kept: Option<Kept>,
}

/// What belongs to the run that a peer keeps.
pub(super) struct Kept {
    pub(super) coordinator: Coordinator,
    pub(super) log: CommitLog,
    /// Where checkpoints go.
    pub(super) out: PathBuf,
    /// The last step was committed and saved before.
    pub(super) complete: bool,
}

impl Office {
    /// Takes the office up: who keeps the run reads what became of it before.
    pub(super) fn take_up(
        self,
        me: Member,
        manifest: &Arc<Manifest>,
        data_dir: &Path,
        files: &Files,
    ) -> anyhow::Result<Holding> {
        let (term, wait_for, out) = match self {
            Self::Member { coordinator } => {
                return Ok(Holding { term: Term(0), obeys: coordinator, kept: None });
            }
            Self::Coordinator { term, wait_for, out } => (term, wait_for, out),
        };
        let folder = data_dir.join("runs").join(manifest.run_id().to_string());
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("{} cannot be made", folder.display()))?;
        let (log, records) = CommitLog::open(&folder.join("commits"))?;
        let (era, resume) = resume(&records, manifest, &out, files);
        let (steps, mut complete) = (manifest.training.steps, false);
        if let Some(resume) = &resume {
            complete = resume.version.0 == steps && steps > 0;
            progress::say(&format!("goes on from version {} of {steps}", resume.version));
        }
        let coordinator = Coordinator::new(CoordinatorConfig {
            manifest: manifest.clone(),
            term,
            era,
            resume,
            wait_for,
            home: me.peer,
            retry: RETRY,
            patience: PATIENCE,
        });
        Ok(Holding { term, obeys: me, kept: Some(Kept { coordinator, log, out, complete }) })
    }
}
