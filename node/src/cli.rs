//! The command line: flags as they are typed, and their values once they are checked.
//!
//! Clap fills a `...Args` struct for each command. Commands that take part in a run get a plain
//! `...Options` struct made from it. A type that a flag parses into lives beside its user: congestion
//! control in [`crate::network`], packing and limits in [`crate::driver`]. No module below the commands
//! imports this one.

mod admission;
mod checkpoint;
mod chunk;
mod data;
mod demo;
mod doctor;
mod duration;
mod finetune;
mod generate;
mod model;
mod peer;
mod plan;
mod settings;
mod simulate;
pub(crate) mod watch;

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

pub use admission::{
    AnchorCommand, AnchorRemoveArgs, AuditArgs, BanArgs, InviteAllowArgs, InviteCommand,
    InviteLsArgs, InviteNewArgs, InviteRevokeArgs, Invited,
};
pub use checkpoint::{
    CheckpointArgs, CheckpointCommand, FetchArgs, FetchSource, ReshapeArgs, VerifyArgs,
};
pub use chunk::{ChunkCommand, ChunkGetArgs, ChunkLsArgs, ChunkVerifyArgs};
use clap::{Args, Parser, Subcommand};
pub use data::{DataCommand, DataPrepareArgs, DataReferenceArgs, DataShowArgs, DataStatsArgs};
pub use demo::{DemoArgs, DtypeChoice, SlowPeer};
pub use doctor::DoctorArgs;
pub use finetune::FinetuneArgs;
pub use generate::{ChatArgs, GenerateArgs, SamplingArgs};
pub use model::{DtypeArg, ExportArgs, ImportArgs, PushArgs};
pub use peer::{ComputeArgs, PeerArgs, StageWish};
pub use plan::{PlanArgs, PlanOrder};
pub use settings::{Refusal, parse};
pub use shoal_engine::Devices;
pub use shoal_protocol::message::StageChoice;
use shoal_protocol::units::Bytes;
pub use simulate::{Seeds, SimulateArgs};
pub use watch::{HealthcheckArgs, HttpAddress, NodeArgs, PlotArgs, StatusArgs};

use crate::address::JoinAddress;
use crate::exit::Exit;
pub use crate::logging::LogFormat;
pub use crate::network::Congestion;
pub use crate::observers::EventSink;
use crate::outward_ip::listen_by_default;
use shoal_formats::config::loss_section::LossName;

/// Where a first peer listens unless told otherwise.
const DEFAULT_PORT: u16 = 7410;

/// Train one transformer over many machines that come and go.
#[derive(Debug, Parser)]
#[command(name = "shoal", version, disable_version_flag = true, after_help = Exit::HELP, max_term_width = 100)]
pub struct Cli {
    /// Format of log lines.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Filter of log lines on stderr: `level` or `target=level,...`; default: the variable `SHOAL_LOG`.
    #[arg(long, global = true, value_name = "FILTER")]
    pub log: Option<String>,
    /// Print the version; with -v also libtorch's, the processor's vectors and the kernels that MKL uses.
    #[arg(long, short = 'V', action = clap::ArgAction::Version)]
    version: Option<bool>,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a small model with several local processes and show the result.
    Demo(DemoArgs),
    /// Write a commented run configuration that trains as it is.
    Init(InitArgs),
    /// Fine-tune a model on data: import, prepare, init, start and export in one folder; goes on where it was interrupted.
    Finetune(FinetuneArgs),
    /// Import a model in Hugging Face's format, to start runs from it.
    Import(ImportArgs),
    /// Write the model of a checkpoint in Hugging Face's format.
    Export(ExportArgs),
    /// Upload an exported model to the Hugging Face Hub.
    Push(PushArgs),
    /// Start a run as its first peer.
    Start(StartArgs),
    /// Join a run.
    Join(JoinArgs),
    /// Manage invitations to a run, in the data directory of its issuer.
    #[command(subcommand)]
    Invite(InviteCommand),
    /// Remove anchors of a run that are gone for good, in the data directory of its issuer.
    #[command(subcommand)]
    Anchor(AnchorCommand),
    /// Check the evidence on which peers are out of a run, in the data directory of an anchor.
    Audit(AuditArgs),
    /// Ban a peer from a run and end its connections, in the data directory of the run's issuer.
    Ban(BanArgs),
    /// Lift the ban of a peer.
    Unban(BanArgs),
    /// Check whether this machine can join a run, and suggest fixes; exit code 1 if it cannot.
    Doctor(DoctorArgs),
    /// Print the status of a run, as a running peer of this machine sees it.
    Status(StatusArgs),
    /// Watch the status of a run in the terminal.
    Top(NodeArgs),
    /// Draw the loss curve of a run, from a running peer of this machine or from a file.
    Plot(PlotArgs),
    /// Check whether a running peer of this machine is healthy: exit code 0, else 1.
    Healthcheck(HealthcheckArgs),
    /// Train a run in one process without a network: the reference.
    Local(LocalArgs),
    /// Simulate a swarm with deaths, and print the result.
    Simulate(SimulateArgs),
    /// Plan which devices of a fleet host which stage, with reasons.
    Plan(PlanArgs),
    /// Prepare or inspect training data.
    #[command(subcommand)]
    Data(DataCommand),
    /// Inspect, verify or fetch a checkpoint.
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Inspect, verify or fetch the files that peers share.
    #[command(subcommand)]
    Chunk(ChunkCommand),
    /// Continue a text with a checkpoint or an imported model.
    Generate(GenerateArgs),
    /// Converse with a checkpoint or an imported model, by its chat template.
    ///
    /// Each line of stdin is a message. /reset starts a new conversation; /exit and the end of the input
    /// end the program.
    Chat(ChatArgs),
    /// Print this peer's id, and create it if there is none.
    Id(IdArgs),
    /// Print a completion script for a shell.
    Completion(CompletionArgs),
    /// Write a man page for each command.
    Man(ManArgs),
}

/// `shoal start`
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct StartArgs {
    /// The run's configuration; `shoal init` writes one.
    #[arg(value_name = "run.toml")]
    pub config: PathBuf,
    /// What `start` and `join` have in common.
    #[command(flatten)]
    pub peer: PeerArgs,
    /// Address to listen at, IP:PORT (port 0: any free port); repeatable. Default: 0.0.0.0:7410, or [::]:7410 on a
    /// machine without IPv4.
    #[arg(long, value_name = "ADDR")]
    pub listen: Vec<SocketAddr>,
    /// Write what others give to `shoal join`, a ticket or an address, into this file, once they can join.
    #[arg(long, value_name = "PATH")]
    pub address_file: Option<PathBuf>,
    /// Let everybody join who reaches this peer, whatever run.toml says: no tickets.
    #[arg(long)]
    pub open: bool,
    /// Let the peers that join with the printed ticket be anchors (`shoal join --anchor`).
    #[arg(long, conflicts_with = "open")]
    pub invite_anchors: bool,
    /// Number of members, this peer included, to wait for before the first step; default: until every stage is hosted.
    #[arg(long, value_name = "N")]
    pub wait_for: Option<NonZeroUsize>,
    /// Folder for `checkpoint/` and `report.json`; default: a folder of the run in the data directory.
    #[arg(short, long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// Where a peer listens.
fn listen_at(given: &[SocketAddr], port: u16) -> Vec<SocketAddr> {
    if given.is_empty() { vec![listen_by_default(port)] } else { given.to_vec() }
}

impl StartArgs {
    /// Where to listen.
    #[must_use]
    pub fn listen_at(&self) -> Vec<SocketAddr> {
        listen_at(&self.listen, DEFAULT_PORT)
    }
}

/// `shoal join`
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct JoinArgs {
    /// Address or ticket that `shoal start` printed, or `@PATH` of a file with it (waits for the file). Of several
    /// addresses, the first that answers is used.
    #[arg(value_name = "ADDRESS", required = true)]
    pub addresses: Vec<JoinAddress>,
    /// Watch the run without training: `shoal status`, `shoal top` and the web page of this peer show
    /// the swarm.
    #[arg(long, conflicts_with_all = ["stage", "anchor", "archive"])]
    pub observer: bool,
    /// Longest time to wait for a first peer that does not answer yet, or for the file with its address; `none`: one
    /// attempt.
    #[arg(long, value_name = "TIME", default_value = "5min", value_parser = duration::parse_duration_or_none)]
    pub wait: Duration,
    /// What `start` and `join` have in common.
    #[command(flatten)]
    pub peer: PeerArgs,
    /// Address to listen at, IP:PORT (port 0: any free port); repeatable. Default: any free port of every IPv4 address,
    /// or of every IPv6 address on a machine without IPv4.
    #[arg(long, value_name = "ADDR")]
    pub listen: Vec<SocketAddr>,
    /// Write the address for `shoal join` into this file, once others can join.
    #[arg(long, value_name = "PATH")]
    pub address_file: Option<PathBuf>,
}

impl JoinArgs {
    /// Where to listen.
    #[must_use]
    pub fn listen_at(&self) -> Vec<SocketAddr> {
        listen_at(&self.listen, 0)
    }

    /// Which stages to host.
    #[must_use]
    pub fn choice(&self) -> StageChoice {
        if self.observer { StageChoice::None } else { self.peer.stage.choice }
    }
}

/// `shoal local`
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct LocalArgs {
    /// The run's configuration.
    #[arg(value_name = "run.toml")]
    pub config: PathBuf,
    /// Folder for `checkpoint/` and `report.json`.
    #[arg(short, long, value_name = "DIR")]
    pub out: PathBuf,
    /// What it computes with, and where events go.
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// Memory limit (as 8GiB), without libtorch itself; default: the free memory. A model that takes more is
    /// swapped: weights, optimizer state and accumulators of most stages are in a file in the output folder.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<Bytes>,
    /// Memory limit of a GPU, without libtorch itself; default: nine tenths of what is free. If it does not hold
    /// the model's state, that is in the machine's memory, and weights are on the device while passes read them.
    #[arg(long, value_name = "SIZE")]
    pub device_memory: Option<Bytes>,
}

/// `shoal init`
#[derive(Debug, Clone, Args)]
pub struct InitArgs {
    /// File to write; must not exist.
    #[arg(short, long, value_name = "PATH", default_value = "run.toml")]
    pub out: PathBuf,
    /// Write over a file that exists.
    #[arg(long)]
    pub force: bool,
    /// Start from the weights of this base (`shoal import`), with values for fine-tuning.
    #[arg(long, value_name = "BASE")]
    pub from: Option<PathBuf>,
    /// Train adapters of this rank beside the frozen weights of the base (LoRA).
    #[arg(long, value_name = "RANK", requires = "from", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub lora: Option<u32>,
    /// Hold the frozen matrices in 4 bits (QLoRA).
    #[arg(long, requires = "lora")]
    pub nf4: bool,
    /// Data to train on: prepared data (`shoal data prepare`), or a text file or a folder of text files; of several prepared data sets, each with its weight (web=0.7 code=0.3).
    #[arg(long, value_name = "DATA", num_args = 1..)]
    pub data: Vec<String>,
    /// Train for this number of passes over prepared data, in steps of a size that suits it.
    #[arg(long, value_name = "N", requires = "data", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub epochs: Option<u32>,
    /// Loss to lower; default: cross_entropy, and dpo on pairs with a reference.
    #[arg(long, value_name = "LOSS", requires = "data", value_parser = finetune::losses())]
    pub loss: Option<LossName>,
}

/// `shoal id`
#[derive(Debug, Clone, Args)]
pub struct IdArgs {
    /// The peer's data directory.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    pub data_dir: PathBuf,
}

/// `shoal completion`
#[derive(Debug, Clone, Args)]
pub struct CompletionArgs {
    /// The shell.
    #[arg(value_name = "SHELL")]
    pub shell: clap_complete::Shell,
}

/// `shoal man`
#[derive(Debug, Clone, Args)]
pub struct ManArgs {
    /// Folder for the man pages, such as `~/.local/share/man/man1`; created if missing.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

/// `$SHOAL_DATA_DIR`, `$XDG_DATA_HOME/shoal`, `~/.local/share/shoal`, or `.shoal` here.
fn default_data_dir() -> PathBuf {
    let directory = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(chosen) = directory("SHOAL_DATA_DIR") {
        return PathBuf::from(chosen);
    }
    directory("XDG_DATA_HOME")
        .map(PathBuf::from)
        .or_else(|| directory("HOME").map(|home| PathBuf::from(home).join(".local/share")))
        .map_or_else(|| PathBuf::from(".shoal"), |base| base.join("shoal"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::driver::ResourceLimits;

    fn parse(line: &str) -> Command {
        Cli::try_parse_from(line.split(' ')).expect(line).command
    }

    #[test]
    fn definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn start_flags_become_options() {
        let Command::Start(args) = parse(
            "shoal start run.toml --stage all --listen 127.0.0.1:0 --listen [::1]:0 --threads 1 \
             --events - --price 0.35 --name gpu-7 --no-mdns --slow-down 5 --wait-for 3 --device cuda:1 --island us-east-1",
        ) else {
            panic!("another command")
        };
        assert_eq!(args.peer.stage.choice, StageChoice::All);
        let links = args.peer.links(args.listen_at());
        assert_eq!(links.listen.len(), 2);
        assert_eq!(args.peer.compute.threads.get(), 1);
        assert_eq!(args.peer.compute.device.to_string(), "cuda:1");
        assert_eq!(args.peer.compute.events, Some(EventSink::Stdout));
        assert_eq!(args.peer.compute.price.map(f64::from), Some(0.35));
        assert_eq!(args.peer.title().map(|name| name.to_string()).as_deref(), Some("gpu-7"));
        assert_eq!(
            args.peer.island.as_ref().map(|name| name.to_string()).as_deref(),
            Some("us-east-1")
        );
        assert!(!links.mdns);
        assert_eq!(args.peer.slow_down, Duration::from_millis(5));
        assert_eq!(args.peer.limits(), ResourceLimits::default());
        assert_eq!(args.wait_for.map(NonZeroUsize::get), Some(3));
    }

    #[test]
    fn an_archive_is_a_folder_or_a_bucket() {
        let place = |flags: &str| match parse(format!("shoal start run.toml {flags}").trim()) {
            Command::Start(args) => args.peer.archive.map(|p| p.to_string()),
            _ => panic!("another command"),
        };
        assert_eq!(place(""), None);
        assert_eq!(place("--archive some/folder").as_deref(), Some("some/folder"));
        assert_eq!(place("--archive s3://models/run/").as_deref(), Some("s3://models/run"));
        let fetched =
            |address: &str| match parse(&format!("shoal checkpoint fetch {address} -o model")) {
                Command::Checkpoint(CheckpointCommand::Fetch(args)) => args.source,
                _ => panic!("another command"),
            };
        assert!(matches!(fetched("gs://models"), FetchSource::Bucket(_)));
        assert!(matches!(fetched("@address"), FetchSource::Swarm(_)));
    }

    #[test]
    fn an_observer_hosts_nothing_and_peers_are_shown_to_their_own_machine() {
        let join = |line| match parse(line) {
            Command::Join(args) => args,
            _ => panic!("another command"),
        };
        let observer = join("shoal join @a --observer");
        assert_eq!(observer.choice(), StageChoice::None);
        assert!(observer.peer.http.0.is_some_and(|address| address.ip().is_loopback()));
        assert_eq!(join("shoal join @a --http none").peer.http, HttpAddress(None));
        let shown = join("shoal join @a --metrics 0.0.0.0:9464").peer.http;
        assert_eq!(shown, HttpAddress(Some(([0, 0, 0, 0], 9464).into())));
    }

    #[test]
    fn paths_of_any_bytes_are_taken() {
        use std::os::unix::ffi::OsStrExt as _;

        let path = std::ffi::OsStr::from_bytes(b"x\xff/y");
        for line in [
            "shoal checkpoint verify",
            "shoal generate --prompt a",
            "shoal chat",
            "shoal start run.toml --archive",
            "shoal local run.toml --out out --events",
        ] {
            let words = line.split(' ').map(std::ffi::OsStr::new).chain([path]);
            assert!(Cli::try_parse_from(words).is_ok(), "{line}");
        }
    }

    #[test]
    fn flags_that_mean_nothing_are_refused() {
        for line in [
            "shoal",
            "shoal train",
            "shoal start",
            "shoal start run.toml --stage last",
            "shoal start run.toml --device gpu",
            "shoal start run.toml --threads 0",
            "shoal start run.toml --threads 5000",
            "shoal start run.toml --listen localhost",
            "shoal join",
            "shoal join @a --on-checkpoint true --on-checkpoint-limit 0",
            "shoal join @a --observer --stage 1",
            "shoal join @a --observer --anchor",
            "shoal start run.toml --http localhost",
            "shoal status localhost",
            "shoal local run.toml",
            "shoal generate out --prompt a --temperature -1",
            "shoal generate out --prompt a --top-p 0",
            "shoal chat out --top-p 1.5",
            "shoal demo --peers 0",
            "shoal demo --dtype f16",
            "shoal demo --price -1",
            "shoal join @a --price inf",
            "shoal join @a --island two/words",
            "shoal join @a --name two/words",
            "shoal demo --slow-peer 1",
            "shoal start run.toml --archive ftp://models/a",
            "shoal join @a --archive s3://models//a",
            "shoal join @a --observer --archive s3://models/a",
            "shoal start run.toml --archive-patience 0",
            "shoal checkpoint verify s3://",
            "shoal checkpoint fetch https://models/a -o model",
            "shoal data show run.toml --step -1 --microbatch 0",
        ] {
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
