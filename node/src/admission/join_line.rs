//! The command that the first peer of a run prints for others.

use std::time::Duration;

use anyhow::Context;
use shoal_protocol::manifest::AdmissionMode;
use shoal_protocol::net::admission::{AccessList, RedemptionLog, Term, Ticket, TicketId, UnixTime};
use shoal_protocol::net::discovery::PeerAddress;
use shoal_protocol::net::identity::Identity;

use super::{Issued, KeptRules, Store, TicketState};

/// Validity of the ticket that the first peer prints.
const TICKET_LIFE: Duration = Duration::from_secs(24 * 60 * 60);

/// How others join the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum JoinLine {
    /// Any peer can join at this address.
    Address(String),
    /// One peer can join with this ticket.
    Ticket(String),
    /// Listed peers can join at this address.
    Listed(String),
    /// Another peer issues the tickets.
    Elsewhere,
}

impl JoinLine {
    /// The instructions for people.
    pub(crate) fn line(&self) -> String {
        match self {
            Self::Address(address) => format!("others join with: shoal join {address}"),
            Self::Ticket(ticket) => format!(
                "one other joins with: shoal join {ticket}\ninvite more with: shoal invite new"
            ),
            Self::Listed(address) => format!(
                "listed peers join with: shoal join {address}\nlist a peer with: shoal invite allow PEER"
            ),
            Self::Elsewhere => "the run's issuer invites others: shoal invite new".to_owned(),
        }
    }
}

/// The instructions for joining at this peer's address. In a run by invitation they hold a ticket:
/// the first valid one for this address, or a new one.
pub(crate) fn join_line(
    folder: &Store,
    identity: &Identity,
    address: &str,
) -> anyhow::Result<JoinLine> {
    let rules = folder.rules()?;
    match rules.admission.mode {
        AdmissionMode::Open => return Ok(JoinLine::Address(address.to_owned())),
        AdmissionMode::Allowlist => return Ok(JoinLine::Listed(address.to_owned())),
        AdmissionMode::Invite => {}
    }
    if rules.admission.key != Some(identity.peer_id()) {
        return Ok(JoinLine::Elsewhere);
    }
    let (now, redemptions) = (UnixTime::now(), RedemptionLog::read(&folder.redemptions())?);
    let used =
        |id: TicketId| redemptions.iter().filter(|redemption| redemption.ticket == id).count();
    let tickets = folder.tickets()?;
    let access_list = access_list_of(folder)?;
    let good = tickets.iter().find(|ticket| {
        let here = ticket
            .text
            .parse::<Ticket>()
            .is_ok_and(|read| read.addresses().any(|known| known.to_string() == address));
        here && ticket.state(used(ticket.id), &access_list, now) == TicketState::Open
    });
    match good {
        Some(ticket) => Ok(JoinLine::Ticket(ticket.text.clone())),
        None => Ok(JoinLine::Ticket(issue(folder, identity, TICKET_LIFE, 1)?.to_string())),
    }
}

/// Issues a ticket and records it.
///
/// # Errors
/// If this peer's address is unknown, or the disk is full.
pub(crate) fn issue(
    folder: &Store,
    issuer: &Identity,
    life: Duration,
    uses: u16,
) -> anyhow::Result<Ticket> {
    let KeptRules { run, .. } = folder.rules()?;
    let addresses: Vec<PeerAddress> =
        folder.addresses()?.iter().filter_map(|line| line.parse().ok()).collect();
    anyhow::ensure!(!addresses.is_empty(), "the address of this peer is unknown: start it once");
    let _lock = folder.lock()?;
    let mut tickets = folder.tickets()?;
    let id = TicketId(tickets.iter().map(|ticket| ticket.id.0).max().unwrap_or(0) + 1);
    let term = Term::of(UnixTime::now(), life);
    let ticket = Ticket::new(issuer, (run, id), term, uses, &addresses);
    let text = ticket.to_string();
    tickets.push(Issued { id, expires: term.expires, uses, text });
    folder.keep_tickets(&tickets)?;
    Ok(ticket)
}

/// The access list stored in a folder, or an empty one.
pub(crate) fn access_list_of(folder: &Store) -> anyhow::Result<AccessList> {
    let key = folder.rules()?.admission.key;
    match (folder.access_list()?, key) {
        (Some(signed), Some(key)) => signed.open(key).context("the stored access list is damaged"),
        _ => Ok(Default::default()),
    }
}
