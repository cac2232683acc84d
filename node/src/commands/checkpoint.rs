//! `shoal checkpoint`: what a saved model is, and whether it is whole.

use shoal_engine::Checkpoint;

use crate::cli::CheckpointCommand;
use crate::exit::{Exit, ExitWith};

/// Prints the hash, or that the checkpoint is whole.
///
/// # Errors
/// When there is no checkpoint, or a part of it is missing or damaged.
pub(super) fn run(command: CheckpointCommand) -> anyhow::Result<()> {
    match command {
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
