//! Limits the number of probes, so that a peer cannot be used to attack a third host.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::net::connection_limits::host_of;

/// The period of the limits.
const WINDOW: Duration = Duration::from_secs(60);

/// Maximum number of requests in the period.
const ALL: usize = 256;

/// Maximum number of requests of one host, which may have many peers behind it.
const HOST: usize = 16;

/// The recently probed hosts, the oldest first.
#[derive(Debug, Default)]
pub(super) struct RateLimit(Mutex<VecDeque<(Instant, IpAddr)>>);

impl RateLimit {
    /// Whether a host may be probed now; if so, counts the probe.
    pub(super) fn admits(&self, address: IpAddr, now: Instant) -> bool {
        let host = host_of(address);
        let mut recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while recent.front().is_some_and(|(at, _)| now.duration_since(*at) >= WINDOW) {
            recent.pop_front();
        }
        let alike = recent.iter().filter(|(_, of)| *of == host).count();
        let admitted = recent.len() < ALL && alike < HOST;
        if admitted {
            recent.push_back((now, host));
        }
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_are_limited_per_host_and_in_all() {
        let (rate_limit, begun) = (RateLimit::default(), Instant::now());
        let host = |number: usize| IpAddr::from([10, 0, (number >> 8) as u8, number as u8]);
        let admitted = |host, now| (0..2 * ALL).filter(|_| rate_limit.admits(host, now)).count();
        assert_eq!(admitted(host(0), begun), HOST);
        let others = (1..ALL).filter(|number| rate_limit.admits(host(*number), begun)).count();
        assert_eq!(others, ALL - HOST, "the limit of all hosts");
        assert_eq!(admitted(host(ALL), begun + WINDOW / 2), 0);
        assert_eq!(admitted(host(0), begun + WINDOW), HOST, "the limit is reset after the period");
    }
}
