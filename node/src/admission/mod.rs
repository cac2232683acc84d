//! Who may take part in a run, as this peer keeps it on its disk: the folder `admission` of a run in the data
//! directory, which the running peer and `shoal invite`, `ban` and `unban` share.
//!
//! Everything in it is signed or may be lost, but for the book of claims and the list of tickets, which are the
//! warden's alone. The commands write the roster; the running peer notices, and it spreads from there.

mod entrance;
mod folder;
mod known;
mod standing;
mod watch;

pub(crate) use entrance::{entrance, issue, roster_of};
pub(crate) use folder::{Folder, Issued, KeptRules};
pub(crate) use known::{KnownPeers, companions, met};
pub(crate) use standing::Standing;
pub(crate) use watch::keep;

use std::sync::Arc;

use anyhow::Context;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::net::admission::{ClaimBook, Desk, Gate, Rules};
use shoal_protocol::net::identity::Identity;

use crate::driver::home::Home;

/// Has the gate follow a run's rules, with what was kept of earlier lives. The warden opens its desk.
///
/// # Errors
/// When the folder cannot be used, or the book of claims is damaged.
pub(crate) fn enter(
    gate: &Gate,
    home: &Home,
    identity: &Identity,
    manifest: &Manifest,
) -> anyhow::Result<Folder> {
    let run = manifest.run_id();
    let folder = Folder::of(home.path(), run);
    let rules = Rules { run, admission: manifest.admission.clone() };
    folder.remember(&rules)?;
    let warden = rules.admission.key == Some(identity.peer_id());
    gate.enter(rules);
    if let Some(roster) = folder.roster()? {
        // One that is damaged is got again from the others.
        if let Err(denied) = gate.learn(&roster) {
            tracing::warn!(%denied, "the roster that was kept is not used");
        }
    }
    if warden {
        let book = ClaimBook::open(&folder.claims())
            .context("no ticket can be turned into a permit here")?;
        gate.open_desk(Arc::new(Desk::new(identity.clone(), run, book)));
    }
    watch::write_down(gate, &folder)?;
    Ok(folder)
}
