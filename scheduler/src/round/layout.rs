//! Whose part of a stage's vector is what, and in which pieces it travels.

use std::ops::Range;

use shoal_protocol::codec::SumCodec;
use shoal_protocol::frame::Element;
use shoal_protocol::message::Round;
use shoal_protocol::units::Bytes;

use crate::peer::RoundCut;

/// Each member's part of a vector of so many elements: whole blocks in proportion to the weights,
/// in order. A part may be empty. Equal weights are given out where all are zero.
///
/// # Panics
/// When there are no members or the block is empty.
#[must_use]
pub fn shares(elements: usize, weights: &[u32], block_elements: usize) -> Vec<Range<usize>> {
    assert!(!weights.is_empty(), "a round has members");
    assert!(block_elements > 0, "a block has elements");
    let blocks = elements.div_ceil(block_elements) as u128;
    let even = weights.iter().all(|weight| *weight == 0);
    let weight = |index: usize| if even { 1 } else { u128::from(weights[index]) };
    let total: u128 = (0..weights.len()).map(weight).sum();
    let mut start = 0;
    let mut sum = 0;
    let mut shares = Vec::with_capacity(weights.len());
    for index in 0..weights.len() {
        sum += weight(index);
        let end = ((blocks * sum / total) as usize * block_elements).min(elements);
        shares.push(start..end);
        start = end;
    }
    shares
}

/// How the vector of one round is cut, and what its pieces weigh.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    shares: Vec<Range<usize>>,
    piece_elements: usize,
    codec: SumCodec,
}

impl Layout {
    /// That of a stage of so many elements.
    pub(crate) fn new(round: &Round, elements: usize, cut: RoundCut, codec: SumCodec) -> Self {
        let weights: Vec<u32> = round.crew.members.iter().map(|part| part.weight).collect();
        let shares = shares(elements, &weights, cut.block_elements);
        Self { shares, piece_elements: cut.piece_elements, codec }
    }

    /// How many pieces the part of the member at this place has.
    pub(crate) fn pieces(&self, place: usize) -> usize {
        self.shares[place].len().div_ceil(self.piece_elements)
    }

    /// How many pieces there are in all.
    pub(crate) fn all_pieces(&self) -> usize {
        (0..self.shares.len()).map(|place| self.pieces(place)).sum()
    }

    /// The elements of one piece of a member's part.
    pub(crate) fn range(&self, place: usize, piece: usize) -> Range<usize> {
        let share = &self.shares[place];
        let start = share.start + piece * self.piece_elements;
        start..share.end.min(start + self.piece_elements)
    }

    /// What one member's sums of these elements weigh.
    pub(crate) fn part_bytes(&self, range: &Range<usize>) -> Bytes {
        bytes(self.codec.part(), range.len())
    }

    /// What comes back of them weighs.
    pub(crate) fn result_bytes(&self, range: &Range<usize>) -> Bytes {
        bytes(self.codec.result(), range.len())
    }
}

/// The most that one member's sums in one piece weigh.
pub(crate) fn piece_bytes(cut: RoundCut, codec: SumCodec) -> Bytes {
    bytes(codec.part(), cut.piece_elements)
}

fn bytes(element: Element, count: usize) -> Bytes {
    Bytes(element.bytes_of(count as u64).expect("numbers in memory"))
}
