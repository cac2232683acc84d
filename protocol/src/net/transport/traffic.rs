//! Counters of bytes and packets.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use quinn::Connection;

use super::congestion;
use crate::codec::packing::Packing;
use crate::units::Bytes;

/// The purpose of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Control messages and handshakes.
    Control,
    /// Tensors with their tags and headers.
    Tensor,
    /// Files fetched by their hash.
    File,
    /// Packets relayed between other peers.
    Relay,
}

/// Bytes since the transport was bound, by purpose, without QUIC's overhead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Control messages and handshakes.
    pub control: Flow,
    /// Tensors with their tags and headers.
    pub tensor: Flow,
    /// Files fetched by their hash.
    pub file: Flow,
    /// Packets relayed between other peers.
    pub relay: Flow,
    /// Fetched files that were discarded because their hash was wrong.
    pub wrong_files: u64,
    /// File pieces sent, by packing.
    pub pieces: Pieces,
    /// Packets of all connections, as of the last call of
    /// [`Transport::paths`](super::Transport::paths).
    pub packets: Packets,
}

/// Number of file pieces sent, by packing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pieces {
    /// Sent unpacked.
    pub raw: u64,
    /// Packed by zstd.
    pub zstd: u64,
}

/// Bytes in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flow {
    /// Bytes written to connections.
    pub sent: Bytes,
    /// Bytes read from connections.
    pub received: Bytes,
}

/// The properties of a connection's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathStats {
    /// Whether the path leads through another peer.
    pub relayed: bool,
    /// The smoothed round trip.
    pub round_trip: Duration,
    /// The shortest round trip; the smoothed one if the congestion controller does not record it.
    pub shortest_round_trip: Duration,
    /// The congestion window: bytes that may be in flight.
    pub window: Bytes,
    /// Packets since the connection was established.
    pub packets: Packets,
}

impl PathStats {
    pub(super) fn of(connection: &Connection, relayed: bool) -> Self {
        let path = connection.stats().path;
        let packets = Packets {
            sent: path.sent_packets,
            lost: path.lost_packets,
            lost_bytes: Bytes(path.lost_bytes),
        };
        let shortest_round_trip = congestion::shortest_round_trip(connection).unwrap_or(path.rtt);
        let window = Bytes(path.cwnd);
        Self { relayed, round_trip: path.rtt, shortest_round_trip, window, packets }
    }
}

/// QUIC packets. Packets that carry relayed packets of other peers count as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Packets {
    /// Packets sent, including retransmissions.
    pub sent: u64,
    /// Packets declared lost.
    pub lost: u64,
    /// Bytes of the lost packets, nearly all of which are sent again.
    pub lost_bytes: Bytes,
}

/// The live counters.
#[derive(Debug, Default)]
pub(super) struct Counters {
    bytes: [[AtomicU64; 2]; 4],
    wrong_files: AtomicU64,
    packets: [AtomicU64; 3],
    raw_pieces: AtomicU64,
    zstd_pieces: AtomicU64,
}

impl Counters {
    pub(super) fn sent(&self, kind: Kind, bytes: usize) {
        self.bytes[kind as usize][0].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn received(&self, kind: Kind, bytes: usize) {
        self.bytes[kind as usize][1].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a fetched file with a wrong hash.
    pub(super) fn wrong_file(&self) {
        self.wrong_files.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a sent piece of a file.
    pub(super) fn piece(&self, packing: Packing) {
        let pieces = match packing {
            Packing::Zstd => &self.zstd_pieces,
            Packing::Raw | Packing::Integers | Packing::Bits => &self.raw_pieces,
        };
        pieces.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds the packets since an earlier reading.
    pub(super) fn packets(&self, now: Packets, before: Packets) {
        let more = [
            now.sent - before.sent,
            now.lost - before.lost,
            (now.lost_bytes - before.lost_bytes).0,
        ];
        for (counted, more) in self.packets.iter().zip(more) {
            counted.fetch_add(more, Ordering::Relaxed);
        }
    }

    pub(super) fn read(&self) -> Traffic {
        let flow = |kind: Kind| {
            let [sent, received] = &self.bytes[kind as usize];
            Flow {
                sent: Bytes(sent.load(Ordering::Relaxed)),
                received: Bytes(received.load(Ordering::Relaxed)),
            }
        };
        Traffic {
            control: flow(Kind::Control),
            tensor: flow(Kind::Tensor),
            file: flow(Kind::File),
            relay: flow(Kind::Relay),
            wrong_files: self.wrong_files.load(Ordering::Relaxed),
            pieces: Pieces {
                raw: self.raw_pieces.load(Ordering::Relaxed),
                zstd: self.zstd_pieces.load(Ordering::Relaxed),
            },
            packets: {
                let [sent, lost, bytes] = &self.packets;
                Packets {
                    sent: sent.load(Ordering::Relaxed),
                    lost: lost.load(Ordering::Relaxed),
                    lost_bytes: Bytes(bytes.load(Ordering::Relaxed)),
                }
            },
        }
    }
}
