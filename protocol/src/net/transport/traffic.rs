//! How many bytes went which way.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use quinn::Connection;

use super::congestion;
use crate::codec::packing::Packing;
use crate::units::Bytes;

/// What bytes were for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Control messages and handshakes.
    Control,
    /// Tensors with their tags and headers.
    Tensor,
    /// Files fetched by their hash.
    File,
    /// Packets passed on between others.
    Relay,
}

/// Bytes since the transport was bound, by kind. What QUIC adds is not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Control messages and handshakes.
    pub control: Flow,
    /// Tensors with their tags and headers.
    pub tensor: Flow,
    /// Files fetched by their hash.
    pub file: Flow,
    /// Packets passed on between others.
    pub relay: Flow,
    /// Files that were fetched and thrown away, since their bytes had another hash.
    pub wrong_files: u64,
    /// Pieces of files that were sent as they are, and packed.
    pub pieces: Pieces,
    /// What it took in packets, as of when [`Transport::ways`](super::Transport::ways) was asked last.
    pub packets: Packets,
}

/// How many pieces of files were sent which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pieces {
    /// As they are.
    pub raw: u64,
    /// By zstd.
    pub zstd: u64,
}

/// Bytes in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flow {
    /// Handed to the connection.
    pub sent: Bytes,
    /// Taken from it.
    pub received: Bytes,
}

/// What a connection shows of the way to its other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathStats {
    /// Whether it leads through another peer.
    pub relayed: bool,
    /// The smoothed round trip.
    pub round_trip: Duration,
    /// The shortest one, where what steers the window knows it, else the same.
    pub shortest_round_trip: Duration,
    /// What may be on its way at once.
    pub window: Bytes,
    /// What went over it since it was established.
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

/// QUIC's packets. Those that carry others', for two peers without a way between them, count as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Packets {
    /// Sent, those with something sent again included.
    pub sent: u64,
    /// Taken for lost.
    pub lost: u64,
    /// Bytes of those, nearly all of which are sent a second time.
    pub lost_bytes: Bytes,
}

/// The running counts.
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

    /// A fetched file had another hash than the one it was asked for by.
    pub(super) fn wrong_file(&self) {
        self.wrong_files.fetch_add(1, Ordering::Relaxed);
    }

    /// A piece of a file was sent.
    pub(super) fn piece(&self, packing: Packing) {
        let pieces = match packing {
            Packing::Zstd => &self.zstd_pieces,
            Packing::Raw | Packing::Integers => &self.raw_pieces,
        };
        pieces.fetch_add(1, Ordering::Relaxed);
    }

    /// More packets than were counted before.
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
