//! `shoal checkpoint`: hashes, verifies, fetches and reshapes saved models.

use shoal_engine::Checkpoint;

use super::{bucket, fetch, reshape};
use crate::bucket::ArchivePlace;
use crate::cli::{CheckpointCommand, FetchArgs, FetchSource, VerifyArgs};
use crate::exit::{Exit, ExitWith};
use crate::terminal::outln;

/// Prints the hash, or that the checkpoint is whole.
///
/// # Errors
/// If there is no checkpoint, or a part of it is missing or damaged.
pub(super) fn run(command: CheckpointCommand) -> anyhow::Result<()> {
    match command {
        CheckpointCommand::Fetch(FetchArgs { source: FetchSource::Bucket(url), out }) => {
            bucket::fetch_checkpoint(&url, &out)?;
        }
        CheckpointCommand::Fetch(FetchArgs { source: FetchSource::Swarm(address), out }) => {
            fetch::run(&address, &out)?;
        }
        CheckpointCommand::Reshape(args) => reshape::run(&args)?,
        CheckpointCommand::Hash(args) => {
            let hash = Checkpoint::open(&args.directory).and_then(|checkpoint| checkpoint.hash());
            outln!("{}", hash.exit_with(Exit::Corrupt)?);
        }
        CheckpointCommand::Verify(VerifyArgs { place: ArchivePlace::Bucket(url) }) => {
            bucket::verify_checkpoint(&url)?;
        }
        CheckpointCommand::Verify(VerifyArgs { place: ArchivePlace::Folder(folder) }) => {
            let checkpoint = Checkpoint::open(&folder).exit_with(Exit::Corrupt)?;
            checkpoint.verify().exit_with(Exit::Corrupt)?;
            outln!(
                "whole: version {} of the weights of run {}",
                checkpoint.step(),
                checkpoint.run()
            );
        }
    }
    Ok(())
}
