//! The islands of a round: members on fast links to each other, with slow ones to the rest.

use std::collections::BTreeMap;

use shoal_protocol::codec::SumCodec;
use shoal_protocol::message::RoundGroup;

/// The islands of several members. A member of none of them is an island of its own.
#[derive(Debug, Clone, Default)]
pub(super) struct Islands {
    /// Each member's island, by place.
    of: Vec<Option<u16>>,
    /// The places of each island's members, in order.
    members: Vec<Vec<u16>>,
}

impl Islands {
    /// The islands of a group. There is none if the codec rounds the integers: sums of rounded sums depend on which
    /// members are summed first.
    pub(super) fn of(group: &RoundGroup, codec: SumCodec) -> Self {
        let mut named: BTreeMap<u16, Vec<u16>> = BTreeMap::new();
        for (place, part) in (0..).zip(&group.members) {
            part.island.into_iter().for_each(|island| named.entry(island).or_default().push(place));
        }
        let members: Vec<Vec<u16>> =
            named.into_values().filter(|places| codec.is_exact() && places.len() > 1).collect();
        let mut of = vec![None; group.members.len()];
        for (island, places) in (0..).zip(&members) {
            places.iter().for_each(|place| of[usize::from(*place)] = Some(island));
        }
        Self { of, members }
    }

    /// The number of islands of several members.
    pub(super) fn count(&self) -> usize {
        self.members.len()
    }

    /// The island of a member; `None` if it is alone.
    pub(super) fn of_place(&self, place: usize) -> Option<usize> {
        self.of[place].map(usize::from)
    }

    /// The other members of an island.
    pub(super) fn mates(&self, island: usize, place: usize) -> Vec<usize> {
        let places = self.members[island].iter().copied().map(usize::from);
        places.filter(|mate| *mate != place).collect()
    }

    /// The members that an owner exchanges data with: those of its own island, one of each other island.
    pub(super) fn heads(&self, collectors: &[u16], owner: usize) -> Vec<usize> {
        let home = self.of_place(owner);
        let is_head = |place: usize| {
            self.of_place(place).is_none_or(|island| {
                home == Some(island) || usize::from(collectors[island]) == place
            })
        };
        (0..self.of.len()).filter(|place| *place != owner && is_head(*place)).collect()
    }

    /// The number of members that an owner exchanges data with.
    pub(super) fn heads_count(&self, owner: usize) -> usize {
        let in_islands: usize = self.members.iter().map(Vec::len).sum();
        let all = self.of.len() - in_islands + self.members.len();
        all - 1 + self.of_place(owner).map_or(0, |home| self.members[home].len() - 1)
    }

    /// The number of an island's members.
    pub(super) fn size(&self, island: usize) -> usize {
        self.members[island].len()
    }

    /// The members of an island that collect an owner's pieces, and in which proportion. The members of the owner's
    /// island and those of this one stand for each other in their order, so that a member has few partners and each
    /// collects equally much.
    pub(super) fn standing_for(&self, owner: usize, island: usize) -> Vec<(u16, u128)> {
        let home = self.of_place(owner);
        if home == Some(island) {
            return vec![(owner as u16, 1)];
        }
        let mates = home.map(|home| &self.members[home]);
        let index =
            mates.map_or(0, |mates| mates.partition_point(|mate| usize::from(*mate) < owner));
        let (here, there) = (&self.members[island], mates.map_or(1, Vec::len));
        // The owner has the interval `from..to` of both islands' common length, a candidate `start..end`.
        let (from, to) = (index * here.len(), (index + 1) * here.len());
        let due = |(candidate, place): (usize, &u16)| {
            let (start, end) = (candidate * there, (candidate + 1) * there);
            let overlap = end.min(to).saturating_sub(start.max(from));
            (overlap > 0).then_some((*place, overlap as u128))
        };
        here.iter().enumerate().filter_map(due).collect()
    }

    /// The collectors of a piece among the `new` islands, given each member's new place; `None` if a collector is
    /// gone and others of its island remain.
    pub(super) fn moved(
        &self,
        collectors: &[u16],
        new_place: &[Option<usize>],
        new: &Self,
    ) -> Option<Vec<u16>> {
        let mut moved = Vec::new();
        for (places, collector) in self.members.iter().zip(collectors) {
            let mut left = places.iter().filter_map(|place| new_place[usize::from(*place)]);
            let collector = new_place[usize::from(*collector)];
            match (left.next(), collector) {
                (None, _) => {}
                (Some(_), None) => return None,
                (Some(one), Some(collector)) => {
                    moved.extend(new.of_place(one).map(|_| collector as u16));
                }
            }
        }
        Some(moved)
    }

    /// Adds the mates of these members.
    pub(super) fn with_mates(&self, places: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut all = Vec::new();
        for place in places {
            all.push(place);
            all.extend(
                self.of_place(place).map(|island| self.mates(island, place)).unwrap_or_default(),
            );
        }
        all.sort_unstable();
        all.dedup();
        all
    }
}
