//! The decoders of statements signed by the issuer, with their checks. See [`crate::decoder`].

use std::collections::BTreeMap;

use super::access_list::AccessList;
use super::certificate::Certificate;
use super::gate::Pass;
use super::signed::{Signed, Statement};
use super::ticket::{Admits, Ticket};
use super::ticket_id::TicketId;
use super::{Term, UnixTime};
use crate::decoder::{Decoder, reads_back};
use crate::ids::{PeerId, RunId};
use crate::net::discovery::PeerAddress;
use crate::net::identity::Identity;
use crate::wire;

/// The decoders of tickets and of credentials that peers present.
pub const DECODERS: &[Decoder] = &[
    Decoder { name: "ticket", examples: tickets, check: check_ticket },
    Decoder { name: "pass", examples: passes, check: check_pass },
];

const NOW: UnixTime = UnixTime(1_800_000_000);

fn issuer() -> Identity {
    Identity::of_seed([1; 32])
}

fn run() -> RunId {
    RunId::of(b"a run")
}

/// A ticket for two peers, with an address of the issuer and one of another peer.
pub(crate) fn ticket() -> Ticket {
    let issuer = issuer();
    let named = format!("/dns4/seed.example.org/tcp/7410/p2p/{}", PeerId([9; 32]));
    let addresses = [
        PeerAddress::new(([192, 0, 2, 7], 4242).into(), issuer.peer_id()),
        named.parse().expect("an address"),
    ];
    let term = Term { issued: NOW, expires: UnixTime(NOW.0 + 86_400) };
    Ticket::new(&issuer, (run(), TicketId(3)), term, Admits { uses: 2, anchor: true }, &addresses)
}

/// A certificate and an access list with every kind of entry.
pub(crate) fn pass() -> Pass {
    let (issuer, peer) = (issuer(), PeerId([8; 32]));
    let mut access_list = AccessList {
        banned: [PeerId([6; 32])].into(),
        revoked: BTreeMap::from([(TicketId(1), UnixTime(NOW.0 + 1))]),
        allowed: [peer].into(),
        ..AccessList::default()
    };
    let access_list = access_list.publish(run(), &issuer, NOW);
    let certificate = Certificate::sign(&issuer, run(), peer, (TicketId(3), false), NOW);
    Pass { certificate: Some(certificate), access_list: Some(access_list) }
}

fn tickets() -> Vec<Vec<u8>> {
    vec![ticket().to_string().into_bytes()]
}

fn check_ticket(bytes: &[u8]) {
    // Checks the text form, and the content without a valid signature, which a fuzzer cannot make.
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(ticket) = text.parse::<Ticket>()
    {
        assert_eq!(ticket.to_string().parse(), Ok(ticket));
    }
    if let Ok((key, signed)) = wire::decode::<(PeerId, Signed)>(bytes) {
        let _ = Ticket::received(key, signed);
    }
}

fn passes() -> Vec<Vec<u8>> {
    vec![
        wire::encode(&pass()).expect("it is small"),
        wire::encode(&Pass::default()).expect("it is small"),
    ]
}

fn check_pass(bytes: &[u8]) {
    reads_back::<Pass>(bytes);
    let Ok(pass) = wire::decode::<Pass>(bytes) else { return };
    let key = issuer().peer_id();
    check_statement::<Certificate>(pass.certificate.as_ref(), key);
    check_statement::<AccessList>(pass.access_list.as_ref(), key);
}

/// Checks that a statement that cannot be decoded is never accepted, whatever its signature.
fn check_statement<T: Statement>(signed: Option<&Signed>, key: PeerId) {
    let Some(signed) = signed else { return };
    let content = signed.peek::<T>();
    assert!(
        content.is_ok() || signed.open::<T>(key).is_err(),
        "an undecodable statement is not accepted"
    );
}
