//! `shoal completion`: the completion script of a shell.

use clap::CommandFactory;

use crate::cli::{Cli, CompletionArgs};
use crate::terminal;

/// Prints the script.
pub(super) fn run(args: &CompletionArgs) {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "shoal", &mut script);
    terminal::print_whole(&script);
}
