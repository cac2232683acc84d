//! Checks of the ports that a peer listens on.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, UdpSocket};

use super::Finding;

/// The user of the data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// No process.
    None,
    /// A running peer.
    Peer,
}

/// Checks that the listen addresses are free.
pub(crate) fn ports(listen: &[SocketAddr], owner: Owner) -> Vec<Finding> {
    let both = |address: &SocketAddr| {
        [
            port("TCP", *address, TcpListener::bind(address).err(), owner),
            port("UDP", *address, UdpSocket::bind(address).err(), owner),
        ]
    };
    listen.iter().flat_map(both).collect()
}

fn port(kind: &str, address: SocketAddr, failure: Option<std::io::Error>, owner: Owner) -> Finding {
    let about = format!("{kind} port");
    let Some(error) = failure else {
        return Finding::well(&about, format!("{address} is free"));
    };
    match error.kind() {
        ErrorKind::AddrInUse if owner == Owner::Peer => {
            Finding::note(&about, format!("{address} is in use, presumably by the running peer"))
        }
        ErrorKind::AddrInUse => Finding::wrong(
            &about,
            format!("{address} is in use"),
            format!(
                "stop the program that uses it (`ss -{}lpn sport = :{}` shows it), or choose another --listen",
                kind.chars().next().unwrap_or('t').to_ascii_lowercase(),
                address.port()
            ),
        ),
        ErrorKind::PermissionDenied => Finding::wrong(
            &about,
            format!("{address}: {error}"),
            "choose a --listen with a port of 1024 or above",
        ),
        ErrorKind::AddrNotAvailable => Finding::wrong(
            &about,
            format!("{address} is no address of this machine"),
            "use 0.0.0.0, or an address that `ip address` lists",
        ),
        _ => Finding::wrong(&about, format!("{address}: {error}"), "choose another --listen"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn a_port_in_use_is_judged_by_protocol_and_owner() {
        let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = taken.local_addr().expect("bound");
        let found = ports(&[address], Owner::None);
        assert_eq!(found[0].state, State::Wrong);
        assert!(found[0].fix.as_ref().is_some_and(|fix| fix.contains("ss -tlpn")), "{found:?}");
        assert_eq!(found[1].state, State::Well, "the UDP port is free");
        assert_eq!(ports(&[address], Owner::Peer)[0].state, State::Note);
        let elsewhere = ports(&[SocketAddr::from(([192, 0, 2, 1], 0))], Owner::None);
        assert!(
            elsewhere.iter().all(|finding| finding.says.contains("no address of this machine"))
        );
    }
}
