//! What a connection was seen to carry and to lose, by round trips.

use std::time::{Duration, Instant};

/// Losses beyond this share are not chance.
const TOO_MUCH: f64 = 0.02;

/// By how many standard deviations a few round trips must be beyond it.
const SURELY: f64 = 3.0;

/// Round trips after which what a link carried says nothing of what it carries (BBR's filter of the
/// bandwidth has ten).
const RATES: usize = 8;

/// Packets of a round trip that say how long each takes now (HyStart++, RFC 9406, 4.3).
const SAMPLES: u32 = 8;

/// What arrived and was lost in one round trip.
#[derive(Debug, Clone, Copy, Default)]
struct Round {
    /// Bytes.
    arrived: f64,
    /// Bytes.
    lost: f64,
    samples: u32,
    quickest: Option<Duration>,
}

/// The present round trip and the one before.
#[derive(Debug, Clone)]
pub(super) struct Meter {
    began: Instant,
    now: Round,
    before: Round,
    /// Bytes per second that arrived in the last whole round trips, the newest last.
    rates: [f64; RATES],
}

impl Meter {
    pub(super) fn new(now: Instant) -> Self {
        Self { began: now, now: Round::default(), before: Round::default(), rates: [0.0; RATES] }
    }

    /// Bytes sent at `sent` have arrived.
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

    /// What was lost was answered for.
    pub(super) fn forget_losses(&mut self) {
        self.now.lost = 0.0;
        self.before.lost = 0.0;
    }

    /// How long the quickest packet of this round took, once there are enough.
    pub(super) fn quickest(&self) -> Option<Duration> {
        self.now.quickest.filter(|_| self.now.samples >= SAMPLES)
    }

    /// Bytes per second that the link carries, as the fastest of the last round trips shows.
    pub(super) fn rate(&self) -> f64 {
        self.rates.iter().copied().fold(0.0, f64::max)
    }

    /// Whether more is lost than by chance. The count of a share of independent losses spreads by its
    /// root.
    pub(super) fn loses_too_much(&self, packet: f64) -> bool {
        let lost = (self.now.lost + self.before.lost) / packet;
        let all = (self.now.arrived + self.before.arrived) / packet + lost;
        let expected = TOO_MUCH * all;
        lost > expected + SURELY * expected.sqrt()
    }
}
