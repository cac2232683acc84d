//! What the first peer of a run prints for others to type.

use std::time::Duration;

use anyhow::Context;
use shoal_protocol::manifest::AdmissionMode;
use shoal_protocol::net::admission::{AccessList, RedemptionLog, Term, Ticket, TicketId, UnixTime};
use shoal_protocol::net::discovery::PeerAddress;
use shoal_protocol::net::identity::Identity;

use super::{Issued, KeptRules, Store, TicketState};

/// How long the ticket can be used that the first peer prints.
const TICKET_LIFE: Duration = Duration::from_secs(24 * 60 * 60);

/// How others get into the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum JoinLine {
    /// Everybody may come here.
    Address(String),
    /// One peer may come with this.
    Ticket(String),
    /// Whoever is listed may come here.
    Listed(String),
    /// Another peer gives tickets.
    Elsewhere,
}

impl JoinLine {
    /// The line for people.
    pub(crate) fn line(&self) -> String {
        match self {
            Self::Address(address) => format!("others join with: shoal join {address}"),
            Self::Ticket(ticket) => format!(
                "one other joins with: shoal join {ticket}\nmore are invited with: shoal invite new"
            ),
            Self::Listed(address) => format!(
                "listed peers join with: shoal join {address}\nthey are listed with: shoal invite allow PEER"
            ),
            Self::Elsewhere => "the run's warden invites others: shoal invite new".to_owned(),
        }
    }
}

/// What others type to join at this peer's address. In a run of invited peers that is a ticket: the first one
/// here that is still good, or a new one.
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
    let (now, claims) = (UnixTime::now(), RedemptionLog::read(&folder.claims())?);
    let used = |id: TicketId| claims.iter().filter(|claim| claim.ticket == id).count();
    let tickets = folder.tickets()?;
    let access_list = access_list_of(folder)?;
    let good = tickets.iter().find(|ticket| {
        let here = ticket
            .text
            .parse::<Ticket>()
            .is_ok_and(|read| read.addresses().any(|known| known.to_string() == address));
        here && ticket.ticket_state(used(ticket.id), &access_list, now) == TicketState::Open
    });
    match good {
        Some(ticket) => Ok(JoinLine::Ticket(ticket.text.clone())),
        None => Ok(JoinLine::Ticket(issue(folder, identity, TICKET_LIFE, 1)?.to_string())),
    }
}

/// Makes a ticket and notes it.
///
/// # Errors
/// When it is not known where this peer is, or the disk does not take it.
pub(crate) fn issue(
    folder: &Store,
    issuer: &Identity,
    life: Duration,
    uses: u16,
) -> anyhow::Result<Ticket> {
    let KeptRules { run, .. } = folder.rules()?;
    let addresses: Vec<PeerAddress> =
        folder.addresses()?.iter().filter_map(|line| line.parse().ok()).collect();
    anyhow::ensure!(
        !addresses.is_empty(),
        "it is not known where this peer listens: start it once"
    );
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

/// The roster that is written in a folder; an empty one where none is.
pub(crate) fn access_list_of(folder: &Store) -> anyhow::Result<AccessList> {
    let key = folder.rules()?.admission.key;
    match (folder.access_list()?, key) {
        (Some(signed), Some(key)) => signed.open(key).context("the roster that is kept is damaged"),
        _ => Ok(Default::default()),
    }
}
