//! A piece of a file as it travels: packed where that makes it arrive sooner.
//!
//! Before the bytes stand how they are packed (u8: 0 not at all, 1 by zstd) and how many there are (u32,
//! little-endian). A piece has its hash whichever way it came: what is checked are the unpacked bytes.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;

use crate::codec::packing::{self, Packing, PackingError};
use crate::codec::{Codec, PackingChoice};
use crate::frame::Element;
use crate::manifest::ChunkPacking;

/// Bytes of a [`Head`].
pub(super) const HEAD: usize = 5;

/// Nearly all that files hold are f32; of others the planes are no worse than none.
const WIDTH: usize = 4;

/// What stands before the bytes of a piece.
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
            Packing::Integers => unreachable!("files hold no sums"),
        };
        [packing, a, b, c, d]
    }

    /// The head of a piece of `wanted` bytes; none where no honest holder says that. What is packed
    /// is smaller.
    pub(super) fn decode([packing, length @ ..]: [u8; HEAD], wanted: usize) -> Option<Self> {
        let length = u32::from_le_bytes(length);
        let packing = match packing {
            0 if length as usize == wanted => Packing::Raw,
            1 if (length as usize) < wanted => Packing::Zstd,
            _ => return None,
        };
        Some(Self { packing, length })
    }

    /// How many bytes come.
    pub(super) fn length(self) -> usize {
        self.length as usize
    }
}

/// A piece as it travels.
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
        let length = u32::try_from(self.bytes.len()).expect("a piece is under its cap");
        Head { packing: self.packing, length }
    }

    /// The `wanted` bytes of the file.
    pub(super) fn unpack(self, wanted: usize) -> Result<Bytes, PackingError> {
        packing::unpack(self.packing, width(wanted), self.bytes, wanted)
    }
}

fn width(length: usize) -> usize {
    if length.is_multiple_of(WIDTH) { WIDTH } else { 1 }
}

/// How the pieces that this peer gives are packed.
#[derive(Debug)]
pub(super) struct PiecePacker(Mutex<(ChunkPacking, PackingChoice)>);

/// Nothing is packed until the run is known, whose manifest says how.
impl Default for PiecePacker {
    fn default() -> Self {
        let choice = PackingChoice::of(Element::Number(Codec::F32));
        Self(Mutex::new((ChunkPacking::None, choice)))
    }
}

impl PiecePacker {
    fn lock(&self) -> MutexGuard<'_, (ChunkPacking, PackingChoice)> {
        // Whoever holds it does no more than calculate.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, packing: ChunkPacking) {
        self.lock().0 = packing;
    }

    /// A piece for a link of so many bytes per second, if that is known.
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
    fn what_no_honest_holder_says_is_refused() {
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
    fn a_piece_that_unpacks_to_more_or_less_is_refused() {
        let piece = || Piece::pack(Packing::Zstd, vec![0; 1 << 20].into());
        assert!(piece().bytes.len() < 1000);
        assert_eq!(piece().unpack(1 << 20).map(|raw| raw.len()), Ok(1 << 20));
        for wanted in [0, 1000, (1 << 20) - 1, (1 << 20) + 1] {
            assert!(piece().unpack(wanted).is_err(), "{wanted}");
        }
    }

    #[test]
    fn auto_packs_for_links_that_are_slow() {
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
        fn a_piece_arrives_as_it_was(
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
