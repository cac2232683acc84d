//! Distances of peers to stages, to choose among stages that need a peer equally.
//!
//! Members report estimates of their links to a few others; a newcomer probes links before it is
//! assigned a stage. If both ends measured a link, the worse estimate counts, so no peer gets
//! nearer to others by its reports. The path between peers without a measurement leads through a
//! third peer that is measured to both: machines at one place have similar links to all others. The
//! cost of a stage is that of the planner's model (`planner`) for one device: its part of the
//! stage's all-reduce, and its activations and gradients to and from the neighbouring stages, over
//! all of whose replicas the router distributes them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{PeerId, Stage};
use shoal_protocol::limits;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::LinkEstimate;
use shoal_protocol::units::{Bytes, Rate};

use crate::planner::{Link, Traffic};
use crate::rng::mixed;

/// Number of replicas of a stage that are considered: in a large swarm a sample represents all.
const SAMPLE: usize = 16;

/// Peers with shorter round trips count as being at one place, at distance zero: such measurements
/// reflect the load of the machines.
pub(crate) const ONE_PLACE: Duration = Duration::from_millis(5);

/// Bytes per element of a gradient, a weight or what the optimizer keeps.
const NUMBER: u64 = 4;

/// Link estimates that peers reported.
#[derive(Debug, Clone, Default)]
pub struct LinkEstimates {
    /// By reporter, then by target.
    of: BTreeMap<PeerId, BTreeMap<PeerId, LinkEstimate>>,
}

impl LinkEstimates {
    /// Records a peer's report, up to the maximum number of links per peer.
    pub fn note(&mut self, from: PeerId, link_estimates: &[(PeerId, LinkEstimate)]) {
        if link_estimates.is_empty() {
            return;
        }
        let known = self.of.entry(from).or_default();
        for (to, path) in link_estimates.iter().filter(|(to, _)| *to != from) {
            if known.len() < limits::LINK_ESTIMATES || known.contains_key(to) {
                known.insert(*to, *path);
            }
        }
    }

    /// Removes a peer's reports. Other peers' estimates of links to it remain.
    pub fn forget(&mut self, peer: PeerId) {
        self.of.remove(&peer);
    }

    /// Whether there are no estimates.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// The peers that a peer has measured its links to.
    pub(crate) fn targets(&self, from: PeerId) -> impl Iterator<Item = &PeerId> {
        self.of.get(&from).into_iter().flat_map(BTreeMap::keys)
    }

    /// The slower of the two directions between two peers, as one or both reported them.
    fn reported(&self, from: PeerId, to: PeerId) -> Option<LinkEstimate> {
        let one = |from, to| self.of.get(&from).and_then(|known| known.get(&to)).copied();
        match (one(from, to), one(to, from)) {
            (Some(there), Some(back)) => Some(LinkEstimate {
                round_trip: there.round_trip.max(back.round_trip),
                rate: slower(there.rate, back.rate),
            }),
            (there, back) => there.or(back),
        }
    }

    /// The round trip between two peers as one or both measured it.
    pub(crate) fn round_trip(&self, from: PeerId, to: PeerId) -> Option<Duration> {
        Some(self.reported(from, to)?.round_trip)
    }

    /// The link between two peers as one or both measured it, the slower of the two directions.
    pub(crate) fn measured(&self, from: PeerId, to: PeerId) -> Option<LinkEstimate> {
        let path = self.reported(from, to)?;
        let at_one_place = LinkEstimate { round_trip: Duration::ZERO, rate: Some(Rate(u64::MAX)) };
        Some(if path.round_trip < ONE_PLACE { at_one_place } else { path })
    }

    /// The path from one peer to another: as measured, or the shortest one through a third peer
    /// that one of them has measured.
    fn path(&self, from: PeerId, to: PeerId) -> Option<LinkEstimate> {
        if let Some(path) = self.measured(from, to) {
            return Some(path);
        }
        let through = |one: PeerId, other: PeerId| {
            self.targets(one).filter_map(move |third| {
                let (near, far) = (self.measured(one, *third)?, self.measured(*third, other)?);
                let round_trip = near.round_trip.saturating_add(far.round_trip);
                Some(LinkEstimate { round_trip, rate: slower(near.rate, far.rate) })
            })
        };
        through(from, to).chain(through(to, from)).min_by_key(|path| path.round_trip)
    }

    /// The link from one peer to another if a path is known, with the rate `default_rate` if none
    /// was measured.
    pub(crate) fn link(&self, from: PeerId, to: PeerId, default_rate: Rate) -> Option<Link> {
        let path = self.path(from, to)?;
        Some(Link { delay: path.round_trip / 2, rate: path.rate.unwrap_or(default_rate) })
    }

    /// The median rate of each of these peers' links, or of all links for a peer without a measured
    /// one; empty if no link was measured at all.
    pub(crate) fn rates_of(&self, peers: &BTreeSet<PeerId>) -> BTreeMap<PeerId, Rate> {
        let mut own: BTreeMap<PeerId, Vec<Rate>> = BTreeMap::new();
        let mut all = Vec::new();
        for (from, known) in &self.of {
            for (to, rate) in known.iter().filter_map(|(to, path)| Some((to, path.rate?))) {
                all.push(rate);
                for end in [from, to].into_iter().filter(|end| peers.contains(end)) {
                    own.entry(*end).or_default().push(rate);
                }
            }
        }
        let anywhere = median(all);
        let rate = |peer: &PeerId| {
            let rate = own.remove(peer).and_then(median).or(anywhere)?;
            Some((*peer, rate))
        };
        peers.iter().filter_map(rate).collect()
    }

    /// A peer's typical link, if its rate is known: the medians of what it and others measured. Between peers at one
    /// place nothing takes time.
    pub(crate) fn typical_link(&self, peer: PeerId) -> Option<Link> {
        let own = self.of.get(&peer)?;
        let mut paths: Vec<LinkEstimate> =
            own.keys().filter_map(|other| self.measured(peer, *other)).collect();
        let middle = paths.len() / 2;
        paths.sort_unstable_by_key(|path| path.round_trip);
        let delay = paths.get(middle)?.round_trip / 2;
        let rate = median(paths.iter().filter_map(|path| path.rate).collect())?;
        Some(Link { delay, rate })
    }

    /// The rate assumed for links without a measurement: the median of all measured ones.
    pub(crate) fn median_rate(&self) -> Rate {
        let known = self.of.values().flat_map(BTreeMap::values);
        median(known.filter_map(|path| path.rate).collect()).unwrap_or(Rate(u64::MAX))
    }
}

/// The size of so many numbers of each stage.
fn bytes_of_each(manifest: &Manifest, numbers: impl Fn(Stage) -> u64) -> Vec<Bytes> {
    manifest.stages().map(|stage| Bytes(numbers(stage).saturating_mul(NUMBER))).collect()
}

fn median(mut rates: Vec<Rate>) -> Option<Rate> {
    let middle = rates.len() / 2;
    (!rates.is_empty()).then(|| *rates.select_nth_unstable(middle).1)
}

fn slower(one: Option<Rate>, other: Option<Rate>) -> Option<Rate> {
    one.into_iter().chain(other).min()
}

/// Data that a step sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Load {
    /// Activations of all its microbatches at one boundary; gradients are assumed to have the same
    /// size.
    pub activations: Bytes,
    /// The gradient of each stage.
    pub gradients: Vec<Bytes>,
    /// Weights and optimizer state of each stage, which a new replica fetches.
    pub states: Vec<Bytes>,
}

impl Load {
    /// The load of a run whose stages sum up so many numbers in a step, and have so many in their state.
    #[must_use]
    pub fn of(
        manifest: &Manifest,
        summed: impl Fn(Stage) -> u64,
        state: impl Fn(Stage) -> u64,
    ) -> Self {
        let microbatches = u64::from(manifest.training.microbatches);
        Self {
            activations: Bytes(manifest.activation_bytes().0.saturating_mul(microbatches)),
            gradients: bytes_of_each(manifest, summed),
            states: bytes_of_each(manifest, state),
        }
    }

    /// Size of a stage's weights and optimizer state, which a new replica fetches.
    pub(crate) fn state(&self, stage: Stage) -> Bytes {
        self.states.get(usize::from(stage.0)).copied().unwrap_or_default()
    }

    /// Data that one of `replicas` replicas of a stage sends.
    pub(crate) fn of_replica(&self, stage: Stage, replicas: u32) -> Traffic {
        Traffic {
            activations: Bytes(self.activations.0 / u64::from(replicas.max(1))),
            gradient: self.gradients.get(usize::from(stage.0)).copied().unwrap_or_default(),
        }
    }

    /// The load of stages that send nothing.
    #[cfg(test)]
    pub(crate) fn of_stages(stages: usize) -> Self {
        Self::with_gradients(Bytes(0), vec![Bytes(0); stages])
    }

    /// The load of stages with these gradients, and an optimizer that keeps two numbers per weight.
    #[cfg(test)]
    pub(crate) fn with_gradients(activations: Bytes, gradients: Vec<Bytes>) -> Self {
        let states = gradients.iter().map(|gradient| Bytes(3 * gradient.0)).collect();
        Self { activations, gradients, states }
    }
}

/// Distances between peers and stages.
#[derive(Debug)]
pub struct Locality<'a> {
    link_estimates: &'a LinkEstimates,
    load: &'a Load,
    /// The number of hosts of each stage, and a sample of them.
    stages: Vec<(usize, Vec<PeerId>)>,
    rate: Rate,
}

impl<'a> Locality<'a> {
    /// Distances to the stages that these peers host or are about to host. The seed determines the
    /// sample of a stage with many hosts.
    #[must_use]
    pub fn new(
        link_estimates: &'a LinkEstimates,
        load: &'a Load,
        hosts: impl Iterator<Item = (PeerId, Stage)>,
        seed: u64,
    ) -> Self {
        let mut all: Vec<Vec<(u64, PeerId)>> = vec![Vec::new(); load.gradients.len()];
        for (peer, stage) in hosts {
            let place = u64::from_le_bytes(*peer.0.first_chunk().expect("a peer id has 32 bytes"));
            if let Some(stage) = all.get_mut(usize::from(stage.0)) {
                stage.push((mixed(seed, place), peer));
            }
        }
        let sample = |mut hosts: Vec<(u64, PeerId)>| {
            let count = hosts.len();
            if count > SAMPLE {
                hosts.select_nth_unstable(SAMPLE);
                hosts.truncate(SAMPLE);
            }
            (count, hosts.into_iter().map(|(_, peer)| peer).collect())
        };
        let stages = all.into_iter().map(sample).collect();
        Self { link_estimates, load, stages, rate: link_estimates.median_rate() }
    }

    /// How long a step's tensors are in transit for this peer if it hosts this stage. For a stage
    /// without hosts, or without a known path to one, the mean over the other stages is used; zero
    /// if no path from the peer is known.
    #[must_use]
    pub fn cost(&self, peer: PeerId, stage: Stage) -> Duration {
        let place = usize::from(stage.0);
        let hosts = self.others(peer, place);
        let replicas = u32::try_from(hosts + 1).unwrap_or(u32::MAX);
        let traffic = self.load.of_replica(stage, replicas);
        let exchange = |link: Link| 2 * link.exchange(traffic.gradient, replicas);
        let pass = |link: Link| 2 * link.time(traffic.activations);
        let others = u32::try_from(hosts).unwrap_or(u32::MAX);
        let beside = [place.checked_sub(1), Some(place + 1)].into_iter().flatten();
        let beside = beside.filter(|stage| *stage < self.stages.len());
        let passing: Duration = beside.map(|stage| self.mean(peer, stage, pass)).sum();
        self.mean(peer, place, exchange).saturating_mul(others) + passing
    }

    fn others(&self, peer: PeerId, stage: usize) -> usize {
        let Some((count, sample)) = self.stages.get(stage) else { return 0 };
        count - usize::from(sample.contains(&peer))
    }

    /// Mean of a time over the paths from a peer to a stage's hosts.
    fn mean(&self, peer: PeerId, stage: usize, time: impl Fn(Link) -> Duration) -> Duration {
        let to = |stage: &(usize, Vec<PeerId>)| self.links(peer, &stage.1);
        let mut links = self.stages.get(stage).map_or_else(Vec::new, to);
        if links.is_empty() {
            links = self.stages.iter().flat_map(to).collect();
        }
        let count = u32::try_from(links.len()).unwrap_or(u32::MAX);
        let sum: Duration = links.into_iter().map(time).sum();
        sum.checked_div(count).unwrap_or_default()
    }

    fn links(&self, peer: PeerId, hosts: &[PeerId]) -> Vec<Link> {
        let others = hosts.iter().filter(|host| **host != peer);
        let link_estimates = others.filter_map(|host| self.link_estimates.path(peer, *host));
        link_estimates
            .map(|path| Link { delay: path.round_trip / 2, rate: path.rate.unwrap_or(self.rate) })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u8) -> PeerId {
        PeerId([number; 32])
    }

    fn path(milliseconds: u64) -> LinkEstimate {
        LinkEstimate {
            round_trip: Duration::from_millis(milliseconds),
            rate: Some(Rate(1_000_000)),
        }
    }

    /// Two places: peers 1 to 3 and peers 11 to 13. All peers of one place have measured each other
    /// and one peer of the other place.
    fn two_places() -> LinkEstimates {
        let mut link_estimates = LinkEstimates::default();
        for base in [0, 10] {
            for one in 1..4 {
                let near = (1..4).filter(|other| *other != one);
                let mut reported: Vec<(PeerId, LinkEstimate)> =
                    near.map(|other| (peer(base + other), path(10))).collect();
                reported.push((peer(11 - base), path(100)));
                link_estimates.note(peer(base + one), &reported);
            }
        }
        link_estimates
    }

    #[test]
    fn an_unmeasured_path_leads_through_a_third_peer() {
        let link_estimates = two_places();
        let round_trip =
            |from, to| link_estimates.path(peer(from), peer(to)).map(|path| path.round_trip);
        assert_eq!(round_trip(1, 2), Some(Duration::from_millis(10)));
        assert_eq!(round_trip(2, 12), Some(Duration::from_millis(110)));
        assert_eq!(round_trip(1, 77), None);
    }

    #[test]
    fn a_report_does_not_bring_a_peer_nearer() {
        let mut link_estimates = two_places();
        link_estimates.note(peer(11), &[(peer(1), path(1))]);
        let found = link_estimates.path(peer(11), peer(1)).map(|path| path.round_trip);
        assert_eq!(found, Some(Duration::from_millis(100)));
    }

    #[test]
    fn the_load_of_machines_at_one_place_is_no_distance() {
        let mut link_estimates = LinkEstimates::default();
        let busy = LinkEstimate { round_trip: Duration::from_millis(4), rate: Some(Rate(1000)) };
        link_estimates.note(peer(1), &[(peer(2), busy), (peer(3), path(0))]);
        let link = |to| link_estimates.link(peer(1), peer(to), Rate(7));
        assert_eq!(link(2), link(3));
    }

    #[test]
    fn the_number_of_reported_links_is_limited() {
        let mut link_estimates = LinkEstimates::default();
        for number in 0..200 {
            link_estimates.note(peer(0), &[(peer(number), path(1))]);
        }
        assert_eq!(link_estimates.of[&peer(0)].len(), limits::LINK_ESTIMATES);
        link_estimates.forget(peer(0));
        assert!(link_estimates.is_empty());
    }

    /// Stage 0 is at the first place, stage 1 at the second.
    fn cost(load: &Load, newcomer: u8, stage: u16) -> Duration {
        let link_estimates = two_places();
        let hosts =
            [(1, 0), (2, 0), (11, 1), (12, 1)].map(|(number, at)| (peer(number), Stage(at)));
        Locality::new(&link_estimates, load, hosts.into_iter(), 7)
            .cost(peer(newcomer), Stage(stage))
    }

    #[test]
    fn large_gradients_favour_near_replicas_and_large_activations_near_neighbour_stages() {
        let gradients = vec![Bytes(3_000_000); 2];
        let sums = Load::with_gradients(Bytes(0), gradients);
        // Two others of three replicas: for each, a third of the gradient and the latency, in both
        // directions; and the latency to the other place and back.
        let milliseconds = |load, number, stage| cost(load, number, stage).as_millis();
        assert_eq!(milliseconds(&sums, 3, 0), 2 * (2 * (5 + 1000)) + 2 * (50 + 55) / 2);
        assert!(cost(&sums, 3, 0) < cost(&sums, 3, 1));
        assert!(cost(&sums, 13, 1) < cost(&sums, 13, 0));
        // Activations go to the other stage: then its place is near.
        let none = vec![Bytes(0); 2];
        let passing = Load::with_gradients(Bytes(300_000_000), none);
        let equal = cost(&passing, 3, 1).abs_diff(cost(&passing, 3, 0));
        assert!(equal < Duration::from_millis(400), "rates are the same everywhere: {equal:?}");
        assert!(cost(&passing, 3, 1) != cost(&passing, 3, 0));
    }

    #[test]
    fn without_estimates_all_stages_are_equally_near() {
        let load = Load::with_gradients(Bytes(5), vec![Bytes(5); 3]);
        let link_estimates = LinkEstimates::default();
        let hosts = [(peer(1), Stage(0)), (peer(2), Stage(1))];
        let locality = Locality::new(&link_estimates, &load, hosts.into_iter(), 7);
        assert!((0..3).all(|stage| locality.cost(peer(3), Stage(stage)) == Duration::ZERO));
    }
}
