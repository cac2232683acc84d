//! Classifies the port from the reports of the peers that probed it.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use shoal_formats::own_port::{Mapping, OwnPort, Scope};
use shoal_protocol::net::transport::ProbeReport;

/// The reports that count: those of the peers with the widest view of this machine.
pub(super) fn widest(probe_reports: &[ProbeReport]) -> Vec<&ProbeReport> {
    let scope = |probe_report: &ProbeReport| Scope::of(probe_report.seen.ip());
    let widest = probe_reports.iter().map(scope).max();
    probe_reports.iter().filter(|probe_report| Some(scope(probe_report)) == widest).collect()
}

/// The port's state, for a machine with this address of its own.
pub(crate) fn judge(probe_reports: &[ProbeReport], own: IpAddr) -> OwnPort {
    let probe_reports = widest(probe_reports);
    let Some(last) = probe_reports.last() else { return OwnPort::Unknown };
    let heard = |probe_report: &&ProbeReport, port: u16| {
        probe_report.heard.contains(&port).then_some((probe_report.seen, port))
    };
    let named =
        probe_reports.iter().find_map(|probe_report| heard(probe_report, probe_report.port));
    let open = named.or_else(|| {
        probe_reports.iter().find_map(|probe_report| heard(probe_report, probe_report.seen.port()))
    });
    if let Some((seen, port)) = open {
        return OwnPort::Open { at: SocketAddr::new(seen.ip(), port) };
    }
    let translated = |probe_report: &&&ProbeReport| {
        !is_own(probe_report.seen.ip(), own) || probe_report.seen.port() != probe_report.port
    };
    let Some(first) = probe_reports.iter().find(translated) else {
        return OwnPort::Firewall { at: SocketAddr::new(last.seen.ip(), last.port) };
    };
    let places: BTreeSet<SocketAddr> =
        probe_reports.iter().map(|probe_report| probe_report.seen).collect();
    let mapping = match (probe_reports.len(), places.len()) {
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

    /// A report of a peer that sees this machine at an address, and whose probes reached these ports.
    pub(in super::super) fn probe_report(by: u8, seen: &str, heard: &[u16]) -> ProbeReport {
        ProbeReport {
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
    fn without_reports_the_state_is_unknown() {
        assert_eq!(judge(&[], OWN), OwnPort::Unknown);
    }

    #[test]
    fn a_port_is_open_if_one_probe_arrives() {
        let deaf = probe_report(1, "203.0.113.9:40000", &[]);
        let forwarded = probe_report(2, "203.0.113.9:40000", &[7410]);
        let open = OwnPort::Open { at: at("203.0.113.9:7410") };
        assert_eq!(judge(&[deaf.clone(), forwarded], OWN), open);
        // A full-cone router: it admits packets from everywhere to the outside port.
        let cone = probe_report(2, "203.0.113.9:40000", &[40_000]);
        assert_eq!(judge(&[deaf, cone], OWN), OwnPort::Open { at: at("203.0.113.9:40000") });
    }

    #[test]
    fn a_firewall_shows_the_machine_where_it_is() {
        let probe_reports =
            [probe_report(1, "203.0.113.5:7410", &[]), probe_report(2, "203.0.113.5:7410", &[])];
        assert_eq!(judge(&probe_reports, PUBLIC), OwnPort::Firewall { at: at("203.0.113.5:7410") });
    }

    #[test]
    fn the_mapping_follows_from_the_ports_that_peers_see() {
        let mapping = |probe_reports: &[ProbeReport]| match judge(probe_reports, OWN) {
            OwnPort::Router { mapping, .. } => mapping,
            other => panic!("{other:?}"),
        };
        let first = probe_report(1, "203.0.113.9:40000", &[]);
        assert_eq!(mapping(std::slice::from_ref(&first)), Mapping::Unknown);
        assert_eq!(
            mapping(&[first.clone(), probe_report(2, "203.0.113.9:40000", &[])]),
            Mapping::Same
        );
        let other = probe_report(2, "203.0.113.9:40001", &[]);
        assert_eq!(mapping(&[first, other]), Mapping::ByDestination);
        // The router happens to keep the port and changes the address.
        assert_eq!(mapping(&[probe_report(1, "203.0.113.9:7410", &[])]), Mapping::Unknown);
    }

    #[test]
    fn reports_from_the_widest_scope_decide() {
        let near = probe_report(1, "10.0.0.5:7410", &[7410]);
        assert_eq!(
            judge(std::slice::from_ref(&near), OWN),
            OwnPort::Open { at: at("10.0.0.5:7410") }
        );
        let far = probe_report(2, "203.0.113.9:40000", &[]);
        assert!(judge(&[far, near], OWN).is_closed());
    }
}
