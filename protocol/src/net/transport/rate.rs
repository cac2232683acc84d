//! The throughput of tensors to a peer, measured on delivered messages.

use std::time::{Duration, Instant};

/// A measurement ends when no message is in flight, or after this long.
const PERIOD: Duration = Duration::from_millis(500);

/// Measurements of fewer bytes reflect only delays, and are discarded.
const LEAST: usize = 64 << 10;

/// The weight of a new measurement against the mean of earlier ones.
const GAIN: f64 = 0.25;

/// Measures one link. An idle link keeps its last estimate.
#[derive(Debug, Default)]
pub(super) struct RateMeter {
    /// Number of messages in flight.
    under_way: usize,
    began: Option<Instant>,
    bytes: usize,
    /// Bytes per second.
    mean: Option<f64>,
}

impl RateMeter {
    /// The sending of a message begins.
    pub(super) fn began(&mut self, now: Instant) {
        if self.under_way == 0 {
            (self.began, self.bytes) = (Some(now), 0);
        }
        self.under_way += 1;
    }

    /// A message of `bytes` bytes has arrived, which the sender learns after one round trip.
    /// `bytes` is 0 if the message was aborted.
    pub(super) fn ended(&mut self, now: Instant, bytes: usize, round_trip: Duration) {
        // A transfer may outlive its connection briefly; `connection_lost` has reset its count.
        let Some(left) = self.under_way.checked_sub(1) else { return };
        self.under_way = left;
        self.bytes += bytes;
        let elapsed = self.began.map_or(Duration::ZERO, |began| now.duration_since(began));
        let idle = self.under_way == 0;
        if !idle && elapsed < PERIOD {
            return;
        }
        // While the last acknowledgement was awaited, nothing was sent.
        let busy = if idle { elapsed.saturating_sub(round_trip) } else { elapsed };
        if self.bytes >= LEAST && !busy.is_zero() {
            let measured = self.bytes as f64 / busy.as_secs_f64();
            self.mean = Some(self.mean.map_or(measured, |mean| mean + GAIN * (measured - mean)));
        }
        (self.began, self.bytes) = (Some(now), 0);
    }

    /// The connection is lost with all messages in flight.
    pub(super) fn connection_lost(&mut self) {
        *self = Self { mean: self.mean, ..Self::default() };
    }

    /// Estimated throughput in bytes per second; `None` before the first measurement.
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
    fn the_estimate_excludes_the_delay_of_the_link() {
        let (mut meter, start) = (RateMeter::default(), Instant::now());
        meter.began(start);
        assert_eq!(meter.rate(), None);
        meter.ended(after(start, 300), 1_000_000, ROUND_TRIP);
        assert_eq!(meter.rate(), Some(5e6));
        // Long after that, three messages at once share the link.
        for _ in 0..3 {
            meter.began(after(start, 5000));
        }
        for end in [5200, 5300, 5400] {
            meter.ended(after(start, end), 500_000, ROUND_TRIP);
        }
        assert_eq!(meter.rate(), Some(5e6));
    }

    #[test]
    fn a_link_that_is_never_idle_is_measured_too() {
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
    fn small_and_interrupted_transfers_are_not_measured() {
        let (mut meter, start) = (RateMeter::default(), Instant::now());
        meter.began(start);
        meter.ended(after(start, 200), 1000, ROUND_TRIP);
        meter.began(after(start, 300));
        meter.connection_lost();
        meter.ended(after(start, 400), 200_000, ROUND_TRIP);
        assert_eq!(meter.rate(), None, "the transfer was on the lost connection");
        meter.began(after(start, 9000));
        meter.ended(after(start, 9200), 200_000, ROUND_TRIP);
        assert_eq!(meter.rate(), Some(2e6));
    }
}
