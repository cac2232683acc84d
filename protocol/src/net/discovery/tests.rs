//! Tests with several libp2p nodes over loopback.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use tokio::time::timeout;

use super::*;
use crate::manifest::{Admission, AdmissionMode};
use crate::net::admission::{Certificate, Reason, Rules, TicketId, UnixTime};

/// Time limit of every wait; far longer than a passing test needs.
const PATIENCE: Duration = Duration::from_secs(60);

struct Searcher {
    discovery: Discovery,
    events: mpsc::Receiver<DiscoveryEvent>,
    address: PeerAddress,
}

impl Searcher {
    fn new() -> Self {
        Self::with(&Identity::ephemeral())
    }

    fn with(identity: &Identity) -> Self {
        Self::guarded(identity, Gate::default())
    }

    fn guarded(identity: &Identity, gate: Gate) -> Self {
        // The node passes the transport's ports to discovery; here it is any free port.
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let listen = free.local_addr().expect("bound");
        drop(free);
        let config = DiscoveryConfig { listen: vec![listen], mdns: false, gate };
        let (discovery, events) = Discovery::start(identity, &config).expect("a free port");
        Self { discovery, events, address: PeerAddress::new(listen, identity.peer_id()) }
    }

    fn socket_address(&self) -> SocketAddr {
        let Host::Ip(ip) = self.address.host else { panic!("made of an IP address") };
        SocketAddr::new(ip, self.address.port)
    }

    async fn event(&mut self) -> DiscoveryEvent {
        let event = timeout(PATIENCE, self.events.recv()).await.expect("it happens in time");
        event.expect("the search goes on")
    }

    /// Waits until the other peer is found at its address.
    async fn finds(&mut self, other: &Self) {
        loop {
            match self.event().await {
                DiscoveryEvent::Found { peer, addresses } if peer == other.address.peer => {
                    assert_eq!(addresses[0], other.socket_address());
                    break;
                }
                DiscoveryEvent::Found { .. } => {}
                failure => panic!("{failure:?}"),
            }
        }
    }
}

#[tokio::test]
async fn a_third_peer_finds_the_first_through_the_second() {
    let run = RunId::of(b"a run");
    let (mut first, mut second, mut third) = (Searcher::new(), Searcher::new(), Searcher::new());
    first.discovery.join(run).await;
    second.discovery.bootstrap(first.address.clone()).await;
    second.discovery.join(run).await;
    second.finds(&first).await;
    first.finds(&second).await;

    third.discovery.bootstrap(second.address.clone()).await;
    third.discovery.join(run).await;
    third.finds(&first).await;
    first.finds(&third).await;
    second.finds(&third).await;
    for searcher in [&first, &second, &third] {
        timeout(PATIENCE, searcher.discovery.close()).await.expect("it stops");
    }
}

#[tokio::test]
async fn peers_of_other_runs_are_not_found() {
    let (mut first, mut second) = (Searcher::new(), Searcher::new());
    let mut third = Searcher::new();
    first.discovery.join(RunId::of(b"one run")).await;
    second.discovery.join(RunId::of(b"another run")).await;
    second.discovery.bootstrap(first.address.clone()).await;
    // The peer used to join is always found.
    second.finds(&first).await;
    third.discovery.bootstrap(second.address.clone()).await;
    third.discovery.join(RunId::of(b"one run")).await;
    third.finds(&first).await;
    first.finds(&third).await;
    assert!(first.events.try_recv().is_err(), "peers of another run are not reported");
}

#[tokio::test]
async fn a_wrong_peer_id_in_the_address_is_named() {
    let (mut searcher, target) = (Searcher::new(), Searcher::new());
    let wrong = PeerAddress { peer: Identity::ephemeral().peer_id(), ..target.address.clone() };
    searcher.discovery.bootstrap(wrong.clone()).await;
    assert_eq!(
        searcher.event().await,
        DiscoveryEvent::WrongPeer { address: wrong, found: target.address.peer }
    );
}

#[tokio::test]
async fn an_address_without_a_listener_is_named() {
    let mut searcher = Searcher::new();
    let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let listen = free.local_addr().expect("bound");
    drop(free);
    let unused = PeerAddress::new(listen, Identity::ephemeral().peer_id());
    searcher.discovery.bootstrap(unused.clone()).await;
    match searcher.event().await {
        DiscoveryEvent::Unreachable { address, reason } => {
            assert_eq!(address, unused);
            assert!(reason.contains("refused"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    let own = searcher.address.clone();
    searcher.discovery.bootstrap(own.clone()).await;
    match searcher.event().await {
        DiscoveryEvent::Unreachable { address, reason } => {
            assert_eq!(address, own);
            assert!(reason.contains("own"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let searcher = Searcher::new();
    let taken = searcher.socket_address();
    let config = DiscoveryConfig { listen: vec![taken], mdns: false, gate: Gate::default() };
    let error = Discovery::start(&Identity::ephemeral(), &config).err().expect("taken");
    assert!(matches!(error, DiscoveryError::AddressInUse { address } if address == taken));
    assert!(error.to_string().contains(&taken.to_string()), "{error}");
}

/// A peer of an invite-only run, with a certificate signed by the issuer.
fn invited(issuer: &Identity, identity: &Identity) -> Searcher {
    let (run, gate) = (RunId::of(b"a run"), Gate::default());
    let admission = Admission { mode: AdmissionMode::Invite, key: Some(issuer.peer_id()) };
    gate.enter(Rules { run, admission });
    gate.hold(Certificate::sign(
        issuer,
        run,
        identity.peer_id(),
        (TicketId(1), false),
        UnixTime::now(),
    ));
    Searcher::guarded(identity, gate)
}

async fn refusal(searcher: &mut Searcher) -> String {
    match searcher.event().await {
        DiscoveryEvent::Unreachable { reason, .. } => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_peer_that_is_not_admitted_receives_only_the_reason() {
    let issuer = Identity::ephemeral();
    let mut first = invited(&issuer, &issuer);
    let mut second = invited(&issuer, &Identity::ephemeral());
    second.discovery.bootstrap(first.address.clone()).await;
    first.discovery.join(RunId::of(b"a run")).await;
    second.discovery.join(RunId::of(b"a run")).await;
    second.finds(&first).await;
    first.finds(&second).await;
    // Without a certificate, and with one that another key signed.
    let mut stranger = Searcher::new();
    stranger.discovery.bootstrap(first.address.clone()).await;
    let reason = refusal(&mut stranger).await;
    assert!(reason.contains("peers with a ticket"), "{reason}");
    let mut forger = invited(&Identity::ephemeral(), &Identity::ephemeral());
    forger.discovery.bootstrap(second.address.clone()).await;
    let reason = refusal(&mut forger).await;
    assert!(reason.contains("not signed by the run's issuer"), "{reason}");
    // The dialling end also checks the answering end.
    second.discovery.bootstrap(stranger.address.clone()).await;
    let reason = refusal(&mut second).await;
    assert!(reason.contains("does not prove that it takes part"), "{reason}");
    assert!(first.events.try_recv().is_err(), "no other peer was found");
}

#[tokio::test]
async fn silent_connections_are_dropped_and_a_peer_still_joins() {
    let issuer = Identity::ephemeral();
    let gate = Gate::default();
    let run = RunId::of(b"a run");
    let admission = Admission { mode: AdmissionMode::Invite, key: Some(issuer.peer_id()) };
    gate.enter(Rules { run, admission });
    let first = Searcher::guarded(&issuer, gate.clone());
    let mut silent = Vec::new();
    for _ in 0..1000 {
        let connected = tokio::net::TcpStream::connect(first.socket_address()).await;
        silent.push(connected.expect("a connection"));
    }
    // Bytes of another protocol, and an excessive length.
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096]] {
        let mut stream = tokio::net::TcpStream::connect(first.socket_address()).await;
        let stream = stream.as_mut().expect("a connection");
        let _ = tokio::io::AsyncWriteExt::write_all(stream, bytes).await;
    }
    // All connections are from one host, so a peer can connect once the first silent ones are
    // dropped.
    let identity = Identity::ephemeral();
    let mut second = invited(&issuer, &identity);
    second.discovery.bootstrap(first.address.clone()).await;
    second.discovery.join(run).await;
    first.discovery.join(run).await;
    loop {
        match second.event().await {
            DiscoveryEvent::Found { peer, .. } if peer == issuer.peer_id() => break,
            // Retried, because the host's limit may still be reached.
            DiscoveryEvent::Unreachable { .. } => {
                second.discovery.bootstrap(first.address.clone()).await;
            }
            _ => {}
        }
    }
    assert!(gate.refusals()[&Reason::Flood] > 500, "{:?}", gate.refusals());
}
