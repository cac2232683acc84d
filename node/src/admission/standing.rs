//! What a ticket that was made here is still good for.

use serde::Serialize;
use shoal_protocol::net::admission::{Roster, UnixTime};

use super::Issued;

/// How a ticket stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Standing {
    /// It lets somebody in.
    Open,
    /// All its uses are used.
    UsedUp,
    /// Its time is over.
    Expired,
    /// It was taken back.
    Revoked,
}

impl Standing {
    /// As a list shows it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::UsedUp => "used up",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
        }
    }
}

impl Issued {
    /// How it stands after so many claims.
    pub(crate) fn standing(&self, claims: usize, roster: &Roster, now: UnixTime) -> Standing {
        if roster.revoked.contains_key(&self.id) {
            Standing::Revoked
        } else if claims >= usize::from(self.uses) {
            Standing::UsedUp
        } else if self.expires <= now {
            Standing::Expired
        } else {
            Standing::Open
        }
    }
}
