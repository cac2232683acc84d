//! Link estimates: measurements of the links to other peers, and their reports to the coordinator.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use shoal_protocol::ids::PeerId;
use shoal_protocol::limits;
use shoal_protocol::message::LinkEstimate;
use shoal_protocol::units::Rate;

use crate::coordinator::placing::locality::ONE_PLACE;

/// An estimate is reported again when it changed by more than this factor, or shows that two peers are, or are not,
/// at one place.
const REPORTED_CHANGE: f64 = 2.0;

/// Estimates of the links to other peers.
#[derive(Debug, Default)]
pub(super) struct LinkEstimates {
    measured: BTreeMap<PeerId, LinkEstimate>,
    /// The estimates that the coordinator knows.
    last_reported: BTreeMap<PeerId, LinkEstimate>,
}

impl LinkEstimates {
    pub(super) fn get(&self, peer: PeerId) -> Option<&LinkEstimate> {
        self.measured.get(&peer)
    }

    pub(super) fn round_trip(&self, peer: PeerId) -> Option<Duration> {
        self.get(peer).map(|link| link.round_trip)
    }

    pub(super) fn rate(&self, peer: PeerId) -> Option<Rate> {
        self.get(peer)?.rate
    }

    /// Replaces all measurements. Returns the estimates to report: those of a sample of the peers, as
    /// far as the coordinator does not know them.
    pub(super) fn update(
        &mut self,
        measured: BTreeMap<PeerId, LinkEstimate>,
    ) -> Vec<(PeerId, LinkEstimate)> {
        self.measured = measured;
        let Self { measured, last_reported } = self;
        last_reported.retain(|peer, _| measured.contains_key(peer));
        let mut news: Vec<(PeerId, LinkEstimate)> = Vec::new();
        for (peer, reported) in last_reported.iter_mut() {
            let link = measured[peer];
            if differ(reported, &link) {
                *reported = link;
                news.push((*peer, link));
            }
        }
        for peer in sample(measured, last_reported) {
            last_reported.insert(peer, measured[&peer]);
            news.push((peer, measured[&peer]));
        }
        news
    }

    /// A new coordinator knows no estimate yet: the next update reports all of them.
    pub(super) fn forget_reports(&mut self) {
        self.last_reported.clear();
    }
}

/// Peers to report besides those reported already, in turns one of the distance that was reported least,
/// since peers of one place are about equally far. The lowest id goes first, so that other peers choose the
/// same ones: two peers that measured a common third one can estimate the link between them.
fn sample(
    links: &BTreeMap<PeerId, LinkEstimate>,
    reported: &BTreeMap<PeerId, LinkEstimate>,
) -> Vec<PeerId> {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for link in reported.values() {
        *counts.entry(distance(link)).or_insert(0) += 1;
    }
    let mut others: BTreeMap<u32, VecDeque<PeerId>> = BTreeMap::new();
    for (peer, link) in links.iter().filter(|(peer, _)| !reported.contains_key(peer)) {
        others.entry(distance(link)).or_default().push_back(*peer);
    }
    let mut chosen = Vec::new();
    while reported.len() + chosen.len() < limits::LINK_ESTIMATES {
        let count = |distance: &u32| counts.get(distance).copied().unwrap_or(0);
        let Some(fewest) = others.keys().copied().min_by_key(count) else { break };
        let candidates = others.get_mut(&fewest).expect("it was just listed");
        chosen.extend(candidates.pop_front());
        if candidates.is_empty() {
            others.remove(&fewest);
        }
        *counts.entry(fewest).or_insert(0) += 1;
    }
    chosen
}

/// The class of a round-trip time: each class is twice as far as the one before.
fn distance(link: &LinkEstimate) -> u32 {
    let microseconds = u64::try_from(link.round_trip.as_micros()).unwrap_or(u64::MAX);
    microseconds.checked_ilog2().map_or(0, |power| power + 1)
}

fn differ(one: &LinkEstimate, other: &LinkEstimate) -> bool {
    let at_one_place = |link: &LinkEstimate| link.round_trip < ONE_PLACE;
    let apart = |one: f64, other: f64| one.max(other) > REPORTED_CHANGE * one.min(other);
    let rate = |link: &LinkEstimate| link.rate.map_or(0.0, |rate| rate.0 as f64);
    at_one_place(one) != at_one_place(other)
        || apart(one.round_trip.as_secs_f64(), other.round_trip.as_secs_f64())
        || apart(rate(one), rate(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u8) -> PeerId {
        PeerId([number; 32])
    }

    fn link(milliseconds: u64) -> LinkEstimate {
        LinkEstimate { round_trip: Duration::from_millis(milliseconds), rate: Some(Rate(1)) }
    }

    /// Peers near, far and very far; the far ones have the higher ids.
    #[test]
    fn some_peers_of_every_distance_are_reported() {
        let far = |number: u8| match number {
            0..100 => 1,
            100..102 => 40,
            _ => 150,
        };
        let links: BTreeMap<PeerId, LinkEstimate> =
            (0..200).map(|number| (peer(number), link(far(number)))).collect();
        let reports = |reported: &BTreeMap<PeerId, LinkEstimate>| {
            let mut chosen = sample(&links, reported);
            chosen.sort_unstable();
            chosen
        };
        let near = (0..7).chain([100, 101]).chain(102..109);
        assert_eq!(reports(&BTreeMap::new()), near.map(peer).collect::<Vec<_>>());
        // Earlier reports count.
        let reported: BTreeMap<PeerId, LinkEstimate> =
            (20..34).map(|near| (peer(near), link(1))).collect();
        assert_eq!(reports(&reported), [100, 102].map(peer));
        let full: BTreeMap<PeerId, LinkEstimate> =
            (20..36).map(|near| (peer(near), link(1))).collect();
        assert_eq!(reports(&full), []);
    }

    #[test]
    fn a_shorter_round_trip_is_reported_when_it_shows_one_place() {
        let mut links = LinkEstimates::default();
        let mut reported =
            |milliseconds| links.update([(peer(1), link(milliseconds))].into()).len();
        assert_eq!([7, 6, 4, 3].map(&mut reported), [1, 0, 1, 0]);
    }

    #[test]
    fn few_peers_are_all_reported() {
        let links: BTreeMap<PeerId, LinkEstimate> =
            (0..5).map(|number| (peer(number), link(3))).collect();
        assert_eq!(sample(&links, &BTreeMap::new()).len(), 5);
    }
}
