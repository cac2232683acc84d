//! What a peer is set up with, and the office that it holds in its run.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use shoal_engine::DeviceChoice;
use shoal_metrics::Metrics;
use shoal_protocol::ids::Member;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::StageChoice;
use shoal_protocol::net::transport::{Transport, TransportEvent};
use shoal_scheduler::rebalance::Rebalance;
use tokio::sync::mpsc;

use super::home::Files;
use super::packer::PackingMode;
use super::room::RoomLimits;
use crate::port_map::PortMap;

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
    /// How much of the machine it may use.
    pub room: RoomLimits,
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
    /// Whether that is served, so that it is worth while to measure what only it says.
    pub watched: bool,
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
    /// The port that a router passes on.
    pub(crate) port_map: PortMap,
    /// How tensors are made smaller for the links.
    pub packing: PackingMode,
}

/// What a peer does for its run besides hosting stages.
pub struct Office {
    /// Its part in keeping the log, if it has one.
    pub anchor: Option<AnchorPart>,
    /// Members that the first step waits for, should it keep the run then.
    pub wait_for: usize,
    /// When members change their stages, should it keep the run.
    pub rebalance: Rebalance,
    /// Gets `checkpoint/` and, along the way, `checkpoints/`, if it archives.
    pub archive: Option<PathBuf>,
    /// Whom it takes for the run's keeper at first; it asks nobody where it founds the run.
    pub coordinator: Option<Member>,
}

/// How an anchor begins where it has no log yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnchorPart {
    /// With the run.
    Founds,
    /// When another adds it.
    Joins,
}
