//! Whether other peers can reach this peer's UDP port, and how to fix it if not.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

/// Whether peers that this one never sent to can reach its UDP port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum OwnPort {
    /// No peer outside this machine has probed the port.
    #[default]
    Unknown,
    /// Other peers reach the port.
    Open {
        /// The address that they reach it at.
        at: SocketAddr,
    },
    /// Other peers see this machine at its own address but cannot reach the port: a firewall blocks
    /// it.
    Firewall {
        /// The address that was probed.
        at: SocketAddr,
    },
    /// A router that shows this machine at another address blocks unsolicited packets.
    Router {
        /// The port that was probed.
        port: u16,
        /// The address at which other peers see this machine.
        seen: SocketAddr,
        /// How the router assigns ports.
        mapping: Mapping,
    },
}

/// How a router assigns outside ports to a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mapping {
    /// Only one peer reported the port that it sees.
    Unknown,
    /// All peers see the same port.
    Same,
    /// Each peer sees another port: symmetric NAT.
    ByDestination,
}

/// The range from which an address can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// From this machine.
    Machine,
    /// From a private network, such as that of a home, a cloud or a provider's customers.
    Network,
    /// From the whole internet.
    World,
}

impl Scope {
    /// That of an address.
    #[must_use]
    pub fn of(ip: IpAddr) -> Self {
        match ip.to_canonical() {
            ip if ip.is_loopback() => Self::Machine,
            IpAddr::V4(ip) if ip.is_private() || ip.is_link_local() || is_shared(ip) => {
                Self::Network
            }
            IpAddr::V6(ip) if ip.is_unique_local() || ip.is_unicast_link_local() => Self::Network,
            _ => Self::World,
        }
    }
}

/// Addresses that providers share between their customers (RFC 6598).
fn is_shared(ip: Ipv4Addr) -> bool {
    let [first, second, ..] = ip.octets();
    first == 100 && second & 0xc0 == 64
}

impl OwnPort {
    /// How to make the port reachable, if it is not.
    #[must_use]
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Unknown | Self::Open { .. } => None,
            Self::Firewall { at } => Some(format!(
                "open UDP port {0} in this machine's firewall and in its cloud's security group, and fix \
                 the port with --listen 0.0.0.0:{0}",
                at.port()
            )),
            Self::Router { port, .. } => Some(format!(
                "forward port {port} (UDP and TCP) to this machine at the router, and fix the port with \
                 --listen 0.0.0.0:{port}, or enable UPnP at the router"
            )),
        }
    }

    /// How other peers connect until the port is opened.
    #[must_use]
    pub fn meanwhile(&self) -> &'static str {
        match self {
            Self::Unknown | Self::Open { .. } => "",
            Self::Firewall { .. } | Self::Router { mapping: Mapping::Same, .. } => {
                "until then peers connect by hole punching, or through a relay"
            }
            Self::Router { .. } => {
                "until then peers that this one cannot dial are reached through a relay"
            }
        }
    }

    /// Whether the port is known to be unreachable.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Firewall { .. } | Self::Router { .. })
    }
}

impl fmt::Display for OwnPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => write!(f, "no peer outside this machine has probed it yet"),
            Self::Open { at } => {
                write!(f, "open: others dial in at {at}")?;
                if Scope::of(at.ip()) == Scope::Network {
                    write!(
                        f,
                        ", an address of this network; no peer outside it has probed the port"
                    )?;
                }
                Ok(())
            }
            Self::Firewall { at } => {
                write!(f, "closed: no peer can reach {at} unless this machine sends to it first")
            }
            Self::Router { seen, mapping: Mapping::ByDestination, .. } => write!(
                f,
                "closed: a router shows another port to each peer (symmetric NAT), {seen} to one, and admits \
                 no other peers"
            ),
            Self::Router { seen, .. } => write!(
                f,
                "closed: a router shows this machine at {seen} and admits only peers that it has sent to"
            ),
        }
    }
}
