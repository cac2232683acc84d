//! What people pass on to have another peer let in.

use std::fmt;
use std::str::FromStr;

use super::denied::{Denied, Paper};
use super::signed::{Signed, Statement};
use super::ticket_id::TicketId;
use super::{Term, UnixTime};
use crate::ids::{PeerId, RunId};
use crate::net::discovery::{Host, PeerAddress};
use crate::net::identity::Identity;
use crate::wire;

/// What every ticket begins with.
const PREFIX: &str = "shoal1";

/// Characters of a ticket at most.
const LONGEST: usize = 1000;

/// Addresses in a ticket.
const ADDRESSES: usize = 8;

/// What a ticket says.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TicketTerms {
    /// For which run.
    pub run: RunId,
    /// Which ticket of it.
    pub id: TicketId,
    /// From when until when it can be turned into a permit.
    pub term: Term,
    /// How many peers it lets in.
    pub uses: u16,
    places: Vec<Place>,
}

/// An address without what the ticket says anyway.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
struct Place {
    host: Host,
    port: u16,
    /// None is the warden.
    peer: Option<PeerId>,
}

impl Statement for TicketTerms {
    const PAPER: Paper = Paper::Ticket;
    const PURPOSE: &'static [u8] = b"shoal ticket v1\0";
}

/// A ticket whose signature is its warden's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    /// Who signed it, and alone turns it into a permit.
    pub issuer: PeerId,
    /// What it says.
    pub terms: TicketTerms,
    signed: Signed,
}

/// What is wrong with a ticket.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// Something else.
    #[error("a ticket begins with {PREFIX}")]
    NotOne,
    /// Something is missing, or was changed on the way.
    #[error("the ticket is damaged: copy all of it, from {PREFIX} to its end")]
    Damaged,
    /// An address that leads nowhere.
    #[error("the ticket has addresses that are none: ask for a new one")]
    Address,
}

impl Ticket {
    /// Signs a ticket. Of the addresses, the warden's own come first.
    #[must_use]
    pub fn new(
        issuer: &Identity,
        (run, id): (RunId, TicketId),
        term: Term,
        uses: u16,
        addresses: &[PeerAddress],
    ) -> Self {
        let own = issuer.peer_id();
        let place = |address: &PeerAddress| Place {
            host: address.host.clone(),
            port: address.port,
            peer: (address.peer != own).then_some(address.peer),
        };
        let places = addresses.iter().take(ADDRESSES).map(place).collect();
        let terms = TicketTerms { run, id, term, uses, places };
        let signed = Signed::of(&terms, issuer);
        Self { issuer: own, terms, signed }
    }

    /// Whether a text is meant to be one.
    #[must_use]
    pub fn is_meant(text: &str) -> bool {
        text.starts_with(PREFIX)
    }

    /// A ticket that came over a connection, if its signature is this warden's.
    ///
    /// # Errors
    /// [`Denied::Forged`] when it is not.
    pub fn received(issuer: PeerId, signed: Signed) -> Result<Self, Denied> {
        let terms: TicketTerms = signed.open(issuer)?;
        let ticket = Self { issuer, terms, signed };
        ticket.check().map_err(|_| Denied::Forged { paper: Paper::Ticket })?;
        Ok(ticket)
    }

    /// As it travels.
    #[must_use]
    pub fn signed(&self) -> &Signed {
        &self.signed
    }

    /// Where peers of the run are, the warden first.
    pub fn addresses(&self) -> impl Iterator<Item = PeerAddress> + '_ {
        self.terms.places.iter().map(|place| PeerAddress {
            host: place.host.clone(),
            port: place.port,
            peer: place.peer.unwrap_or(self.issuer),
        })
    }

    /// Whether it can be turned into a permit of this run now, as far as dates go.
    ///
    /// # Errors
    /// When it is another run's, or it is not its time.
    pub fn is_of(&self, run: RunId, now: UnixTime) -> Result<(), Denied> {
        let theirs = self.terms.run;
        if theirs != run {
            return Err(Denied::OtherRun { paper: Paper::Ticket, theirs, ours: run });
        }
        self.is_timely(now)
    }

    /// Whether it is its time.
    ///
    /// # Errors
    /// When it has expired, or is from the future.
    pub fn is_timely(&self, now: UnixTime) -> Result<(), Denied> {
        self.terms.term.check(Paper::Ticket, now)
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
