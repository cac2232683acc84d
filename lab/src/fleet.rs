//! Reads the description of a fleet: devices, the links between them, and the traffic of a model.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::Deserialize;
#[cfg(any(test, fuzzing))]
use shoal_protocol::decoder::Decoder;
use shoal_protocol::units::{Bytes, Rate};
use shoal_scheduler::planner::{Device, Link, MAX_STAGES, Machine, Network, PlanError, Traffic};

use crate::fleet_error::{DEVICES, FleetError, REGIONS};
use crate::plan_work::{DeviceFigures, RunWork, Training};

/// A link: its one-way delay in seconds, and its bandwidth in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// Seconds, one way.
    pub delay: f64,
    /// Bytes per second.
    pub bandwidth: f64,
}

impl Line {
    fn is_valid(self) -> bool {
        (0.0..=1e3).contains(&self.delay) && (1.0..=1e12).contains(&self.bandwidth)
    }

    fn link(self) -> Link {
        let delay = Duration::from_secs_f64(self.delay);
        Link { delay, rate: Rate(self.bandwidth as u64) }
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Region {
    name: String,
    devices: usize,
    /// Price of one device for an hour.
    #[serde(default)]
    price: f64,
    /// Price of 1e9 bytes that leave the region.
    #[serde(default)]
    egress: f64,
    /// Deaths of one device in an hour.
    #[serde(default)]
    deaths: f64,
    /// The link between its own devices; by default that of the fleet.
    within: Option<Line>,
    /// Devices of each of its machines, which follow each other, and the link between two of one machine.
    devices_per_machine: Option<usize>,
    inside: Option<Line>,
}

impl Region {
    /// Whether the devices make whole machines.
    fn is_valid(&self) -> bool {
        match (self.devices_per_machine, self.inside) {
            (None, None) => true,
            (Some(each), Some(_)) => {
                (2..=DEVICES).contains(&each) && self.devices.is_multiple_of(each)
            }
            _ => false,
        }
    }

    /// The link between two of its devices, by their numbers in it.
    fn line(&self, one: usize, other: usize, within: Line) -> Line {
        let together = |each: usize| one / each == other / each;
        let inside = self.inside.filter(|_| self.devices_per_machine.is_some_and(together));
        inside.or(self.within).unwrap_or(within)
    }
}

/// The link between two regions.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Between {
    between: [String; 2],
    delay: f64,
    bandwidth: f64,
}

impl Between {
    fn pair(&self) -> (&str, &str) {
        ordered(&self.between[0], &self.between[1])
    }

    fn line(&self) -> Line {
        Line { delay: self.delay, bandwidth: self.bandwidth }
    }
}

/// A file as it is; docs/guide/sizes.md describes the keys.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct FleetFile {
    stages: Option<Vec<usize>>,
    activations: Option<f64>,
    gradient: Option<f64>,
    within: Line,
    between: Option<Line>,
    region: Vec<Region>,
    #[serde(default)]
    link: Vec<Between>,
    #[serde(default = "replacement")]
    replacement: f64,
    training: Option<Training>,
    device: Option<DeviceFigures>,
}

/// Five minutes: a machine is rented, joins and fetches the weights.
fn replacement() -> f64 {
    300.0
}

impl FleetFile {
    /// The fleet with the work that its file describes.
    fn alone(mut self) -> Result<Fleet, FleetError> {
        if self.device.is_some() {
            return Err(FleetError::Device);
        }
        let stages = self.stages.take().ok_or(FleetError::Missing("stages"))?;
        let activations = self.activations.ok_or(FleetError::Missing("activations"))?;
        let gradient = self.gradient.ok_or(FleetError::Missing("gradient"))?;
        let training = self.training;
        Ok(self.fleet(stages, (activations, gradient), training))
    }

    /// The fleet with the work of a run. Unless the file names numbers of stages, they are all that the layers and the
    /// devices allow.
    fn for_run(mut self, work: &RunWork) -> Result<Fleet, FleetError> {
        let derived = [
            ("activations", self.activations.is_some()),
            ("gradient", self.gradient.is_some()),
            ("[training]", self.training.is_some()),
        ];
        if let Some((key, _)) = derived.into_iter().find(|(_, given)| *given) {
            return Err(FleetError::Derived(key));
        }
        let training = self.device.ok_or(FleetError::Device)?.training(work)?;
        let devices: usize = self.region.iter().map(|region| region.devices.min(DEVICES)).sum();
        let most = MAX_STAGES.min(work.layers).min(devices.max(1));
        let all = || (1..=most).filter(|stages| devices.is_multiple_of(*stages)).collect();
        let stages = self.stages.take().unwrap_or_else(all);
        Ok(self.fleet(stages, (work.activations, work.gradient), Some(training)))
    }

    /// The fleet with this work.
    fn fleet(
        self,
        stages: Vec<usize>,
        (activations, gradient): (f64, f64),
        training: Option<Training>,
    ) -> Fleet {
        let Self { within, between, region, link, replacement, .. } = self;
        Fleet {
            stages,
            activations,
            gradient,
            within,
            between,
            region,
            link,
            replacement,
            training,
        }
    }
}

/// A fleet, and the traffic of a model.
#[derive(Debug, Clone)]
pub struct Fleet {
    /// Numbers of pipeline stages to choose from.
    stages: Vec<usize>,
    /// Activations of a whole step at one stage boundary, in bytes.
    activations: f64,
    /// The gradient of the whole model, in bytes.
    gradient: f64,
    /// The link between devices of one region, unless the region has its own.
    within: Line,
    /// The link between regions that have no link of their own.
    between: Option<Line>,
    region: Vec<Region>,
    link: Vec<Between>,
    /// Seconds until another device serves in place of one that died.
    replacement: f64,
    /// The work of a step, and the budget.
    training: Option<Training>,
}

impl Fleet {
    /// Parses a fleet.
    ///
    /// # Errors
    /// If the text describes no valid fleet.
    pub fn parse(text: &str) -> Result<Self, FleetError> {
        let fleet = toml::from_str::<FleetFile>(text)?.alone()?;
        fleet.check()?;
        Ok(fleet)
    }

    /// Parses a fleet that is to train a run.
    ///
    /// # Errors
    /// If the text describes no valid fleet, or what follows from the run.
    pub fn for_run(text: &str, work: &RunWork) -> Result<Self, FleetError> {
        let fleet = toml::from_str::<FleetFile>(text)?.for_run(work)?;
        fleet.check()?;
        Ok(fleet)
    }

    /// Numbers of stages to choose from, the lowest first.
    pub fn stages(&self) -> BTreeSet<usize> {
        self.stages.iter().copied().collect()
    }

    /// The traffic of a step with this number of stages.
    pub fn traffic(&self, stages: usize) -> Traffic {
        let replicas = self.devices().div_ceil(stages) as f64;
        Traffic {
            activations: Bytes((self.activations / replicas) as u64),
            gradient: Bytes((self.gradient / stages as f64) as u64),
        }
    }

    /// The training, if the file describes it.
    pub fn training(&self) -> Option<&Training> {
        self.training.as_ref()
    }

    /// Activations of a step at one boundary, in bytes.
    pub fn activations(&self) -> f64 {
        self.activations
    }

    /// The gradient of the whole model, in bytes.
    pub fn gradient(&self) -> f64 {
        self.gradient
    }

    /// The number of regions.
    pub fn regions(&self) -> usize {
        self.region.len()
    }

    /// The number of devices in a region.
    pub fn devices_of(&self, region: usize) -> usize {
        self.region[region].devices
    }

    /// Price of one device of a region for an hour.
    pub fn price(&self, region: usize) -> f64 {
        self.region[region].price
    }

    /// Price of a byte that leaves a region.
    pub fn egress(&self, region: usize) -> f64 {
        self.region[region].egress / 1e9
    }

    /// Deaths of a device in an hour.
    pub fn deaths(&self, device: Device) -> f64 {
        self.region[self.home(device).0].deaths
    }

    /// Seconds until another device serves in place of one that died.
    pub fn replacement(&self) -> f64 {
        self.replacement
    }

    /// The same fleet with these numbers of devices by region, and without empty regions.
    pub fn part(&self, devices: &[usize]) -> Self {
        let counted = self.region.iter().zip(devices).filter(|(_, devices)| **devices > 0);
        let region =
            counted.map(|(region, devices)| Region { devices: *devices, ..region.clone() });
        Self { region: region.collect(), ..self.clone() }
    }

    /// The same fleet with this number of stages as the only choice.
    pub fn with_stages(self, stages: usize) -> Self {
        Self { stages: vec![stages], ..self }
    }

    /// The links between the devices. The devices of a region are consecutive.
    ///
    /// # Errors
    /// If the planner rejects the fleet.
    pub fn network(&self) -> Result<Network, PlanError> {
        let homes: Vec<(usize, usize)> =
            (0..self.devices()).map(|at| self.home(Device(at))).collect();
        let line = |one: &Region, other: &Region| {
            let link = self.links().line(&one.name, &other.name);
            link.expect("every pair has a link: the file was checked")
        };
        let row = |one: &Region| self.region.iter().map(|other| line(one, other)).collect();
        let lines: Vec<Vec<Line>> = self.region.iter().map(row).collect();
        Network::new(homes.len(), |from, to| {
            let ((one, from), (other, to)) = (homes[from.0], homes[to.0]);
            let line = match one == other {
                true => self.region[one].line(from, to, self.within),
                false => lines[one][other],
            };
            line.link()
        })
    }

    /// The machines of a region, if they have several devices.
    pub fn machine(&self, region: usize, training: &Training) -> Option<Machine> {
        let Region { devices_per_machine, inside, .. } = &self.region[region];
        Some(Machine {
            devices: (*devices_per_machine)?,
            inside: (*inside)?.link(),
            stages: self.stages(),
            // The gradient is in f32.
            weights: self.gradient / 4.0,
            layers: training.layers,
            tier: training.tier(self),
            overlaps: training.overlaps(),
        })
    }

    /// A device's name: its region and its number in it.
    pub fn name(&self, device: Device) -> String {
        let (region, number) = self.home(device);
        format!("{}/{number}", self.region[region].name)
    }

    /// A device's region, and its number in it.
    pub fn home(&self, device: Device) -> (usize, usize) {
        let mut number = device.0;
        for (index, region) in self.region.iter().enumerate() {
            if number < region.devices {
                return (index, number);
            }
            number -= region.devices;
        }
        unreachable!("the device is of this fleet")
    }

    /// The name of a region.
    pub fn region(&self, index: usize) -> &str {
        &self.region[index].name
    }

    /// The number of devices.
    pub fn devices(&self) -> usize {
        self.region.iter().map(|region| region.devices).sum()
    }

    fn check(&self) -> Result<(), FleetError> {
        let few = self.region.iter().all(|region| region.devices <= DEVICES);
        if !(1..=REGIONS).contains(&self.region.len())
            || !few
            || !(1..=DEVICES).contains(&self.devices())
        {
            return Err(FleetError::Devices);
        }
        let stages = || self.stages.iter().all(|stages| (1..=MAX_STAGES).contains(stages));
        if !(1..=MAX_STAGES).contains(&self.stages.len()) || !stages() {
            return Err(FleetError::Stages);
        }
        let amount = |bytes: f64| (0.0..=1e18).contains(&bytes);
        if !amount(self.activations) || !amount(self.gradient) {
            return Err(FleetError::Traffic);
        }
        if self.region.iter().any(|region| !(0.0..=1e9).contains(&region.price)) {
            return Err(FleetError::Training);
        }
        if let Some(region) = self.region.iter().find(|region| !region.is_valid()) {
            return Err(FleetError::Machine(region.name.clone()));
        }
        let valid = |region: &&Region| {
            (0.0..=1e9).contains(&region.egress) && (0.0..=1e3).contains(&region.deaths)
        };
        if let Some(region) = self.region.iter().find(|region| !valid(region)) {
            return Err(FleetError::Region(region.name.clone()));
        }
        if !(0.0..=86_400.0).contains(&self.replacement) {
            return Err(FleetError::Replacement);
        }
        self.training.map_or(Ok(()), |training| training.check())?;
        self.check_links()
    }

    fn check_links(&self) -> Result<(), FleetError> {
        let mut own = self.region.iter().flat_map(|region| [region.within, region.inside]);
        if !own.all(|line| line.is_none_or(Line::is_valid)) {
            return Err(FleetError::Link);
        }
        let mut names = BTreeSet::new();
        if let Some(twice) = self.region.iter().find(|region| !names.insert(region.name.as_str())) {
            return Err(FleetError::SameRegion(twice.name.clone()));
        }
        self.links().check(&names)
    }

    fn links(&self) -> Links<'_> {
        Links { within: self.within, between: self.between, link: &self.link }
    }
}

/// The links between regions.
#[derive(Debug, Clone, Copy)]
pub struct Links<'a> {
    /// The link within a region.
    pub within: Line,
    /// The link between regions that have no link of their own.
    pub between: Option<Line>,
    /// Links of specific pairs.
    pub link: &'a [Between],
}

impl Links<'_> {
    /// The link between two regions, or within one; none if no link is given for the pair.
    pub fn line(&self, one: &str, other: &str) -> Option<Line> {
        if one == other {
            return Some(self.within);
        }
        let own = self.link.iter().find(|link| link.pair() == ordered(one, other));
        own.map(Between::line).or(self.between)
    }

    /// Checks that every pair of these regions has a valid link.
    ///
    /// # Errors
    /// If one has none, or an invalid one.
    pub fn check(&self, names: &BTreeSet<&str>) -> Result<(), FleetError> {
        let between = self.link.iter().map(Between::line);
        if !between.chain(self.between).chain([self.within]).all(Line::is_valid) {
            return Err(FleetError::Link);
        }
        let mut linked = BTreeSet::new();
        for [one, other] in self.link.iter().map(|link| &link.between) {
            if let Some(nowhere) =
                [one, other].into_iter().find(|end| !names.contains(end.as_str()))
            {
                return Err(FleetError::NoSuchRegion(nowhere.clone()));
            }
            if one == other || !linked.insert(ordered(one, other)) {
                return Err(FleetError::SameLink(one.clone(), other.clone()));
            }
        }
        let mut pairs = names.iter().flat_map(|one| names.iter().map(move |other| (*one, *other)));
        match pairs.find(|(one, other)| one < other && !linked.contains(&(*one, *other))) {
            Some((one, other)) if self.between.is_none() => {
                Err(FleetError::NoLink(one.to_owned(), other.to_owned()))
            }
            _ => Ok(()),
        }
    }
}

fn ordered<'a>(one: &'a str, other: &'a str) -> (&'a str, &'a str) {
    if one < other { (one, other) } else { (other, one) }
}

/// How the decoder of a fleet is tested.
#[cfg(any(test, fuzzing))]
pub const DECODER: Decoder = Decoder {
    name: "fleet",
    examples: || vec![EXAMPLE.as_bytes().to_vec()],
    check: |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return };
        let Ok(fleet) = Fleet::parse(text) else { return };
        // Every valid fleet has a network.
        let network = fleet.network().expect("links were checked");
        assert_eq!(network.devices(), fleet.devices());
    },
};

/// A small fleet.
#[cfg(any(test, fuzzing))]
const EXAMPLE: &str = r#"stages = [2, 4]
activations = 1e9
gradient = 4e9
within = { delay = 0.001, bandwidth = 1e9 }
replacement = 120.0
region = [{ name = "a", devices = 2, egress = 0.09, deaths = 0.05 }, { name = "b", devices = 2 }]
[[link]]
between = ["b", "a"]
delay = 0.05
bandwidth = 2e7
"#;

#[cfg(test)]
mod tests {
    use super::*;

    fn with(from: &str, to: &str) -> String {
        assert!(EXAMPLE.contains(from), "{from}");
        EXAMPLE.replace(from, to)
    }

    #[test]
    fn a_fleet_has_the_links_of_its_file() {
        let fleet = Fleet::parse(EXAMPLE).expect("a fleet");
        let network = fleet.network().expect("links carry something");
        let near = network.link(Device(0), Device(1));
        assert_eq!(near, Link { delay: Duration::from_millis(1), rate: Rate(1_000_000_000) });
        let far = network.link(Device(1), Device(2));
        assert_eq!(far, Link { delay: Duration::from_millis(50), rate: Rate(20_000_000) });
        assert_eq!(fleet.name(Device(3)), "b/1");
        let traffic = Traffic { activations: Bytes(500_000_000), gradient: Bytes(2_000_000_000) };
        assert_eq!(fleet.traffic(2), traffic);
    }

    #[test]
    fn devices_of_one_machine_have_the_link_inside_it() {
        let machines =
            "devices = 4, devices_per_machine = 2, inside = { delay = 0, bandwidth = 5e10 } }, ";
        let fleet = Fleet::parse(&with("devices = 2, egress = 0.09, deaths = 0.05 }, ", machines))
            .expect("a fleet");
        let network = fleet.network().expect("links carry something");
        let rate = |from, to| network.link(Device(from), Device(to)).rate;
        assert_eq!((rate(0, 1), rate(2, 3)), (Rate(50_000_000_000), Rate(50_000_000_000)));
        assert_eq!((rate(1, 2), rate(4, 5)), (Rate(1_000_000_000), Rate(1_000_000_000)));
        assert_eq!(rate(0, 4), Rate(20_000_000));
    }

    #[test]
    fn an_invalid_fleet_is_refused_with_its_reason() {
        for (text, reason) in [
            (with("stages = [2, 4]", "stages = []"), "stages is a list"),
            (with("[2, 4]", "[2, 17]"), "from 1 to 16"),
            (with("devices = 2, ", "devices = 300, "), "1 to 256 devices"),
            (with("devices = 2, ", "devices = -1, "), "devices"),
            (with("bandwidth = 2e7", "bandwidth = 0"), "bandwidth from 1"),
            (with("delay = 0.05", "delay = nan"), "delay"),
            (with("gradient = 4e9", "gradient = inf"), "numbers of bytes"),
            (with("\"b\", devices", "\"a\", devices"), "two regions a"),
            (with("[\"b\", \"a\"]", "[\"b\", \"c\"]"), "c, which is no region"),
            (with("[\"b\", \"a\"]", "[\"b\", \"b\"]"), "`within`"),
            (
                EXAMPLE.split("[[link]]").next().expect("a part").to_owned(),
                "no link between a and b",
            ),
            (with("devices = 2, ", "devices = 2, devices_per_machine = 2, "), "`inside`"),
            (with("egress = 0.09", "egress = -1"), "region a: `egress`"),
            (with("deaths = 0.05", "deaths = nan"), "region a: `egress`"),
            (with("replacement = 120.0", "replacement = 1e6"), "`replacement`"),
            (
                with(
                    "devices = 2, ",
                    "devices = 2, devices_per_machine = 3, inside = { delay = 0, bandwidth = 1 }, ",
                ),
                "region a: devices_per_machine",
            ),
            (with("gradient", "gradients"), "unknown field"),
        ] {
            let error = Fleet::parse(&text).expect_err(&text).to_string();
            assert!(error.contains(reason), "{error}: {reason}");
        }
    }
}
