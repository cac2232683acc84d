//! What peers that are no members may occupy.

use std::time::Instant;

use super::*;
use crate::net::transport::endpoint::GUEST_WINDOW;
use crate::net::transport::guests::NoPlace;

/// Sends unfinished messages; returns their bytes that are accepted. The streams stay open.
async fn accepted(raw: &Raw, message: &[u8], streams: usize, open: &mut Vec<SendStream>) -> usize {
    let mut sent = 0;
    for number in 0..streams {
        let Ok(Ok(mut stream)) = timeout(QUIET, raw.connection.open_uni()).await else { break };
        let mut bytes = message.to_vec();
        bytes[8..16].copy_from_slice(&(number as u64).to_le_bytes());
        // All but the last byte, for ever.
        let mut rest = &bytes[..bytes.len() - 1];
        while !rest.is_empty() {
            let Ok(Ok(written)) = timeout(QUIET, stream.write(rest)).await else { break };
            sent += written;
            rest = &rest[written..];
        }
        open.push(stream);
    }
    sent
}

/// Long enough for anything that is still accepted to be accepted.
const QUIET: Duration = Duration::from_millis(500);

fn unfinished(bytes: usize) -> Vec<u8> {
    let frame = frame(1, bytes);
    let mut message = vec![1, 0, 1, 0];
    message.extend(0_u32.to_le_bytes());
    message.extend(0_u64.to_le_bytes());
    message.push(7);
    message.extend(frame.header().encode());
    message.extend(frame.body());
    message
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_tensors_of_strangers_take_a_megabyte_in_all() {
    let mut target = Node::new();
    let message = unfinished(700 << 10);
    let (mut sent, mut strangers, mut open) = (0, Vec::new(), Vec::new());
    for _ in 0..4 {
        let raw = Raw::greeted(&mut target).await;
        sent += accepted(&raw, &message, 8, &mut open).await;
        strangers.push(raw);
    }
    // The room, and the window of each connection.
    let most = limits::GUEST_ROOM.0 as usize + 4 * GUEST_WINDOW as usize;
    assert!(sent <= most, "{sent} bytes of strangers, where {most} have room");
    // A message that has no room at all is lost, and harms nobody.
    let large = unfinished(2 << 20);
    accepted(&strangers[3], &large, 4, &mut open).await;

    let (mut left, right) = (Node::new(), target);
    left.transport.set_members([right.id()]);
    right.transport.set_members([left.id()]);
    left.connect(&right).await.expect("there is a place for members");
    left.connected().await;
    let frames = vec![frame(3, 8 << 20)];
    let mut right = right;
    left.send_tensor(right.id(), b"there", frames.clone()).await;
    let received = loop {
        match right.event().await {
            TransportEvent::Tensor(message) => break message,
            TransportEvent::Connected { .. } | TransportEvent::Disconnected { .. } => {}
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((received.member, received.frames.len()), (left.member, frames.len()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_oldest_guest_of_a_network_gives_way_and_members_stay() {
    let mut target = Node::new();
    let member = Raw::greeted(&mut target).await;
    let member_id = member.identity.peer_id();
    target.transport.set_members([member_id]);
    let oldest = Raw::greeted(&mut target).await;
    let shared = &target.transport.shared;
    let (is_member, later) = (|peer| peer == member_id, Instant::now());
    let enter = |number: u32, at| {
        let mut id = [0; 32];
        id[..4].copy_from_slice(&number.to_be_bytes());
        shared.guests.enter(PeerId(id), &member.connection, at, is_member)
    };
    // This network is full of guests, one of which was here first.
    assert!((1..128).all(|number| enter(number, later).is_ok()));
    assert_eq!(enter(200, later), Err(NoPlace));
    assert_eq!(enter(200, later + Duration::from_secs(6)), Ok(()));
    assert_eq!(oldest.closed().await.0, link::CloseCode::Done.into());
    assert!(member.connection.close_reason().is_none());
}
