//! Links as fluid flows with fair sharing. Data from one machine to another arrives in order. A
//! machine that exchanges data with several others divides its link max-min fairly among them
//! (Bertsekas and Gallager, Data Networks, section 6.5.2).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use shoal_protocol::units::{Bytes, Rate};

/// Capacity of one machine's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Port {
    /// Total rate of outgoing data.
    pub up: Rate,
    /// Total rate of incoming data.
    pub down: Rate,
}

/// Places whose machines share a link to the other places.
#[derive(Debug, Clone)]
pub struct Sites {
    /// The place of each machine.
    pub of: Vec<usize>,
    /// The link of each place.
    pub links: Vec<Port>,
    /// The latency within a place.
    pub near: Duration,
}

/// A flow, by sender and receiver.
type Ends = (usize, usize);

/// One side of a link of a machine or, after those, of a place: outgoing or incoming.
type Side = (usize, bool);

/// All data in transit between machines.
#[derive(Debug)]
pub(super) struct Flows<T> {
    ports: Vec<Port>,
    delay: Duration,
    sites: Option<Sites>,
    now: f64,
    /// The queue of each active flow, with the bytes left of each item.
    waiting: BTreeMap<Ends, VecDeque<(f64, T)>>,
    /// Bytes per second of each active flow.
    rates: BTreeMap<Ends, f64>,
    /// Data in flight, by arrival time.
    flying: BTreeMap<(Duration, u64), (Ends, T)>,
    sent: u64,
    /// Bytes that each flow has sent, and the seconds that it took.
    carried: BTreeMap<Ends, (f64, f64)>,
}

/// A rest of a message below this many bytes is a rounding error.
const ROUNDING: f64 = 1e-3;

impl<T> Flows<T> {
    pub(super) fn new(ports: &[Port], delay: Duration) -> Self {
        Self {
            ports: ports.to_vec(),
            delay,
            sites: None,
            now: 0.0,
            waiting: BTreeMap::new(),
            rates: BTreeMap::new(),
            flying: BTreeMap::new(),
            sent: 0,
            carried: BTreeMap::new(),
        }
    }

    /// The same with machines at several places.
    pub(super) fn between(ports: &[Port], delay: Duration, sites: &Sites) -> Self {
        let mut flows = Self::new(ports, delay);
        flows.ports.extend(&sites.links);
        flows.sites = Some(sites.clone());
        flows
    }

    /// Whether data travels between places.
    pub(super) fn crosses(&self, (from, to): Ends) -> bool {
        self.sites.as_ref().is_some_and(|sites| sites.of[from] != sites.of[to])
    }

    /// The latency from one machine to another.
    pub(super) fn delay(&self, ends: Ends) -> Duration {
        let near = self.sites.as_ref().filter(|_| !self.crosses(ends));
        near.map_or(self.delay, |sites| sites.near)
    }

    /// The sides of links that a flow takes part of.
    fn sides_of(&self, ends: Ends) -> impl Iterator<Item = Side> + use<T> {
        let (from, to) = ends;
        let sites = self.sites.as_ref().filter(|_| self.crosses(ends));
        let shared = sites.map(|sites| {
            let link = |machine: usize| sites.of.len() + sites.of[machine];
            [(link(from), true), (link(to), false)]
        });
        [(from, true), (to, false)].into_iter().chain(shared.into_iter().flatten())
    }

    /// Bytes per second of each flow while it was active.
    pub(super) fn measured(&self) -> impl Iterator<Item = (Ends, Rate)> {
        self.carried.iter().map(|(ends, (bytes, seconds))| (*ends, Rate((bytes / seconds) as u64)))
    }

    /// The elapsed time.
    pub(super) fn now(&self) -> Duration {
        Duration::from_secs_f64(self.now)
    }

    /// Queues data from one machine to another.
    pub(super) fn send(&mut self, ends: Ends, size: Bytes, what: T) {
        let queue = self.waiting.entry(ends).or_default();
        queue.push_back((size.0 as f64, what));
        if queue.len() == 1 {
            self.rates = self.fair();
        }
    }

    /// Advances to the next arrival and returns it; `None` if nothing is in transit.
    pub(super) fn next(&mut self) -> Option<(Ends, T)> {
        loop {
            let left = self.waiting.iter().map(|(ends, queue)| queue[0].0 / self.rates[ends]);
            let leaves = left.min_by(f64::total_cmp).map(|left| self.now + left);
            let first = self.flying.keys().next().copied();
            match (leaves, first) {
                (Some(leaves), first) if first.is_none_or(|(at, _)| leaves < at.as_secs_f64()) => {
                    self.pass(leaves);
                }
                (_, Some(first)) => {
                    self.pass(first.0.as_secs_f64());
                    return self.flying.remove(&first);
                }
                (_, None) => return None,
            }
        }
    }

    /// Advances the time to a moment before which no flow begins or ends.
    fn pass(&mut self, until: f64) {
        let time = (until - self.now).max(0.0);
        self.now = self.now.max(until);
        let now = Duration::from_secs_f64(self.now);
        let delays: Vec<Duration> = self.waiting.keys().map(|ends| self.delay(*ends)).collect();
        let mut ended = false;
        for ((ends, queue), delay) in self.waiting.iter_mut().zip(delays) {
            let bytes = time * self.rates[ends];
            let carried = self.carried.entry(*ends).or_default();
            *carried = (carried.0 + bytes, carried.1 + time);
            queue[0].0 -= bytes;
            if queue[0].0 <= ROUNDING {
                let (_, what) = queue.pop_front().expect("its first item was checked");
                self.flying.insert((now + delay, self.sent), (*ends, what));
                self.sent += 1;
                ended |= queue.is_empty();
            }
        }
        if ended {
            self.waiting.retain(|_, queue| !queue.is_empty());
            self.rates = self.fair();
        }
    }

    /// The max-min fair rates, by progressive filling: the side with the least capacity per flow is
    /// shared evenly among its flows, and so on with the remaining capacity.
    fn fair(&self) -> BTreeMap<Ends, f64> {
        let mut sides: BTreeMap<Side, (f64, usize)> = BTreeMap::new();
        for ends in self.waiting.keys() {
            for side in self.sides_of(*ends) {
                let port = self.ports[side.0];
                let rate = if side.1 { port.up } else { port.down };
                sides.entry(side).or_insert((rate.0 as f64, 0)).1 += 1;
            }
        }
        let mut rates = BTreeMap::new();
        let share = |(rate, flows): (f64, usize)| rate / flows as f64;
        while rates.len() < self.waiting.len() {
            let busy = sides.iter().filter(|(_, (_, flows))| *flows > 0);
            let least = busy.min_by(|one, other| share(*one.1).total_cmp(&share(*other.1)));
            let (full, rate) =
                least.map(|(side, left)| (*side, share(*left))).expect("a flow remains");
            for ends in self.waiting.keys() {
                if self.sides_of(*ends).any(|side| side == full) && !rates.contains_key(ends) {
                    rates.insert(*ends, rate);
                    for side in self.sides_of(*ends) {
                        let (left, flows) = sides.get_mut(&side).expect("it was counted");
                        *left -= rate;
                        *flows -= 1;
                    }
                }
            }
        }
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Arrival times in milliseconds of data given by its ends and bytes, over links with these
    /// rates up and down and a latency of 100 ms.
    fn arrivals(ports: &[(u64, u64)], sent: &[(Ends, u64)]) -> Vec<(usize, u128)> {
        let port = |(up, down): &(u64, u64)| Port { up: Rate(*up), down: Rate(*down) };
        let ports: Vec<Port> = ports.iter().map(port).collect();
        let mut flows = Flows::new(&ports, Duration::from_millis(100));
        for (what, (ends, size)) in sent.iter().enumerate() {
            flows.send(*ends, Bytes(*size), what);
        }
        // Sums of fractions are inexact.
        let rounded = |time: Duration| (time + Duration::from_micros(500)).as_millis();
        std::iter::from_fn(|| flows.next().map(|(_, what)| (what, rounded(flows.now())))).collect()
    }

    #[test]
    fn one_flow_gets_the_rate_of_the_slower_side_and_keeps_its_order() {
        let ports = [(1000, 1), (1, 500)];
        assert_eq!(arrivals(&ports, &[((0, 1), 500), ((0, 1), 250)]), [(0, 1100), (1, 1600)]);
    }

    #[test]
    fn other_receivers_get_the_rate_that_a_slow_one_leaves() {
        // Of 1000 B/s up, 200 go to the receiver that accepts no more; the other gets 800, then its
        // full rate.
        let ports = [(1000, 1), (1, 200), (1, 900)];
        assert_eq!(arrivals(&ports, &[((0, 1), 200), ((0, 2), 1700)]), [(0, 1100), (1, 2100)]);
    }

    #[test]
    fn machines_of_a_place_share_its_link() {
        let port = |rate| Port { up: Rate(rate), down: Rate(rate) };
        let sites = Sites {
            of: vec![0, 0, 1, 1],
            links: vec![port(100); 2],
            near: Duration::from_millis(1),
        };
        let mut flows = Flows::between(&[port(1000); 4], Duration::from_millis(100), &sites);
        for (what, ends) in [(0, 2), (1, 3), (0, 1)].into_iter().enumerate() {
            flows.send(ends, Bytes(95), what);
        }
        let next = |flows: &mut Flows<usize>| flows.next().map(|(_, what)| (what, flows.now()));
        let milliseconds = |(what, time): (usize, Duration)| (what, time.as_millis());
        let all = std::iter::from_fn(|| next(&mut flows)).map(milliseconds);
        assert_eq!(all.collect::<Vec<_>>(), [(2, 101), (0, 2000), (1, 2000)]);
    }

    #[test]
    fn senders_share_a_receiver() {
        let ports = [(1000, 1), (1000, 1), (1, 1000)];
        assert_eq!(arrivals(&ports, &[((0, 2), 500), ((1, 2), 1000)]), [(0, 1100), (1, 1600)]);
    }
}
