//! The islands of a round: which of its members sum their integers among themselves first.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{Member, PeerId};
use shoal_protocol::message::RoundGroup;
use shoal_protocol::plain_name::IslandName;

use crate::coordinator::placing::locality::LinkEstimates;

/// Members that exchange data with each other, at most. An island of more is divided, and so are members without an
/// island, into islands of about the square root of their number: each then has twice the root as partners.
const PARTNERS: usize = 128;

/// What makes a member a part of an island.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Home<'a> {
    /// Its operator says so.
    Named(&'a IslandName),
    /// Its round trips to the others there are short; the number of the place.
    Measured(usize),
}

/// Each member's island by its number, which stays from one round to the next; `None` if it is alone. Members are in
/// order.
pub(super) fn assigned(
    members: &[Member],
    names: &[Option<&IslandName>],
    links: &LinkEstimates,
    before: &RoundGroup,
) -> Vec<Option<u16>> {
    let before: BTreeMap<Member, u16> =
        before.members.iter().filter_map(|part| Some((part.member, part.island?))).collect();
    let known: Vec<Option<u16>> =
        members.iter().map(|member| before.get(member).copied()).collect();
    let mut alike: BTreeMap<Option<Home<'_>>, Vec<usize>> = BTreeMap::new();
    for (place, home) in homes(members, names, links, &known).into_iter().enumerate() {
        alike.entry(home).or_default().push(place);
    }
    if alike.len() == 1 && !alike.contains_key(&None) && members.len() <= PARTNERS {
        // One island of all: nothing is between islands.
        return vec![None; members.len()];
    }
    let mut islands = Vec::new();
    for (home, places) in alike {
        if places.len() > PARTNERS {
            islands.extend(divided(places, &known));
        } else if home.is_some() && places.len() > 1 {
            islands.push(places);
        }
    }
    numbered(&islands, &known)
}

/// Where each member is at home, as its operator says or as measured. One place says nothing about members that
/// have not measured their links yet, so they all are nowhere then.
fn homes<'a>(
    members: &[Member],
    names: &[Option<&'a IslandName>],
    links: &LinkEstimates,
    known: &[Option<u16>],
) -> Vec<Option<Home<'a>>> {
    let unnamed: Vec<usize> =
        (0..members.len()).filter(|member| names[*member].is_none()).collect();
    let peers: Vec<PeerId> = unnamed.iter().map(|member| members[*member].peer).collect();
    let before = |member: usize| known[unnamed[member]];
    let together = |one, other| before(one).is_some() && before(one) == before(other);
    let places = links.places(&peers, together);
    let mut homes: Vec<Option<Home<'_>>> = names.iter().map(|name| name.map(Home::Named)).collect();
    for (member, place) in unnamed.into_iter().zip(places) {
        homes[member] = place.map(Home::Measured);
    }
    let distinct: BTreeSet<Home<'_>> = homes.iter().copied().flatten().collect();
    match distinct.first() {
        Some(Home::Measured(_)) if distinct.len() == 1 => vec![None; members.len()],
        _ => homes,
    }
}

/// Divides members into islands of about the square root of their number: those of before as long as their sizes
/// are about right, with newcomers in the smallest ones.
fn divided(places: Vec<usize>, known: &[Option<u16>]) -> Vec<Vec<usize>> {
    let size = places.len().isqrt().max(1);
    let mut old: BTreeMap<u16, Vec<usize>> = BTreeMap::new();
    let mut new = Vec::new();
    for place in &places {
        match known[*place] {
            Some(island) => old.entry(island).or_default().push(*place),
            None => new.push(*place),
        }
    }
    let mut islands: Vec<Vec<usize>> = old.into_values().collect();
    let mut sizes: BTreeSet<(usize, usize)> =
        islands.iter().enumerate().map(|(island, members)| (members.len(), island)).collect();
    for place in new {
        let Some((members, island)) = sizes.pop_first() else { break };
        islands[island].push(place);
        sizes.insert((members + 1, island));
    }
    let is_right = |island: &Vec<usize>| (size / 2..=2 * size).contains(&island.len());
    if !islands.is_empty() && islands.iter().all(is_right) {
        return islands;
    }
    // Equal ones, of which none is a small rest.
    let count = places.len() / size;
    let end = |island: usize| island * places.len() / count;
    (0..count).map(|island| places[end(island)..end(island + 1)].to_vec()).collect()
}

/// Numbers islands: by the number that their first member with one had, or by the least free one.
fn numbered(islands: &[Vec<usize>], known: &[Option<u16>]) -> Vec<Option<u16>> {
    let mut taken = BTreeSet::new();
    let old = |island: &Vec<usize>| {
        let number = island.iter().find_map(|place| known[*place]);
        number.filter(|number| taken.insert(*number))
    };
    let old: Vec<Option<u16>> = islands.iter().map(old).collect();
    let mut free = (0..=u16::MAX).filter(|number| !taken.contains(number));
    let mut numbers = vec![None; known.len()];
    for (island, number) in islands.iter().zip(old) {
        let number = number.or_else(|| free.next());
        island.iter().for_each(|place| numbers[*place] = number);
    }
    numbers
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use shoal_protocol::ids::Incarnation;
    use shoal_protocol::message::{LinkEstimate, RoundGroupMember};

    use super::*;

    fn member(number: u16) -> Member {
        let mut peer = [0; 32];
        peer[..2].copy_from_slice(&number.to_be_bytes());
        Member { peer: PeerId(peer), incarnation: Incarnation(1) }
    }

    /// The islands of members with these numbers and names, after a round of this group; and its group.
    fn assign(named: &[(u16, &str)], before: &RoundGroup) -> (Vec<Option<u16>>, RoundGroup) {
        assign_at(named, &LinkEstimates::default(), before)
    }

    /// Like [`assign`], with measured links.
    fn assign_at(
        named: &[(u16, &str)],
        links: &LinkEstimates,
        before: &RoundGroup,
    ) -> (Vec<Option<u16>>, RoundGroup) {
        let members: Vec<Member> = named.iter().map(|(number, _)| member(*number)).collect();
        let names: Vec<Option<IslandName>> =
            named.iter().map(|(_, name)| name.parse().ok()).collect();
        let names: Vec<Option<&IslandName>> = names.iter().map(Option::as_ref).collect();
        let islands = assigned(&members, &names, links, before);
        let all = members.iter().zip(&islands);
        let all = all.map(|(member, island)| RoundGroupMember {
            member: *member,
            weight: Some(1),
            island: *island,
        });
        let group = RoundGroup::of(1, all);
        (islands, group)
    }

    #[test]
    fn members_of_one_name_are_an_island_whose_number_stays() {
        let none = RoundGroup::default();
        let all = [(1, "b"), (2, ""), (3, "a"), (4, "b"), (5, "a"), (6, "c")];
        let (islands, before) = assign(&all, &none);
        assert_eq!(islands, [Some(1), None, Some(0), Some(1), Some(0), None]);
        // Island a is gone; a second member of c comes.
        let (islands, _) = assign(&[(1, "b"), (4, "b"), (6, "c"), (7, "c")], &before);
        assert_eq!(islands, [Some(1), Some(1), Some(0), Some(0)]);
        let (islands, _) = assign(&[(1, "b"), (3, "a"), (6, "c")], &before);
        assert_eq!(islands, [None; 3]);
        let (islands, _) = assign(&[(1, "b"), (4, "b"), (7, "b")], &before);
        assert_eq!(islands, [None; 3], "one island of all");
    }

    #[test]
    fn members_without_names_are_at_home_where_their_round_trips_are_short() {
        // Members 1 and 3 are at one place, 2 and 4 at another; 5 has measured nothing yet.
        let mut links = LinkEstimates::default();
        let mut note = |from, to, milliseconds| {
            let round_trip = Duration::from_millis(milliseconds);
            let link = LinkEstimate { round_trip, rate: None };
            links.note(member(from).peer, &[(member(to).peer, link)]);
        };
        note(1, 3, 1);
        note(3, 1, 2);
        let unnamed = [1, 2, 3, 4, 5].map(|number| (number, ""));
        let none = RoundGroup::default();
        note(2, 4, 1);
        note(2, 1, 40);
        let (islands, before) = assign_at(&unnamed, &links, &none);
        assert_eq!(islands, [Some(0), Some(1), Some(0), Some(1), None]);
        let (again, _) = assign_at(&unnamed, &links, &before);
        assert_eq!(again, islands);
        let (of_one_place, _) = assign_at(&[(1, ""), (3, ""), (5, "")], &links, &none);
        assert_eq!(of_one_place, [None; 3], "nobody is known to be elsewhere");
        // A name is another home than any place.
        let (named, _) = assign_at(&[(1, ""), (2, "a"), (3, ""), (4, "a")], &links, &none);
        assert_eq!(named, [Some(1), Some(0), Some(1), Some(0)]);
    }

    proptest! {
        #[test]
        fn many_members_are_divided_and_few_of_them_change(
            count in 129u16..1500, gone in prop::collection::btree_set(0u16..1500, 0..8), new in 0u16..8
        ) {
            let named = |range: std::ops::Range<u16>| range.map(|number| (number, "")).collect::<Vec<_>>();
            let (first, before) = assign(&named(0..count), &RoundGroup::default());
            check_sizes(&first, 1)?;
            let mut later = named(0..count + new);
            later.retain(|(number, _)| !gone.contains(number) || *number >= count);
            prop_assume!(later.len() > PARTNERS);
            let (second, _) = assign(&later, &before);
            check_sizes(&second, 2)?;
            for ((number, _), island) in later.iter().zip(second).filter(|((number, _), _)| *number < count) {
                prop_assert_eq!(island, first[usize::from(*number)]);
            }
        }
    }

    /// Every member has an island of about the square root of all, within a factor.
    fn check_sizes(islands: &[Option<u16>], factor: usize) -> Result<(), TestCaseError> {
        let mut sizes: BTreeMap<u16, usize> = BTreeMap::new();
        for island in islands {
            *sizes.entry(island.expect("all are in one")).or_insert(0) += 1;
        }
        let root = islands.len().isqrt();
        let right = root / factor..=factor * root + 1 + root / 2;
        prop_assert!(sizes.values().all(|size| right.contains(size)), "{root}: {sizes:?}");
        Ok(())
    }

    #[test]
    fn few_members_without_names_are_alone() {
        let few: Vec<(u16, &str)> = (0..128).map(|number| (number, "")).collect();
        let (islands, _) = assign(&few, &RoundGroup::default());
        assert!(islands.iter().all(Option::is_none));
    }
}
