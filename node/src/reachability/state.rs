//! Whether others get through to this peer's own UDP port, as it is shown and told.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

/// How a peer's own UDP port stands to those whom it never sent to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum OwnPort {
    /// Nobody was asked, or nobody elsewhere.
    #[default]
    Unknown,
    /// They get through.
    Open {
        /// Where.
        at: SocketAddr,
    },
    /// They do not, though others see this machine at its own address: a firewall is in between.
    Firewall {
        /// Where they were expected.
        at: SocketAddr,
    },
    /// They do not get past a router that shows this machine at an address of its own.
    Router {
        /// The port that they tried.
        port: u16,
        /// Where others see this machine.
        seen: SocketAddr,
        /// Where others do.
        mapping: Mapping,
    },
}

/// At which port a router shows a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mapping {
    /// Only one peer said where it sees it.
    Unknown,
    /// All see the same one.
    Same,
    /// Each sees another: symmetric NAT.
    ByDestination,
}

/// From how far an address can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scope {
    /// From this machine.
    Machine,
    /// From a network of its own, as of a home, a cloud or a provider's customers.
    Network,
    /// From everywhere.
    World,
}

impl Scope {
    pub(crate) fn of(ip: IpAddr) -> Self {
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
    /// What to do about it, where something can be done.
    #[must_use]
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Unknown | Self::Open { .. } => None,
            Self::Firewall { at } => Some(format!(
                "open UDP port {0} in this machine's firewall and in its cloud's security group, and keep it \
                 (--listen 0.0.0.0:{0})",
                at.port()
            )),
            Self::Router { port, .. } => Some(format!(
                "forward port {port} (UDP and TCP) to this machine at the router, and keep it (--listen \
                 0.0.0.0:{port}), or allow UPnP there"
            )),
        }
    }

    /// What the run does while that is not done.
    #[must_use]
    pub fn meanwhile(&self) -> &'static str {
        match self {
            Self::Unknown | Self::Open { .. } => "",
            Self::Firewall { .. } | Self::Router { mapping: Mapping::Same, .. } => {
                "until then peers meet by knocking at once, or through a third peer"
            }
            Self::Router { .. } => {
                "until then peers whom this one cannot dial are met through a third peer"
            }
        }
    }

    /// Whether something should be done about it.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Firewall { .. } | Self::Router { .. })
    }
}

impl fmt::Display for OwnPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => write!(f, "nobody elsewhere was asked yet"),
            Self::Open { at } => {
                write!(f, "open: others dial in at {at}")?;
                if Scope::of(at.ip()) == Scope::Network {
                    write!(f, ", an address of this network; nobody outside it was asked")?;
                }
                Ok(())
            }
            Self::Firewall { at } => {
                write!(f, "closed: nobody whom this machine did not send to gets through to {at}")
            }
            Self::Router { seen, mapping: Mapping::ByDestination, .. } => write!(
                f,
                "closed: a router shows every peer another port (symmetric NAT), as {seen}, and lets in no \
                 others"
            ),
            Self::Router { seen, .. } => write!(
                f,
                "closed: a router shows this machine at {seen} and lets in only whom it sent to"
            ),
        }
    }
}
