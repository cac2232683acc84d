//! `shoal checkpoint`: hashes, verifies, fetches and reshapes saved models.

use shoal_engine::Checkpoint;

use super::{fetch, reshape};
use crate::cli::CheckpointCommand;
use crate::exit::{Exit, ExitWith};

/// Prints the hash, or that the checkpoint is whole.
///
/// # Errors
/// If there is no checkpoint, or a part of it is missing or damaged.
pub(super) fn run(command: CheckpointCommand) -> anyhow::Result<()> {
    match command {
        CheckpointCommand::Fetch(args) => fetch::run(&args)?,
        CheckpointCommand::Reshape(args) => reshape::run(&args)?,
        CheckpointCommand::Hash(args) => {
            let hash = Checkpoint::open(&args.directory).and_then(|checkpoint| checkpoint.hash());
            println!("{}", hash.exit_with(Exit::Corrupt)?);
        }
        CheckpointCommand::Verify(args) => {
            let checkpoint = Checkpoint::open(&args.directory).exit_with(Exit::Corrupt)?;
            checkpoint.verify().exit_with(Exit::Corrupt)?;
            println!(
                "whole: version {} of the weights of run {}",
                checkpoint.step(),
                checkpoint.run()
            );
        }
    }
    Ok(())
}
