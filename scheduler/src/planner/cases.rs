//! The 64 devices of DT-FM's published cases, which the cost model is checked against.
//!
//! Latencies and rates are those that the paper measured between regions of a cloud (its appendix;
//! DS3Lab/DT-FM, `scheduler/generate_sim_com_matrices.py`). The seconds of placements are those
//! that its released scheduler prints.

use std::time::Duration;

use shoal_protocol::units::{Bytes, Rate};

use super::network::{Device, Link, Network};
use super::{PlanError, Traffic};

/// Stages in every case; each is hosted by as many devices.
pub const STAGES: usize = 8;

/// Data of a step of GPT-3 XL (24 layers, 8 stages) with batches of 1M tokens: 125,000 tokens for
/// each of eight replicas, of a width that is 2024 in the released code, in f16, with 2^30 bytes
/// per gigabyte; and an eighth of 1.3 billion gradients in f32.
pub const TRAFFIC: Traffic =
    Traffic { activations: Bytes(471_249_163), gradient: Bytes(650_000_000) };

/// Published seconds of a step for a case's placements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Published {
    /// Mean over random placements.
    pub random: f64,
    /// All devices of a stage in one region.
    pub by_region: f64,
    /// The best placement that the paper's search finds.
    pub best: f64,
}

/// Devices in regions, and the published results of placing them.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Its number in the paper.
    pub number: u8,
    /// The modelled situation.
    pub name: &'static str,
    /// Regions with equally many devices each.
    pub regions: &'static [&'static str],
    /// Latency in milliseconds and rate in Mb/s within a region.
    within: (u64, u64),
    /// The same between two regions.
    between: &'static [(&'static str, &'static str, u64, u64)],
    /// The published results.
    pub published: Published,
}

impl Case {
    /// The network of its devices. Devices of one region have consecutive indices.
    ///
    /// # Errors
    /// Never for the cases here.
    pub fn network(&self) -> Result<Network, PlanError> {
        Network::new(DEVICES, |from, to| self.link(self.home(from), self.home(to)))
    }

    /// The region of a device.
    ///
    /// # Panics
    /// If there is no such device.
    #[must_use]
    pub fn home(&self, device: Device) -> &'static str {
        self.regions[device.0 * self.regions.len() / DEVICES]
    }

    /// Groups of devices, each within one region.
    #[must_use]
    pub fn by_region(&self) -> Vec<Vec<Device>> {
        let devices: Vec<Device> = (0..DEVICES).map(Device).collect();
        devices.chunks(DEVICES / STAGES).map(<[Device]>::to_vec).collect()
    }

    pub(crate) fn link(&self, from: &str, to: &str) -> Link {
        let pair = |one: &&(&str, &str, u64, u64)| {
            (one.0, one.1) == (from, to) || (one.1, one.0) == (from, to)
        };
        let (delay, rate) = match self.between.iter().find(pair) {
            Some((_, _, delay, rate)) => (*delay, *rate),
            None => {
                assert_eq!(from, to, "every pair of regions has a link");
                self.within
            }
        };
        Link { delay: Duration::from_millis(delay), rate: Rate(rate * 1_000_000 / 8) }
    }
}

/// Number of devices in every case.
const DEVICES: usize = 64;

/// The cases with distant devices.
pub const CASES: [Case; 3] = [
    Case {
        number: 3,
        name: "two campuses",
        regions: &["Ohio", "Virginia"],
        within: (1, 5000),
        between: &[("Ohio", "Virginia", 11, 1120)],
        published: Published { random: 35.1, by_region: 17.65, best: 16.1 },
    },
    Case {
        number: 4,
        name: "one country",
        regions: &["Virginia", "Oregon", "California", "Ohio"],
        within: (5, 2000),
        between: &[
            ("Virginia", "Oregon", 67, 1150),
            ("Virginia", "California", 59, 1050),
            ("Virginia", "Ohio", 11, 1120),
            ("Oregon", "California", 12, 1250),
            ("Oregon", "Ohio", 49, 1100),
            ("California", "Ohio", 52, 1020),
        ],
        published: Published { random: 54.3, by_region: 39.24, best: 34.8 },
    },
    Case {
        number: 5,
        name: "the world",
        regions: &[
            "Oregon",
            "Virginia",
            "Ohio",
            "Tokyo",
            "Seoul",
            "London",
            "Frankfurt",
            "Ireland",
        ],
        within: (5, 2000),
        between: WORLD,
        published: Published { random: 93.4, by_region: 59.44, best: 49.2 },
    },
];

const WORLD: &[(&str, &str, u64, u64)] = &[
    ("Oregon", "Virginia", 67, 790),
    ("Oregon", "Ohio", 49, 1100),
    ("Oregon", "Tokyo", 96, 523),
    ("Oregon", "Seoul", 124, 460),
    ("Oregon", "London", 136, 420),
    ("Oregon", "Frankfurt", 143, 404),
    ("Oregon", "Ireland", 124, 482),
    ("Virginia", "Ohio", 11, 1120),
    ("Virginia", "Tokyo", 143, 524),
    ("Virginia", "Seoul", 172, 500),
    ("Virginia", "London", 76, 1160),
    ("Virginia", "Frankfurt", 90, 1020),
    ("Virginia", "Ireland", 67, 1050),
    ("Ohio", "Tokyo", 130, 694),
    ("Ohio", "Seoul", 159, 529),
    ("Ohio", "London", 86, 1050),
    ("Ohio", "Frankfurt", 99, 799),
    ("Ohio", "Ireland", 77, 1140),
    ("Tokyo", "Seoul", 34, 1100),
    ("Tokyo", "London", 210, 366),
    ("Tokyo", "Frankfurt", 223, 360),
    ("Tokyo", "Ireland", 199, 465),
    ("Seoul", "London", 238, 342),
    ("Seoul", "Frankfurt", 235, 358),
    ("Seoul", "Ireland", 228, 335),
    ("London", "Frankfurt", 14, 1140),
    ("London", "Ireland", 12, 1090),
    ("Frankfurt", "Ireland", 24, 1080),
];
