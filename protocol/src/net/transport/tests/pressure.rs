use std::sync::atomic::{AtomicUsize, Ordering};

use tokio_util::task::TaskTracker;

use super::*;

const FRAME: usize = 4 << 20;
const MESSAGES: usize = 100;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_owner_makes_the_sender_wait() {
    let (left, mut right) = pair().await;
    let target = right.id();
    let accepted = Arc::new(AtomicUsize::new(0));
    let (started, start) = tokio::sync::oneshot::channel();
    let count = accepted.clone();
    let sender = TaskTracker::new().spawn(async move {
        let mut started = Some(started);
        for number in 0..MESSAGES {
            left.send_tensor(target, &[number as u8], vec![frame(1, FRAME)]).await;
            count.fetch_add(FRAME, Ordering::SeqCst);
            // By now the queue has been full, and the link has removed messages from it.
            if number * FRAME > limits::SEND_QUEUE.0 as usize
                && let Some(started) = started.take()
            {
                started.send(()).expect("the test waits");
            }
        }
        left
    });
    soon(start).await.expect("the sender lives");
    // The sender's queue, the receiver's room, and the bytes in flight on streams.
    let streams = 64 << 20;
    let bound = (limits::SEND_QUEUE.0 + limits::RECEIVE_ROOM.0) as usize + streams + FRAME;
    let mut consumed = 0;
    let mut numbers = Vec::new();
    while numbers.len() < MESSAGES {
        let ahead = accepted.load(Ordering::SeqCst) - consumed;
        assert!(ahead <= bound, "{ahead} bytes accepted and not consumed");
        let message = right.tensor().await;
        consumed += FRAME;
        numbers.push(message.tag[0]);
    }
    numbers.sort_unstable();
    assert_eq!(numbers, (0..MESSAGES as u8).collect::<Vec<_>>());
    soon(sender).await.expect("all was sent");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_receives_no_control_messages_is_disconnected() {
    let (mut left, mut right) = pair().await;
    let message = vec![0; limits::CONTROL_MESSAGE.0 as usize];
    let error = soon(async {
        loop {
            if let Err(error) = left.transport.send_control(right.id(), message.clone()) {
                break error;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(error, SendError::QueueFull { peer: right.id() });
    assert_eq!(left.disconnected().await, (right.member, DisconnectReason::QueueFull));
    assert_eq!(left.transport.queued(right.id()), (0, 0));
    // These messages were sent before the end.
    let reason = loop {
        match right.event().await {
            TransportEvent::Control { .. } => {}
            TransportEvent::Disconnected { reason, .. } => break reason,
            other => panic!("{other:?}"),
        }
    };
    // A full socket may lose the frame that closes the connection. If this end is slow, the other has
    // forgotten the connection by then, and answers with a reset.
    let closed = DisconnectReason::ClosedByPeer("too much waited to be sent".to_owned());
    let reset = DisconnectReason::Lost("reset by peer".to_owned());
    assert!([closed, reset].contains(&reason), "{reason:?}");
}
