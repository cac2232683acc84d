//! The transport of control messages, tensors and files between peers: QUIC connections on which
//! both ends have proved their ids.
//!
//! Each peer has a send queue and a link, a task that connects when there is something to send. On
//! a connection, the control stream keeps the order of control messages. Each message with tensors
//! has a stream of its own. Files are fetched by requests, with a stream each.
//!
//! Guarantees:
//!
//! - Control messages arrive in order, each at most once. If a connection breaks, messages in
//!   flight may be lost; queued ones are not.
//! - Tensors arrive in any order, and may arrive twice if a connection breaks.
//! - [`TransportEvent::Unreachable`] reports that everything queued for a peer is discarded.
//!
//! All memory is bounded. A full control queue closes the connection, and a full tensor queue makes
//! the sender wait. If the owner of the transport does not take events, the other end's streams
//! wait. The owner must therefore never wait for [`Transport::send_tensor`] in the task that takes
//! events, or two owners could wait for each other.

mod accept;
mod class;
mod congestion;
mod control;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod decoders;
mod dial;
mod endpoint;
mod endpoints;
mod error;
mod event;
mod eviction;
mod fetch;
mod file_piece;
mod file_server;
mod file_transfer;
mod guests;
mod handshake;
mod lifecycle;
mod link;
mod local;
mod peer;
mod peers;
mod progress;
mod rate;
mod reachability;
mod read_progress;
mod reassembly;
mod relay;
mod request;
mod send_queue;
mod sending;
mod tensor;
#[cfg(test)]
mod tests;
mod tls;
mod traffic;
mod upload_limit;

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::DropGuard;

pub use class::Class;
pub use endpoint::Congestion;
pub use error::{
    ConnectError, DisconnectReason, FetchError, Refusal, SendError, TransportError, Violation,
};
pub use event::{Run, TensorMessage, TransportEvent, Welcome};
pub use fetch::partial::SUFFIX as PARTIAL_SUFFIX;
pub use file_server::{FileSource, NoFiles, OpenFile};
pub use reachability::{ProbeError, ProbeReport};
pub use traffic::{Flow, Packets, PathStats, Pieces, Traffic};

use crate::frame::Frame;
use crate::ids::{ContentHash, Incarnation, Member, PeerId};
use crate::limits;
use crate::manifest::ChunkPacking;
use crate::message::Signatures;
use crate::net::admission::Gate;
use crate::net::identity::Identity;
use crate::units;
use endpoints::Endpoints;
use fetch::Wanted;
use file_server::FileServer;
use guests::Guests;
use lifecycle::Lifecycle;
use local::LocalPeer;
use peer::Peer;
use peers::Peers;
use reachability::Reachability;
use relay::Relay;
use traffic::Counters;
use upload_limit::UploadLimit;

/// Capacity of the event channel.
const EVENTS: usize = 256;

/// Time limit for a suspected peer to answer, in addition to four round trips.
const ANSWER: Duration = Duration::from_millis(500);

/// Time limit of an orderly close.
const CLOSE: Duration = Duration::from_secs(8);

/// Time for which a closed endpoint still answers packets in flight.
const LINGER: Duration = Duration::from_millis(200);

/// The configuration of a transport.
#[derive(Clone)]
pub struct TransportConfig {
    /// The incarnation of this peer.
    pub incarnation: Incarnation,
    /// The run that this peer takes part in. A newcomer receives it from the peer that it joins
    /// through.
    pub run: Option<Run>,
    /// The congestion control of connections.
    pub congestion: Congestion,
    /// The files that other peers may fetch.
    pub files: Arc<dyn FileSource>,
    /// Checks the admission of other peers.
    pub gate: Gate,
}

/// A handle on the transport; all clones share it. When the last clone is dropped, connections
/// break; [`Transport::close`] ends them in order.
#[derive(Clone)]
pub struct Transport {
    shared: Arc<Shared>,
    _guard: Arc<DropGuard>,
}

/// State shared by all tasks.
pub(crate) struct Shared {
    local: LocalPeer,
    keys: Arc<Identity>,
    files: FileServer,
    gate: Gate,
    endpoints: Endpoints,
    relay: Arc<Relay>,
    guests: Guests,
    reachability: Reachability,
    counters: Counters,
    upload_limit: UploadLimit,
    events: mpsc::Sender<TransportEvent>,
    peers: Peers,
    lifecycle: Lifecycle,
}

impl Shared {
    /// The peer of this id, with its link running; `None` if there are too many peers.
    fn peer(self: &Arc<Self>, id: PeerId) -> Option<Arc<Peer>> {
        let members = (self.relay.members(), |peer| self.relay.is_member(peer));
        let start = |peer| self.lifecycle.spawn(link::run(self.clone(), peer));
        self.peers.get_or_insert(id, members, start)
    }
}

impl Shared {
    /// Whether a control message may be queued for a peer: guests that do not read share little room.
    fn has_control_room(&self, peer: &Peer, bytes: usize) -> bool {
        let queued = peer.send_queue.control_bytes() + bytes;
        if queued <= limits::CONTROL_MESSAGE.0 as usize || self.relay.is_member(peer.id) {
            return true;
        }
        let guests = self.peers.all().into_iter().filter(|other| !self.relay.is_member(other.id));
        let all: usize = guests.map(|guest| guest.send_queue.control_bytes()).sum();
        (all + bytes) as u64 <= limits::GUEST_QUEUE_BYTES.0
    }
}

impl Transport {
    /// Listens on every given address (port 0 selects a free port) and begins to accept peers.
    ///
    /// # Errors
    /// If an address is in use or cannot be listened on, or the certificate cannot be made.
    pub fn bind(
        identity: &Identity,
        listen: &[SocketAddr],
        config: TransportConfig,
    ) -> Result<(Self, mpsc::Receiver<TransportEvent>), TransportError> {
        let (relay, reachability) = (Relay::new(), Reachability::default());
        let endpoints =
            Endpoints::bind(identity, listen, config.congestion, &relay, reachability.probes())?;
        let (events, receiver) = mpsc::channel(EVENTS);
        let shared = Arc::new(Shared {
            local: LocalPeer::new(identity.peer_id(), config.incarnation, config.run),
            keys: Arc::new(identity.clone()),
            files: FileServer::new(config.files),
            gate: config.gate,
            endpoints,
            relay,
            guests: Guests::new(),
            reachability,
            counters: Counters::default(),
            upload_limit: UploadLimit::default(),
            events,
            peers: Peers::default(),
            lifecycle: Lifecycle::new(),
        });
        for endpoint in shared.endpoints.all() {
            shared.lifecycle.spawn(accept::run(shared.clone(), endpoint.clone()));
        }
        shared.lifecycle.spawn(eviction::run(shared.clone()));
        let guard = Arc::new(shared.lifecycle.guard());
        Ok((Self { shared, _guard: guard }, receiver))
    }

    /// The id of this peer.
    #[must_use]
    pub fn peer_id(&self) -> PeerId {
        self.shared.local.id()
    }

    /// The key of this peer, which signs votes for terms and checks those of others.
    #[must_use]
    pub fn keys(&self) -> Arc<dyn Signatures> {
        self.shared.keys.clone()
    }

    /// Checks the admission of other peers.
    #[must_use]
    pub fn gate(&self) -> &Gate {
        &self.shared.gate
    }

    /// The connected peers, in order.
    #[must_use]
    pub fn connected(&self) -> Vec<Member> {
        self.shared.peers.sessions().iter().map(|session| session.member).collect()
    }

    /// The local addresses, with the ports that were selected.
    #[must_use]
    pub fn local_addresses(&self) -> Vec<SocketAddr> {
        self.shared.endpoints.local_addresses()
    }

    /// Sets the run of this peer: later hellos name it, and peers of other runs are refused.
    /// Existing connections stay open.
    pub fn set_run(&self, run: Run) {
        self.shared.local.set_run(run);
    }

    /// Sets the packing of file pieces, as the run's manifest gives it. Pieces are not packed
    /// before.
    pub fn set_chunk_packing(&self, packing: ChunkPacking) {
        self.shared.files.set_packing(packing);
    }

    /// Sets the members of the run. The transport relays packets between members that cannot reach
    /// each other, and uses members as relays where it cannot reach a peer directly. Only members have
    /// room for tensors: all other peers share [`limits::GUEST_ROOM`].
    pub fn set_members(&self, members: impl IntoIterator<Item = PeerId>) {
        let shared = &self.shared;
        let (came, went) = shared.relay.set_members(members.into_iter().collect());
        for session in came.into_iter().filter_map(|peer| shared.peers.session(peer)) {
            endpoint::entitle(&session.connection);
        }
        for session in went.into_iter().filter_map(|peer| shared.peers.session(peer)) {
            endpoint::restrict(&session.connection);
        }
    }

    /// Connects to a peer at one of these addresses with a single attempt, and returns its
    /// greeting. Reuses an existing connection.
    ///
    /// # Errors
    /// If no address answers in time, another peer answers, or the peer refuses.
    pub async fn connect(
        &self,
        peer: PeerId,
        addresses: &[SocketAddr],
    ) -> Result<Welcome, ConnectError> {
        if peer == self.shared.local.id() {
            return Err(ConnectError::OwnAddress);
        }
        let peer = self.shared.peer(peer).ok_or(ConnectError::TooManyPeers)?;
        let session = dial::reach(&self.shared, &peer, addresses).await?;
        peer.remember(&[session.address]);
        Ok(session.welcome())
    }

    /// Stores addresses of a peer for later connections. Does nothing for this peer's own id, or if
    /// too many peers are known.
    pub fn remember(&self, peer: PeerId, addresses: &[SocketAddr]) {
        if peer != self.shared.local.id()
            && let Some(peer) = self.shared.peer(peer)
        {
            peer.remember(addresses);
        }
    }

    /// Queues a control message. Messages are sent in order; the link connects if needed.
    ///
    /// # Errors
    /// If the message exceeds the size limit, or the queue is full, which also closes the
    /// connection.
    pub fn send_control(&self, peer: PeerId, message: Vec<u8>) -> Result<(), SendError> {
        check_size("a control message", message.len(), limits::CONTROL_MESSAGE)?;
        let peer = self.recipient(peer)?;
        if !self.shared.has_control_room(&peer, message.len()) {
            peer.send_queue.overflow();
            return Err(SendError::QueueFull { peer: peer.id });
        }
        if peer.send_queue.push_control(message.into()) {
            Ok(())
        } else {
            Err(SendError::QueueFull { peer: peer.id })
        }
    }

    /// Queues tensors. The future resolves when the queue has room for them; delivery continues in
    /// the background. The future owns all its data.
    ///
    /// # Errors
    /// At once, if the tag, the number of frames or their bytes exceed a limit.
    pub fn send_tensor(
        &self,
        peer: PeerId,
        tag: Vec<u8>,
        frames: Vec<Frame>,
        class: Class,
    ) -> Result<impl Future<Output = ()> + Send + use<>, SendError> {
        check_size("a tag", tag.len(), units::Bytes(tensor::TAG as u64))?;
        if !(1..=tensor::FRAMES).contains(&frames.len()) {
            return Err(SendError::FrameCount { count: frames.len() });
        }
        check_size(
            "a message with tensors",
            frames.iter().map(|frame| frame.body().len()).sum(),
            self.shared.local.largest_message(),
        )?;
        let peer = self.recipient(peer)?;
        Ok(async move { peer.send_queue.push_tensor(Bytes::from(tag), frames, class).await })
    }

    fn recipient(&self, peer: PeerId) -> Result<Arc<Peer>, SendError> {
        if peer == self.shared.local.id() {
            return Err(SendError::OwnAddress);
        }
        if self.shared.lifecycle.is_closing() {
            return Err(SendError::Closing);
        }
        self.shared.peer(peer).ok_or(SendError::TooManyPeers)
    }

    /// The length of a file in bytes, as reported by a holder. Only fetching the file proves it.
    ///
    /// # Errors
    /// If the peer cannot be reached, or does not have the file.
    pub async fn file_length(&self, holder: PeerId, hash: ContentHash) -> Result<u64, FetchError> {
        fetch::length(&self.shared, holder, hash).await
    }

    /// Fetches a file of `length` bytes from all holders at once into `destination`, which appears
    /// only when the file is complete and verified. A holder that fails or sends wrong bytes is
    /// dropped, and the others continue. An incomplete file stays beside the destination
    /// ([`PARTIAL_SUFFIX`]), and the next fetch resumes it.
    ///
    /// # Errors
    /// The last failure when no holder is left, or an error of the disk.
    pub async fn fetch_file(
        &self,
        holders: &[PeerId],
        hash: ContentHash,
        length: u64,
        destination: &Path,
    ) -> Result<(), FetchError> {
        fetch::fetch(&self.shared, holders, Wanted { hash, length }, destination).await
    }

    /// Asks a directly connected peer to send a reachability probe to this peer's own UDP port, or
    /// to another port of the same host, such as a router's. The probe shows whether packets arrive
    /// from a peer that none were sent to.
    ///
    /// # Errors
    /// If there is no such connection, or the peer does not probe.
    pub async fn request_probe(
        &self,
        peer: PeerId,
        port: Option<u16>,
    ) -> Result<ProbeReport, ProbeError> {
        let session = self.shared.peers.session(peer).ok_or(ProbeError::NotConnected)?;
        let Shared { reachability, endpoints, counters, lifecycle, .. } = &*self.shared;
        tokio::select! {
            () = lifecycle.closing() => Err(ProbeError::NotConnected),
            probe_report = reachability.ask(endpoints, counters, &session, port) => probe_report,
        }
    }

    /// Closes the connection to a peer that sent an invalid message.
    pub fn reject(&self, peer: PeerId, reason: &str) {
        if let Some(session) = self.shared.peers.session(peer) {
            session.connection.close(link::CloseCode::Violation.into(), reason.as_bytes());
        }
    }

    /// Checks a peer whose process may have died: asks for an answer, and breaks the connection if
    /// there is none at once, long before the connection timeout.
    pub fn suspect(&self, peer: PeerId) {
        let Some(session) = self.shared.peers.session(peer) else { return };
        let shared = self.shared.clone();
        self.shared.lifecycle.spawn(async move {
            let connection = &session.connection;
            let patience = ANSWER + 4 * connection.rtt();
            let answer = timeout(patience, file_transfer::probe(connection));
            let alive = tokio::select! {
                answer = answer => matches!(answer, Ok(Ok(()))),
                () = shared.lifecycle.closing() => true,
            };
            if !alive {
                tracing::info!(peer = %session.member, "the peer's process does not answer");
                connection.close(link::CloseCode::Done.into(), b"no answer");
            }
        });
    }

    /// Bytes sent and received so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.shared.counters.read()
    }

    /// Throughput of tensors to a peer in bytes per second; `None` until enough were sent.
    #[must_use]
    pub fn rate_to(&self, peer: PeerId) -> Option<f64> {
        self.shared.peers.get(peer)?.rate().rate()
    }

    /// Like [`Self::rate_to`], for the network link alone: `None` for a peer on this machine, where
    /// the processors limit the throughput.
    #[must_use]
    pub fn link_rate_to(&self, peer: PeerId) -> Option<f64> {
        let peer = self.shared.peers.get(peer)?;
        let measured = peer.rate().rate();
        peer.link_rate(measured)
    }

    /// The measured path of the connection to a peer; `None` without a connection.
    #[must_use]
    pub fn path_to(&self, peer: PeerId) -> Option<PathStats> {
        Some(self.shared.peers.session(peer)?.path(&self.shared.counters))
    }

    /// The measured paths of all connections, in no particular order.
    #[must_use]
    pub fn paths(&self) -> Vec<PathStats> {
        let sessions = self.shared.peers.sessions();
        sessions.iter().map(|session| session.path(&self.shared.counters)).collect()
    }

    /// Number of queued messages to a peer: messages with tensors, including those in flight, and
    /// control messages.
    #[must_use]
    pub fn queued(&self, peer: PeerId) -> (usize, usize) {
        self.shared.peers.get(peer).map_or((0, 0), |peer| peer.send_queue.lengths())
    }

    /// Sends the queued messages to connected peers, within a time limit of seconds, announces the
    /// close to them, and frees the sockets. Pending events may stay unread.
    pub async fn close(&self) {
        let shared = &self.shared;
        shared.lifecycle.begin_close();
        let links = async {
            // The accept loops refuse connections until the links are done.
            for peer in shared.peers.all() {
                peer.wait_for_link_end().await;
            }
        };
        let _ = timeout(CLOSE, links).await;
        shared.lifecycle.stop();
        for endpoint in shared.endpoints.all() {
            endpoint.close(link::CloseCode::Done.into(), b"");
        }
        shared.lifecycle.ended().await;
        for endpoint in shared.endpoints.direct() {
            // A peer that missed the close frame and still sends receives it again.
            let _ = timeout(LINGER, endpoint.wait_idle()).await;
        }
        // The next life listens on the same port. It resets the connections of this one.
        shared.endpoints.release();
    }
}

fn check_size(what: &'static str, size: usize, cap: units::Bytes) -> Result<(), SendError> {
    if size as u64 > cap.0 { Err(SendError::TooLarge { what, size, cap }) } else { Ok(()) }
}
