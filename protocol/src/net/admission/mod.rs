//! Who may take part in a run, proved by what one peer signed: the *warden*, whose key the manifest
//! names.
//!
//! - A [`Ticket`] is passed on by people. Whoever has it may ask the warden, once for each of its uses,
//!   for a permit.
//! - A [`Certificate`] lets in one peer, by its id. Any peer of the run checks it without asking anybody.
//! - The [`AccessList`] lists who is banned, which tickets are revoked and who is let in by name. A newer one
//!   replaces an older one wherever it comes from.
//!
//! Both planes ask one [`Gate`], before anything else is said on a connection. Only the warden counts uses,
//! on its own disk, so each is counted once; while it is away nobody new gets in by a ticket, and everybody
//! who has a permit does.

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
pub use certificate::{Certificate, PERMIT_LIFE};
pub use denied::{Denied, Paper};
pub use gate::{Gate, Pass, Rules};
pub use redemptions::{Claim, Desk, RedemptionError, RedemptionLog};
pub use refusals::{ConnectionRefused, Reason};
pub use signed::Signed;
pub use ticket::{Ticket, TicketError, TicketTerms};
pub use ticket_id::TicketId;

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// How far two clocks may be apart before what one has signed is of no use to the other.
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
    /// What this machine's clock says.
    #[must_use]
    pub fn now() -> Self {
        // A clock from before 1970 is wrong, and everything is ahead of it.
        Self(SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()))
    }

    /// So much later.
    #[must_use]
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span.as_secs()))
    }

    /// How long ago `earlier` was; zero where it is yet to come.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_secs(self.0.saturating_sub(earlier.0))
    }
}

/// From when until when something signed is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Term {
    /// When it was signed.
    pub issued: UnixTime,
    /// When it ends.
    pub expires: UnixTime,
}

impl Term {
    /// From now on, for so long.
    #[must_use]
    pub fn of(now: UnixTime, life: Duration) -> Self {
        Self { issued: now, expires: now.after(life) }
    }

    /// Whether that is now, as far as clocks agree.
    fn check(self, paper: Paper, now: UnixTime) -> Result<(), Denied> {
        if self.issued > now.after(CLOCK_LEEWAY) {
            let ahead = self.issued.since(now).as_secs();
            return Err(Denied::NotYet { paper, ahead, clock: now });
        }
        if now > self.expires.after(CLOCK_LEEWAY) {
            let since = now.since(self.expires).as_secs();
            return Err(Denied::Expired { paper, since, clock: now });
        }
        Ok(())
    }
}
