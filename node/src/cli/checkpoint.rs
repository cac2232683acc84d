//! The flags of `shoal checkpoint`.

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
