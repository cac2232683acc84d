//! The places of open connections. A new connection always gets one: where there is none, another
//! connection gives way, so that slow clients cannot keep a probe from its answer.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shoal_protocol::net::host_of;
use tokio_util::sync::CancellationToken;

/// How many connections there may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    /// All of them.
    pub(super) connections: usize,
    /// Those of one address, or one network of IPv6. This machine's own, such as the probe of a
    /// container, count by themselves.
    pub(super) of_address: usize,
}

/// The open connections.
#[derive(Debug)]
pub(super) struct Places {
    room: Room,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    /// In the order of their beginning.
    open: BTreeMap<u64, Open>,
}

#[derive(Debug)]
struct Open {
    address: IpAddr,
    /// Whether the whole head has arrived.
    is_asked: bool,
    give_way: CancellationToken,
}

/// The place of a connection, which is free when it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    number: u64,
    /// Cancelled when the connection gives way.
    pub(super) give_way: CancellationToken,
}

impl Places {
    pub(super) fn new(room: Room) -> Arc<Self> {
        Arc::new(Self { room, taken: Mutex::default() })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a connection from an address.
    pub(super) fn take(self: &Arc<Self>, address: IpAddr) -> Place {
        let address = host_of(address);
        let mut taken = self.taken();
        if let Some(number) = taken.gives_way(address, self.room)
            && let Some(open) = taken.open.remove(&number)
        {
            open.give_way.cancel();
        }
        let (number, give_way) = (taken.next, CancellationToken::new());
        taken.next += 1;
        let open = Open { address, is_asked: false, give_way: give_way.clone() };
        taken.open.insert(number, open);
        Place { places: self.clone(), number, give_way }
    }
}

impl Taken {
    /// The connection that gives way to a new one from an address, if there is no room: of the address
    /// itself where that has its share, else of the one with most connections. Those without a request
    /// go first, then the oldest.
    fn gives_way(&self, address: IpAddr, room: Room) -> Option<u64> {
        let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for open in self.open.values() {
            *counts.entry(open.address).or_default() += 1;
        }
        let from = if counts.get(&address).is_some_and(|count| *count >= room.of_address) {
            address
        } else if self.open.len() >= room.connections {
            *counts.iter().max_by_key(|(_, count)| **count)?.0
        } else {
            return None;
        };
        let of_address = self.open.iter().filter(|(_, open)| open.address == from);
        of_address.min_by_key(|(number, open)| (open.is_asked, **number)).map(|(number, _)| *number)
    }
}

impl Place {
    /// Notes that the head of the request has arrived.
    pub(super) fn is_asked(&self) {
        if let Some(open) = self.places.taken().open.get_mut(&self.number) {
            open.is_asked = true;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken().open.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Room = Room { connections: 6, of_address: 3 };

    fn address(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    #[test]
    fn an_address_has_its_share() {
        let places = Places::new(ROOM);
        let slow: Vec<_> = (0..3).map(|_| places.take(address(1))).collect();
        slow[0].is_asked();
        let other = places.take(address(2));
        let fourth = places.take(address(1));
        // The oldest without a request gave way, and no other.
        assert!(slow[1].give_way.is_cancelled());
        for open in [&slow[0], &slow[2], &other, &fourth] {
            assert!(!open.give_way.is_cancelled());
        }
    }

    #[test]
    fn a_new_address_gets_a_place_of_the_one_with_most() {
        let places = Places::new(ROOM);
        let single: Vec<_> = (2..6).map(|last| places.take(address(last))).collect();
        let many: Vec<_> = (0..2).map(|_| places.take(address(1))).collect();
        let probe = places.take(address(9));
        assert!(many[0].give_way.is_cancelled() && !many[1].give_way.is_cancelled());
        assert!(single.iter().chain([&probe]).all(|open| !open.give_way.is_cancelled()));
        drop(single);
        assert_eq!(places.taken().open.len(), 2);
        let network: IpAddr = "2001:db8::".parse().expect("an address");
        assert_eq!(host_of("2001:db8::7".parse().expect("an address")), network);
        assert_eq!(host_of("::ffff:192.0.2.1".parse().expect("an address")), address(1));
    }
}
