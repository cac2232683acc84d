//! The flags of `shoal chunk`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use shoal_protocol::ids::ContentHash;

use super::default_data_dir;
use crate::address::JoinAddress;

/// `shoal chunk`
#[derive(Debug, Clone, Subcommand)]
pub enum ChunkCommand {
    /// List the files of a data directory that other peers can fetch: hash, size, kind, complete or partial.
    Ls(ChunkLsArgs),
    /// Verify all files of a data directory against their hashes.
    Verify(ChunkVerifyArgs),
    /// Fetch a file by its hash from several peers at once; continues an interrupted fetch.
    Get(ChunkGetArgs),
}

/// `shoal chunk ls`
#[derive(Debug, Clone, Args)]
pub struct ChunkLsArgs {
    /// The data directory; a peer may be using it.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    pub data_dir: PathBuf,
    /// Print JSON instead of text for people.
    #[arg(long)]
    pub json: bool,
}

/// `shoal chunk verify`
#[derive(Debug, Clone, Args)]
pub struct ChunkVerifyArgs {
    /// The data directory; a peer may be using it.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    pub data_dir: PathBuf,
}

/// `shoal chunk get`
#[derive(Debug, Clone, Args)]
pub struct ChunkGetArgs {
    /// Hash of the file, as `shoal chunk ls` prints it.
    #[arg(value_name = "HASH")]
    pub hash: ContentHash,
    /// Addresses of peers that have it, as for `shoal join`, or `@PATH` of a file with one.
    #[arg(long, value_name = "ADDRESS", required = true, num_args = 1..)]
    pub from: Vec<JoinAddress>,
    /// File to write, which must not exist; default: a file named by the hash.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}
