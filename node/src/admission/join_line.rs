//! The command that the first peer of a run prints for others.

use std::time::Duration;

use anyhow::Context;
use shoal_protocol::limits;
use shoal_protocol::manifest::AdmissionMode;
use shoal_protocol::net::admission::{
    AccessList, Admits, RedemptionLog, Term, Ticket, TicketId, UnixTime,
};
use shoal_protocol::net::discovery::PeerAddress;
use shoal_protocol::net::identity::Identity;

use super::{Issued, KeptRules, Store, TicketState};

/// Validity of the ticket that the first peer prints.
const TICKET_LIFE: Duration = Duration::from_secs(24 * 60 * 60);

/// Peers that it admits: as many as a run has members.
const TICKET_USES: u16 = limits::MEMBERS as u16;

/// How others join the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum JoinLine {
    /// Any peer can join at this address.
    Address(String),
    /// Peers that get this ticket can join with it.
    Ticket(String),
    /// Listed peers can join at this address.
    Listed(String),
    /// Another peer issues the tickets.
    Elsewhere,
}

impl JoinLine {
    /// The argument of `shoal join`, where this peer can name one.
    pub(crate) fn argument(&self) -> Option<&str> {
        match self {
            Self::Address(argument) | Self::Ticket(argument) | Self::Listed(argument) => {
                Some(argument)
            }
            Self::Elsewhere => None,
        }
    }

    /// The instructions for people.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Address(address) => format!(
                "others join with: shoal join {address}\n\
                 the run is open: whoever reaches this address takes part, and may compute wrongly; without --open \
                 and mode = \"open\" it takes a ticket"
            ),
            Self::Ticket(ticket) => format!(
                "others join with: shoal join {ticket}\n\
                 keep that line among people you trust; it admits peers for a day (`shoal invite new` makes others)"
            ),
            Self::Listed(address) => format!(
                "listed peers join with: shoal join {address}\nlist a peer with: shoal invite allow PEER"
            ),
            Self::Elsewhere => "the run's issuer invites others: shoal invite new".to_owned(),
        }
    }
}

/// The instructions for joining at this peer's address. In a run by invitation they hold a ticket:
/// the first valid one for this address that admits these peers, or a new one.
pub(crate) fn join_line(
    folder: &Store,
    identity: &Identity,
    addresses: &[PeerAddress],
    anchor: bool,
) -> anyhow::Result<JoinLine> {
    let rules = folder.rules()?;
    let first = || addresses.first().expect("a peer that others join has an address").to_string();
    match rules.admission.mode {
        AdmissionMode::Open => return Ok(JoinLine::Address(first())),
        AdmissionMode::Allowlist => return Ok(JoinLine::Listed(first())),
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
    let admits = Admits { uses: TICKET_USES, anchor };
    let good = tickets.iter().find(|ticket| {
        let fits = ticket.text.parse::<Ticket>().is_ok_and(|read| {
            let known: Vec<PeerAddress> = read.addresses().collect();
            let here = addresses.iter().all(|address| known.contains(address));
            here && admits == Admits { uses: read.terms.uses, anchor: read.terms.anchor }
        });
        fits && ticket.state(used(ticket.id), &access_list, now) == TicketState::Open
    });
    match good {
        Some(ticket) => Ok(JoinLine::Ticket(ticket.text.clone())),
        None => Ok(JoinLine::Ticket(issue(folder, identity, TICKET_LIFE, admits)?.to_string())),
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
    admits: Admits,
) -> anyhow::Result<Ticket> {
    let KeptRules { run, .. } = folder.rules()?;
    let addresses: Vec<PeerAddress> =
        folder.addresses()?.iter().filter_map(|line| line.parse().ok()).collect();
    anyhow::ensure!(!addresses.is_empty(), "the address of this peer is unknown: start it once");
    let _lock = folder.lock()?;
    let mut tickets = folder.tickets()?;
    let id = TicketId(tickets.iter().map(|ticket| ticket.id.0).max().unwrap_or(0) + 1);
    let term = Term::of(UnixTime::now(), life);
    let ticket = Ticket::new(issuer, (run, id), term, admits, &addresses);
    let text = ticket.to_string();
    tickets.push(Issued { id, expires: term.expires, uses: admits.uses, text });
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
