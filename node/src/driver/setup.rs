//! Everything that one peer needs to take part in a run.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use shoal_engine::{DeviceChoice, EngineError, passes_at_once};
use shoal_metrics::Metrics;
use shoal_protocol::ids::{Member, PeerId};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{Founding, StageChoice};
use shoal_protocol::net::transport::{Transport, TransportEvent};
use shoal_protocol::plain_name::{IslandName, PeerName};
use shoal_protocol::units::Price;
use shoal_scheduler::coordinator::placing::rebalance::Rebalance;
use tokio::sync::mpsc;

use super::archive::Archive;
use super::packer::PackingMode;
use super::resource_budget::ResourceLimits;
use super::score_queue::ScoreCommand;
use crate::data_dir::Files;
use crate::port_map::PortMap;

/// What a peer computes on.
#[derive(Debug, Clone)]
pub struct PeerDevices {
    /// The devices, at least one.
    pub each: Vec<DeviceChoice>,
    /// Processor threads of each.
    pub threads: usize,
    /// Whether they divide the stages of the peer, in place of the work of each stage.
    pub divide_stages: bool,
}

impl PeerDevices {
    /// The passes that they compute at the same time.
    ///
    /// # Errors
    /// If they can neither share the slices of a pass nor divide them.
    pub(crate) fn passes_at_once(&self, manifest: &Manifest) -> Result<usize, EngineError> {
        match self.divide_stages {
            true => Ok(self.each.len()),
            false => passes_at_once(manifest, self.each.len()),
        }
    }
}

/// Everything that one peer needs to take part in a run.
pub struct Setup {
    /// The run.
    pub manifest: Arc<Manifest>,
    /// This peer in this life.
    pub me: Member,
    /// The stages to host.
    pub choice: StageChoice,
    /// How many stages in a row the coordinator may choose at most.
    pub longest: u16,
    /// The devices to compute on.
    pub devices: PeerDevices,
    /// The price of the machine, if it is known.
    pub price: Option<Price>,
    /// The name of the peer's island, if it shares a fast network with others.
    pub island: Option<IslandName>,
    /// The peer's name, for people.
    pub name: Option<PeerName>,
    /// The part of the machine that the peer may use.
    pub limits: ResourceLimits,
    /// Extra time for each pass, to model a slow peer.
    pub slow_down: Duration,
    /// The folder for the peer's files.
    pub data_dir: PathBuf,
    /// The files offered to other peers, with the token file if it is here.
    pub files: Files,
    /// Web servers with prepared data, which are asked for shards before other peers.
    pub mirrors: Vec<String>,
    /// The links; `None` for a peer that is alone.
    pub network: Option<Network>,
    /// How the peer leaves before the run is over.
    pub leaving: Leaving,
    /// The tasks of the peer besides hosting stages.
    pub role: RoleSetup,
    /// The metrics of the process.
    pub metrics: Metrics,
    /// Whether the metrics are served, so that measurements for them alone are worth their time.
    pub watched: bool,
}

/// How a peer leaves before the run is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leaving {
    /// A file that appears when the machine is about to be taken away.
    pub preempt_file: Option<PathBuf>,
    /// The longest time for an orderly leave.
    pub drain_timeout: Duration,
}

/// The links of a peer that is not alone.
pub struct Network {
    /// The data plane.
    pub transport: Transport,
    /// Its events.
    pub events: mpsc::Receiver<TransportEvent>,
    /// The addresses at which other peers reach this one.
    pub addresses: Vec<SocketAddr>,
    /// The port that a router forwards.
    pub(crate) port_map: PortMap,
    /// Takes the addresses from which peers called, to remember them.
    pub(crate) seen: mpsc::Sender<(PeerId, SocketAddr)>,
    /// The compression of tensors for the links.
    pub packing: PackingMode,
}

/// The tasks of a peer besides hosting stages.
pub struct RoleSetup {
    /// How it begins as an anchor, if it is one.
    pub anchor: Option<AnchorStart>,
    /// The history to found, if the log is empty and the run continues from an archive.
    pub founding: Option<Founding>,
    /// Members that the first step waits for, if this peer is the coordinator then.
    pub wait_for: usize,
    /// When members change their stages, while this peer is the coordinator.
    pub rebalance: Rebalance,
    /// How long stages may be without a host before members take them beside their own, likewise.
    pub extend_after: Duration,
    /// The place of `checkpoint/` and the earlier `checkpoints/`, if it archives.
    pub archive: Option<Archive>,
    /// How long the upload of a checkpoint makes no progress before it is given up.
    pub archive_patience: Duration,
    /// Scores each checkpoint that arrives in the archive.
    pub on_checkpoint: Option<ScoreCommand>,
    /// The expected coordinator; `None` for the founder of the run.
    pub coordinator: Option<Member>,
}

/// How an anchor begins where it has no log yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnchorStart {
    /// It founds the log together with the run.
    Founds,
    /// It waits until the other anchors add it.
    Joins,
}
