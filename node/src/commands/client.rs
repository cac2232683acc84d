//! A process that queries peers of a run and fetches from them, but is not a member.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::Context;
use shoal_protocol::ids::Incarnation;
use shoal_protocol::net::admission::Gate;
use shoal_protocol::net::discovery::PeerAddress;
use shoal_protocol::net::identity::Identity;
use shoal_protocol::net::transport::{
    Congestion, Transport, TransportConfig, TransportEvent, Welcome,
};
use tokio::sync::mpsc;

use super::contact::{JoinLine, Seeker};
use crate::address::JoinAddress;
use crate::data_dir::Files;
use crate::exit::{Exit, ExitWith};

/// A client's only incarnation: it is never a member.
pub(super) const LIFE: Incarnation = Incarnation(1);

/// Any free port.
pub(super) const ANY_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// What a client shows to the peers that it calls.
#[derive(Clone)]
pub(super) struct Caller {
    pub(super) identity: Identity,
    pub(super) incarnation: Incarnation,
    /// Its certificate or ticket.
    pub(super) gate: Gate,
}

impl Caller {
    /// A fresh identity, which no run with restricted admission admits.
    pub(super) fn stranger() -> Self {
        Self { identity: Identity::ephemeral(), incarnation: LIFE, gate: Gate::default() }
    }
}

/// A client's transport.
pub(super) struct Client {
    pub(super) transport: Transport,
    pub(super) events: mpsc::Receiver<TransportEvent>,
}

impl Client {
    /// Opens a transport with a fresh identity on any free port.
    ///
    /// # Errors
    /// If no port is free.
    pub(super) fn open(files: &Files) -> anyhow::Result<Self> {
        Self::open_as(Caller::stranger(), &[ANY_PORT], files)
    }

    /// Opens a transport on these ports.
    ///
    /// # Errors
    /// If one of them is in use.
    pub(super) fn open_as(
        Caller { identity, incarnation, gate }: Caller,
        listen: &[SocketAddr],
        files: &Files,
    ) -> anyhow::Result<Self> {
        let config = TransportConfig {
            incarnation,
            run: None,
            congestion: Congestion::default(),
            files: Arc::new(files.clone()),
            gate,
        };
        let (transport, events) = Transport::bind(&identity, listen, config)?;
        Ok(Self { transport, events })
    }
}

/// Connects to the peer at an address, or by a ticket, which redeems it once.
///
/// # Errors
/// If the text is no address, or no peer answers.
pub(super) async fn reach(
    transport: &Transport,
    address: &JoinAddress,
) -> anyhow::Result<(PeerAddress, Welcome)> {
    let text = address.read()?.context("that file holds no address yet")?;
    let join_line: JoinLine = text.parse().exit_with(Exit::Usage)?;
    Seeker { transport, data_dir: None }.reach(&join_line).await.map_err(|missed| missed.error)
}
