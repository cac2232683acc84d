//! How fast a peer takes tensors, measured on those that it took.

use std::time::{Duration, Instant};

/// A measurement ends when nothing is on its way any more, or after this long.
const PERIOD: Duration = Duration::from_millis(500);

/// Fewer bytes tell of delays alone.
const LEAST: usize = 64 << 10;

/// How much a measurement counts beside all before it.
const GAIN: f64 = 0.25;

/// Measures one link. What is not sent is not measured: a link that is idle has the rate that it had.
#[derive(Debug, Default)]
pub(super) struct RateMeter {
    /// Messages that the peer does not have yet.
    under_way: usize,
    began: Option<Instant>,
    bytes: usize,
    /// Bytes per second.
    mean: Option<f64>,
}

impl RateMeter {
    /// A message begins to be sent.
    pub(super) fn began(&mut self, now: Instant) {
        if self.under_way == 0 {
            (self.began, self.bytes) = (Some(now), 0);
        }
        self.under_way += 1;
    }

    /// A message of so many bytes has arrived, as is known after a round trip; of none, where it was
    /// given up.
    pub(super) fn ended(&mut self, now: Instant, bytes: usize, round_trip: Duration) {
        // An answer may outlive its connection for a moment, of which `broke` forgot all.
        let Some(left) = self.under_way.checked_sub(1) else { return };
        self.under_way = left;
        self.bytes += bytes;
        let elapsed = self.began.map_or(Duration::ZERO, |began| now.duration_since(began));
        let idle = self.under_way == 0;
        if !idle && elapsed < PERIOD {
            return;
        }
        // For the last of them nothing was sent any more while its acknowledgement was awaited.
        let busy = if idle { elapsed.saturating_sub(round_trip) } else { elapsed };
        if self.bytes >= LEAST && !busy.is_zero() {
            let measured = self.bytes as f64 / busy.as_secs_f64();
            self.mean = Some(self.mean.map_or(measured, |mean| mean + GAIN * (measured - mean)));
        }
        (self.began, self.bytes) = (Some(now), 0);
    }

    /// The connection is gone with all that was on its way.
    pub(super) fn broke(&mut self) {
        *self = Self { mean: self.mean, ..Self::default() };
    }

    /// Bytes per second, once they were measured.
    pub(super) fn rate(&self) -> Option<f64> {
        self.mean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND_TRIP: Duration = Duration::from_millis(100);

    fn after(start: Instant, milliseconds: u64) -> Instant {
        start + Duration::from_millis(milliseconds)
    }

    #[test]
    fn the_delay_of_a_link_is_not_its_rate() {
        let (mut meter, start) = (RateMeter::default(), Instant::now());
        meter.began(start);
        assert_eq!(meter.rate(), None);
        meter.ended(after(start, 300), 1_000_000, ROUND_TRIP);
        assert_eq!(meter.rate(), Some(5e6));
        // Long after, three at once: they take their turns on the link.
        for _ in 0..3 {
            meter.began(after(start, 5000));
        }
        for end in [5200, 5300, 5400] {
            meter.ended(after(start, end), 500_000, ROUND_TRIP);
        }
        assert_eq!(meter.rate(), Some(5e6));
    }

    #[test]
    fn a_link_that_is_never_idle_is_measured_all_the_same() {
        let (mut meter, start) = (RateMeter::default(), Instant::now());
        meter.began(start);
        for message in 0..40 {
            meter.began(after(start, 100 * message));
            meter.ended(after(start, 100 * message + 50), 100_000, ROUND_TRIP);
        }
        let rate = meter.rate().expect("measured");
        assert!((0.9e6..1.3e6).contains(&rate), "{rate}");
    }

    #[test]
    fn little_and_broken_tell_nothing() {
        let (mut meter, start) = (RateMeter::default(), Instant::now());
        meter.began(start);
        meter.ended(after(start, 200), 1000, ROUND_TRIP);
        meter.began(after(start, 300));
        meter.broke();
        meter.ended(after(start, 400), 200_000, ROUND_TRIP);
        assert_eq!(meter.rate(), None, "of the connection before");
        meter.began(after(start, 9000));
        meter.ended(after(start, 9200), 200_000, ROUND_TRIP);
        assert_eq!(meter.rate(), Some(2e6));
    }
}
