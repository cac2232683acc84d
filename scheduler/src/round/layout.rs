//! Assigns the parts of a stage's vector to members, cuts them into pieces, and gives each piece its tree.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use shoal_protocol::codec::SumCodec;
use shoal_protocol::frame::Element;
use shoal_protocol::message::{OWNER_GROUPS, Round};
use shoal_protocol::units::Bytes;

use super::islands::Islands;
use super::place_in;
use crate::action::Owned;
use crate::round::RoundCut;

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

/// The pieces of a vector in its order, each with the place of its owner. They are whole blocks, except at the
/// end of the vector, of at most `piece_elements` elements. Each piece goes to the member that has
/// the least of its share so far: this spreads layers whose sums pack badly over all members.
fn deal(elements: usize, weights: &[u32], cut: RoundCut) -> Vec<(Range<usize>, usize)> {
    let RoundCut { block_elements, piece_elements } = cut;
    assert!(block_elements > 0, "a block has elements");
    let piece = (piece_elements / block_elements).max(1);
    let shares = shares(elements.div_ceil(block_elements), weights);
    let mut dealt = vec![0; shares.len()];
    let mut pieces = Vec::new();
    let mut start = 0;
    while start < elements {
        let open = (0..shares.len()).filter(|place| dealt[*place] < shares[*place]);
        let place = least(open, |place| dealt[place] as u128, |place| shares[place] as u128);
        let place = place.expect("the shares are the whole");
        let blocks = piece.min(shares[place] - dealt[place]);
        let end = elements.min(start + blocks * block_elements);
        dealt[place] += blocks;
        pieces.push((start..end, place));
        start = end;
    }
    pieces
}

/// One piece of the vector.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    range: Range<usize>,
    /// The place of the member that reduces it.
    owner: usize,
    /// The place of the member of each island of several that sums the island's integers: in the owner's island
    /// the owner.
    collectors: Vec<u16>,
}

/// The layout of one round's vector: its pieces by their numbers, which are those of tags.
///
/// A piece's members form a tree. Its owner is the root. The collector of each other island of several members is
/// a child of the owner, and its island's members are its children; all other members are children of the owner.
/// Integers travel up the tree, and the result down.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// `None` for a piece that lost its owner or a collector: it has another number since.
    pieces: Vec<Option<Piece>>,
    islands: Islands,
    codec: SumCodec,
}

impl Layout {
    /// The layout for a stage of `elements` elements.
    pub(crate) fn new(round: &Round, elements: usize, cut: RoundCut, codec: SumCodec) -> Self {
        let weights: Vec<u32> = round.group.members.iter().map(|part| part.weight).collect();
        let islands = Islands::of(&round.group, codec);
        let mut layout = Self { pieces: Vec::new(), islands, codec };
        layout.append(deal(elements, &weights, cut));
        layout
    }

    /// The layout after a mend. Each piece of a lost owner goes to the remaining member that has the least for its
    /// weight. A piece that lost a collector keeps its owner. Both get new numbers, because it is unknown which members
    /// received their results.
    pub(crate) fn mended(&self, before: &Round, after: &Round) -> Self {
        let members = before.group.members.iter();
        let new_place: Vec<Option<usize>> =
            members.map(|part| place_in(after, part.member)).collect();
        let islands = Islands::of(&after.group, self.codec);
        let mut lost = Vec::new();
        let mut keep = |piece: &Piece| {
            let owner = new_place[piece.owner];
            let collectors = self.islands.moved(&piece.collectors, &new_place, &islands);
            match (owner, collectors) {
                (Some(owner), Some(collectors)) => {
                    Some(Piece { range: piece.range.clone(), owner, collectors })
                }
                (owner, _) => {
                    lost.push((piece.range.clone(), owner));
                    None
                }
            }
        };
        let pieces = self.pieces.iter().map(|piece| piece.as_ref().and_then(&mut keep)).collect();
        let mut mended = Self { pieces, islands, codec: self.codec };
        lost.sort_by_key(|(range, _)| range.start);
        let weights: Vec<u32> = after.group.members.iter().map(|part| part.weight).collect();
        let dealt = mended.dealt_anew(lost, &weights);
        mended.append(dealt);
        mended
    }

    /// Gives each piece an owner: the one that it has, or the member that has the least for its weight.
    fn dealt_anew(
        &self,
        lost: Vec<(Range<usize>, Option<usize>)>,
        weights: &[u32],
    ) -> Vec<(Range<usize>, usize)> {
        let weights = not_all_zero(weights);
        let mut has = vec![0u128; weights.len()];
        for piece in self.pieces.iter().flatten() {
            has[piece.owner] += piece.range.len() as u128;
        }
        for (range, owner) in &lost {
            owner.iter().for_each(|owner| has[*owner] += range.len() as u128);
        }
        let mut deal = |(range, owner): (Range<usize>, Option<usize>)| {
            let owner = owner.unwrap_or_else(|| {
                let open = (0..weights.len()).filter(|place| weights[*place] > 0);
                let place = least(open, |place| has[place], |place| weights[place]);
                let place = place.expect("a member remains");
                has[place] += range.len() as u128;
                place
            });
            (range, owner)
        };
        lost.into_iter().map(&mut deal).collect()
    }

    /// Appends pieces with these owners, and deals their collectors: each owner's pieces go evenly to the members of an
    /// island that stand for it.
    fn append(&mut self, pieces: Vec<(Range<usize>, usize)>) {
        let mut dealt: BTreeMap<(usize, u16), u128> = BTreeMap::new();
        for (range, owner) in pieces {
            let collect = |island: usize| {
                let candidates = self.islands.standing_for(owner, island);
                let places = candidates.iter().map(|(place, _)| *place);
                let has = |place: usize| dealt.get(&(owner, place as u16)).copied().unwrap_or(0);
                let due = |place: usize| {
                    let of =
                        candidates.iter().find(|(candidate, _)| usize::from(*candidate) == place);
                    of.map_or(1, |(_, due)| *due)
                };
                let place =
                    least(places.map(usize::from), has, due).expect("an island has members");
                let place = place as u16;
                *dealt.entry((owner, place)).or_insert(0) += range.len() as u128;
                place
            };
            let collectors = (0..self.islands.count()).map(collect).collect();
            self.pieces.push(Some(Piece { range, owner, collectors }));
        }
    }

    /// The places after a mend of the members whose integers must be sent again: those whose sums changed, and all
    /// of an island that lost or changed one, because its integers were summed together.
    pub(crate) fn sent_again(&self, before: &Round, after: &Round) -> BTreeSet<u16> {
        let new_place = |place: usize| place_in(after, before.group.members[place].member);
        let is_other = |place: &usize| {
            new_place(*place).is_none_or(|place| after.mended.changed.contains(&(place as u16)))
        };
        let others = (0..before.group.members.len()).filter(is_other);
        let all = self.islands.with_mates(others);
        all.into_iter().filter_map(new_place).map(|place| place as u16).collect()
    }

    fn piece(&self, number: u32) -> Option<&Piece> {
        self.pieces.get(number as usize)?.as_ref()
    }

    /// The codec in which sums travel.
    pub(crate) fn codec(&self) -> SumCodec {
        self.codec
    }

    /// The numbers of all pieces.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.pieces).filter_map(|(number, piece)| piece.as_ref().map(|_| number))
    }

    /// Number of pieces of all members.
    pub(crate) fn count(&self) -> usize {
        self.pieces.iter().flatten().count()
    }

    /// The elements of a piece; `None` if there is none of this number.
    pub(crate) fn range(&self, number: u32) -> Option<Range<usize>> {
        Some(self.piece(number)?.range.clone())
    }

    /// The place of the member that reduces a piece.
    pub(crate) fn owner(&self, number: u32) -> Option<usize> {
        Some(self.piece(number)?.owner)
    }

    /// All elements, with the groups of their owners, as the member at this place sees them.
    pub(crate) fn owned(&self, me: usize) -> Vec<Owned> {
        let owned = |piece: &Piece| Owned {
            range: piece.range.clone(),
            group: (piece.owner % OWNER_GROUPS) as u16,
            by_me: piece.owner == me,
        };
        self.pieces.iter().flatten().map(owned).collect()
    }

    /// The place of the member to which this one sends its integers of a piece, and from which it receives the result;
    /// `None` for the owner.
    pub(crate) fn parent(&self, number: u32, place: usize) -> Option<usize> {
        let piece = self.piece(number).filter(|piece| piece.owner != place)?;
        let collector = self.islands.of_place(place).map(|island| piece.collectors[island].into());
        Some(collector.filter(|collector| *collector != place).unwrap_or(piece.owner))
    }

    /// The places of the members whose parent this one is, in order.
    pub(crate) fn children(&self, number: u32, place: usize) -> Vec<usize> {
        let Some(piece) = self.piece(number) else { return Vec::new() };
        if piece.owner == place {
            return self.islands.heads(&piece.collectors, place);
        }
        let island = self.islands.of_place(place);
        let collected = island.filter(|island| usize::from(piece.collectors[*island]) == place);
        collected.map_or_else(Vec::new, |island| self.islands.mates(island, place))
    }

    /// The number of those members.
    pub(crate) fn child_count(&self, number: u32, place: usize) -> usize {
        if self.owner(number) == Some(place) {
            return self.islands.heads_count(place);
        }
        let island = self.islands.of_place(place).filter(|_| self.collects(number, place));
        island.map_or(0, |island| self.islands.size(island) - 1)
    }

    /// Whether a member sums integers of others for a piece that it does not own.
    pub(crate) fn collects(&self, number: u32, place: usize) -> bool {
        self.piece(number).is_some_and(|piece| {
            let island = self.islands.of_place(place);
            piece.owner != place
                && island.is_some_and(|island| usize::from(piece.collectors[island]) == place)
        })
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
    use shoal_protocol::ids::{Attempt, Era, Incarnation, Member, PeerId, Step, Term, WeightGroup};
    use shoal_protocol::message::{Mended, RoundGroup, RoundId, RoundMember};

    use super::*;

    fn cut(block_elements: usize, piece_elements: usize) -> RoundCut {
        RoundCut { block_elements, piece_elements }
    }

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    /// A round of members with these numbers, weights and islands.
    fn round(members: impl IntoIterator<Item = (u8, u32, Option<u16>)>) -> Round {
        let part =
            |(number, weight, island)| RoundMember { member: member(number), weight, island };
        let members = members.into_iter().map(part).collect();
        let group = RoundGroup { members, ..RoundGroup::default() }.into();
        let id = RoundId {
            era: Era(0),
            term: Term(1),
            step: Step(0),
            weights: WeightGroup(0),
            attempt: Attempt(0),
        };
        Round { id, group, mended: Mended::default() }
    }

    fn flat(weights: &[u32]) -> Round {
        round((0..).zip(weights).map(|(number, weight)| (number, *weight, None)))
    }

    /// A round of the members of islands of these sizes, in turn as far as they have members.
    fn of_islands(sizes: &[u8]) -> Round {
        let most = sizes.iter().copied().max().unwrap_or(0);
        let islands = || (0u16..).zip(sizes);
        let turns = (0..most).flat_map(|turn| islands().filter(move |(_, size)| **size > turn));
        round((0u8..).zip(turns).map(|(number, (island, _))| (number, 1, Some(island))))
    }

    fn without(before: &Round, gone: &[usize]) -> Round {
        let members = before.group.members.iter().enumerate();
        let left = members.filter(|(place, _)| !gone.contains(place));
        let group =
            RoundGroup { members: left.map(|(_, part)| *part).collect(), ..RoundGroup::default() };
        let mended = Mended { mend: before.mended.mend.next(), ..Mended::default() };
        Round { group: group.into(), mended, ..before.clone() }
    }

    fn exact(round: &Round, elements: usize, cut: RoundCut) -> Layout {
        Layout::new(round, elements, cut, SumCodec::Exact)
    }

    /// The first elements of each member's pieces.
    fn starts(layout: &Layout, place: usize) -> Vec<usize> {
        let pieces = layout.pieces.iter().flatten().filter(|piece| piece.owner == place);
        pieces.map(|piece| piece.range.start).collect()
    }

    /// The owner of each piece in the vector's order: place, first element, end.
    fn dealt(elements: usize, weights: &[u32], cut: RoundCut) -> Vec<(usize, usize, usize)> {
        let pieces = deal(elements, weights, cut).into_iter();
        pieces.map(|(range, place)| (place, range.start, range.end)).collect()
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
        let before = flat(&[2, 1, 1, 2]);
        let layout = exact(&before, 24, cut(1, 2));
        let after = without(&before, &[1]);
        let mended = layout.mended(&before, &after);
        assert!(starts(&mended, 1).starts_with(&starts(&layout, 2)));
        let owned = |place: usize| {
            let pieces = mended.pieces.iter().flatten().filter(|piece| piece.owner == place);
            pieces.map(|piece| piece.range.len()).sum::<usize>()
        };
        assert_eq!((0..3).map(owned).collect::<Vec<_>>(), [10, 6, 8]);
        let last = mended.mended(&after, &without(&after, &[0, 1]));
        assert_eq!(starts(&last, 0).len(), layout.count());
    }

    /// The places between which a piece's integers travel, from child to parent.
    fn edges(layout: &Layout, piece: u32, members: usize) -> Vec<(usize, usize)> {
        (0..members).filter_map(|place| Some((place, layout.parent(piece, place)?))).collect()
    }

    #[test]
    fn each_island_has_a_collector_and_sends_a_piece_once() {
        // Members 0, 3 and 5 are island 0, members 1 and 4 are island 1, member 2 is alone.
        let round = of_islands(&[3, 2, 1]);
        let layout = exact(&round, 12, cut(1, 2));
        let owners: Vec<_> = layout.numbers().filter_map(|piece| layout.owner(piece)).collect();
        assert_eq!(owners, [0, 1, 2, 3, 4, 5]);
        let trees = [
            [(1, 0), (2, 0), (3, 0), (4, 1), (5, 0)],
            [(0, 1), (2, 1), (3, 0), (4, 1), (5, 0)],
            [(0, 2), (1, 2), (3, 0), (4, 1), (5, 0)],
            [(0, 3), (1, 3), (2, 3), (4, 1), (5, 3)],
            [(0, 3), (1, 4), (2, 4), (3, 4), (5, 3)],
            [(0, 5), (1, 4), (2, 5), (3, 5), (4, 5)],
        ];
        for (piece, tree) in (0..).zip(trees) {
            assert_eq!(edges(&layout, piece, 6), tree, "piece {piece}");
            for place in 0..6 {
                let children = tree.iter().filter(|(_, parent)| *parent == place);
                let children: Vec<usize> = children.map(|(child, _)| *child).collect();
                assert_eq!(layout.children(piece, place), children, "{piece} {place}");
                assert_eq!(layout.child_count(piece, place), children.len());
            }
        }
    }

    #[test]
    fn a_lost_collector_gives_its_pieces_new_numbers_and_a_lost_island_none() {
        let before = of_islands(&[2, 2]);
        let layout = exact(&before, 8, cut(1, 1));
        // Members 0 and 2 are an island. Member 3 owned two pieces and collected two of the other island.
        let after = without(&before, &[3]);
        let mended = layout.mended(&before, &after);
        let lost = (0..8).filter(|piece| mended.range(*piece).is_none());
        assert_eq!(lost.collect::<Vec<_>>(), [2, 3, 6, 7]);
        assert_eq!(mended.count(), 8);
        assert_eq!(mended.numbers().last(), Some(11));
        assert_eq!(layout.sent_again(&before, &after), [1].into(), "its island's other member");
        let after = without(&before, &[1, 3]);
        let mended = layout.mended(&before, &after);
        let lost = (0..8).filter(|piece| mended.range(*piece).is_none());
        assert_eq!(lost.collect::<Vec<_>>(), [1, 3, 5, 7], "only those that it owned");
    }

    /// A stage of ten thousand peers in eight stages: each exchanges data with the members of its island and with one
    /// of each other island.
    #[test]
    fn a_member_of_a_thousand_has_few_partners() {
        let (members, islands) = (1250u16, 35);
        let part = |place: u16| (place, place * islands / members);
        let numbered = (0..members).map(part).map(|(place, island)| {
            let mut peer = [0; 32];
            peer[..2].copy_from_slice(&place.to_be_bytes());
            let member = Member { peer: PeerId(peer), incarnation: Incarnation(1) };
            RoundMember { member, weight: 1, island: Some(island) }
        });
        let group = RoundGroup { members: numbered.collect(), ..RoundGroup::default() };
        let round = Round { group: group.into(), ..flat(&[1]) };
        let layout = exact(&round, 16 * 1250, cut(1, 1));
        let mut partners = vec![BTreeSet::new(); members.into()];
        for piece in layout.numbers() {
            for (place, parent) in edges(&layout, piece, members.into()) {
                partners[place].insert(parent);
                partners[parent].insert(place);
            }
        }
        let most = partners.iter().map(BTreeSet::len).max();
        println!("{members} members in {islands} islands: at most {most:?} partners");
        assert!(most.is_some_and(|most| most <= 110), "{most:?}");
    }

    #[test]
    fn codecs_that_round_have_no_islands() {
        let codec = SumCodec::Rounded(shoal_protocol::codec::Codec::F32);
        let layout = Layout::new(&of_islands(&[2, 2]), 8, cut(1, 1), codec);
        assert!(layout.numbers().all(|piece| !(0..4).any(|place| layout.collects(piece, place))));
    }

    /// The ranges of all pieces, in order.
    fn covered(layout: &Layout) -> Vec<(usize, usize)> {
        let pieces = layout.pieces.iter().flatten();
        let mut all: Vec<_> = pieces.map(|piece| (piece.range.start, piece.range.end)).collect();
        all.sort_unstable();
        all
    }

    fn check_trees(round: &Round, layout: &Layout) -> Result<(), TestCaseError> {
        let island = |place: usize| round.group.members[place].island;
        let members = round.group.members.len();
        for piece in layout.numbers() {
            let owner = layout.owner(piece).expect("it has one");
            let mut crossed = BTreeSet::new();
            for (place, parent) in edges(layout, piece, members) {
                let is_leaf = layout.children(piece, place).is_empty();
                prop_assert!(
                    parent == owner || is_leaf && layout.parent(piece, parent) == Some(owner)
                );
                prop_assert!(layout.children(piece, parent).contains(&place));
                if island(place) != island(parent) {
                    prop_assert!(crossed.insert(island(place)), "twice from one island");
                }
            }
            let children =
                (0..members).map(|place| layout.children(piece, place).len()).sum::<usize>();
            prop_assert_eq!(children, members - 1);
            for place in 0..members {
                let count = layout.children(piece, place).len();
                prop_assert_eq!(layout.child_count(piece, place), count);
            }
        }
        Ok(())
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
            let before = flat(&weights);
            let layout = exact(&before, elements, cut(16, 64));
            let mended = layout.mended(&before, &without(&before, &gone));
            let left = (0..weights.len()).filter(|place| !gone.contains(place));
            for (place, old) in left.enumerate() {
                prop_assert!(starts(&mended, place).starts_with(&starts(&layout, old)));
            }
            prop_assert_eq!(covered(&mended), covered(&layout));
        }

        /// Every member's integers reach the owner of each piece exactly once, over one member of each island, also
        /// after a mend; and an island's members collect about equally much.
        #[test]
        fn trees_hold_every_member_once(
            sizes in prop::collection::vec(1u8..6, 1..5),
            gone in prop::collection::btree_set(0usize..20, 0..6),
        ) {
            let before = of_islands(&sizes);
            let members = before.group.members.len();
            let gone: Vec<usize> = gone.into_iter().filter(|place| *place < members).collect();
            prop_assume!(gone.len() < members);
            let layout = exact(&before, 60 * members, cut(1, 1));
            check_trees(&before, &layout)?;
            for place in 0..members {
                let mates = layout.islands.of_place(place).map_or(1, |island| 1 + layout.islands.mates(island, place).len());
                let collects = layout.numbers().filter(|piece| layout.collects(*piece, place)).count();
                let others = 60 * (members - mates);
                let even = if mates == 1 { 0 } else { others / mates };
                prop_assert!(collects.abs_diff(even) <= 2 * members, "{collects} of {even}");
            }
            let after = without(&before, &gone);
            let mended = layout.mended(&before, &after);
            check_trees(&after, &mended)?;
            prop_assert_eq!(covered(&mended), covered(&layout));
        }

        #[test]
        fn pieces_cover_everything_once_in_whole_blocks(
            elements in 0usize..100_000,
            weights in prop::collection::vec(0u32..1000, 1..20),
            block in 1usize..3000,
            blocks in 1usize..5,
        ) {
            let owned = deal(elements, &weights, cut(block, blocks * block));
            let mut end = 0;
            for (piece, _) in &owned {
                prop_assert_eq!(piece.start, end);
                prop_assert!(!piece.is_empty() && piece.len() <= blocks * block);
                prop_assert!(piece.start.is_multiple_of(block));
                end = piece.end;
            }
            prop_assert_eq!(end, elements);
            let total: u32 = weights.iter().sum();
            for (place, weight) in weights.iter().enumerate().filter(|_| total > 0) {
                let exact = elements as f64 * f64::from(*weight) / f64::from(total);
                let pieces = owned.iter().filter(|(_, owner)| *owner == place);
                let len: usize = pieces.map(|(range, _)| range.len()).sum();
                prop_assert!((len as f64 - exact).abs() <= 2.0 * block as f64);
            }
        }
    }
}
