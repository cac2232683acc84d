//! Checks of other peers: whether they answer over TCP and UDP, and how they see this machine.

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

/// Timeout of a TCP connection.
const PATIENCE: Duration = Duration::from_secs(4);

/// A clock difference above this is reported.
const CLOCKS_APART: Duration = Duration::from_secs(10);

/// Checks a ticket's dates. The check does not redeem the ticket.
pub(crate) fn ticket(ticket: &Ticket) -> Finding {
    const ABOUT: &str = "ticket";
    match ticket.is_timely(UnixTime::now()) {
        Ok(()) => {
            let left = ticket.terms.term.expires.since(UnixTime::now()).as_secs() / 60;
            let run = ticket.terms.run;
            let text = format!(
                "number {} for run {run:.8}, valid for {left} more minutes",
                ticket.terms.id
            );
            Finding::well(ABOUT, text)
        }
        Err(denied @ Denied::NotYet { .. }) => {
            let fix = "set this machine's clock: timedatectl set-ntp true";
            Finding::wrong(ABOUT, denied.to_string(), fix)
        }
        Err(denied) => {
            let fix =
                "ask for a new ticket (`shoal invite new`), unless this machine's clock is ahead";
            Finding::wrong(ABOUT, denied.to_string(), fix)
        }
    }
}

/// The facts learned from one peer.
#[derive(Default)]
struct Reported {
    clock: Option<UnixTime>,
    seen: Option<SocketAddr>,
    probe_report: Option<ProbeReport>,
}

/// Contacts each of these peers and combines their reports. If `probe` is set, they also probe this
/// machine's port, and the results of these probes are returned.
pub(crate) async fn network(
    transport: &Transport,
    peers: &[PeerAddress],
    probe: bool,
) -> (Vec<Finding>, Vec<ProbeReport>) {
    if peers.is_empty() {
        let text = "none asked: `shoal doctor ADDRESS` or `shoal doctor TICKET` checks the way to a run; `shoal demo` \
                    trains here, and `shoal start run.toml` starts a run";
        return (vec![Finding::note("peers", text)], Vec::new());
    }
    let (mut findings, mut reports) = (Vec::new(), Vec::new());
    for peer in peers {
        findings.extend(tcp(peer).await);
        let (finding, mut report) = quic(transport, peer).await;
        if probe && report.seen.is_some() {
            report.probe_report = transport.request_probe(peer.peer, None).await.ok();
        }
        findings.push(finding);
        reports.push(report);
    }
    findings.extend(clock(&reports, UnixTime::now()));
    let ports = transport.local_addresses().iter().map(SocketAddr::port).collect();
    findings.push(nat(&reports, outward_ip(), &ports));
    (findings, reports.into_iter().filter_map(|report| report.probe_report).collect())
}

/// Whether a TCP connection to a peer succeeds. There is no finding if its host name is unknown: the
/// check over UDP reports that.
async fn tcp(peer: &PeerAddress) -> Option<Finding> {
    const ABOUT: &str = "peer, TCP";
    let address = *peer.resolve().await.ok()?.first()?;
    let port = address.port();
    Some(match timeout(PATIENCE, TcpStream::connect(address)).await {
        Ok(Ok(_)) => Finding::well(ABOUT, format!("{address} answers")),
        Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => Finding::wrong(
            ABOUT,
            format!("{address} refuses: nobody listens there"),
            "start that peer, or correct the port in the address",
        ),
        Ok(Err(error)) => Finding::wrong(
            ABOUT,
            format!("{address}: {error}"),
            "check the network route to that machine",
        ),
        Err(_) => Finding::wrong(
            ABOUT,
            format!("{address} does not answer within {} s", PATIENCE.as_secs()),
            format!("open TCP port {port} there, in its firewall and its cloud's security group"),
        ),
    })
}

async fn quic(transport: &Transport, peer: &PeerAddress) -> (Finding, Reported) {
    const ABOUT: &str = "peer, UDP";
    let resolved = match peer.resolve().await {
        Ok(resolved) => resolved,
        Err(error) => {
            let fix = "correct the host name, or use an IP address";
            let text = format!("the host of {peer} is unknown: {error}");
            return (Finding::wrong("peer", text, fix), Reported::default());
        }
    };
    match transport.connect(peer.peer, &resolved).await {
        Ok(Welcome { clock, seen, address, .. }) => {
            let text =
                format!("{address} is peer {}, with the same protocol version", peer.peer.short());
            (Finding::well(ABOUT, text), Reported { clock, seen, probe_report: None })
        }
        Err(error) => {
            let report = Reported { clock: clock_of(&error), ..Reported::default() };
            (refused(ABOUT, peer, &error), report)
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
    let text = error.to_string();
    match error {
        // It is reachable, and requires a certificate or ticket that this check does not present.
        ConnectError::Refused(Refusal::Denied(Denied::Needed { .. })) => {
            Finding::well(about, format!("{peer} answers; it admits invited or listed peers only"))
        }
        ConnectError::WrongPeer { found, .. } => Finding::wrong(
            about,
            text,
            format!("replace the id after /p2p/ in the address with {found}"),
        ),
        ConnectError::Refused(Refusal::Version { theirs, ours }) => {
            let older = if theirs > ours { "this machine's" } else { "that peer's" };
            Finding::wrong(
                about,
                text,
                format!("install the newer release: {older} shoal is older"),
            )
        }
        ConnectError::Unreachable { .. } | ConnectError::TimedOut => Finding::wrong(
            about,
            text,
            format!(
                "open UDP port {} there, in its firewall and its cloud's security group; Shoal uses UDP for \
                 everything but discovery",
                peer.port
            ),
        ),
        ConnectError::Refused(Refusal::Full | Refusal::Closing) => {
            Finding::wrong(about, text, "try again later, or use another peer's address")
        }
        _ => Finding::wrong(about, text, "use the address of another peer of the run"),
    }
}

/// Compares this machine's clock with the peers' clocks. The median decides.
fn clock(reports: &[Reported], ours: UnixTime) -> Option<Finding> {
    const ABOUT: &str = "clock";
    let mut apart: Vec<i64> =
        reports.iter().filter_map(|report| Some(ours.0 as i64 - report.clock?.0 as i64)).collect();
    apart.sort_unstable();
    let median = *apart.get(apart.len() / 2)?;
    let side = if median > 0 { "ahead of" } else { "behind" };
    let text = format!("{} s {side} the peers' clocks", median.unsigned_abs());
    let distance = Duration::from_secs(median.unsigned_abs());
    Some(if distance > CLOCK_LEEWAY / 2 {
        Finding::wrong(ABOUT, text, "set this machine's clock: timedatectl set-ntp true")
    } else if distance > CLOCKS_APART {
        Finding::note(ABOUT, text)
    } else {
        Finding::well(ABOUT, "agrees with the peers' clocks")
    })
}

/// Infers NAT between this machine and the peers from the addresses at which they see it.
fn nat(reports: &[Reported], outward: IpAddr, ports: &BTreeSet<u16>) -> Finding {
    const ABOUT: &str = "NAT";
    let seen: BTreeSet<SocketAddr> = reports.iter().filter_map(|report| report.seen).collect();
    let Some(first) = seen.first() else {
        return Finding::note(ABOUT, "no peer reported the address at which it sees this machine");
    };
    let here = |address: &SocketAddr| address.ip() == outward || address.ip().is_loopback();
    if seen.iter().all(|address| here(address) && ports.contains(&address.port())) {
        return Finding::well(ABOUT, format!("none: peers see this machine at {}", first.ip()));
    }
    let several = reports.iter().filter(|report| report.seen.is_some()).count() > 1;
    if seen.len() > 1 {
        let places: Vec<String> = seen.iter().map(ToString::to_string).collect();
        let text =
            format!("each peer sees another port ({}): no peer can dial in", places.join(", "));
        return Finding::note(ABOUT, text + "; the run relays packets through a third peer");
    }
    let kind = if several { "the same port for all peers" } else { "seen by one peer only" };
    let text = format!(
        "peers see this machine at {first} ({kind}); forward the port (TCP and UDP) so that they can dial in"
    );
    Finding::note(ABOUT, text)
}

/// The version of this build and of its protocol, for comparison with other machines.
pub(crate) fn version() -> Finding {
    let text = format!(
        "shoal {}, protocol version {}",
        env!("CARGO_PKG_VERSION"),
        limits::PROTOCOL_VERSION
    );
    Finding::well("version", text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    fn seen(address: &str) -> Reported {
        Reported { seen: Some(address.parse().expect("an address")), ..Reported::default() }
    }

    #[test]
    fn the_median_clock_decides() {
        let ours = UnixTime(10_000);
        let text = |clocks: &[u64]| {
            let reports: Vec<Reported> = clocks
                .iter()
                .map(|clock| Reported { clock: Some(UnixTime(*clock)), ..Reported::default() })
                .collect();
            clock(&reports, ours).map(|finding| finding.state)
        };
        assert_eq!(text(&[]), None);
        assert_eq!(text(&[10_001, 9_999, 20_000]), Some(State::Well));
        assert_eq!(text(&[10_030]), Some(State::Note));
        assert_eq!(text(&[12_000, 12_001, 10_000]), Some(State::Wrong));
    }

    #[test]
    fn nat_shows_in_the_addresses_at_which_peers_see_this_machine() {
        let (outward, ports) = ("10.0.0.5".parse().expect("an address"), BTreeSet::from([7410]));
        let text = |reports: &[Reported]| nat(reports, outward, &ports).says;
        assert!(text(&[]).contains("no peer reported"));
        assert!(text(&[seen("10.0.0.5:7410")]).starts_with("none"));
        let one = text(&[seen("192.0.2.1:40000"), seen("192.0.2.1:40000")]);
        assert!(one.contains("the same port for all peers"), "{one}");
        let two = text(&[seen("192.0.2.1:40000"), seen("192.0.2.1:40001")]);
        assert!(two.contains("each peer sees another port"), "{two}");
    }

    #[test]
    fn every_refusal_has_a_fix() {
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
