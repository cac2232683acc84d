//! The flags of `shoal demo`.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use shoal_engine::Devices;
use shoal_protocol::codec::Codec;
use shoal_protocol::manifest::Dtype;
use shoal_protocol::units::{Bytes, Price};

use super::duration::parse_duration;

/// The dtype of the computation, as typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DtypeChoice {
    /// 32-bit.
    F32,
    /// 16-bit.
    Bf16,
}

impl From<DtypeChoice> for Dtype {
    fn from(choice: DtypeChoice) -> Self {
        match choice {
            DtypeChoice::F32 => Self::F32,
            DtypeChoice::Bf16 => Self::Bf16,
        }
    }
}

/// `shoal demo`
#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// Number of processes.
    #[arg(long, value_name = "N", default_value = "4")]
    pub peers: NonZeroUsize,
    /// Number of pipeline stages; default: 2, or 1 with --workers.
    #[arg(long, value_name = "N")]
    pub stages: Option<u16>,
    /// Train virtual workers that sync now and then: each at one peer, or with --stages at several.
    #[arg(long, value_name = "N", conflicts_with = "staleness")]
    pub workers: Option<u32>,
    /// Steps of a virtual worker between two syncs.
    #[arg(long, value_name = "STEPS", default_value_t = 10, requires = "workers")]
    pub every: u32,
    /// Steps to run while the previous sync is in flight.
    #[arg(long, value_name = "STEPS", default_value_t = 0, requires = "workers")]
    pub overlap: u32,
    /// Number of steps (optimizer updates); 0 writes the initial checkpoint.
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// A text file or a folder of text files; default: Shoal's own sources and documents.
    #[arg(long, value_name = "PATH")]
    pub data: Option<PathBuf>,
    /// Seed of the initial weights and of the order of samples.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Dtype of the computation.
    #[arg(long, value_enum)]
    pub dtype: Option<DtypeChoice>,
    /// Codec between stages: f32, bf16, f16, int8, int4 or fp8, the last three optionally with a block
    /// size as in int8:1024; default: the dtype.
    #[arg(long, value_name = "CODEC")]
    pub codec: Option<Codec>,
    /// Number of updates that the weights of a step may lack: with 1, passes do not wait for the
    /// all-reduce.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub staleness: u8,
    /// Folder for all results; the folder of an earlier demo is replaced.
    #[arg(long, value_name = "DIR", default_value = "demo")]
    pub out: PathBuf,
    /// Devices of each peer: `auto`, `cpu`, `cuda:N`, several GPUs as `cuda:0,cuda:1`, `all` for every GPU, or
    /// `cpu:N` for N workers that share the threads.
    #[arg(long, value_name = "DEVICES", default_value = "cpu")]
    pub device: Devices,
    /// Memory limit of each peer (as 64MiB), without libtorch itself; default: the free memory. Stages that it does not
    /// hold at once are swapped. The reference has no limit.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<Bytes>,
    /// Memory limit of each peer's GPU, without libtorch itself; default: nine tenths of what is free. If it does
    /// not hold a peer's stages, their weights are on it while passes read them.
    #[arg(long, value_name = "SIZE")]
    pub device_memory: Option<Bytes>,
    /// Number of anchors, which replicate the run's log: with three, the first peer may be killed too.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub anchors: usize,
    /// Kill a random peer (`kill -9`) about every TIME, and start another. With fewer than three
    /// anchors the first peer is spared.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub kill_every: Option<Duration>,
    /// Write loss, learning rate, gradient norm and throughput of each step of the swarm to this folder,
    /// for TensorBoard.
    #[arg(long, value_name = "DIR")]
    pub tensorboard: Option<PathBuf>,
    /// Price of each peer for an hour, in any currency. The report then has the cost of the run, and the
    /// tokens for a unit of it.
    #[arg(long, value_name = "PER_HOUR")]
    pub price: Option<Price>,
    /// Skip the training of the reference.
    #[arg(long)]
    pub no_reference: bool,
    /// Slow down peer INDEX (from 0) by MS milliseconds a pass.
    #[arg(long, value_name = "INDEX=MS", hide = true)]
    pub slow_peer: Vec<SlowPeer>,
}

/// A peer of the demo that is slowed artificially.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlowPeer {
    /// The index of the peer, from 0.
    pub index: usize,
    /// Milliseconds waited in each pass.
    pub milliseconds: u64,
}

impl FromStr for SlowPeer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.split_once('=')
            .and_then(|(index, milliseconds)| {
                Some(Self { index: index.parse().ok()?, milliseconds: milliseconds.parse().ok()? })
            })
            .ok_or_else(|| "a slow peer is INDEX=MS, two whole numbers".to_owned())
    }
}
