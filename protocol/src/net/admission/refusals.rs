//! What is remembered of connections that were refused: counts, and the newest few.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use super::denied::Denied;
use crate::ids::PeerId;

/// Refusals that are remembered one by one until somebody asks; of more only the number is kept, so that a
/// flood costs nothing.
const NEWEST: usize = 16;

/// Why a connection was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// It showed no permit, or is not on the list.
    NoCertificate,
    /// The ticket or permit has expired.
    Expired,
    /// The ticket or permit is from the future.
    Clock,
    /// The ticket is used up.
    UsedUp,
    /// The ticket was revoked.
    Revoked,
    /// The peer is banned.
    Banned,
    /// The permit is another peer's.
    OtherPeer,
    /// What it showed is not signed by the warden.
    Forged,
    /// It belongs to another run.
    OtherRun,
    /// It speaks another protocol version.
    Version,
    /// Its first words make no sense.
    Malformed,
    /// It took too long to say who it is.
    Slow,
    /// More connections were being made than are looked at.
    Flood,
    /// A life that is over, our own identity, or no room.
    Other,
}

impl Reason {
    /// Every reason, each once.
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
    /// Who, if that came out.
    pub peer: Option<PeerId>,
    /// Where from, as far as is known.
    pub address: Option<SocketAddr>,
    /// Why.
    pub reason: Reason,
    /// In words.
    pub text: String,
}

/// Counts and the newest.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    counts: BTreeMap<Reason, u64>,
    newest: VecDeque<ConnectionRefused>,
}

impl Refusals {
    pub(super) fn note(&mut self, turned: ConnectionRefused) {
        *self.counts.entry(turned.reason).or_default() += 1;
        if self.newest.len() < NEWEST {
            self.newest.push_back(turned);
        }
    }

    /// So many for each reason so far.
    pub(super) fn counts(&self) -> BTreeMap<Reason, u64> {
        self.counts.clone()
    }

    /// Those since the last time that somebody asked, or the first few of them.
    pub(super) fn take(&mut self) -> Vec<ConnectionRefused> {
        self.newest.drain(..).collect()
    }
}
