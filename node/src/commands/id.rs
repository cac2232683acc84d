//! `shoal id`: prints the id of this peer.

use anyhow::Context;
use shoal_protocol::net::Identity;

use crate::cli::IdArgs;
use crate::exit::{Exit, ExitWith};

/// Prints the id, and creates the identity if there is none.
///
/// # Errors
/// If the identity can be neither read nor created.
pub(super) fn run(args: &IdArgs) -> anyhow::Result<()> {
    std::fs::create_dir_all(&args.data_dir)
        .with_context(|| format!("cannot create the data directory {}", args.data_dir.display()))
        .exit_with(Exit::Usage)?;
    // Does not open the data directory as a peer does: a running peer has locked it.
    let identity = Identity::load_or_create(&args.data_dir.join("identity"))?;
    println!("{}", identity.peer_id());
    Ok(())
}
