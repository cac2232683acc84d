//! What this peer measured of its links: the coordinator hears it, and routers prefer who is near.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use shoal_protocol::ids::PeerId;
use shoal_protocol::limits;
use shoal_protocol::message::{LinkEstimate, ToCoordinator};

use super::{Out, Peer, Status};
use crate::action::PeerAction;
use crate::router::Routing;

/// What has changed by less than this many times is not said again.
const NEWS: f64 = 2.0;

impl Peer {
    /// The links were measured. Of a few the coordinator is told what it does not know yet.
    pub(super) fn measured(&mut self, links: BTreeMap<PeerId, LinkEstimate>, out: &mut Out) {
        self.links = links;
        self.route_by_link_estimates();
        let Self { links, ways_said, .. } = self;
        ways_said.retain(|peer, _| links.contains_key(peer));
        let mut news: Vec<(PeerId, LinkEstimate)> = Vec::new();
        for (peer, said) in ways_said.iter_mut() {
            let link = links[peer];
            if differ(said, &link) {
                *said = link;
                news.push((*peer, link));
            }
        }
        for peer in most_telling(links, ways_said) {
            ways_said.insert(peer, links[&peer]);
            news.push((peer, links[&peer]));
        }
        let counts = self.config.routing == Routing::BySpeed;
        if !news.is_empty() && counts && self.status == Status::Member {
            out.push(PeerAction::ToCoordinator(ToCoordinator::LinkEstimates {
                link_estimates: news,
            }));
        }
    }

    /// Looks at members before a stage is given to this peer.
    pub(super) fn probe_links(&mut self, at: Vec<(PeerId, Vec<SocketAddr>)>, out: &mut Out) {
        if self.status == Status::Joining && self.config.candidate.link_estimates.is_none() {
            out.push(PeerAction::ProbeLinks { at });
        }
    }

    /// This peer has looked round: it asks again to be admitted.
    pub(super) fn looked(
        &mut self,
        mut link_estimates: Vec<(PeerId, LinkEstimate)>,
        out: &mut Out,
    ) {
        if self.status == Status::Joining && self.config.candidate.link_estimates.is_none() {
            link_estimates.truncate(limits::WAYS);
            self.config.candidate.link_estimates = Some(link_estimates);
            self.register(out);
        }
    }

    /// Has routers know how far those are to whom they send.
    pub(super) fn route_by_link_estimates(&mut self) {
        let Self { stages, links, .. } = self;
        for hosted in stages.values_mut() {
            hosted
                .onward
                .set_link_estimates(|member| links.get(&member.peer).map(|link| link.round_trip));
        }
    }
}

/// Whom to tell of besides those that were told of: in turns a peer of each distance, of which fewest were, since
/// those of one place are all about as far. Of several the lowest, so that others choose the same: two who know
/// one peer know the way to each other through it.
fn most_telling(
    links: &BTreeMap<PeerId, LinkEstimate>,
    said: &BTreeMap<PeerId, LinkEstimate>,
) -> Vec<PeerId> {
    let mut told: BTreeMap<u32, usize> = BTreeMap::new();
    for link in said.values() {
        *told.entry(distance(link)).or_insert(0) += 1;
    }
    let mut others: BTreeMap<u32, VecDeque<PeerId>> = BTreeMap::new();
    for (peer, link) in links.iter().filter(|(peer, _)| !said.contains_key(peer)) {
        others.entry(distance(link)).or_default().push_back(*peer);
    }
    let mut chosen = Vec::new();
    while said.len() + chosen.len() < limits::WAYS {
        let count = |distance: &u32| told.get(distance).copied().unwrap_or(0);
        let Some(fewest) = others.keys().copied().min_by_key(count) else { break };
        let of_it = others.get_mut(&fewest).expect("it was just listed");
        chosen.extend(of_it.pop_front());
        if of_it.is_empty() {
            others.remove(&fewest);
        }
        *told.entry(fewest).or_insert(0) += 1;
    }
    chosen
}

/// How far a peer is: what is twice as far is another distance.
fn distance(link: &LinkEstimate) -> u32 {
    let microseconds = u64::try_from(link.round_trip.as_micros()).unwrap_or(u64::MAX);
    microseconds.checked_ilog2().map_or(0, |power| power + 1)
}

fn differ(one: &LinkEstimate, other: &LinkEstimate) -> bool {
    let apart = |one: f64, other: f64| one.max(other) > NEWS * one.min(other);
    let rate = |link: &LinkEstimate| link.rate.map_or(0.0, |rate| rate.0 as f64);
    apart(one.round_trip.as_secs_f64(), other.round_trip.as_secs_f64())
        || apart(rate(one), rate(other))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shoal_protocol::units::Rate;

    use super::*;

    fn peer(number: u8) -> PeerId {
        PeerId([number; 32])
    }

    fn link(milliseconds: u64) -> LinkEstimate {
        LinkEstimate { round_trip: Duration::from_millis(milliseconds), rate: Some(Rate(1)) }
    }

    /// Peers near, far and very far, with the far ones behind in the order of ids.
    #[test]
    fn some_of_every_distance_are_told_of() {
        let far = |number: u8| match number {
            0..100 => 1,
            100..102 => 40,
            _ => 150,
        };
        let links: BTreeMap<PeerId, LinkEstimate> =
            (0..200).map(|number| (peer(number), link(far(number)))).collect();
        let told = |said: &BTreeMap<PeerId, LinkEstimate>| {
            let mut chosen = most_telling(&links, said);
            chosen.sort_unstable();
            chosen
        };
        let near = (0..7).chain([100, 101]).chain(102..109);
        assert_eq!(told(&BTreeMap::new()), near.map(peer).collect::<Vec<_>>());
        // What was told of before counts.
        let said: BTreeMap<PeerId, LinkEstimate> =
            (20..34).map(|near| (peer(near), link(1))).collect();
        assert_eq!(told(&said), [100, 102].map(peer));
        let full: BTreeMap<PeerId, LinkEstimate> =
            (20..36).map(|near| (peer(near), link(1))).collect();
        assert_eq!(told(&full), []);
    }

    #[test]
    fn all_are_told_of_where_they_are_few() {
        let links: BTreeMap<PeerId, LinkEstimate> =
            (0..5).map(|number| (peer(number), link(3))).collect();
        assert_eq!(most_telling(&links, &BTreeMap::new()).len(), 5);
    }
}
