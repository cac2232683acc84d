//! How many bytes went which way.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::units::Bytes;

/// What bytes were for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Control messages and handshakes.
    Control,
    /// Tensors with their tags and headers.
    Tensor,
    /// Files fetched by their hash.
    Blob,
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
    pub blob: Flow,
    /// Packets passed on between others.
    pub relay: Flow,
    /// Files that were fetched and thrown away, since their bytes had another hash.
    pub wrong_files: u64,
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
pub struct Way {
    /// The smoothed round trip.
    pub round_trip: Duration,
    /// What may be on its way at once.
    pub window: Bytes,
    /// Packets sent, those sent again included.
    pub sent_packets: u64,
    /// Packets taken for lost, whose content was sent again.
    pub lost_packets: u64,
}

/// The running counts.
#[derive(Debug, Default)]
pub(super) struct Counters {
    bytes: [[AtomicU64; 2]; 4],
    wrong_files: AtomicU64,
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
            blob: flow(Kind::Blob),
            relay: flow(Kind::Relay),
            wrong_files: self.wrong_files.load(Ordering::Relaxed),
        }
    }
}
