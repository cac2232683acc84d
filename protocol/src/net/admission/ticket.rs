//! Tickets: invitations that people pass on.

use std::fmt;
use std::str::FromStr;

use super::denied::{Denied, Document};
use super::signed::{Signed, Statement};
use super::ticket_id::TicketId;
use super::{Term, UnixTime};
use crate::ids::{PeerId, RunId};
use crate::net::discovery::{Host, PeerAddress};
use crate::net::identity::Identity;
use crate::wire;

/// The prefix of every ticket.
const PREFIX: &str = "shoal1";

/// Maximum number of characters of a ticket.
const LONGEST: usize = 1000;

/// Maximum number of addresses in a ticket.
const ADDRESSES: usize = 8;

/// Whom a ticket admits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admits {
    /// The number of peers.
    pub uses: u16,
    /// Whether they may be anchors.
    pub anchor: bool,
}

/// The content of a ticket.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TicketTerms {
    /// The run.
    pub run: RunId,
    /// The number of the ticket.
    pub id: TicketId,
    /// The time in which it can be exchanged for a certificate.
    pub term: Term,
    /// The number of peers that it admits.
    pub uses: u16,
    /// Whether its bearers may be anchors.
    pub anchor: bool,
    places: Vec<Place>,
}

/// An address, without the parts that follow from the ticket.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
struct Place {
    host: Host,
    port: u16,
    /// `None` stands for the issuer.
    peer: Option<PeerId>,
}

impl Statement for TicketTerms {
    const PAPER: Document = Document::Ticket;
    const PURPOSE: &'static [u8] = b"shoal ticket v1\0";
}

/// A ticket whose signature was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    /// The signer, which alone exchanges it for a certificate.
    pub issuer: PeerId,
    /// The content of the ticket.
    pub terms: TicketTerms,
    signed: Signed,
}

/// Errors of ticket texts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// The text is not a ticket.
    #[error("a ticket begins with {PREFIX}")]
    NotOne,
    /// Part of the text is missing or was changed.
    #[error("the ticket is damaged: copy all of it, from {PREFIX} to its end")]
    Damaged,
    /// An address in the ticket is invalid.
    #[error("the ticket has invalid addresses: ask for a new one")]
    Address,
}

impl Ticket {
    /// Signs a ticket. The issuer's own addresses should come first.
    #[must_use]
    pub fn new(
        issuer: &Identity,
        (run, id): (RunId, TicketId),
        term: Term,
        admits: Admits,
        addresses: &[PeerAddress],
    ) -> Self {
        let own = issuer.peer_id();
        let place = |address: &PeerAddress| Place {
            host: address.host.clone(),
            port: address.port,
            peer: (address.peer != own).then_some(address.peer),
        };
        let places = addresses.iter().take(ADDRESSES).map(place).collect();
        let Admits { uses, anchor } = admits;
        let terms = TicketTerms { run, id, term, uses, anchor, places };
        let signed = Signed::of(&terms, issuer);
        Self { issuer: own, terms, signed }
    }

    /// Whether a text looks like a ticket.
    #[must_use]
    pub fn is_meant(text: &str) -> bool {
        text.starts_with(PREFIX)
    }

    /// A ticket received over a connection, if this issuer signed it.
    ///
    /// # Errors
    /// [`Denied::Forged`] if it did not.
    pub fn received(issuer: PeerId, signed: Signed) -> Result<Self, Denied> {
        let terms: TicketTerms = signed.open(issuer)?;
        let ticket = Self { issuer, terms, signed };
        ticket.check().map_err(|_| Denied::Forged { document: Document::Ticket })?;
        Ok(ticket)
    }

    /// The signed form that is sent.
    #[must_use]
    pub fn signed(&self) -> &Signed {
        &self.signed
    }

    /// Addresses of peers of the run, the issuer's first.
    pub fn addresses(&self) -> impl Iterator<Item = PeerAddress> + '_ {
        self.terms.places.iter().map(|place| PeerAddress {
            host: place.host.clone(),
            port: place.port,
            peer: place.peer.unwrap_or(self.issuer),
        })
    }

    /// Checks that the ticket belongs to this run and is valid at this time.
    ///
    /// # Errors
    /// If it belongs to another run, or is not valid at this time.
    pub fn is_of(&self, run: RunId, now: UnixTime) -> Result<(), Denied> {
        let theirs = self.terms.run;
        if theirs != run {
            return Err(Denied::OtherRun { document: Document::Ticket, theirs, ours: run });
        }
        self.is_timely(now)
    }

    /// Checks that the ticket is valid at this time.
    ///
    /// # Errors
    /// If it has expired, or its date is in the future.
    pub fn is_timely(&self, now: UnixTime) -> Result<(), Denied> {
        self.terms.term.check(Document::Ticket, now)
    }

    fn check(&self) -> Result<(), TicketError> {
        let reads_back = |address: PeerAddress| address.to_string().parse() == Ok(address);
        if self.terms.places.len() > ADDRESSES || !self.addresses().all(reads_back) {
            return Err(TicketError::Address);
        }
        Ok(())
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = wire::encode(&(self.issuer, &self.signed)).expect("a ticket is small");
        write!(f, "{PREFIX}{}", bs58::encode(bytes).into_string())
    }
}

impl FromStr for Ticket {
    type Err = TicketError;

    fn from_str(text: &str) -> Result<Self, TicketError> {
        let body = text.strip_prefix(PREFIX).ok_or(TicketError::NotOne)?;
        if text.len() > LONGEST {
            return Err(TicketError::Damaged);
        }
        let bytes = bs58::decode(body).into_vec().map_err(|_| TicketError::Damaged)?;
        let (issuer, signed): (PeerId, Signed) =
            wire::decode(&bytes).map_err(|_| TicketError::Damaged)?;
        let terms: TicketTerms = signed.open(issuer).map_err(|_| TicketError::Damaged)?;
        let ticket = Self { issuer, terms, signed };
        ticket.check()?;
        Ok(ticket)
    }
}
