//! Who is let in, over real connections.

use super::*;
use crate::manifest::{Admission, AdmissionMode};
use crate::net::admission::{
    AccessList, Certificate, Denied, Desk, PERMIT_LIFE, Reason, RedemptionLog, Rules, Signed, Term,
    Ticket, TicketId, UnixTime,
};
use crate::net::discovery::PeerAddress;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A run of invited peers: its warden, and what that signs.
struct Invited {
    issuer: Identity,
    node: Node,
    _folder: tempfile::TempDir,
}

impl Invited {
    fn new() -> Self {
        let (issuer, folder) = (Identity::ephemeral(), tempfile::tempdir().expect("a folder"));
        let node = member_of(&issuer, &issuer, None);
        let book = RedemptionLog::open(&folder.path().join("claims")).expect("a book");
        let desk = Desk::new(issuer.clone(), run(1).id, book);
        node.transport.gate().open_desk(Arc::new(desk));
        Self { issuer, node, _folder: folder }
    }

    fn ticket(&self, id: u32, uses: u16) -> Ticket {
        let address = PeerAddress::new(self.node.addresses()[0], self.issuer.peer_id());
        let term = Term::of(UnixTime::now(), DAY);
        Ticket::new(&self.issuer, (run(1).id, TicketId(id)), term, uses, &[address])
    }

    fn certificate(&self, peer: PeerId) -> Signed {
        Certificate::sign(&self.issuer, run(1).id, peer, TicketId(1), UnixTime::now())
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
        gate.learn(&signed).expect("the warden signed it");
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
async fn a_ticket_becomes_a_permit_that_other_peers_believe() {
    let run = Invited::new();
    let newcomer = Node::new();
    let without = newcomer.connect(&run.node).await.err();
    assert!(matches!(denied(without), Denied::Needed { .. }));
    newcomer.transport.gate().invite(run.ticket(2, 1));
    let welcome = newcomer.connect(&run.node).await.expect("it is invited");
    assert!(welcome.certificate.is_some() && welcome.seen.is_some());
    // Elsewhere the permit alone counts, and the ticket is not shown.
    let member = run.member();
    newcomer.connect(&member).await.expect("it has a permit");
    let second = Node::new();
    second.transport.gate().invite(run.ticket(2, 1));
    assert!(matches!(denied(second.connect(&member).await.err()), Denied::Needed { .. }));
    let used_up = Denied::UsedUp { ticket: TicketId(2), uses: 1 };
    assert_eq!(denied(second.connect(&run.node).await.err()), used_up);
    let refused = run.node.transport.gate().refusals();
    assert_eq!((refused[&Reason::NoCertificate], refused[&Reason::UsedUp]), (1, 1));
}

#[tokio::test]
async fn a_stolen_permit_and_a_replayed_greeting_are_refused() {
    let run = Invited::new();
    let (member, thief) = (run.member(), Node::new());
    thief.transport.gate().hold(run.certificate(member.id()));
    let stolen = Denied::OtherPeer { bound: member.id() };
    assert_eq!(denied(thief.connect(&run.node).await.err()), stolen);
    // The very bytes that the member would send, from somebody who can only sign as himself.
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
async fn a_permit_that_has_expired_is_refused() {
    let run = Invited::new();
    let identity = Identity::ephemeral();
    let long_ago = UnixTime(UnixTime::now().0 - PERMIT_LIFE.as_secs() - DAY.as_secs());
    let id = run.node.transport.shared.run().expect("it has one").id;
    let old = Certificate::sign(&run.issuer, id, identity.peer_id(), TicketId(1), long_ago);
    let late = member_of(&run.issuer, &identity, Some(old));
    assert!(matches!(denied(late.connect(&run.node).await.err()), Denied::Expired { .. }));
}

#[tokio::test]
async fn who_answers_must_be_of_the_run_as_well() {
    let run = Invited::new();
    let member = run.member();
    // It says that it takes part, and has nothing to show.
    let stranger = Node::new();
    let error = member.connect(&stranger).await.expect_err("it is no member");
    assert!(matches!(error, ConnectError::Stranger { .. }), "{error}");
    assert!(error.is_final());
    assert_eq!(member.transport.gate().refusals()[&Reason::NoCertificate], 1);
}

#[tokio::test]
async fn a_ban_ends_the_connection_and_is_believed_from_anybody() {
    let mut run = Invited::new();
    let (mut victim, mut witness) = (run.member(), run.member());
    victim.connect(&run.node).await.expect("it has a permit");
    run.node.connected().await;
    victim.connected().await;
    run.ban(victim.id());
    let (member, reason) = victim.disconnected().await;
    assert_eq!(member.peer, run.node.id());
    assert!(matches!(&reason, DisconnectReason::ClosedByPeer(why) if why.contains("banned")));
    assert_eq!(run.node.disconnected().await.0.peer, victim.id());
    assert_eq!(denied(victim.connect(&run.node).await.err()), Denied::Banned);
    // The witness hears of it with the next greeting, and refuses the victim too.
    victim.connect(&witness).await.expect("it does not know yet");
    witness.connected().await;
    witness.connect(&run.node).await.expect("it has a permit");
    loop {
        // Its connection to the warden and the end of the other come in either order.
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
async fn a_crowd_that_says_nothing_keeps_nobody_out() {
    let run = Invited::new();
    let member = run.member();
    // All of one host, each with its identity proved and then silent, many more than there are places.
    let identity = Identity::ephemeral();
    let tls = tls::Tls::new(&identity).expect("a certificate");
    let quic = Arc::new(endpoint::quic(Congestion::Cubic));
    let endpoint =
        endpoint::bind(loopback(), &identity, &tls, &quic, &Arc::default()).expect("a free port");
    let dial = |_| {
        let (client, _) = tls.client(run.node.id());
        let address = run.node.addresses()[0];
        endpoint.connect_with(ClientConfig::new(client), address, "any").expect("well configured")
    };
    let dialled = soon(futures::future::join_all((0..300).map(dial))).await;
    let silent: Vec<Connection> = dialled.into_iter().flatten().collect();
    let open = silent.iter().filter(|connection| connection.close_reason().is_none()).count();
    assert!(open < 100, "{open} are let wait");
    // Who belongs there gets in as soon as the first of them have had their time.
    let mut backoff = dial::Backoff::new(b"a test");
    while member.connect(&run.node).await.is_err() {
        let pause = backoff.next().expect("long before it would give up");
        tokio::time::sleep(pause).await;
    }
    let counts = run.node.transport.gate().refusals();
    assert!(counts[&Reason::Flood] + counts[&Reason::Slow] > 200, "{counts:?}");
}

#[tokio::test]
async fn a_hello_drop_by_drop_is_given_up() {
    let run = Invited::new();
    let mut raw = Raw::dial(Identity::ephemeral(), &run.node).await;
    let began = std::time::Instant::now();
    let hello = 200u32.to_le_bytes();
    let drops = async {
        for byte in hello.iter().chain(std::iter::repeat(&0)) {
            if raw.send.write_all(&[*byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    soon(drops).await;
    assert!(began.elapsed() < 2 * limits::HANDSHAKE_TIMEOUT);
    assert_eq!(run.node.transport.gate().refusals()[&Reason::Slow], 1);
}
