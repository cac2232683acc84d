//! `shoal id`: who this peer is.

use anyhow::Context;
use shoal_protocol::net::Identity;

use crate::cli::IdArgs;
use crate::exit::{Exit, ExitWith};

/// Prints the id, making an identity where there is none.
///
/// # Errors
/// When the identity can neither be read nor made.
pub(super) fn run(args: &IdArgs) -> anyhow::Result<()> {
    std::fs::create_dir_all(&args.data_dir)
        .with_context(|| format!("no data directory {}", args.data_dir.display()))
        .exit_with(Exit::Usage)?;
    // Not through `DataDir`, which a running peer has locked.
    let identity = Identity::load_or_create(&args.data_dir.join("identity"))?;
    println!("{}", identity.peer_id());
    Ok(())
}
