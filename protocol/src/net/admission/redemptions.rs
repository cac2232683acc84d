//! The issuer's log of ticket redemptions, and the exchange of tickets for certificates.
//!
//! A redemption is on the disk before its certificate is issued, so a use is never given twice,
//! even if the issuer crashes. The same peer may redeem the same ticket again: it counts as the
//! same use.

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

/// A record consists of ticket, peer, time, and a checksum of these.
const RECORD: usize = 4 + 32 + 8 + 8;

/// Maximum number of redemptions of one run.
const CLAIMS: usize = 1 << 16;

/// One redemption of a ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// The redeemed ticket.
    pub ticket: TicketId,
    /// The peer that redeemed it.
    pub peer: PeerId,
    /// The time of redemption.
    pub at: UnixTime,
}

/// Errors of the redemption log.
#[derive(Debug, thiserror::Error)]
pub enum RedemptionError {
    /// The disk returned an error.
    #[error("the redemption log {} cannot be used: {source}", path.display())]
    Io {
        /// The log file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The log has reached its limit.
    #[error("the redemption log {} is full ({CLAIMS} redemptions)", path.display())]
    Full {
        /// The log file.
        path: PathBuf,
    },
    /// A record before the last is damaged, so uses might be given twice.
    #[error(
        "the redemption log {} is damaged: revoke all tickets (`shoal invite revoke`), then \
         remove it",
        path.display()
    )]
    Damaged {
        /// The log file.
        path: PathBuf,
    },
}

/// The redemptions of one run's tickets, in an append-only file.
#[derive(Debug)]
pub struct RedemptionLog {
    path: PathBuf,
    file: File,
    claims: BTreeMap<TicketId, BTreeSet<PeerId>>,
    count: usize,
}

impl RedemptionLog {
    /// Opens a log, or creates one. A record that a crash truncated was never granted, and is
    /// removed.
    ///
    /// # Errors
    /// If it is damaged or cannot be used.
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

    /// The redemptions in a log, in order; empty if there is no log.
    ///
    /// # Errors
    /// If it is damaged or cannot be read.
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
        // Only the last record may be truncated.
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

    /// Appends a redemption; it is on the disk when this returns.
    fn record(&mut self, claim: Claim) -> Result<(), RedemptionError> {
        if self.count >= CLAIMS {
            return Err(RedemptionError::Full { path: self.path.clone() });
        }
        let written = self.file.write_all(&encode(&claim)).and_then(|()| self.file.sync_data());
        if let Err(source) = written {
            // A partial record must not precede the next one.
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

/// Exchanges tickets for certificates, on behalf of the issuer.
#[derive(Debug)]
pub struct TicketDesk {
    issuer: Identity,
    run: RunId,
    log: Mutex<RedemptionLog>,
}

impl TicketDesk {
    /// The desk of a run, on its issuer's node.
    #[must_use]
    pub fn new(issuer: Identity, run: RunId, log: RedemptionLog) -> Self {
        Self { issuer, run, log: Mutex::new(log) }
    }

    /// The run's issuer.
    #[must_use]
    pub fn issuer(&self) -> PeerId {
        self.issuer.peer_id()
    }

    /// Exchanges a ticket for a certificate of a peer, and counts the use. Blocks on disk writes.
    ///
    /// # Errors
    /// If the ticket is not valid or used up, or the redemption cannot be recorded.
    pub fn claim(&self, ticket: &Ticket, peer: PeerId, now: UnixTime) -> Result<Signed, Denied> {
        ticket.is_of(self.run, now)?;
        let (id, uses) = (ticket.terms.id, ticket.terms.uses);
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if !log.has(id, peer) {
            if log.used(id) >= usize::from(uses) {
                return Err(Denied::UsedUp { ticket: id, uses });
            }
            log.record(Claim { ticket: id, peer, at: now }).map_err(|error| {
                tracing::error!(%error, "a ticket redemption was not recorded");
                Denied::NotRecorded
            })?;
        }
        Ok(Certificate::sign(&self.issuer, self.run, peer, (id, ticket.terms.anchor), now))
    }

    /// A new certificate that replaces a valid one.
    #[must_use]
    pub fn renew(&self, certificate: &Certificate, now: UnixTime) -> Signed {
        let Certificate { peer, ticket, anchor, .. } = *certificate;
        Certificate::sign(&self.issuer, self.run, peer, (ticket, anchor), now)
    }
}
