//! Flags of every command that computes, and of every peer.

use std::net::SocketAddr;
use std::num::{NonZeroU16, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use shoal_engine::{DeviceChoice, Devices, EngineError, threads_of_each};
use shoal_protocol::message::StageChoice;
use shoal_protocol::plain_name::{IslandName, PeerName};
use shoal_protocol::units::{Bytes, Price};
use shoal_scheduler::coordinator::placing::rebalance::Rebalance;

use super::duration::{parse_duration, parse_duration_or_none};
use super::{HttpAddress, default_data_dir};
use crate::bucket::ArchivePlace;
use crate::driver::{Leaving, PackingMode, ResourceLimits, ScoreCommand};
use crate::network::{Congestion, LinkOptions};
use crate::observers::EventSink;

/// More threads than any machine has processors for; libtorch would start them all.
const THREADS: usize = 1024;

/// The forms of `--stage`.
const STAGE_FORMS: &str = "stages are `auto`, `auto:N` for N in a row at most, `all`, `none`, a number from 0, or the first and the last as 0-3";

/// The stages that a peer wants to host.
#[derive(Debug, Clone, Copy)]
struct StageWish {
    choice: StageChoice,
    /// How many in a row the coordinator may choose at most.
    longest: NonZeroU16,
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
    let threads = text.parse().ok().filter(|threads: &NonZeroUsize| threads.get() <= THREADS);
    threads.ok_or_else(|| format!("threads are a number from 1 to {THREADS}"))
}

/// What the process computes with.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct ComputeArgs {
    /// Devices, each of which runs microbatches of its own or, with `model.slices`, its part of all: `auto`,
    /// `cpu`, `cuda:N`, several GPUs as `cuda:0,cuda:1`, `all` for every GPU, or `cpu:N` for N workers that share
    /// the threads.
    #[arg(long, value_name = "DEVICES", default_value = "auto", overrides_with = "device")]
    device: Devices,
    /// Number of processor threads for computation; default: all.
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    threads: Option<NonZeroUsize>,
    /// Write the events of the run to this file as lines of JSON; `-` is stdout.
    #[arg(long, value_name = "PATH")]
    events: Option<EventSink>,
    /// Write loss, learning rate, gradient norm and throughput of each step to this folder, for
    /// TensorBoard; one process at a time.
    #[arg(long, value_name = "DIR")]
    tensorboard: Option<PathBuf>,
    /// Price of this machine for an hour, in any currency that all peers share. Report, status and web page
    /// then have the cost of the run, and the tokens for a unit of it.
    #[arg(long, value_name = "PER_HOUR")]
    price: Option<Price>,
}

/// What the process computes with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComputeOptions {
    /// What to compute on.
    pub devices: Devices,
    /// Processor threads of all devices.
    pub threads: NonZeroUsize,
    /// Where the typed events go, if anywhere.
    pub events: Option<EventSink>,
    /// The folder for TensorBoard's event files, if they are written.
    pub tensorboard: Option<PathBuf>,
    /// The price of the machine, if it is known.
    pub price: Option<Price>,
}

impl From<ComputeArgs> for ComputeOptions {
    fn from(args: ComputeArgs) -> Self {
        let all = || std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        Self {
            devices: args.device,
            threads: args.threads.unwrap_or_else(all),
            events: args.events,
            tensorboard: args.tensorboard,
            price: args.price,
        }
    }
}

impl ComputeOptions {
    /// The devices one by one, and the processor threads of each.
    ///
    /// # Errors
    /// When every GPU is to be used and none works.
    pub fn each_device(&self) -> Result<(Vec<DeviceChoice>, usize), EngineError> {
        let devices = self.devices.resolve()?;
        let threads = threads_of_each(self.threads.get(), devices.len());
        Ok((devices, threads))
    }
}

/// What `start` and `join` have in common.
#[derive(Debug, Clone, Args)]
pub struct PeerArgs {
    /// Folder for the peer's identity and files; one process at a time.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    data_dir: PathBuf,
    /// HTTP address, IP:PORT, of the web page, /status, /metrics, /livez and /readyz. By default only this
    /// machine can connect; `none` turns it off.
    #[arg(long, visible_alias = "metrics", value_name = "ADDR", default_value_t = HttpAddress::default())]
    http: HttpAddress,
    /// Further name of this machine by which browsers may ask for the web page and /status, as a reverse proxy passes
    /// it on; once for each. IP addresses, localhost and names without a dot need none.
    #[arg(long = "http-host", value_name = "NAME")]
    http_hosts: Vec<String>,
    /// Stages to host: `auto` takes those with the least throughput, as many in a row as make steps shortest and
    /// memory holds, and `auto:N` at most N; `none` computes nothing (with --anchor or --archive; with neither, the
    /// peer observes). Chosen stages that memory does not hold at once are swapped.
    #[arg(long, value_name = "auto|auto:N|N|A-B|all|none", default_value = "auto", value_parser = parse_stage)]
    stage: StageWish,
    /// Name of this peer, for people: in status, web page, events and metrics; default: the machine's host name.
    #[arg(long, value_name = "NAME")]
    name: Option<PeerName>,
    /// Name of the island of peers with fast links to each other that this peer is in. Peers of one island sum
    /// gradients among themselves, so that they cross the slow links between islands once.
    #[arg(long, value_name = "NAME")]
    island: Option<IslandName>,
    #[command(flatten)]
    compute: ComputeArgs,
    /// Memory limit (as 8GiB), without libtorch itself; default: the free memory.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// Memory limit of a GPU, without libtorch itself; default: nine tenths of what is free. If it does not hold
    /// the state of the chosen stages, that is in the machine's memory, and weights are on the device while passes read
    /// them.
    #[arg(long, value_name = "SIZE")]
    device_memory: Option<Bytes>,
    /// Memory for the output log of the open step (data that may be sent again); the rest of the log is on
    /// disk.
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    log_memory: Bytes,
    /// Disk for shards of the data that no step reads soon; a host of the first stage removes them beyond that.
    #[arg(long, value_name = "SIZE", default_value = "4GiB")]
    data_cache: Bytes,
    /// Congestion control of connections.
    #[arg(long, value_enum, default_value_t = Congestion::Tolerant)]
    congestion: Congestion,
    /// Lossless compression of tensors: `auto` uses what a measurement shows to arrive soonest on each
    /// link.
    #[arg(long, value_enum, default_value_t = PackingMode::Auto)]
    packing: PackingMode,
    /// Disable discovery by multicast on the local network.
    #[arg(long)]
    no_mdns: bool,
    /// Do not ask the router (UPnP) to forward a port to this peer.
    #[arg(long)]
    no_upnp: bool,
    /// Replicate the run's log as an anchor: with three or five anchors the run survives the death of any
    /// one, the coordinator included. `start` always does.
    #[arg(long)]
    anchor: bool,
    /// Archive every complete checkpoint in this folder or bucket (s3://BUCKET/PATH, gs://..., az://...); `checkpoint/`
    /// is the model. A run whose disks are all lost continues from it.
    #[arg(long, value_name = "DIR|URL")]
    archive: Option<ArchivePlace>,
    /// Longest time without progress after which the upload of a checkpoint to a bucket is given up.
    #[arg(long, value_name = "TIME", default_value = "10min", value_parser = parse_duration)]
    archive_patience: Duration,
    /// Shell command that scores each whole checkpoint: it gets its folder as $1 and SHOAL_CHECKPOINT, its version as
    /// SHOAL_VERSION, and prints a JSON object of numbers as its last line. Status, web page, metrics and events of this
    /// peer have the numbers. A peer without an archive, such as an observer, fetches checkpoints for it.
    #[arg(long, value_name = "CMD")]
    on_checkpoint: Option<String>,
    /// Longest time of that command for one checkpoint.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    on_checkpoint_limit: Duration,
    /// Web server with prepared data (https://HOST/PATH of a copy of its folder), asked for shards before other peers;
    /// repeatable.
    #[arg(long = "mirror", value_name = "URL")]
    mirrors: Vec<String>,
    /// Leave in order when this file appears (a preemption notice).
    #[arg(long, value_name = "PATH")]
    preempt_file: Option<PathBuf>,
    /// Longest time to leave in order (SIGTERM, SIGINT, --preempt-file).
    #[arg(long, value_name = "TIME", default_value = "25s", value_parser = parse_duration)]
    drain_timeout: Duration,
    /// Interval at which this peer, as the coordinator, compares the stages and moves peers where that
    /// makes the swarm faster; also soon after peers joined or left; `none`: never.
    #[arg(long, value_name = "TIME", default_value = "1min", value_parser = parse_duration_or_none)]
    rebalance: Duration,
    /// How long stages may be without a host before this peer, as the coordinator, gives them to peers beside their own,
    /// which then swap what their memory does not hold.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    extend_after: Duration,
    /// Milliseconds to wait in each pass over a microbatch, to model a slow peer.
    #[arg(long, value_name = "MS", default_value_t = 0, hide = true)]
    slow_down: u64,
}

/// What `start` and `join` have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerOptions {
    /// Where the peer keeps its identity and its files; the peer locks it.
    pub data_dir: PathBuf,
    /// How to open its links.
    pub links: LinkOptions,
    /// Where it is shown over HTTP, if anywhere.
    pub http: HttpAddress,
    /// Further names by which it may be asked there.
    pub http_hosts: Vec<String>,
    /// Which stages to host.
    pub stage: StageChoice,
    /// How many stages in a row the coordinator may choose at most.
    pub longest: u16,
    /// Its name, for people.
    pub name: Option<PeerName>,
    /// The island of peers that it is in, if it is in one.
    pub island: Option<IslandName>,
    /// What to compute with, and where events go.
    pub compute: ComputeOptions,
    /// How much of the machine to use.
    pub limits: ResourceLimits,
    /// How tensors are made smaller for links.
    pub packing: PackingMode,
    /// Whether to be an anchor.
    pub anchor: bool,
    /// Gets every checkpoint whole, if there is to be such a place.
    pub archive: Option<ArchivePlace>,
    /// How long an upload makes no progress before it is given up.
    pub archive_patience: Duration,
    /// Scores each whole checkpoint.
    pub on_checkpoint: Option<ScoreCommand>,
    /// Web servers with prepared data.
    pub mirrors: Vec<String>,
    /// When and how to leave before the run is over.
    pub leaving: Leaving,
    /// When members change their stages, while this peer is the coordinator.
    pub rebalance: Rebalance,
    /// How long stages may be without a host before members take them beside their own, likewise.
    pub extend_after: Duration,
    /// Waited in each pass (a forward or a backward) over a microbatch, to model a slow peer.
    pub slow_down: Duration,
}

/// The name of the machine, without its domain.
fn host_name() -> Option<PeerName> {
    let system = nix::sys::utsname::uname().ok()?;
    PeerName::nearest(system.nodename().to_str()?.split('.').next()?)
}

impl PeerArgs {
    pub(super) fn options(self, listen: Vec<SocketAddr>) -> PeerOptions {
        PeerOptions {
            data_dir: self.data_dir,
            links: LinkOptions {
                listen,
                congestion: self.congestion,
                mdns: !self.no_mdns,
                upnp: !self.no_upnp,
            },
            http: self.http,
            http_hosts: self.http_hosts,
            stage: self.stage.choice,
            longest: self.stage.longest.get(),
            name: self.name.or_else(host_name),
            island: self.island,
            compute: self.compute.into(),
            limits: ResourceLimits {
                memory: self.memory,
                device_memory: self.device_memory,
                log_memory: self.log_memory,
                data_cache: self.data_cache,
            },
            packing: self.packing,
            anchor: self.anchor,
            archive: self.archive,
            archive_patience: self.archive_patience,
            on_checkpoint: self
                .on_checkpoint
                .map(|command| ScoreCommand { command, limit: self.on_checkpoint_limit }),
            mirrors: self.mirrors,
            leaving: Leaving { preempt_file: self.preempt_file, drain_timeout: self.drain_timeout },
            rebalance: Rebalance::every_so_often(self.rebalance),
            extend_after: self.extend_after,
            slow_down: Duration::from_millis(self.slow_down),
        }
    }
}
