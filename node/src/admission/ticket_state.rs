//! What a ticket that was made here is still good for.

use serde::Serialize;
use shoal_protocol::net::admission::{AccessList, UnixTime};

use super::Issued;

/// How a ticket stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TicketState {
    /// It lets somebody in.
    Open,
    /// All its uses are used.
    UsedUp,
    /// Its time is over.
    Expired,
    /// It was taken back.
    Revoked,
}

impl TicketState {
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
    pub(crate) fn ticket_state(
        &self,
        claims: usize,
        access_list: &AccessList,
        now: UnixTime,
    ) -> TicketState {
        if access_list.revoked.contains_key(&self.id) {
            TicketState::Revoked
        } else if claims >= usize::from(self.uses) {
            TicketState::UsedUp
        } else if self.expires <= now {
            TicketState::Expired
        } else {
            TicketState::Open
        }
    }
}
