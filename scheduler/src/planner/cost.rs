//! The cost of a step for a given placement of devices.

use std::time::Duration;

use shoal_protocol::units::Bytes;

use super::network::{Device, Network};
use super::route::{MAX_STAGES, ShortestPath};
use super::{PlanError, matching};

/// Data that a step sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Activations of all its microbatches that a device sends to the next stage in a step; as much
    /// comes back.
    pub activations: Bytes,
    /// The gradient of a stage's weights.
    pub gradient: Bytes,
}

/// How long a step's tensors are in transit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Time of the all-reduces, which run at all stages simultaneously.
    pub data_parallel: Duration,
    /// Time of the activations from the first stage to the last, and of the gradients back.
    pub pipeline: Duration,
}

impl Cost {
    /// The sum of both.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.data_parallel + self.pipeline
    }
}

/// The device of a stage whose all-reduce ends last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Busiest {
    /// The device.
    pub device: Device,
    /// The duration of its all-reduce.
    pub time: Duration,
}

/// The slowest pair between two stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boundary {
    /// The device of the earlier stage.
    pub from: Device,
    /// The device of the later stage.
    pub to: Device,
    /// Time of the activations there and the gradients back.
    pub time: Duration,
}

/// A placement, its cost, and the bottlenecks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Each stage's devices, first stage first. Devices at the same position of neighbouring stages
    /// are paired.
    pub stages: Vec<Vec<Device>>,
    /// The cost.
    pub cost: Cost,
    /// Each stage's busiest device.
    pub busiest: Vec<Busiest>,
    /// The slowest pair of each boundary, that of the first two stages first.
    pub boundaries: Vec<Boundary>,
}

/// Costs of placements in one network, for one model.
#[derive(Debug, Clone)]
pub struct CostModel {
    devices: usize,
    stages: usize,
    /// For each pair of devices, the time of activations in one direction and gradients in the
    /// other.
    passing: Vec<Duration>,
    /// For each pair of devices, the time of its part of an all-reduce: a group's share of the
    /// gradient in both directions. The paper counts twice the time of one direction.
    exchange: Vec<Duration>,
    /// Devices of one kind are interchangeable.
    pub(super) kinds: Vec<usize>,
}

impl CostModel {
    /// The model for `stages` stages of equally many devices.
    ///
    /// # Errors
    /// If there are no devices, not the same number for each stage, or too many stages.
    pub fn new(network: &Network, traffic: Traffic, stages: usize) -> Result<Self, PlanError> {
        let devices = network.devices();
        if !(1..=MAX_STAGES).contains(&stages) {
            return Err(PlanError::Stages { stages });
        }
        if devices == 0 {
            return Err(PlanError::NoDevices);
        }
        if !devices.is_multiple_of(stages) {
            return Err(PlanError::Uneven { devices, stages });
        }
        let share = (devices / stages) as u32;
        let pairs =
            || (0..devices * devices).map(|at| (Device(at / devices), Device(at % devices)));
        let both = |time: &dyn Fn(Device, Device) -> Duration| {
            pairs().map(|(one, other)| time(one, other) + time(other, one)).collect()
        };
        let exchange =
            |from: Device, to: Device| network.link(from, to).exchange(traffic.gradient, share);
        Ok(Self {
            devices,
            stages,
            passing: both(&|from, to| network.link(from, to).time(traffic.activations)),
            exchange: both(&exchange),
            kinds: network.kinds(),
        })
    }

    /// Number of devices.
    #[must_use]
    pub fn devices(&self) -> usize {
        self.devices
    }

    /// Number of stages.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Orders groups of devices, one for each stage, and pairs them, at the lowest cost.
    ///
    /// # Panics
    /// If the number of groups differs from the stages, the groups differ in size, or a device is
    /// not in exactly one of them.
    #[must_use]
    pub fn place(&self, groups: &[Vec<Device>]) -> Placement {
        self.check(groups);
        let between = |a: usize, b: usize| self.boundary(&groups[a], &groups[b]).0;
        let path = ShortestPath::new(self.stages, between);
        let mut stages: Vec<Vec<Device>> = Vec::with_capacity(self.stages);
        for group in path.order().into_iter().map(|index| &groups[index]) {
            let paired = stages.last().map(|before: &Vec<Device>| {
                let (_, columns) = self.boundary(before, group);
                columns.into_iter().map(|column| group[column]).collect()
            });
            stages.push(paired.unwrap_or_else(|| group.clone()));
        }
        let busiest: Vec<Busiest> = stages.iter().map(|stage| self.busiest(stage)).collect();
        let boundaries = stages.windows(2).map(|two| self.slowest_pair(&two[0], &two[1])).collect();
        let data_parallel = busiest.iter().map(|one| one.time).max().unwrap_or_default();
        Placement {
            cost: Cost { data_parallel, pipeline: path.length() },
            stages,
            busiest,
            boundaries,
        }
    }

    /// The duration of a group's all-reduce.
    pub(super) fn all_reduce(&self, group: &[Device]) -> Duration {
        group.iter().map(|device| self.exchanges(*device, group)).max().unwrap_or_default()
    }

    /// The slowest pair of two optimally paired groups, and the position of each device's partner.
    pub(super) fn boundary(&self, before: &[Device], after: &[Device]) -> (Duration, Vec<usize>) {
        matching::bottleneck(before.len(), |row, column| self.pass(before[row], after[column]))
    }

    fn pass(&self, from: Device, to: Device) -> Duration {
        self.passing[from.0 * self.devices + to.0]
    }

    fn exchanges(&self, device: Device, group: &[Device]) -> Duration {
        let others = group.iter().filter(|other| **other != device);
        others.map(|other| self.exchange[device.0 * self.devices + other.0]).sum()
    }

    fn busiest(&self, group: &[Device]) -> Busiest {
        let all = group
            .iter()
            .map(|device| Busiest { device: *device, time: self.exchanges(*device, group) });
        all.max_by_key(|one| one.time).expect("a group has devices")
    }

    fn slowest_pair(&self, before: &[Device], after: &[Device]) -> Boundary {
        let pairs = before.iter().zip(after);
        let all =
            pairs.map(|(from, to)| Boundary { from: *from, to: *to, time: self.pass(*from, *to) });
        all.max_by_key(|pair| pair.time).expect("a group has devices")
    }

    fn check(&self, groups: &[Vec<Device>]) {
        let size = self.devices / self.stages;
        assert_eq!(groups.len(), self.stages, "a group for each stage");
        assert!(groups.iter().all(|group| group.len() == size), "groups are equally large");
        let mut there: Vec<usize> = groups.iter().flatten().map(|device| device.0).collect();
        there.sort_unstable();
        assert!(there.into_iter().eq(0..self.devices), "every device is in one group");
    }
}
