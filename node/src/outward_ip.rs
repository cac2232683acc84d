//! The address of this machine as the outside sees it, without a router in between.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

/// Returns the source address of this machine's packets to the outside. It sends nothing: connecting
/// a UDP socket only looks up the route. The destination is reserved for documentation (RFC 5737).
pub(crate) fn outward_ip() -> IpAddr {
    UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))
        .and_then(|socket| {
            socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
            socket.local_addr()
        })
        .map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |address: SocketAddr| address.ip())
}
