//! `shoal id`: prints the id of this peer.

use anyhow::Context;
use shoal_protocol::net::Identity;

use crate::cli::IdArgs;
use crate::data_dir;
use crate::exit::{Exit, ExitWith};
use crate::terminal::outln;

/// Prints the id, and creates the identity if there is none.
///
/// # Errors
/// If the identity can be neither read nor created.
pub(super) fn run(args: &IdArgs) -> anyhow::Result<()> {
    data_dir::make(&args.data_dir)
        .with_context(|| format!("cannot create the data directory {}", args.data_dir.display()))
        .exit_with(Exit::Usage)?;
    // Does not open the data directory as a peer does: a running peer has locked it.
    let identity = Identity::load_or_create(&args.data_dir.join("identity"))?;
    outln!("{}", identity.peer_id());
    Ok(())
}
