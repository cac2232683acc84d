//! Tests with several transports over loopback.

mod admission;
mod exchange;
mod files;
mod guests;
mod pressure;
mod reachability;
mod recovery;
mod refusals;
mod relays;
mod violations;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use quinn::{ClientConfig, Connection, Endpoint, RecvStream, SendStream};
use tokio::sync::mpsc;

use super::handshake::{self, Hello, Reply};
use super::*;
use crate::codec::packing::Packing;
use crate::frame::Element;
use crate::ids::{Member, RunId};
use crate::net::admission::Pass;

/// Time limit of every wait; far longer than a passing test needs.
const PATIENCE: Duration = Duration::from_secs(60);

async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future).await.expect("it happens in time")
}

fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

fn config(incarnation: u64) -> TransportConfig {
    TransportConfig {
        incarnation: Incarnation(incarnation),
        run: None,
        congestion: Congestion::Cubic,
        files: Arc::new(NoFiles),
        gate: Gate::default(),
    }
}

fn run(name: u8) -> Run {
    Run { id: RunId::of(&[name]), manifest: vec![name; 3] }
}

/// A transport with its events.
struct Node {
    transport: Transport,
    events: mpsc::Receiver<TransportEvent>,
    member: Member,
}

impl Node {
    fn new() -> Self {
        Self::with(&Identity::ephemeral(), loopback(), config(1))
    }

    fn with(identity: &Identity, listen: SocketAddr, config: TransportConfig) -> Self {
        let member = Member { peer: identity.peer_id(), incarnation: config.incarnation };
        let (transport, events) =
            Transport::bind(identity, &[listen], config).expect("a free port");
        Self { transport, events, member }
    }

    fn id(&self) -> PeerId {
        self.member.peer
    }

    fn addresses(&self) -> Vec<SocketAddr> {
        self.transport.local_addresses()
    }

    async fn connect(&self, other: &Self) -> Result<Welcome, ConnectError> {
        soon(self.transport.connect(other.id(), &other.addresses())).await
    }

    async fn event(&mut self) -> TransportEvent {
        soon(self.events.recv()).await.expect("the transport lives")
    }

    async fn connected(&mut self) -> Member {
        match self.event().await {
            TransportEvent::Connected { member, .. } => member,
            other => panic!("not connected: {other:?}"),
        }
    }

    async fn disconnected(&mut self) -> (Member, DisconnectReason) {
        match self.event().await {
            TransportEvent::Disconnected { member, reason } => (member, reason),
            other => panic!("not disconnected: {other:?}"),
        }
    }

    async fn control(&mut self) -> (Member, Vec<u8>) {
        match self.event().await {
            TransportEvent::Control { member, bytes } => (member, bytes),
            other => panic!("no control message: {other:?}"),
        }
    }

    async fn tensor(&mut self) -> TensorMessage {
        match self.event().await {
            TransportEvent::Tensor(message) => message,
            other => panic!("no tensors: {other:?}"),
        }
    }

    async fn send_tensor(&self, to: PeerId, tag: &[u8], frames: Vec<Frame>) {
        let queued = self.transport.send_tensor(to, tag.to_vec(), frames, Class::Activation);
        soon(queued.expect("within the limits")).await;
    }
}

/// Two connected nodes whose first events are taken.
async fn pair() -> (Node, Node) {
    let (mut left, mut right) = (Node::new(), Node::new());
    left.transport.set_members([right.id()]);
    right.transport.set_members([left.id()]);
    left.connect(&right).await.expect("they reach each other");
    assert_eq!(left.connected().await, right.member);
    assert_eq!(right.connected().await, left.member);
    (left, right)
}

fn frame(value: u8, bytes: usize) -> Frame {
    let raw = Bytes::from(vec![value; bytes]);
    Frame::pack(Element::U8, &[bytes as u32], raw, Packing::Raw).expect("agrees")
}

/// A client that sends arbitrary bytes, over real TLS.
struct Raw {
    identity: Identity,
    connection: Connection,
    send: SendStream,
    recv: RecvStream,
    _endpoint: Endpoint,
}

impl Raw {
    async fn dial(identity: Identity, target: &Node) -> Self {
        Self::dial_with(identity, target, quinn::TransportConfig::default()).await
    }

    async fn dial_with(identity: Identity, target: &Node, tuning: quinn::TransportConfig) -> Self {
        let tls = tls::Tls::new(&identity).expect("a certificate");
        let quic = Arc::new(endpoint::quic(Congestion::Cubic));
        let (endpoint, _) = endpoint::bind(loopback(), &identity, &tls, &quic, &Arc::default())
            .expect("a free port");
        let (client, _) = tls.client(target.id());
        let mut client = ClientConfig::new(client);
        client.transport_config(Arc::new(tuning));
        let connecting =
            endpoint.connect_with(client, target.addresses()[0], "any").expect("well configured");
        let connection = soon(connecting).await.expect("an answer");
        let (send, recv) = soon(connection.open_bi()).await.expect("open");
        Self { identity, connection, send, recv, _endpoint: endpoint }
    }

    /// A client whose handshake is complete.
    async fn greeted(target: &mut Node) -> Self {
        let mut raw = Self::dial(Identity::ephemeral(), target).await;
        let reply = raw.greet().await.expect("an answer");
        assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
        assert_eq!(target.connected().await.peer, raw.identity.peer_id());
        raw
    }

    async fn greet(&mut self) -> Result<Reply, ConnectError> {
        let (pass, ticket) = (Pass::default(), None);
        let hello =
            Hello { incarnation: Incarnation(1), run: None, number: 0, lost: None, pass, ticket };
        let reply = soon(handshake::greet(&hello, &mut self.send, &mut self.recv)).await;
        reply.map(|(reply, ..)| reply)
    }

    /// The reason for which the other end closed the connection.
    async fn closed(&self) -> (quinn::VarInt, String) {
        match soon(self.connection.closed()).await {
            quinn::ConnectionError::ApplicationClosed(close) => {
                (close.error_code, String::from_utf8_lossy(&close.reason).into_owned())
            }
            other => panic!("not closed by the other end: {other}"),
        }
    }
}
