//! Getting in touch with a run: by an address, by a ticket, by what is kept of earlier lives.

use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, anyhow};
use shoal_protocol::ids::RunId;
use shoal_protocol::net::admission::{
    CLOCK_LEEWAY, Denied, Paper, Signed, Ticket, TicketError, UnixTime,
};
use shoal_protocol::net::discovery::{AddressError, PeerAddress};
use shoal_protocol::net::transport::{ConnectError, Refusal, Transport, Welcome};

use crate::admission::Store;
use crate::exit::{Exit, ExitWith};

/// Clocks that differ by more than this are worth a word.
const CLOCKS_APART: Duration = Duration::from_secs(CLOCK_LEEWAY.as_secs() / 2);

/// What is typed to join a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum JoinLine {
    /// Where a peer is.
    Address(PeerAddress),
    /// An invitation.
    Ticket(Box<Ticket>),
}

/// Neither.
#[derive(Debug, thiserror::Error)]
pub(super) enum JoinLineError {
    /// No address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// No ticket.
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
    /// Where peers of the run are.
    pub(super) fn addresses(&self) -> Vec<PeerAddress> {
        match self {
            Self::Address(address) => vec![address.clone()],
            Self::Ticket(ticket) => ticket.addresses().collect(),
        }
    }
}

/// Connects to peers of a run that lets in only some.
pub(super) struct Seeker<'a> {
    pub(super) transport: &'a Transport,
    /// Where permits of earlier lives are kept; a guest has none.
    pub(super) data_dir: Option<&'a Path>,
}

/// Why a run was not reached.
enum Failure {
    /// A peer cannot be talked to.
    Connect(PeerAddress, ConnectError),
    /// Anything else.
    Other(anyhow::Error),
}

type Reached = (PeerAddress, Welcome);

impl Seeker<'_> {
    /// Connects to a peer by an address or a ticket.
    ///
    /// # Errors
    /// When nobody answers, or this peer is not let in, with what to do about it.
    pub(super) async fn reach(&self, join_line: &JoinLine) -> anyhow::Result<Reached> {
        match join_line {
            JoinLine::Address(address) => self.reach_at(address).await.map_err(Failure::told),
            JoinLine::Ticket(ticket) => self.reach_by(ticket).await,
        }
        .exit_with(Exit::NotAdmitted)
    }

    async fn reach_by(&self, ticket: &Ticket) -> anyhow::Result<Reached> {
        let (gate, issuer) = (self.transport.gate(), ticket.issuer);
        if let Some(certificate) = self.stored_certificate(ticket.terms.run)? {
            // The ticket was used before, and is not needed again.
            gate.hold(certificate);
            match self.first(ticket.addresses()).await {
                Err(failure) if failure.is_about_certificate() => {}
                reached => return reached.map_err(Failure::told),
            }
        }
        ticket.is_timely(UnixTime::now()).map_err(|denied| not_let_in(&denied))?;
        gate.invite(ticket.clone());
        let own = ticket.addresses().filter(|address| address.peer == issuer);
        let (address, welcome) = self.first(own).await.map_err(|failure| {
            let only = format!("only peer {} turns this ticket into a permit", issuer.short());
            if failure.is_silence() { failure.told().context(only) } else { failure.told() }
        })?;
        let found = welcome.run.as_ref().map(|run| run.id);
        anyhow::ensure!(
            found == Some(ticket.terms.run),
            "the ticket is for run {}, which the peer at {address} does not take part in now: ask for a \
             ticket of the run that it is in",
            ticket.terms.run
        );
        Ok((address, welcome))
    }

    /// Connects to the first of these that lets this peer in.
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

    /// Connects to the peer at an address; where the run wants a permit, with the one that is kept.
    async fn reach_at(&self, address: &PeerAddress) -> Result<Reached, Failure> {
        let unknown = || format!("the host of {address} is not known");
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
    /// In words, with what to do.
    fn told(self) -> anyhow::Error {
        match self {
            Self::Connect(address, ConnectError::Refused(Refusal::Denied(denied))) => {
                not_let_in(&denied).context(format!("cannot join at {address}"))
            }
            Self::Connect(address, error) => {
                let hint = "`shoal doctor` with this address looks for the cause";
                anyhow!("{error} ({hint})").context(format!("cannot join at {address}"))
            }
            Self::Other(error) => error,
        }
    }

    /// Whether nobody answered at all.
    fn is_silence(&self) -> bool {
        !matches!(self, Self::Connect(_, ConnectError::Refused(_)))
    }

    /// Whether the permit is why, so that another one may help.
    fn is_about_certificate(&self) -> bool {
        let Self::Connect(_, ConnectError::Refused(Refusal::Denied(denied))) = self else {
            return false;
        };
        match denied {
            Denied::Expired { paper, .. }
            | Denied::Forged { paper }
            | Denied::OtherRun { paper, .. } => *paper == Paper::Certificate,
            Denied::OtherPeer { .. } | Denied::Revoked { .. } | Denied::Needed { .. } => true,
            _ => false,
        }
    }
}

/// Why this peer is not let in, and whether that may be because of a clock.
pub(super) fn not_let_in(denied: &Denied) -> anyhow::Error {
    let apart = denied.clock().map(|theirs| {
        let ours = UnixTime::now();
        ours.since(theirs).max(theirs.since(ours))
    });
    match apart.filter(|apart| *apart > CLOCKS_APART) {
        Some(apart) => anyhow!(
            "not let in: {denied}; the clock of who says so and this machine's are {} s apart: set them \
             (`timedatectl set-ntp true`), then try again",
            apart.as_secs()
        ),
        None => anyhow!("not let in: {denied}"),
    }
}
