//! Admission to a run, as this peer stores it: the folder `admission` of a run in the data
//! directory, which the running peer and `shoal invite`, `ban` and `unban` share.
//!
//! Everything in it is signed or expendable, except the redemption log and the list of tickets,
//! which belong to the issuer. The commands write the access list; the running peer notices and
//! sends it to the others.

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
use shoal_protocol::net::admission::{Gate, RedemptionLog, Rules, TicketDesk};
use shoal_protocol::net::identity::Identity;

use crate::data_dir::DataDir;

/// Makes the gate enforce a run's rules, with the stored access list. The issuer starts issuing
/// certificates.
///
/// # Errors
/// If the folder is not usable, or the redemption log is damaged.
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
        // A damaged list is received again from other peers.
        if let Err(denied) = gate.learn(&access_list) {
            tracing::warn!(%denied, "ignored the stored access list");
        }
    }
    if issuer {
        let book = RedemptionLog::open(&folder.redemptions())
            .context("cannot issue certificates for tickets")?;
        gate.open_desk(Arc::new(TicketDesk::new(identity.clone(), run, book)));
    }
    watch::store_changes(gate, &folder)?;
    Ok(folder)
}
