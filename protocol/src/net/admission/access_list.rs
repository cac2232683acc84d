//! The access list: banned peers, revoked tickets, and peers admitted by id.

use std::collections::{BTreeMap, BTreeSet};

use super::UnixTime;
use super::certificate::CERTIFICATE_LIFETIME;
use super::denied::Document;
use super::signed::{Signed, Statement};
use super::ticket_id::TicketId;
use crate::ids::{PeerId, RunId};
use crate::net::identity::Identity;

/// Maximum number of banned peers.
const BANNED: usize = 512;

/// Maximum number of peers admitted by id. Each greeting carries the whole list.
const ALLOWED: usize = 1024;

/// Maximum number of revoked tickets whose certificates may still be valid.
const REVOKED: usize = 512;

/// The issuer's statement about peers by id. The one with the higher version is in force.
#[derive(Debug, Clone, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct AccessList {
    /// The run; `None` before the list is published for one.
    pub run: Option<RunId>,
    /// The version of the list.
    pub version: u64,
    /// The banned peers.
    pub banned: BTreeSet<PeerId>,
    /// Revoked tickets, each with the time until which a certificate of it may still be shown.
    pub revoked: BTreeMap<TicketId, UnixTime>,
    /// Peers admitted without a ticket.
    pub allowed: BTreeSet<PeerId>,
}

/// The access list has reached a limit, which is the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the access list has reached its limit of {0} entries: remove some entries first")]
pub struct AccessListFull(usize);

impl Statement for AccessList {
    const PAPER: Document = Document::AccessList;
    const PURPOSE: &'static [u8] = b"shoal access list v1\0";
}

impl AccessList {
    /// Bans a peer, and removes it from the admitted peers.
    ///
    /// # Errors
    /// If the list is full.
    pub fn ban(&mut self, peer: PeerId) -> Result<(), AccessListFull> {
        self.allowed.remove(&peer);
        self.banned.insert(peer);
        self.fits()
    }

    /// Removes the ban of a peer; returns whether there was one.
    pub fn unban(&mut self, peer: PeerId) -> bool {
        self.banned.remove(&peer)
    }

    /// Admits a peer without a ticket.
    ///
    /// # Errors
    /// If the list is full.
    pub fn allow(&mut self, peer: PeerId) -> Result<(), AccessListFull> {
        self.banned.remove(&peer);
        self.allowed.insert(peer);
        self.fits()
    }

    /// Removes a peer from the admitted peers; returns whether it was one.
    pub fn disallow(&mut self, peer: PeerId) -> bool {
        self.allowed.remove(&peer)
    }

    /// Revokes a ticket that can be used until `expires`.
    ///
    /// # Errors
    /// If the list is full.
    pub fn revoke(&mut self, ticket: TicketId, expires: UnixTime) -> Result<(), AccessListFull> {
        // The last certificate is issued when the ticket expires, and is not renewed after that.
        self.revoked.insert(ticket, expires.after(2 * CERTIFICATE_LIFETIME));
        self.fits()
    }

    /// Signs the next version. Entries whose certificates have all expired are removed. The version
    /// is at least the current time, so that an issuer that lost its list does not reuse a version.
    #[must_use]
    pub fn publish(&mut self, run: RunId, issuer: &Identity, now: UnixTime) -> Signed {
        self.run = Some(run);
        self.version = (self.version + 1).max(now.0);
        self.revoked.retain(|_, until| *until >= now);
        Signed::of(self, issuer)
    }

    /// Checks the list against its limits.
    pub(super) fn fits(&self) -> Result<(), AccessListFull> {
        let over = |length: usize, cap: usize| {
            if length > cap { Err(AccessListFull(cap)) } else { Ok(()) }
        };
        over(self.banned.len(), BANNED)?;
        over(self.revoked.len(), REVOKED)?;
        over(self.allowed.len(), ALLOWED)
    }
}
