//! What carries control messages, tensors and files between peers: QUIC connections on which both
//! ends have proved their ids.
//!
//! Each peer has an outbox and a link, a task that connects when there is something to send. On a
//! connection, the control stream keeps the order of control messages; each message with tensors
//! has a stream of its own; files are fetched by requests, a stream each.
//!
//! What is promised: control messages arrive in order, each at most once; those on their way when
//! a connection breaks may be lost, those still queued are not. Tensors arrive in any order, and
//! may arrive twice when a connection breaks. [`TransportEvent::Unreachable`] says that everything
//! queued is gone.
//!
//! Nothing grows without bound: a full control queue closes the connection, a full tensor queue
//! makes the sender wait, and an owner who does not take events makes the other end's streams wait.
//! An owner must therefore never wait for [`Transport::send_tensor`] where it takes events, or two
//! owners could wait for each other.

mod accept;
mod class;
mod congestion;
mod control;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod decoders;
mod dial;
mod endpoint;
mod error;
mod event;
mod eviction;
mod fetch;
mod file_piece;
mod file_transfer;
mod handshake;
mod link;
mod peer;
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

use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use quinn::Endpoint;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

pub use class::Class;
pub use endpoint::Congestion;
pub use error::{
    ConnectError, DisconnectReason, FetchError, Refusal, SendError, TransportError, Violation,
};
pub use event::{Run, TensorMessage, TransportEvent, Welcome};
pub use fetch::partial::SUFFIX as PARTIAL_SUFFIX;
use file_transfer::PieceLists;
pub use file_transfer::{FileSource, NoFiles, OpenFile};
pub use reachability::{ProbeError, ProbeReport};
pub use traffic::{Flow, Packets, PathStats, Pieces, Traffic};

use crate::frame::Frame;
use crate::ids::{ContentHash, Incarnation, Member, PeerId};
use crate::limits;
use crate::manifest::{ChunkPacking, Manifest};
use crate::net::admission::{Gate, Signed, UnixTime};
use crate::net::identity::Identity;
use crate::units;
use fetch::Wanted;
use file_piece::PiecePacker;
use handshake::Reply;
use peer::Peer;
use reachability::RateLimit;
use reachability::socket::Probes;
use relay::Relay;
use traffic::Counters;
use upload_limit::UploadLimit;

/// Events that wait for the owner.
const EVENTS: usize = 256;

/// Peers that are known at once, connected or not.
const PEERS: usize = 2 * limits::MEMBERS;

/// How long a peer under suspicion may take to answer, beside the way there and back.
const ANSWER: Duration = Duration::from_millis(500);

/// How long closing waits in all.
const CLOSE: Duration = Duration::from_secs(8);

/// How long closing answers packets that are still on their way.
const LINGER: Duration = Duration::from_millis(200);

/// What a transport is made with.
#[derive(Clone)]
pub struct TransportConfig {
    /// This life of the peer.
    pub incarnation: Incarnation,
    /// The run it takes part in; a newcomer learns it from the peer it joins through.
    pub run: Option<Run>,
    /// What decides how fast connections send.
    pub congestion: Congestion,
    /// The files that other peers may fetch.
    pub files: Arc<dyn FileSource>,
    /// Who may talk to us.
    pub gate: Gate,
}

/// A handle on the transport; all clones are the same one. When the last is dropped, connections
/// break; [`Transport::close`] ends them in order.
#[derive(Clone)]
pub struct Transport {
    shared: Arc<Shared>,
    _guard: Arc<DropGuard>,
}

/// What tasks share.
pub(crate) struct Shared {
    peer: PeerId,
    incarnation: Incarnation,
    run: RwLock<Option<Run>>,
    /// Bytes that the tensors of a message may have.
    largest_message: AtomicU64,
    files: Arc<dyn FileSource>,
    gate: Gate,
    tls: tls::Tls,
    quic: Arc<quinn::TransportConfig>,
    endpoints: Vec<Endpoint>,
    relay: Arc<Relay>,
    relayed: Arc<quinn::TransportConfig>,
    /// QUIC over the ways through other peers.
    relay_endpoint: Endpoint,
    /// What is listened for at the endpoints' sockets beside QUIC.
    probes: Arc<Probes>,
    rate_limit: RateLimit,
    counters: Counters,
    lists: Arc<PieceLists>,
    packer: Arc<PiecePacker>,
    upload_limit: UploadLimit,
    events: mpsc::Sender<TransportEvent>,
    peers: Mutex<BTreeMap<PeerId, Arc<Peer>>>,
    numbers: AtomicU64,
    tracker: TaskTracker,
    /// Nothing new is begun.
    closing: CancellationToken,
    /// Everything stops.
    closed: CancellationToken,
}

impl Shared {
    fn run(&self) -> Option<Run> {
        self.run.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The one over ways through others is closed before those that it goes over.
    fn all_endpoints(&self) -> impl Iterator<Item = &Endpoint> {
        std::iter::once(&self.relay_endpoint).chain(&self.endpoints)
    }

    fn welcome(&self, seen: SocketAddr, certificate: Option<Signed>) -> Reply {
        Reply::Welcome {
            incarnation: self.incarnation,
            run: self.run(),
            pass: self.gate.pass(),
            certificate,
            clock: UnixTime::now(),
            seen,
        }
    }

    fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// The peer of this id, with its link running; `None` when there are too many.
    fn peer(self: &Arc<Self>, id: PeerId) -> Option<Arc<Peer>> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(peer) = peers.get(&id) {
            return Some(peer.clone());
        }
        if peers.len() >= PEERS {
            return None;
        }
        let peer = Arc::new(Peer::new(id));
        peers.insert(id, peer.clone());
        self.tracker.spawn(link::run(self.clone(), peer.clone()));
        Some(peer)
    }
}

impl Transport {
    /// Listens on every address given (port 0 takes a free one) and begins to accept peers.
    ///
    /// # Errors
    /// When an address is in use or cannot be listened on, or no certificate can be made.
    pub fn bind(
        identity: &Identity,
        listen: &[SocketAddr],
        config: TransportConfig,
    ) -> Result<(Self, mpsc::Receiver<TransportEvent>), TransportError> {
        if listen.is_empty() {
            return Err(TransportError::NoListenAddress);
        }
        let tls = tls::Tls::new(identity)?;
        let quic = Arc::new(endpoint::quic(config.congestion));
        let probes = Arc::new(Probes::default());
        let endpoints = listen
            .iter()
            .map(|&address| endpoint::bind(address, identity, &tls, &quic, &probes))
            .collect::<Result<Vec<_>, _>>()?;
        let relay = Relay::new();
        let relayed = Arc::new(endpoint::relayed(config.congestion));
        let relay_endpoint = endpoint::over(relay.clone(), identity, &tls, &relayed)?;
        let largest_message = AtomicU64::new(largest_message(config.run.as_ref()).0);
        let (events, receiver) = mpsc::channel(EVENTS);
        let closed = CancellationToken::new();
        let shared = Arc::new(Shared {
            peer: identity.peer_id(),
            incarnation: config.incarnation,
            run: RwLock::new(config.run),
            largest_message,
            files: config.files,
            gate: config.gate,
            tls,
            quic,
            endpoints,
            relay,
            relayed,
            relay_endpoint,
            probes,
            rate_limit: RateLimit::default(),
            counters: Counters::default(),
            lists: Arc::default(),
            packer: Arc::default(),
            upload_limit: UploadLimit::default(),
            events,
            peers: Mutex::default(),
            numbers: AtomicU64::new(0),
            tracker: TaskTracker::new(),
            closing: closed.child_token(),
            closed: closed.clone(),
        });
        for endpoint in shared.all_endpoints() {
            shared.tracker.spawn(accept::run(shared.clone(), endpoint.clone()));
        }
        shared.tracker.spawn(eviction::run(shared.clone()));
        Ok((Self { shared, _guard: Arc::new(closed.drop_guard()) }, receiver))
    }

    /// Who we are.
    #[must_use]
    pub fn peer_id(&self) -> PeerId {
        self.shared.peer
    }

    /// Who may talk to us.
    #[must_use]
    pub fn gate(&self) -> &Gate {
        &self.shared.gate
    }

    /// Who is connected, in order.
    #[must_use]
    pub fn connected(&self) -> Vec<Member> {
        let peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.values().filter_map(|peer| Some(peer.session()?.member)).collect()
    }

    /// Where we listen, with the ports that were free.
    #[must_use]
    pub fn local_addresses(&self) -> Vec<SocketAddr> {
        self.shared.endpoints.iter().filter_map(|endpoint| endpoint.local_addr().ok()).collect()
    }

    /// Takes part in a run from now on: hellos name it, and peers of other runs are refused.
    /// Connections that exist already stay.
    pub fn set_run(&self, run: Run) {
        let largest = largest_message(Some(&run));
        self.shared.largest_message.store(largest.0, Ordering::Relaxed);
        *self.shared.run.write().unwrap_or_else(PoisonError::into_inner) = Some(run);
    }

    /// How pieces of files are packed from now on, as the run's manifest has it; not at all before.
    pub fn set_chunk_packing(&self, packing: ChunkPacking) {
        self.shared.packer.set(packing);
    }

    /// Who takes part in our run: packets are passed on between these, where they cannot reach each
    /// other, and ours go through these where we cannot.
    pub fn set_members(&self, members: impl IntoIterator<Item = PeerId>) {
        self.shared.relay.set_members(members.into_iter().collect());
    }

    /// Connects to a peer at one of these addresses, once and now, and gives its greeting; a
    /// connection that exists already will do.
    ///
    /// # Errors
    /// When no address answers in time, somebody else answers, or the peer refuses.
    pub async fn connect(
        &self,
        peer: PeerId,
        addresses: &[SocketAddr],
    ) -> Result<Welcome, ConnectError> {
        if peer == self.shared.peer {
            return Err(ConnectError::Myself);
        }
        let peer = self.shared.peer(peer).ok_or(ConnectError::TooManyPeers)?;
        let session = dial::reach(&self.shared, &peer, addresses).await?;
        peer.remember(&[session.address]);
        Ok(session.welcome())
    }

    /// Notes where a peer may be found, for when something is to be sent to it. Nothing happens
    /// with our own addresses, nor once too many peers are known.
    pub fn remember(&self, peer: PeerId, addresses: &[SocketAddr]) {
        if peer != self.shared.peer
            && let Some(peer) = self.shared.peer(peer)
        {
            peer.remember(addresses);
        }
    }

    /// Queues a control message; it goes out in order, and if need be a connection is made for it.
    ///
    /// # Errors
    /// When it is over the cap or the queue is full, which also closes the connection.
    pub fn send_control(&self, peer: PeerId, message: Vec<u8>) -> Result<(), SendError> {
        check_size("a control message", message.len(), limits::CONTROL_MESSAGE)?;
        let peer = self.recipient(peer)?;
        if peer.send_queue.push_control(message.into()) {
            Ok(())
        } else {
            Err(SendError::QueueFull { peer: peer.id })
        }
    }

    /// Queues tensors. The future resolves once there is room for them in the queue; delivery
    /// follows in the background. The future owns all it needs.
    ///
    /// # Errors
    /// At once, when the tag, the number of frames or their bytes are over their cap.
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
        let largest = units::Bytes(self.shared.largest_message.load(Ordering::Relaxed));
        check_size(
            "a message with tensors",
            frames.iter().map(|frame| frame.body().len()).sum(),
            largest,
        )?;
        let peer = self.recipient(peer)?;
        Ok(async move { peer.send_queue.push_tensor(Bytes::from(tag), frames, class).await })
    }

    fn recipient(&self, peer: PeerId) -> Result<Arc<Peer>, SendError> {
        if peer == self.shared.peer {
            return Err(SendError::Myself);
        }
        if self.shared.closing.is_cancelled() {
            return Err(SendError::Closing);
        }
        self.shared.peer(peer).ok_or(SendError::TooManyPeers)
    }

    /// How many bytes the file of this hash has, as one who may have it says: proved only once the
    /// file is fetched.
    ///
    /// # Errors
    /// When the peer is not there, or does not have it.
    pub async fn file_length(&self, holder: PeerId, hash: ContentHash) -> Result<u64, FetchError> {
        fetch::length(&self.shared, holder, hash).await
    }

    /// Fetches a file of `length` bytes from those who have it, all at once, into `destination`, which
    /// appears only once all of it is right. Who sends other bytes, is gone or was never there leaves
    /// it to the others. What came of a file that did not become whole stays beside the destination
    /// ([`PARTIAL_SUFFIX`]), and the next fetch of it goes on there.
    ///
    /// # Errors
    /// The last reason why no holder is left, or why the disk does not take it.
    pub async fn fetch_file(
        &self,
        holders: &[PeerId],
        hash: ContentHash,
        length: u64,
        destination: &Path,
    ) -> Result<(), FetchError> {
        fetch::fetch(&self.shared, holders, Wanted { hash, length }, destination).await
    }

    /// Asks a peer to whom a connection leads straight to ring at this one's own UDP port, or at another one
    /// of the same host, such as a router's: whether who was never sent to gets through.
    ///
    /// # Errors
    /// When there is no such connection, or the peer does not ring.
    pub async fn request_probe(
        &self,
        peer: PeerId,
        port: Option<u16>,
    ) -> Result<ProbeReport, ProbeError> {
        let session = {
            let peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
            peers.get(&peer).and_then(|peer| peer.session()).ok_or(ProbeError::NotConnected)?
        };
        tokio::select! {
            () = self.shared.closing.cancelled() => Err(ProbeError::NotConnected),
            probe_report = reachability::ask(&self.shared, &session, port) => probe_report,
        }
    }

    /// Closes the connection to a peer that said something senseless.
    pub fn reject(&self, peer: PeerId, reason: &str) {
        let peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(session) = peers.get(&peer).and_then(|peer| peer.session()) {
            session.connection.close(link::CloseCode::Violation.into(), reason.as_bytes());
        }
    }

    /// There is reason to believe that a peer's process has died: asks it whether it is there, and
    /// breaks the connection if it does not answer at once, long before silence would.
    pub fn suspect(&self, peer: PeerId) {
        let peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(session) = peers.get(&peer).and_then(|peer| peer.session()) else { return };
        let shared = self.shared.clone();
        self.shared.tracker.spawn(async move {
            let connection = &session.connection;
            let patience = ANSWER + 4 * connection.rtt();
            let answer = timeout(patience, file_transfer::probe(connection));
            let there = tokio::select! {
                answer = answer => matches!(answer, Ok(Ok(()))),
                () = shared.closing.cancelled() => true,
            };
            if !there {
                tracing::info!(peer = %session.member, "its process does not answer any more");
                connection.close(link::CloseCode::Done.into(), b"no answer");
            }
        });
    }

    /// Bytes sent and received so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.shared.counters.read()
    }

    /// Bytes per second that a peer takes of tensors, once enough were sent to it.
    #[must_use]
    pub fn rate_to(&self, peer: PeerId) -> Option<f64> {
        let peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.get(&peer).and_then(|peer| peer.rate().rate())
    }

    /// The same of the link to a peer: none to one on this machine, where the processors are what limits it.
    #[must_use]
    pub fn link_rate_to(&self, peer: PeerId) -> Option<f64> {
        let peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let peer = peers.get(&peer)?;
        let measured = peer.rate().rate();
        peer.link_rate(measured)
    }

    /// What the connection to a peer shows of the way there; none where there is no connection.
    #[must_use]
    pub fn path_to(&self, peer: PeerId) -> Option<PathStats> {
        let peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let session = peers.get(&peer)?.session()?;
        Some(session.path(&self.shared.counters))
    }

    /// The same of all connections that there are, in no order that means anything.
    #[must_use]
    pub fn paths(&self) -> Vec<PathStats> {
        let peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let sessions = peers.values().filter_map(|peer| peer.session());
        sessions.map(|session| session.path(&self.shared.counters)).collect()
    }

    /// What waits to be sent to a peer: messages with tensors, those on their way included, and
    /// control messages.
    #[must_use]
    pub fn queued(&self, peer: PeerId) -> (usize, usize) {
        let peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.get(&peer).map_or((0, 0), |peer| peer.send_queue.lengths())
    }

    /// Sends what is queued to connected peers, as far as they take it within seconds, tells them
    /// that we leave, and frees the sockets. Events may be left untaken.
    pub async fn close(&self) {
        let shared = &self.shared;
        shared.closing.cancel();
        shared.tracker.close();
        let links = async {
            // The accept loops go on refusing until the links are done.
            let peers: Vec<Arc<Peer>> = {
                let peers = shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
                peers.values().cloned().collect()
            };
            for peer in peers {
                peer.gone().await;
            }
        };
        let _ = timeout(CLOSE, links).await;
        shared.closed.cancel();
        for endpoint in shared.all_endpoints() {
            endpoint.close(link::CloseCode::Done.into(), b"");
        }
        shared.tracker.wait().await;
        for endpoint in &shared.endpoints {
            // Who missed the farewell and still sends is told again.
            let _ = timeout(LINGER, endpoint.wait_idle()).await;
        }
    }
}

/// The most bytes that the tensors of a message have in a run. A manifest that is none says nothing of that, as
/// where there is none yet.
fn largest_message(run: Option<&Run>) -> units::Bytes {
    let manifest = run.and_then(|run| Manifest::from_bytes(&run.manifest).ok());
    manifest.map_or(limits::TENSOR_MESSAGE, |manifest| manifest.largest_message())
}

fn check_size(what: &'static str, size: usize, cap: units::Bytes) -> Result<(), SendError> {
    if size as u64 > cap.0 { Err(SendError::TooLarge { what, size, cap }) } else { Ok(()) }
}
