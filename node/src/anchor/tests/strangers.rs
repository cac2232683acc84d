//! Messages that no correct anchor sends.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use shoal_formats::anchor::encoding::{Ballot, Item, Mark};
use shoal_formats::anchor::rpc::{BODY, Request};
use shoal_formats::anchor::types::{Entry, log_id};
use shoal_protocol::wire;

use super::*;

fn asked(body: Vec<u8>) -> AnchorMessage {
    AnchorMessage { number: 1, answer: false, history: None, body }
}

fn ballot(term: u64, candidate: PeerId, elected: bool) -> Ballot {
    Ballot { term, candidate: Some(candidate), elected }
}

fn opening(term: u64, index: u64) -> Item {
    let payload = openraft::EntryPayload::Blank;
    Item::from(&Entry { log_id: log_id(term, index), payload })
}

/// Requests that decode but are invalid in the given current term.
fn impossible(term: u64) -> Vec<Request> {
    let mark = |index| Mark::from(log_id(term, index));
    let append = |ballot, items| Request::Append { ballot, previous: None, agreed: None, items };
    let piece = |offset, bytes, done| Request::Snapshot {
        ballot: ballot(term + 1, peer(9), true),
        last: mark(9),
        offset,
        bytes,
        done,
    };
    vec![
        append(ballot(term + 1, peer(2), true), Vec::new()),
        append(ballot(term + 1, peer(9), false), Vec::new()),
        append(ballot(term, peer(9), true), Vec::new()),
        append(ballot(u64::MAX, peer(9), true), Vec::new()),
        append(ballot(term + 1, peer(9), true), vec![opening(term + 2, 0)]),
        append(ballot(term + 1, peer(9), true), vec![opening(term, 5)]),
        Request::Vote { ballot: ballot(term + 1, peer(9), true), last: None },
        Request::Vote { ballot: ballot(0, peer(9), false), last: Some(mark(0)) },
        piece(u64::MAX, vec![1], false),
        piece(1 << 40, vec![1], true),
        piece(0, b"no snapshot".to_vec(), true),
        Request::WouldVote { last: Some(Mark::from(log_id(u64::MAX, 0))) },
    ]
}

#[tokio::test]
async fn invalid_requests_are_dropped_and_change_nothing() {
    let mut group = Group::new(3).await;
    let term = group.node(peer(1)).leads().await;
    let mut random = ChaCha8Rng::seed_from_u64(1);
    for to in group.peers() {
        for request in impossible(term.0) {
            let body = wire::encode(&request).expect("small");
            let node = &group.nodes[&to].anchor;
            // Waits for room in the queue, so that every request is handled.
            until("there is room", || node.requests.capacity() > 0).await;
            let _ = node.heard(peer(9), asked(body.clone()));
            let cut = random.next_u32() as usize % body.len();
            until("there is room", || node.requests.capacity() > 0).await;
            let _ = node.heard(peer(9), asked(body[..cut].to_vec()));
            let _ =
                node.heard(peer(9), AnchorMessage { number: 1, answer: true, history: None, body });
        }
        for length in [0, 1, 7, 300, BODY, BODY + 1, 4 * BODY] {
            let mut body = vec![0; length];
            random.fill_bytes(&mut body);
            let node = &group.nodes[&to].anchor;
            until("there is room", || node.requests.capacity() > 0).await;
            let _ = node.heard(peer(9), asked(body.clone()));
            let _ = node.heard(
                peer(2),
                AnchorMessage { number: random.next_u64(), answer: true, history: None, body },
            );
        }
    }
    for (number, _) in (1..).zip(0..20) {
        group.node(peer(1)).append(record(number, number)).await;
    }
    let history = group.agreed(20).await;
    assert_eq!(history.lives.len(), 20);
    for node in group.nodes.values() {
        let reported = node.reported.borrow();
        assert!(reported.failed.is_none() && reported.deposed == 0);
    }
    assert_eq!(group.node(peer(1)).term_led(), Some(term));
}

#[tokio::test]
async fn a_flood_of_requests_is_dropped_at_a_full_queue() {
    let mut group = Group::new(3).await;
    let ask = wire::encode(&Request::WouldVote { last: None }).expect("small");
    for _ in 0..10_000 {
        let _ = group.node(peer(2)).anchor.heard(peer(9), asked(ask.clone()));
    }
    group.node(peer(1)).append(record(1, 1)).await;
    group.agreed(1).await;
}
