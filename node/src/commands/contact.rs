//! Contacts a run by an address, a ticket, or the certificate of an earlier incarnation.

use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, anyhow};
use shoal_protocol::ids::RunId;
use shoal_protocol::net::admission::{
    CLOCK_LEEWAY, Certificate, Denied, Document, Signed, Ticket, TicketError, UnixTime,
};
use shoal_protocol::net::discovery::{AddressError, PeerAddress};
use shoal_protocol::net::transport::{ConnectError, Refusal, Transport, Welcome};

use crate::admission::Store;
use crate::exit::{Exit, ExitWith};

/// A clock difference above this is reported.
const CLOCKS_APART: Duration = Duration::from_secs(CLOCK_LEEWAY.as_secs() / 2);

/// The argument of `shoal join`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum JoinLine {
    /// The address of a peer.
    Address(PeerAddress),
    /// An invitation.
    Ticket(Box<Ticket>),
}

/// The argument is neither an address nor a ticket.
#[derive(Debug, thiserror::Error)]
pub(super) enum JoinLineError {
    /// It is not an address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// It looks like a ticket and is not valid.
    #[error(transparent)]
    Ticket(#[from] TicketError),
}

impl FromStr for JoinLine {
    type Err = JoinLineError;

    fn from_str(text: &str) -> Result<Self, JoinLineError> {
        if Ticket::is_meant(text) {
            return Ok(Self::Ticket(Box::new(text.parse()?)));
        }
        Ok(Self::Address(text.parse()?))
    }
}

impl JoinLine {
    /// The addresses of the run's peers.
    pub(super) fn addresses(&self) -> Vec<PeerAddress> {
        match self {
            Self::Address(address) => vec![address.clone()],
            Self::Ticket(ticket) => ticket.addresses().collect(),
        }
    }
}

/// Connects to peers of a run with restricted admission.
pub(super) struct Seeker<'a> {
    pub(super) transport: &'a Transport,
    /// Holds the certificates of earlier incarnations; a client has none.
    pub(super) data_dir: Option<&'a Path>,
}

/// Why a run was not reached.
enum Failure {
    /// A connection failed.
    Connect(PeerAddress, ConnectError),
    /// Any other cause.
    Other(anyhow::Error),
}

type Reached = (PeerAddress, Welcome);

impl Seeker<'_> {
    /// Connects to a peer by an address or a ticket.
    ///
    /// # Errors
    /// If no peer answers, or this peer is not admitted. The error names a fix.
    pub(super) async fn reach(&self, join_line: &JoinLine) -> anyhow::Result<Reached> {
        match join_line {
            JoinLine::Address(address) => self.reach_at(address).await.map_err(Failure::into_error),
            JoinLine::Ticket(ticket) => self.reach_by(ticket).await,
        }
        .exit_with(Exit::NotAdmitted)
    }

    async fn reach_by(&self, ticket: &Ticket) -> anyhow::Result<Reached> {
        let (gate, issuer) = (self.transport.gate(), ticket.issuer);
        let stored = self.stored_certificate(ticket.terms.run)?;
        if let Some(certificate) = stored.filter(|stored| Certificate::covers(stored, ticket)) {
            // The ticket was redeemed before and is not needed again.
            gate.hold(certificate);
            match self.first(ticket.addresses()).await {
                Err(failure) if failure.is_about_certificate() => {}
                reached => return reached.map_err(Failure::into_error),
            }
        }
        ticket.is_timely(UnixTime::now()).map_err(|denied| not_admitted(&denied))?;
        gate.invite(ticket.clone());
        let own = ticket.addresses().filter(|address| address.peer == issuer);
        let (address, welcome) = self.first(own).await.map_err(|failure| {
            let only = format!("only peer {} issues a certificate for this ticket", issuer.short());
            if failure.is_unanswered() {
                failure.into_error().context(only)
            } else {
                failure.into_error()
            }
        })?;
        let found = welcome.run.as_ref().map(|run| run.id);
        anyhow::ensure!(
            found == Some(ticket.terms.run),
            "the ticket is for run {}, but the peer at {address} takes part in another run: ask for a \
             ticket of that run",
            ticket.terms.run
        );
        Ok((address, welcome))
    }

    /// Connects to the first of these peers that admits this one.
    async fn first(&self, all: impl Iterator<Item = PeerAddress>) -> Result<Reached, Failure> {
        let mut failure = Failure::Other(anyhow!("the ticket has no address: ask for a new one"));
        for address in all {
            match self.reach_at(&address).await {
                Ok(reached) => return Ok(reached),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Connects to the peer at an address. If the run requires a certificate, uses the stored one.
    async fn reach_at(&self, address: &PeerAddress) -> Result<Reached, Failure> {
        let unknown = || format!("the host of {address} is unknown");
        let resolved = address.resolve().await.with_context(unknown).map_err(Failure::Other)?;
        let connect = async || {
            let reached = self.transport.connect(address.peer, &resolved).await;
            reached.map_err(|error| Failure::Connect(address.clone(), error))
        };
        let gate = self.transport.gate();
        let welcome = match connect().await {
            Err(Failure::Connect(
                address,
                ConnectError::Refused(Refusal::Denied(Denied::Needed { run, mode })),
            )) if gate.pass().certificate.is_none() => match self.stored_certificate(run) {
                Ok(Some(certificate)) => {
                    gate.hold(certificate);
                    connect().await?
                }
                Ok(None) => {
                    let needed = Refusal::Denied(Denied::Needed { run, mode });
                    return Err(Failure::Connect(address, needed.into()));
                }
                Err(error) => return Err(Failure::Other(error)),
            },
            reached => reached?,
        };
        Ok((address.clone(), welcome))
    }

    fn stored_certificate(&self, run: RunId) -> anyhow::Result<Option<Signed>> {
        self.data_dir.map_or(Ok(None), |data_dir| Store::of(data_dir, run).certificate())
    }
}

impl Failure {
    /// The error for the user, with a fix.
    fn into_error(self) -> anyhow::Error {
        match self {
            Self::Connect(address, ConnectError::Refused(Refusal::Denied(denied))) => {
                not_admitted(&denied).context(format!("cannot join at {address}"))
            }
            Self::Connect(address, error) => {
                let hint = "run `shoal doctor` with this address to find the cause";
                anyhow!("{error} ({hint})").context(format!("cannot join at {address}"))
            }
            Self::Other(error) => error,
        }
    }

    /// Whether no peer answered at all.
    fn is_unanswered(&self) -> bool {
        !matches!(self, Self::Connect(_, ConnectError::Refused(_)))
    }

    /// Whether the certificate is the cause, so that another one may be admitted.
    fn is_about_certificate(&self) -> bool {
        let Self::Connect(_, ConnectError::Refused(Refusal::Denied(denied))) = self else {
            return false;
        };
        match denied {
            Denied::Expired { document, .. }
            | Denied::Forged { document }
            | Denied::OtherRun { document, .. } => *document == Document::Certificate,
            Denied::OtherPeer { .. } | Denied::Revoked { .. } | Denied::Needed { .. } => true,
            _ => false,
        }
    }
}

/// The error of a peer that is not admitted. It mentions the clocks if they may be the cause.
pub(super) fn not_admitted(denied: &Denied) -> anyhow::Error {
    let apart = denied.clock().map(|theirs| {
        let ours = UnixTime::now();
        ours.since(theirs).max(theirs.since(ours))
    });
    match apart.filter(|apart| *apart > CLOCKS_APART) {
        Some(apart) => anyhow!(
            "not admitted: {denied}; this machine's clock and that of the other peer differ by {} s: set them \
             (`timedatectl set-ntp true`), then try again",
            apart.as_secs()
        ),
        None => anyhow!("not admitted: {denied}"),
    }
}
