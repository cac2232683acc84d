//! Why a peer is not let in, in words for the one who is not.

use std::fmt;

use super::UnixTime;
use super::ticket_id::TicketId;
use crate::ids::{PeerId, RunId};
use crate::manifest::AdmissionMode;

/// What somebody signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum Paper {
    /// What people pass on.
    Ticket,
    /// What lets in one peer.
    Certificate,
    /// Who is banned and who is listed.
    AccessList,
}

impl fmt::Display for Paper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ticket => "ticket",
            Self::Certificate => "permit",
            Self::AccessList => "roster",
        })
    }
}

/// Why a peer is not let in.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode, thiserror::Error)]
pub enum Denied {
    /// It shows nothing.
    #[error("{}", needed(*mode))]
    Needed {
        /// The run, for who has a permit of it.
        run: RunId,
        /// Whom it lets in.
        mode: AdmissionMode,
    },
    /// Its time is over.
    #[error(
        "the {paper} expired {} ago: ask for a new one (`shoal invite new`)",
        span(*since)
    )]
    Expired {
        /// What has.
        paper: Paper,
        /// Seconds since then.
        since: u64,
        /// What the clock of who says so says.
        clock: UnixTime,
    },
    /// By the clock of who looks at it, it was not signed yet.
    #[error(
        "the {paper} is from {} in the future by this peer's clock: one of the clocks is wrong; \
         set them (`timedatectl set-ntp true`)",
        span(*ahead)
    )]
    NotYet {
        /// What is.
        paper: Paper,
        /// Seconds until then.
        ahead: u64,
        /// What the clock of who says so says.
        clock: UnixTime,
    },
    /// Others were faster.
    #[error(
        "all {uses} uses of ticket {ticket} are used up: ask for a new one (`shoal invite new`)"
    )]
    UsedUp {
        /// Which.
        ticket: TicketId,
        /// How many it had.
        uses: u16,
    },
    /// The warden took it back.
    #[error("ticket {ticket} was revoked, and what came of it with it: ask for a new one")]
    Revoked {
        /// Which.
        ticket: TicketId,
    },
    /// The warden does not want this peer.
    #[error("this peer is banned from the run: only `shoal unban` by its warden lets it in again")]
    Banned,
    /// A permit is for one peer.
    #[error(
        "the permit is peer {bound}'s: a permit works for one peer id; start with the data directory \
         that it was given to, or ask for a ticket"
    )]
    OtherPeer {
        /// Whose it is.
        bound: PeerId,
    },
    /// It is for something else.
    #[error("the {paper} is for run {theirs}, and this is run {ours}: ask for one of this run")]
    OtherRun {
        /// What is.
        paper: Paper,
        /// Its run.
        theirs: RunId,
        /// The run of who says so.
        ours: RunId,
    },
    /// The warden did not sign it.
    #[error(
        "the {paper} is not signed by the run's warden: it is damaged, forged or another run's"
    )]
    Forged {
        /// What is not.
        paper: Paper,
    },
    /// Only one peer turns tickets into permits.
    #[error("this peer turns no tickets into permits")]
    NotIssuer,
    /// The warden could not write it down.
    #[error(
        "the warden cannot record that the ticket is used: its disk may be full; try again later"
    )]
    NotRecorded,
    /// More permits are known than fit.
    #[error("this peer has let in as many peers as it can remember")]
    Full,
}

fn needed(mode: AdmissionMode) -> &'static str {
    match mode {
        AdmissionMode::Allowlist => {
            "the run lets in listed peers, and this one is not listed: send the line that `shoal id` \
             prints to who runs it, for `shoal invite allow`"
        }
        _ => {
            "the run lets in who has a ticket: ask who runs it for one (`shoal invite new`), and \
             type `shoal join TICKET`"
        }
    }
}

/// A span as people say it.
fn span(seconds: u64) -> String {
    let (count, unit) = match seconds {
        0..120 => (seconds, "s"),
        120..7200 => (seconds / 60, "minutes"),
        7200..172_800 => (seconds / 3600, "hours"),
        _ => (seconds / 86_400, "days"),
    };
    format!("{count} {unit}")
}

impl Denied {
    /// What the clock of who said it said, where it is about time.
    #[must_use]
    pub fn clock(&self) -> Option<UnixTime> {
        match self {
            Self::Expired { clock, .. } | Self::NotYet { clock, .. } => Some(*clock),
            _ => None,
        }
    }

    /// Whether the same may be let in later without anybody doing anything here.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::NotRecorded | Self::Full)
    }
}
