//! Groups of like peers in a scenario: their number, speed, region and memory, and a trace of their
//! comings and goings.

use std::collections::BTreeSet;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use shoal_formats::config::read_text;
use shoal_protocol::ids::{Stage, StageSpan};
use shoal_protocol::message::{StageChoice, StageRoom};
use shoal_protocol::plain_name::IslandName;
use shoal_protocol::units::{Bytes, Rate};
use shoal_scheduler::sim::{ElementBytes, Scenario, SpotTrace, SpotUnit, TierScenario};

use crate::fleet::Links;
use crate::scenario::{Described, PEERS, ScenarioError};

/// The most groups of a scenario.
const GROUPS: usize = 64;

/// The most bytes of a trace.
const LARGEST_TRACE: Bytes = Bytes::mebi(4);

/// Bytes of memory that a stage takes per parameter: weights 4, Adam 8, gradient 4, accumulator 8,
/// result 4.
const BYTES_PER_PARAMETER: f64 = 28.0;

/// Bytes of a snapshot per parameter: weights and Adam's moments.
const SNAPSHOT_PER_PARAMETER: f64 = 12.0;

/// A group of like peers.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Peers that live from the beginning to the end. Those of a trace are additional.
    #[serde(default)]
    count: usize,
    /// Passes take `forward` divided by this.
    #[serde(default = "one")]
    speed: f64,
    /// Devices of each peer, which run passes at the same time. Each takes the time of a pass that `speed` says.
    #[serde(default = "one_device")]
    devices: NonZeroU16,
    /// Bytes of memory, which may hold several stages; by default unlimited, for one stage each.
    memory: Option<f64>,
    /// The stages that they host, as `2` or `0-3`; by default one that the coordinator chooses.
    #[serde(default, deserialize_with = "span")]
    stage: Option<StageSpan>,
    /// Bytes of stages that the device holds at once, and bytes per second of the link below it, each way.
    /// Unlimited by default.
    device_memory: Option<f64>,
    host_link: Option<f64>,
    /// Their region.
    region: String,
    /// The name of their island; by default each is alone.
    island: Option<IslandName>,
    /// A trace by which additional peers start and die.
    spot: Option<Spot>,
}

/// A trace of the preemptions of a real fleet.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Spot {
    /// The file, relative to the scenario's folder.
    trace: PathBuf,
    #[serde(default)]
    unit: Unit,
    /// Factor by which the trace is replayed faster.
    #[serde(default = "one")]
    faster: f64,
    #[serde(skip)]
    read: Option<SpotTrace>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Unit {
    #[default]
    Seconds,
    Hours,
}

fn one() -> f64 {
    1.0
}

fn one_device() -> NonZeroU16 {
    NonZeroU16::MIN
}

/// Reads stages from text.
fn span<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<StageSpan>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let wrong = |_| D::Error::custom("stage is one stage, or two as in \"0-3\"");
    text.parse().map(Some).map_err(wrong)
}

/// Bytes per parameter.
const ELEMENT: ElementBytes = ElementBytes::ADAMW;
const ELEMENT_BYTES: u64 = ELEMENT.weights + ELEMENT.moments + ELEMENT.sums;

impl Group {
    /// The device of a peer whose stages have so many parameters each, if not all of them fit.
    fn device(&self, stage: f64, stages: u16) -> Option<TierScenario> {
        let (memory, rate) = (self.device_memory?, self.host_link?);
        let hosted = self.stage.map_or(usize::from(stages), |span| span.stages().count());
        let swaps = memory < stage * hosted as f64 * ELEMENT_BYTES as f64;
        swaps.then_some(TierScenario {
            memory: Bytes(memory as u64),
            rate: Rate(rate as u64),
            element: ELEMENT,
        })
    }

    /// Checks the stages and the device.
    fn check_span(&self, stages: u16, stage: f64) -> Result<(), &'static str> {
        if self.stage.is_some_and(|span| span.last.0 >= stages) {
            return Err("there is no such stage: they are counted from 0");
        }
        if self.devices.get() > 1 && self.device_memory.is_some() {
            return Err("a peer of several devices does not swap: leave device_memory out");
        }
        if self.device_memory.is_some() != self.host_link.is_some() {
            return Err("device_memory and host_link go together");
        }
        if self.host_link.is_some_and(|rate| !(1.0..=1e15).contains(&rate)) {
            return Err("host_link is from 1 to 1e15 bytes per second");
        }
        // An update touches weights and moments, and simulated elements are rounded up.
        let least = (ELEMENT.weights + ELEMENT.moments) as f64 * stage.max(LEAST_ELEMENTS);
        if self.device_memory.is_some_and(|memory| !(least..=1e18).contains(&memory)) {
            return Err("no room for an update of a stage in its device_memory");
        }
        Ok(())
    }
}

/// The simulator gives no stage fewer elements.
const LEAST_ELEMENTS: f64 = 64.0;

/// Checks groups, links and the model's size.
pub fn check(described: &Described) -> Result<(), ScenarioError> {
    if !(0.0..=1e13).contains(&described.parameters) {
        return Err(ScenarioError::Parameters);
    }
    let wrong = |index, reason| Err(ScenarioError::Group(index, reason));
    if described.group.len() > GROUPS {
        return wrong(GROUPS, "there are too many groups");
    }
    let stage = described.parameters / f64::from(described.stages);
    let needs = stage * BYTES_PER_PARAMETER;
    for (index, group) in described.group.iter().enumerate() {
        if group.count > PEERS || (group.count == 0 && group.spot.is_none()) {
            return wrong(index, "set a count from 1 to 16384, or a spot trace");
        }
        let factor = |value: f64| (1e-6..=1e6).contains(&value);
        if !factor(group.speed) || group.spot.as_ref().is_some_and(|spot| !factor(spot.faster)) {
            return wrong(index, "speed and faster must be from 1e-6 to 1e6");
        }
        if !(0.0..1e6).contains(&(described.forward / group.speed)) {
            return wrong(index, "a pass must take less than a million seconds");
        }
        if group.memory.is_some_and(|memory| memory.is_nan() || memory < needs) {
            return wrong(
                index,
                "no room for a stage in its memory: cut the model into more stages",
            );
        }
    }
    for (index, group) in described.group.iter().enumerate() {
        if let Err(reason) = group.check_span(described.stages, stage) {
            return wrong(index, reason);
        }
    }
    // A group without stages takes any of them.
    let hosts = |group: &Group, stage| group.stage.is_none_or(|span| span.contains(stage));
    let hosted = |stage| described.group.iter().any(|group| hosts(group, Stage(stage)));
    if !described.group.is_empty() && !(0..described.stages).all(hosted) {
        return wrong(0, "some stage is in no group");
    }
    if described.group.iter().map(|group| group.count).sum::<usize>() > PEERS {
        return wrong(0, "there are too many peers in all");
    }
    if described.group.is_empty() {
        return Ok(());
    }
    let names: BTreeSet<&str> = described.group.iter().map(|group| group.region.as_str()).collect();
    Ok(links(described).check(&names)?)
}

fn links(described: &Described) -> Links<'_> {
    Links { within: described.within, between: described.between, link: &described.link }
}

/// Reads the traces that groups name.
///
/// # Errors
/// If one cannot be read.
pub fn read_traces(described: &mut Described, folder: &Path) -> anyhow::Result<()> {
    for spot in described.group.iter_mut().filter_map(|group| group.spot.as_mut()) {
        let path = folder.join(&spot.trace);
        let text = read_text(&path, LARGEST_TRACE)
            .with_context(|| format!("cannot read the trace {}", path.display()))?;
        let unit = match spot.unit {
            Unit::Seconds => SpotUnit::Seconds,
            Unit::Hours => SpotUnit::Hours,
        };
        let trace = SpotTrace::parse(&text, unit);
        spot.read =
            Some(trace.with_context(|| format!("{} is not a valid trace", path.display()))?);
    }
    Ok(())
}

/// Replaces a scenario's peers, links and snapshot sizes by those of the groups and the model.
pub fn apply(described: &Described, scenario: &mut Scenario) {
    let stage = described.parameters / f64::from(described.stages);
    if described.parameters > 0.0 {
        scenario.snapshot.size = Bytes((stage * SNAPSHOT_PER_PARAMETER) as u64);
    }
    if !described.group.is_empty() {
        form(described, scenario);
    }
    scenario.weigh_stages(stage as u64);
}

/// Replaces the peers and links.
fn form(described: &Described, scenario: &mut Scenario) {
    let names: BTreeSet<&str> = described.group.iter().map(|group| group.region.as_str()).collect();
    let place = |name: &str| names.iter().position(|known| *known == name);
    let line = |one: &str, other: &str| links(described).line(one, other).expect("it was checked");
    let matrix = |value: &dyn Fn(&str, &str) -> u64| -> Vec<Vec<u64>> {
        names.iter().map(|one| names.iter().map(|other| value(one, other)).collect()).collect()
    };
    scenario.network.bandwidths = matrix(&|one, other| line(one, other).bandwidth as u64);
    let delays = matrix(&|one, other| (line(one, other).delay * 1e6) as u64);
    scenario.network.latency = delays
        .into_iter()
        .map(|row| row.into_iter().map(Duration::from_micros).collect())
        .collect();
    let template = scenario.peers[0].clone();
    let coordinator = &mut scenario.peers;
    coordinator.truncate(1);
    coordinator[0].choice = StageChoice::None;
    coordinator[0].region = 0;
    scenario.anchors = 1;
    for (index, group) in described.group.iter().enumerate() {
        let mut peer = template.clone();
        peer.compute.forward = Duration::from_secs_f64(described.forward / group.speed);
        peer.compute.backward = peer.compute.forward * 2;
        peer.devices = group.devices;
        peer.island = group.island.clone();
        peer.region = place(&group.region).expect("every group is in one");
        peer.limits.heard = Bytes(u64::MAX / 4);
        if let Some(span) = group.stage {
            peer.choice = StageChoice::Span(span);
        }
        let stage = described.parameters / f64::from(described.stages);
        if let Some(memory) = group.memory {
            let room = memory / (stage * BYTES_PER_PARAMETER);
            peer.room = StageRoom::in_memory((room as u16).min(described.stages));
            peer.longest = described.stages;
        }
        peer.tiers = group.device(stage, described.stages);
        if let Some(tiers) = &peer.tiers {
            let of_stage = stage * ELEMENT_BYTES as f64;
            let in_memory = (tiers.memory.0 as f64 / of_stage) as u16;
            let most = described.stages;
            peer.room = StageRoom { in_memory, most, swap_rate: tiers.rate };
            peer.longest = most;
            // Stages that were chosen do not fit.
            let resident = if group.stage.is_some() { 0 } else { in_memory };
            peer.limits.resident = usize::from(resident);
        }
        peer.start = Some(Duration::ZERO);
        scenario.peers.extend(std::iter::repeat_n(peer.clone(), group.count));
        let Some(spot) = &group.spot else { continue };
        let Some(trace) = &spot.read else { continue };
        let seed = scenario.seed ^ (index as u64) << 32;
        let (most, fates) = trace.fates(scenario.peers.len(), spot.faster, seed);
        peer.start = None;
        scenario.peers.extend(std::iter::repeat_n(peer, most));
        scenario.faults.happen.extend(fates);
    }
    scenario.faults.happen.sort_by_key(|(at, _)| *at);
}

/// A small scenario with groups.
#[cfg(any(test, fuzzing))]
pub const EXAMPLE: &str = r#"stages = 2
steps = 3
parameters = 1e6
between = { delay = 0.02, bandwidth = 1e7 }
[[group]]
count = 2
region = "a"
island = "a1"
memory = 16e9
stage = "0-1"
device_memory = 1e7
host_link = 1e9
[[group]]
count = 1
speed = 2.0
region = "b"
spot = { trace = "spot.csv", unit = "seconds", faster = 60.0 }
[[link]]
between = ["a", "b"]
delay = 0.03
bandwidth = 2e7
"#;

#[cfg(test)]
mod tests {
    use shoal_scheduler::sim::{self, Mark};

    use super::*;

    #[test]
    fn groups_train_while_a_trace_starts_and_kills_peers() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("spot.csv"), "0,1\n60,1\n60,3\n120,3\n120,2\n")
            .expect("written");
        let mut described = Described::parse(EXAMPLE).expect("a scenario");
        read_traces(&mut described, folder.path()).expect("a trace");
        let scenario = described.scenario(1);
        assert_eq!(scenario.peers.len(), 1 + 2 + 1 + 3);
        let report = sim::run(&scenario).expect("every oracle holds");
        assert!(report.finished && report.marks[Mark::Died] == 1, "{report:?}");
    }

    #[test]
    fn groups_host_spans_that_they_swap() {
        let text = "stages = 4\nsteps = 2\nmicrobatches = 16\nparameters = 4e6\nanchors = 1\n\
            [[group]]\ncount = 1\nregion = \"a\"\nstage = \"0-2\"\ndevice_memory = 40e6\nhost_link = 1e9\n\
            [[group]]\ncount = 2\nregion = \"a\"\nstage = \"3\"\n";
        let described = Described::parse(text).expect("a scenario");
        let scenario = described.scenario(1);
        let choices: Vec<StageChoice> =
            scenario.peers[1..].iter().map(|peer| peer.choice).collect();
        let span =
            |first, last| StageChoice::Span(StageSpan { first: Stage(first), last: Stage(last) });
        assert_eq!(choices, [span(0, 2), span(3, 3), span(3, 3)]);
        let swaps: Vec<bool> = scenario.peers.iter().map(|peer| peer.limits.swaps(1)).collect();
        assert_eq!(swaps, [false, true, false, false]);
        let report = sim::run(&scenario).expect("every oracle holds");
        assert!(report.finished && report.swapped.loaded > Bytes(0), "{report:?}");
        for (from, to, reason) in [
            ("0-2", "2-0", "two as in"),
            ("\"3\"", "\"4\"", "no such stage"),
            ("\"3\"", "\"2\"", "in no group"),
            ("host_link = 1e9\n", "", "go together"),
            ("= 1e9", "= 0", "host_link is from"),
            ("40e6", "1e6", "no room for an update"),
        ] {
            let error = Described::parse(&text.replace(from, to)).expect_err(to).to_string();
            assert!(error.contains(reason), "{error}: {reason}");
        }
    }

    #[test]
    fn peers_of_two_devices_train_almost_twice_as_fast() {
        let text = |devices: u32| {
            format!(
                "stages = 2\nsteps = 4\nmicrobatches = 16\nforward = 1.0\nanchors = 1\n\
                [[group]]\ncount = 1\nregion = \"a\"\nstage = \"0\"\ndevices = {devices}\n\
                [[group]]\ncount = 1\nregion = \"a\"\nstage = \"1\"\ndevices = {devices}\n"
            )
        };
        let end = |devices| {
            let scenario = Described::parse(&text(devices)).expect("a scenario").scenario(1);
            let report = sim::run(&scenario).expect("every oracle holds");
            assert!(report.finished, "{report:?}");
            report.end.0
        };
        let [one, two] = [1, 2].map(end);
        assert!(two.mul_f64(1.7) < one, "{two:?} instead of {one:?}");
        let swaps = text(2).replace("devices", "device_memory = 1e9\nhost_link = 1e9\ndevices");
        let error = Described::parse(&swaps).expect_err("no swapping").to_string();
        assert!(error.contains("does not swap"), "{error}");
    }

    #[test]
    fn invalid_groups_are_refused() {
        for (from, to, reason) in [
            ("count = 2", "count = 20000", "count"),
            ("speed = 2.0", "speed = 0.0", "speed"),
            ("memory = 16e9", "memory = 1e6", "no room"),
            ("\"b\"]", "\"c\"]", "no region"),
            ("parameters = 1e6", "parameters = nan", "parameters"),
            ("faster = 60.0", "faster = -1.0", "faster"),
        ] {
            let error = Described::parse(&EXAMPLE.replace(from, to)).expect_err(to).to_string();
            assert!(error.contains(reason), "{error}: {reason}");
        }
    }
}
