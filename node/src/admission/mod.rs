//! Who may take part in a run, as this peer keeps it on its disk: the folder `admission` of a run in the data
//! directory, which the running peer and `shoal invite`, `ban` and `unban` share.
//!
//! Everything in it is signed or may be lost, but for the book of claims and the list of tickets, which are the
//! warden's alone. The commands write the roster; the running peer notices, and it spreads from there.

mod join_line;
mod known_peers;
mod store;
mod ticket_state;
mod watch;

pub(crate) use join_line::{access_list_of, issue, join_line};
pub(crate) use known_peers::{KnownPeers, companions, met};
pub(crate) use store::{Issued, KeptRules, Store};
pub(crate) use ticket_state::TicketState;
pub(crate) use watch::keep;

use std::sync::Arc;

use anyhow::Context;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::net::admission::{Desk, Gate, RedemptionLog, Rules};
use shoal_protocol::net::identity::Identity;

use crate::data_dir::DataDir;

/// Has the gate follow a run's rules, with what was kept of earlier lives. The warden opens its desk.
///
/// # Errors
/// When the folder cannot be used, or the book of claims is damaged.
pub(crate) fn enter(
    gate: &Gate,
    home: &DataDir,
    identity: &Identity,
    manifest: &Manifest,
) -> anyhow::Result<Store> {
    let run = manifest.run_id();
    let folder = Store::of(home.path(), run);
    let rules = Rules { run, admission: manifest.admission.clone() };
    folder.remember(&rules)?;
    let issuer = rules.admission.key == Some(identity.peer_id());
    gate.enter(rules);
    if let Some(access_list) = folder.access_list()? {
        // One that is damaged is got again from the others.
        if let Err(denied) = gate.learn(&access_list) {
            tracing::warn!(%denied, "the roster that was kept is not used");
        }
    }
    if issuer {
        let book = RedemptionLog::open(&folder.claims())
            .context("no ticket can be turned into a permit here")?;
        gate.open_desk(Arc::new(Desk::new(identity.clone(), run, book)));
    }
    watch::write_down(gate, &folder)?;
    Ok(folder)
}
