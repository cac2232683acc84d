//! Tests of admission over real connections.

use super::*;
use crate::manifest::{Admission, AdmissionMode};
use crate::net::admission::{
    AccessList, Admits, CERTIFICATE_LIFETIME, Certificate, Denied, Reason, RedemptionLog, Rules,
    Signed, Term, Ticket, TicketDesk, TicketId, UnixTime,
};
use crate::net::discovery::PeerAddress;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// An invite-only run: its issuer, and the issuer's node.
struct Invited {
    issuer: Identity,
    node: Node,
    _folder: tempfile::TempDir,
}

impl Invited {
    fn new() -> Self {
        let (issuer, folder) = (Identity::ephemeral(), tempfile::tempdir().expect("a folder"));
        let node = member_of(&issuer, &issuer, None);
        let log = RedemptionLog::open(&folder.path().join("claims")).expect("a redemption log");
        let desk = TicketDesk::new(issuer.clone(), run(1).id, log);
        node.transport.gate().open_desk(Arc::new(desk));
        Self { issuer, node, _folder: folder }
    }

    fn ticket(&self, id: u32, uses: u16) -> Ticket {
        let address = PeerAddress::new(self.node.addresses()[0], self.issuer.peer_id());
        let term = Term::of(UnixTime::now(), DAY);
        Ticket::new(
            &self.issuer,
            (run(1).id, TicketId(id)),
            term,
            Admits { uses, anchor: false },
            &[address],
        )
    }

    fn certificate(&self, peer: PeerId) -> Signed {
        Certificate::sign(&self.issuer, run(1).id, peer, (TicketId(1), false), UnixTime::now())
    }

    /// Another peer of the run.
    fn member(&self) -> Node {
        let identity = Identity::ephemeral();
        let certificate = self.certificate(identity.peer_id());
        member_of(&self.issuer, &identity, Some(certificate))
    }

    fn ban(&self, peer: PeerId) {
        let gate = self.node.transport.gate();
        let (mut access_list, _): (AccessList, _) = gate.access_list();
        access_list.ban(peer).expect("room");
        let signed = access_list.publish(run(1).id, &self.issuer, UnixTime::now());
        gate.learn(&signed).expect("the issuer signed it");
    }
}

fn member_of(issuer: &Identity, identity: &Identity, certificate: Option<Signed>) -> Node {
    let mut config = config(1);
    config.run = Some(run(1));
    let admission = Admission { mode: AdmissionMode::Invite, key: Some(issuer.peer_id()) };
    config.gate.enter(Rules { run: run(1).id, admission });
    if let Some(certificate) = certificate {
        config.gate.hold(certificate);
    }
    Node::with(identity, loopback(), config)
}

fn denied(error: Option<ConnectError>) -> Denied {
    match error {
        Some(ConnectError::Refused(Refusal::Denied(denied))) => denied,
        other => panic!("not denied: {other:?}"),
    }
}

#[tokio::test]
async fn a_ticket_becomes_a_certificate_that_other_peers_accept() {
    let run = Invited::new();
    let newcomer = Node::new();
    let without = newcomer.connect(&run.node).await.err();
    assert!(matches!(denied(without), Denied::Needed { .. }));
    newcomer.transport.gate().invite(run.ticket(2, 1));
    let welcome = newcomer.connect(&run.node).await.expect("it is invited");
    assert!(welcome.certificate.is_some() && welcome.seen.is_some());
    // At other peers only the certificate counts, and the ticket is not presented.
    let member = run.member();
    newcomer.connect(&member).await.expect("it has a certificate");
    let second = Node::new();
    second.transport.gate().invite(run.ticket(2, 1));
    assert!(matches!(denied(second.connect(&member).await.err()), Denied::Needed { .. }));
    let used_up = Denied::UsedUp { ticket: TicketId(2), uses: 1 };
    assert_eq!(denied(second.connect(&run.node).await.err()), used_up);
    let refused = run.node.transport.gate().refusals();
    assert_eq!((refused[&Reason::NoCertificate], refused[&Reason::UsedUp]), (1, 1));
}

#[tokio::test]
async fn a_stolen_certificate_and_a_replayed_hello_are_refused() {
    let run = Invited::new();
    let (member, thief) = (run.member(), Node::new());
    thief.transport.gate().hold(run.certificate(member.id()));
    let stolen = Denied::OtherPeer { bound: member.id() };
    assert_eq!(denied(thief.connect(&run.node).await.err()), stolen);
    // The credentials of the member, from a peer with another key.
    let mut raw = Raw::dial(Identity::ephemeral(), &run.node).await;
    let hello = Hello {
        incarnation: Incarnation(1),
        run: None,
        number: 0,
        lost: None,
        pass: member.transport.gate().pass(),
        ticket: None,
    };
    let reply = soon(handshake::greet(&hello, &mut raw.send, &mut raw.recv)).await;
    let (reply, ..) = reply.expect("an answer");
    assert_eq!(reply, Reply::Refused(Refusal::Denied(stolen)));
}

#[tokio::test]
async fn an_expired_certificate_is_refused() {
    let run = Invited::new();
    let identity = Identity::ephemeral();
    let long_ago = UnixTime(UnixTime::now().0 - CERTIFICATE_LIFETIME.as_secs() - DAY.as_secs());
    let id = run.node.transport.shared.local.run().expect("it has one").id;
    let old =
        Certificate::sign(&run.issuer, id, identity.peer_id(), (TicketId(1), false), long_ago);
    let late = member_of(&run.issuer, &identity, Some(old));
    assert!(matches!(denied(late.connect(&run.node).await.err()), Denied::Expired { .. }));
}

#[tokio::test]
async fn the_answering_peer_must_be_admitted_too() {
    let run = Invited::new();
    let member = run.member();
    // The stranger claims to take part, but has no certificate.
    let stranger = Node::new();
    let error = member.connect(&stranger).await.expect_err("it has no certificate");
    assert!(matches!(error, ConnectError::UnknownPeer { .. }), "{error}");
    assert!(error.is_final());
    assert_eq!(member.transport.gate().refusals()[&Reason::NoCertificate], 1);
}

#[tokio::test]
async fn a_ban_ends_connections_and_spreads_through_any_peer() {
    let mut run = Invited::new();
    let (mut victim, mut witness) = (run.member(), run.member());
    victim.connect(&run.node).await.expect("it has a certificate");
    run.node.connected().await;
    victim.connected().await;
    run.ban(victim.id());
    let (member, reason) = victim.disconnected().await;
    assert_eq!(member.peer, run.node.id());
    assert!(matches!(&reason, DisconnectReason::ClosedByPeer(why) if why.contains("banned")));
    assert_eq!(run.node.disconnected().await.0.peer, victim.id());
    assert_eq!(denied(victim.connect(&run.node).await.err()), Denied::Banned);
    // The witness receives the list with the next greeting, and refuses the victim too.
    victim.connect(&witness).await.expect("the witness has the old list");
    witness.connected().await;
    witness.connect(&run.node).await.expect("it has a certificate");
    loop {
        // The connection to the issuer and the end of the other one come in either order.
        if let TransportEvent::Disconnected { member, .. } = witness.event().await {
            assert_eq!(member.peer, victim.id());
            break;
        }
    }
    victim.connected().await;
    victim.disconnected().await;
    assert_eq!(denied(victim.connect(&witness).await.err()), Denied::Banned);
}

#[tokio::test]
async fn silent_connections_do_not_keep_others_out() {
    let run = Invited::new();
    let member = run.member();
    // All connections are from one host, with proved identities, then silent; far more than the
    // limit.
    let identity = Identity::ephemeral();
    let tls = tls::Tls::new(&identity).expect("a certificate");
    let quic = Arc::new(endpoint::quic(Congestion::Cubic));
    let (endpoint, _) =
        endpoint::bind(loopback(), &identity, &tls, &quic, &Arc::default()).expect("a free port");
    let dial = |_| {
        let (client, _) = tls.client(run.node.id());
        let address = run.node.addresses()[0];
        endpoint.connect_with(ClientConfig::new(client), address, "any").expect("well configured")
    };
    let dialled = soon(futures::future::join_all((0..300).map(dial))).await;
    let silent: Vec<Connection> = dialled.into_iter().flatten().collect();
    let open = silent.iter().filter(|connection| connection.close_reason().is_none()).count();
    assert!(open < 100, "{open} are still open");
    // A member connects as soon as the first silent connections have exceeded their time.
    let mut backoff = dial::Backoff::new(b"a test");
    while member.connect(&run.node).await.is_err() {
        let pause = backoff.next().expect("it connects before the backoff ends");
        tokio::time::sleep(pause).await;
    }
    // Each that was closed, was refused: at once, or for its silence.
    let counts = run.node.transport.gate().refusals();
    let of = |reason| counts.get(&reason).copied().unwrap_or_default();
    let closed = (silent.len() - open) as u64;
    assert!(of(Reason::Flood) + of(Reason::Slow) >= closed, "{closed} closed: {counts:?}");
}

#[tokio::test]
async fn a_hello_sent_byte_by_byte_times_out() {
    let run = Invited::new();
    let mut raw = Raw::dial(Identity::ephemeral(), &run.node).await;
    let began = std::time::Instant::now();
    let hello = 200u32.to_le_bytes();
    let slow_bytes = async {
        for byte in hello.iter().chain(std::iter::repeat(&0)) {
            if raw.send.write_all(&[*byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    soon(slow_bytes).await;
    assert!(began.elapsed() < 2 * limits::HANDSHAKE_TIMEOUT);
    assert_eq!(run.node.transport.gate().refusals()[&Reason::Slow], 1);
}
