//! The address of a peer in the form that people pass on: `/ip4/192.0.2.7/tcp/4242/p2p/12D3Koo…`.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use libp2p::Multiaddr;
use libp2p::multiaddr::Protocol;

use crate::ids::PeerId;
use crate::net::identity::peer_of;

/// A host, a port that is the same for TCP and UDP, and the peer there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PeerAddress {
    /// The host.
    pub host: Host,
    /// The TCP and UDP port.
    pub port: u16,
    /// The peer's id.
    pub peer: PeerId,
}

/// An IP address or a name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, bincode::Encode, bincode::Decode)]
pub enum Host {
    /// `/ip4` or `/ip6`.
    Ip(IpAddr),
    /// `/dns4`: resolved to IPv4 addresses on each dial.
    Name(String),
    /// `/dns6`: resolved to IPv6 addresses.
    Name6(String),
    /// `/dns`: resolved to addresses of both kinds.
    AnyName(String),
}

/// The error of an invalid address text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a peer address: it must look like /ip4/192.0.2.7/tcp/4242/p2p/12D3KooW... \
     (or begin with /ip6, /dns, /dns4 or /dns6): {reason}"
)]
pub struct AddressError {
    /// The given text, truncated if it is long.
    pub text: String,
    /// The defect.
    pub reason: String,
}

impl PeerAddress {
    /// A peer at an IP address.
    #[must_use]
    pub fn new(address: SocketAddr, peer: PeerId) -> Self {
        Self { host: Host::Ip(address.ip()), port: address.port(), peer }
    }

    /// The socket addresses: one for an IP address, all resolved ones for a name.
    ///
    /// # Errors
    /// If the name cannot be resolved, or has no address of its kind.
    pub async fn resolve(&self) -> std::io::Result<Vec<SocketAddr>> {
        let (name, kind) = match &self.host {
            Host::Ip(ip) => return Ok(vec![SocketAddr::new(*ip, self.port)]),
            Host::Name(name) => (name, "IPv4 address: write /dns or /dns6"),
            Host::Name6(name) => (name, "IPv6 address: write /dns or /dns4"),
            Host::AnyName(name) => (name, "address"),
        };
        let suits = |address: &SocketAddr| match self.host {
            Host::Name(_) => address.is_ipv4(),
            Host::Name6(_) => address.is_ipv6(),
            Host::Ip(_) | Host::AnyName(_) => true,
        };
        let found = tokio::net::lookup_host((name.as_str(), self.port)).await?;
        let found: Vec<SocketAddr> = found.filter(suits).collect();
        if found.is_empty() {
            let reason = format!("{name} has no {kind}");
            return Err(std::io::Error::new(std::io::ErrorKind::NotFound, reason));
        }
        Ok(found)
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(IpAddr::V4(ip)) => write!(f, "/ip4/{ip}")?,
            Host::Ip(IpAddr::V6(ip)) => write!(f, "/ip6/{ip}")?,
            Host::Name(name) => write!(f, "/dns4/{name}")?,
            Host::Name6(name) => write!(f, "/dns6/{name}")?,
            Host::AnyName(name) => write!(f, "/dns/{name}")?,
        }
        write!(f, "/tcp/{}/p2p/{}", self.port, self.peer)
    }
}

impl FromStr for PeerAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let wrong = |reason: &str| AddressError {
            text: text.chars().take(120).collect(),
            reason: reason.to_owned(),
        };
        if text.len() > 512 {
            return Err(wrong("it is too long"));
        }
        let parsed: Multiaddr = text.parse().map_err(|error| wrong(&format!("{error}")))?;
        let mut parts = parsed.iter();
        let host = match parts.next() {
            Some(Protocol::Ip4(ip)) => Host::Ip(ip.into()),
            Some(Protocol::Ip6(ip)) => Host::Ip(ip.into()),
            Some(Protocol::Dns4(name)) => Host::Name(name.into_owned()),
            Some(Protocol::Dns6(name)) => Host::Name6(name.into_owned()),
            Some(Protocol::Dns(name)) => Host::AnyName(name.into_owned()),
            _ => return Err(wrong("it begins with none of /ip4, /ip6, /dns, /dns4 and /dns6")),
        };
        let Some(Protocol::Tcp(port)) = parts.next() else {
            return Err(wrong("after the host comes /tcp and a port"));
        };
        let Some(Protocol::P2p(peer)) = parts.next() else {
            return Err(wrong("after the port comes /p2p and the peer's id"));
        };
        if parts.next().is_some() {
            return Err(wrong("text follows the peer's id"));
        }
        let peer = peer_of(&peer).ok_or_else(|| wrong("the peer's id is not an ed25519 one"))?;
        Ok(Self { host, port, peer })
    }
}

/// The multiaddr of a TCP socket address.
pub(super) fn multiaddr(address: SocketAddr) -> Multiaddr {
    Multiaddr::from(address.ip()).with(Protocol::Tcp(address.port()))
}

/// IP address and TCP port of a multiaddr that has only these, and optionally a peer id.
pub(super) fn socket_address(address: &Multiaddr) -> Option<SocketAddr> {
    let mut parts = address.iter();
    let ip: IpAddr = match parts.next()? {
        Protocol::Ip4(ip) => ip.into(),
        Protocol::Ip6(ip) => ip.into(),
        _ => return None,
    };
    let Protocol::Tcp(port) = parts.next()? else { return None };
    matches!(parts.next(), None | Some(Protocol::P2p(_))).then(|| SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::Identity;

    #[test]
    fn an_address_reads_back_its_own_text() {
        let peer = Identity::ephemeral().peer_id();
        let name = "seed.example.org";
        let names = ["dns", "dns4", "dns6"].map(|kind| format!("/{kind}/{name}"));
        for host in ["/ip4/192.0.2.7", "/ip6/2001:db8::1"].map(str::to_owned).iter().chain(&names) {
            let text = format!("{host}/tcp/4242/p2p/{peer}");
            let address: PeerAddress = text.parse().expect("valid");
            assert_eq!((address.peer, address.port), (peer, 4242));
            assert_eq!(address.to_string(), text);
        }
    }

    #[test]
    fn an_invalid_address_is_rejected_with_its_defect() {
        let peer = Identity::ephemeral().peer_id();
        for (text, reason) in [
            ("127.0.0.1:4242".to_owned(), "invalid"),
            (format!("/ip4/127.0.0.1/udp/4242/p2p/{peer}"), "/tcp"),
            ("/ip4/127.0.0.1/tcp/4242".to_owned(), "/p2p"),
            (format!("/tcp/4242/p2p/{peer}"), "/ip4"),
            (format!("/ip4/127.0.0.1/tcp/4242/p2p/{peer}/p2p-circuit"), "follows"),
            (format!("/ip4/127.0.0.1/tcp/99999/p2p/{peer}"), "too large"),
            (
                "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
                    .to_owned(),
                "ed25519",
            ),
            ("/".repeat(600), "long"),
        ] {
            let error = text.parse::<PeerAddress>().expect_err("wrong");
            assert!(error.reason.contains(reason), "{error}");
            assert!(error.to_string().len() < 500);
        }
    }

    #[tokio::test]
    async fn names_are_resolved() {
        let peer = Identity::ephemeral().peer_id();
        let local = PeerAddress { host: Host::Name("localhost".to_owned()), port: 7, peer };
        let found = local.resolve().await.expect("localhost resolves");
        assert_eq!(found, [SocketAddr::from(([127, 0, 0, 1], 7))]);
        // Both kinds, where the machine has both.
        let any = PeerAddress { host: Host::AnyName("localhost".to_owned()), ..local.clone() };
        let all = any.resolve().await.expect("localhost resolves");
        assert!(all.contains(&found[0]));
        let v6 = PeerAddress { host: Host::Name6("localhost".to_owned()), ..local.clone() };
        match v6.resolve().await {
            Ok(found) => assert!(found.iter().all(SocketAddr::is_ipv6)),
            Err(error) => assert!(error.to_string().contains("write /dns or /dns4"), "{error}"),
        }
        let nowhere = PeerAddress { host: Host::Name("nowhere.invalid".to_owned()), ..local };
        assert!(nowhere.resolve().await.is_err());
    }
}
