//! The messages of a reachability probe: the request, its answer, and the probe datagrams.

use std::net::SocketAddr;

use crate::wire;

/// Distinguishes requested probes from all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) struct Nonce(pub(in super::super) [u8; 16]);

/// Bytes of a [`Request`]. Zeros pad it to be larger than all probes together.
pub(in super::super) const REQUEST: usize = 448;

const PADDING: usize = REQUEST - 16 - 2;

/// Bytes of a [`Probe`].
pub(in super::super) const PROBE: usize = 4 + 16 + 2;

/// Maximum bytes of an encoded [`Answer`].
pub(super) const ANSWER: usize = 64;

/// The first bytes of a probe; no QUIC packet begins with the first of them.
const MARK: [u8; 4] = *b"\x00rng";

/// Requests a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Request {
    pub(in super::super) nonce: Nonce,
    /// The port to probe, besides the port at which the requester is seen.
    pub(in super::super) port: u16,
}

impl Request {
    pub(in super::super) fn encode(self) -> [u8; REQUEST] {
        let mut bytes = [0; REQUEST];
        let (nonce, rest) = bytes.split_first_chunk_mut().expect("its length is larger");
        let (port, _) = rest.split_first_chunk_mut().expect("its length is larger");
        *nonce = self.nonce.0;
        *port = self.port.to_le_bytes();
        bytes
    }

    /// `None` if the port is 0, or the padding is not zero.
    pub(in super::super) fn decode(bytes: &[u8; REQUEST]) -> Option<Self> {
        let (nonce, rest) = bytes.split_first_chunk().expect("its length is larger");
        let (port, padding) = rest.split_first_chunk().expect("its length is larger");
        let port = u16::from_le_bytes(*port);
        (port != 0 && padding == [0; PADDING]).then_some(Self { nonce: Nonce(*nonce), port })
    }
}

/// The answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub(in super::super) enum Answer {
    /// The other end sends probes.
    Probes {
        /// The address at which the other end sees the requester.
        seen: SocketAddr,
    },
    /// The limit of probes is reached.
    Busy,
}

impl Answer {
    pub(in super::super) fn encode(self) -> Vec<u8> {
        wire::encode(&self).expect("it is small")
    }

    pub(in super::super) fn decode(bytes: &[u8]) -> Option<Self> {
        wire::decode(bytes).ok()
    }
}

/// A probe datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Probe {
    pub(in super::super) nonce: Nonce,
    /// The port that it was sent to.
    pub(in super::super) port: u16,
}

impl Probe {
    pub(in super::super) fn encode(self) -> [u8; PROBE] {
        let mut bytes = [0; PROBE];
        let (mark, rest) = bytes.split_first_chunk_mut().expect("its length is larger");
        let (nonce, port) = rest.split_first_chunk_mut().expect("its length is larger");
        *mark = MARK;
        *nonce = self.nonce.0;
        port.copy_from_slice(&self.port.to_le_bytes());
        bytes
    }

    pub(in super::super) fn decode(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(&MARK)?;
        let (nonce, port) = rest.split_first_chunk()?;
        let port = u16::from_le_bytes(port.try_into().ok()?);
        Some(Self { nonce: Nonce(*nonce), port })
    }
}
