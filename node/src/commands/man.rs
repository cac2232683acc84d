//! `shoal man`: writes man pages of the command line.

use anyhow::Context;
use clap::CommandFactory;

use crate::cli::{Cli, ManArgs};
use crate::exit::{Exit, ExitWith};
use crate::terminal::outln;

/// Writes the pages.
pub(super) fn run(args: &ManArgs) -> anyhow::Result<()> {
    let write = || {
        std::fs::create_dir_all(&args.dir)?;
        clap_mangen::generate_to(Cli::command(), &args.dir)
    };
    write()
        .with_context(|| format!("cannot write man pages to {}", args.dir.display()))
        .exit_with(Exit::Usage)?;
    outln!("man pages are in {}; try: man -l {}/shoal.1", args.dir.display(), args.dir.display());
    Ok(())
}
