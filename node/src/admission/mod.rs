//! Admission to a run, as this peer stores it: the folder `admission` of a run in the data
//! directory, which the running peer and `shoal invite`, `ban` and `unban` share.
//!
//! Everything in it is signed or expendable, except the redemption log and the list of tickets,
//! which belong to the issuer. The commands write the access list; the running peer notices and
//! sends it to the others.

mod join_line;
mod known_peers;
mod peer_choice;
mod store;
mod ticket_state;
mod watch;

pub(crate) use join_line::{JoinLine, access_list_of, issue, join_line};
pub(crate) use known_peers::{KnownPeers, companions, met};
pub(crate) use peer_choice::Candidates;
pub(crate) use peer_choice::PeerChoice;
pub(crate) use store::{Issued, KeptRules, Store};
pub(crate) use ticket_state::TicketState;
pub(crate) use watch::keep;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use shoal_protocol::ids::PeerId;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::net::admission::{Gate, RedemptionLog, Rules, TicketDesk};
use shoal_protocol::net::identity::Identity;

use crate::data_dir::DataDir;
use crate::driver::resume::folders_in;

/// The issuer of a run that the peer of a data directory took part in and that this manifest, which names none,
/// describes. It may be another peer: its run goes on, instead of another one beside it.
pub(crate) fn known_issuer(data_dir: &Path, manifest: &Manifest) -> Option<PeerId> {
    let issuer_of = |folder: PathBuf| {
        // A folder without rules is of a run that did not begin.
        let KeptRules { run, admission } = Store::in_run(&folder).rules().ok()?;
        let named = Manifest { admission, ..manifest.clone() };
        let same = named.admission.mode == manifest.admission.mode && named.run_id() == run;
        named.admission.key.filter(|_| same)
    };
    folders_in(&data_dir.join("runs")).into_iter().filter_map(issuer_of).min()
}

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
    // One that was just issued for a ticket is not stored yet.
    if gate.pass().certificate.is_none()
        && let Some(certificate) = folder.certificate()?
    {
        gate.hold(certificate);
    }
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
