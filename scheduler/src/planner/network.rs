//! Latency and rate of the links between devices.

use std::time::Duration;

use shoal_protocol::units::{Bytes, Rate};

use super::PlanError;

/// Maximum number of devices in a plan. Three matrices over their pairs are kept.
pub const MAX_DEVICES: usize = 1024;

/// A cap on times: longer than any that is worth a comparison, and short enough that no sum of such
/// times overflows, even in 64 bits of nanoseconds.
const NEVER: Duration = Duration::from_secs(10_000_000);

/// A machine to be placed, by its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device(pub usize);

/// A link in one direction between two devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// One-way latency.
    pub delay: Duration,
    /// Rate.
    pub rate: Rate,
}

impl Link {
    /// Time until `size` bytes have arrived; at most 8 months.
    #[must_use]
    pub fn time(&self, size: Bytes) -> Duration {
        self.delay.min(NEVER) + self.transfer(size)
    }

    /// Time of one device's part of an all-reduce among `replicas` devices on its link to another
    /// of them.
    pub(crate) fn exchange(&self, gradient: Bytes, replicas: u32) -> Duration {
        self.time(Bytes(0)) + self.transfer(gradient) / replicas.max(1)
    }

    /// Like [`Self::time`] without the delay.
    pub(super) fn transfer(&self, size: Bytes) -> Duration {
        self.rate.time(size).min(NEVER)
    }
}

/// The links between all pairs of devices, in each direction.
#[derive(Debug, Clone)]
pub struct Network {
    devices: usize,
    /// Links from the first device to all, then from the second, and so on; those from a device to
    /// itself are unused.
    links: Vec<Link>,
}

impl Network {
    /// The network of `devices` devices whose links are given by `link(from, to)`.
    ///
    /// # Errors
    /// If there are too many devices, or a link has no rate.
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

    /// Number of devices.
    #[must_use]
    pub fn devices(&self) -> usize {
        self.devices
    }

    /// The link from one device to another.
    ///
    /// # Panics
    /// If there is no such device.
    #[must_use]
    pub fn link(&self, from: Device, to: Device) -> Link {
        self.links[from.0 * self.devices + to.0]
    }

    /// A number for each device; those with equal numbers are interchangeable. Devices are of one
    /// kind if they have the same links to and from all others, like those of one region.
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
    fn a_network_needs_links_with_a_rate_and_limits_its_devices() {
        let dead = Network::new(3, |_, to| link(1, u64::from(to != Device(2))));
        let refused = PlanError::DeadLink { from: Device(0), to: Device(2) };
        assert_eq!(dead.expect_err("a dead link"), refused);
        let many = Network::new(MAX_DEVICES + 1, |_, _| link(1, 1));
        let refused = PlanError::TooManyDevices { devices: MAX_DEVICES + 1 };
        assert_eq!(many.expect_err("too many"), refused);
    }

    #[test]
    fn devices_of_one_region_are_of_one_kind() {
        let homes = [0, 1, 0, 2, 1];
        let between = |from: Device, to: Device| {
            let (from, to) = (homes[from.0], homes[to.0]);
            link(if from == to { 1 } else { 10 + from + to }, 1000)
        };
        let network = Network::new(5, between).expect("links have a rate");
        assert_eq!(network.kinds(), [0, 1, 0, 2, 1]);
    }
}
