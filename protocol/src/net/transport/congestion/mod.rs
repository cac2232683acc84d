//! The congestion window on long shared links with random loss.
//!
//! Cubic (RFC 9438) treats each loss as a sign of a full queue. On a link of 100 ms that loses one
//! packet in a thousand, it uses only a few percent of the bandwidth. [`Tolerant`] grows as Cubic
//! does, but slows down only if a loss means that a queue is full:
//!
//! - It considers the round trips, as TCP Veno does (Fu and Liew, 2003): a loss while they are
//!   hardly longer than the shortest one counts as random.
//! - More than about two lost packets in a hundred are too many, whatever the round trips, because
//!   queues may be short. BBR has the same limit (draft-ietf-ccwg-bbr).
//! - It reduces the window to the measured capacity of the link, as TCP Westwood+ does (Mascolo et
//!   al., 2001), and at most to the 0.7 of Cubic. The queue drains, and the link does not become
//!   idle. With other connections at a long queue, that is the same 0.7, and the link is shared.
//!
//! A path whose delay grows permanently looks like a queue. Then every loss counts, as with Cubic.

mod meter;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::congestion::{Controller, ControllerFactory};
use quinn_proto::RttEstimator;

use self::meter::Meter;

/// The constant of Cubic's curve, in packets per cubic second (RFC 9438, 5).
const C: f64 = 0.4;

/// The factor of the window after a loss (RFC 9438, 4.6).
const BETA: f64 = 0.7;

/// Packets by which Reno's window grows per round trip if it shrinks to [`BETA`] at a loss (RFC
/// 9438, 4.3).
const RENO: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);

/// The maximum growth factor of the window per round trip after slow start (RFC 9438, 4.4).
const STEEPEST: f64 = 1.5;

/// Excess of the round trip over the shortest one from which the link counts as full: a share of
/// the shortest round trip, within bounds. The jitter of cloud networks is about 1 ms.
const QUEUE: (f64, Duration, Duration) = (0.1, Duration::from_millis(2), Duration::from_millis(10));

/// Excess up to which the link counts as partly idle: using the rest harms no other traffic.
const IDLE: (f64, Duration, Duration) =
    (0.02, Duration::from_micros(200), Duration::from_millis(2));

/// Minimum growth of the window per round trip on an idle link, as a share. Cubic alone needs ten
/// seconds for the last tenth of a long link, as others have found (TCP Illinois, Liu et al.,
/// 2006).
const IDLE_GROWTH: f64 = 1.0 / 64.0;

/// Excess at which slow start ends without a loss: every packet of a round trip is delayed by this
/// much (HyStart++, RFC 9406, 4.2).
const SLOW_START: (f64, Duration, Duration) =
    (0.125, Duration::from_millis(4), Duration::from_millis(16));

/// Creates a [`Tolerant`] for each connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct TolerantConfig {
    /// Bytes sent before the first acknowledgement.
    pub(super) initial_window: u64,
}

/// The shortest round trip of a connection that [`Tolerant`] controls; `None` before the first.
pub(super) fn shortest_round_trip(connection: &quinn::Connection) -> Option<Duration> {
    let state = connection.congestion_state().into_any().downcast::<Tolerant>().ok()?;
    Some(state.round_trips.shortest).filter(|shortest| !shortest.is_zero())
}

impl ControllerFactory for TolerantConfig {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        Box::new(Tolerant::new(self.initial_window, now, current_mtu))
    }
}

/// The round trips of a connection.
#[derive(Debug, Clone, Copy, Default)]
struct RoundTrips {
    /// The recent average.
    smoothed: Duration,
    shortest: Duration,
}

impl RoundTrips {
    /// Whether a packet that took this time was queued for longer than a share of the shortest
    /// round trip.
    fn show_a_queue(self, time: Duration, (share, least, most): (f64, Duration, Duration)) -> bool {
        let patience = self.shortest.mul_f64(share).clamp(least, most);
        time.saturating_sub(self.shortest) > patience
    }
}

/// The growth of the window since its last reduction.
#[derive(Debug, Clone, Copy)]
struct Growth {
    since: Instant,
    /// The window after the reduction, in bytes.
    from: f64,
    /// The window at the plateau of the curve, in bytes.
    peak: f64,
    /// Seconds until the plateau.
    plateau: f64,
}

impl Growth {
    fn new(since: Instant, from: f64, peak: f64, mtu: f64) -> Self {
        let plateau = ((peak - from).max(0.0) / mtu / C).cbrt();
        Self { since, from, peak, plateau }
    }

    /// The target window in bytes, one round trip from now.
    fn target(&self, now: Instant, round_trip: Duration, mtu: f64) -> f64 {
        let elapsed = now.saturating_duration_since(self.since);
        let seconds = (elapsed + round_trip).as_secs_f64() - self.plateau;
        let cubic = self.peak + C * seconds.powi(3) * mtu;
        let rounds = elapsed.as_secs_f64() / round_trip.as_secs_f64().max(1e-6);
        let reno = self.from + RENO * rounds * mtu;
        cubic.max(reno)
    }
}

/// The congestion controller of one connection.
#[derive(Debug, Clone)]
pub(super) struct Tolerant {
    initial_window: u64,
    mtu: f64,
    window: f64,
    /// `None` in slow start.
    growth: Option<Growth>,
    /// Bytes up to which slow start continues after silence, whatever the round trips: the link
    /// carried as much before.
    known_good: Option<f64>,
    /// Packets sent up to this time carry no information about the present window.
    slowed_at: Option<Instant>,
    /// The time since which there has been too little to send.
    idle_since: Option<Instant>,
    round_trips: RoundTrips,
    meter: Meter,
}

impl Tolerant {
    fn new(initial_window: u64, now: Instant, mtu: u16) -> Self {
        Self {
            initial_window,
            mtu: f64::from(mtu),
            window: initial_window as f64,
            growth: None,
            known_good: None,
            slowed_at: None,
            idle_since: None,
            round_trips: RoundTrips::default(),
            meter: Meter::new(now),
        }
    }

    fn smallest(&self) -> f64 {
        2.0 * self.mtu
    }

    fn is_old(&self, sent: Instant) -> bool {
        self.slowed_at.is_some_and(|slowed_at| sent <= slowed_at)
    }

    /// `bytes` bytes, sent at `sent`, have arrived.
    fn acknowledged(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        idle: bool,
        round_trips: RoundTrips,
    ) {
        self.round_trips = round_trips;
        self.meter.arrived(now, sent, bytes as f64, round_trips.smoothed);
        if idle {
            self.idle_since.get_or_insert(now);
            return;
        }
        if let (Some(since), Some(growth)) = (self.idle_since.take(), &mut self.growth) {
            // Time without data to send does not count as time in which the link carried more.
            growth.since = (growth.since + now.saturating_duration_since(since)).min(now);
        }
        if !self.is_old(sent) {
            self.grow(now, bytes as f64);
        }
    }

    fn grow(&mut self, now: Instant, arrived: f64) {
        let Some(growth) = self.growth else {
            self.window += arrived;
            let ends = match self.known_good {
                Some(known) => {
                    self.window = self.window.min(known.max(self.smallest()));
                    self.window >= known
                }
                None => {
                    let quickest = self.meter.quickest();
                    quickest.is_some_and(|time| self.round_trips.show_a_queue(time, SLOW_START))
                }
            };
            if ends {
                self.growth = Some(Growth::new(now, self.window, self.window, self.mtu));
            }
            return;
        };
        let target = growth.target(now, self.round_trips.smoothed, self.mtu);
        let more = target.min(STEEPEST * self.window) - self.window;
        let idle = !self.round_trips.show_a_queue(self.round_trips.smoothed, IDLE);
        let least = if idle { IDLE_GROWTH * self.window } else { 0.0 };
        self.window += more.max(least) * (arrived / self.window).min(1.0);
    }

    /// `bytes` bytes are lost, the last of which were sent at `sent`; 0 if the network only marked
    /// packets as a sign of congestion.
    fn lost(&mut self, now: Instant, sent: Instant, nothing_arrives: bool, bytes: u64) {
        self.meter.lost(bytes as f64);
        if self.is_old(sent) {
            return;
        }
        let full = bytes == 0
            || self.round_trips.show_a_queue(self.round_trips.smoothed, QUEUE)
            || self.meter.loses_too_much(self.mtu)
            || nothing_arrives;
        if full {
            self.slow_down(now, nothing_arrives);
        }
    }

    fn slow_down(&mut self, now: Instant, nothing_arrives: bool) {
        let carried = self.meter.rate() * self.round_trips.shortest.as_secs_f64();
        let before = self.window;
        if nothing_arrives {
            // Restarts slow start, up to the window after a single loss (RFC 9002, 7.6.2).
            let known = self.known_good.map_or(before, |known| known.max(before));
            self.known_good = Some(BETA * known);
            self.window = self.smallest();
            self.growth = None;
        } else {
            let window = carried.clamp(BETA * before, before).max(self.smallest());
            // If the window did not reach its last peak, another connection takes a share (RFC
            // 9438, 4.7).
            let retreats = self.growth.is_some_and(|growth| before < growth.peak);
            let peak = if retreats { (before + window) / 2.0 } else { before };
            self.window = window;
            self.growth = Some(Growth::new(now, window, peak, self.mtu));
            self.known_good = None;
        }
        self.slowed_at = Some(now);
        self.meter.forget_losses();
    }
}

impl Controller for Tolerant {
    fn on_ack(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        app_limited: bool,
        rtt: &RttEstimator,
    ) {
        let round_trips = RoundTrips { smoothed: rtt.get(), shortest: rtt.min() };
        self.acknowledged(now, sent, bytes, app_limited, round_trips);
    }

    fn on_congestion_event(
        &mut self,
        now: Instant,
        sent: Instant,
        is_persistent_congestion: bool,
        lost_bytes: u64,
    ) {
        self.lost(now, sent, is_persistent_congestion, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.mtu = f64::from(new_mtu);
        self.window = self.window.max(self.smallest());
    }

    fn window(&self) -> u64 {
        self.window as u64
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(self.clone())
    }

    fn initial_window(&self) -> u64 {
        self.initial_window
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
