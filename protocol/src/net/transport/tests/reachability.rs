//! Tests of reachability probes.

use std::collections::BTreeSet;
use std::net::UdpSocket;

use super::super::reachability::wire::{Answer, Nonce, Probe, Request};
use super::super::request::Kind;
use super::*;

#[tokio::test]
async fn a_peer_receives_probes_at_its_port() {
    let (left, right) = pair().await;
    for (asks, probes) in [(&left, &right), (&right, &left)] {
        let own = asks.addresses()[0];
        let probe_report =
            soon(asks.transport.request_probe(probes.id(), None)).await.expect("it probes");
        let heard = BTreeSet::from([own.port()]);
        let (port, from) = (own.port(), own.ip());
        assert_eq!(probe_report, ProbeReport { by: probes.id(), from, port, seen: own, heard });
    }
}

#[tokio::test]
async fn no_probe_arrives_at_a_port_that_is_not_forwarded() {
    let (left, right) = pair().await;
    let other = UdpSocket::bind(loopback()).expect("a free port");
    let port = other.local_addr().expect("bound").port();
    let probe_report =
        soon(left.transport.request_probe(right.id(), Some(port))).await.expect("it probes");
    // It probes this port, and the one at which it sees the requester.
    let own = left.addresses()[0].port();
    assert_eq!((probe_report.port, probe_report.heard), (port, BTreeSet::from([own])));
    let mut bytes = [0; 100];
    let (length, from) = other.recv_from(&mut bytes).expect("a probe arrived");
    let probe = Probe::decode(&bytes[..length]).expect("a valid probe");
    assert_eq!(probe.port, port);
    let known = [left.addresses()[0], right.addresses()[0]];
    assert!(!known.contains(&from), "from a socket of its own");
}

#[tokio::test]
async fn frequent_probe_requests_are_refused() {
    let (left, right) = pair().await;
    let mut answers = Vec::new();
    for _ in 0..20 {
        answers.push(soon(left.transport.request_probe(right.id(), None)).await.map(drop));
    }
    assert!(answers[..8].iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(answers[19], Err(ProbeError::Busy));
    let nobody = Identity::ephemeral().peer_id();
    let asked = soon(left.transport.request_probe(nobody, None)).await;
    assert_eq!(asked, Err(ProbeError::NotConnected));
}

#[tokio::test]
async fn unrequested_probes_are_ignored() {
    let (mut left, right) = pair().await;
    let stranger = UdpSocket::bind(loopback()).expect("a free port");
    let port = left.addresses()[0].port();
    let probe = Probe { nonce: Nonce([7; 16]), port }.encode();
    for bytes in [&probe[..], &probe[..4], &[probe, probe].concat(), b""] {
        stranger.send_to(bytes, left.addresses()[0]).expect("it is sent");
    }
    right.transport.send_control(left.id(), b"there".to_vec()).expect("queued");
    assert_eq!(left.control().await, (right.member, b"there".to_vec()));
    let probe_report =
        soon(left.transport.request_probe(right.id(), None)).await.expect("it probes");
    assert_eq!(probe_report.heard, BTreeSet::from([port]));
}

#[tokio::test]
async fn malformed_requests_get_no_answer() {
    let mut node = Node::new();
    let raw = Raw::greeted(&mut node).await;
    let ask = async |bytes: Vec<u8>| {
        let (mut send, mut recv) = soon(raw.connection.open_bi()).await.expect("open");
        send.write_all(&bytes).await.expect("open");
        send.finish().expect("open");
        soon(recv.read_to_end(1000)).await
    };
    let good = Kind::Probe.encode(&Request { nonce: Nonce([1; 16]), port: 7410 }.encode());
    let answer = ask(good.clone()).await.expect("an answer");
    assert!(matches!(Answer::decode(&answer), Some(Answer::Probes { .. })), "{answer:?}");
    let mut padded = good.clone();
    *padded.last_mut().expect("it is long") = 1;
    let mut unknown = good.clone();
    unknown[0] = 200;
    for bytes in [padded, unknown, good[..100].to_vec(), Vec::new()] {
        assert_eq!(ask(bytes).await.unwrap_or_default(), b"");
    }
    assert_eq!(raw.connection.close_reason(), None, "the connection stays open");
}
