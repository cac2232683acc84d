//! How many strangers may be greeted at once, in all and from one host, so that a crowd at the door leaves
//! room for others and costs those inside little.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// How long a greeting may take before it gives way to others that wait.
const GRACE: Duration = Duration::from_secs(2);

/// How large a crowd may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ConnectionLimits {
    /// Greetings at once.
    pub(super) all: usize,
    /// From one host.
    pub(super) host: usize,
}

/// Greetings under way.
#[derive(Debug)]
pub(super) struct ConnectionLimiter {
    limits: ConnectionLimits,
    /// By number, so the oldest come first.
    there: BTreeMap<u64, Greeting>,
    count: u64,
}

#[derive(Debug)]
struct Greeting {
    host: IpAddr,
    since: Instant,
    /// Cancelled when it is to give way.
    ended: CancellationToken,
}

/// A place in the crowd.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) number: u64,
    /// Cancelled when it is to give way.
    pub(super) ended: CancellationToken,
}

/// Too many are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full;

impl ConnectionLimiter {
    pub(super) fn new(limits: ConnectionLimits) -> Self {
        Self { limits, there: BTreeMap::new(), count: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.there.len()
    }

    /// Takes in one more. Where there is no room, the one of those that stand in its way that has taken
    /// longest gives way, if it has had its time.
    pub(super) fn enter(&mut self, address: IpAddr, now: Instant) -> Result<Place, Full> {
        let host = host_of(address);
        let alike = self.there.values().filter(|greeting| greeting.host == host).count();
        let slowest = if alike >= self.limits.host {
            Some(self.there.iter().find(|(_, greeting)| greeting.host == host))
        } else if self.there.len() >= self.limits.all {
            Some(self.there.first_key_value())
        } else {
            None
        };
        if let Some(slowest) = slowest {
            let slow = slowest.filter(|(_, greeting)| now.duration_since(greeting.since) > GRACE);
            let number = *slow.ok_or(Full)?.0;
            if let Some(greeting) = self.there.remove(&number) {
                greeting.ended.cancel();
            }
        }
        self.count += 1;
        let ended = CancellationToken::new();
        let greeting = Greeting { host, since: now, ended: ended.clone() };
        self.there.insert(self.count, greeting);
        Ok(Place { number: self.count, ended })
    }

    /// Somebody is done, however it ended.
    pub(super) fn leave(&mut self, number: u64) {
        self.there.remove(&number);
    }
}

/// Whoever has an IPv6 address has a whole /64 of them.
pub(super) fn host_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(six) => Ipv6Addr::from_bits(six.to_bits() & (u128::from(u64::MAX) << 64)).into(),
        four => four,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(number: u8) -> IpAddr {
        [192, 0, 2, number].into()
    }

    #[test]
    fn one_host_does_not_take_all_the_room() {
        let now = Instant::now();
        let mut connection_limits = ConnectionLimiter::new(ConnectionLimits { all: 4, host: 2 });
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
    fn who_takes_long_gives_way() {
        let begun = Instant::now();
        let mut connection_limits = ConnectionLimiter::new(ConnectionLimits { all: 2, host: 2 });
        let slow = connection_limits.enter(host(1), begun).expect("room");
        connection_limits.enter(host(2), begun).expect("room");
        assert!(connection_limits.enter(host(3), begun + GRACE).is_err());
        let late = begun + GRACE + Duration::from_millis(1);
        let new = connection_limits.enter(host(3), late).expect("the slowest gave way");
        assert!(slow.ended.is_cancelled() && !new.ended.is_cancelled());
        // Of one host, its own slowest gives way and nobody else's.
        let mut connection_limits = ConnectionLimiter::new(ConnectionLimits { all: 9, host: 1 });
        let other = connection_limits.enter(host(1), begun).expect("room");
        let own = connection_limits.enter(host(2), begun).expect("room");
        connection_limits.enter(host(2), late).expect("its own slowest gave way");
        assert!(own.ended.is_cancelled() && !other.ended.is_cancelled());
    }

    #[test]
    fn a_network_of_addresses_is_one_host() {
        let address = |text: &str| host_of(text.parse().expect("an address"));
        assert_eq!(address("2001:db8::1"), address("2001:db8::ffff:1"));
        assert_ne!(address("2001:db8::1"), address("2001:db8:0:1::1"));
        assert_eq!(address("::ffff:192.0.2.1"), host(1));
    }
}
