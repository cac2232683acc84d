//! Whether a ticket that was issued here is still valid.

use serde::Serialize;
use shoal_protocol::net::admission::{AccessList, UnixTime};

use super::Issued;

/// The state of a ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TicketState {
    /// It admits a peer.
    Open,
    /// All its uses are redeemed.
    UsedUp,
    /// Its validity has ended.
    Expired,
    /// The issuer revoked it.
    Revoked,
}

impl TicketState {
    /// The state's name in a list.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::UsedUp => "used up",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
        }
    }
}

impl Issued {
    /// The state after this number of redemptions.
    pub(crate) fn state(
        &self,
        redemptions: usize,
        access_list: &AccessList,
        now: UnixTime,
    ) -> TicketState {
        if access_list.revoked.contains_key(&self.id) {
            TicketState::Revoked
        } else if redemptions >= usize::from(self.uses) {
            TicketState::UsedUp
        } else if self.expires <= now {
            TicketState::Expired
        } else {
            TicketState::Open
        }
    }
}
