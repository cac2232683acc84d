//! Admission to a run, proved by the signature of one peer: the *issuer*, whose key the manifest
//! names.
//!
//! - A [`Ticket`] is passed on by people. Its holder may ask the issuer for a certificate, once for
//!   each of its uses.
//! - A [`Certificate`] admits one peer, by its id. Any peer of the run checks it without asking
//!   others.
//! - The [`AccessList`] has the banned peers, the revoked tickets and the peers admitted by id. A
//!   newer one replaces an older one, from any source.
//!
//! Transport and discovery consult one [`Gate`] before any other exchange on a connection. Only the
//! issuer counts uses of tickets, on its own disk, so each use is counted once. While the issuer is
//! away, no new peer can join by a ticket; every peer with a certificate can.

mod access_list;
mod certificate;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod decoders;
mod denied;
mod gate;
mod redemptions;
mod refusals;
mod signed;
#[cfg(test)]
mod tests;
mod ticket;
mod ticket_id;

pub use access_list::{AccessList, AccessListFull};
pub use certificate::{CERTIFICATE_LIFETIME, Certificate};
pub use denied::{Denied, Document};
pub use gate::{Gate, Pass, Rules};
pub use redemptions::{Claim, RedemptionError, RedemptionLog, TicketDesk};
pub use refusals::{ConnectionRefused, Reason};
pub use signed::Signed;
pub use ticket::{Admits, Ticket, TicketError, TicketTerms};
pub use ticket_id::TicketId;

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// Maximum difference of two clocks for which one peer accepts the dates of another.
pub const CLOCK_LEEWAY: Duration = Duration::from_secs(300);

/// Seconds since 1970.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Default,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(transparent)]
pub struct UnixTime(pub u64);

impl UnixTime {
    /// The time of this machine's clock.
    #[must_use]
    pub fn now() -> Self {
        // A clock before 1970 is wrong; 0 lets every date appear in the future.
        Self(SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()))
    }

    /// The time after a delay.
    #[must_use]
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span.as_secs()))
    }

    /// The time since `earlier`; zero if `earlier` is in the future.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_secs(self.0.saturating_sub(earlier.0))
    }
}

/// The time of validity of a signed statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Term {
    /// The time of signing.
    pub issued: UnixTime,
    /// The time of expiry.
    pub expires: UnixTime,
}

impl Term {
    /// A term that starts now and has this lifetime.
    #[must_use]
    pub fn of(now: UnixTime, life: Duration) -> Self {
        Self { issued: now, expires: now.after(life) }
    }

    /// Checks that the term includes this time, within the tolerance of clocks.
    fn check(self, document: Document, now: UnixTime) -> Result<(), Denied> {
        if self.issued > now.after(CLOCK_LEEWAY) {
            let ahead = self.issued.since(now).as_secs();
            return Err(Denied::NotYet { document, ahead, clock: now });
        }
        if now > self.expires.after(CLOCK_LEEWAY) {
            let since = now.since(self.expires).as_secs();
            return Err(Denied::Expired { document, since, clock: now });
        }
        Ok(())
    }
}
