//! The admission check of all connections, of transport and discovery.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::UnixTime;
use super::access_list::AccessList;
use super::certificate::Certificate;
use super::denied::{Denied, Document};
use super::redemptions::TicketDesk;
use super::refusals::{ConnectionRefused, Reason, Refusals};
use super::signed::Signed;
use super::ticket::Ticket;
use super::ticket_id::TicketId;
use crate::ids::{PeerId, RunId};
use crate::limits;
use crate::manifest::{Admission, AdmissionMode};

/// Maximum number of other peers' certificates that are stored.
const KNOWN: usize = 2 * limits::MEMBERS;

/// The admission rules of a run, from its manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// The run.
    pub run: RunId,
    /// The mode and the issuer.
    pub admission: Admission,
}

/// The credentials that one end of a connection presents to the other.
#[derive(Debug, Clone, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct Pass {
    /// The certificate that admits it.
    pub certificate: Option<Signed>,
    /// The newest access list that it knows, so that the list spreads.
    pub access_list: Option<Signed>,
}

/// The admission state of this process. Transport and discovery share it; all clones share the
/// state.
#[derive(Clone)]
pub struct Gate {
    state: Arc<Mutex<State>>,
    /// Counts changes of the rules, the access list and the own certificate.
    changes: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    /// Without rules all peers are admitted: the process does not take part in a run yet.
    rules: Option<Rules>,
    /// The certificate of this process.
    certificate: Option<Signed>,
    /// The ticket of this process, until it has a certificate.
    ticket: Option<Ticket>,
    access_list: AccessList,
    signed_access_list: Option<Signed>,
    /// Certificates that other peers presented.
    known: BTreeMap<PeerId, Certificate>,
    desk: Option<Arc<TicketDesk>>,
    refusals: Refusals,
}

impl Default for Gate {
    /// A gate that admits all peers until a run is set.
    fn default() -> Self {
        Self { state: Arc::default(), changes: watch::Sender::new(0) }
    }
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        // A poisoned lock is usable: its holders only look up and store values.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Applies the rules of a run. Discards the state of any other run.
    pub fn enter(&self, rules: Rules) {
        let mut state = self.state();
        if state.rules.as_ref().is_some_and(|known| known.run != rules.run) {
            let refusals = std::mem::take(&mut state.refusals);
            *state = State { refusals, ..State::default() };
        }
        state.rules = Some(rules);
        drop(state);
        self.changed();
    }

    /// Presents this certificate on later connections.
    pub fn hold(&self, certificate: Signed) {
        let mut state = self.state();
        state.certificate = Some(certificate);
        state.ticket = None;
        drop(state);
        self.changed();
    }

    /// Presents this ticket to its issuer, and to no other peer, until there is a certificate.
    pub fn invite(&self, ticket: Ticket) {
        self.state().ticket = Some(ticket);
    }

    /// Exchanges tickets for certificates from now on.
    pub fn open_desk(&self, desk: Arc<TicketDesk>) {
        self.state().desk = Some(desk);
    }

    /// Applies an access list if it is newer than the known one.
    ///
    /// # Errors
    /// [`Denied::Forged`] if the issuer did not sign it.
    pub fn learn(&self, access_list: &Signed) -> Result<(), Denied> {
        let mut state = self.state();
        let Some(rules) = state.rules.clone() else { return Ok(()) };
        let Some(key) = rules.admission.key else { return Ok(()) };
        let forged = || Denied::Forged { document: Document::AccessList };
        let shown: AccessList = access_list.peek()?;
        if shown.version <= state.access_list.version {
            return Ok(());
        }
        let newer: AccessList = access_list.open(key)?;
        if newer.run != Some(rules.run) || newer.fits().is_err() {
            return Err(forged());
        }
        state.access_list = newer;
        state.signed_access_list = Some(access_list.clone());
        drop(state);
        self.changed();
        Ok(())
    }

    /// Signals changes of the rules, the access list or the own certificate.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The credentials of this process.
    #[must_use]
    pub fn pass(&self) -> Pass {
        let state = self.state();
        Pass {
            certificate: state.certificate.clone(),
            access_list: state.signed_access_list.clone(),
        }
    }

    /// The ticket to present to this peer, if it is the issuer of the ticket.
    #[must_use]
    pub fn ticket_for(&self, peer: PeerId) -> Option<Signed> {
        let state = self.state();
        let ticket = state.ticket.as_ref().filter(|ticket| ticket.issuer == peer)?;
        Some(ticket.signed().clone())
    }

    /// Checks whether to admit a peer that proved its id and presents these credentials. Stores its
    /// certificate.
    ///
    /// # Errors
    /// The reason for refusing admission.
    pub fn admit(&self, peer: PeerId, pass: &Pass, now: UnixTime) -> Result<(), Denied> {
        if let Some(access_list) = &pass.access_list {
            self.learn(access_list)?;
        }
        let mut state = self.state();
        if let Some(decided) = state.decide(peer) {
            return decided;
        }
        let Some(Rules { run, admission }) = state.rules.clone() else { return Ok(()) };
        let (mode, Some(key)) = (admission.mode, admission.key) else {
            return Err(Denied::Needed { run, mode: admission.mode });
        };
        let Some(certificate) = pass.certificate.as_ref().filter(|_| mode == AdmissionMode::Invite)
        else {
            return Err(Denied::Needed { run, mode });
        };
        let certificate: Certificate = certificate.open(key)?;
        certificate.admits(peer, run, now)?;
        state.access_list.check_not_revoked(certificate.ticket)?;
        if state.known.len() >= KNOWN && !state.known.contains_key(&peer) {
            state.known.retain(|_, known| known.term.expires >= now);
            if state.known.len() >= KNOWN {
                return Err(Denied::Full);
            }
        }
        state.known.insert(peer, certificate);
        Ok(())
    }

    /// Checks whether an admitted peer is still admitted. Called for every connected peer after
    /// each change, and at intervals, because certificates expire.
    ///
    /// # Errors
    /// The reason why it is not.
    pub fn stands(&self, peer: PeerId, now: UnixTime) -> Result<(), Denied> {
        let state = self.state();
        if let Some(decided) = state.decide(peer) {
            return decided;
        }
        let Some(Rules { run, admission }) = &state.rules else { return Ok(()) };
        let none = Denied::Needed { run: *run, mode: admission.mode };
        let certificate = state.known.get(&peer).ok_or(none)?;
        certificate.admits(peer, *run, now)?;
        state.access_list.check_not_revoked(certificate.ticket)
    }

    /// Exchanges a ticket for a certificate, and counts the use. Blocks on disk writes.
    ///
    /// # Errors
    /// If this peer is not the issuer, or the ticket is not valid.
    pub fn claim(&self, ticket: &Signed, peer: PeerId, now: UnixTime) -> Result<Signed, Denied> {
        if self.state().access_list.banned.contains(&peer) {
            return Err(Denied::Banned);
        }
        let desk = self.state().desk.clone().ok_or(Denied::NotIssuer)?;
        let ticket = Ticket::received(desk.issuer(), ticket.clone())?;
        self.state().access_list.check_not_revoked(ticket.terms.id)?;
        desk.claim(&ticket, peer, now)
    }

    /// A renewed certificate for an admitted peer whose certificate is old, if this peer is the
    /// issuer.
    #[must_use]
    pub fn renewal(&self, peer: PeerId, now: UnixTime) -> Option<Signed> {
        let state = self.state();
        let (desk, certificate) = (state.desk.as_ref()?, state.known.get(&peer)?);
        certificate.is_old(now).then(|| desk.renew(certificate, now))
    }

    /// Whether the run's rules let an admitted peer be an anchor: in an open run each; else the issuer, a peer on
    /// the access list, and one whose certificate says so. Certificates of others are known where they were shown.
    #[must_use]
    pub fn may_be_anchor(&self, peer: PeerId) -> bool {
        let state = self.state();
        let own = || {
            let certificate: Certificate = state.certificate.as_ref()?.peek().ok()?;
            (certificate.peer == peer).then_some(certificate.anchor)
        };
        let certified = || state.known.get(&peer).map(|known| known.anchor).or_else(own);
        match state.decide(peer) {
            Some(decided) => decided.is_ok(),
            None => certified().unwrap_or(false),
        }
    }

    /// The newest access list.
    #[must_use]
    pub fn access_list(&self) -> (AccessList, Option<Signed>) {
        let state = self.state();
        (state.access_list.clone(), state.signed_access_list.clone())
    }

    /// Records a refused connection.
    pub fn turned_away(
        &self,
        reason: Reason,
        peer: Option<PeerId>,
        address: Option<SocketAddr>,
        text: String,
    ) {
        self.state().refusals.note(ConnectionRefused { peer, address, reason, text });
    }

    /// The number of refused connections by reason.
    #[must_use]
    pub fn refusals(&self) -> BTreeMap<Reason, u64> {
        self.state().refusals.counts()
    }

    /// The connections refused since the last call; only the first few are stored.
    #[must_use]
    pub fn newest_refusals(&self) -> Vec<ConnectionRefused> {
        self.state().refusals.take()
    }
}

impl State {
    /// The decision, if it does not depend on a certificate.
    fn decide(&self, peer: PeerId) -> Option<Result<(), Denied>> {
        let Some(Rules { admission: Admission { mode, key }, .. }) = &self.rules else {
            return Some(Ok(()));
        };
        // The issuer can sign any statement for itself.
        if *key == Some(peer) {
            return Some(Ok(()));
        }
        if self.access_list.banned.contains(&peer) {
            return Some(Err(Denied::Banned));
        }
        let named = *mode == AdmissionMode::Open || self.access_list.allowed.contains(&peer);
        named.then_some(Ok(()))
    }
}

impl AccessList {
    /// Checks that a ticket is not revoked.
    fn check_not_revoked(&self, ticket: TicketId) -> Result<(), Denied> {
        if self.revoked.contains_key(&ticket) { Err(Denied::Revoked { ticket }) } else { Ok(()) }
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gate({:?})", self.state().rules)
    }
}
