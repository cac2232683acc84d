//! `shoal completion`: the completion script of a shell.

use clap::CommandFactory;

use crate::cli::{Cli, CompletionArgs};

/// Prints the script.
pub(super) fn run(args: &CompletionArgs) {
    clap_complete::generate(args.shell, &mut Cli::command(), "shoal", &mut std::io::stdout());
}
