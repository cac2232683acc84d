//! Peers without a path between them.

use std::net::UdpSocket;

use super::*;

/// Where nobody ever answers, for as long as the socket lives.
fn nowhere() -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind(loopback()).expect("a free port");
    let address = socket.local_addr().expect("bound");
    (socket, address)
}

/// Three members of a run: the last two are connected to the first, and each believes the other where
/// nobody answers.
async fn apart() -> (Node, Node, Node, UdpSocket) {
    let (mut middle, mut left, mut right) = (Node::new(), Node::new(), Node::new());
    for end in [&mut left, &mut right] {
        end.connect(&middle).await.expect("they reach each other");
        assert_eq!(end.connected().await, middle.member);
        assert_eq!(middle.connected().await, end.member);
    }
    for node in [&middle, &left, &right] {
        node.transport.set_members([middle.id(), left.id(), right.id()]);
    }
    let (socket, silent) = nowhere();
    left.transport.remember(right.id(), &[silent]);
    right.transport.remember(left.id(), &[silent]);
    (middle, left, right, socket)
}

/// The peer's address as the event of its connection has it.
async fn connected_at(node: &mut Node) -> Option<SocketAddr> {
    match node.event().await {
        TransportEvent::Connected { address, .. } => address,
        other => panic!("not connected: {other:?}"),
    }
}

/// The same three, once the last two have reached each other through the first.
async fn joined() -> (Node, Node, Node, UdpSocket) {
    let (middle, mut left, mut right, socket) = apart().await;
    left.transport.send_control(right.id(), b"there".to_vec()).expect("queued");
    assert_eq!(connected_at(&mut left).await, None);
    assert_eq!(connected_at(&mut right).await, None);
    assert_eq!(right.control().await, (left.member, b"there".to_vec()));
    (middle, left, right, socket)
}

#[tokio::test]
async fn who_cannot_reach_a_peer_reaches_it_through_another() {
    let (middle, mut left, right, _socket) = joined().await;
    let frames = vec![frame(7, 3 << 20)];
    right.send_tensor(left.id(), b"back", frames.clone()).await;
    let message = left.tensor().await;
    assert_eq!((message.member, message.frames), (right.member, frames));
    assert!(middle.transport.traffic().relay.sent.0 > 3 << 20);
    assert_eq!(middle.transport.traffic().tensor, Flow::default(), "it can read nothing");
}

#[tokio::test]
async fn a_direct_way_takes_the_place_of_one_through_another() {
    let (middle, mut left, mut right, _socket) = joined().await;
    left.transport.remember(right.id(), &right.addresses());
    let (one, other) = (left.member, right.member);
    for (node, other) in [(&mut left, other), (&mut right, one)] {
        assert_eq!(node.disconnected().await, (other, DisconnectReason::Replaced));
        connected_at(node).await.expect("a direct way");
    }
    let relayed = middle.transport.traffic().relay;
    left.send_tensor(right.id(), b"two", vec![frame(1, 1 << 20)]).await;
    assert_eq!(right.tensor().await.tag, b"two");
    let more = middle.transport.traffic().relay.sent - relayed.sent;
    assert!(more.0 < 1 << 16, "nothing but farewells: {more}");
}

#[tokio::test]
async fn nothing_is_passed_on_for_who_is_no_member() {
    let (middle, _left, right, _socket) = apart().await;
    let outsider = Node::new();
    outsider.transport.set_members([middle.id(), right.id(), outsider.id()]);
    outsider.connect(&middle).await.expect("they reach each other");
    let (_silence, silent) = nowhere();
    let failed = soon(outsider.transport.connect(right.id(), &[silent])).await;
    failed.expect_err("nobody passes it on");
}

#[tokio::test]
async fn without_the_one_in_the_middle_the_way_ends() {
    let (middle, mut left, right, _socket) = joined().await;
    middle.transport.close().await;
    let mut lost = vec![left.disconnected().await.0, left.disconnected().await.0];
    lost.sort();
    let mut expected = vec![middle.member, right.member];
    expected.sort();
    assert_eq!(lost, expected);
}

#[tokio::test]
async fn a_dial_that_leads_straight_there_wins_over_one_through_another() {
    let (_middle, left, right, _socket) = apart().await;
    // Who would be preferred, of two dials that cross, is the one that knows no direct way.
    let (mut blind, mut seeing) =
        if left.id() < right.id() { (left, right) } else { (right, left) };
    seeing.transport.remember(blind.id(), &blind.addresses());
    for (node, to) in [(&blind, seeing.id()), (&seeing, blind.id())] {
        node.transport.send_control(to, b"hello".to_vec()).expect("queued");
    }
    let (one, other) = (blind.member, seeing.member);
    for (node, other) in [(&mut blind, other), (&mut seeing, one)] {
        connected_at(node).await.expect("a direct way, and no other before it");
        assert_eq!(node.control().await, (other, b"hello".to_vec()));
    }
}
