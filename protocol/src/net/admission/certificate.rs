//! What lets one peer into a run, wherever it is shown.

use std::time::Duration;

use super::denied::{Denied, Paper};
use super::signed::{Signed, Statement};
use super::ticket_id::TicketId;
use super::{Term, UnixTime};
use crate::ids::{PeerId, RunId};
use crate::net::identity::Identity;

/// How long a permit is good; the warden renews it at the connections in its second half.
pub const PERMIT_LIFE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The right of one peer to take part in one run.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Certificate {
    /// In which.
    pub run: RunId,
    /// Who. Connections prove it by the peer's own key.
    pub peer: PeerId,
    /// What it came of.
    pub ticket: TicketId,
    /// From when until when.
    pub term: Term,
}

impl Statement for Certificate {
    const PAPER: Paper = Paper::Certificate;
    const PURPOSE: &'static [u8] = b"shoal permit v1\0";
}

impl Certificate {
    /// Signs one.
    #[must_use]
    pub fn sign(
        issuer: &Identity,
        run: RunId,
        peer: PeerId,
        ticket: TicketId,
        now: UnixTime,
    ) -> Signed {
        Signed::of(&Self { run, peer, ticket, term: Term::of(now, PERMIT_LIFE) }, issuer)
    }

    /// Whether it lets this peer into this run now.
    ///
    /// # Errors
    /// Why not.
    pub fn admits(&self, peer: PeerId, run: RunId, now: UnixTime) -> Result<(), Denied> {
        if self.run != run {
            return Err(Denied::OtherRun {
                paper: Paper::Certificate,
                theirs: self.run,
                ours: run,
            });
        }
        if self.peer != peer {
            return Err(Denied::OtherPeer { bound: self.peer });
        }
        self.term.check(Paper::Certificate, now)
    }

    /// Whether half of its time is over.
    #[must_use]
    pub fn is_old(&self, now: UnixTime) -> bool {
        now.since(self.term.issued) > PERMIT_LIFE / 2
    }
}
