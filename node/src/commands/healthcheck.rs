//! `shoal healthcheck`: reports the health of a running peer as an exit code.

use anyhow::bail;

use super::training;
use crate::cli::HealthcheckArgs;
use crate::http::{STATES, client};
use crate::terminal::outln;

/// Asks the peer whether it is alive, or ready.
///
/// # Errors
/// If it is not, or does not answer.
pub(super) fn run(args: &HealthcheckArgs) -> anyhow::Result<()> {
    let address = args.node.address()?;
    let path = if args.ready { "/readyz" } else { "/livez" };
    let answer = training::runtime()?.block_on(client::get(address, path))?;
    let state = String::from_utf8_lossy(&answer.body);
    let state = state.trim();
    if !STATES.contains(&state) {
        bail!("{address} does not answer like a Shoal node: another server listens there");
    }
    if !answer.code.is_success() {
        bail!("the peer at {address} is not healthy: {state}");
    }
    outln!("{state}");
    Ok(())
}
