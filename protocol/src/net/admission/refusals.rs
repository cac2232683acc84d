//! The record of refused connections: counts by reason, and the newest few in detail.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use super::denied::Denied;
use crate::ids::PeerId;

/// Refusals stored in detail until they are read. Further ones are only counted, so that a flood
/// uses no memory.
const NEWEST: usize = 16;

/// The reason of a refused connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The peer presented no certificate, or is not on the list.
    NoCertificate,
    /// The ticket or certificate has expired.
    Expired,
    /// The date of the ticket or certificate is in the future.
    Clock,
    /// The ticket is used up.
    UsedUp,
    /// The ticket was revoked.
    Revoked,
    /// The peer is banned.
    Banned,
    /// The certificate belongs to another peer.
    OtherPeer,
    /// The credentials are not signed by the issuer.
    Forged,
    /// The peer belongs to another run.
    OtherRun,
    /// The peer uses another protocol version.
    Version,
    /// The peer's first message is malformed.
    Malformed,
    /// The peer did not identify itself in time.
    Slow,
    /// The limit of simultaneous handshakes was reached.
    Flood,
    /// An earlier incarnation, this peer's own identity, or a full table.
    Other,
}

impl Reason {
    /// All reasons, each once.
    pub const ALL: [Self; 14] = [
        Self::NoCertificate,
        Self::Expired,
        Self::Clock,
        Self::UsedUp,
        Self::Revoked,
        Self::Banned,
        Self::OtherPeer,
        Self::Forged,
        Self::OtherRun,
        Self::Version,
        Self::Malformed,
        Self::Slow,
        Self::Flood,
        Self::Other,
    ];
}

impl From<&Denied> for Reason {
    fn from(denied: &Denied) -> Self {
        match denied {
            Denied::Needed { .. } => Self::NoCertificate,
            Denied::Expired { .. } => Self::Expired,
            Denied::NotYet { .. } => Self::Clock,
            Denied::UsedUp { .. } => Self::UsedUp,
            Denied::Revoked { .. } => Self::Revoked,
            Denied::Banned => Self::Banned,
            Denied::OtherPeer { .. } => Self::OtherPeer,
            Denied::OtherRun { .. } => Self::OtherRun,
            Denied::Forged { .. } => Self::Forged,
            Denied::NotIssuer | Denied::NotRecorded | Denied::Full => Self::Other,
        }
    }
}

/// A connection that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionRefused {
    /// The peer, if it was identified.
    pub peer: Option<PeerId>,
    /// The remote address, if known.
    pub address: Option<SocketAddr>,
    /// The reason.
    pub reason: Reason,
    /// The reason as text.
    pub text: String,
}

/// Counters and the newest refusals.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    counts: BTreeMap<Reason, u64>,
    newest: VecDeque<ConnectionRefused>,
}

impl Refusals {
    pub(super) fn note(&mut self, refused: ConnectionRefused) {
        *self.counts.entry(refused.reason).or_default() += 1;
        if self.newest.len() < NEWEST {
            self.newest.push_back(refused);
        }
    }

    pub(super) fn counts(&self) -> BTreeMap<Reason, u64> {
        self.counts.clone()
    }

    /// Removes and returns the stored refusals.
    pub(super) fn take(&mut self) -> Vec<ConnectionRefused> {
        self.newest.drain(..).collect()
    }
}
