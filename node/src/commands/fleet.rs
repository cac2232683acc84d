//! Devices, the links between them and what a model sends over them, as a file says it.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::Deserialize;
#[cfg(any(test, fuzzing))]
use shoal_protocol::decoder::Decoder;
use shoal_protocol::units::{Bytes, Rate};
use shoal_scheduler::planner::{Device, Link, MAX_STAGES, Network, PlanError, Traffic};

use super::budget::Training;

/// What fleets may have at most. The search takes half a minute with so many devices.
const DEVICES: usize = 256;
const REGIONS: usize = 64;

/// A file that describes no fleet.
#[derive(Debug, thiserror::Error)]
pub(super) enum FleetError {
    /// No TOML, or not with these keys.
    #[error(transparent)]
    Malformed(#[from] toml::de::Error),
    /// None, or too many.
    #[error("name from 1 to {REGIONS} regions, with from 1 to {DEVICES} devices in all")]
    Devices,
    /// None, or too many.
    #[error("stages is a list of numbers from 1 to {MAX_STAGES}, at most {MAX_STAGES} of them")]
    Stages,
    /// Two of one name.
    #[error("there are two regions {0}: give each a name of its own")]
    SameRegion(String),
    /// A link to nowhere.
    #[error("a link is between {0}, which is no region: list it under [[region]]")]
    NoSuchRegion(String),
    /// Two links, or one from a region to itself.
    #[error("the link between {0} and {1} is given twice, or is one region's: that is `within`")]
    SameLink(String, String),
    /// A pair without a link.
    #[error("how are {0} and {1} linked? Add a [[link]] between them, or [between] for all")]
    NoLink(String, String),
    /// One that carries nothing, or takes for ever.
    #[error("a link has a delay from 0 to 1000 seconds and carries from 1 byte a second to 1e12")]
    Link,
    /// Not what a step can be.
    #[error(
        "[training] has from 1 to 2^40 tokens, a sequence of no more, seconds up to 1000, bytes up to 1e18, a budget \
         and prices of no less than 0, and a staleness of 0 or 1"
    )]
    Training,
    /// Not a number of bytes.
    #[error("activations and gradient are numbers of bytes, up to 1e18")]
    Traffic,
}

/// A link. Seconds one way, and bytes a second.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Line {
    pub(super) delay: f64,
    pub(super) bandwidth: f64,
}

impl Line {
    fn can_be(self) -> bool {
        (0.0..=1e3).contains(&self.delay) && (1.0..=1e12).contains(&self.bandwidth)
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Region {
    name: String,
    devices: usize,
    /// What one costs in an hour.
    #[serde(default)]
    price: f64,
    /// Between its own devices; else as in all regions.
    within: Option<Line>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Between {
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

/// A fleet and what a model sends, as a file says it; docs/placement.md has the keys.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fleet {
    /// Numbers of pipeline stages to choose from.
    stages: Vec<usize>,
    /// Activations of a whole step at one boundary, in bytes.
    activations: f64,
    /// The gradient of the whole model, in bytes.
    gradient: f64,
    /// Links between devices of one region, where it does not say.
    within: Line,
    /// Links between regions that have none of their own.
    between: Option<Line>,
    region: Vec<Region>,
    #[serde(default)]
    link: Vec<Between>,
    /// What a step computes, and what may be spent.
    training: Option<Training>,
}

impl Fleet {
    /// Reads what a file says.
    ///
    /// # Errors
    /// When it describes no fleet.
    pub(super) fn parse(text: &str) -> Result<Self, FleetError> {
        let fleet: Self = toml::from_str(text)?;
        fleet.check()?;
        Ok(fleet)
    }

    /// Numbers of stages to choose from, the lowest first.
    pub(super) fn stages(&self) -> BTreeSet<usize> {
        self.stages.iter().copied().collect()
    }

    /// What a step sends when it is cut into so many stages.
    pub(super) fn traffic(&self, stages: usize) -> Traffic {
        let replicas = self.devices().div_ceil(stages) as f64;
        Traffic {
            activations: Bytes((self.activations / replicas) as u64),
            gradient: Bytes((self.gradient / stages as f64) as u64),
        }
    }

    /// What it is to train, where the file says so.
    pub(super) fn training(&self) -> Option<&Training> {
        self.training.as_ref()
    }

    /// Activations of a step at one boundary, in bytes.
    pub(super) fn activations(&self) -> f64 {
        self.activations
    }

    /// How many regions there are.
    pub(super) fn regions(&self) -> usize {
        self.region.len()
    }

    /// How many devices a region has.
    pub(super) fn devices_of(&self, region: usize) -> usize {
        self.region[region].devices
    }

    /// What a device of a region costs in an hour.
    pub(super) fn price(&self, region: usize) -> f64 {
        self.region[region].price
    }

    /// The same with so many devices of each region, and no region without any.
    pub(super) fn part(&self, devices: &[usize]) -> Self {
        let counted = self.region.iter().zip(devices).filter(|(_, devices)| **devices > 0);
        let region =
            counted.map(|(region, devices)| Region { devices: *devices, ..region.clone() });
        Self { region: region.collect(), ..self.clone() }
    }

    /// The same with no other number of stages than this.
    pub(super) fn with_stages(self, stages: usize) -> Self {
        Self { stages: vec![stages], ..self }
    }

    /// The links between its devices. Devices of one region follow each other.
    ///
    /// # Errors
    /// When nothing can be planned for it.
    pub(super) fn network(&self) -> Result<Network, PlanError> {
        let homes: Vec<usize> = (0..self.devices()).map(|at| self.home(Device(at)).0).collect();
        let line = |one: &Region, other: &Region| {
            if one.name == other.name {
                return one.within.unwrap_or(self.within);
            }
            let link = self.links().line(&one.name, &other.name);
            link.expect("every pair has a link: the file was checked")
        };
        let row = |one: &Region| self.region.iter().map(|other| line(one, other)).collect();
        let lines: Vec<Vec<Line>> = self.region.iter().map(row).collect();
        Network::new(homes.len(), |from, to| {
            let line = lines[homes[from.0]][homes[to.0]];
            let delay = Duration::from_secs_f64(line.delay);
            Link { delay, rate: Rate(line.bandwidth as u64) }
        })
    }

    /// A device's name: its region and its number there.
    pub(super) fn name(&self, device: Device) -> String {
        let (region, number) = self.home(device);
        format!("{}/{number}", self.region[region].name)
    }

    /// The region that a device is in, and its number there.
    pub(super) fn home(&self, device: Device) -> (usize, usize) {
        let mut number = device.0;
        for (index, region) in self.region.iter().enumerate() {
            if number < region.devices {
                return (index, number);
            }
            number -= region.devices;
        }
        unreachable!("only devices of this fleet have a name")
    }

    /// The name of a region.
    pub(super) fn region(&self, index: usize) -> &str {
        &self.region[index].name
    }

    /// How many devices there are.
    pub(super) fn devices(&self) -> usize {
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
        self.training.map_or(Ok(()), |training| training.check())?;
        self.check_links()
    }

    fn check_links(&self) -> Result<(), FleetError> {
        let mut own = self.region.iter().filter_map(|region| region.within);
        if !own.all(Line::can_be) {
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
pub(super) struct Links<'a> {
    /// Between those of one region.
    pub(super) within: Line,
    /// Between regions that have none of their own.
    pub(super) between: Option<Line>,
    /// Those that have.
    pub(super) link: &'a [Between],
}

impl Links<'_> {
    /// The link between a region and another, or itself; none where nothing says.
    pub(super) fn line(&self, one: &str, other: &str) -> Option<Line> {
        if one == other {
            return Some(self.within);
        }
        let own = self.link.iter().find(|link| link.pair() == ordered(one, other));
        own.map(Between::line).or(self.between)
    }

    /// Whether every two of these regions have a link, one that can be.
    ///
    /// # Errors
    /// When they have not.
    pub(super) fn check(&self, names: &BTreeSet<&str>) -> Result<(), FleetError> {
        let between = self.link.iter().map(Between::line);
        if !between.chain(self.between).chain([self.within]).all(Line::can_be) {
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

/// How the file is tried.
#[cfg(any(test, fuzzing))]
pub(crate) const DECODER: Decoder = Decoder {
    name: "fleet",
    examples: || vec![EXAMPLE.as_bytes().to_vec()],
    check: |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return };
        let Ok(fleet) = Fleet::parse(text) else { return };
        // Whatever was read has a network, unless a link carries nothing.
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
region = [{ name = "a", devices = 2 }, { name = "b", devices = 2 }]
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
    fn a_fleet_has_the_links_that_its_file_says() {
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
    fn what_is_no_fleet_is_refused_with_its_reason() {
        for (text, reason) in [
            (with("stages = [2, 4]", "stages = []"), "stages is a list"),
            (with("[2, 4]", "[2, 17]"), "from 1 to 16"),
            (with("devices = 2 }, ", "devices = 300 }, "), "1 to 256 devices"),
            (with("devices = 2 }, ", "devices = -1 }, "), "devices"),
            (with("bandwidth = 2e7", "bandwidth = 0"), "carries"),
            (with("delay = 0.05", "delay = nan"), "delay"),
            (with("gradient = 4e9", "gradient = inf"), "numbers of bytes"),
            (with("\"b\", devices", "\"a\", devices"), "two regions a"),
            (with("[\"b\", \"a\"]", "[\"b\", \"c\"]"), "c, which is no region"),
            (with("[\"b\", \"a\"]", "[\"b\", \"b\"]"), "`within`"),
            (
                EXAMPLE.split("[[link]]").next().expect("a part").to_owned(),
                "how are a and b linked",
            ),
            (with("gradient", "gradients"), "unknown field"),
        ] {
            let error = Fleet::parse(&text).expect_err(&text).to_string();
            assert!(error.contains(reason), "{error}: {reason}");
        }
    }
}
