//! Links between peers: one ordered control stream each way, and tensors beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::message::LinkEstimate;
use shoal_protocol::units::{Bytes, Moment, Rate};

use super::scenario::{NetworkScenario, Scenario};
use crate::rng::Rng;

/// Links that a peer knows at most: more than it sends work over, so that what all know grows with the swarm and
/// not with its square.
const LINKS: usize = 128;

/// Files have one part in so many of an uplink.
const FILES: u64 = 4;

/// How long so much takes at so many bytes a second.
fn time_of(size: Bytes, rate: u64) -> Duration {
    Duration::from_micros(size.0 * 1_000_000 / rate)
}

impl NetworkScenario {
    /// A link from one region to another as it can be measured: what its sender's uplink leaves it at most.
    pub(super) fn path(&self, from: usize, to: usize) -> LinkEstimate {
        let round_trip = self.latency[from][to] + self.latency[to][from];
        let own = self.rate(from, to).unwrap_or(u64::MAX);
        let rate = Rate(own.min(self.uplink.unwrap_or(u64::MAX)));
        LinkEstimate { round_trip, rate: Some(rate) }
    }

    /// What tensors from one region to another go at.
    fn rate(&self, from: usize, to: usize) -> Option<u64> {
        let of_regions = self.bandwidths.get(from).map(|row| row[to]);
        of_regions.or(self.bandwidth)
    }
}

/// The network: when what is sent arrives.
#[derive(Debug)]
pub(super) struct Network {
    scenario: NetworkScenario,
    regions: Vec<usize>,
    /// The first with whom each peer spoke, in a swarm of more than a peer knows the links to.
    met: Vec<BTreeSet<usize>>,
    rng: Rng,
    /// When the last control message from one to another arrives.
    control: BTreeMap<(usize, usize), Moment>,
    /// When the last byte of tensors leaves for another.
    bulk: BTreeMap<(usize, usize), Moment>,
    /// When the last byte of tensors, and that of files, leaves a peer whose uplink is shared.
    tensors: BTreeMap<usize, Moment>,
    files: BTreeMap<usize, Moment>,
    /// Links that are slower until a moment, and by how much.
    slow: BTreeMap<(usize, usize), (Moment, Duration)>,
    /// Links on which everything is lost until a moment.
    cut: BTreeMap<(usize, usize), Moment>,
}

impl Network {
    pub(super) fn new(scenario: &Scenario) -> Self {
        Self {
            scenario: scenario.network.clone(),
            regions: scenario.peers.iter().map(|peer| peer.region).collect(),
            met: vec![BTreeSet::new(); scenario.peers.len()],
            rng: Rng::new(scenario.seed ^ 0x6e65_7477_6f72_6b00),
            control: BTreeMap::new(),
            bulk: BTreeMap::new(),
            tensors: BTreeMap::new(),
            files: BTreeMap::new(),
            slow: BTreeMap::new(),
            cut: BTreeMap::new(),
        }
    }

    /// Whether peers know what their links are.
    pub(super) fn is_measured(&self) -> bool {
        self.scenario.measured
    }

    /// To whom a peer knows its links: all others in a small swarm, and in a larger one as many with whom it
    /// spoke.
    pub(super) fn known_to(&self, peer: usize) -> Vec<usize> {
        if self.is_small() {
            (0..self.regions.len()).filter(|other| *other != peer).collect()
        } else {
            self.met[peer].iter().copied().collect()
        }
    }

    fn is_small(&self) -> bool {
        self.regions.len() <= LINKS + 1
    }

    /// One peer sends another something.
    fn meet(&mut self, from: usize, to: usize) {
        if !self.is_small() && self.met[from].len() < LINKS {
            self.met[from].insert(to);
        }
    }

    /// A link as it can be measured: what its sender's uplink leaves it at most.
    pub(super) fn link(&self, from: usize, to: usize) -> LinkEstimate {
        self.scenario.path(self.regions[from], self.regions[to])
    }

    /// When a control message arrives: never before one that was sent earlier.
    pub(super) fn control(&mut self, now: Moment, from: usize, to: usize) -> Vec<Moment> {
        if from == to {
            return self.twice(now);
        }
        self.meet(from, to);
        let flight = self.flight(now, from, to);
        let last = self.control.entry((from, to)).or_default();
        *last = (*last).max(now + flight);
        let arrival = *last;
        self.twice(arrival)
    }

    /// When a tensor arrives. Each travels on a stream of its own, all share
    /// the link.
    pub(super) fn tensor(
        &mut self,
        now: Moment,
        from: usize,
        to: usize,
        size: Bytes,
    ) -> Vec<Moment> {
        if from == to {
            return self.twice(now);
        }
        self.meet(from, to);
        let transfer = match self.scenario.rate(self.regions[from], self.regions[to]) {
            Some(bandwidth) => time_of(size, bandwidth),
            None => Duration::ZERO,
        };
        let uplink = self.tensor_out(now, from, size);
        let free = self.bulk.entry((from, to)).or_default();
        *free = ((*free).max(now) + transfer).max(uplink);
        let sent = *free;
        let arrival = sent + self.flight(now, from, to);
        self.twice(arrival)
    }

    /// When a file arrives: it goes out beside the others, and behind all files of its sender.
    pub(super) fn file(&mut self, now: Moment, from: usize, to: usize, size: Bytes) -> Moment {
        let Some(uplink) = self.scenario.uplink else {
            return self.tensor(now, from, to, size)[0];
        };
        let free = self.files.entry(from).or_default();
        *free = (*free).max(now) + time_of(size, uplink / FILES);
        *free + self.flight(now, from, to)
    }

    /// When a tensor has left its sender.
    fn tensor_out(&mut self, now: Moment, from: usize, size: Bytes) -> Moment {
        let Some(uplink) = self.scenario.uplink else { return now };
        let files = self.files.get(&from).is_some_and(|until| *until > now);
        let rest = if files { uplink - uplink / FILES } else { uplink };
        let free = self.tensors.entry(from).or_default();
        *free = (*free).max(now) + time_of(size, rest);
        *free
    }

    /// Makes a link slower until a moment.
    pub(super) fn slow(&mut self, link: (usize, usize), until: Moment, delay: Duration) {
        self.slow.insert(link, (until, delay));
    }

    /// Loses what is sent over a link until a moment.
    pub(super) fn cut(&mut self, link: (usize, usize), until: Moment) {
        let known = self.cut.entry(link).or_default();
        *known = until.max(*known);
    }

    pub(super) fn is_cut(&self, now: Moment, link: (usize, usize)) -> bool {
        self.cut.get(&link).is_some_and(|until| now < *until)
    }

    /// A connection broke, or one of its ends died: what follows does not wait for what was on its way.
    pub(super) fn forget(&mut self, one: usize, other: usize) {
        for link in [(one, other), (other, one)] {
            self.control.remove(&link);
            self.bulk.remove(&link);
        }
    }

    /// What arrives, and perhaps arrives once more, long after and out of order.
    fn twice(&mut self, first: Moment) -> Vec<Moment> {
        if self.rng.chance(self.scenario.duplicates_per_mille) {
            let most = self.rng.pick(&[2_000, 100_000, 1_000_000]);
            vec![first, first + self.rng.microseconds(0..=most)]
        } else {
            vec![first]
        }
    }

    fn flight(&mut self, now: Moment, from: usize, to: usize) -> Duration {
        let latency = self.scenario.latency[self.regions[from]][self.regions[to]];
        let jitter = u64::try_from(self.scenario.jitter.as_micros()).expect("jitter is short");
        let slow = self.slow.get(&(from, to)).filter(|(until, _)| now < *until);
        let delay = slow.map_or(Duration::ZERO, |(_, delay)| *delay);
        latency + self.rng.microseconds(0..=jitter) + delay
    }
}
