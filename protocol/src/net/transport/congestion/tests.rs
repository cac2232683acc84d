//! Tests of the window on a simulated link: a queue with a fixed rate, in virtual time.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::*;

const PACKET: u64 = 1400;

/// Link rate in bytes per second: 200 Mbit/s.
const RATE: f64 = 25e6;

/// The assumed round trip before the first measurement (RFC 9002, 6.2.2).
const FIRST_ROUND_TRIP: Duration = Duration::from_millis(333);

#[derive(Debug, Clone, Copy)]
struct Link {
    round_trip: Duration,
    /// The maximum delay of the queue.
    queue: Duration,
    loss: f64,
}

/// A connection that always has something to send.
struct Flow {
    window: Tolerant,
    /// Packets in flight, by time of sending, each with the time of its acknowledgement unless it
    /// is lost.
    under_way: std::collections::VecDeque<(Instant, Option<Instant>)>,
    send_at: Instant,
    round_trips: RoundTrips,
    arrived: u64,
    lost: u64,
    /// The time of sending of the first packet since which none has arrived.
    silent_since: Option<Instant>,
}

impl Flow {
    fn new(now: Instant) -> Self {
        Self {
            window: Tolerant::new(1 << 20, now, PACKET as u16),
            under_way: std::collections::VecDeque::new(),
            send_at: now,
            round_trips: RoundTrips::default(),
            arrived: 0,
            lost: 0,
            silent_since: None,
        }
    }

    fn may_send(&self) -> bool {
        self.under_way.len() as u64 * PACKET + PACKET <= self.window.window()
    }

    /// The next time at which it learns the fate of a packet.
    fn learns_at(&self) -> Option<Instant> {
        self.under_way.iter().find_map(|(_, arrives)| *arrives)
    }

    /// All packets before a delivered one are lost: the link preserves the order.
    fn learn(&mut self, now: Instant) {
        while let Some((sent, arrives)) = self.under_way.pop_front() {
            if let Some(arrives) = arrives {
                let sample = arrives - sent;
                let RoundTrips { smoothed, shortest } = self.round_trips;
                self.round_trips = if shortest.is_zero() {
                    RoundTrips { smoothed: sample, shortest: sample }
                } else {
                    let smoothed = smoothed.mul_f64(7.0 / 8.0) + sample.mul_f64(1.0 / 8.0);
                    RoundTrips { smoothed, shortest: shortest.min(sample) }
                };
                self.arrived += PACKET;
                self.silent_since = None;
                self.window.acknowledged(now, sent, PACKET, false, self.round_trips);
                return;
            }
            self.lost += PACKET;
            // Persistent congestion (RFC 9002, 7.6), with round trips that vary by an eighth.
            let since = *self.silent_since.get_or_insert(sent);
            let silence = 3 * self.round_trips.smoothed.mul_f64(1.5);
            let silent = !silence.is_zero() && sent - since > silence;
            self.window.lost(now, sent, silent, PACKET);
        }
    }
}

/// Simulates flows on a shared link for some seconds.
fn run(link: Link, flows: usize, seconds: u64) -> Vec<Flow> {
    let began = Instant::now();
    let end = began + Duration::from_secs(seconds);
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut flows: Vec<Flow> = (0..flows).map(|_| Flow::new(began)).collect();
    let mut free_at = began;
    loop {
        let sends = |flow: &Flow| flow.may_send().then_some(flow.send_at);
        let event = |flow: &Flow| sends(flow).into_iter().chain(flow.learns_at()).min();
        let next = flows.iter().enumerate().filter_map(|(i, flow)| Some((event(flow)?, i))).min();
        let Some((now, index)) = next.filter(|(now, _)| *now < end) else { return flows };
        let flow = &mut flows[index];
        if flow.learns_at() == Some(now) {
            flow.learn(now);
            flow.send_at = flow.send_at.max(now);
            continue;
        }
        let waits = free_at.saturating_duration_since(now);
        let full = waits > link.queue;
        if !full {
            free_at = free_at.max(now) + Duration::from_secs_f64(PACKET as f64 / RATE);
        }
        let lost = full || f64::from(random.next_u32()) < link.loss * f64::from(u32::MAX);
        flow.under_way.push_back((now, (!lost).then(|| free_at + link.round_trip)));
        // Packets are paced over the round trip, a quarter faster than the window (RFC 9002, 7.7).
        let unknown = flow.round_trips.smoothed.is_zero();
        let round_trip = if unknown { FIRST_ROUND_TRIP } else { flow.round_trips.smoothed };
        let interval = round_trip.mul_f64(PACKET as f64 / (1.25 * flow.window.window));
        flow.send_at = now + interval;
    }
}

/// One flow's share of the link, and the share of its packets that is lost.
fn alone(round_trip_ms: u64, queue_ms: u64, loss: f64) -> (f64, f64) {
    let link = Link {
        round_trip: Duration::from_millis(round_trip_ms),
        queue: Duration::from_millis(queue_ms),
        loss,
    };
    let seconds = 20;
    let flow = run(link, 1, seconds).pop().expect("one");
    let used = flow.arrived as f64 / (RATE * seconds as f64);
    (used, flow.lost as f64 / (flow.arrived + flow.lost) as f64)
}

#[test]
fn a_long_link_is_filled_with_any_queue() {
    for queue_ms in [5, 20, 50, 100] {
        let (used, lost) = alone(100, queue_ms, 0.0);
        assert!(used > 0.92 && lost < 0.03, "queue of {queue_ms} ms: {used:.3}, {lost:.3}");
    }
}

#[test]
fn random_loss_costs_only_the_lost_packets() {
    for (loss, queue_ms) in [(0.001, 50), (0.01, 50), (0.01, 10), (0.015, 50)] {
        let (used, lost) = alone(100, queue_ms, loss);
        assert!(
            used > 0.9 && lost < loss + 0.02,
            "loss {loss}, queue of {queue_ms} ms: {used:.3}, {lost:.4}"
        );
    }
}

#[test]
fn short_links_are_filled_too() {
    for (round_trip_ms, queue_ms) in [(1, 1), (1, 20), (10, 5)] {
        let (used, lost) = alone(round_trip_ms, queue_ms, 0.0);
        assert!(used > 0.9 && lost < 0.05, "{round_trip_ms}, {queue_ms}: {used:.3}, {lost:.3}");
    }
}

#[test]
fn heavy_loss_reduces_the_rate() {
    // A link that drops a third of all packets is full, even without queueing delay.
    let (used, _) = alone(50, 50, 0.33);
    assert!(used < 0.05, "{used}");
}

#[test]
fn flows_share_a_link() {
    for queue_ms in [20, 100] {
        let link = Link {
            round_trip: Duration::from_millis(50),
            queue: Duration::from_millis(queue_ms),
            loss: 0.0,
        };
        let shares: Vec<f64> =
            run(link, 2, 60).iter().map(|flow| flow.arrived as f64 / (RATE * 60.0)).collect();
        assert!(shares.iter().all(|share| *share > 0.3), "queue of {queue_ms} ms: {shares:?}");
        assert!(shares.iter().sum::<f64>() > 0.92, "{shares:?}");
    }
}

#[test]
fn simultaneous_flows_fill_a_short_link_quickly() {
    // As in an all-reduce: each flow begins with more than its share of the link and its queue.
    for (round_trip_ms, queue_ms) in [(10, 20), (10, 50), (2, 50)] {
        let link = Link {
            round_trip: Duration::from_millis(round_trip_ms),
            queue: Duration::from_millis(queue_ms),
            loss: 0.0,
        };
        for flows in [3, 8] {
            let arrived: u64 = run(link, flows, 3).iter().map(|flow| flow.arrived).sum();
            let used = arrived as f64 / (RATE * 3.0);
            assert!(used > 0.9, "{flows} flows, {round_trip_ms} ms, {queue_ms} ms: {used:.3}");
        }
    }
}

#[test]
fn after_silence_the_window_of_two_packets_recovers_quickly() {
    let now = Instant::now();
    let mut window = Tolerant::new(1 << 20, now, PACKET as u16);
    window.lost(now, now, true, 1 << 20);
    assert_eq!(window.window(), 2 * PACKET);
    // Each round trip doubles it, despite the queue of other connections.
    let round_trips =
        RoundTrips { smoothed: Duration::from_millis(90), shortest: Duration::from_millis(10) };
    let mut at = now;
    for _ in 0..9 {
        at += round_trips.smoothed;
        let whole = window.window();
        window.acknowledged(at, at, whole, false, round_trips);
    }
    assert!(window.window() > (1 << 20) * 6 / 10, "{}", window.window());
    assert!(window.window() <= 1 << 20);
}

#[test]
fn a_pause_does_not_open_the_window() {
    let now = Instant::now();
    let round_trips =
        RoundTrips { smoothed: Duration::from_millis(130), shortest: Duration::from_millis(100) };
    let mut window = Tolerant::new(1 << 20, now, PACKET as u16);
    window.acknowledged(now, now, PACKET, false, round_trips);
    let later = now + Duration::from_millis(1);
    window.lost(later, later, false, PACKET);
    let before = window.window();
    let paused = later + Duration::from_millis(1);
    window.acknowledged(paused, paused, PACKET, true, round_trips);
    let resumed = paused + Duration::from_secs(3600);
    window.acknowledged(resumed, resumed, PACKET, false, round_trips);
    assert!(window.window() - before < PACKET, "{before} {}", window.window());
}
