//! Which peers are at one place, by their measured round trips.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::PeerId;

use crate::coordinator::placing::locality::{LinkEstimates, ONE_PLACE};

/// Peers that were at one place stay there up to so many times the round trip, so that busy machines do not seem to
/// move.
const STAY: u32 = 2;

impl LinkEstimates {
    /// The place of each of these peers: the same number for two with a short round trip, and for those that are
    /// linked by such pairs; `None` for a peer without a measured link to another one. `together` says of two
    /// whether they were at one place before.
    pub(crate) fn places(
        &self,
        peers: &[PeerId],
        together: impl Fn(usize, usize) -> bool,
    ) -> Vec<Option<usize>> {
        let order: BTreeMap<PeerId, usize> =
            peers.iter().enumerate().map(|(number, peer)| (*peer, number)).collect();
        let mut places = Places((0..peers.len()).collect());
        let mut measured = BTreeSet::new();
        for (one, peer) in peers.iter().enumerate() {
            for other in self.targets(*peer).filter_map(|target| order.get(target).copied()) {
                let Some(round_trip) = self.round_trip(*peer, peers[other]) else { continue };
                measured.extend([one, other]);
                let least = if together(one, other) { ONE_PLACE * STAY } else { ONE_PLACE };
                if round_trip < least {
                    places.join(one, other);
                }
            }
        }
        let place = |number| measured.contains(&number).then(|| places.of(number));
        (0..peers.len()).map(place).collect()
    }
}

/// For each peer one of its place with a lower number, or itself.
struct Places(Vec<usize>);

impl Places {
    /// The lowest number of its place.
    fn of(&self, mut number: usize) -> usize {
        while self.0[number] != number {
            number = self.0[number];
        }
        number
    }

    fn join(&mut self, one: usize, other: usize) {
        let (one, other) = (self.of(one), self.of(other));
        self.0[one.max(other)] = one.min(other);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shoal_protocol::message::LinkEstimate;

    use super::*;

    fn peer(number: u8) -> PeerId {
        PeerId([number; 32])
    }

    fn estimates(links: &[(u8, u8, u64)]) -> LinkEstimates {
        let mut estimates = LinkEstimates::default();
        for (from, to, milliseconds) in links {
            let round_trip = Duration::from_millis(*milliseconds);
            estimates.note(peer(*from), &[(peer(*to), LinkEstimate { round_trip, rate: None })]);
        }
        estimates
    }

    fn places(links: &[(u8, u8, u64)], before: &[[usize; 2]]) -> Vec<Option<usize>> {
        let peers: Vec<PeerId> = (0..6).map(peer).collect();
        estimates(links).places(&peers, |one, other| before.contains(&[one, other]))
    }

    #[test]
    fn near_peers_and_those_between_them_are_at_one_place() {
        let links = [(0, 2, 1), (4, 2, 4), (1, 3, 0), (1, 0, 80), (9, 5, 1)];
        // The last is measured by none of them.
        assert_eq!(places(&links, &[]), [Some(0), Some(1), Some(0), Some(1), Some(0), None]);
    }

    #[test]
    fn the_slower_direction_counts_and_who_was_there_stays() {
        let links = [(0, 1, 1), (1, 0, 7), (2, 3, 11)];
        assert_eq!(places(&links, &[])[..2], [Some(0), Some(1)]);
        let both = [[0, 1], [1, 0], [2, 3], [3, 2]];
        assert_eq!(places(&links, &both)[..4], [Some(0), Some(0), Some(2), Some(3)]);
    }
}
