//! A piece of a file in transit, packed if that makes it arrive earlier.
//!
//! The bytes are preceded by the packing (u8: 0 none, 1 zstd) and their number (u32,
//! little-endian). The hash of a piece does not depend on the packing: the unpacked bytes are
//! checked.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;

use crate::codec::packing::{self, Packing, PackingError};
use crate::codec::{Codec, PackingChoice};
use crate::frame::Element;
use crate::manifest::ChunkPacking;

/// Bytes of a [`Head`].
pub(super) const HEAD: usize = 5;

/// Element width for zstd's byte planes. Files hold almost only f32; for other data the planes do
/// no harm.
const WIDTH: usize = 4;

/// The header of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    packing: Packing,
    length: u32,
}

impl Head {
    pub(super) fn encode(self) -> [u8; HEAD] {
        let [a, b, c, d] = self.length.to_le_bytes();
        let packing = match self.packing {
            Packing::Raw => 0,
            Packing::Zstd => 1,
            Packing::Integers | Packing::Bits => unreachable!("files hold no sums"),
        };
        [packing, a, b, c, d]
    }

    /// Decodes the head of a piece of `wanted` bytes; `None` if it is invalid. A packed piece must
    /// be smaller than the raw one.
    pub(super) fn decode([packing, length @ ..]: [u8; HEAD], wanted: usize) -> Option<Self> {
        let length = u32::from_le_bytes(length);
        let packing = match packing {
            0 if length as usize == wanted => Packing::Raw,
            1 if (length as usize) < wanted => Packing::Zstd,
            _ => return None,
        };
        Some(Self { packing, length })
    }

    /// Number of bytes that follow.
    pub(super) fn length(self) -> usize {
        self.length as usize
    }
}

/// A piece in transit.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) packing: Packing,
    pub(super) bytes: Bytes,
}

impl Piece {
    pub(super) fn pack(packing: Packing, raw: Bytes) -> Self {
        let (packing, bytes) = packing::pack(packing, width(raw.len()), raw);
        Self { packing, bytes }
    }

    pub(super) fn empty() -> Self {
        Self { packing: Packing::Raw, bytes: Bytes::new() }
    }

    pub(super) fn received(head: Head, bytes: Vec<u8>) -> Self {
        Self { packing: head.packing, bytes: bytes.into() }
    }

    pub(super) fn head(&self) -> Head {
        let length = u32::try_from(self.bytes.len()).expect("a piece is within its limit");
        Head { packing: self.packing, length }
    }

    /// The `wanted` unpacked bytes.
    pub(super) fn unpack(self, wanted: usize) -> Result<Bytes, PackingError> {
        packing::unpack(self.packing, width(wanted), self.bytes, wanted)
    }
}

fn width(length: usize) -> usize {
    if length.is_multiple_of(WIDTH) { WIDTH } else { 1 }
}

/// Selects the packing of the pieces that this peer sends.
#[derive(Debug)]
pub(super) struct PiecePacker(Mutex<(ChunkPacking, PackingChoice)>);

/// Packs nothing until the run's manifest is known.
impl Default for PiecePacker {
    fn default() -> Self {
        let choice = PackingChoice::of(Element::Number(Codec::F32));
        Self(Mutex::new((ChunkPacking::None, choice)))
    }
}

impl PiecePacker {
    fn lock(&self) -> MutexGuard<'_, (ChunkPacking, PackingChoice)> {
        // A poisoned lock is usable: its holders only calculate.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, packing: ChunkPacking) {
        self.lock().0 = packing;
    }

    /// Packs a piece for a link of `rate` bytes per second, if that is known.
    pub(super) fn pack(&self, raw: Bytes, rate: Option<f64>) -> Piece {
        let length = raw.len();
        let packing = {
            let (mode, choice) = &mut *self.lock();
            match mode {
                ChunkPacking::None => Packing::Raw,
                ChunkPacking::Zstd => Packing::Zstd,
                ChunkPacking::Auto => choice.choose(length, rate),
            }
        };
        let begun = Instant::now();
        let piece = Piece::pack(packing, raw);
        if packing != Packing::Raw {
            self.lock().1.learn(packing, length, piece.bytes.len(), begun.elapsed());
        }
        piece
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_invalid_head_is_rejected() {
        let head = |packing, length: u32| {
            let [a, b, c, d] = length.to_le_bytes();
            Head::decode([packing, a, b, c, d], 1000).map(Head::length)
        };
        assert_eq!(head(0, 1000), Some(1000));
        assert_eq!(head(1, 999), Some(999));
        for (packing, length) in [(0, 999), (0, 1001), (1, 1000), (1, u32::MAX), (2, 1000)] {
            assert_eq!(head(packing, length), None, "{packing} {length}");
        }
    }

    #[test]
    fn a_piece_that_unpacks_to_another_length_is_rejected() {
        let piece = || Piece::pack(Packing::Zstd, vec![0; 1 << 20].into());
        assert!(piece().bytes.len() < 1000);
        assert_eq!(piece().unpack(1 << 20).map(|raw| raw.len()), Ok(1 << 20));
        for wanted in [0, 1000, (1 << 20) - 1, (1 << 20) + 1] {
            assert!(piece().unpack(wanted).is_err(), "{wanted}");
        }
    }

    #[test]
    fn auto_packs_for_slow_links() {
        let packer = PiecePacker::default();
        let packed = |rate| packer.pack(vec![0; 1 << 20].into(), rate).packing;
        assert_eq!(packed(Some(1e6)), Packing::Raw, "no run is known");
        packer.set(ChunkPacking::Auto);
        assert_eq!([packed(None), packed(Some(1e9))], [Packing::Raw; 2]);
        assert_eq!(packed(Some(1e6)), Packing::Zstd);
        packer.set(ChunkPacking::Zstd);
        assert_eq!(packed(None), Packing::Zstd);
    }

    proptest! {
        #[test]
        fn a_piece_reads_back(
            raw in prop::collection::vec(0u8..3, 0..3000),
            zstd in any::<bool>(),
        ) {
            let packing = if zstd { Packing::Zstd } else { Packing::Raw };
            let piece = Piece::pack(packing, raw.clone().into());
            let head = Head::decode(piece.head().encode(), raw.len()).expect("honest");
            prop_assert_eq!(head, piece.head());
            let received = Piece::received(head, piece.bytes.to_vec());
            prop_assert_eq!(received.unpack(raw.len()).expect("whole"), raw);
        }
    }
}
