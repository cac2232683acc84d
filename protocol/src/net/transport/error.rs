//! Errors of the transport, one variant per cause.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::frame::FrameError;
use crate::ids::{ContentHash, Incarnation, PeerId, RunId};
use crate::limits;
use crate::net::admission::{Denied, Reason};
use crate::units::Bytes;

/// Errors of starting the transport.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// No listen address was given.
    #[error("no address to listen on: give at least one, such as 0.0.0.0:4242")]
    NoListenAddress,
    /// Another process listens on the address.
    #[error("{address} (UDP) is in use: stop what listens there, or choose another port")]
    AddressInUse {
        /// The address in use.
        address: SocketAddr,
    },
    /// The operating system refused the socket.
    #[error("cannot listen on {address} (UDP): {source}")]
    Bind {
        /// The address to listen on.
        address: SocketAddr,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The endpoint for relayed connections cannot be opened.
    #[error("cannot prepare to reach peers through others: {0}")]
    Relay(io::Error),
    /// The TLS certificate could not be made.
    #[error("cannot make a certificate for this identity: {reason}")]
    Certificate {
        /// The error of the library.
        reason: String,
    },
    /// Every certificate is invalid by this machine's clock.
    #[error(
        "this machine's clock is wrong: it says {seconds} s after the beginning of 1970, before any peer's certificate is \
         valid; set it (timedatectl set-ntp true), then start again"
    )]
    Clock {
        /// The clock, in seconds since 1970.
        seconds: u64,
    },
}

/// The reason why a peer refused a hello.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode, thiserror::Error)]
pub enum Refusal {
    /// The protocol versions differ.
    #[error(
        "the peer speaks protocol version {theirs} and this build version {ours}: \
         use the same release on both"
    )]
    Version {
        /// The version of this build.
        ours: u32,
        /// The version of the peer's build.
        theirs: u32,
    },
    /// The peer takes part in another run.
    #[error("the peer belongs to run {theirs}, this one to run {ours}")]
    OtherRun {
        /// The run of the refused peer.
        ours: RunId,
        /// The run of the refusing peer.
        theirs: RunId,
    },
    /// The peer has this peer's identity: another process uses a copy of the identity file, or the
    /// address is this process's own.
    #[error(
        "the peer has this peer's own identity: two processes use one identity file, \
         or the address is this process's own"
    )]
    OwnIdentity,
    /// The peer knows a later incarnation of this peer.
    #[error(
        "this process was displaced by a later life of the same peer (incarnation {newest}): two machines use copies of \
         one data directory; give this one its own --data-dir"
    )]
    Displaced {
        /// The latest incarnation that the peer knows.
        newest: Incarnation,
    },
    /// The run does not admit this peer.
    #[error("not admitted: {0}")]
    Denied(#[from] Denied),
    /// Both ends dialled at once, and the other connection is used.
    #[error("the peer keeps another connection to this one")]
    AlreadyConnected,
    /// The peer is shutting down.
    #[error("the peer is shutting down")]
    Closing,
    /// The peer has reached its limit of connections.
    #[error("the peer has no room for another connection")]
    Full,
}

impl Refusal {
    /// The counter of this refusal; `None` for refusals that occur in normal operation.
    pub(super) fn reason(&self) -> Option<Reason> {
        match self {
            Self::Denied(denied) => Some(denied.into()),
            Self::Version { .. } => Some(Reason::Version),
            Self::OtherRun { .. } => Some(Reason::OtherRun),
            Self::OwnIdentity | Self::Displaced { .. } | Self::Full => Some(Reason::Other),
            Self::AlreadyConnected | Self::Closing => None,
        }
    }
}

/// The reason why a peer was not reached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The id is this peer's own.
    #[error("this is this peer's own id: dial another peer")]
    OwnAddress,
    /// No address of the peer is known.
    #[error("no address is known for peer {peer}")]
    NoAddress {
        /// The peer without an address.
        peer: PeerId,
    },
    /// No local socket can reach such an address.
    #[error(
        "{address} cannot be reached from the addresses listened on: add one of its kind (--listen 0.0.0.0:0 or \
         --listen [::]:0)"
    )]
    NoSocket {
        /// The address of the peer.
        address: SocketAddr,
    },
    /// There was no answer, or not that of a Shoal peer.
    #[error("{address} does not answer as a Shoal peer: {reason}")]
    Unreachable {
        /// The dialled address.
        address: SocketAddr,
        /// The cause, as text.
        reason: String,
    },
    /// Another peer answers at the address.
    #[error("{address} is peer {found}, not {expected}: correct the peer id in the address")]
    WrongPeer {
        /// The dialled address.
        address: SocketAddr,
        /// The dialled peer.
        expected: PeerId,
        /// The peer that answered.
        found: PeerId,
    },
    /// The peer refused the hello.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The peer names the same run, but does not prove its admission.
    #[error("peer {peer} at {address} does not prove that it takes part in the run: {denied}")]
    UnknownPeer {
        /// The dialled peer.
        peer: PeerId,
        /// The dialled address.
        address: SocketAddr,
        /// The missing proof.
        denied: Box<Denied>,
    },
    /// The answer to the hello is malformed.
    #[error("the peer's answer is malformed: {reason}")]
    Malformed {
        /// The defect of the answer.
        reason: String,
    },
    /// The peer answered with an earlier incarnation than a known one.
    #[error("the peer answers as incarnation {found}, but {newest} is known")]
    OldIncarnation {
        /// The incarnation that answered.
        found: Incarnation,
        /// The latest known incarnation.
        newest: Incarnation,
    },
    /// The limit of known peers is reached.
    #[error("the limit of known peers is reached")]
    TooManyPeers,
    /// The handshake took too long.
    #[error("the peer did not answer within {} s", limits::HANDSHAKE_TIMEOUT.as_secs())]
    TimedOut,
    /// The transport is closing.
    #[error("this process is shutting down")]
    Closing,
}

impl ConnectError {
    /// Whether a retry cannot succeed.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            Self::OwnAddress
            | Self::WrongPeer { .. }
            | Self::Closing
            | Self::UnknownPeer { .. } => true,
            Self::Refused(Refusal::Denied(denied)) => !denied.may_pass(),
            Self::Refused(refusal) => {
                !matches!(refusal, Refusal::AlreadyConnected | Refusal::Full | Refusal::Closing)
            }
            _ => false,
        }
    }
}

/// The reason why a message is not sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The message exceeds the size limit.
    #[error("{what} of {size} bytes is over the cap of {cap}")]
    TooLarge {
        /// The part that is too large: a control message, a tag or tensors.
        what: &'static str,
        /// The size in bytes.
        size: usize,
        /// The limit.
        cap: Bytes,
    },
    /// The number of tensors is outside its range.
    #[error("a message of {count} tensors: it must be 1 to {}", super::tensor::FRAMES)]
    FrameCount {
        /// The number of tensors.
        count: usize,
    },
    /// The peer receives too slowly; its connection was closed.
    #[error("too much waits to be sent to peer {peer}: the connection is closed as stuck")]
    QueueFull {
        /// The slow peer.
        peer: PeerId,
    },
    /// The receiver is this peer itself.
    #[error("the receiver is this peer itself")]
    OwnAddress,
    /// The limit of known peers is reached.
    #[error("the limit of known peers is reached")]
    TooManyPeers,
    /// The transport is closing.
    #[error("this process is shutting down")]
    Closing,
}

/// The way in which a peer broke the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A control message exceeds the size limit.
    #[error("a control message of {size} bytes is over the cap of {}", limits::CONTROL_MESSAGE)]
    ControlTooLarge {
        /// The announced size in bytes.
        size: u64,
    },
    /// The control stream ended within a message.
    #[error("the control stream ended within a message")]
    ControlEnded,
    /// The header of a tensor message has invalid counts.
    #[error("a tensor message with a tag of {tag} bytes and {frames} tensors")]
    TensorHeader {
        /// The announced bytes of the tag.
        tag: usize,
        /// The announced number of tensors.
        frames: usize,
    },
    /// The tensors exceed those of any message of the run.
    #[error(
        "a message with {bytes} bytes of tensors, where none of the run has more than {largest}"
    )]
    TensorsTooLarge {
        /// The announced size in bytes.
        bytes: u64,
        /// The limit in bytes.
        largest: u64,
    },
    /// The part does not exist in its message, or arrived before.
    #[error("part {part} of a tensor message does not exist or arrived before")]
    TensorPart {
        /// The index of the part.
        part: u32,
    },
    /// A tensor's header or body is wrong.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// No part of an incomplete message arrived for long.
    #[error("no part of a tensor message arrived for {} s", limits::TENSOR_SILENCE.as_secs())]
    TensorSilent,
    /// The stream ended within a tensor message.
    #[error("a tensor message was truncated")]
    TensorCutShort,
    /// The stream went on after a tensor message.
    #[error("bytes follow the end of a tensor message")]
    TensorTrailing,
    /// A message that this process cannot decode.
    #[error("{0}")]
    Message(String),
}

/// The reason why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DisconnectReason {
    /// The peer closed it in an orderly way.
    #[error("the peer left")]
    Left,
    /// It broke: a timeout, a reset or a network error.
    #[error("the connection was lost: {0}")]
    Lost(String),
    /// The peer broke the protocol, and this end closed the connection.
    #[error("the peer broke the protocol: {0}")]
    Violation(#[from] Violation),
    /// The peer closed the connection with an error.
    #[error("the peer closed the connection: {0}")]
    ClosedByPeer(String),
    /// The peer received too slowly for too long.
    #[error("too much waited to be sent")]
    QueueFull,
    /// A newer connection to the same peer is in use.
    #[error("a newer connection took its place")]
    Replaced,
    /// The transport is closing.
    #[error("this process is shutting down")]
    Closing,
}

/// The reason why a file was not fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The peer cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The peer does not have the file.
    #[error("the peer does not have the file {hash}")]
    NotFound {
        /// The hash of the file.
        hash: ContentHash,
    },
    /// The file exceeds the size limit.
    #[error("a file of {size} is over the cap of {}", limits::FILE)]
    TooLarge {
        /// The size of the file.
        size: Bytes,
    },
    /// The peer's file of that hash has another size.
    #[error("the peer offers {found} bytes where {expected} were expected")]
    Size {
        /// The requested bytes.
        expected: u64,
        /// The offered bytes.
        found: u64,
    },
    /// The received bytes do not have the requested hash.
    #[error("the peer sent something else than the file {expected}")]
    WrongHash {
        /// The requested hash.
        expected: ContentHash,
    },
    /// The connection broke, or the answer was cut short.
    #[error("fetching was interrupted: {0}")]
    Interrupted(String),
    /// The peer sends nothing, but its connection is alive.
    #[error(
        "the peer sent nothing for {} s: ask other peers for the file, or retry later",
        patience.as_secs()
    )]
    Silent {
        /// The time without data.
        patience: Duration,
    },
    /// The file could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Io {
        /// The path of the file.
        path: std::path::PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}
