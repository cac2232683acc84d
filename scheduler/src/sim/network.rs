//! Links between peers: one ordered control stream in each direction, and tensors beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::message::LinkEstimate;
use shoal_protocol::units::{Bytes, Moment, Rate};

use super::scenario::{NetworkScenario, Scenario};
use crate::rng::Rng;

/// Maximum number of links that a peer knows: more than it distributes work over, so that the total
/// grows with the swarm and not with its square.
const LINKS: usize = 128;

/// Files get one part in this many of an uplink.
const FILES: u64 = 4;

/// Time to send `size` at a rate in bytes per second.
fn time_of(size: Bytes, rate: u64) -> Duration {
    Duration::from_micros(size.0 * 1_000_000 / rate)
}

impl NetworkScenario {
    /// A measurement of the link between two regions: its rate, limited by the sender's uplink.
    pub(super) fn path(&self, from: usize, to: usize) -> LinkEstimate {
        let round_trip = self.latency[from][to] + self.latency[to][from];
        let own = self.rate(from, to).unwrap_or(u64::MAX);
        let rate = Rate(own.min(self.uplink.unwrap_or(u64::MAX)));
        LinkEstimate { round_trip, rate: Some(rate) }
    }

    /// Rate of tensors from one region to another.
    fn rate(&self, from: usize, to: usize) -> Option<u64> {
        let of_regions = self.bandwidths.get(from).map(|row| row[to]);
        of_regions.or(self.bandwidth)
    }
}

/// The network: computes arrival times.
#[derive(Debug)]
pub(super) struct Network {
    scenario: NetworkScenario,
    regions: Vec<usize>,
    /// The first peers that each peer contacted, in a swarm of more peers than `LINKS`.
    contacts: Vec<BTreeSet<usize>>,
    rng: Rng,
    /// Arrival of the last control message between two peers.
    control: BTreeMap<(usize, usize), Moment>,
    /// When the last byte of tensors between two peers leaves the sender.
    bulk: BTreeMap<(usize, usize), Moment>,
    /// When the last byte of tensors, and of files, leaves a peer whose uplink is shared.
    tensors: BTreeMap<usize, Moment>,
    files: BTreeMap<usize, Moment>,
    /// Slowed links: the end and the additional delay.
    slow: BTreeMap<(usize, usize), (Moment, Duration)>,
    /// Cut links, and the end of the cut.
    cut: BTreeMap<(usize, usize), Moment>,
}

impl Network {
    pub(super) fn new(scenario: &Scenario) -> Self {
        Self {
            scenario: scenario.network.clone(),
            regions: scenario.peers.iter().map(|peer| peer.region).collect(),
            contacts: vec![BTreeSet::new(); scenario.peers.len()],
            rng: Rng::new(scenario.seed ^ 0x6e65_7477_6f72_6b00),
            control: BTreeMap::new(),
            bulk: BTreeMap::new(),
            tensors: BTreeMap::new(),
            files: BTreeMap::new(),
            slow: BTreeMap::new(),
            cut: BTreeMap::new(),
        }
    }

    /// Whether peers get true measurements of their links.
    pub(super) fn is_measured(&self) -> bool {
        self.scenario.measured
    }

    /// Peers to which a peer knows its links: all others in a small swarm, otherwise the first
    /// `LINKS` that it contacted.
    pub(super) fn known_to(&self, peer: usize) -> Vec<usize> {
        if self.is_small() {
            (0..self.regions.len()).filter(|other| *other != peer).collect()
        } else {
            self.contacts[peer].iter().copied().collect()
        }
    }

    fn is_small(&self) -> bool {
        self.regions.len() <= LINKS + 1
    }

    /// Records that a peer sends data to another.
    fn meet(&mut self, from: usize, to: usize) {
        if !self.is_small() && self.contacts[from].len() < LINKS {
            self.contacts[from].insert(to);
        }
    }

    /// A measurement of the link between two peers.
    pub(super) fn link(&self, from: usize, to: usize) -> LinkEstimate {
        self.scenario.path(self.regions[from], self.regions[to])
    }

    /// Arrival times of a control message: never before that of an earlier one.
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

    /// Arrival times of a tensor. Each travels on a stream of its own; all share the link.
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

    /// Arrival of a file: beside all tensors, and after the earlier files of its sender.
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

    /// Slows a link until a moment.
    pub(super) fn slow(&mut self, link: (usize, usize), until: Moment, delay: Duration) {
        self.slow.insert(link, (until, delay));
    }

    /// Drops all data on a link until a moment.
    pub(super) fn cut(&mut self, link: (usize, usize), until: Moment) {
        let known = self.cut.entry(link).or_default();
        *known = until.max(*known);
    }

    pub(super) fn is_cut(&self, now: Moment, link: (usize, usize)) -> bool {
        self.cut.get(&link).is_some_and(|until| now < *until)
    }

    /// A connection broke or one of its ends died: later data does not wait for data in flight.
    pub(super) fn forget(&mut self, one: usize, other: usize) {
        for link in [(one, other), (other, one)] {
            self.control.remove(&link);
            self.bulk.remove(&link);
        }
    }

    /// The arrival times: sometimes a second one, long after and out of order.
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
