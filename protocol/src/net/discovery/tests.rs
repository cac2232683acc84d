//! Whole libp2p nodes against each other over loopback.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use tokio::time::timeout;

use super::*;

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
        // Discovery is given the ports that the transport got; here a free one.
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let listen = free.local_addr().expect("bound");
        drop(free);
        let config = DiscoveryConfig { listen: vec![listen], mdns: false, gate: Gate::default() };
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
