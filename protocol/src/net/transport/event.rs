//! What the transport tells its owner.

use std::net::SocketAddr;

use tokio::sync::OwnedSemaphorePermit;

use super::error::{ConnectError, DisconnectReason};
use crate::frame::Frame;
use crate::ids::{Incarnation, Member, PeerId, RunId};
use crate::net::admission::{Pass, Signed, UnixTime};

/// Something that happened between us and a peer. For one peer, everything from a connection comes
/// between its `Connected` and its `Disconnected`, and connections do not overlap.
#[derive(Debug)]
pub enum TransportEvent {
    /// A peer was reached, or reached us, and both agree on version and run.
    Connected {
        /// Who, in which life.
        member: Member,
        /// Where it is; `None` where the way leads through another peer.
        address: Option<SocketAddr>,
        /// The run it takes part in; `None` before it has joined one.
        run: Option<RunId>,
    },
    /// The connection ended. Control messages on their way may be lost; what was still queued goes
    /// out on the next connection, which the next thing to send brings about.
    Disconnected {
        /// Who, in which life.
        member: Member,
        /// Why.
        reason: DisconnectReason,
    },
    /// The peer could not be reached for long, or never will be. Everything queued for it is gone.
    Unreachable {
        /// Who.
        peer: PeerId,
        /// The last failure.
        error: ConnectError,
    },
    /// A control message.
    Control {
        /// From whom.
        member: Member,
        /// As the peer encoded it.
        bytes: Vec<u8>,
    },
    /// A message with tensors.
    Tensor(TensorMessage),
}

/// Tensors from a peer. As long as it exists, its bytes count against what the peer may have on its
/// way to us: drop it when the tensors are taken over or done with.
#[derive(Debug)]
pub struct TensorMessage {
    /// From whom.
    pub member: Member,
    /// What they are, as the peer encoded it.
    pub tag: Vec<u8>,
    /// The tensors; checksums are right.
    pub frames: Vec<Frame>,
    pub(super) _room: OwnedSemaphorePermit,
}

/// A run and what it is.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Run {
    /// Name.
    pub id: RunId,
    /// The encoded manifest, not looked into here.
    pub manifest: Vec<u8>,
}

/// A peer's greeting, as it came with the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// The peer's life.
    pub incarnation: Incarnation,
    /// Where it was reached.
    pub address: SocketAddr,
    /// The run it takes part in; `None` before it has joined one.
    pub run: Option<Run>,
    /// What lets it in; looked at already where our own run is known.
    pub pass: Pass,
    /// A permit that it gave us with its answer.
    pub certificate: Option<Signed>,
    /// What its clock said; none where it dialled us.
    pub clock: Option<UnixTime>,
    /// Where it sees us; none where it dialled us.
    pub seen: Option<SocketAddr>,
}
