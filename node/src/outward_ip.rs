//! The addresses of this machine as the outside sees them, without a router in between.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// Destinations reserved for documentation (RFC 5737, RFC 3849).
const OUTSIDE_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const OUTSIDE_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);

/// Addresses of one kind that are offered to others. A machine of many bridges has more that nobody outside reaches.
const MOST: usize = 4;

/// Returns the address at which others reach this machine: over IPv4 if it has that, and loopback if it has no network.
pub(crate) fn outward_ip() -> IpAddr {
    let found = outward_ip_of(Ipv4Addr::UNSPECIFIED.into());
    let found = found.or_else(|| outward_ip_of(Ipv6Addr::UNSPECIFIED.into()));
    found.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// Returns the address of the same kind as an unspecified one, if this machine has one: the source of its packets to the
/// outside, or without a default route the first of its networks.
fn outward_ip_of(unspecified: IpAddr) -> Option<IpAddr> {
    outward_ips_of(unspecified).into_iter().next()
}

/// Returns the addresses of the same kind as an unspecified one at which others reach this machine, one for each network:
/// first the source of its packets to the outside, if it has a route there.
pub(crate) fn outward_ips_of(unspecified: IpAddr) -> Vec<IpAddr> {
    let outside = if unspecified.is_ipv4() { OUTSIDE_V4.into() } else { OUTSIDE_V6.into() };
    let same_kind = |ip: &IpAddr| ip.is_ipv4() == unspecified.is_ipv4();
    distinct(routed(unspecified, outside), of_interfaces().into_iter().filter(same_kind))
}

/// The first address and the others, each once, up to a limit.
fn distinct(first: Option<IpAddr>, others: impl Iterator<Item = IpAddr>) -> Vec<IpAddr> {
    let mut found = Vec::new();
    for ip in first.into_iter().chain(others) {
        if found.len() < MOST && !found.contains(&ip) {
            found.push(ip);
        }
    }
    found
}

/// The source address of packets to the outside. It sends nothing: connecting a UDP socket only looks up the route.
fn routed(unspecified: IpAddr, outside: IpAddr) -> Option<IpAddr> {
    let socket = UdpSocket::bind((unspecified, 0)).ok()?;
    socket.connect((outside, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|ip| is_global(*ip))
}

/// The addresses of the interfaces that are up, in their order.
fn of_interfaces() -> Vec<IpAddr> {
    let Ok(interfaces) = getifaddrs() else { return Vec::new() };
    let up = interfaces.filter(|one| one.flags.contains(InterfaceFlags::IFF_UP));
    let ip = |address: nix::sys::socket::SockaddrStorage| {
        let v4 = address.as_sockaddr_in().map(|it| SocketAddr::V4((*it).into()));
        let v6 = || address.as_sockaddr_in6().map(|it| SocketAddr::V6((*it).into()));
        v4.or_else(v6).map(|it| it.ip())
    };
    up.filter_map(|one| one.address.and_then(ip)).filter(|ip| is_global(*ip)).collect()
}

/// Whether an address means the same machine to others of its networks.
fn is_global(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local() && !ip.is_unspecified(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local() && !ip.is_unspecified(),
    }
}

/// Returns the address to listen at by default: every IPv4 address, or every IPv6 one on a machine that has no IPv4.
pub(crate) fn listen_by_default(port: u16) -> SocketAddr {
    let (v4, v6) = (IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED));
    let only_v6 = outward_ip_of(v4).is_none() && outward_ip_of(v6).is_some();
    SocketAddr::new(if only_v6 { v6 } else { v4 }, port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_the_kind_of_the_listener_and_is_no_loopback() {
        for unspecified in [IpAddr::from(Ipv4Addr::UNSPECIFIED), Ipv6Addr::UNSPECIFIED.into()] {
            if let Some(ip) = outward_ip_of(unspecified) {
                assert_eq!(ip.is_ipv4(), unspecified.is_ipv4());
                assert!(is_global(ip), "{ip}");
            }
        }
        assert!(of_interfaces().into_iter().all(is_global));
    }

    #[test]
    fn each_network_is_named_once_and_the_one_with_the_route_first() {
        let ip = |last| IpAddr::from([10, 0, 0, last]);
        assert_eq!(distinct(Some(ip(2)), [ip(1), ip(2), ip(3)].into_iter()), [ip(2), ip(1), ip(3)]);
        assert_eq!(distinct(None, [ip(1), ip(1)].into_iter()), [ip(1)]);
        assert_eq!(distinct(None, (1..100).map(ip)).len(), MOST);
        assert!(distinct(None, std::iter::empty()).is_empty());
    }

    #[test]
    fn addresses_that_mean_nothing_to_others_are_passed_over() {
        for text in ["127.0.0.1", "169.254.3.4", "0.0.0.0", "::1", "fe80::1", "::"] {
            assert!(!is_global(text.parse().expect("an address")), "{text}");
        }
        for text in ["10.0.0.1", "192.0.2.1", "fd00::1", "2001:db8::1"] {
            assert!(is_global(text.parse().expect("an address")), "{text}");
        }
    }
}
