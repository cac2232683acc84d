//! Measures the delivered and lost bytes of a connection per round trip.

use std::time::{Duration, Instant};

/// Losses beyond this share are not random.
const RANDOM_LOSS: f64 = 0.02;

/// Number of standard deviations by which the losses of a few round trips must exceed that share.
const DEVIATIONS: f64 = 3.0;

/// Number of round trips whose delivery rates are considered (BBR's bandwidth filter has ten).
const RATES: usize = 8;

/// Packets that a round trip needs for a valid delay sample (HyStart++, RFC 9406, 4.3).
const SAMPLES: u32 = 8;

/// Delivered and lost bytes of one round trip.
#[derive(Debug, Clone, Copy, Default)]
struct Round {
    /// Delivered bytes.
    arrived: f64,
    /// Lost bytes.
    lost: f64,
    samples: u32,
    quickest: Option<Duration>,
}

/// The present round trip, and the one before.
#[derive(Debug, Clone)]
pub(super) struct Meter {
    began: Instant,
    now: Round,
    before: Round,
    /// Delivery rates of the last complete round trips in bytes per second, the newest last.
    rates: [f64; RATES],
}

impl Meter {
    pub(super) fn new(now: Instant) -> Self {
        Self { began: now, now: Round::default(), before: Round::default(), rates: [0.0; RATES] }
    }

    /// `bytes` bytes, sent at `sent`, have arrived.
    pub(super) fn arrived(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: f64,
        round_trip: Duration,
    ) {
        let time = now.saturating_duration_since(sent);
        self.now.samples += 1;
        self.now.quickest = Some(self.now.quickest.map_or(time, |known| known.min(time)));
        self.now.arrived += bytes;
        let elapsed = now.saturating_duration_since(self.began);
        if elapsed >= round_trip && !elapsed.is_zero() {
            self.rates.rotate_left(1);
            self.rates[RATES - 1] = self.now.arrived / elapsed.as_secs_f64();
            self.before = std::mem::take(&mut self.now);
            self.began = now;
        }
    }

    pub(super) fn lost(&mut self, bytes: f64) {
        self.now.lost += bytes;
    }

    /// Resets the losses after the window was reduced for them.
    pub(super) fn forget_losses(&mut self) {
        self.now.lost = 0.0;
        self.before.lost = 0.0;
    }

    /// The shortest delay of a packet in this round trip, once there are enough packets.
    pub(super) fn quickest(&self) -> Option<Duration> {
        self.now.quickest.filter(|_| self.now.samples >= SAMPLES)
    }

    /// The link's capacity in bytes per second: the fastest of the last round trips.
    pub(super) fn rate(&self) -> f64 {
        self.rates.iter().copied().fold(0.0, f64::max)
    }

    /// Whether losses exceed random loss. The count of independent losses has a standard deviation
    /// of the square root of its mean.
    pub(super) fn loses_too_much(&self, packet: f64) -> bool {
        let lost = (self.now.lost + self.before.lost) / packet;
        let all = (self.now.arrived + self.before.arrived) / packet + lost;
        let expected = RANDOM_LOSS * all;
        lost > expected + DEVIATIONS * expected.sqrt()
    }
}
