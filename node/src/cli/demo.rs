//! The flags of `shoal demo`.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use shoal_engine::DeviceChoice;
use shoal_protocol::codec::Codec;
use shoal_protocol::manifest::Dtype;

use super::parse_seconds;

/// Kind of number to compute in, as typed.
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
    /// Processes in the swarm.
    #[arg(long, value_name = "N", default_value = "4")]
    pub peers: NonZeroUsize,
    /// Pipeline stages.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub stages: u16,
    /// Optimizer updates; 0 writes the initial checkpoint.
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// A text file or a folder of them; else Shoal's own sources and documents.
    #[arg(long, value_name = "PATH")]
    pub data: Option<PathBuf>,
    /// Decides initial weights and the order of samples.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Kind of number to compute in.
    #[arg(long, value_enum)]
    pub dtype: Option<DtypeChoice>,
    /// What travels between stages: f32, bf16, f16, int8, int4 or fp8, the last three perhaps with a
    /// block as in int8:1024; else as the passes compute.
    #[arg(long, value_name = "CODEC")]
    pub codec: Option<Codec>,
    /// Updates that may be missing from the weights that a step reads: with 1 nothing waits for the
    /// all-reduce.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub staleness: u8,
    /// Folder for everything that comes of it; one of an earlier demo is replaced.
    #[arg(long, value_name = "DIR", default_value = "demo")]
    pub out: PathBuf,
    /// What each peer computes on: `auto`, `cpu` or `cuda:N`.
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceChoice,
    /// Peers that keep the run's log together: with three, the first may be killed as well.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub anchors: usize,
    /// Kill -9 a random peer about every so many seconds, and start another. With fewer than three
    /// anchors the first peer is left alone.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub kill_every: Option<Duration>,
    /// Do not train the reference that the swarm is compared with.
    #[arg(long)]
    pub no_reference: bool,
    /// Slow peer INDEX (from 0) down by MS milliseconds a pass.
    #[arg(long, value_name = "INDEX=MS", hide = true)]
    pub slow_peer: Vec<SlowPeer>,
}

/// A peer of the demo that is slowed artificially.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlowPeer {
    /// Which, from 0.
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
