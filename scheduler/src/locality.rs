//! Which stage is nearest to a peer, where several would do equally well.
//!
//! Members say what they measured of their links to a few others, each as the sender that it is; a newcomer
//! looks round before it is given a stage. Where two ends measured a link the worse word counts, so nobody
//! comes near others by saying so. Ways that nobody measured lead through a third who knows both ends:
//! machines of one place have like ways to all others. What a stage costs is what the planner's model
//! (`planner`) says of one device there: its part of the stage's all-reduce, and its activations' ways to the
//! stages beside it and back, over all of whose replicas the router spreads them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{PeerId, Stage};
use shoal_protocol::limits;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::LinkEstimate;
use shoal_protocol::units::{Bytes, Rate};

use crate::planner::{Link, Traffic};
use crate::rng::mixed;

/// Replicas of a stage that are looked at: in a large swarm a few stand for all.
const SAMPLE: usize = 16;

/// Peers with shorter round trips are at one place, and no nearer to each other than to others there: what is
/// measured of such a link is how busy the machines at its ends are.
const ONE_PLACE: Duration = Duration::from_millis(5);

/// Bytes of a number of a gradient.
const NUMBER: u64 = 4;

/// A stage's weights and both of Adam's moments weigh so many times as much as its gradient.
const STATE: u64 = 3;

/// What peers measured of their links.
#[derive(Debug, Clone, Default)]
pub struct LinkEstimates {
    /// From whom, to whom.
    of: BTreeMap<PeerId, BTreeMap<PeerId, LinkEstimate>>,
}

impl LinkEstimates {
    /// A peer measured this. What is beyond as many as a peer says is left out.
    pub fn note(&mut self, from: PeerId, link_estimates: &[(PeerId, LinkEstimate)]) {
        if link_estimates.is_empty() {
            return;
        }
        let known = self.of.entry(from).or_default();
        for (to, path) in link_estimates.iter().filter(|(to, _)| *to != from) {
            if known.len() < limits::WAYS || known.contains_key(to) {
                known.insert(*to, *path);
            }
        }
    }

    /// A peer is gone. What others measured of it stays with them.
    pub fn forget(&mut self, peer: PeerId) {
        self.of.remove(&peer);
    }

    /// Whether nothing is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    fn measured(&self, from: PeerId, to: PeerId) -> Option<LinkEstimate> {
        let one = |from, to| self.of.get(&from).and_then(|known| known.get(&to)).copied();
        let path = match (one(from, to), one(to, from)) {
            (Some(there), Some(back)) => LinkEstimate {
                round_trip: there.round_trip.max(back.round_trip),
                rate: slower(there.rate, back.rate),
            },
            (there, back) => there.or(back)?,
        };
        let at_one_place = LinkEstimate { round_trip: Duration::ZERO, rate: Some(Rate(u64::MAX)) };
        Some(if path.round_trip < ONE_PLACE { at_one_place } else { path })
    }

    /// The way from one peer to another: as it was measured, or the shortest through a third that one
    /// of them knows.
    fn path(&self, from: PeerId, to: PeerId) -> Option<LinkEstimate> {
        if let Some(path) = self.measured(from, to) {
            return Some(path);
        }
        let through = |one: PeerId, other: PeerId| {
            let thirds = self.of.get(&one).into_iter().flat_map(BTreeMap::keys);
            thirds.filter_map(move |third| {
                let (near, far) = (self.measured(one, *third)?, self.measured(*third, other)?);
                let round_trip = near.round_trip.saturating_add(far.round_trip);
                Some(LinkEstimate { round_trip, rate: slower(near.rate, far.rate) })
            })
        };
        through(from, to).chain(through(to, from)).min_by_key(|path| path.round_trip)
    }

    /// The link from one peer to another, where their way is known, with this rate where nobody measured it.
    pub(crate) fn link(&self, from: PeerId, to: PeerId, robust_average: Rate) -> Option<Link> {
        let path = self.path(from, to)?;
        Some(Link { delay: path.round_trip / 2, rate: path.rate.unwrap_or(robust_average) })
    }

    /// What the links of each of these peers carry, typically, or everybody's where nobody measured one of its
    /// own; nothing where no link was measured at all.
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

    /// What a byte a second is taken for where nobody measured it: the median of what was.
    pub(crate) fn robust_rate(&self) -> Rate {
        let known = self.of.values().flat_map(BTreeMap::values);
        median(known.filter_map(|path| path.rate).collect()).unwrap_or(Rate(u64::MAX))
    }
}

fn median(mut rates: Vec<Rate>) -> Option<Rate> {
    let middle = rates.len() / 2;
    (!rates.is_empty()).then(|| *rates.select_nth_unstable(middle).1)
}

fn slower(one: Option<Rate>, other: Option<Rate>) -> Option<Rate> {
    one.into_iter().chain(other).min()
}

/// What a step sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Load {
    /// Activations of all its microbatches at one boundary; gradients are taken to weigh as much.
    pub activations: Bytes,
    /// The gradient of each stage.
    pub gradients: Vec<Bytes>,
}

impl Load {
    /// Of a run whose stages have so many parameters.
    #[must_use]
    pub fn of(manifest: &Manifest, parameters: impl Fn(Stage) -> u64) -> Self {
        let microbatches = u64::from(manifest.training.microbatches);
        let gradient = |stage| Bytes(parameters(stage).saturating_mul(NUMBER));
        Self {
            activations: Bytes(manifest.activation_bytes().0.saturating_mul(microbatches)),
            gradients: manifest.stages().map(gradient).collect(),
        }
    }

    /// What who fetches a stage has to get: its weights and what the optimizer keeps of them.
    pub(crate) fn state(&self, stage: Stage) -> Bytes {
        let gradient = self.gradients.get(usize::from(stage.0)).copied().unwrap_or_default();
        Bytes(gradient.0.saturating_mul(STATE))
    }

    /// What one of so many replicas of a stage sends.
    pub(crate) fn of_replica(&self, stage: Stage, replicas: u32) -> Traffic {
        Traffic {
            activations: Bytes(self.activations.0 / u64::from(replicas.max(1))),
            gradient: self.gradients.get(usize::from(stage.0)).copied().unwrap_or_default(),
        }
    }

    /// Of so many stages that send nothing.
    #[cfg(test)]
    pub(crate) fn of_stages(stages: usize) -> Self {
        Self { activations: Bytes(0), gradients: vec![Bytes(0); stages] }
    }
}

/// How near peers are to stages.
#[derive(Debug)]
pub struct Locality<'a> {
    link_estimates: &'a LinkEstimates,
    load: &'a Load,
    /// How many host each stage, and some of them.
    stages: Vec<(usize, Vec<PeerId>)>,
    rate: Rate,
}

impl<'a> Locality<'a> {
    /// To the stages that these host, or are on their way to. The seed says who stands for a stage that
    /// many host.
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
        Self { link_estimates, load, stages, rate: link_estimates.robust_rate() }
    }

    /// How long a step's tensors are on their way for this peer if it hosts this stage. A stage that
    /// nobody hosts, or whose hosts have no known way here, is as far as others are typically; zero where
    /// nothing is known of the peer.
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

    /// What something takes on the ways from a peer to a stage's hosts, on average.
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

    /// Two places: 1 to 3 are here, 11 to 13 there, and all of one place know each other and one of the
    /// other place.
    fn two_places() -> LinkEstimates {
        let mut link_estimates = LinkEstimates::default();
        for base in [0, 10] {
            for one in 1..4 {
                let near = (1..4).filter(|other| *other != one);
                let mut said: Vec<(PeerId, LinkEstimate)> =
                    near.map(|other| (peer(base + other), path(10))).collect();
                said.push((peer(11 - base), path(100)));
                link_estimates.note(peer(base + one), &said);
            }
        }
        link_estimates
    }

    #[test]
    fn a_way_that_nobody_measured_leads_through_who_knows_both_ends() {
        let link_estimates = two_places();
        let round_trip =
            |from, to| link_estimates.path(peer(from), peer(to)).map(|path| path.round_trip);
        assert_eq!(round_trip(1, 2), Some(Duration::from_millis(10)));
        assert_eq!(round_trip(2, 12), Some(Duration::from_millis(110)));
        assert_eq!(round_trip(1, 77), None);
    }

    #[test]
    fn nobody_comes_near_by_saying_so() {
        let mut link_estimates = two_places();
        link_estimates.note(peer(11), &[(peer(1), path(1))]);
        let found = link_estimates.path(peer(11), peer(1)).map(|path| path.round_trip);
        assert_eq!(found, Some(Duration::from_millis(100)));
    }

    #[test]
    fn how_busy_machines_of_one_place_are_is_no_distance() {
        let mut link_estimates = LinkEstimates::default();
        let busy = LinkEstimate { round_trip: Duration::from_millis(4), rate: Some(Rate(1000)) };
        link_estimates.note(peer(1), &[(peer(2), busy), (peer(3), path(0))]);
        let link = |to| link_estimates.link(peer(1), peer(to), Rate(7));
        assert_eq!(link(2), link(3));
    }

    #[test]
    fn nobody_says_more_than_there_is_room_for() {
        let mut link_estimates = LinkEstimates::default();
        for number in 0..200 {
            link_estimates.note(peer(0), &[(peer(number), path(1))]);
        }
        assert_eq!(link_estimates.of[&peer(0)].len(), limits::WAYS);
        link_estimates.forget(peer(0));
        assert!(link_estimates.is_empty());
    }

    /// Stage 0 is here, stage 1 there.
    fn cost(load: &Load, newcomer: u8, stage: u16) -> Duration {
        let link_estimates = two_places();
        let hosts = [(1, 0), (2, 0), (11, 1), (12, 1)].map(|(who, at)| (peer(who), Stage(at)));
        Locality::new(&link_estimates, load, hosts.into_iter(), 7)
            .cost(peer(newcomer), Stage(stage))
    }

    #[test]
    fn who_adds_up_much_is_near_to_its_stage_and_who_passes_on_much_to_the_other() {
        let gradients = vec![Bytes(3_000_000); 2];
        let sums = Load { activations: Bytes(0), gradients };
        // Two others of three replicas: a third of the gradient and the way, there and back, for each;
        // and on the way to the other place and back.
        let milliseconds = |load, who, stage| cost(load, who, stage).as_millis();
        assert_eq!(milliseconds(&sums, 3, 0), 2 * (2 * (5 + 1000)) + 2 * (50 + 55) / 2);
        assert!(cost(&sums, 3, 0) < cost(&sums, 3, 1));
        assert!(cost(&sums, 13, 1) < cost(&sums, 13, 0));
        // Activations go to the other stage: then who is there is near.
        let none = vec![Bytes(0); 2];
        let passing = Load { activations: Bytes(300_000_000), gradients: none };
        let equal = cost(&passing, 3, 1).abs_diff(cost(&passing, 3, 0));
        assert!(equal < Duration::from_millis(400), "rates are the same everywhere: {equal:?}");
        assert!(cost(&passing, 3, 1) != cost(&passing, 3, 0));
    }

    #[test]
    fn where_nothing_is_known_all_stages_are_as_near() {
        let load = Load { activations: Bytes(5), gradients: vec![Bytes(5); 3] };
        let link_estimates = LinkEstimates::default();
        let hosts = [(peer(1), Stage(0)), (peer(2), Stage(1))];
        let locality = Locality::new(&link_estimates, &load, hosts.into_iter(), 7);
        assert!((0..3).all(|stage| locality.cost(peer(3), Stage(stage)) == Duration::ZERO));
    }
}
