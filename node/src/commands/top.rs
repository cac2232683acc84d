//! `shoal top`: a running peer's run in the terminal, as it goes.

use std::io::IsTerminal;

use anyhow::anyhow;

use super::training;
use crate::cli::NodeArgs;
use crate::exit::{Exit, ExitWith};
use crate::top;

/// Shows the run until the user has seen enough.
///
/// # Errors
/// When there is no terminal, or the peer does not answer at first.
pub(super) fn run(args: &NodeArgs) -> anyhow::Result<()> {
    if !std::io::stdout().is_terminal() {
        let text = "there is no terminal here: `shoal status` prints the same once";
        return Err(anyhow!(text)).exit_with(Exit::Usage);
    }
    let address = args.address()?;
    training::runtime()?.block_on(top::watch(address))
}
