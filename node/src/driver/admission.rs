//! The admission of peers, as far as it concerns a run in progress: the access list spreads from
//! member to member, and refused connections are counted and reported.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use shoal_protocol::net::admission::{ConnectionRefused, Gate, Reason, Signed};
use shoal_protocol::wire;
use tokio::sync::watch;

use crate::events::RunEvent;

/// Time between two reports of refused connections.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// An access list that this peer has not announced yet.
#[derive(Debug)]
pub(super) struct NewAccessList {
    pub(super) event: RunEvent,
    /// The list as its issuer signed it, encoded for a message.
    pub(super) signed: Vec<u8>,
}

/// Refused connections.
#[derive(Debug)]
pub(super) struct Refusals {
    /// All of this process, by reason.
    pub(super) counts: BTreeMap<Reason, u64>,
    /// The first few since the last report.
    pub(super) newest: Vec<ConnectionRefused>,
}

/// Watches the gate that both planes ask.
#[derive(Debug)]
pub(super) struct Admission {
    /// `None` for a peer that is alone.
    gate: Option<Gate>,
    changes: Option<watch::Receiver<u64>>,
    /// The version of the access list that this peer announced last.
    announced: u64,
    reported: Option<Instant>,
}

impl Admission {
    pub(super) fn new(gate: Option<Gate>) -> Self {
        let announced = gate.as_ref().map_or(0, |gate| gate.access_list().0.version);
        let changes = gate.as_ref().map(Gate::changes);
        Self { gate, changes, announced, reported: None }
    }

    /// Waits for the next change of the gate. Safe to cancel.
    pub(super) async fn changed(&mut self) {
        if let Some(changes) = &mut self.changes
            && changes.changed().await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }

    /// Returns the access list if it is newer than the one announced last. A peer that connects
    /// later receives it in the handshake.
    pub(super) fn new_access_list(&mut self) -> Option<NewAccessList> {
        let (list, signed) = self.gate.as_ref()?.access_list();
        let signed = signed.filter(|_| list.version > self.announced)?;
        self.announced = list.version;
        let signed = wire::encode(&signed).expect("an access list is under the cap of a message");
        tracing::info!(version = list.version, banned = list.banned.len(), "a new access list");
        let event = RunEvent::AccessList {
            version: list.version,
            banned: list.banned.len(),
            revoked: list.revoked.len(),
            allowed: list.allowed.len(),
        };
        Some(NewAccessList { event, signed })
    }

    /// Takes in an access list from a peer. A new one shows as a change of the gate.
    ///
    /// # Errors
    /// When the list is malformed or not signed by the run's issuer, with the reason.
    pub(super) fn receive(&self, signed: &[u8]) -> Result<(), String> {
        let Some(gate) = &self.gate else { return Ok(()) };
        let signed = wire::decode::<Signed>(signed).map_err(|error| error.to_string())?;
        gate.learn(&signed).map_err(|denied| denied.to_string())
    }

    /// Returns refused connections, at most once a second.
    pub(super) fn refusals(&mut self) -> Option<Refusals> {
        let gate = self.gate.as_ref()?;
        if self.reported.is_some_and(|reported| reported.elapsed() < REPORT_EVERY) {
            return None;
        }
        self.reported = Some(Instant::now());
        Some(Refusals { counts: gate.refusals(), newest: gate.newest_refusals() })
    }
}
