//! The gate and the desk, without a network.

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

/// A run with its warden and the desk at which tickets become permits.
struct Office {
    issuer: Identity,
    run: RunId,
    gate: Gate,
    folder: tempfile::TempDir,
}

impl Office {
    fn new(mode: AdmissionMode) -> Self {
        let (issuer, run) = (Identity::of_seed([1; 32]), RunId::of(b"a run"));
        let folder = tempfile::tempdir().expect("room for a folder");
        let office = Self { gate: gate(run, mode, issuer.peer_id()), issuer, run, folder };
        office.open_desk();
        office
    }

    /// As a warden does that starts again.
    fn open_desk(&self) {
        let book = RedemptionLog::open(&self.folder.path().join("claims")).expect("a book");
        self.gate.open_desk(Arc::new(Desk::new(self.issuer.clone(), self.run, book)));
    }

    fn ticket(&self, id: u32, uses: u16) -> Ticket {
        let address = PeerAddress::new(([192, 0, 2, 7], 4242).into(), self.issuer.peer_id());
        let what = (self.run, TicketId(id));
        Ticket::new(&self.issuer, what, Term::of(NOW, HOUR), uses, &[address])
    }

    fn claim(&self, ticket: &Ticket, who: PeerId, now: UnixTime) -> Result<Signed, Denied> {
        self.gate.claim(ticket.signed(), who, now)
    }

    /// The gate of another peer of the run, which has never heard of anybody.
    fn elsewhere(&self) -> Gate {
        gate(self.run, AdmissionMode::Invite, self.issuer.peer_id())
    }

    fn say(&self, change: impl FnOnce(&mut AccessList)) -> Signed {
        let (mut access_list, _) = self.gate.access_list();
        change(&mut access_list);
        let signed = access_list.publish(self.run, &self.issuer, NOW);
        self.gate.learn(&signed).expect("the warden signed it");
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
fn a_ticket_reads_what_it_prints_and_nothing_else() {
    let ticket = example_ticket();
    let text = ticket.to_string();
    assert_eq!(text.parse(), Ok(ticket.clone()));
    let (first, second) = (ticket.addresses().next(), ticket.addresses().nth(1));
    assert_eq!(first.expect("the warden's").peer, ticket.issuer);
    assert!(second.expect("another's").to_string().starts_with("/dns4/seed.example.org"));
    for damaged in [&text[..text.len() - 1], &text[..20], &format!("{text}1"), "shoal1"] {
        assert_eq!(damaged.parse::<Ticket>(), Err(TicketError::Damaged), "{damaged}");
    }
    assert_eq!("/ip4/192.0.2.7".parse::<Ticket>(), Err(TicketError::NotOne));
    let long = format!("{text}{}", "1".repeat(1000));
    assert_eq!(long.parse::<Ticket>(), Err(TicketError::Damaged));
}

#[test]
fn uses_are_counted_once_through_every_restart() {
    let office = Office::new(AdmissionMode::Invite);
    let ticket = office.ticket(1, 2);
    let certificate = office.claim(&ticket, peer(2), NOW).expect("a use");
    // The answer was lost: the same peer asks again.
    office.open_desk();
    office.claim(&ticket, peer(2), NOW).expect("the same use");
    office.claim(&ticket, peer(3), NOW).expect("the other use");
    office.open_desk();
    let used_up = Denied::UsedUp { ticket: TicketId(1), uses: 2 };
    assert_eq!(office.claim(&ticket, peer(4), NOW), Err(used_up));
    assert_eq!(office.claim(&office.ticket(2, 1), peer(4), NOW).map(drop), Ok(()));
    // Any peer of the run lets it in, and asks nobody.
    assert_eq!(office.elsewhere().admit(peer(2), &showing(certificate), NOW), Ok(()));
}

#[test]
fn what_a_death_cut_off_in_the_book_was_never_given() {
    let office = Office::new(AdmissionMode::Invite);
    let ticket = office.ticket(1, 1);
    let path = office.folder.path().join("claims");
    let mut torn = std::fs::OpenOptions::new().append(true).open(&path).expect("it is there");
    torn.write_all(&[7; 20]).expect("written");
    office.open_desk();
    office.claim(&ticket, peer(2), NOW).expect("a use");
    office.open_desk();
    assert!(office.claim(&ticket, peer(3), NOW).is_err());
    assert_eq!(RedemptionLog::read(&path).expect("it is whole").len(), 1);
    // One in its midst is another matter: uses might be given twice.
    office.claim(&office.ticket(2, 3), peer(4), NOW).expect("a use");
    office.claim(&office.ticket(2, 3), peer(5), NOW).expect("a use");
    let mut bytes = std::fs::read(&path).expect("it is there");
    bytes[3] ^= 1;
    std::fs::write(&path, bytes).expect("written");
    assert!(matches!(RedemptionLog::open(&path), Err(RedemptionError::Damaged { .. })));
}

#[test]
fn a_permit_is_one_peers_for_one_run_and_one_time() {
    let office = Office::new(AdmissionMode::Invite);
    let certificate = office.claim(&office.ticket(1, 1), peer(2), NOW).expect("a use");
    let elsewhere = office.elsewhere();
    let admit = |who: u8, pass: &Pass, now| elsewhere.admit(peer(who), pass, now);
    let pass = showing(certificate);
    let stolen = Err(Denied::OtherPeer { bound: peer(2) });
    assert_eq!(admit(3, &pass, NOW), stolen);
    let late = NOW.after(PERMIT_LIFE).after(2 * CLOCK_LEEWAY);
    assert!(matches!(
        admit(2, &pass, late),
        Err(Denied::Expired { paper: Paper::Certificate, .. })
    ));
    let early = UnixTime(NOW.0 - 2 * CLOCK_LEEWAY.as_secs());
    let ahead = Denied::NotYet { paper: Paper::Certificate, ahead: 600, clock: early };
    assert_eq!(admit(2, &pass, early), Err(ahead));
    assert_eq!(admit(2, &pass, UnixTime(NOW.0 - 60)), Ok(()), "clocks are never quite alike");

    let other = gate(RunId::of(b"another"), AdmissionMode::Invite, office.issuer.peer_id());
    assert!(matches!(other.admit(peer(2), &pass, NOW), Err(Denied::OtherRun { .. })));
    let foreign = gate(office.run, AdmissionMode::Invite, peer(9));
    let forged = Err(Denied::Forged { paper: Paper::Certificate });
    assert_eq!(foreign.admit(peer(2), &pass, NOW), forged);
    // A signature over a ticket is none over a permit.
    let ticket = showing(office.ticket(1, 1).signed().clone());
    assert_eq!(admit(2, &ticket, NOW), Err(Denied::Forged { paper: Paper::Certificate }));
    let nothing = admit(2, &Pass::default(), NOW);
    assert!(matches!(nothing, Err(Denied::Needed { .. })), "{nothing:?}");
}

#[test]
fn tickets_of_no_use_say_why() {
    let office = Office::new(AdmissionMode::Invite);
    let ticket = office.ticket(1, 1);
    let late = NOW.after(HOUR).after(CLOCK_LEEWAY).after(HOUR);
    let since = HOUR.as_secs() + CLOCK_LEEWAY.as_secs();
    let expired = Denied::Expired { paper: Paper::Ticket, since, clock: late };
    assert_eq!(office.claim(&ticket, peer(2), late), Err(expired.clone()));
    assert!(expired.to_string().contains("expired 65 minutes ago: ask for a new one"));
    // Somebody else's signature, over the very same words.
    let stranger = Identity::ephemeral();
    let what = (office.run, TicketId(1));
    let forged = Ticket::new(&stranger, what, Term::of(NOW, HOUR), 1, &[]);
    let refused = Err(Denied::Forged { paper: Paper::Ticket });
    assert_eq!(office.claim(&forged, peer(2), NOW), refused);
    let other = Ticket::new(
        &office.issuer,
        (RunId::of(b"another"), TicketId(1)),
        Term::of(NOW, HOUR),
        1,
        &[],
    );
    assert!(matches!(office.claim(&other, peer(2), NOW), Err(Denied::OtherRun { .. })));
    assert_eq!(
        office.elsewhere().claim(ticket.signed(), peer(2), NOW),
        Err(Denied::NotIssuer),
        "only the warden counts"
    );
}

#[test]
fn a_newer_roster_replaces_an_older_one_and_never_the_other_way() {
    let office = Office::new(AdmissionMode::Invite);
    let certificate = office.claim(&office.ticket(1, 2), peer(2), NOW).expect("a use");
    let elsewhere = office.elsewhere();
    elsewhere.admit(peer(2), &showing(certificate.clone()), NOW).expect("it has a permit");
    let empty = office.say(|_| {});
    let ban = office.say(|access_list| access_list.ban(peer(2)).expect("room"));
    // A peer that is let in shows it, and it is believed for its signature.
    let told = Pass { certificate: None, access_list: Some(ban.clone()) };
    assert!(elsewhere.admit(peer(5), &told, NOW).is_err());
    assert_eq!(elsewhere.stands(peer(2), NOW), Err(Denied::Banned));
    // The banned peer shows the one from before.
    let replayed = Pass { certificate: Some(certificate.clone()), access_list: Some(empty) };
    assert_eq!(elsewhere.admit(peer(2), &replayed, NOW), Err(Denied::Banned));
    assert_eq!(office.claim(&office.ticket(1, 2), peer(2), NOW), Err(Denied::Banned));
    let unban = office.say(|access_list| assert!(access_list.unban(peer(2))));
    elsewhere.learn(&unban).expect("the warden signed it");
    assert_eq!(elsewhere.stands(peer(2), NOW), Ok(()));
    elsewhere.learn(&ban).expect("it was signed");
    assert_eq!(elsewhere.stands(peer(2), NOW), Ok(()), "an old ban is over");
    // What another key signed is no roster.
    let mut forged = AccessList { version: u64::MAX - 1, ..AccessList::default() };
    let forged = forged.publish(office.run, &Identity::ephemeral(), NOW);
    assert_eq!(elsewhere.learn(&forged), Err(Denied::Forged { paper: Paper::AccessList }));
}

#[test]
fn a_revoked_ticket_takes_its_permits_with_it() {
    let office = Office::new(AdmissionMode::Invite);
    let (ticket, other) = (office.ticket(1, 2), office.ticket(2, 1));
    let admitted = |who: u8, ticket: &Ticket| {
        let certificate = office.claim(ticket, peer(who), NOW).expect("a use");
        office.gate.admit(peer(who), &showing(certificate), NOW).expect("it has a permit");
    };
    admitted(2, &ticket);
    admitted(3, &other);
    office.say(|access_list| access_list.revoke(TicketId(1), NOW.after(HOUR)).expect("room"));
    let revoked = Denied::Revoked { ticket: TicketId(1) };
    assert_eq!(office.gate.stands(peer(2), NOW), Err(revoked.clone()));
    assert_eq!(office.claim(&ticket, peer(4), NOW), Err(revoked));
    assert_eq!(office.gate.stands(peer(3), NOW), Ok(()));
}

#[test]
fn the_list_lets_in_by_name_and_the_key_always() {
    let office = Office::new(AdmissionMode::Allowlist);
    let needed = office.gate.admit(peer(2), &Pass::default(), NOW);
    assert!(needed.expect_err("not listed").to_string().contains("shoal invite allow"));
    // A permit is of no use here.
    let certificate = Certificate::sign(&office.issuer, office.run, peer(2), TicketId(1), NOW);
    assert!(office.gate.admit(peer(2), &showing(certificate), NOW).is_err());
    office.say(|access_list| access_list.allow(peer(2)).expect("room"));
    assert_eq!(office.gate.admit(peer(2), &Pass::default(), NOW), Ok(()));
    office.say(|access_list| access_list.ban(peer(2)).expect("room"));
    assert_eq!(office.gate.stands(peer(2), NOW), Err(Denied::Banned));
    assert_eq!(office.gate.admit(office.issuer.peer_id(), &Pass::default(), NOW), Ok(()));
}

#[test]
fn the_warden_renews_what_gets_old_and_an_open_run_asks_for_nothing() {
    let office = Office::new(AdmissionMode::Invite);
    let certificate = office.claim(&office.ticket(1, 1), peer(2), NOW).expect("a use");
    let pass = showing(certificate);
    office.gate.admit(peer(2), &pass, NOW).expect("it has a permit");
    assert_eq!(office.gate.renewal(peer(2), NOW), None);
    let old = NOW.after(PERMIT_LIFE * 3 / 4);
    let renewed = office.gate.renewal(peer(2), old).expect("it is old");
    let much_later = NOW.after(PERMIT_LIFE * 5 / 4);
    assert_eq!(office.gate.admit(peer(2), &showing(renewed), much_later), Ok(()));

    let open = Office::new(AdmissionMode::Open);
    assert_eq!(open.gate.admit(peer(2), &Pass::default(), NOW), Ok(()));
    open.say(|access_list| access_list.ban(peer(2)).expect("room"));
    assert_eq!(open.gate.admit(peer(2), &Pass::default(), NOW), Err(Denied::Banned));
}

#[test]
fn a_flood_of_refusals_is_counted_and_remembered_only_in_part() {
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
fn a_roster_has_a_cap_and_forgets_what_nobody_can_show() {
    let mut access_list = AccessList::default();
    let named = |number: u32| {
        let mut id = [0; 32];
        id[..4].copy_from_slice(&number.to_le_bytes());
        PeerId(id)
    };
    let full =
        (0..).find(|number| access_list.ban(named(*number)).is_err()).expect("there is a cap");
    assert!(full > 100);
    access_list.unban(named(full));
    access_list.revoke(TicketId(1), NOW).expect("room");
    let issuer = Identity::ephemeral();
    let signed = access_list.publish(RunId::of(b"a run"), &issuer, NOW);
    assert!(crate::wire::encode(&signed).expect("it fits").len() < 64 << 10);
    let _ = access_list.publish(RunId::of(b"a run"), &issuer, NOW.after(4 * PERMIT_LIFE));
    assert!(access_list.revoked.is_empty());
}
