//! Limits of simultaneous handshakes, in all and per network. A flood of handshakes leaves room for
//! other networks, and costs connected peers little.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// Time after which a handshake may be cancelled to make room.
const GRACE: Duration = Duration::from_secs(2);

/// The limits of simultaneous handshakes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ConnectionLimits {
    /// Handshakes in all.
    pub(super) all: usize,
    /// Handshakes per network.
    pub(super) network: usize,
}

/// The running handshakes.
#[derive(Debug)]
pub(super) struct ConnectionLimiter {
    limits: ConnectionLimits,
    /// By number, so that the oldest comes first.
    running: BTreeMap<u64, Greeting>,
    count: u64,
}

#[derive(Debug)]
struct Greeting {
    network: IpAddr,
    since: Instant,
    /// Cancelled to make room for another.
    ended: CancellationToken,
}

/// The place of a running handshake.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) number: u64,
    /// Cancelled to make room for another.
    pub(super) ended: CancellationToken,
}

/// The limit is reached, and no handshake may be cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full;

impl ConnectionLimiter {
    pub(super) fn new(limits: ConnectionLimits) -> Self {
        Self { limits, running: BTreeMap::new(), count: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.running.len()
    }

    /// Adds a handshake. If a limit is reached, the oldest handshake under that limit is cancelled,
    /// provided that it has exceeded its grace time.
    pub(super) fn enter(&mut self, address: IpAddr, now: Instant) -> Result<Place, Full> {
        let network = network_of(address);
        let alike = self.running.values().filter(|greeting| greeting.network == network).count();
        let slowest = if alike >= self.limits.network {
            Some(self.running.iter().find(|(_, greeting)| greeting.network == network))
        } else if self.running.len() >= self.limits.all {
            Some(self.running.first_key_value())
        } else {
            None
        };
        if let Some(slowest) = slowest {
            let slow = slowest.filter(|(_, greeting)| now.duration_since(greeting.since) > GRACE);
            let number = *slow.ok_or(Full)?.0;
            if let Some(greeting) = self.running.remove(&number) {
                greeting.ended.cancel();
            }
        }
        self.count += 1;
        let ended = CancellationToken::new();
        let greeting = Greeting { network, since: now, ended: ended.clone() };
        self.running.insert(self.count, greeting);
        Ok(Place { number: self.count, ended })
    }

    /// Removes a handshake that has ended.
    pub(super) fn leave(&mut self, number: u64) {
        self.running.remove(&number);
    }
}

/// One host: an IPv4 address, or an IPv6 /64 network, since a host usually has a whole one.
#[must_use]
pub fn host_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(four) => four.into(),
        six => network_of(six),
    }
}

/// The unit of the limit per network: an IPv4 /24 or an IPv6 /64 network, the least that one who rents addresses
/// usually gets together.
pub(super) fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(six) => Ipv6Addr::from_bits(six.to_bits() & (u128::from(u64::MAX) << 64)).into(),
        IpAddr::V4(four) => Ipv4Addr::from_bits(four.to_bits() & (u32::MAX << 8)).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(number: u8) -> IpAddr {
        [192, 0, number, 1].into()
    }

    #[test]
    fn one_network_cannot_use_up_the_limit() {
        let now = Instant::now();
        let mut connection_limits = ConnectionLimiter::new(ConnectionLimits { all: 4, network: 2 });
        let first = connection_limits.enter(host(1), now).expect("room");
        connection_limits.enter(host(1), now).expect("room");
        assert_eq!(connection_limits.enter(host(1), now).err(), Some(Full));
        connection_limits.enter(host(2), now).expect("room for another host");
        connection_limits.leave(first.number);
        connection_limits.enter(host(1), now).expect("room again");
        connection_limits.enter(host(3), now).expect("room");
        assert_eq!(connection_limits.enter(host(4), now).err(), Some(Full));
        assert_eq!(connection_limits.len(), 4);
    }

    #[test]
    fn a_slow_handshake_makes_room_for_a_new_one() {
        let begun = Instant::now();
        let mut connection_limits = ConnectionLimiter::new(ConnectionLimits { all: 2, network: 2 });
        let slow = connection_limits.enter(host(1), begun).expect("room");
        connection_limits.enter(host(2), begun).expect("room");
        assert!(connection_limits.enter(host(3), begun + GRACE).is_err());
        let late = begun + GRACE + Duration::from_millis(1);
        let new = connection_limits.enter(host(3), late).expect("the slowest was cancelled");
        assert!(slow.ended.is_cancelled() && !new.ended.is_cancelled());
        // The limit of one host cancels a handshake of that host only.
        let mut connection_limits = ConnectionLimiter::new(ConnectionLimits { all: 9, network: 1 });
        let other = connection_limits.enter(host(1), begun).expect("room");
        let own = connection_limits.enter(host(2), begun).expect("room");
        connection_limits.enter(host(2), late).expect("its own slowest was cancelled");
        assert!(own.ended.is_cancelled() && !other.ended.is_cancelled());
    }

    #[test]
    fn addresses_of_one_network_count_together() {
        let address = |text: &str| network_of(text.parse().expect("an address"));
        assert_eq!(address("2001:db8::1"), address("2001:db8::ffff:1"));
        assert_ne!(address("2001:db8::1"), address("2001:db8:0:1::1"));
        assert_eq!(address("::ffff:192.0.2.1"), address("192.0.2.200"));
        assert_ne!(address("192.0.2.1"), address("192.0.3.1"));
        let hosts = ["::ffff:192.0.2.1", "192.0.2.1", "192.0.2.2"];
        let [one, same, other] = hosts.map(|text| host_of(text.parse().expect("an address")));
        assert!(one == same && one != other);
    }
}
