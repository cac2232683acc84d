//! The flags of the commands about checkpoints: `shoal checkpoint` and `shoal generate`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::address::JoinAddress;

/// `shoal checkpoint`
#[derive(Debug, Clone, Subcommand)]
pub enum CheckpointCommand {
    /// Print the BLAKE3 hash over names, shapes, dtypes and bytes of the weights.
    Hash(CheckpointArgs),
    /// Check that every file and every weight is complete.
    Verify(CheckpointArgs),
    /// Fetch the newest checkpoint of a running swarm.
    Fetch(FetchArgs),
}

/// `shoal checkpoint fetch`
#[derive(Debug, Clone, Args)]
pub struct FetchArgs {
    /// Address of any peer of the run, as for `shoal join`, or `@PATH` of a file with it.
    #[arg(value_name = "ADDRESS")]
    pub address: JoinAddress,
    /// Folder for the checkpoint; an existing one is replaced.
    #[arg(short, long, value_name = "DIR")]
    pub out: PathBuf,
}

/// `shoal checkpoint hash` and `verify`
#[derive(Debug, Clone, Args)]
pub struct CheckpointArgs {
    /// The checkpoint's folder.
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
}

/// `shoal generate`
#[derive(Debug, Clone, Args)]
pub struct GenerateArgs {
    /// The checkpoint's folder.
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
    /// The text to continue.
    #[arg(long, value_name = "TEXT")]
    pub prompt: String,
    /// Number of tokens to add.
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub tokens: usize,
    /// Seed of the sampling.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Sampling temperature: below 1 prefers likely tokens, 0 always takes the most likely one.
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    pub temperature: f64,
}
