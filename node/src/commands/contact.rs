//! Contacts a run by an address, a ticket, or the certificate of an earlier incarnation.

use std::convert::Infallible;
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
    /// The host of an address is unknown. A name service may learn of it when the host starts.
    Unknown(anyhow::Error),
    /// Any other cause.
    Other(anyhow::Error),
}

type Reached = (PeerAddress, Welcome);

/// An attempt to reach a run that failed.
#[derive(Debug)]
pub(super) struct Missed {
    /// The cause, for the user, with a fix.
    pub(super) error: anyhow::Error,
    /// Whether another attempt may succeed.
    pub(super) hope: Hope,
}

/// Whether another attempt to reach a run may succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hope {
    /// No peer answered: the first one may still start.
    Soon,
    /// A peer refused this one, which may change for a peer that took part before.
    Perhaps,
    /// Another process has taken this peer's place.
    Never,
}

impl From<anyhow::Error> for Missed {
    fn from(error: anyhow::Error) -> Self {
        Self { error, hope: Hope::Perhaps }
    }
}

impl Seeker<'_> {
    /// Connects to a peer by an address or a ticket.
    ///
    /// # Errors
    /// If no peer answers, or this peer is not admitted. The error names a fix.
    pub(super) async fn reach(&self, join_line: &JoinLine) -> Result<Reached, Missed> {
        let reached = match join_line {
            JoinLine::Address(address) => self.reach_at(address).await.map_err(Missed::from),
            JoinLine::Ticket(ticket) => self.reach_by(ticket).await,
        };
        reached.map_err(|Missed { error, hope }| {
            let failed: anyhow::Result<Infallible> = Err(error).exit_with(Exit::NotAdmitted);
            let Err(error) = failed;
            Missed { error, hope }
        })
    }

    async fn reach_by(&self, ticket: &Ticket) -> Result<Reached, Missed> {
        let (gate, issuer) = (self.transport.gate(), ticket.issuer);
        let stored = self.stored_certificate(ticket.terms.run)?;
        if let Some(certificate) = stored.filter(|stored| Certificate::covers(stored, ticket)) {
            // The ticket was redeemed before and is not needed again.
            gate.hold(certificate);
            match self.first(ticket.addresses()).await {
                Err(failure) if failure.is_about_certificate() => {}
                reached => return reached.map_err(Missed::from),
            }
        }
        ticket.is_timely(UnixTime::now()).map_err(|denied| not_admitted(&denied))?;
        gate.invite(ticket.clone());
        let own = ticket.addresses().filter(|address| address.peer == issuer);
        let (address, welcome) = self.first(own).await.map_err(|failure| {
            let only = format!("only peer {} issues a certificate for this ticket", issuer.short());
            let unanswered = failure.is_unanswered();
            let missed = Missed::from(failure);
            let error = if unanswered { missed.error.context(only) } else { missed.error };
            Missed { error, ..missed }
        })?;
        let found = welcome.run.as_ref().map(|run| run.id);
        if found != Some(ticket.terms.run) {
            let error = anyhow!(
                "the ticket is for run {}, but the peer at {address} takes part in another run: ask for a \
                 ticket of that run",
                ticket.terms.run
            );
            return Err(error.into());
        }
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
        let resolved = address.resolve().await.with_context(unknown).map_err(Failure::Unknown)?;
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
            Self::Unknown(error) | Self::Other(error) => error,
        }
    }

    /// Whether a later attempt may succeed: no peer was there, or it has no room for the moment.
    fn hope(&self) -> Hope {
        match self {
            Self::Unknown(_)
            | Self::Connect(
                _,
                ConnectError::Unreachable { .. }
                | ConnectError::TimedOut
                | ConnectError::Refused(Refusal::Full | Refusal::Closing),
            ) => Hope::Soon,
            Self::Connect(_, ConnectError::Refused(Refusal::Displaced { .. })) => Hope::Never,
            Self::Connect(..) | Self::Other(_) => Hope::Perhaps,
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

impl From<Failure> for Missed {
    fn from(failure: Failure) -> Self {
        let hope = failure.hope();
        Self { error: failure.into_error(), hope }
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
