//! Tests of gate and desk without a network.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use super::decoders::ticket as example_ticket;
use super::*;
use crate::ids::{PeerId, RunId};
use crate::manifest::{Admission, AdmissionMode};
use crate::net::discovery::PeerAddress;
use crate::net::identity::Identity;

const NOW: UnixTime = UnixTime(1_800_000_000);
const HOUR: Duration = Duration::from_secs(3600);

/// A run with its issuer and the desk that exchanges tickets for certificates.
struct Fixture {
    issuer: Identity,
    run: RunId,
    gate: Gate,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new(mode: AdmissionMode) -> Self {
        let (issuer, run) = (Identity::of_seed([1; 32]), RunId::of(b"a run"));
        let folder = tempfile::tempdir().expect("room for a folder");
        let fixture = Self { gate: gate(run, mode, issuer.peer_id()), issuer, run, folder };
        fixture.open_desk();
        fixture
    }

    /// Opens the desk as a restarted issuer does.
    fn open_desk(&self) {
        let log =
            RedemptionLog::open(&self.folder.path().join("claims")).expect("a redemption log");
        self.gate.open_desk(Arc::new(TicketDesk::new(self.issuer.clone(), self.run, log)));
    }

    fn ticket(&self, id: u32, uses: u16) -> Ticket {
        let address = PeerAddress::new(([192, 0, 2, 7], 4242).into(), self.issuer.peer_id());
        let run_and_id = (self.run, TicketId(id));
        let admits = Admits { uses, anchor: false };
        Ticket::new(&self.issuer, run_and_id, Term::of(NOW, HOUR), admits, &[address])
    }

    fn claim(&self, ticket: &Ticket, subject: PeerId, now: UnixTime) -> Result<Signed, Denied> {
        self.gate.claim(ticket.signed(), subject, now)
    }

    /// The gate of another peer of the run that knows no other peers yet.
    fn elsewhere(&self) -> Gate {
        gate(self.run, AdmissionMode::Invite, self.issuer.peer_id())
    }

    fn publish(&self, change: impl FnOnce(&mut AccessList)) -> Signed {
        let (mut access_list, _) = self.gate.access_list();
        change(&mut access_list);
        let signed = access_list.publish(self.run, &self.issuer, NOW);
        self.gate.learn(&signed).expect("the issuer signed it");
        signed
    }
}

fn gate(run: RunId, mode: AdmissionMode, key: PeerId) -> Gate {
    let gate = Gate::default();
    gate.enter(Rules { run, admission: Admission { mode, key: Some(key) } });
    gate
}

fn peer(number: u8) -> PeerId {
    PeerId([number; 32])
}

fn showing(certificate: Signed) -> Pass {
    Pass { certificate: Some(certificate), access_list: None }
}

#[test]
fn a_ticket_reads_back_its_own_text_and_rejects_others() {
    let ticket = example_ticket();
    let text = ticket.to_string();
    assert_eq!(text.parse(), Ok(ticket.clone()));
    let (first, second) = (ticket.addresses().next(), ticket.addresses().nth(1));
    assert_eq!(first.expect("the issuer's").peer, ticket.issuer);
    assert!(second.expect("another peer's").to_string().starts_with("/dns4/seed.example.org"));
    for damaged in [&text[..text.len() - 1], &text[..20], &format!("{text}1"), "shoal1"] {
        assert_eq!(damaged.parse::<Ticket>(), Err(TicketError::Damaged), "{damaged}");
    }
    assert_eq!("/ip4/192.0.2.7".parse::<Ticket>(), Err(TicketError::NotOne));
    let long = format!("{text}{}", "1".repeat(1000));
    assert_eq!(long.parse::<Ticket>(), Err(TicketError::Damaged));
}

#[test]
fn uses_are_counted_once_across_restarts() {
    let fixture = Fixture::new(AdmissionMode::Invite);
    let ticket = fixture.ticket(1, 2);
    let certificate = fixture.claim(&ticket, peer(2), NOW).expect("a use");
    // The answer was lost: the same peer asks again.
    fixture.open_desk();
    fixture.claim(&ticket, peer(2), NOW).expect("the same use");
    fixture.claim(&ticket, peer(3), NOW).expect("the other use");
    fixture.open_desk();
    let used_up = Denied::UsedUp { ticket: TicketId(1), uses: 2 };
    assert_eq!(fixture.claim(&ticket, peer(4), NOW), Err(used_up));
    assert_eq!(fixture.claim(&fixture.ticket(2, 1), peer(4), NOW).map(drop), Ok(()));
    // Any peer of the run admits it without asking others.
    assert_eq!(fixture.elsewhere().admit(peer(2), &showing(certificate), NOW), Ok(()));
}

#[test]
fn a_record_truncated_by_a_crash_is_removed() {
    let fixture = Fixture::new(AdmissionMode::Invite);
    let ticket = fixture.ticket(1, 1);
    let path = fixture.folder.path().join("claims");
    let mut torn = std::fs::OpenOptions::new().append(true).open(&path).expect("it is there");
    torn.write_all(&[7; 20]).expect("written");
    fixture.open_desk();
    fixture.claim(&ticket, peer(2), NOW).expect("a use");
    fixture.open_desk();
    assert!(fixture.claim(&ticket, peer(3), NOW).is_err());
    assert_eq!(RedemptionLog::read(&path).expect("it is whole").len(), 1);
    // Damage before the last record is an error: uses might be given twice.
    fixture.claim(&fixture.ticket(2, 3), peer(4), NOW).expect("a use");
    fixture.claim(&fixture.ticket(2, 3), peer(5), NOW).expect("a use");
    let mut bytes = std::fs::read(&path).expect("it is there");
    bytes[3] ^= 1;
    std::fs::write(&path, bytes).expect("written");
    assert!(matches!(RedemptionLog::open(&path), Err(RedemptionError::Damaged { .. })));
}

#[test]
fn a_certificate_is_valid_for_one_peer_one_run_and_one_term() {
    let fixture = Fixture::new(AdmissionMode::Invite);
    let certificate = fixture.claim(&fixture.ticket(1, 1), peer(2), NOW).expect("a use");
    let elsewhere = fixture.elsewhere();
    let admit = |subject: u8, pass: &Pass, now| elsewhere.admit(peer(subject), pass, now);
    let pass = showing(certificate);
    let stolen = Err(Denied::OtherPeer { bound: peer(2) });
    assert_eq!(admit(3, &pass, NOW), stolen);
    let late = NOW.after(CERTIFICATE_LIFETIME).after(2 * CLOCK_LEEWAY);
    assert!(matches!(
        admit(2, &pass, late),
        Err(Denied::Expired { document: Document::Certificate, .. })
    ));
    let early = UnixTime(NOW.0 - 2 * CLOCK_LEEWAY.as_secs());
    let ahead = Denied::NotYet { document: Document::Certificate, ahead: 600, clock: early };
    assert_eq!(admit(2, &pass, early), Err(ahead));
    assert_eq!(
        admit(2, &pass, UnixTime(NOW.0 - 60)),
        Ok(()),
        "small clock differences are tolerated"
    );

    let other = gate(RunId::of(b"another"), AdmissionMode::Invite, fixture.issuer.peer_id());
    assert!(matches!(other.admit(peer(2), &pass, NOW), Err(Denied::OtherRun { .. })));
    let foreign = gate(fixture.run, AdmissionMode::Invite, peer(9));
    let forged = Err(Denied::Forged { document: Document::Certificate });
    assert_eq!(foreign.admit(peer(2), &pass, NOW), forged);
    // A signature over a ticket is not valid for a certificate.
    let ticket = showing(fixture.ticket(1, 1).signed().clone());
    assert_eq!(admit(2, &ticket, NOW), Err(Denied::Forged { document: Document::Certificate }));
    let nothing = admit(2, &Pass::default(), NOW);
    assert!(matches!(nothing, Err(Denied::Needed { .. })), "{nothing:?}");
}

#[test]
fn an_invalid_ticket_is_denied_with_its_reason() {
    let fixture = Fixture::new(AdmissionMode::Invite);
    let ticket = fixture.ticket(1, 1);
    let late = NOW.after(HOUR).after(CLOCK_LEEWAY).after(HOUR);
    let since = HOUR.as_secs() + CLOCK_LEEWAY.as_secs();
    let expired = Denied::Expired { document: Document::Ticket, since, clock: late };
    assert_eq!(fixture.claim(&ticket, peer(2), late), Err(expired.clone()));
    assert!(expired.to_string().contains("expired 65 minutes ago: ask for a new one"));
    // Another key's signature over the same content.
    let stranger = Identity::ephemeral();
    let run_and_id = (fixture.run, TicketId(1));
    let forged = Ticket::new(
        &stranger,
        run_and_id,
        Term::of(NOW, HOUR),
        Admits { uses: 1, anchor: false },
        &[],
    );
    let refused = Err(Denied::Forged { document: Document::Ticket });
    assert_eq!(fixture.claim(&forged, peer(2), NOW), refused);
    let other = Ticket::new(
        &fixture.issuer,
        (RunId::of(b"another"), TicketId(1)),
        Term::of(NOW, HOUR),
        Admits { uses: 1, anchor: false },
        &[],
    );
    assert!(matches!(fixture.claim(&other, peer(2), NOW), Err(Denied::OtherRun { .. })));
    assert_eq!(
        fixture.elsewhere().claim(ticket.signed(), peer(2), NOW),
        Err(Denied::NotIssuer),
        "only the issuer counts uses"
    );
}

#[test]
fn the_issuer_says_who_may_be_an_anchor() {
    let fixture = Fixture::new(AdmissionMode::Invite);
    let issued = |id, anchor, holder| {
        let (admits, term) = (Admits { uses: 2, anchor }, Term::of(NOW, HOUR));
        let ticket = Ticket::new(&fixture.issuer, (fixture.run, TicketId(id)), term, admits, &[]);
        let certificate = fixture.claim(&ticket, holder, NOW).expect("a valid ticket");
        assert!(Certificate::covers(&certificate, &ticket));
        (certificate, ticket)
    };
    let (plain, _) = issued(1, false, peer(2));
    let (anchor, ticket) = issued(2, true, peer(3));
    assert!(!Certificate::covers(&plain, &ticket), "it grants less than the ticket");
    let elsewhere = fixture.elsewhere();
    assert!(!elsewhere.may_be_anchor(peer(3)), "its certificate was not shown");
    for (certificate, holder) in [(&plain, peer(2)), (&anchor, peer(3))] {
        let pass = Pass { certificate: Some(certificate.clone()), access_list: None };
        elsewhere.admit(holder, &pass, NOW).expect("a valid certificate");
    }
    let able = [peer(2), peer(3), fixture.issuer.peer_id()].map(|id| elsewhere.may_be_anchor(id));
    assert_eq!(able, [false, true, true]);
    // Its own certificate tells a peer what it may be.
    let own = fixture.elsewhere();
    own.hold(anchor);
    assert_eq!([peer(2), peer(3)].map(|id| own.may_be_anchor(id)), [false, true]);
    let signed = fixture.publish(|list| {
        list.ban(peer(3)).expect("room for one");
        list.allow(peer(4)).expect("room for one");
    });
    elsewhere.learn(&signed).expect("the issuer signed it");
    assert_eq!([peer(3), peer(4)].map(|id| elsewhere.may_be_anchor(id)), [false, true]);
    let open = Fixture::new(AdmissionMode::Open);
    assert!(open.gate.may_be_anchor(peer(2)), "nobody vouches for anybody in an open run");
}

#[test]
fn only_a_newer_access_list_replaces_the_known_one() {
    let fixture = Fixture::new(AdmissionMode::Invite);
    let certificate = fixture.claim(&fixture.ticket(1, 2), peer(2), NOW).expect("a use");
    let elsewhere = fixture.elsewhere();
    elsewhere.admit(peer(2), &showing(certificate.clone()), NOW).expect("it has a certificate");
    let empty = fixture.publish(|_| {});
    let ban = fixture.publish(|access_list| access_list.ban(peer(2)).expect("room"));
    // Another peer presents the new list, which is accepted for its signature.
    let newer = Pass { certificate: None, access_list: Some(ban.clone()) };
    assert!(elsewhere.admit(peer(5), &newer, NOW).is_err());
    assert_eq!(elsewhere.stands(peer(2), NOW), Err(Denied::Banned));
    // The banned peer presents the list from before the ban.
    let replayed = Pass { certificate: Some(certificate.clone()), access_list: Some(empty) };
    assert_eq!(elsewhere.admit(peer(2), &replayed, NOW), Err(Denied::Banned));
    assert_eq!(fixture.claim(&fixture.ticket(1, 2), peer(2), NOW), Err(Denied::Banned));
    let unban = fixture.publish(|access_list| assert!(access_list.unban(peer(2))));
    elsewhere.learn(&unban).expect("the issuer signed it");
    assert_eq!(elsewhere.stands(peer(2), NOW), Ok(()));
    elsewhere.learn(&ban).expect("it was signed");
    assert_eq!(elsewhere.stands(peer(2), NOW), Ok(()), "an old ban is over");
    // A list that another key signed is rejected.
    let mut forged = AccessList { version: u64::MAX - 1, ..AccessList::default() };
    let forged = forged.publish(fixture.run, &Identity::ephemeral(), NOW);
    assert_eq!(elsewhere.learn(&forged), Err(Denied::Forged { document: Document::AccessList }));
}

#[test]
fn revoking_a_ticket_revokes_its_certificates() {
    let fixture = Fixture::new(AdmissionMode::Invite);
    let (ticket, other) = (fixture.ticket(1, 2), fixture.ticket(2, 1));
    let admitted = |subject: u8, ticket: &Ticket| {
        let certificate = fixture.claim(ticket, peer(subject), NOW).expect("a use");
        fixture
            .gate
            .admit(peer(subject), &showing(certificate), NOW)
            .expect("it has a certificate");
    };
    admitted(2, &ticket);
    admitted(3, &other);
    fixture.publish(|access_list| access_list.revoke(TicketId(1), NOW.after(HOUR)).expect("room"));
    let revoked = Denied::Revoked { ticket: TicketId(1) };
    assert_eq!(fixture.gate.stands(peer(2), NOW), Err(revoked.clone()));
    assert_eq!(fixture.claim(&ticket, peer(4), NOW), Err(revoked));
    assert_eq!(fixture.gate.stands(peer(3), NOW), Ok(()));
}

#[test]
fn listed_peers_and_the_issuer_are_admitted() {
    let fixture = Fixture::new(AdmissionMode::Allowlist);
    let needed = fixture.gate.admit(peer(2), &Pass::default(), NOW);
    assert!(needed.expect_err("not listed").to_string().contains("shoal invite allow"));
    // A certificate has no effect in this mode.
    let certificate =
        Certificate::sign(&fixture.issuer, fixture.run, peer(2), (TicketId(1), false), NOW);
    assert!(fixture.gate.admit(peer(2), &showing(certificate), NOW).is_err());
    fixture.publish(|access_list| access_list.allow(peer(2)).expect("room"));
    assert_eq!(fixture.gate.admit(peer(2), &Pass::default(), NOW), Ok(()));
    fixture.publish(|access_list| access_list.ban(peer(2)).expect("room"));
    assert_eq!(fixture.gate.stands(peer(2), NOW), Err(Denied::Banned));
    assert_eq!(fixture.gate.admit(fixture.issuer.peer_id(), &Pass::default(), NOW), Ok(()));
}

#[test]
fn the_issuer_renews_old_certificates_and_an_open_run_needs_none() {
    let fixture = Fixture::new(AdmissionMode::Invite);
    let certificate = fixture.claim(&fixture.ticket(1, 1), peer(2), NOW).expect("a use");
    let pass = showing(certificate);
    fixture.gate.admit(peer(2), &pass, NOW).expect("it has a certificate");
    assert_eq!(fixture.gate.renewal(peer(2), NOW), None);
    let old = NOW.after(CERTIFICATE_LIFETIME * 3 / 4);
    let renewed = fixture.gate.renewal(peer(2), old).expect("it is old");
    let much_later = NOW.after(CERTIFICATE_LIFETIME * 5 / 4);
    assert_eq!(fixture.gate.admit(peer(2), &showing(renewed), much_later), Ok(()));

    let open = Fixture::new(AdmissionMode::Open);
    assert_eq!(open.gate.admit(peer(2), &Pass::default(), NOW), Ok(()));
    open.publish(|access_list| access_list.ban(peer(2)).expect("room"));
    assert_eq!(open.gate.admit(peer(2), &Pass::default(), NOW), Err(Denied::Banned));
}

#[test]
fn a_flood_of_refusals_is_counted_but_stored_only_in_part() {
    let gate = Gate::default();
    for number in 0..1000 {
        let text = format!("number {number}");
        gate.turned_away(Reason::Flood, None, None, text);
    }
    assert_eq!(gate.refusals()[&Reason::Flood], 1000);
    let newest = gate.newest_refusals();
    assert!(newest.len() < 100 && newest[0].text == "number 0");
    assert!(gate.newest_refusals().is_empty());
}

#[test]
fn an_access_list_is_limited_and_drops_expired_revocations() {
    let mut access_list = AccessList::default();
    let named = |number: u32| {
        let mut id = [0; 32];
        id[..4].copy_from_slice(&number.to_le_bytes());
        PeerId(id)
    };
    let full =
        (0..).find(|number| access_list.ban(named(*number)).is_err()).expect("there is a limit");
    assert!(full > 100);
    access_list.unban(named(full));
    access_list.revoke(TicketId(1), NOW).expect("room");
    let issuer = Identity::ephemeral();
    let signed = access_list.publish(RunId::of(b"a run"), &issuer, NOW);
    assert!(crate::wire::encode(&signed).expect("it fits").len() < 64 << 10);
    let _ = access_list.publish(RunId::of(b"a run"), &issuer, NOW.after(4 * CERTIFICATE_LIFETIME));
    assert!(access_list.revoked.is_empty());
}
