//! What both planes ask before they talk to anybody.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::UnixTime;
use super::access_list::AccessList;
use super::certificate::Certificate;
use super::denied::{Denied, Paper};
use super::redemptions::Desk;
use super::refusals::{ConnectionRefused, Reason, Refusals};
use super::signed::Signed;
use super::ticket::Ticket;
use super::ticket_id::TicketId;
use crate::ids::{PeerId, RunId};
use crate::limits;
use crate::manifest::{Admission, AdmissionMode};

/// Permits that are remembered of others.
const KNOWN: usize = 2 * limits::MEMBERS;

/// What a run's manifest says of who may take part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// The run.
    pub run: RunId,
    /// Whom it lets in, and whose key says so.
    pub admission: Admission,
}

/// What one end of a connection shows the other.
#[derive(Debug, Clone, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct Pass {
    /// What lets it in.
    pub certificate: Option<Signed>,
    /// The newest roster it knows: so it spreads.
    pub access_list: Option<Signed>,
}

/// Who may take part, as far as this process knows. Both planes ask it, and all clones of it are one.
#[derive(Clone)]
pub struct Gate {
    state: Arc<Mutex<State>>,
    /// Counts what became different: the rules, the roster, the own permit.
    changes: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    /// Without rules everybody passes: the process takes part in nothing yet.
    rules: Option<Rules>,
    /// What this process was let in by.
    certificate: Option<Signed>,
    /// What it was invited by, as long as it has no permit.
    ticket: Option<Ticket>,
    access_list: AccessList,
    signed_access_list: Option<Signed>,
    /// Permits that others have shown.
    known: BTreeMap<PeerId, Certificate>,
    desk: Option<Arc<Desk>>,
    refusals: Refusals,
}

impl Default for Gate {
    /// One that lets everybody in until it is told of a run.
    fn default() -> Self {
        Self { state: Arc::default(), changes: watch::Sender::new(0) }
    }
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        // Whoever holds it looks up, checks and notes, and waits for nothing.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Follows the rules of a run from now on. What is known of another run is forgotten.
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

    /// Shows this permit from now on.
    pub fn hold(&self, certificate: Signed) {
        let mut state = self.state();
        state.certificate = Some(certificate);
        state.ticket = None;
        drop(state);
        self.changed();
    }

    /// Shows this ticket to its warden, and to nobody else, until there is a permit.
    pub fn invite(&self, ticket: Ticket) {
        self.state().ticket = Some(ticket);
    }

    /// Turns tickets into permits from now on.
    pub fn open_desk(&self, desk: Arc<Desk>) {
        self.state().desk = Some(desk);
    }

    /// Something that others show or that was kept: the roster, if it is newer than the one known.
    ///
    /// # Errors
    /// [`Denied::Forged`] when the warden did not sign it.
    pub fn learn(&self, access_list: &Signed) -> Result<(), Denied> {
        let mut state = self.state();
        let Some(rules) = state.rules.clone() else { return Ok(()) };
        let Some(key) = rules.admission.key else { return Ok(()) };
        let forged = || Denied::Forged { paper: Paper::AccessList };
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

    /// Notices when rules, roster or the own permit become others.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// What this process shows.
    #[must_use]
    pub fn pass(&self) -> Pass {
        let state = self.state();
        Pass {
            certificate: state.certificate.clone(),
            access_list: state.signed_access_list.clone(),
        }
    }

    /// What it shows this peer besides, if it is the warden that has invited it.
    #[must_use]
    pub fn ticket_for(&self, peer: PeerId) -> Option<Signed> {
        let state = self.state();
        let ticket = state.ticket.as_ref().filter(|ticket| ticket.issuer == peer)?;
        Some(ticket.signed().clone())
    }

    /// Whether a peer that proved its id and shows this is let in. What it shows is remembered.
    ///
    /// # Errors
    /// Why not.
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
        state.access_list.honours(certificate.ticket)?;
        if state.known.len() >= KNOWN && !state.known.contains_key(&peer) {
            state.known.retain(|_, known| known.term.expires >= now);
            if state.known.len() >= KNOWN {
                return Err(Denied::Full);
            }
        }
        state.known.insert(peer, certificate);
        Ok(())
    }

    /// Whether a peer that was let in would be let in again. Asked of everybody whenever something changed,
    /// and now and then, since permits expire.
    ///
    /// # Errors
    /// Why not.
    pub fn stands(&self, peer: PeerId, now: UnixTime) -> Result<(), Denied> {
        let state = self.state();
        if let Some(decided) = state.decide(peer) {
            return decided;
        }
        let Some(Rules { run, admission }) = &state.rules else { return Ok(()) };
        let none = Denied::Needed { run: *run, mode: admission.mode };
        let certificate = state.known.get(&peer).ok_or(none)?;
        certificate.admits(peer, *run, now)?;
        state.access_list.honours(certificate.ticket)
    }

    /// Turns a ticket into a permit, and counts the use. Waits for the disk.
    ///
    /// # Errors
    /// When this is not the warden, or the ticket is of no use.
    pub fn claim(&self, ticket: &Signed, peer: PeerId, now: UnixTime) -> Result<Signed, Denied> {
        if self.state().access_list.banned.contains(&peer) {
            return Err(Denied::Banned);
        }
        let desk = self.state().desk.clone().ok_or(Denied::NotIssuer)?;
        let ticket = Ticket::received(desk.issuer(), ticket.clone())?;
        self.state().access_list.honours(ticket.terms.id)?;
        desk.claim(&ticket, peer, now)
    }

    /// A fresh permit for a peer that was let in by an old one, from its warden.
    #[must_use]
    pub fn renewal(&self, peer: PeerId, now: UnixTime) -> Option<Signed> {
        let state = self.state();
        let (desk, certificate) = (state.desk.as_ref()?, state.known.get(&peer)?);
        certificate.is_old(now).then(|| desk.renew(certificate, now))
    }

    /// The newest roster.
    #[must_use]
    pub fn access_list(&self) -> (AccessList, Option<Signed>) {
        let state = self.state();
        (state.access_list.clone(), state.signed_access_list.clone())
    }

    /// Notes that a connection was refused.
    pub fn turned_away(
        &self,
        reason: Reason,
        peer: Option<PeerId>,
        address: Option<SocketAddr>,
        text: String,
    ) {
        self.state().refusals.note(ConnectionRefused { peer, address, reason, text });
    }

    /// How many connections were refused so far, by reason.
    #[must_use]
    pub fn refusals(&self) -> BTreeMap<Reason, u64> {
        self.state().refusals.counts()
    }

    /// The connections refused since the last call, or the first few of them.
    #[must_use]
    pub fn newest_refusals(&self) -> Vec<ConnectionRefused> {
        self.state().refusals.take()
    }
}

impl State {
    /// What is decided without a permit.
    fn decide(&self, peer: PeerId) -> Option<Result<(), Denied>> {
        let Some(Rules { admission: Admission { mode, key }, .. }) = &self.rules else {
            return Some(Ok(()));
        };
        // The key's owner can write itself any paper.
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
    /// Whether a ticket, and what came of it, was not revoked.
    fn honours(&self, ticket: TicketId) -> Result<(), Denied> {
        if self.revoked.contains_key(&ticket) { Err(Denied::Revoked { ticket }) } else { Ok(()) }
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gate({:?})", self.state().rules)
    }
}
