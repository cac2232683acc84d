//! A process that takes part in no run: it asks those who do, and fetches from them.

use std::net::{Ipv4Addr, SocketAddr};
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

/// A guest's one life: it is never a member.
pub(super) const LIFE: Incarnation = Incarnation(1);

/// A guest's links.
pub(super) struct Client {
    pub(super) transport: Transport,
    pub(super) events: mpsc::Receiver<TransportEvent>,
}

impl Client {
    /// Listens on any free port, as somebody whom nobody knows.
    ///
    /// # Errors
    /// When there is no free port.
    pub(super) fn open(files: &Files) -> anyhow::Result<Self> {
        Self::open_at(&[SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))], files)
    }

    /// The same on these ports.
    ///
    /// # Errors
    /// When one of them cannot be had.
    pub(super) fn open_at(listen: &[SocketAddr], files: &Files) -> anyhow::Result<Self> {
        let config = TransportConfig {
            incarnation: LIFE,
            run: None,
            congestion: Congestion::default(),
            files: Arc::new(files.clone()),
            gate: Gate::default(),
        };
        let (transport, events) = Transport::bind(&Identity::ephemeral(), listen, config)?;
        Ok(Self { transport, events })
    }
}

/// Connects to the peer at an address, or with a ticket, of which that is a use.
///
/// # Errors
/// When it is no address, or nobody answers there.
pub(super) async fn reach(
    transport: &Transport,
    address: &JoinAddress,
) -> anyhow::Result<(PeerAddress, Welcome)> {
    let text = address.read()?.context("there is no address in that file yet")?;
    let join_line: JoinLine = text.parse().exit_with(Exit::Usage)?;
    Seeker { transport, data_dir: None }.reach(&join_line).await
}
