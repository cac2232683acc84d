//! Assigns the parts of a stage's vector to members and cuts them into pieces.

use std::ops::Range;

use shoal_protocol::codec::SumCodec;
use shoal_protocol::frame::Element;
use shoal_protocol::message::{Round, RoundGroup};
use shoal_protocol::units::Bytes;

use crate::peer::RoundCut;

/// These weights, or equal ones if all are zero.
fn not_all_zero(weights: &[u32]) -> Vec<u128> {
    let even = weights.iter().all(|weight| *weight == 0);
    weights.iter().map(|weight| if even { 1 } else { u128::from(*weight) }).collect()
}

/// Number of blocks that each member reduces, in proportion to the weights; equal numbers if all
/// weights are zero.
///
/// # Panics
/// If there are no members.
fn shares(blocks: usize, weights: &[u32]) -> Vec<usize> {
    assert!(!weights.is_empty(), "a round has members");
    let weights = not_all_zero(weights);
    let total: u128 = weights.iter().sum();
    let (mut sum, mut given) = (0, 0);
    let share = |weight: &u128| {
        sum += weight;
        let upto = (blocks as u128 * sum / total) as usize;
        upto - std::mem::replace(&mut given, upto)
    };
    weights.iter().map(share).collect()
}

/// The place with the smallest ratio of `has` to `due`. It is compared by cross-multiplication,
/// which is exact and therefore the same on every peer.
fn least(
    places: impl Iterator<Item = usize>,
    has: impl Fn(usize) -> u128,
    due: impl Fn(usize) -> u128,
) -> Option<usize> {
    places.min_by(|one, other| (has(*one) * due(*other)).cmp(&(has(*other) * due(*one))))
}

/// The pieces of a vector that each member reduces, in order. They are whole blocks, except at the
/// end of the vector, of at most `piece_elements` elements. Each piece goes to the member that has
/// the least of its share so far: this spreads layers whose sums pack badly over all members.
fn deal(elements: usize, weights: &[u32], cut: RoundCut) -> Vec<Vec<Range<usize>>> {
    let RoundCut { block_elements, piece_elements } = cut;
    assert!(block_elements > 0, "a block has elements");
    let piece = (piece_elements / block_elements).max(1);
    let shares = shares(elements.div_ceil(block_elements), weights);
    let mut dealt = vec![0; shares.len()];
    let mut pieces = vec![Vec::new(); shares.len()];
    let mut start = 0;
    while start < elements {
        let open = (0..shares.len()).filter(|place| dealt[*place] < shares[*place]);
        let place = least(open, |place| dealt[place] as u128, |place| shares[place] as u128);
        let place = place.expect("the shares are the whole");
        let blocks = piece.min(shares[place] - dealt[place]);
        let end = elements.min(start + blocks * block_elements);
        dealt[place] += blocks;
        pieces[place].push(start..end);
        start = end;
    }
    pieces
}

/// The layout of one round's vector: its pieces and their sizes.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// Each member's pieces, by its place.
    pieces: Vec<Vec<Range<usize>>>,
    codec: SumCodec,
}

impl Layout {
    /// The layout for a stage of `elements` elements.
    pub(crate) fn new(round: &Round, elements: usize, cut: RoundCut, codec: SumCodec) -> Self {
        let weights: Vec<u32> = round.group.members.iter().map(|part| part.weight).collect();
        Self { pieces: deal(elements, &weights, cut), codec }
    }

    /// The layout without the members at the places `gone`, in order. Each of their pieces goes to
    /// the remaining member that has the least for its weight, and is appended to its pieces.
    pub(crate) fn without(&self, gone: &[usize], left: &RoundGroup) -> Self {
        let weights: Vec<u32> = left.members.iter().map(|part| part.weight).collect();
        Self { pieces: self.dealt_anew(gone, &weights), codec: self.codec }
    }

    fn dealt_anew(&self, gone: &[usize], weights: &[u32]) -> Vec<Vec<Range<usize>>> {
        let is_gone = |place: &usize| gone.binary_search(place).is_ok();
        let (lost, left): (Vec<usize>, Vec<usize>) = (0..self.pieces.len()).partition(is_gone);
        let mut pieces: Vec<Vec<Range<usize>>> =
            left.into_iter().map(|place| self.pieces[place].clone()).collect();
        let mut lost: Vec<Range<usize>> =
            lost.into_iter().flat_map(|place| self.pieces[place].iter().cloned()).collect();
        lost.sort_by_key(|piece| piece.start);
        let weights = not_all_zero(weights);
        let elements = |own: &Vec<Range<usize>>| own.iter().map(|piece| piece.len() as u128).sum();
        let mut has: Vec<u128> = pieces.iter().map(elements).collect();
        for piece in lost {
            let open = (0..pieces.len()).filter(|place| weights[*place] > 0);
            let place = least(open, |place| has[place], |place| weights[place]);
            let place = place.expect("a member remains");
            has[place] += piece.len() as u128;
            pieces[place].push(piece);
        }
        pieces
    }

    /// Number of pieces of the member at this place.
    pub(crate) fn pieces(&self, place: usize) -> usize {
        self.pieces[place].len()
    }

    /// Number of pieces of all members.
    pub(crate) fn all_pieces(&self) -> usize {
        self.pieces.iter().map(Vec::len).sum()
    }

    /// The elements of one piece of a member's part.
    pub(crate) fn range(&self, place: usize, piece: usize) -> Range<usize> {
        self.pieces[place][piece].clone()
    }

    /// The first elements of a member's pieces.
    pub(crate) fn starts(&self, place: usize) -> impl Iterator<Item = usize> + '_ {
        self.pieces[place].iter().map(|piece| piece.start)
    }

    /// Size of one member's sums of these elements.
    pub(crate) fn part_bytes(&self, range: &Range<usize>) -> Bytes {
        bytes(self.codec.part(), range.len())
    }

    /// Size of the result of these elements.
    pub(crate) fn result_bytes(&self, range: &Range<usize>) -> Bytes {
        bytes(self.codec.result(), range.len())
    }
}

/// Maximum size of one member's sums in one piece.
pub(crate) fn piece_bytes(cut: RoundCut, codec: SumCodec) -> Bytes {
    bytes(codec.part(), cut.piece_elements)
}

fn bytes(element: Element, count: usize) -> Bytes {
    Bytes(element.bytes_of(count as u64).expect("numbers in memory"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(block_elements: usize, piece_elements: usize) -> RoundCut {
        RoundCut { block_elements, piece_elements }
    }

    /// The owner of each piece in the vector's order: place, first element, end.
    fn dealt(elements: usize, weights: &[u32], cut: RoundCut) -> Vec<(usize, usize, usize)> {
        let pieces = deal(elements, weights, cut).into_iter().enumerate();
        let mut all: Vec<_> = pieces
            .flat_map(|(place, own)| {
                own.into_iter().map(move |piece| (place, piece.start, piece.end))
            })
            .collect();
        all.sort_by_key(|(_, start, _)| *start);
        all
    }

    #[test]
    fn pieces_go_to_the_member_with_the_least_of_its_share() {
        let of_two = [(0, 0, 4), (1, 4, 8), (0, 8, 10), (1, 10, 12)];
        assert_eq!(dealt(12, &[1, 1], cut(2, 4)), of_two);
        let places = dealt(16, &[1, 2, 1], cut(1, 2)).into_iter().map(|(place, ..)| place);
        assert_eq!(places.collect::<Vec<_>>(), [0, 1, 2, 1, 0, 1, 2, 1]);
        assert_eq!(dealt(5, &[1, 1, 1], cut(4, 4)), [(1, 0, 4), (2, 4, 5)]);
        assert_eq!(dealt(4, &[0, 0], cut(1, 8)), [(0, 0, 2), (1, 2, 4)]);
        assert_eq!(dealt(4, &[0, 3], cut(1, 8)), [(1, 0, 4)]);
        assert_eq!(dealt(0, &[1, 1], cut(8, 8)), []);
    }

    #[test]
    fn pieces_of_lost_members_go_to_the_members_with_the_least() {
        let layout = Layout { pieces: deal(24, &[2, 1, 1, 2], cut(1, 2)), codec: SumCodec::Exact };
        let before = layout.pieces.clone();
        let mended = layout.dealt_anew(&[1], &[2, 1, 2]);
        assert_eq!(mended[1][..before[2].len()], before[2]);
        let owned = |place: usize| mended[place].iter().map(Range::len).sum::<usize>();
        assert_eq!((0..3).map(owned).collect::<Vec<_>>(), [10, 6, 8]);
        let last = Layout { pieces: mended, codec: SumCodec::Exact }.dealt_anew(&[0, 1], &[0]);
        assert_eq!(last[0].len(), before.iter().flatten().count());
    }

    proptest! {
        #[test]
        fn without_some_members_the_others_keep_their_pieces_and_get_the_rest(
            elements in 1usize..50_000,
            weights in prop::collection::vec(0u32..1000, 2..20),
            gone in prop::collection::btree_set(0usize..20, 1..6),
        ) {
            let gone: Vec<usize> = gone.into_iter().filter(|place| *place < weights.len()).collect();
            prop_assume!(gone.len() < weights.len());
            let pieces = deal(elements, &weights, cut(16, 64));
            let layout = Layout { pieces: pieces.clone(), codec: SumCodec::Exact };
            let left: Vec<usize> = (0..weights.len()).filter(|place| !gone.contains(place)).collect();
            let of_left: Vec<u32> = left.iter().map(|place| weights[*place]).collect();
            let mended = layout.dealt_anew(&gone, &of_left);
            for (own, place) in mended.iter().zip(&left) {
                prop_assert!(own.starts_with(&pieces[*place]));
            }
            let sorted = |pieces: &[Vec<Range<usize>>]| {
                let mut all: Vec<_> = pieces.iter().flatten().map(|one| (one.start, one.end)).collect();
                all.sort_unstable();
                all
            };
            prop_assert_eq!(sorted(&mended), sorted(&pieces));
        }

        #[test]
        fn pieces_cover_everything_once_in_whole_blocks(
            elements in 0usize..100_000,
            weights in prop::collection::vec(0u32..1000, 1..20),
            block in 1usize..3000,
            blocks in 1usize..5,
        ) {
            let owned = deal(elements, &weights, cut(block, blocks * block));
            let mut all: Vec<Range<usize>> = owned.iter().flatten().cloned().collect();
            all.sort_by_key(|piece| piece.start);
            let mut end = 0;
            for piece in &all {
                prop_assert_eq!(piece.start, end);
                prop_assert!(!piece.is_empty() && piece.len() <= blocks * block);
                prop_assert!(piece.start.is_multiple_of(block));
                end = piece.end;
            }
            prop_assert_eq!(end, elements);
            let total: u32 = weights.iter().sum();
            for (pieces, weight) in owned.iter().zip(&weights).filter(|_| total > 0) {
                prop_assert!(pieces.is_sorted_by_key(|piece| piece.start));
                let exact = elements as f64 * f64::from(*weight) / f64::from(total);
                let len: usize = pieces.iter().map(Range::len).sum();
                prop_assert!((len as f64 - exact).abs() <= 2.0 * block as f64);
            }
        }
    }
}
