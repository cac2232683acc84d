//! The events that the transport sends to its owner.

use std::net::SocketAddr;

use tokio::sync::OwnedSemaphorePermit;

use super::error::{ConnectError, DisconnectReason};
use crate::frame::Frame;
use crate::ids::{Incarnation, Member, PeerId, RunId};
use crate::net::admission::{Pass, Signed, UnixTime};

/// An event about one peer. All events of a connection lie between its `Connected` and its
/// `Disconnected`, and the connections of a peer do not overlap.
#[derive(Debug)]
pub enum TransportEvent {
    /// A connection to a peer is established, and both ends agree on version and run.
    Connected {
        /// The peer and its incarnation.
        member: Member,
        /// The peer's address; `None` if the connection is relayed.
        address: Option<SocketAddr>,
        /// The run of the peer; `None` before it has joined one.
        run: Option<RunId>,
    },
    /// The connection ended. Control messages in flight may be lost. Queued ones go out on the next
    /// connection, which the next send establishes.
    Disconnected {
        /// The peer and its incarnation.
        member: Member,
        /// The reason.
        reason: DisconnectReason,
    },
    /// The peer could not be reached for long, or cannot be reached at all. Everything queued for
    /// it is discarded.
    Unreachable {
        /// The peer.
        peer: PeerId,
        /// The last failure.
        error: ConnectError,
    },
    /// A control message.
    Control {
        /// The sender.
        member: Member,
        /// The encoded message.
        bytes: Vec<u8>,
    },
    /// A message with tensors.
    Tensor(TensorMessage),
}

/// Tensors from a peer. While the value exists, its bytes count against the sender's room at this
/// peer. Drop it when the tensors are taken over or no longer needed.
#[derive(Debug)]
pub struct TensorMessage {
    /// The sender.
    pub member: Member,
    /// The encoded tag, which identifies the content.
    pub tag: Vec<u8>,
    /// The tensors; their checksums are correct.
    pub frames: Vec<Frame>,
    pub(super) _room: OwnedSemaphorePermit,
}

/// A run with its manifest.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Run {
    /// The name of the run.
    pub id: RunId,
    /// The encoded manifest; the transport does not check it.
    pub manifest: Vec<u8>,
}

/// The data of a peer from the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// The peer's incarnation.
    pub incarnation: Incarnation,
    /// The address at which it was reached.
    pub address: SocketAddr,
    /// The peer's run; `None` before it has joined one.
    pub run: Option<Run>,
    /// The peer's credentials; already checked if this peer's run is known.
    pub pass: Pass,
    /// The certificate that the peer issued to this one with its answer.
    pub certificate: Option<Signed>,
    /// The time of the peer's clock; `None` if the peer dialled.
    pub clock: Option<UnixTime>,
    /// This peer's address as the other sees it; `None` if the peer dialled.
    pub seen: Option<SocketAddr>,
}
