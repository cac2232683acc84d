use super::*;

#[tokio::test]
async fn peers_greet_and_exchange_messages_both_ways() {
    let mut host_config = config(7);
    host_config.run = Some(run(1));
    let mut host = Node::with(&Identity::ephemeral(), loopback(), host_config);
    let mut guest = Node::new();
    host.transport.set_members([guest.id()]);
    guest.transport.set_members([host.id()]);

    let welcome = guest.connect(&host).await.expect("reached");
    assert_eq!(welcome.incarnation, Incarnation(7));
    assert_eq!(welcome.run, Some(run(1)));
    assert_eq!([welcome.address], host.addresses()[..]);
    match guest.event().await {
        TransportEvent::Connected { member, run: theirs, .. } => {
            assert_eq!((member, theirs), (host.member, Some(run(1).id)));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(host.connected().await, guest.member);

    for count in 0u32..100 {
        let message = count.to_le_bytes().repeat(count as usize);
        guest.transport.send_control(host.id(), message.clone()).expect("queued");
        host.transport.send_control(guest.id(), message).expect("queued");
    }
    for count in 0u32..100 {
        let message = count.to_le_bytes().repeat(count as usize);
        assert_eq!(host.control().await, (guest.member, message.clone()));
        assert_eq!(guest.control().await, (host.member, message));
    }

    let frames = vec![frame(1, 3 << 20), frame(2, 0), frame(3, 5)];
    guest.send_tensor(host.id(), b"there", frames.clone()).await;
    host.send_tensor(guest.id(), b"", vec![frames[0].clone()]).await;
    let there = host.tensor().await;
    assert_eq!(
        (there.member, &there.tag[..], &there.frames),
        (guest.member, &b"there"[..], &frames)
    );
    let back = guest.tensor().await;
    assert_eq!((back.member, back.tag.len(), &back.frames[..]), (host.member, 0, &frames[..1]));
}

#[tokio::test]
async fn the_rate_to_a_peer_is_known_after_enough_bytes() {
    let (left, mut right) = pair().await;
    assert_eq!(left.transport.rate_to(right.id()), None);
    left.send_tensor(right.id(), b"much", vec![frame(1, 8 << 20)]).await;
    right.tensor().await;
    // Closing waits until the last message has arrived.
    soon(left.transport.close()).await;
    let rate = left.transport.rate_to(right.id()).expect("measured");
    assert!(rate > 1e6, "{rate} bytes per second on loopback");
    assert_eq!(right.transport.rate_to(left.id()), None);
}

#[tokio::test]
async fn a_peer_on_this_machine_has_no_link_rate() {
    let (left, mut right) = pair().await;
    // The arrival of a message is known one round trip later.
    while left.transport.rate_to(right.id()).is_none() {
        left.send_tensor(right.id(), b"more", vec![frame(1, 1 << 20)]).await;
        right.tensor().await;
    }
    assert_eq!(left.transport.link_rate_to(right.id()), None);
}

#[tokio::test]
async fn packets_are_counted_once_over_all_connections() {
    let (left, mut right) = pair().await;
    assert_eq!(left.transport.traffic().packets, Packets::default(), "no path was read");
    left.send_tensor(right.id(), b"much", vec![frame(1, 1 << 20)]).await;
    right.tensor().await;
    let paths = left.transport.paths();
    assert_eq!(paths.len(), 1);
    assert!(paths[0].round_trip > Duration::ZERO && paths[0].window.0 > 0, "{paths:?}");
    let first = left.transport.traffic().packets;
    assert_eq!(first, paths[0].packets);
    // 1 MiB does not fit into fewer packets.
    assert!(first.sent > 16 && first.lost <= first.sent, "{first:?}");
    let path = left.transport.path_to(right.id()).expect("connected");
    assert_eq!(left.transport.traffic().packets, path.packets, "read twice, counted once");

    right.transport.reject(left.id(), "begin anew");
    right.disconnected().await;
    left.send_tensor(right.id(), b"more", vec![frame(1, 5)]).await;
    right.connected().await;
    right.tensor().await;
    let paths = left.transport.paths();
    assert_eq!(paths.len(), 1);
    let both = left.transport.traffic().packets;
    assert!(both.sent >= path.packets.sent + paths[0].packets.sent, "{both:?} {paths:?}");
}

#[tokio::test]
async fn sent_and_received_bytes_agree_by_kind() {
    let (left, mut right) = pair().await;
    let before = (left.transport.traffic(), right.transport.traffic());
    assert_eq!(before.0.control.sent, before.1.control.received);
    left.transport.send_control(right.id(), vec![0; 10]).expect("queued");
    right.control().await;
    left.send_tensor(right.id(), b"tag", vec![frame(1, 1000)]).await;
    right.tensor().await;
    let after = right.transport.traffic();
    assert_eq!((after.control.received - before.1.control.received).0, 4 + 10);
    assert_eq!(after.tensor.received.0, (tensor::PREFIX + 3 + crate::frame::HEADER + 1000) as u64);
    assert_eq!(after.tensor.sent.0, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_messages_are_reassembled_from_their_parts() {
    let (left, mut right) = pair().await;
    let mixed = |bytes: usize, seed: usize| {
        let raw: Vec<u8> = (0..bytes).map(|at| ((at * at + seed) >> 7) as u8).collect();
        Frame::pack(Element::U8, &[bytes as u32], raw.into(), Packing::Raw).expect("agrees")
    };
    let part = tensor::PART;
    let messages = [
        vec![mixed(part, 0)],
        vec![mixed(part + 1, 1)],
        vec![mixed(part - 1, 2), mixed(2, 3), mixed(0, 4), mixed(3 * part, 5)],
        // More parts than streams.
        vec![mixed(45 * (part / 2) + 17, 6), mixed(5, 7)],
        vec![mixed(0, 8)],
    ];
    for (number, frames) in messages.iter().enumerate() {
        left.send_tensor(right.id(), &[number as u8], frames.clone()).await;
    }
    for _ in &messages {
        let message = right.tensor().await;
        assert!(message.frames == messages[usize::from(message.tag[0])], "{:?}", message.tag);
    }
    while left.transport.queued(right.id()).0 > 0 {
        tokio::task::yield_now().await;
    }
    let (sent, received) = (left.transport.traffic().tensor, right.transport.traffic().tensor);
    assert_eq!(sent.sent, received.received);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_crossing_dials_one_connection_survives() {
    for _ in 0..8 {
        let (mut left, mut right) = (Node::new(), Node::new());
        let (there, back) = tokio::join!(left.connect(&right), right.connect(&left));
        there.expect("reached");
        back.expect("reached");
        left.transport.send_control(right.id(), b"there".to_vec()).expect("queued");
        right.transport.send_control(left.id(), b"back".to_vec()).expect("queued");
        assert_eq!(left.connected().await, right.member);
        assert_eq!(left.control().await, (right.member, b"back".to_vec()));
        assert_eq!(right.connected().await, left.member);
        assert_eq!(right.control().await, (left.member, b"there".to_vec()));
        tokio::join!(left.transport.close(), right.transport.close());
        // There is only one connection, so each end sees only one disconnect.
        assert!(matches!(left.event().await, TransportEvent::Disconnected { .. }));
        assert!(matches!(right.event().await, TransportEvent::Disconnected { .. }));
        assert!(left.events.try_recv().is_err());
        assert!(right.events.try_recv().is_err());
    }
}

#[tokio::test]
async fn closing_delivers_queued_messages() {
    let (left, mut right) = pair().await;
    left.send_tensor(right.id(), b"last", vec![frame(1, 4 << 20)]).await;
    // More than fits into flight at once.
    let size = limits::CONTROL_MESSAGE.0 as usize;
    for count in 0..50u8 {
        left.transport.send_control(right.id(), vec![count; size]).expect("queued");
    }
    let closing = left.transport.close();
    let mut controls = Vec::new();
    let mut tensors = 0;
    let receiving = async {
        loop {
            match right.event().await {
                TransportEvent::Control { bytes, .. } => controls.push(bytes[size - 1]),
                TransportEvent::Tensor(message) => tensors += message.frames.len(),
                TransportEvent::Disconnected { reason, .. } => break reason,
                other => panic!("{other:?}"),
            }
        }
    };
    let (reason, ()) = soon(async { tokio::join!(receiving, closing) }).await;
    assert_eq!(controls, (0..50).collect::<Vec<u8>>());
    assert_eq!((tensors, reason), (1, DisconnectReason::Left));
    let after = left.transport.send_control(right.id(), vec![0]);
    assert_eq!(after, Err(SendError::Closing));
}

#[tokio::test]
async fn messages_over_a_limit_are_not_sent() {
    let node = Node::new();
    let other = Identity::ephemeral().peer_id();
    let size = limits::CONTROL_MESSAGE.0 as usize + 1;
    assert!(matches!(
        node.transport.send_control(other, vec![0; size]),
        Err(SendError::TooLarge { size: found, .. }) if found == size
    ));
    let tag = vec![0; tensor::TAG + 1];
    let sent = node.transport.send_tensor(other, tag, vec![frame(0, 1)], Class::Chunk);
    assert!(matches!(sent.err(), Some(SendError::TooLarge { .. })));
    for count in [0, tensor::FRAMES + 1] {
        let frames = vec![frame(0, 1); count];
        let sent = node.transport.send_tensor(other, Vec::new(), frames, Class::Chunk);
        assert_eq!(sent.err(), Some(SendError::FrameCount { count }));
    }
    let frames = vec![frame(0, limits::TENSOR_MESSAGE.0 as usize + 1)];
    let sent = node.transport.send_tensor(other, Vec::new(), frames, Class::Chunk);
    assert!(matches!(sent.err(), Some(SendError::TooLarge { .. })));
    assert_eq!(node.transport.send_control(node.id(), Vec::new()), Err(SendError::OwnAddress));
}
