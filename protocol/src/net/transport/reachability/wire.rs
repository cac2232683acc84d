//! What is said for it: the request, its answer, and the datagrams that ring.

use std::net::SocketAddr;

use crate::wire;

/// What tells rings that were asked for from any others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) struct Nonce(pub(in super::super) [u8; 16]);

/// Bytes of a [`Request`]: so many zeros follow that it is larger than all rings.
pub(in super::super) const REQUEST: usize = 448;

const PADDING: usize = REQUEST - 16 - 2;

/// Bytes of a [`Probe`].
pub(in super::super) const RING: usize = 4 + 16 + 2;

/// Bytes of an encoded [`Answer`] at most.
pub(super) const ANSWER: usize = 64;

/// How a ring begins: the first byte is one that no packet of QUIC has.
const MARK: [u8; 4] = *b"\x00rng";

/// Asks to be rung at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Request {
    pub(in super::super) nonce: Nonce,
    /// Where, beside the port that the asker is seen at.
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

    /// None where it has no port, or something else than zeros at the end.
    pub(in super::super) fn decode(bytes: &[u8; REQUEST]) -> Option<Self> {
        let (nonce, rest) = bytes.split_first_chunk().expect("its length is larger");
        let (port, padding) = rest.split_first_chunk().expect("its length is larger");
        let port = u16::from_le_bytes(*port);
        (port != 0 && padding == [0; PADDING]).then_some(Self { nonce: Nonce(*nonce), port })
    }
}

/// What the other end says to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub(in super::super) enum Answer {
    /// It rings.
    Probes {
        /// Where it sees the asker.
        seen: SocketAddr,
    },
    /// Not now.
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

/// A datagram that rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Probe {
    pub(in super::super) nonce: Nonce,
    /// Where it was sent to.
    pub(in super::super) port: u16,
}

impl Probe {
    pub(in super::super) fn encode(self) -> [u8; RING] {
        let mut bytes = [0; RING];
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
