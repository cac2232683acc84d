//! Events of the links: connections, and messages once they are checked.

use std::net::SocketAddr;

use shoal_protocol::ids::{ContentHash, Member, PeerId};
use shoal_protocol::message::{Envelope, TensorHeader};
use shoal_protocol::net::transport::{ConnectError, TransportEvent};
use tokio::sync::mpsc;

use super::incoming::{self, Receiver, Unusable};
use super::payload::Tensor;
use super::peer_names::PeerNames;
use super::unpacker::{Unpacked, Unpacker};

/// An event of the transport, or tensors that were unpacked in the background.
#[derive(Debug)]
pub(super) enum Incoming {
    Transport(Option<TransportEvent>),
    Unpacked(Box<Unpacked>),
}

/// A checked event of the links.
#[derive(Debug)]
pub(super) enum LinkEvent {
    /// A connection to this life of a peer; without an address where it leads through a relay.
    Connected {
        member: Member,
        address: Option<SocketAddr>,
    },
    Disconnected {
        member: Member,
        reason: String,
    },
    Unreachable {
        peer: PeerId,
        error: ConnectError,
    },
    Message {
        from: Member,
        envelope: Envelope,
    },
    Tensors {
        from: Member,
        header: TensorHeader,
        tensors: Vec<Tensor>,
        hash: Option<ContentHash>,
    },
    Unusable {
        from: Member,
        error: Unusable,
    },
}

/// Receives from the transport and unpacks tensors beside the event loop.
#[derive(Debug)]
pub(super) struct LinkEvents {
    /// `None` for a peer that is alone, and after the transport has ended.
    transport: Option<mpsc::Receiver<TransportEvent>>,
    unpacker: Unpacker,
    names: PeerNames,
}

impl LinkEvents {
    pub(super) fn new(
        transport: Option<mpsc::Receiver<TransportEvent>>,
        unpacker: Unpacker,
        names: PeerNames,
    ) -> Self {
        Self { transport, unpacker, names }
    }

    /// Waits for the next event. Safe to cancel.
    ///
    /// # Errors
    /// When unpacking panicked.
    pub(super) async fn next(&mut self) -> anyhow::Result<Incoming> {
        let event = async {
            match &mut self.transport {
                Some(events) => events.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            event = event => Ok(Incoming::Transport(event)),
            unpacked = self.unpacker.next() => Ok(Incoming::Unpacked(Box::new(unpacked?))),
        }
    }

    /// Checks an event. Returns `None` where its tensors are unpacked in the background first.
    pub(super) fn check(&mut self, incoming: Incoming, receiver: Receiver) -> Option<LinkEvent> {
        let event = match incoming {
            Incoming::Unpacked(unpacked) => return Some((*unpacked).into()),
            // The transport outlives the driver.
            Incoming::Transport(None) => {
                self.transport = None;
                return None;
            }
            Incoming::Transport(Some(event)) => event,
        };
        Some(match event {
            TransportEvent::Connected { member, address, .. } => {
                tracing::info!(peer = self.names.member(member), ?address, "connected");
                LinkEvent::Connected { member, address }
            }
            TransportEvent::Disconnected { member, reason } => {
                tracing::info!(peer = self.names.member(member), %reason, "disconnected");
                LinkEvent::Disconnected { member, reason: reason.to_string() }
            }
            TransportEvent::Unreachable { peer, error } => {
                tracing::warn!(peer = self.names.title(peer), %error, "unreachable");
                LinkEvent::Unreachable { peer, error }
            }
            TransportEvent::Control { member: from, bytes } => {
                match incoming::open(&bytes, from, receiver) {
                    Ok(envelope) => LinkEvent::Message { from, envelope },
                    Err(error) => LinkEvent::Unusable { from, error },
                }
            }
            TransportEvent::Tensor(message) => self.unpacker.take(message)?.into(),
        })
    }

    /// Stops receiving, drops messages that wait, and waits for those in work.
    pub(super) async fn close(&mut self) {
        self.unpacker.close().await;
        self.transport = None;
    }
}

impl From<Unpacked> for LinkEvent {
    fn from(Unpacked { from, result, hash }: Unpacked) -> Self {
        match result {
            Ok((header, tensors)) => Self::Tensors { from, header, tensors, hash },
            Err(error) => Self::Unusable { from, error },
        }
    }
}
