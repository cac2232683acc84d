//! The warden's book of who turned which ticket into a permit, and the desk where that is done.
//!
//! A claim is on the disk before its permit is given, so a use is never given twice, whenever the warden
//! dies. The same peer may claim the same ticket again: it is the same use.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::UnixTime;
use super::certificate::Certificate;
use super::denied::Denied;
use super::signed::Signed;
use super::ticket::Ticket;
use super::ticket_id::TicketId;
use crate::ids::{PeerId, RunId};
use crate::net::identity::Identity;

/// Ticket, peer, time, and a checksum of these.
const RECORD: usize = 4 + 32 + 8 + 8;

/// Claims of one run at most: no more is read, nor written.
const CLAIMS: usize = 1 << 16;

/// A use of a ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// Of which.
    pub ticket: TicketId,
    /// By whom.
    pub peer: PeerId,
    /// When.
    pub at: UnixTime,
}

/// Why the book cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RedemptionError {
    /// The disk refused.
    #[error("the book of claims {} cannot be used: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It has as many claims as it takes.
    #[error("the book of claims {} is full ({CLAIMS} claims)", path.display())]
    Full {
        /// Which file.
        path: PathBuf,
    },
    /// A record in its midst is damaged, so uses might be given twice.
    #[error(
        "the book of claims {} is damaged: revoke all tickets (`shoal invite revoke`), then remove it",
        path.display()
    )]
    Damaged {
        /// Which file.
        path: PathBuf,
    },
}

/// The claims of one run's tickets, in a file that only grows.
#[derive(Debug)]
pub struct RedemptionLog {
    path: PathBuf,
    file: File,
    claims: BTreeMap<TicketId, BTreeSet<PeerId>>,
    count: usize,
}

impl RedemptionLog {
    /// Opens a book, or begins one. What a death cut off in writing was never given, and is dropped.
    ///
    /// # Errors
    /// When it is damaged or cannot be used.
    pub fn open(path: &Path) -> Result<Self, RedemptionError> {
        let failed = |source| RedemptionError::Io { path: path.to_owned(), source };
        let mut options = OpenOptions::new();
        let file = options.create(true).append(true).read(true).mode(0o600).open(path);
        let file = file.map_err(failed)?;
        let found = Self::read(path)?;
        let whole = (found.len() * RECORD) as u64;
        if file.metadata().map_err(failed)?.len() != whole {
            file.set_len(whole).and_then(|()| file.sync_all()).map_err(failed)?;
        }
        let mut claims: BTreeMap<TicketId, BTreeSet<PeerId>> = BTreeMap::new();
        for claim in &found {
            claims.entry(claim.ticket).or_default().insert(claim.peer);
        }
        Ok(Self { path: path.to_owned(), file, claims, count: found.len() })
    }

    /// The claims in a book, in their order; none where there is no book.
    ///
    /// # Errors
    /// When it is damaged or cannot be read.
    pub fn read(path: &Path) -> Result<Vec<Claim>, RedemptionError> {
        let failed = |source| RedemptionError::Io { path: path.to_owned(), source };
        let mut bytes = Vec::new();
        match File::open(path) {
            Ok(file) => {
                let cap = ((CLAIMS + 1) * RECORD) as u64;
                file.take(cap).read_to_end(&mut bytes).map_err(failed)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        }
        let (records, _) = bytes.as_chunks::<RECORD>();
        let claims: Vec<Option<Claim>> = records.iter().map(decode).collect();
        let whole: Vec<Claim> = claims.iter().map_while(|claim| *claim).collect();
        // Only the last may have been cut.
        if whole.len() + 1 < claims.len() {
            return Err(RedemptionError::Damaged { path: path.to_owned() });
        }
        Ok(whole)
    }

    /// Whether this peer has used this ticket.
    fn has(&self, ticket: TicketId, peer: PeerId) -> bool {
        self.claims.get(&ticket).is_some_and(|peers| peers.contains(&peer))
    }

    fn used(&self, ticket: TicketId) -> usize {
        self.claims.get(&ticket).map_or(0, BTreeSet::len)
    }

    /// Writes a claim down; it is on the disk when this returns.
    fn record(&mut self, claim: Claim) -> Result<(), RedemptionError> {
        if self.count >= CLAIMS {
            return Err(RedemptionError::Full { path: self.path.clone() });
        }
        let written = self.file.write_all(&encode(&claim)).and_then(|()| self.file.sync_data());
        if let Err(source) = written {
            // What was half written must not stand before the next record.
            let _ = self.file.set_len((self.count * RECORD) as u64);
            return Err(RedemptionError::Io { path: self.path.clone(), source });
        }
        self.count += 1;
        self.claims.entry(claim.ticket).or_default().insert(claim.peer);
        Ok(())
    }
}

fn encode(claim: &Claim) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[..4].copy_from_slice(&claim.ticket.0.to_le_bytes());
    record[4..36].copy_from_slice(&claim.peer.0);
    record[36..44].copy_from_slice(&claim.at.0.to_le_bytes());
    let sum = checksum(&record[..44]);
    record[44..].copy_from_slice(&sum);
    record
}

fn decode(record: &[u8; RECORD]) -> Option<Claim> {
    if record[44..] != checksum(&record[..44]) {
        return None;
    }
    Some(Claim {
        ticket: TicketId(u32::from_le_bytes(*record.first_chunk()?)),
        peer: PeerId(*record[4..].first_chunk()?),
        at: UnixTime(u64::from_le_bytes(*record[36..].first_chunk()?)),
    })
}

fn checksum(bytes: &[u8]) -> [u8; 8] {
    *blake3::hash(bytes).as_bytes().first_chunk().expect("32 bytes")
}

/// Where the warden turns tickets into permits.
#[derive(Debug)]
pub struct Desk {
    issuer: Identity,
    run: RunId,
    book: Mutex<RedemptionLog>,
}

impl Desk {
    /// The desk of a run whose warden this is.
    #[must_use]
    pub fn new(issuer: Identity, run: RunId, book: RedemptionLog) -> Self {
        Self { issuer, run, book: Mutex::new(book) }
    }

    /// The run's warden.
    #[must_use]
    pub fn issuer(&self) -> PeerId {
        self.issuer.peer_id()
    }

    /// Turns a ticket into a permit for a peer, and counts the use. Waits for the disk.
    ///
    /// # Errors
    /// When the ticket is of no use, or used up, or the claim cannot be written down.
    pub fn claim(&self, ticket: &Ticket, peer: PeerId, now: UnixTime) -> Result<Signed, Denied> {
        ticket.is_of(self.run, now)?;
        let (id, uses) = (ticket.terms.id, ticket.terms.uses);
        let mut book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        if !book.has(id, peer) {
            if book.used(id) >= usize::from(uses) {
                return Err(Denied::UsedUp { ticket: id, uses });
            }
            book.record(Claim { ticket: id, peer, at: now }).map_err(|error| {
                tracing::error!(%error, "a claim was not recorded");
                Denied::NotRecorded
            })?;
        }
        Ok(Certificate::sign(&self.issuer, self.run, peer, id, now))
    }

    /// A new permit in the place of a good one.
    #[must_use]
    pub fn renew(&self, certificate: &Certificate, now: UnixTime) -> Signed {
        Certificate::sign(&self.issuer, self.run, certificate.peer, certificate.ticket, now)
    }
}
