//! The model of a network: the time at which each packet arrives, or its loss.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::{Deserialize, Serialize};

/// The connection of a machine to the others.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct Access {
    /// The rate at which it can send, in Mbit/s; `None` is unlimited.
    pub up_mbit: Option<f64>,
    /// The rate at which it can receive, in Mbit/s; `None` is unlimited.
    pub down_mbit: Option<f64>,
}

/// A network of machines.
#[derive(Debug, Clone, Deserialize)]
pub struct Config {
    /// The machines.
    pub ends: Vec<Access>,
    /// The delay from any machine to any other, in milliseconds.
    pub delay_ms: f64,
    /// The largest random addition to the delay, in milliseconds. Packets keep their order.
    #[serde(default)]
    pub jitter_ms: f64,
    /// The capacity of the queue of a link, in milliseconds. A full queue drops packets.
    pub queue_ms: f64,
    /// The share of packets that is lost at random.
    #[serde(default)]
    pub loss: f64,
    /// The seed of delays and losses.
    #[serde(default)]
    pub seed: u64,
}

/// The fates of the packets of a machine, by count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Packets sent.
    pub sent: u64,
    /// Packets lost at random.
    pub lost: u64,
    /// Packets dropped by a full queue.
    pub dropped: u64,
    /// Bytes of the packets that arrived.
    pub delivered_bytes: u64,
}

/// One direction of a machine's connection: a queue that drains at a fixed rate.
#[derive(Debug, Clone, Copy)]
struct Bottleneck {
    /// Seconds for one byte.
    seconds_per_byte: f64,
    queue: Duration,
    free_at: Duration,
}

impl Bottleneck {
    fn new(mbit: Option<f64>, queue_ms: f64) -> Self {
        Self {
            seconds_per_byte: mbit.map_or(0.0, |mbit| 8.0 / (mbit * 1e6)),
            queue: milliseconds(queue_ms),
            free_at: Duration::ZERO,
        }
    }

    /// The time at which a packet that comes now has passed; `None` where the queue is full.
    fn pass(&mut self, now: Duration, bytes: usize) -> Option<Duration> {
        let begins = self.free_at.max(now);
        if begins - now > self.queue {
            return None;
        }
        self.free_at = begins + Duration::from_secs_f64(self.seconds_per_byte * bytes as f64);
        Some(self.free_at)
    }
}

/// A packet in transit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    /// The sender.
    pub from: usize,
    /// The receiver.
    pub to: usize,
    /// The whole IP packet.
    pub bytes: Vec<u8>,
}

/// The next event of a packet. Simultaneous events keep the order of sending.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    at: Duration,
    number: u64,
    arrives: bool,
    slot: usize,
}

/// The network, between `send` and `arrived`.
#[derive(Debug)]
pub struct Network {
    up: Vec<Bottleneck>,
    down: Vec<Bottleneck>,
    counts: Vec<Counts>,
    delay: Duration,
    jitter: Duration,
    loss: f64,
    random: ChaCha8Rng,
    due: BinaryHeap<Reverse<Due>>,
    /// Packets in transit, and free slots.
    packets: Vec<Option<Packet>>,
    free: Vec<usize>,
    /// The time at which the last packet of each machine has crossed: jitter keeps the order.
    crossed: Vec<Duration>,
    number: u64,
}

impl Network {
    /// A network without packets in transit.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let all = |rate: fn(&Access) -> Option<f64>| {
            config.ends.iter().map(|end| Bottleneck::new(rate(end), config.queue_ms)).collect()
        };
        Self {
            up: all(|end| end.up_mbit),
            down: all(|end| end.down_mbit),
            counts: vec![Counts::default(); config.ends.len()],
            delay: milliseconds(config.delay_ms),
            jitter: milliseconds(config.jitter_ms),
            loss: config.loss,
            random: ChaCha8Rng::seed_from_u64(config.seed),
            due: BinaryHeap::new(),
            packets: Vec::new(),
            free: Vec::new(),
            crossed: vec![Duration::ZERO; config.ends.len()],
            number: 0,
        }
    }

    /// A machine sends a packet.
    pub fn send(&mut self, now: Duration, packet: Packet) {
        let from = packet.from;
        self.counts[from].sent += 1;
        let Some(gone) = self.up[from].pass(now, packet.bytes.len()) else {
            self.counts[from].dropped += 1;
            return;
        };
        if self.chance() < self.loss {
            self.counts[from].lost += 1;
            return;
        }
        let late = self.jitter.mul_f64(self.chance());
        let crossed = (gone + self.delay + late).max(self.crossed[from]);
        self.crossed[from] = crossed;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.packets.push(None);
            self.packets.len() - 1
        });
        self.packets[slot] = Some(packet);
        self.schedule(crossed, false, slot);
    }

    /// The time of the next event.
    #[must_use]
    pub fn next(&self) -> Option<Duration> {
        self.due.peek().map(|Reverse(due)| due.at)
    }

    /// The next packet that has arrived by now.
    pub fn arrived(&mut self, now: Duration) -> Option<Packet> {
        loop {
            if self.next()? > now {
                return None;
            }
            let Reverse(Due { at, arrives, slot, .. }) = self.due.pop()?;
            let packet = self.packets[slot].take().expect("packets stay until they arrive");
            if arrives {
                self.free.push(slot);
                self.counts[packet.from].delivered_bytes += packet.bytes.len() as u64;
                return Some(packet);
            }
            match self.down[packet.to].pass(at, packet.bytes.len()) {
                Some(through) => {
                    self.packets[slot] = Some(packet);
                    self.schedule(through, true, slot);
                }
                None => {
                    self.counts[packet.from].dropped += 1;
                    self.free.push(slot);
                }
            }
        }
    }

    /// The counts of each machine so far.
    #[must_use]
    pub fn counts(&self) -> &[Counts] {
        &self.counts
    }

    fn schedule(&mut self, at: Duration, arrives: bool, slot: usize) {
        self.number += 1;
        self.due.push(Reverse(Due { at, number: self.number, arrives, slot }));
    }

    /// A uniform random number from 0 to 1.
    fn chance(&mut self) -> f64 {
        f64::from(self.random.next_u32()) / f64::from(u32::MAX)
    }
}

fn milliseconds(milliseconds: f64) -> Duration {
    Duration::from_secs_f64(milliseconds / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(up_mbit: Option<f64>, loss: f64) -> Config {
        let free = Access { up_mbit: None, down_mbit: None };
        Config {
            ends: vec![Access { up_mbit, ..free }, free],
            delay_ms: 50.0,
            jitter_ms: 0.0,
            queue_ms: 10.0,
            loss,
            seed: 7,
        }
    }

    fn packet(number: u8) -> Packet {
        Packet { from: 0, to: 1, bytes: vec![number; 1250] }
    }

    fn all(network: &mut Network) -> Vec<(Duration, u8)> {
        let mut arrived = Vec::new();
        while let Some(now) = network.next() {
            arrived.extend(network.arrived(now).map(|packet| (now, packet.bytes[0])));
        }
        arrived
    }

    #[test]
    fn packets_queue_and_arrive_after_the_delay() {
        // 1250 bytes at 10 Mbit/s: 1 ms each.
        let mut network = Network::new(&config(Some(10.0), 0.0));
        (0..3).for_each(|number| network.send(Duration::ZERO, packet(number)));
        let expected: Vec<_> =
            (0..3).map(|n| (Duration::from_millis(51 + u64::from(n)), n)).collect();
        assert_eq!(all(&mut network), expected);
    }

    #[test]
    fn a_full_queue_drops_packets() {
        let mut network = Network::new(&config(Some(10.0), 0.0));
        (0..100).for_each(|number| network.send(Duration::ZERO, packet(number)));
        // 10 ms of queue, and the one that is being sent.
        assert_eq!(all(&mut network).len(), 11);
        assert_eq!(network.counts()[0].dropped, 89);
    }

    #[test]
    fn the_receive_rate_limits_too() {
        let mut config = config(None, 0.0);
        config.ends[1].down_mbit = Some(10.0);
        let mut network = Network::new(&config);
        (0..3).for_each(|number| network.send(Duration::ZERO, packet(number)));
        let last = all(&mut network).last().expect("three").0;
        assert_eq!(last, Duration::from_millis(53));
    }

    #[test]
    fn loss_has_the_configured_rate_and_repeats_with_the_seed() {
        let run = || {
            let mut network = Network::new(&config(None, 0.1));
            (0..10_000).for_each(|_| network.send(Duration::ZERO, packet(0)));
            (all(&mut network).len(), network.counts()[0].lost)
        };
        let (arrived, lost) = run();
        assert_eq!(arrived as u64 + lost, 10_000);
        assert!((900..1100).contains(&lost), "{lost}");
        assert_eq!(run(), (arrived, lost));
    }

    #[test]
    fn jitter_keeps_the_order() {
        let mut config = config(None, 0.0);
        config.jitter_ms = 20.0;
        let mut network = Network::new(&config);
        (0..100).for_each(|n| network.send(Duration::from_micros(u64::from(n)), packet(n)));
        let order: Vec<u8> = all(&mut network).into_iter().map(|(_, number)| number).collect();
        assert_eq!(order, (0..100).collect::<Vec<u8>>());
    }
}
