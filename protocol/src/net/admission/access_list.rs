//! Who is banned, which tickets are revoked, and who is let in by name.

use std::collections::{BTreeMap, BTreeSet};

use super::UnixTime;
use super::certificate::PERMIT_LIFE;
use super::denied::Paper;
use super::signed::{Signed, Statement};
use super::ticket_id::TicketId;
use crate::ids::{PeerId, RunId};
use crate::net::identity::Identity;

/// Peers banned at once.
const BANNED: usize = 512;

/// Peers that are let in by name: each greeting carries the roster.
const ALLOWED: usize = 1024;

/// Tickets revoked whose permits may still be about.
const REVOKED: usize = 512;

/// What the warden says of peers by name. Of two, the one with the higher version counts.
#[derive(Debug, Clone, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct AccessList {
    /// Of which run; none before there is one.
    pub run: Option<RunId>,
    /// Which edition.
    pub version: u64,
    /// Who is never let in.
    pub banned: BTreeSet<PeerId>,
    /// Tickets that let nobody in any more, until when somebody may still show what came of them.
    pub revoked: BTreeMap<TicketId, UnixTime>,
    /// Who is let in without a ticket.
    pub allowed: BTreeSet<PeerId>,
}

/// As many names as a roster takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the roster has as many names as it can hold ({0}): take some off it first")]
pub struct AccessListFull(usize);

impl Statement for AccessList {
    const PAPER: Paper = Paper::AccessList;
    const PURPOSE: &'static [u8] = b"shoal roster v1\0";
}

impl AccessList {
    /// Bans a peer, which also takes it off the list of who is let in.
    ///
    /// # Errors
    /// When there is no room.
    pub fn ban(&mut self, peer: PeerId) -> Result<(), AccessListFull> {
        self.allowed.remove(&peer);
        self.banned.insert(peer);
        self.fits()
    }

    /// No longer bans a peer; says whether it was.
    pub fn unban(&mut self, peer: PeerId) -> bool {
        self.banned.remove(&peer)
    }

    /// Lets a peer in without a ticket.
    ///
    /// # Errors
    /// When there is no room.
    pub fn allow(&mut self, peer: PeerId) -> Result<(), AccessListFull> {
        self.banned.remove(&peer);
        self.allowed.insert(peer);
        self.fits()
    }

    /// Takes a peer off the list of who is let in; says whether it was on it.
    pub fn disallow(&mut self, peer: PeerId) -> bool {
        self.allowed.remove(&peer)
    }

    /// Revokes a ticket that can be used until `expires`.
    ///
    /// # Errors
    /// When there is no room.
    pub fn revoke(&mut self, ticket: TicketId, expires: UnixTime) -> Result<(), AccessListFull> {
        // The last permit is given when the ticket expires, and is renewed no more.
        self.revoked.insert(ticket, expires.after(2 * PERMIT_LIFE));
        self.fits()
    }

    /// The next edition, signed. What nobody can show any more is left out. The time is part of the version,
    /// so that a warden that lost its roster does not repeat one.
    #[must_use]
    pub fn publish(&mut self, run: RunId, issuer: &Identity, now: UnixTime) -> Signed {
        self.run = Some(run);
        self.version = (self.version + 1).max(now.0);
        self.revoked.retain(|_, until| *until >= now);
        Signed::of(self, issuer)
    }

    /// Whether it holds no more than it may.
    pub(super) fn fits(&self) -> Result<(), AccessListFull> {
        let over = |length: usize, cap: usize| {
            if length > cap { Err(AccessListFull(cap)) } else { Ok(()) }
        };
        over(self.banned.len(), BANNED)?;
        over(self.revoked.len(), REVOKED)?;
        over(self.allowed.len(), ALLOWED)
    }
}
