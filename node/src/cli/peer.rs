//! Flags of every command that computes, and of every peer.

use std::net::SocketAddr;
use std::num::{NonZeroU16, NonZeroUsize, ParseIntError};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use shoal_engine::{Devices, EngineError, threads_of_each};
use shoal_protocol::message::StageChoice;
use shoal_protocol::plain_name::{IslandName, PeerName};
use shoal_protocol::units::{Bytes, Price};
use shoal_scheduler::coordinator::placing::rebalance::Rebalance;

use super::duration::{parse_duration, parse_duration_or_none};
use super::{HttpAddress, default_data_dir};
use crate::bucket::ArchivePlace;
use crate::driver::{Leaving, PackingMode, PeerDevices, ResourceLimits, ScoreCommand};
use crate::network::{Congestion, LinkOptions};
use crate::observers::EventSink;

/// More threads than any machine has processors for; libtorch would start them all.
const THREADS: usize = 1024;

/// The forms of `--stage`.
const STAGE_FORMS: &str = "stages are `auto`, `auto:N` for N in a row at most, `all`, `none`, a number from 0, or the first and the last as 0-3";

/// The stages that a peer wants to host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageWish {
    /// Which.
    pub choice: StageChoice,
    /// How many in a row the coordinator may choose at most.
    pub longest: NonZeroU16,
}

/// Reads which stages a peer wants to host.
fn parse_stage(text: &str) -> Result<StageWish, &'static str> {
    let choice = match text.split_once(':').map_or(text, |(choice, _)| choice) {
        "auto" => StageChoice::Auto,
        "all" => StageChoice::All,
        "none" => StageChoice::None,
        span => span.parse().map(StageChoice::Span).map_err(|_| STAGE_FORMS)?,
    };
    let longest = match text.split_once(':') {
        None => NonZeroU16::MAX,
        Some(("auto", longest)) => longest.parse().map_err(|_| STAGE_FORMS)?,
        Some(_) => return Err(STAGE_FORMS),
    };
    Ok(StageWish { choice, longest })
}

/// Reads a number of threads.
fn parse_threads(text: &str) -> Result<NonZeroUsize, String> {
    if text == "all" {
        return Ok(std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN));
    }
    let threads = text.parse().ok().filter(|threads: &NonZeroUsize| threads.get() <= THREADS);
    threads.ok_or_else(|| format!("threads are a number from 1 to {THREADS}, or `all`"))
}

/// Reads when members change their stages.
fn parse_rebalance(text: &str) -> Result<Rebalance, String> {
    parse_duration_or_none(text).map(Rebalance::every_so_often)
}

/// Reads a number of milliseconds.
fn parse_milliseconds(text: &str) -> Result<Duration, ParseIntError> {
    text.parse().map(Duration::from_millis)
}

/// What the process computes with.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct ComputeArgs {
    /// Devices, each of which runs microbatches of its own or, with `model.slices`, its part of all: `auto`,
    /// `cpu`, `cuda:N`, several GPUs as `cuda:0,cuda:1`, `all` for every GPU, or `cpu:N` for N workers that share
    /// the threads.
    #[arg(long, value_name = "DEVICES", default_value = "auto", overrides_with = "device")]
    pub device: Devices,
    /// Each of several devices has some of the peer's stages, in turn, and computes all of their passes (pipeline
    /// parallelism), in place of its part of the passes of all stages.
    #[arg(long)]
    pub pipeline: bool,
    /// Number of processor threads for computation, or `all`.
    #[arg(long, value_name = "N", value_parser = parse_threads, default_value = "all")]
    pub threads: NonZeroUsize,
    /// Write the events of the run to this file as lines of JSON; `-` is stdout.
    #[arg(long, value_name = "PATH")]
    pub events: Option<EventSink>,
    /// Write loss, learning rate, gradient norm and throughput of each step to this folder, for
    /// TensorBoard; one process at a time.
    #[arg(long, value_name = "DIR")]
    pub tensorboard: Option<PathBuf>,
    /// Price of this machine for an hour, in any currency that all peers share. Report, status and web page
    /// then have the cost of the run, and the tokens for a unit of it.
    #[arg(long, value_name = "PER_HOUR")]
    pub price: Option<Price>,
}

impl ComputeArgs {
    /// The devices one by one, and the processor threads of each.
    ///
    /// # Errors
    /// When every GPU is to be used and none works.
    pub fn devices(&self) -> Result<PeerDevices, EngineError> {
        let each = self.device.resolve()?;
        let threads = threads_of_each(self.threads.get(), each.len());
        Ok(PeerDevices { each, threads, divide_stages: self.pipeline })
    }
}

/// What `start` and `join` have in common.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct PeerArgs {
    /// Folder for the peer's identity and files; one process at a time.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    pub data_dir: PathBuf,
    /// HTTP address, IP:PORT, of the web page, /status, /metrics, /livez and /readyz. By default only this
    /// machine can connect; `none` turns it off.
    #[arg(long, visible_alias = "metrics", value_name = "ADDR", default_value_t = HttpAddress::default())]
    pub http: HttpAddress,
    /// Further name of this machine by which browsers may ask for the web page and /status, as a reverse proxy passes
    /// it on; once for each. IP addresses, localhost and names without a dot need none.
    #[arg(long = "http-host", value_name = "NAME")]
    pub http_hosts: Vec<String>,
    /// Stages to host: `auto` takes those with the least throughput, as many in a row as make steps shortest and
    /// memory holds, and `auto:N` at most N; `none` computes nothing (with --anchor or --archive; with neither, the
    /// peer observes). Chosen stages that memory does not hold at once are swapped.
    #[arg(long, value_name = "auto|auto:N|N|A-B|all|none", default_value = "auto", value_parser = parse_stage)]
    pub stage: StageWish,
    /// Name of this peer, for people: in status, web page, events and metrics; default: the machine's host name.
    #[arg(long, value_name = "NAME")]
    pub name: Option<PeerName>,
    /// Name of the island of peers with fast links to each other that this peer is in. Peers of one island sum
    /// gradients among themselves, so that they cross the slow links between islands once.
    #[arg(long, value_name = "NAME")]
    pub island: Option<IslandName>,
    /// What it computes with, and where events go.
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// Memory limit (as 8GiB), without libtorch itself; default: the free memory.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<Bytes>,
    /// Memory limit of a GPU, without libtorch itself; default: nine tenths of what is free. If it does not hold
    /// the state of the chosen stages, that is in the machine's memory, and weights are on the device while passes read
    /// them.
    #[arg(long, value_name = "SIZE")]
    pub device_memory: Option<Bytes>,
    /// Memory for the output log of the open step (data that may be sent again); the rest of the log is on
    /// disk.
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub log_memory: Bytes,
    /// Disk for shards of the data that no step reads soon; a host of the first stage removes them beyond that.
    #[arg(long, value_name = "SIZE", default_value = "4GiB")]
    pub data_cache: Bytes,
    /// Congestion control of connections.
    #[arg(long, value_enum, default_value_t = Congestion::Tolerant)]
    pub congestion: Congestion,
    /// Lossless compression of tensors: `auto` uses what a measurement shows to arrive soonest on each
    /// link.
    #[arg(long, value_enum, default_value_t = PackingMode::Auto)]
    pub packing: PackingMode,
    /// Disable discovery by multicast on the local network.
    #[arg(long)]
    pub no_mdns: bool,
    /// Do not ask the router (UPnP) to forward a port to this peer.
    #[arg(long)]
    pub no_upnp: bool,
    /// Replicate the run's log as an anchor: with three or five anchors the run survives the death of any
    /// one, the coordinator included. `start` always does.
    #[arg(long)]
    pub anchor: bool,
    /// Archive every complete checkpoint in this folder or bucket (s3://BUCKET/PATH, gs://..., az://...); `checkpoint/`
    /// is the model. A run whose disks are all lost continues from it.
    #[arg(long, value_name = "DIR|URL")]
    pub archive: Option<ArchivePlace>,
    /// Longest time without progress after which the upload of a checkpoint to a bucket is given up.
    #[arg(long, value_name = "TIME", default_value = "10min", value_parser = parse_duration)]
    pub archive_patience: Duration,
    /// Shell command that scores each whole checkpoint: it gets its folder as $1 and SHOAL_CHECKPOINT, its version as
    /// SHOAL_VERSION, and prints a JSON object of numbers as its last line. Status, web page, metrics and events of this
    /// peer have the numbers. A peer without an archive, such as an observer, fetches checkpoints for it.
    #[arg(long, value_name = "CMD")]
    pub on_checkpoint: Option<String>,
    /// Longest time of that command for one checkpoint.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    pub on_checkpoint_limit: Duration,
    /// Web server with prepared data (https://HOST/PATH of a copy of its folder), asked for shards before other peers;
    /// repeatable.
    #[arg(long = "mirror", value_name = "URL")]
    pub mirrors: Vec<String>,
    /// Leave in order when this file appears (a preemption notice).
    #[arg(long, value_name = "PATH")]
    pub preempt_file: Option<PathBuf>,
    /// Longest time to leave in order (SIGTERM, SIGINT, --preempt-file).
    #[arg(long, value_name = "TIME", default_value = "25s", value_parser = parse_duration)]
    pub drain_timeout: Duration,
    /// Interval at which this peer, as the coordinator, compares the stages and moves peers where that
    /// makes the swarm faster; also soon after peers joined or left; `none`: never.
    #[arg(long, value_name = "TIME", default_value = "1min", value_parser = parse_rebalance)]
    pub rebalance: Rebalance,
    /// How long stages may be without a host before this peer, as the coordinator, gives them to peers beside their own,
    /// which then swap what their memory does not hold.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    pub extend_after: Duration,
    /// Milliseconds to wait in each pass over a microbatch, to model a slow peer.
    #[arg(long, value_name = "MS", default_value = "0", value_parser = parse_milliseconds, hide = true)]
    pub slow_down: Duration,
}

/// The name of the machine, without its domain.
fn host_name() -> Option<PeerName> {
    let system = nix::sys::utsname::uname().ok()?;
    PeerName::nearest(system.nodename().to_str()?.split('.').next()?)
}

impl PeerArgs {
    /// How its links are opened, at these addresses.
    #[must_use]
    pub fn links(&self, listen: Vec<SocketAddr>) -> LinkOptions {
        let Self { congestion, no_mdns, no_upnp, .. } = *self;
        LinkOptions { listen, congestion, mdns: !no_mdns, upnp: !no_upnp }
    }

    /// Its name, or that of the machine.
    #[must_use]
    pub fn title(&self) -> Option<PeerName> {
        self.name.clone().or_else(host_name)
    }

    /// The part of the machine that it may use.
    #[must_use]
    pub fn limits(&self) -> ResourceLimits {
        let Self { memory, device_memory, log_memory, data_cache, .. } = *self;
        ResourceLimits { memory, device_memory, log_memory, data_cache }
    }

    /// What scores each whole checkpoint, if anything does.
    #[must_use]
    pub fn score_command(&self) -> Option<ScoreCommand> {
        let command = self.on_checkpoint.clone()?;
        Some(ScoreCommand { command, limit: self.on_checkpoint_limit })
    }

    /// When and how it leaves before the run is over.
    #[must_use]
    pub fn leaving(&self) -> Leaving {
        Leaving { preempt_file: self.preempt_file.clone(), drain_timeout: self.drain_timeout }
    }
}
