//! Other peers: whether they answer, over TCP and over UDP, and what they tell of this machine.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use shoal_protocol::limits;
use shoal_protocol::net::admission::{CLOCK_LEEWAY, Denied, Ticket, UnixTime};
use shoal_protocol::net::discovery::PeerAddress;
use shoal_protocol::net::transport::{ConnectError, ProbeReport, Refusal, Transport, Welcome};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Finding;
use crate::outward_ip::outward_ip;

/// How long a peer may take to answer over TCP.
const PATIENCE: Duration = Duration::from_secs(4);

/// Clocks that differ by more than this are worth a word.
const CLOCKS_APART: Duration = Duration::from_secs(10);

/// Whether a ticket is of use now, by its dates. It is not used up by being looked at.
pub(crate) fn ticket(ticket: &Ticket) -> Finding {
    const ABOUT: &str = "ticket";
    match ticket.is_timely(UnixTime::now()) {
        Ok(()) => {
            let left = ticket.terms.term.expires.since(UnixTime::now()).as_secs() / 60;
            let run = ticket.terms.run;
            let says =
                format!("number {} for run {run:.8}, good for {left} minutes", ticket.terms.id);
            Finding::well(ABOUT, says)
        }
        Err(denied @ Denied::NotYet { .. }) => {
            let fix = "set this machine's clock: timedatectl set-ntp true";
            Finding::wrong(ABOUT, denied.to_string(), fix)
        }
        Err(denied) => {
            let fix =
                "ask for a new one (`shoal invite new`), unless this machine's clock is ahead";
            Finding::wrong(ABOUT, denied.to_string(), fix)
        }
    }
}

/// What was learned from one peer.
#[derive(Default)]
struct Heard {
    clock: Option<UnixTime>,
    seen: Option<SocketAddr>,
    probe_report: Option<ProbeReport>,
}

/// Asks each of these peers, and puts together what they say; with how they rang at this machine's port, where
/// they are to.
pub(crate) async fn network(
    transport: &Transport,
    peers: &[PeerAddress],
    probe: bool,
) -> (Vec<Finding>, Vec<ProbeReport>) {
    if peers.is_empty() {
        let says = "none is known: name one, as `shoal doctor ADDRESS` or `shoal doctor TICKET`";
        return (vec![Finding::note("peers", says)], Vec::new());
    }
    let (mut findings, mut heard) = (Vec::new(), Vec::new());
    for peer in peers {
        findings.extend(tcp(peer).await);
        let (finding, mut said) = quic(transport, peer).await;
        if probe && said.seen.is_some() {
            said.probe_report = transport.request_probe(peer.peer, None).await.ok();
        }
        findings.push(finding);
        heard.push(said);
    }
    findings.extend(clock(&heard, UnixTime::now()));
    let ports = transport.local_addresses().iter().map(SocketAddr::port).collect();
    findings.push(nat(&heard, outward_ip(), &ports));
    (findings, heard.into_iter().filter_map(|said| said.probe_report).collect())
}

/// Whether something listens there. One finding, or none where the host is not known, which is the other
/// plane's to say.
async fn tcp(peer: &PeerAddress) -> Option<Finding> {
    const ABOUT: &str = "peer, TCP";
    let address = *peer.resolve().await.ok()?.first()?;
    let port = address.port();
    Some(match timeout(PATIENCE, TcpStream::connect(address)).await {
        Ok(Ok(_)) => Finding::well(ABOUT, format!("{address} answers")),
        Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => Finding::wrong(
            ABOUT,
            format!("{address} refuses: nobody listens there"),
            "start that peer, or correct the port",
        ),
        Ok(Err(error)) => Finding::wrong(
            ABOUT,
            format!("{address}: {error}"),
            "look at the route to that machine",
        ),
        Err(_) => Finding::wrong(
            ABOUT,
            format!("{address} does not answer within {} s", PATIENCE.as_secs()),
            format!("open TCP port {port} there, in its firewall and its cloud's security group"),
        ),
    })
}

async fn quic(transport: &Transport, peer: &PeerAddress) -> (Finding, Heard) {
    const ABOUT: &str = "peer, UDP";
    let resolved = match peer.resolve().await {
        Ok(resolved) => resolved,
        Err(error) => {
            let fix = "correct the name, or use an IP address";
            let says = format!("the host of {peer} is not known: {error}");
            return (Finding::wrong("peer", says, fix), Heard::default());
        }
    };
    match transport.connect(peer.peer, &resolved).await {
        Ok(Welcome { clock, seen, address, .. }) => {
            let says = format!("{address} is peer {}, of this protocol version", peer.peer.short());
            (Finding::well(ABOUT, says), Heard { clock, seen, probe_report: None })
        }
        Err(error) => {
            let heard = Heard { clock: clock_of(&error), ..Heard::default() };
            (refused(ABOUT, peer, &error), heard)
        }
    }
}

fn clock_of(error: &ConnectError) -> Option<UnixTime> {
    match error {
        ConnectError::Refused(Refusal::Denied(denied)) => denied.clock(),
        _ => None,
    }
}

fn refused(about: &str, peer: &PeerAddress, error: &ConnectError) -> Finding {
    let says = error.to_string();
    match error {
        // It greets, and lets in who has something to show.
        ConnectError::Refused(Refusal::Denied(Denied::Needed { .. })) => {
            Finding::well(about, format!("{peer} answers, and lets in only some peers"))
        }
        ConnectError::WrongPeer { found, .. } => {
            Finding::wrong(about, says, format!("write {found} after /p2p/ in the address"))
        }
        ConnectError::Refused(Refusal::Version { theirs, ours }) => {
            let older = if theirs > ours { "this machine's" } else { "that peer's" };
            Finding::wrong(
                about,
                says,
                format!("install the newer release: {older} shoal is older"),
            )
        }
        ConnectError::Unreachable { .. } | ConnectError::TimedOut => Finding::wrong(
            about,
            says,
            format!(
                "open UDP port {} there, in its firewall and its cloud's security group; everything but \
                 the search goes over UDP",
                peer.port
            ),
        ),
        ConnectError::Refused(Refusal::Full | Refusal::Closing) => {
            Finding::wrong(about, says, "try again in a while, or at another peer")
        }
        _ => Finding::wrong(about, says, "try another peer of the run"),
    }
}

/// This machine's clock beside theirs. The one that most agree on is right.
fn clock(heard: &[Heard], ours: UnixTime) -> Option<Finding> {
    const ABOUT: &str = "clock";
    let mut apart: Vec<i64> =
        heard.iter().filter_map(|said| Some(ours.0 as i64 - said.clock?.0 as i64)).collect();
    apart.sort_unstable();
    let median = *apart.get(apart.len() / 2)?;
    let way = if median > 0 { "ahead of" } else { "behind" };
    let says = format!("{} s {way} what peers say", median.unsigned_abs());
    let distance = Duration::from_secs(median.unsigned_abs());
    Some(if distance > CLOCK_LEEWAY / 2 {
        Finding::wrong(ABOUT, says, "set this machine's clock: timedatectl set-ntp true")
    } else if distance > CLOCKS_APART {
        Finding::note(ABOUT, says)
    } else {
        Finding::well(ABOUT, "as peers say")
    })
}

/// What stands between this machine and the others, by where they see it.
fn nat(heard: &[Heard], outward: IpAddr, ports: &BTreeSet<u16>) -> Finding {
    const ABOUT: &str = "NAT";
    let seen: BTreeSet<SocketAddr> = heard.iter().filter_map(|said| said.seen).collect();
    let Some(first) = seen.first() else {
        return Finding::note(ABOUT, "no peer said where it sees this machine");
    };
    let here = |address: &SocketAddr| address.ip() == outward || address.ip().is_loopback();
    if seen.iter().all(|address| here(address) && ports.contains(&address.port())) {
        return Finding::well(ABOUT, format!("none: peers see this machine at {}", first.ip()));
    }
    let several = heard.iter().filter(|said| said.seen.is_some()).count() > 1;
    if seen.len() > 1 {
        let places: Vec<String> = seen.iter().map(ToString::to_string).collect();
        let says =
            format!("each peer sees another port ({}): nobody can dial in", places.join(", "));
        return Finding::note(ABOUT, says + "; the run passes packets on through a third peer");
    }
    let kind = if several { "the same port for all peers" } else { "seen by one peer only" };
    let says = format!(
        "behind one: seen at {first} ({kind}); forward the port (TCP and UDP) to be dialled"
    );
    Finding::note(ABOUT, says)
}

/// The version that this build speaks, for who compares two.
pub(crate) fn version() -> Finding {
    let says = format!(
        "shoal {}, protocol version {}",
        env!("CARGO_PKG_VERSION"),
        limits::PROTOCOL_VERSION
    );
    Finding::well("version", says)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    fn seen(address: &str) -> Heard {
        Heard { seen: Some(address.parse().expect("an address")), ..Heard::default() }
    }

    #[test]
    fn most_clocks_are_right() {
        let ours = UnixTime(10_000);
        let says = |clocks: &[u64]| {
            let heard: Vec<Heard> = clocks
                .iter()
                .map(|clock| Heard { clock: Some(UnixTime(*clock)), ..Heard::default() })
                .collect();
            clock(&heard, ours).map(|finding| finding.state)
        };
        assert_eq!(says(&[]), None);
        assert_eq!(says(&[10_001, 9_999, 20_000]), Some(State::Well));
        assert_eq!(says(&[10_030]), Some(State::Note));
        assert_eq!(says(&[12_000, 12_001, 10_000]), Some(State::Wrong));
    }

    #[test]
    fn what_stands_between_shows_in_where_peers_see_this_machine() {
        let (outward, ports) = ("10.0.0.5".parse().expect("an address"), BTreeSet::from([7410]));
        let says = |heard: &[Heard]| nat(heard, outward, &ports).says;
        assert!(says(&[]).contains("no peer said"));
        assert!(says(&[seen("10.0.0.5:7410")]).starts_with("none"));
        let one = says(&[seen("192.0.2.1:40000"), seen("192.0.2.1:40000")]);
        assert!(one.contains("the same port for all peers"), "{one}");
        let two = says(&[seen("192.0.2.1:40000"), seen("192.0.2.1:40001")]);
        assert!(two.contains("each peer sees another port"), "{two}");
    }

    #[test]
    fn what_a_peer_refuses_for_says_what_to_do() {
        let peer =
            "/ip4/192.0.2.1/tcp/7410/p2p/12D3KooWJu8vqrAFYBnYU7wRUg66jsP6pUg36FjP1LcEUvqLWsPe";
        let peer: PeerAddress = peer.parse().expect("an address");
        let fix = |error: ConnectError| refused("peer", &peer, &error).fix.unwrap_or_default();
        assert!(fix(ConnectError::TimedOut).contains("open UDP port 7410"));
        let version = Refusal::Version { ours: 4, theirs: 5 };
        assert!(fix(version.into()).contains("this machine's shoal is older"));
        let address = ([192, 0, 2, 1], 7410).into();
        let found = shoal_protocol::ids::PeerId([3; 32]);
        let wrong = ConnectError::WrongPeer { address, expected: peer.peer, found };
        assert!(fix(wrong).contains(&found.to_string()));
    }
}
