//! How often others are rung at: a peer is nobody's tool against a third.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::net::connection_limits::host_of;

/// What the limits are counted over.
const WINDOW: Duration = Duration::from_secs(60);

/// Requests that are done in that time.
const ALL: usize = 256;

/// Those of one host, which may have many peers behind it.
const HOST: usize = 16;

/// Who was rung at of late, the oldest first.
#[derive(Debug, Default)]
pub(in super::super) struct RateLimit(Mutex<VecDeque<(Instant, IpAddr)>>);

impl RateLimit {
    /// Whether a host is rung at now; then that is counted.
    pub(super) fn admits(&self, address: IpAddr, now: Instant) -> bool {
        let host = host_of(address);
        let mut probe_report = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while probe_report.front().is_some_and(|(at, _)| now.duration_since(*at) >= WINDOW) {
            probe_report.pop_front();
        }
        let alike = probe_report.iter().filter(|(_, of)| *of == host).count();
        let admitted = probe_report.len() < ALL && alike < HOST;
        if admitted {
            probe_report.push_back((now, host));
        }
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_is_rung_at_seldom_and_all_together_not_often() {
        let (rate_limit, begun) = (RateLimit::default(), Instant::now());
        let host = |number: usize| IpAddr::from([10, 0, (number >> 8) as u8, number as u8]);
        let probe_report =
            |host, now| (0..2 * ALL).filter(|_| rate_limit.admits(host, now)).count();
        assert_eq!(probe_report(host(0), begun), HOST);
        let others = (1..ALL).filter(|number| rate_limit.admits(host(*number), begun)).count();
        assert_eq!(others, ALL - HOST, "room for so many");
        assert_eq!(probe_report(host(ALL), begun + WINDOW / 2), 0);
        assert_eq!(
            probe_report(host(0), begun + WINDOW),
            HOST,
            "a while later there is room again"
        );
    }
}
