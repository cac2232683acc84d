use super::*;
use crate::net::transport::link::CloseCode;

#[tokio::test]
async fn a_port_in_use_is_named() {
    let node = Node::new();
    let address = node.addresses()[0];
    let second = Transport::bind(&Identity::ephemeral(), &[address], config(1));
    let error = second.err().expect("the port is taken");
    assert!(matches!(error, TransportError::AddressInUse { address: taken } if taken == address));
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

#[tokio::test]
async fn a_wrong_peer_at_an_address_is_refused_by_both_ends() {
    let (dialler, mut target) = (Node::new(), Node::new());
    let expected = Identity::ephemeral().peer_id();
    let address = target.addresses()[0];
    let error = soon(dialler.transport.connect(expected, &[address])).await.err();
    let wrong = ConnectError::WrongPeer { address, expected, found: target.id() };
    assert_eq!(error, Some(wrong));
    // The other end did not count it as a connection: its first event is the next one.
    dialler.connect(&target).await.expect("the right peer");
    assert_eq!(target.connected().await, dialler.member);
}

#[tokio::test]
async fn an_end_without_an_identity_is_refused() {
    let target = Node::new();
    let identity = Identity::ephemeral();
    let tls = tls::Tls::new(&identity).expect("a certificate");
    let (_, verifier) = tls.client(target.id());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("the suites are of TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"shoal/1".to_vec()];
    let config = quinn::crypto::rustls::QuicClientConfig::try_from(config).expect("suites");
    let quic = Arc::new(endpoint::quic(Congestion::Cubic));
    let (endpoint, _) =
        endpoint::bind(loopback(), &identity, &tls, &quic, &Arc::default()).expect("a free port");
    let connection = endpoint
        .connect_with(ClientConfig::new(Arc::new(config)), target.addresses()[0], "any")
        .expect("well configured");
    // The dialling end may count as connected for a moment.
    let ended = match soon(connection).await {
        Ok(connection) => soon(connection.closed()).await,
        Err(error) => error,
    };
    assert!(matches!(ended, quinn::ConnectionError::ConnectionClosed(_)), "{ended}");
}

#[tokio::test]
async fn another_run_is_refused_and_both_are_named() {
    let mut ours = config(1);
    ours.run = Some(run(1));
    let dialler = Node::with(&Identity::ephemeral(), loopback(), ours);
    let target = Node::new();
    target.transport.set_run(run(2));
    let error = dialler.connect(&target).await.expect_err("another run");
    let refusal = Refusal::OtherRun { ours: run(1).id, theirs: run(2).id };
    assert_eq!(error, ConnectError::Refused(refusal));
    let text = error.to_string();
    assert!(text.contains(&run(1).id.to_string()) && text.contains(&run(2).id.to_string()));
}

#[tokio::test]
async fn a_hello_of_another_version_is_answered_with_the_version() {
    let target = Node::new();
    let mut raw = Raw::dial(Identity::ephemeral(), &target).await;
    let other = limits::PROTOCOL_VERSION + 8;
    let hello = [&8u32.to_le_bytes()[..], &other.to_le_bytes(), b"????"].concat();
    raw.send.write_all(&hello).await.expect("open");
    let reply = soon(raw.recv.read_to_end(100)).await.expect("an answer");
    assert_eq!(reply, [[4, 0, 0, 0], limits::PROTOCOL_VERSION.to_le_bytes()].concat());
}

#[tokio::test]
async fn an_answer_of_another_version_names_both() {
    let identity = Identity::ephemeral();
    let tls = tls::Tls::new(&identity).expect("a certificate");
    let quic = Arc::new(endpoint::quic(Congestion::Cubic));
    let (endpoint, _) =
        endpoint::bind(loopback(), &identity, &tls, &quic, &Arc::default()).expect("a free port");
    let addresses = [endpoint.local_addr().expect("bound")];
    let dialler = Node::new();
    let other = limits::PROTOCOL_VERSION + 8;
    let answer = async {
        let incoming = endpoint.accept().await.expect("open");
        let connection = incoming.await.expect("a peer");
        let (mut send, mut recv) = connection.accept_bi().await.expect("a control stream");
        handshake::read_hello(&mut recv).await.expect("a hello");
        let reply = [&4u32.to_le_bytes()[..], &other.to_le_bytes()].concat();
        send.write_all(&reply).await.expect("open");
        connection.closed().await
    };
    let connect = dialler.transport.connect(identity.peer_id(), &addresses);
    let (_, error) = soon(async { tokio::join!(answer, connect) }).await;
    let refusal = Refusal::Version { ours: limits::PROTOCOL_VERSION, theirs: other };
    let error = error.expect_err("another version");
    assert_eq!(error, ConnectError::Refused(refusal));
    for version in [limits::PROTOCOL_VERSION, other] {
        assert!(error.to_string().contains(&format!("version {version}")), "{error}");
    }
}

#[tokio::test]
async fn the_own_identity_and_former_incarnations_are_refused() {
    let identity = Identity::ephemeral();
    let mut target = Node::with(&identity, loopback(), config(1));
    assert_eq!(target.connect(&target).await.err(), Some(ConnectError::OwnAddress));
    let mut copy = Raw::dial(identity, &target).await;
    assert_eq!(copy.greet().await.ok(), Some(Reply::Refused(Refusal::OwnIdentity)));

    let peer = Identity::ephemeral();
    let later = Node::with(&peer, loopback(), config(5));
    later.connect(&target).await.expect("reached");
    assert_eq!(target.connected().await, later.member);
    let former = Node::with(&peer, loopback(), config(4));
    let error = former.connect(&target).await.err();
    let displaced = Refusal::Displaced { newest: Incarnation(5) };
    assert_eq!(error, Some(ConnectError::Refused(displaced)));
}

#[tokio::test]
async fn an_error_names_the_address_that_does_not_answer() {
    let silent = std::net::UdpSocket::bind(loopback()).expect("a free port");
    let address = silent.local_addr().expect("bound");
    let node = Node::new();
    let other = Identity::ephemeral().peer_id();
    assert_eq!(
        soon(node.transport.connect(other, &[])).await,
        Err(ConnectError::NoAddress { peer: other })
    );
    let six: SocketAddr = "[::1]:9".parse().expect("an address");
    assert_eq!(
        soon(node.transport.connect(other, &[six])).await,
        Err(ConnectError::NoSocket { address: six })
    );
    let silence = soon(node.transport.connect(other, &[address])).await.err();
    let Some(ConnectError::Unreachable { address: named, .. }) = silence else {
        panic!("{silence:?}")
    };
    assert_eq!(named, address);
}

#[tokio::test]
async fn a_final_failure_is_reported_at_once() {
    let (mut node, target) = (Node::new(), Node::new());
    let expected = Identity::ephemeral().peer_id();
    node.transport.remember(expected, &target.addresses());
    node.transport.send_control(expected, vec![1]).expect("queued");
    match node.event().await {
        TransportEvent::Unreachable { peer, error: ConnectError::WrongPeer { found, .. } } => {
            assert_eq!((peer, found), (expected, target.id()));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(node.transport.queued(expected), (0, 0));
}

#[tokio::test]
async fn a_rejected_peer_is_disconnected_with_the_reason() {
    let (left, mut right) = pair().await;
    left.transport.reject(right.id(), "no such step");
    let (_, reason) = right.disconnected().await;
    assert_eq!(reason, DisconnectReason::ClosedByPeer("no such step".to_owned()));
    assert_ne!(quinn::VarInt::from(CloseCode::Violation), CloseCode::Done.into());
}
