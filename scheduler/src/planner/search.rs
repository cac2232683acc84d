//! Searches for a cheap placement.
//!
//! A genetic search with local improvement, like DT-FM's. A child takes whole groups from its two
//! parents in turn, since the combination of devices is the essence of a good placement (Galinier
//! and Hao 1999). It is then improved by exchanges of two devices until none makes it cheaper.

use std::collections::BTreeSet;
use std::time::Duration;

use super::cost::{CostModel, Placement};
use super::network::Device;
use super::route::{self, MAX_STAGES, ShortestPath};
use crate::rng::Rng;

/// The extent of the search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Number of placements kept.
    pub population: usize,
    /// Number of children made from them.
    pub children: usize,
    /// Maximum number of exchanges tried to improve one placement.
    pub exchanges: usize,
}

impl Default for Effort {
    fn default() -> Self {
        Self { population: 16, children: 64, exchanges: 4096 }
    }
}

impl Effort {
    /// An effort that takes seconds for 64 devices and 8 stages, and stays below hours for larger
    /// problems: the time to try one exchange is quadratic in the devices, and the orders of stages
    /// double with each stage.
    #[must_use]
    pub fn for_size(devices: usize, stages: usize) -> Self {
        let times = (devices / 64).max(1).pow(2) << stages.min(MAX_STAGES).saturating_sub(10);
        let all = Self::default();
        let children = (all.children / times).max(all.population);
        Self { children, exchanges: (all.exchanges / times).max(64), ..all }
    }
}

/// The cheapest placement found. It is determined by the model, the effort and the random numbers.
///
/// # Panics
/// If the population is empty.
#[must_use]
pub fn search(model: &CostModel, effort: &Effort, rng: &mut Rng) -> Placement {
    assert!(effort.population > 0, "a population");
    let mut population: Vec<Individual> = Vec::with_capacity(effort.population + 1);
    population.push(Individual::new(model, nearest_together(model)).improved(effort, rng));
    while population.len() < effort.population {
        let groups = random_groups(model, rng);
        population.push(Individual::new(model, groups).improved(effort, rng));
    }
    for _ in 0..effort.children {
        let mut parent = || rng.within(0..=population.len() as u64 - 1) as usize;
        let (one, other) = (parent(), parent());
        let groups = crossed(&population[one].groups, &population[other].groups, rng);
        let child = Individual::new(model, groups).improved(effort, rng);
        // Equally expensive placements are mostly the same one and would displace different ones.
        if population.iter().all(|known| known.worth() != child.worth()) {
            population.push(child);
            let worst = (0..population.len()).max_by_key(|index| population[*index].worth());
            population.swap_remove(worst.expect("the population is not empty"));
        }
    }
    let best =
        population.iter().min_by_key(|one| one.worth()).expect("the population is not empty");
    model.place(&best.groups)
}

/// A uniformly random division into groups.
#[must_use]
pub fn random_groups(model: &CostModel, rng: &mut Rng) -> Vec<Vec<Device>> {
    let mut devices: Vec<Device> = (0..model.devices()).map(Device).collect();
    rng.shuffle(&mut devices);
    devices.chunks(model.devices() / model.stages()).map(<[Device]>::to_vec).collect()
}

/// Groups filled one after the other, each with the device nearest to those in it.
pub(super) fn nearest_together(model: &CostModel) -> Vec<Vec<Device>> {
    let mut left: BTreeSet<Device> = (0..model.devices()).map(Device).collect();
    let mut groups = Vec::with_capacity(model.stages());
    while let Some(first) = left.pop_first() {
        let mut group = vec![first];
        while group.len() < model.devices() / model.stages() {
            let longer = |device: &Device| {
                group.push(*device);
                let time = model.all_reduce(&group);
                group.pop();
                time
            };
            let nearest =
                left.iter().copied().min_by_key(longer).expect("groups are equally large");
            left.remove(&nearest);
            group.push(nearest);
        }
        groups.push(group);
    }
    groups
}

/// A child's groups: alternately from each parent, the group with most devices that are not placed
/// yet; the rest fills the remaining room.
fn crossed(one: &[Vec<Device>], other: &[Vec<Device>], rng: &mut Rng) -> Vec<Vec<Device>> {
    let size = one.first().map_or(0, Vec::len);
    let mut left: BTreeSet<Device> = one.iter().flatten().copied().collect();
    let mut groups: Vec<Vec<Device>> = Vec::with_capacity(one.len());
    let mut parents = [one, other];
    while groups.len() < one.len() {
        let free = |group: &&Vec<Device>| group.iter().filter(|one| left.contains(one)).count();
        let start = rng.within(0..=one.len() as u64 - 1) as usize;
        let (before, from) = parents[0].split_at(start);
        let largest = from.iter().chain(before).max_by_key(free).expect("parents have groups");
        let group: Vec<Device> = largest.iter().copied().filter(|one| left.remove(one)).collect();
        groups.push(group);
        parents.swap(0, 1);
    }
    let mut rest: Vec<Device> = left.into_iter().collect();
    rng.shuffle(&mut rest);
    for group in &mut groups {
        let missing = size - group.len();
        group.extend(rest.drain(..missing));
    }
    groups
}

/// A placement under improvement, with the components of its cost.
#[derive(Debug, Clone)]
struct Individual<'a> {
    model: &'a CostModel,
    groups: Vec<Vec<Device>>,
    /// Each group's all-reduce.
    reduces: Vec<Duration>,
    /// The boundary between each two groups, as a square matrix.
    boundaries: Vec<Duration>,
    total: Duration,
}

impl<'a> Individual<'a> {
    fn new(model: &'a CostModel, groups: Vec<Vec<Device>>) -> Self {
        let stages = groups.len();
        let reduces = groups.iter().map(|group| model.all_reduce(group)).collect();
        let boundaries = vec![Duration::ZERO; stages * stages];
        let mut new = Self { model, groups, reduces, boundaries, total: Duration::ZERO };
        (0..stages).for_each(|group| new.bound(group));
        new.total = new.slowest_reduce() + new.pipeline();
        new
    }

    /// Rank: the cost, then the traffic off the critical path, since less of it leaves more room
    /// for improvement.
    fn worth(&self) -> (Duration, Duration) {
        (self.total, self.reduces.iter().sum::<Duration>())
    }

    /// Exchanges devices of two groups while that makes it cheaper.
    fn improved(mut self, effort: &Effort, rng: &mut Rng) -> Self {
        let mut pairs = self.exchanges();
        rng.shuffle(&mut pairs);
        pairs.truncate(effort.exchanges);
        // Exchanges tried since the last improvement. Devices of one kind are interchangeable.
        let (mut since, mut tried) = (0, BTreeSet::new());
        for (one, other) in pairs.iter().copied().cycle() {
            let kinds = (self.kind(one), self.kind(other));
            if kinds.0 != kinds.1
                && tried.insert((one.group, kinds.0, other.group, kinds.1))
                && self.exchange(one, other)
            {
                (since, tried) = (0, BTreeSet::new());
            }
            since += 1;
            if since > pairs.len() {
                break;
            }
        }
        self
    }

    fn kind(&self, place: Place) -> usize {
        self.model.kinds[self.groups[place.group][place.at].0]
    }

    /// All pairs of places in two groups.
    fn exchanges(&self) -> Vec<(Place, Place)> {
        let places =
            |group: usize| (0..self.groups[group].len()).map(move |at| Place { group, at });
        let all = 0..self.groups.len();
        all.clone()
            .flat_map(|one| all.clone().skip(one + 1).map(move |other| (one, other)))
            .flat_map(|(one, other)| {
                places(one).flat_map(move |here| places(other).map(move |there| (here, there)))
            })
            .collect()
    }

    /// Exchanges two devices if that makes it cheaper, and returns whether it did.
    fn exchange(&mut self, one: Place, other: Place) -> bool {
        let worth = self.worth();
        let (reduces, boundaries) = (self.reduces.clone(), self.boundaries.clone());
        self.swap(one, other);
        for group in [one.group, other.group] {
            self.reduces[group] = self.model.all_reduce(&self.groups[group]);
        }
        if self.slowest_reduce() < worth.0 {
            self.bound(one.group);
            self.bound(other.group);
            let stages = self.groups.len();
            let least = route::at_least(stages, |a, b| self.boundaries[a * stages + b]);
            if self.slowest_reduce() + least <= worth.0 {
                self.total = self.slowest_reduce() + self.pipeline();
                if self.worth() < worth {
                    return true;
                }
            }
        }
        self.swap(one, other);
        (self.reduces, self.boundaries, self.total) = (reduces, boundaries, worth.0);
        false
    }

    fn swap(&mut self, one: Place, other: Place) {
        let (here, there) = (self.groups[one.group][one.at], self.groups[other.group][other.at]);
        self.groups[one.group][one.at] = there;
        self.groups[other.group][other.at] = here;
    }

    fn slowest_reduce(&self) -> Duration {
        self.reduces.iter().copied().max().unwrap_or_default()
    }

    fn pipeline(&self) -> Duration {
        let stages = self.groups.len();
        ShortestPath::new(stages, |a, b| self.boundaries[a * stages + b]).length()
    }

    /// Computes the boundaries of one group with all others.
    fn bound(&mut self, group: usize) {
        let stages = self.groups.len();
        for other in (0..stages).filter(|other| *other != group) {
            let time = self.model.boundary(&self.groups[group], &self.groups[other]).0;
            self.boundaries[group * stages + other] = time;
            self.boundaries[other * stages + group] = time;
        }
    }
}

/// A place in a group.
#[derive(Debug, Clone, Copy)]
struct Place {
    group: usize,
    at: usize,
}
