//! The reasons for refusing admission, with texts for the refused peer.

use std::fmt;

use super::UnixTime;
use super::ticket_id::TicketId;
use crate::ids::{PeerId, RunId};
use crate::manifest::AdmissionMode;

/// The kind of a signed statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum Document {
    /// An invitation that people pass on.
    Ticket,
    /// The admission of one peer.
    Certificate,
    /// The bans and admissions by id.
    AccessList,
}

impl fmt::Display for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ticket => "ticket",
            Self::Certificate => "certificate",
            Self::AccessList => "access list",
        })
    }
}

/// The reason for refusing admission to a peer.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode, thiserror::Error)]
pub enum Denied {
    /// The peer presents no certificate.
    #[error("{}", needed(*mode))]
    Needed {
        /// The run; a peer may have a certificate of it.
        run: RunId,
        /// The admission mode of the run.
        mode: AdmissionMode,
    },
    /// The statement has expired.
    #[error(
        "the {document} expired {} ago: ask for a new one (`shoal invite new`)",
        span(*since)
    )]
    Expired {
        /// The expired statement.
        document: Document,
        /// Seconds since the expiry.
        since: u64,
        /// The clock of the refusing peer.
        clock: UnixTime,
    },
    /// The statement was signed in the future, by the clock of the refusing peer.
    #[error(
        "the {document} is from {} in the future by this peer's clock: one of the clocks is wrong; \
         set them (`timedatectl set-ntp true`)",
        span(*ahead)
    )]
    NotYet {
        /// The statement.
        document: Document,
        /// Seconds until its date of issue.
        ahead: u64,
        /// The clock of the refusing peer.
        clock: UnixTime,
    },
    /// All uses of the ticket are spent.
    #[error(
        "all {uses} uses of ticket {ticket} are used up: ask for a new one (`shoal invite new`)"
    )]
    UsedUp {
        /// The ticket.
        ticket: TicketId,
        /// The number of its uses.
        uses: u16,
    },
    /// The issuer revoked the ticket.
    #[error("ticket {ticket} was revoked, and its certificates with it: ask for a new one")]
    Revoked {
        /// The ticket.
        ticket: TicketId,
    },
    /// The issuer banned the peer.
    #[error(
        "this peer is banned from the run: only `shoal unban` by the run's issuer admits it again"
    )]
    Banned,
    /// The certificate belongs to another peer.
    #[error(
        "the certificate is peer {bound}'s: it is valid for one peer id; start with the data \
         directory that it was issued to, or ask for a ticket"
    )]
    OtherPeer {
        /// The peer that the certificate was issued to.
        bound: PeerId,
    },
    /// The statement belongs to another run.
    #[error("the {document} is for run {theirs}, and this is run {ours}: ask for one of this run")]
    OtherRun {
        /// The statement.
        document: Document,
        /// The run of the statement.
        theirs: RunId,
        /// The run of the refusing peer.
        ours: RunId,
    },
    /// The issuer's signature is missing or wrong.
    #[error(
        "the {document} is not signed by the run's issuer: it is damaged, forged or from another run"
    )]
    Forged {
        /// The statement.
        document: Document,
    },
    /// Only the issuer exchanges tickets for certificates.
    #[error("this peer does not exchange tickets for certificates: connect to the run's issuer")]
    NotIssuer,
    /// The issuer could not record the use of the ticket.
    #[error(
        "the issuer cannot record the use of the ticket: its disk may be full; try again later"
    )]
    NotRecorded,
    /// The refusing peer stores no further certificates.
    #[error("the peer has reached its limit of known certificates")]
    Full,
}

fn needed(mode: AdmissionMode) -> &'static str {
    match mode {
        AdmissionMode::Allowlist => {
            "the run admits listed peers, and this one is not listed: send the line that \
             `shoal id` prints to the run's operator, for `shoal invite allow`"
        }
        _ => {
            "the run admits peers with a ticket: ask its operator for one (`shoal invite new`), \
             and run `shoal join TICKET`"
        }
    }
}

/// A duration in a unit for people.
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
    /// The clock of the refusing peer, if the reason is about time.
    #[must_use]
    pub fn clock(&self) -> Option<UnixTime> {
        match self {
            Self::Expired { clock, .. } | Self::NotYet { clock, .. } => Some(*clock),
            _ => None,
        }
    }

    /// Whether a later attempt may succeed without any change at this peer.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::NotRecorded | Self::Full)
    }
}
