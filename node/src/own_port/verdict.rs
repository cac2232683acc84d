//! What the answers of those who rang come to.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use shoal_protocol::net::transport::Rung;

use crate::status::own_port::{Mapping, OwnPort, Scope};

/// Those answers that count: of peers who see this machine from as far away as any does.
pub(super) fn widest(rungs: &[Rung]) -> Vec<&Rung> {
    let scope = |rung: &Rung| Scope::of(rung.seen.ip());
    let widest = rungs.iter().map(scope).max();
    rungs.iter().filter(|rung| Some(scope(rung)) == widest).collect()
}

/// How the port stands, for a machine with this address of its own.
pub(crate) fn judge(rungs: &[Rung], own: IpAddr) -> OwnPort {
    let rungs = widest(rungs);
    let Some(last) = rungs.last() else { return OwnPort::Unknown };
    let heard = |rung: &&Rung, port: u16| rung.heard.contains(&port).then_some((rung.seen, port));
    let named = rungs.iter().find_map(|rung| heard(rung, rung.port));
    let open = named.or_else(|| rungs.iter().find_map(|rung| heard(rung, rung.seen.port())));
    if let Some((seen, port)) = open {
        return OwnPort::Open { at: SocketAddr::new(seen.ip(), port) };
    }
    let translated = |rung: &&&Rung| !is_own(rung.seen.ip(), own) || rung.seen.port() != rung.port;
    let Some(first) = rungs.iter().find(translated) else {
        return OwnPort::Firewall { at: SocketAddr::new(last.seen.ip(), last.port) };
    };
    let places: BTreeSet<SocketAddr> = rungs.iter().map(|rung| rung.seen).collect();
    let mapping = match (rungs.len(), places.len()) {
        (1, _) => Mapping::Unknown,
        (_, 1) => Mapping::Same,
        _ => Mapping::ByDestination,
    };
    OwnPort::Router { port: first.port, seen: first.seen, mapping }
}

fn is_own(seen: IpAddr, own: IpAddr) -> bool {
    seen.to_canonical() == own.to_canonical() || seen.is_loopback()
}

#[cfg(test)]
pub(super) mod tests {
    use shoal_protocol::ids::PeerId;

    use super::*;

    /// A peer that sees this one there, and rings that were heard.
    pub(in super::super) fn rung(by: u8, seen: &str, heard: &[u16]) -> Rung {
        Rung {
            by: PeerId([by; 32]),
            from: [192, 0, 2, by].into(),
            port: 7410,
            seen: seen.parse().expect("an address"),
            heard: heard.iter().copied().collect(),
        }
    }

    fn at(address: &str) -> SocketAddr {
        address.parse().expect("an address")
    }

    const OWN: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 5));
    const PUBLIC: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 5));

    #[test]
    fn nothing_is_said_where_nobody_was_asked() {
        assert_eq!(judge(&[], OWN), OwnPort::Unknown);
    }

    #[test]
    fn a_port_is_open_where_anybody_is_heard_at() {
        let deaf = rung(1, "203.0.113.9:40000", &[]);
        let forwarded = rung(2, "203.0.113.9:40000", &[7410]);
        let open = OwnPort::Open { at: at("203.0.113.9:7410") };
        assert_eq!(judge(&[deaf.clone(), forwarded], OWN), open);
        // A router that lets in everybody where it shows the machine.
        let cone = rung(2, "203.0.113.9:40000", &[40_000]);
        assert_eq!(judge(&[deaf, cone], OWN), OwnPort::Open { at: at("203.0.113.9:40000") });
    }

    #[test]
    fn a_firewall_shows_the_machine_where_it_is() {
        let rungs = [rung(1, "203.0.113.5:7410", &[]), rung(2, "203.0.113.5:7410", &[])];
        assert_eq!(judge(&rungs, PUBLIC), OwnPort::Firewall { at: at("203.0.113.5:7410") });
    }

    #[test]
    fn routers_differ_by_what_they_show_to_whom() {
        let mapping = |rungs: &[Rung]| match judge(rungs, OWN) {
            OwnPort::Router { mapping, .. } => mapping,
            other => panic!("{other:?}"),
        };
        let first = rung(1, "203.0.113.9:40000", &[]);
        assert_eq!(mapping(std::slice::from_ref(&first)), Mapping::Unknown);
        assert_eq!(mapping(&[first.clone(), rung(2, "203.0.113.9:40000", &[])]), Mapping::Same);
        let other = rung(2, "203.0.113.9:40001", &[]);
        assert_eq!(mapping(&[first, other]), Mapping::ByDestination);
        // The same port by chance, and another address.
        assert_eq!(mapping(&[rung(1, "203.0.113.9:7410", &[])]), Mapping::Unknown);
    }

    #[test]
    fn who_sees_from_further_away_is_believed() {
        let near = rung(1, "10.0.0.5:7410", &[7410]);
        assert_eq!(
            judge(std::slice::from_ref(&near), OWN),
            OwnPort::Open { at: at("10.0.0.5:7410") }
        );
        let far = rung(2, "203.0.113.9:40000", &[]);
        assert!(judge(&[far, near], OWN).is_closed());
    }
}
