//! Connections to a peer through another one.
//!
//! Two peers without a direct path use QUIC over a relay: their packets travel as datagrams on the
//! connections that both have with a third peer. The relay forwards the packets and cannot decrypt
//! them. To QUIC this is a further socket, whose addresses stand for paths, each a pair of relay
//! and destination. A packet that finds no room, or is too large for the path, is lost like any
//! other.
//!
//! A datagram is a direction byte, a peer id (32 bytes) and the packet. Towards the relay, the id
//! is the destination's; from the relay on, it is the source's.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::{Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes, BytesMut};
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Connection, UdpPoller};
use tokio::sync::mpsc;

use super::traffic::{Counters, Kind};
use crate::ids::PeerId;

/// Maximum number of known paths.
const PATHS: usize = 1 << 16;

/// Maximum number of received packets that wait for QUIC.
const PACKETS: usize = 1024;

/// Maximum number of relays that are tried, the nearest first.
const RELAYS: usize = 3;

/// The first half of the addresses that stand for paths. It is the discard-only prefix (RFC 6666).
const PREFIX: [u16; 4] = [0x100, 0, 0, 0];

const HEADER: usize = 33;
const TO_RELAY: u8 = 0;
const FROM_RELAY: u8 = 1;

/// Whether an address stands for a path through another peer.
pub(super) fn is_path(address: SocketAddr) -> bool {
    matches!(address, SocketAddr::V6(address) if address.ip().segments()[..4] == PREFIX)
}

/// Relay and destination.
type Path = (PeerId, PeerId);

/// The relay of packets, which is also a socket to QUIC.
pub(super) struct Relay {
    /// The direct connections.
    direct: Mutex<BTreeMap<PeerId, Connection>>,
    /// The peers between which packets are relayed, and which may be relays.
    members: Mutex<BTreeSet<PeerId>>,
    routes: Mutex<Routes>,
    packets: mpsc::Sender<(SocketAddr, Bytes)>,
    arrived: Mutex<mpsc::Receiver<(SocketAddr, Bytes)>>,
}

#[derive(Default)]
struct Routes {
    numbers: BTreeMap<Path, u64>,
    all: Vec<Path>,
}

impl Routes {
    /// The address of a path; `None` if there are too many.
    fn address(&mut self, path: Path) -> Option<SocketAddr> {
        let number = match self.numbers.get(&path) {
            Some(number) => *number,
            None if self.all.len() >= PATHS => return None,
            None => {
                let number = self.all.len() as u64;
                self.all.push(path);
                self.numbers.insert(path, number);
                number
            }
        };
        let prefix = PREFIX.iter().fold(0, |bits, part| bits << 16 | u128::from(*part));
        // QUIC rejects a port of 0.
        Some(SocketAddr::from((Ipv6Addr::from_bits(prefix << 64 | u128::from(number)), 1)))
    }

    fn of(&self, address: SocketAddr) -> Option<Path> {
        let SocketAddr::V6(address) = address else { return None };
        let number = address.ip().to_bits() as u64;
        self.all.get(usize::try_from(number).ok()?).copied()
    }
}

impl Relay {
    pub(super) fn new() -> Arc<Self> {
        let (packets, arrived) = mpsc::channel(PACKETS);
        let (direct, members, routes) = (Mutex::default(), Mutex::default(), Mutex::default());
        Arc::new(Self { direct, members, routes, packets, arrived: Mutex::new(arrived) })
    }

    /// Relays packets between these peers, and uses them as relays. Returns those that came and those that went.
    pub(super) fn set_members(&self, members: BTreeSet<PeerId>) -> (Vec<PeerId>, Vec<PeerId>) {
        let mut known = lock(&self.members);
        let came = members.difference(&known).copied().collect();
        let went = known.difference(&members).copied().collect();
        *known = members;
        (came, went)
    }

    /// Whether a peer is a member of the run.
    pub(super) fn is_member(&self, peer: PeerId) -> bool {
        lock(&self.members).contains(&peer)
    }

    /// The number of members.
    pub(super) fn members(&self) -> usize {
        lock(&self.members).len()
    }

    /// A direct connection to a peer is established.
    pub(super) fn connected(&self, peer: PeerId, connection: Connection) {
        lock(&self.direct).insert(peer, connection);
    }

    /// The connection is closed.
    pub(super) fn disconnected(&self, peer: PeerId, connection: &Connection) {
        let mut direct = lock(&self.direct);
        let same = |known: &Connection| known.stable_id() == connection.stable_id();
        if direct.get(&peer).is_some_and(same) {
            direct.remove(&peer);
        }
    }

    /// Paths to a member through connected members.
    pub(super) fn paths_to(&self, peer: PeerId) -> Vec<SocketAddr> {
        let members = lock(&self.members);
        if !members.contains(&peer) {
            return Vec::new();
        }
        let direct = lock(&self.direct);
        let able = direct.iter().filter(|(relay, _)| **relay != peer && members.contains(relay));
        let mut relays: Vec<_> =
            able.map(|(relay, connection)| (connection.rtt(), *relay)).collect();
        relays.sort();
        let mut routes = lock(&self.routes);
        let relays = relays.into_iter().take(RELAYS);
        relays.filter_map(|(_, relay)| routes.address((relay, peer))).collect()
    }

    /// Handles a datagram from a peer: delivers or forwards its packet.
    pub(super) fn datagram(&self, from: PeerId, datagram: &Bytes, counters: &Counters) {
        let Some((direction, id, packet)) = unwrap(datagram) else { return };
        match direction {
            TO_RELAY if [from, id].iter().all(|end| lock(&self.members).contains(end)) => {
                counters.sent(Kind::Relay, packet.len());
                counters.received(Kind::Relay, packet.len());
                self.forward(id, FROM_RELAY, from, &packet);
            }
            FROM_RELAY => {
                if let Some(address) = lock(&self.routes).address((from, id)) {
                    // Without room the packet is lost, as in any queue.
                    let _ = self.packets.try_send((address, packet));
                }
            }
            _ => {}
        }
    }

    /// Forwards a packet to the next peer of its path. A packet that does not fit is lost.
    fn forward(&self, to: PeerId, direction: u8, named: PeerId, packet: &[u8]) {
        let Some(next) = lock(&self.direct).get(&to).cloned() else { return };
        if let Err(error) = next.send_datagram(wrap(direction, named, packet)) {
            tracing::trace!(peer = %to, %error, "a packet was not relayed");
        }
    }
}

/// Encodes a packet as a datagram.
pub(super) fn wrap(direction: u8, named: PeerId, packet: &[u8]) -> Bytes {
    let mut datagram = BytesMut::with_capacity(HEADER + packet.len());
    datagram.put_u8(direction);
    datagram.put_slice(&named.0);
    datagram.put_slice(packet);
    datagram.freeze()
}

/// The direction, id and packet of a datagram.
pub(super) fn unwrap(datagram: &Bytes) -> Option<(u8, PeerId, Bytes)> {
    let (header, _) = datagram.split_first_chunk::<HEADER>()?;
    let id = PeerId(*header.last_chunk().expect("the header ends with an id"));
    Some((header[0], id, datagram.slice(HEADER..)))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").finish_non_exhaustive()
    }
}

impl AsyncUdpSocket for Relay {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(AlwaysWritable)
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let path = lock(&self.routes).of(transmit.destination);
        if let Some((relay, end)) = path {
            self.forward(relay, TO_RELAY, end, transmit.contents);
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut arrived = lock(&self.arrived);
        loop {
            let Poll::Ready(packet) = arrived.poll_recv(context) else { return Poll::Pending };
            let Some((address, packet)) = packet else { return Poll::Pending };
            let (Some(buffer), Some(meta)) = (buffers.first_mut(), meta.first_mut()) else {
                return Poll::Ready(Ok(0));
            };
            // Drops packets that are larger than the transport's maximum.
            if let Some(room) = buffer.get_mut(..packet.len()) {
                room.copy_from_slice(&packet);
                let len = packet.len();
                *meta = RecvMeta { addr: address, len, stride: len, ecn: None, dst_ip: None };
                return Poll::Ready(Ok(1));
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(SocketAddr::from((Ipv6Addr::UNSPECIFIED, 1)))
    }

    fn may_fragment(&self) -> bool {
        false
    }
}

/// Sending never waits: packets without room are lost.
#[derive(Debug)]
struct AlwaysWritable;

impl UdpPoller for AlwaysWritable {
    fn poll_writable(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_stands_for_one_path() {
        let mut routes = Routes::default();
        let [a, b] = [1, 2].map(|name| PeerId([name; 32]));
        let forward = routes.address((a, b)).expect("room");
        let back = routes.address((b, a)).expect("room");
        assert_ne!(forward, back);
        assert_eq!(routes.address((a, b)), Some(forward));
        assert_eq!((routes.of(forward), routes.of(back)), (Some((a, b)), Some((b, a))));
        assert!(is_path(forward) && is_path(back));
        for address in ["127.0.0.1:1", "[::1]:1", "[100:1::1]:1", "[2001:db8::1]:1"] {
            assert!(!is_path(address.parse().expect("an address")), "{address}");
        }
        let unknown = SocketAddr::from((Ipv6Addr::from_bits(0x100 << 112 | 99), 1));
        assert_eq!(routes.of(unknown), None);
    }
}
