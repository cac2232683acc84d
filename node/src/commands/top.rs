//! `shoal top`: shows a running peer's run in the terminal.

use std::io::IsTerminal;

use anyhow::anyhow;

use super::training;
use crate::cli::NodeArgs;
use crate::exit::{Exit, ExitWith};
use crate::top;

/// Shows the run until the user quits.
///
/// # Errors
/// If there is no terminal, or the peer does not answer the first request.
pub(super) fn run(args: &NodeArgs) -> anyhow::Result<()> {
    if !std::io::stdout().is_terminal() {
        let text = "standard output is not a terminal: `shoal status` prints the same once";
        return Err(anyhow!(text)).exit_with(Exit::Usage);
    }
    let address = args.address()?;
    training::runtime()?.block_on(top::watch(address))
}
