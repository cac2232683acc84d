//! What goes wrong between peers, one variant per cause.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::frame::FrameError;
use crate::ids::{ContentHash, Incarnation, PeerId, RunId};
use crate::limits;
use crate::net::admission::{Denied, Reason};
use crate::units::Bytes;

/// Why the transport cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// Nothing to listen on.
    #[error("no address to listen on: give at least one, such as 0.0.0.0:4242")]
    NoListenAddress,
    /// Somebody else listens there.
    #[error("{address} (UDP) is in use: stop what listens there, or choose another port")]
    AddressInUse {
        /// Where.
        address: SocketAddr,
    },
    /// The system refused the socket.
    #[error("cannot listen on {address} (UDP): {source}")]
    Bind {
        /// Where.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The ways through other peers cannot be opened.
    #[error("cannot prepare to reach peers through others: {0}")]
    Relay(io::Error),
    /// No certificate could be made.
    #[error("cannot make a certificate for this identity: {reason}")]
    Certificate {
        /// What the library said.
        reason: String,
    },
}

/// Why a peer answered a hello with no.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode, thiserror::Error)]
pub enum Refusal {
    /// The builds cannot talk to each other.
    #[error(
        "the peer speaks protocol version {theirs} and this build version {ours}: \
         use the same release on both"
    )]
    Version {
        /// Of this build.
        ours: u32,
        /// Of the peer's.
        theirs: u32,
    },
    /// The peer trains something else.
    #[error("the peer belongs to run {theirs}, this one to run {ours}")]
    OtherRun {
        /// Run of the peer that was refused.
        ours: RunId,
        /// Run of the peer that refused.
        theirs: RunId,
    },
    /// The peer has our own identity: another process runs on a copy of the identity file, or the
    /// address is our own.
    #[error(
        "the peer has this peer's own identity: two processes use one identity file, \
         or the address is this process's own"
    )]
    OwnIdentity,
    /// The peer has met a later life of ours.
    #[error("this process was displaced by a later life of the same peer (incarnation {newest})")]
    Displaced {
        /// The latest that the peer has met.
        newest: Incarnation,
    },
    /// The run does not let us in.
    #[error("not let in: {0}")]
    Denied(#[from] Denied),
    /// Both ends dialled at once, and the other connection won.
    #[error("the peer keeps another connection to this one")]
    AlreadyConnected,
    /// The peer is closing.
    #[error("the peer is shutting down")]
    Closing,
    /// The peer keeps as many connections as it may.
    #[error("the peer has no room for another connection")]
    Full,
}

impl Refusal {
    /// How it is counted; none for what good peers of the run meet every day.
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

/// Why a peer was not reached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// Nobody connects to himself.
    #[error("this is this peer's own id: dial another peer")]
    Myself,
    /// Nobody knows where the peer is.
    #[error("no address is known for peer {peer}")]
    NoAddress {
        /// Who.
        peer: PeerId,
    },
    /// None of our sockets reaches such an address.
    #[error("{address} cannot be reached from the addresses listened on")]
    NoSocket {
        /// Where it was to go.
        address: SocketAddr,
    },
    /// No answer, or not the answer of a peer.
    #[error("{address} does not answer as a Shoal peer: {reason}")]
    Unreachable {
        /// Where.
        address: SocketAddr,
        /// What happened.
        reason: String,
    },
    /// Somebody else lives there.
    #[error("{address} is peer {found}, not {expected}: correct the peer id in the address")]
    WrongPeer {
        /// Where.
        address: SocketAddr,
        /// Who was dialled.
        expected: PeerId,
        /// Who answered.
        found: PeerId,
    },
    /// The peer said no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The peer says it takes part in our run, and cannot prove it.
    #[error("peer {peer} at {address} does not prove that it takes part in the run: {denied}")]
    Stranger {
        /// Who.
        peer: PeerId,
        /// Where.
        address: SocketAddr,
        /// What it lacks.
        denied: Box<Denied>,
    },
    /// What came back is no answer to a hello.
    #[error("the peer's answer is malformed: {reason}")]
    Malformed {
        /// What is wrong with it.
        reason: String,
    },
    /// The peer reached shows an earlier life than one met before.
    #[error("the peer answers as incarnation {found}, but {newest} is known")]
    FormerLife {
        /// Who answered.
        found: Incarnation,
        /// The latest met.
        newest: Incarnation,
    },
    /// As many peers are known as may be.
    #[error("no room to talk to another peer")]
    TooManyPeers,
    /// It took too long.
    #[error("the peer did not answer within {} s", limits::HANDSHAKE_TIMEOUT.as_secs())]
    TimedOut,
    /// We are closing.
    #[error("this process is shutting down")]
    Closing,
}

impl ConnectError {
    /// Whether trying again cannot help.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            Self::Myself | Self::WrongPeer { .. } | Self::Closing | Self::Stranger { .. } => true,
            Self::Refused(Refusal::Denied(denied)) => !denied.may_pass(),
            Self::Refused(refusal) => {
                !matches!(refusal, Refusal::AlreadyConnected | Refusal::Full | Refusal::Closing)
            }
            _ => false,
        }
    }
}

/// Why something will not be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Over the cap.
    #[error("{what} of {size} bytes is over the cap of {cap}")]
    TooLarge {
        /// Control message or tag.
        what: &'static str,
        /// Its bytes.
        size: usize,
        /// The most it may have.
        cap: Bytes,
    },
    /// A message has at least one tensor, and few.
    #[error("a message of {count} tensors: it must be 1 to {}", super::tensor::FRAMES)]
    FrameCount {
        /// How many.
        count: usize,
    },
    /// The peer takes nothing any more; its connection was closed.
    #[error("too much waits to be sent to peer {peer}: the connection is closed as stuck")]
    QueueFull {
        /// Who.
        peer: PeerId,
    },
    /// Nobody sends to himself over the network.
    #[error("nothing is sent to oneself")]
    Myself,
    /// As many peers are known as may be.
    #[error("no room to talk to another peer")]
    TooManyPeers,
    /// We are closing.
    #[error("this process is shutting down")]
    Closing,
}

/// How a peer broke the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Over the cap.
    #[error("a control message of {size} bytes is over the cap of {}", limits::CONTROL_MESSAGE)]
    ControlTooLarge {
        /// Announced bytes.
        size: u64,
    },
    /// The control stream ended within a message.
    #[error("the control stream ended within a message")]
    ControlEnded,
    /// The header of a tensor message makes no sense.
    #[error("a tensor message with a tag of {tag} bytes and {frames} tensors")]
    TensorHeader {
        /// Announced bytes of the tag.
        tag: usize,
        /// Announced tensors.
        frames: usize,
    },
    /// More than any message of the run has.
    #[error(
        "a message with {bytes} bytes of tensors, where none of the run has more than {largest}"
    )]
    TensorsTooLarge {
        /// Announced bytes.
        bytes: u64,
        /// The most there are, in bytes.
        largest: u64,
    },
    /// A part that its message has not, or that came before.
    #[error("part {part} of a tensor message, which has none such left to come")]
    TensorPart {
        /// Which.
        part: u32,
    },
    /// A tensor's header or body is wrong.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The stream ended within a tensor message.
    #[error("a tensor message was cut short")]
    TensorCutShort,
    /// The stream went on after a tensor message.
    #[error("bytes follow the end of a tensor message")]
    TensorTrailing,
    /// A message that this process cannot make sense of.
    #[error("{0}")]
    Message(String),
}

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DisconnectReason {
    /// The peer closed it in an orderly way.
    #[error("the peer left")]
    Left,
    /// It broke: silence, a reset, an error of the network.
    #[error("the connection was lost: {0}")]
    Lost(String),
    /// The peer broke the protocol, so we closed it.
    #[error("the peer broke the protocol: {0}")]
    Violation(#[from] Violation),
    /// The peer closed it because of us.
    #[error("the peer closed the connection: {0}")]
    ClosedByPeer(String),
    /// The peer took too little for too long.
    #[error("too much waited to be sent")]
    QueueFull,
    /// A newer connection to the same peer took its place.
    #[error("a newer connection took its place")]
    Replaced,
    /// We are closing.
    #[error("this process is shutting down")]
    Closing,
}

/// Why a file was not fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The peer cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The peer does not have it.
    #[error("the peer does not have the file {hash}")]
    NotFound {
        /// Which.
        hash: ContentHash,
    },
    /// Over the cap.
    #[error("a file of {size} is over the cap of {}", limits::BLOB)]
    TooLarge {
        /// Its size.
        size: Bytes,
    },
    /// The peer has something of another size under that name.
    #[error("the peer offers {found} bytes where {expected} were expected")]
    Size {
        /// Bytes asked for.
        expected: u64,
        /// Bytes offered.
        found: u64,
    },
    /// What came is not what was asked for.
    #[error("the peer sent something else than the file {expected}")]
    WrongHash {
        /// What was asked for.
        expected: ContentHash,
    },
    /// The connection broke, or the answer was cut short.
    #[error("fetching was interrupted: {0}")]
    Interrupted(String),
    /// The peer answers nothing, though its connection stands.
    #[error("the peer sent nothing for {} s: ask others for the file, or again later", patience.as_secs())]
    Silent {
        /// How long it was listened for.
        patience: Duration,
    },
    /// The file could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Io {
        /// Where.
        path: std::path::PathBuf,
        /// What the system said.
        source: io::Error,
    },
}
