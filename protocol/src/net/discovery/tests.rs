//! Whole libp2p nodes against each other over loopback.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use tokio::time::timeout;

use super::*;
use crate::manifest::{Admission, AdmissionMode};
use crate::net::admission::{Certificate, Reason, Rules, TicketId, UnixTime};

/// Far longer than anything here takes: a test that waits for it has failed.
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
        // Discovery is given the ports that the transport got; here a free one.
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

    /// Waits until this peer is found, at the place where it is.
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
    // Whom we came through is found in any case.
    second.finds(&first).await;
    third.discovery.bootstrap(second.address.clone()).await;
    third.discovery.join(RunId::of(b"one run")).await;
    third.finds(&first).await;
    first.finds(&third).await;
    assert!(first.events.try_recv().is_err(), "the first has no business with the second");
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
async fn an_address_where_nobody_listens_is_named() {
    let mut searcher = Searcher::new();
    let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let listen = free.local_addr().expect("bound");
    drop(free);
    let nobody = PeerAddress::new(listen, Identity::ephemeral().peer_id());
    searcher.discovery.bootstrap(nobody.clone()).await;
    match searcher.event().await {
        DiscoveryEvent::Unreachable { address, reason } => {
            assert_eq!(address, nobody);
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

/// A peer of a run of invited peers, whose warden signs what it shows.
fn invited(issuer: &Identity, identity: &Identity) -> Searcher {
    let (run, gate) = (RunId::of(b"a run"), Gate::default());
    let admission = Admission { mode: AdmissionMode::Invite, key: Some(issuer.peer_id()) };
    gate.enter(Rules { run, admission });
    gate.hold(Certificate::sign(issuer, run, identity.peer_id(), TicketId(1), UnixTime::now()));
    Searcher::guarded(identity, gate)
}

async fn refusal(searcher: &mut Searcher) -> String {
    match searcher.event().await {
        DiscoveryEvent::Unreachable { reason, .. } => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn libp2p_says_nothing_to_who_is_not_let_in() {
    let issuer = Identity::ephemeral();
    let mut first = invited(&issuer, &issuer);
    let mut second = invited(&issuer, &Identity::ephemeral());
    second.discovery.bootstrap(first.address.clone()).await;
    first.discovery.join(RunId::of(b"a run")).await;
    second.discovery.join(RunId::of(b"a run")).await;
    second.finds(&first).await;
    first.finds(&second).await;
    // Without a permit, and with one that another key signed.
    let mut stranger = Searcher::new();
    stranger.discovery.bootstrap(first.address.clone()).await;
    let reason = refusal(&mut stranger).await;
    assert!(reason.contains("who has a ticket"), "{reason}");
    let mut forger = invited(&Identity::ephemeral(), &Identity::ephemeral());
    forger.discovery.bootstrap(second.address.clone()).await;
    let reason = refusal(&mut forger).await;
    assert!(reason.contains("not signed by the run's warden"), "{reason}");
    // Who dials looks as well at who answers.
    second.discovery.bootstrap(stranger.address.clone()).await;
    let reason = refusal(&mut second).await;
    assert!(reason.contains("does not prove that it takes part"), "{reason}");
    assert!(first.events.try_recv().is_err(), "nobody else was found");
}

#[tokio::test]
async fn connections_that_say_nothing_are_dropped_and_others_get_in() {
    let issuer = Identity::ephemeral();
    let gate = Gate::default();
    let run = RunId::of(b"a run");
    let admission = Admission { mode: AdmissionMode::Invite, key: Some(issuer.peer_id()) };
    gate.enter(Rules { run, admission });
    let first = Searcher::guarded(&issuer, gate.clone());
    let mut silent = Vec::new();
    for _ in 0..1000 {
        let connected = tokio::net::TcpStream::connect(first.socket_address()).await;
        silent.push(connected.expect("the system takes it"));
    }
    // Wholly other words, and an endless length.
    for words in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096]] {
        let mut stream = tokio::net::TcpStream::connect(first.socket_address()).await;
        let stream = stream.as_mut().expect("the system takes it");
        let _ = tokio::io::AsyncWriteExt::write_all(stream, words).await;
    }
    // Here all are of one host, so a peer gets in when the first of the silent are given up.
    let identity = Identity::ephemeral();
    let mut second = invited(&issuer, &identity);
    second.discovery.bootstrap(first.address.clone()).await;
    second.discovery.join(run).await;
    first.discovery.join(run).await;
    loop {
        match second.event().await {
            DiscoveryEvent::Found { peer, .. } if peer == issuer.peer_id() => break,
            // Tried again in the next round.
            DiscoveryEvent::Unreachable { .. } => {
                second.discovery.bootstrap(first.address.clone()).await;
            }
            _ => {}
        }
    }
    assert!(gate.refusals()[&Reason::Flood] > 500, "{:?}", gate.refusals());
}
