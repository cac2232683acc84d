//! Tests of peers without a direct path.

use std::net::UdpSocket;

use super::*;

/// An address that does not answer, for as long as the socket lives.
fn nowhere() -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind(loopback()).expect("a free port");
    let address = socket.local_addr().expect("bound");
    (socket, address)
}

/// Three members of a run. The last two are connected to the first, and each has an address of the
/// other that does not answer.
async fn apart() -> (Node, Node, Node, UdpSocket) {
    let (mut relay, mut left, mut right) = (Node::new(), Node::new(), Node::new());
    for end in [&mut left, &mut right] {
        end.connect(&relay).await.expect("they reach each other");
        assert_eq!(end.connected().await, relay.member);
        assert_eq!(relay.connected().await, end.member);
    }
    for node in [&relay, &left, &right] {
        node.transport.set_members([relay.id(), left.id(), right.id()]);
    }
    let (socket, silent) = nowhere();
    left.transport.remember(right.id(), &[silent]);
    right.transport.remember(left.id(), &[silent]);
    (relay, left, right, socket)
}

/// The peer's address in the event of its connection.
async fn connected_at(node: &mut Node) -> Option<SocketAddr> {
    match node.event().await {
        TransportEvent::Connected { address, .. } => address,
        other => panic!("not connected: {other:?}"),
    }
}

/// The same three, after the last two have connected through the first.
async fn joined() -> (Node, Node, Node, UdpSocket) {
    let (relay, mut left, mut right, socket) = apart().await;
    left.transport.send_control(right.id(), b"there".to_vec()).expect("queued");
    assert_eq!(connected_at(&mut left).await, None);
    assert_eq!(connected_at(&mut right).await, None);
    assert_eq!(right.control().await, (left.member, b"there".to_vec()));
    (relay, left, right, socket)
}

#[tokio::test]
async fn a_peer_without_a_direct_path_is_reached_through_a_relay() {
    let (relay, mut left, right, _socket) = joined().await;
    let frames = vec![frame(7, 3 << 20)];
    right.send_tensor(left.id(), b"back", frames.clone()).await;
    let message = left.tensor().await;
    assert_eq!((message.member, message.frames), (right.member, frames));
    assert!(relay.transport.traffic().relay.sent.0 > 3 << 20);
    assert_eq!(relay.transport.traffic().tensor, Flow::default(), "the relay cannot decrypt");
}

#[tokio::test]
async fn a_direct_connection_replaces_a_relayed_one() {
    let (relay, mut left, mut right, _socket) = joined().await;
    left.transport.remember(right.id(), &right.addresses());
    let (one, other) = (left.member, right.member);
    for (node, other) in [(&mut left, other), (&mut right, one)] {
        assert_eq!(node.disconnected().await, (other, DisconnectReason::Replaced));
        connected_at(node).await.expect("a direct path");
    }
    let relayed = relay.transport.traffic().relay;
    left.send_tensor(right.id(), b"two", vec![frame(1, 1 << 20)]).await;
    assert_eq!(right.tensor().await.tag, b"two");
    let more = relay.transport.traffic().relay.sent - relayed.sent;
    assert!(more.0 < 1 << 16, "only close frames: {more}");
}

#[tokio::test]
async fn nothing_is_relayed_for_peers_that_are_not_members() {
    let (relay, _left, right, _socket) = apart().await;
    let outsider = Node::new();
    outsider.transport.set_members([relay.id(), right.id(), outsider.id()]);
    outsider.connect(&relay).await.expect("they reach each other");
    let (_silence, silent) = nowhere();
    let failed = soon(outsider.transport.connect(right.id(), &[silent])).await;
    failed.expect_err("no peer relays it");
}

#[tokio::test]
async fn a_relayed_connection_ends_with_its_relay() {
    let (relay, mut left, right, _socket) = joined().await;
    relay.transport.close().await;
    let mut lost = vec![left.disconnected().await.0, left.disconnected().await.0];
    lost.sort();
    let mut expected = vec![relay.member, right.member];
    expected.sort();
    assert_eq!(lost, expected);
}

#[tokio::test]
async fn a_direct_dial_is_preferred_to_a_relayed_one() {
    let (_middle, left, right, _socket) = apart().await;
    // The preferred end of two crossing dials is the one that knows no direct path.
    let (mut blind, mut seeing) =
        if left.id() < right.id() { (left, right) } else { (right, left) };
    seeing.transport.remember(blind.id(), &blind.addresses());
    for (node, to) in [(&blind, seeing.id()), (&seeing, blind.id())] {
        node.transport.send_control(to, b"hello".to_vec()).expect("queued");
    }
    let (one, other) = (blind.member, seeing.member);
    for (node, other) in [(&mut blind, other), (&mut seeing, one)] {
        connected_at(node).await.expect("a direct path, and no other before it");
        assert_eq!(node.control().await, (other, b"hello".to_vec()));
    }
}
