//! Membership certificates: proof that a peer is admitted to a run.

use std::time::Duration;

use super::denied::{Denied, Document};
use super::signed::{Signed, Statement};
use super::ticket::Ticket;
use super::ticket_id::TicketId;
use super::{Term, UnixTime};
use crate::ids::{PeerId, RunId};
use crate::net::identity::Identity;

/// Lifetime of a certificate. The issuer renews it on connections during its second half.
pub const CERTIFICATE_LIFETIME: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The right of one peer to take part in one run.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Certificate {
    /// The run.
    pub run: RunId,
    /// The peer. It proves its id on each connection by its own key.
    pub peer: PeerId,
    /// The ticket that the certificate was issued for.
    pub ticket: TicketId,
    /// Whether the peer may be an anchor, as the ticket says.
    pub anchor: bool,
    /// The time of validity.
    pub term: Term,
}

impl Statement for Certificate {
    const PAPER: Document = Document::Certificate;
    const PURPOSE: &'static [u8] = b"shoal certificate v1\0";
}

impl Certificate {
    /// Signs a certificate for a ticket, which says whether the peer may be an anchor.
    #[must_use]
    pub fn sign(
        issuer: &Identity,
        run: RunId,
        peer: PeerId,
        (ticket, anchor): (TicketId, bool),
        now: UnixTime,
    ) -> Signed {
        let term = Term::of(now, CERTIFICATE_LIFETIME);
        Signed::of(&Self { run, peer, ticket, anchor, term }, issuer)
    }

    /// Checks whether it admits this peer to this run at this time.
    ///
    /// # Errors
    /// The reason of the rejection.
    pub fn admits(&self, peer: PeerId, run: RunId, now: UnixTime) -> Result<(), Denied> {
        if self.run != run {
            return Err(Denied::OtherRun {
                document: Document::Certificate,
                theirs: self.run,
                ours: run,
            });
        }
        if self.peer != peer {
            return Err(Denied::OtherPeer { bound: self.peer });
        }
        self.term.check(Document::Certificate, now)
    }

    /// Whether a certificate, which its holder trusts, grants all that a ticket grants.
    #[must_use]
    pub fn covers(certificate: &Signed, ticket: &Ticket) -> bool {
        let granted: Result<Self, Denied> = certificate.peek();
        granted.is_ok_and(|granted| granted.anchor || !ticket.terms.anchor)
    }

    /// Whether half of its lifetime is over.
    #[must_use]
    pub fn is_old(&self, now: UnixTime) -> bool {
        now.since(self.term.issued) > CERTIFICATE_LIFETIME / 2
    }
}
