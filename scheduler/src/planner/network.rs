//! What the links between devices carry.

use std::time::Duration;

use shoal_protocol::units::{Bytes, Rate};

use super::PlanError;

/// The most devices that are placed at once. Three matrices of their pairs are kept.
pub const MAX_DEVICES: usize = 1024;

/// Longer than anything that is worth a comparison, and short enough that no sum of such times overflows, even
/// in 64 bits of nanoseconds.
const NEVER: Duration = Duration::from_secs(10_000_000);

/// One of the machines that are placed, by its position among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device(pub usize);

/// One way between two devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// From the first byte's leaving to its arrival.
    pub delay: Duration,
    /// What it carries.
    pub rate: Rate,
}

impl Link {
    /// From when so much begins to leave until all of it is there; at most 8 months.
    #[must_use]
    pub fn time(&self, size: Bytes) -> Duration {
        self.delay.min(NEVER) + self.transfer(size)
    }

    /// How long one device's part of an all-reduce among so many is on its way to another of them.
    pub(crate) fn exchange(&self, gradient: Bytes, replicas: u32) -> Duration {
        self.time(Bytes(0)) + self.transfer(gradient) / replicas.max(1)
    }

    /// The same as [`Self::time`] without the delay.
    pub(super) fn transfer(&self, size: Bytes) -> Duration {
        let nanoseconds = u128::from(size.0) * 1_000_000_000 / u128::from(self.rate.0.max(1));
        u64::try_from(nanoseconds).map_or(NEVER, |short| Duration::from_nanos(short).min(NEVER))
    }
}

/// The links between all pairs of devices, each way of its own.
#[derive(Debug, Clone)]
pub struct Network {
    devices: usize,
    /// From the first device to all, then from the second, and so on; those from a device to itself mean
    /// nothing.
    links: Vec<Link>,
}

impl Network {
    /// The network of so many devices whose links are as `link` says, from one to another.
    ///
    /// # Errors
    /// When there are too many devices, or a link carries nothing.
    pub fn new(devices: usize, link: impl Fn(Device, Device) -> Link) -> Result<Self, PlanError> {
        if devices > MAX_DEVICES {
            return Err(PlanError::TooManyDevices { devices });
        }
        let mut links = Vec::with_capacity(devices * devices);
        for from in (0..devices).map(Device) {
            for to in (0..devices).map(Device) {
                let one = link(from, to);
                if one.rate.0 == 0 && from != to {
                    return Err(PlanError::DeadLink { from, to });
                }
                links.push(one);
            }
        }
        Ok(Self { devices, links })
    }

    /// How many devices there are.
    #[must_use]
    pub fn devices(&self) -> usize {
        self.devices
    }

    /// The link from one device to another.
    ///
    /// # Panics
    /// When there is no such device.
    #[must_use]
    pub fn link(&self, from: Device, to: Device) -> Link {
        self.links[from.0 * self.devices + to.0]
    }

    /// A number for each device; those with equal numbers may change places without any change. Devices
    /// are alike when they have the same links to and from all others, as those of one region have.
    pub(super) fn kinds(&self) -> Vec<usize> {
        let mut first: Vec<Device> = Vec::new();
        let alike = |a: Device, b: Device| {
            let others = (0..self.devices).map(Device).filter(|other| *other != a && *other != b);
            let same = |other| {
                self.link(a, other) == self.link(b, other)
                    && self.link(other, a) == self.link(other, b)
            };
            self.link(a, b) == self.link(b, a) && others.into_iter().all(same)
        };
        let kind = |device| {
            first.iter().position(|one| alike(*one, device)).unwrap_or_else(|| {
                first.push(device);
                first.len() - 1
            })
        };
        (0..self.devices).map(Device).map(kind).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(milliseconds: u64, rate: u64) -> Link {
        Link { delay: Duration::from_millis(milliseconds), rate: Rate(rate) }
    }

    #[test]
    fn a_link_takes_its_delay_and_the_bytes_at_its_rate() {
        assert_eq!(link(20, 1000).time(Bytes(1500)), Duration::from_millis(1520));
        assert_eq!(link(0, 1).time(Bytes(u64::MAX)), NEVER);
    }

    #[test]
    fn a_network_has_links_that_carry_something_and_no_more_devices_than_there_is_room_for() {
        let dead = Network::new(3, |_, to| link(1, u64::from(to != Device(2))));
        let refused = PlanError::DeadLink { from: Device(0), to: Device(2) };
        assert_eq!(dead.expect_err("a dead link"), refused);
        let many = Network::new(MAX_DEVICES + 1, |_, _| link(1, 1));
        let refused = PlanError::TooManyDevices { devices: MAX_DEVICES + 1 };
        assert_eq!(many.expect_err("too many"), refused);
    }

    #[test]
    fn devices_of_one_region_are_alike() {
        let homes = [0, 1, 0, 2, 1];
        let between = |from: Device, to: Device| {
            let (from, to) = (homes[from.0], homes[to.0]);
            link(if from == to { 1 } else { 10 + from + to }, 1000)
        };
        let network = Network::new(5, between).expect("links carry something");
        assert_eq!(network.kinds(), [0, 1, 0, 2, 1]);
    }
}
