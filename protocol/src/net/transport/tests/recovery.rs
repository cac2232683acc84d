use super::*;

/// A transport on the port that a former incarnation has just left.
async fn rebind(identity: &Identity, address: SocketAddr, config: TransportConfig) -> Node {
    let bound = async {
        loop {
            match Transport::bind(identity, &[address], config.clone()) {
                Ok((transport, events)) => break (transport, events),
                // The former socket is freed by a task that still has to run.
                Err(TransportError::AddressInUse { .. }) => tokio::task::yield_now().await,
                Err(error) => panic!("{error}"),
            }
        }
    };
    let (transport, events) = soon(bound).await;
    let member = Member { peer: identity.peer_id(), incarnation: config.incarnation };
    Node { transport, events, member }
}

#[tokio::test]
async fn a_new_incarnation_replaces_the_former_one() {
    let mut node = Node::new();
    let identity = Identity::ephemeral();
    let former = Node::with(&identity, loopback(), config(1));
    former.connect(&node).await.expect("reached");
    assert_eq!(node.connected().await, former.member);

    // The former incarnation has sent no message yet.
    let mut next = Node::with(&identity, loopback(), config(2));
    next.connect(&node).await.expect("reached");
    assert_eq!(node.disconnected().await, (former.member, DisconnectReason::Replaced));
    assert_eq!(node.connected().await, next.member);
    assert_eq!(next.connected().await, node.member);
    node.transport.send_control(identity.peer_id(), b"hello again".to_vec()).expect("queued");
    assert_eq!(next.control().await, (node.member, b"hello again".to_vec()));
}

#[tokio::test]
async fn the_silent_death_of_a_peer_is_detected_when_it_returns() {
    let mut node = Node::new();
    let identity = Identity::ephemeral();
    // Shutting down the runtime stops all tasks that send packets, like the death of a process.
    let process = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let former = {
        let _inside = process.enter();
        Node::with(&identity, loopback(), config(1))
    };
    let address = former.addresses()[0];
    node.connect(&former).await.expect("reached");
    assert_eq!(node.connected().await, former.member);
    process.shutdown_background();
    drop(former);

    let mut next = rebind(&identity, address, config(2)).await;
    node.transport.send_control(identity.peer_id(), b"who are you?".to_vec()).expect("queued");
    let (_, reason) = node.disconnected().await;
    assert_eq!(reason, DisconnectReason::Lost("reset by peer".to_owned()));
    node.transport.send_control(identity.peer_id(), b"hello".to_vec()).expect("queued");
    assert_eq!(next.connected().await, node.member);
    assert_eq!(next.control().await, (node.member, b"hello".to_vec()));
}

#[tokio::test]
async fn a_port_is_free_after_the_close_though_a_connection_is_still_ending() {
    let node = Node::new();
    let identity = Identity::ephemeral();
    let former = Node::with(&identity, loopback(), config(1));
    let address = former.addresses()[0];
    former.connect(&node).await.expect("reached");
    // Stands for a connection to a peer behind a broken path, which ends after several timeouts.
    let ending = former.transport.shared.peers.session(node.id()).expect("connected");
    soon(former.transport.close()).await;
    let next = Transport::bind(&identity, &[address], config(2));
    assert!(next.is_ok(), "{:?}", next.err());
    drop(ending);
}

#[tokio::test]
async fn messages_wait_for_a_peer_that_restarts() {
    let mut node = Node::new();
    let identity = Identity::ephemeral();
    let former = Node::with(&identity, loopback(), config(1));
    let address = former.addresses()[0];
    node.connect(&former).await.expect("reached");
    assert_eq!(node.connected().await, former.member);
    soon(former.transport.close()).await;
    drop(former);
    let (_, reason) = node.disconnected().await;
    assert_eq!(reason, DisconnectReason::Left);

    for count in 0..20 {
        node.transport.send_control(identity.peer_id(), vec![count]).expect("queued");
    }
    node.send_tensor(identity.peer_id(), b"kept", vec![frame(1, 100)]).await;
    let mut next = rebind(&identity, address, config(2)).await;
    assert_eq!(next.connected().await, node.member);
    assert_eq!(node.connected().await, next.member);
    let mut controls = Vec::new();
    let mut tags = Vec::new();
    while controls.len() < 20 || tags.is_empty() {
        match next.event().await {
            TransportEvent::Control { bytes, .. } => controls.extend(bytes),
            TransportEvent::Tensor(message) => tags.push(message.tag),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(controls, (0..20).collect::<Vec<u8>>());
    assert_eq!(tags, [b"kept"]);
}

#[tokio::test]
async fn a_late_address_is_used_at_once() {
    let (node, mut target) = (Node::new(), Node::new());
    node.transport.send_control(target.id(), b"found you".to_vec()).expect("queued");
    node.transport.remember(target.id(), &target.addresses());
    assert_eq!(target.connected().await, node.member);
    assert_eq!(target.control().await, (node.member, b"found you".to_vec()));
}

#[tokio::test]
async fn a_broken_connection_is_reestablished_on_demand() {
    let (mut left, mut right) = pair().await;
    right.transport.reject(left.id(), "test");
    let (_, reason) = left.disconnected().await;
    assert_eq!(reason, DisconnectReason::ClosedByPeer("test".to_owned()));
    right.disconnected().await;
    // The dialling end knows the address of the other.
    left.transport.send_control(right.id(), b"again".to_vec()).expect("queued");
    assert_eq!(right.connected().await, left.member);
    assert_eq!(right.control().await, (left.member, b"again".to_vec()));
}
