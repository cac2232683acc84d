//! The flags of `shoal checkpoint`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};

use crate::address::JoinAddress;
use crate::bucket::{ArchivePlace, BucketUrl, UrlError};

/// `shoal checkpoint`
#[derive(Debug, Clone, Subcommand)]
pub enum CheckpointCommand {
    /// Print the BLAKE3 hash over names, shapes, dtypes and bytes of the weights.
    Hash(CheckpointArgs),
    /// Check that every file and every weight is complete; of a bucket, every object.
    Verify(VerifyArgs),
    /// Fetch the newest checkpoint of a running swarm or of a bucket.
    Fetch(FetchArgs),
    /// Go on from a checkpoint in another shape: write a run configuration that continues it.
    #[command(after_help = RESHAPE)]
    Reshape(ReshapeArgs),
}

/// What may differ, and what stays.
const RESHAPE: &str = "\
The new run begins with the checkpoint's weights and optimizer state, at its step. Stages, microbatches,
precision, the optimizer's constants, schedule, codecs, context and data may differ from the checkpoint's run;
the model and the optimizer's kind may not.
Nothing is copied: the configuration names the checkpoint by its content, and its folder must stay until
the new run has a checkpoint of its own.";

/// `shoal checkpoint reshape`
#[derive(Debug, Clone, Args)]
pub struct ReshapeArgs {
    /// The checkpoint's folder.
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,
    /// Run configuration with the settings of the new run: that of the checkpoint's run, or an edited copy.
    #[arg(value_name = "run.toml")]
    pub config: PathBuf,
    /// File for the new run configuration; must not exist.
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// Pipeline stages, instead of the configuration's.
    #[arg(long, value_name = "N")]
    pub stages: Option<u16>,
    /// Microbatches of a step, instead of the configuration's.
    #[arg(long, value_name = "N")]
    pub microbatches: Option<u32>,
    /// Samples of a microbatch, instead of the configuration's.
    #[arg(long, value_name = "N")]
    pub microbatch_size: Option<u32>,
    /// Step at which the new run ends, instead of the configuration's; those of the checkpoint count.
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
}

/// `shoal checkpoint fetch`
#[derive(Debug, Clone, Args)]
pub struct FetchArgs {
    /// Address of any peer of the run, as for `shoal join`, or `@PATH` of a file with it; or a checkpoint or an
    /// archive in a bucket (s3://BUCKET/PATH, gs://..., az://...).
    #[arg(value_name = "ADDRESS|URL")]
    pub source: FetchSource,
    /// Folder for the checkpoint; an existing one is replaced.
    #[arg(short, long, value_name = "DIR")]
    pub out: PathBuf,
}

/// Where a checkpoint is fetched from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FetchSource {
    /// The peers of a run.
    Swarm(JoinAddress),
    /// A bucket.
    Bucket(BucketUrl),
}

impl FromStr for FetchSource {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        match text.parse()? {
            ArchivePlace::Bucket(url) => Ok(Self::Bucket(url)),
            ArchivePlace::Folder(_) => {
                let Ok(address) = text.parse::<JoinAddress>();
                Ok(Self::Swarm(address))
            }
        }
    }
}

/// `shoal checkpoint verify`
#[derive(Debug, Clone, Args)]
pub struct VerifyArgs {
    /// The checkpoint's folder; or a checkpoint or an archive in a bucket (s3://BUCKET/PATH, gs://..., az://...).
    #[arg(value_name = "DIR|URL")]
    pub place: ArchivePlace,
}

/// `shoal checkpoint hash`
#[derive(Debug, Clone, Args)]
pub struct CheckpointArgs {
    /// The checkpoint's folder.
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
}
