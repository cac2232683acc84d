//! The devices that a process computes on, as NVML finds and names them.

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use shoal_engine::DeviceChoice;

/// Selects and numbers the devices of a machine, as CUDA reads it.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Linux describes the processors here.
const PROCESSORS: &str = "/proc/cpuinfo";

/// The most characters of the text that names a peer's devices.
const LONGEST: usize = 64;

/// The GPUs of a process.
pub(crate) struct Gpus {
    nvml: Nvml,
    /// Where NVML finds each, with its number among the devices of the process.
    places: Vec<(usize, Place)>,
}

/// How NVML finds a device.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Number(u32),
    Uuid(String),
}

impl Gpus {
    /// Finds those of these devices that are GPUs; `None` if there are none, or without NVML.
    pub(crate) fn of(devices: &[DeviceChoice]) -> Option<Self> {
        let places = places(devices, std::env::var(VISIBLE).ok().as_deref());
        if places.is_empty() {
            return None;
        }
        match Nvml::init() {
            Ok(nvml) => Some(Self { nvml, places }),
            Err(error) => {
                tracing::info!(%error, "NVML is not available: there are no figures of devices");
                None
            }
        }
    }

    /// Each GPU, with its number among all devices.
    pub(crate) fn all(&self) -> impl Iterator<Item = (usize, Result<Device<'_>, NvmlError>)> {
        self.places.iter().map(|(number, place)| (*number, place.find(&self.nvml)))
    }
}

/// Names these devices for people, in at most 64 characters: `4 x NVIDIA H200`, or the processor's model.
pub(crate) fn names(devices: &[DeviceChoice]) -> String {
    let gpus = Gpus::of(devices);
    let gpu = |number| {
        let (_, found) = gpus.as_ref()?.all().find(|(found, _)| *found == number)?;
        found.and_then(|gpu| gpu.name()).ok()
    };
    let cpuinfo = std::fs::read_to_string(PROCESSORS).unwrap_or_default();
    let name = |(number, device): (usize, &DeviceChoice)| match device.is_processor() {
        true => processor(&cpuinfo).unwrap_or("processor").to_owned(),
        false => gpu(number).unwrap_or_else(|| "GPU".to_owned()),
    };
    listed(devices.iter().enumerate().map(name))
}

/// The model of the first processor.
fn processor(cpuinfo: &str) -> Option<&str> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, name)| name.trim()).filter(|name| !name.is_empty())
}

/// Names with their numbers, without characters that a screen would obey.
fn listed(names: impl Iterator<Item = String>) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for name in names {
        match counts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    let text = |(name, count): &(String, usize)| match count {
        1 => name.clone(),
        count => format!("{count} x {name}"),
    };
    let all: Vec<String> = counts.iter().map(text).collect();
    let plain = |letter: &char| letter.is_ascii_graphic() || *letter == ' ';
    all.join(", ").chars().filter(plain).take(LONGEST).collect()
}

impl Place {
    fn find<'a>(&self, nvml: &'a Nvml) -> Result<Device<'a>, NvmlError> {
        match self {
            Self::Number(number) => nvml.device_by_index(*number),
            Self::Uuid(uuid) => nvml.device_by_uuid(uuid.as_str()),
        }
    }
}

/// Where NVML finds those of these devices that are GPUs, each with its number among all.
fn places(devices: &[DeviceChoice], visible: Option<&str>) -> Vec<(usize, Place)> {
    let gpu = |(number, device): (usize, &DeviceChoice)| {
        let gpu = match device {
            _ if device.is_processor() => None,
            DeviceChoice::Cuda(gpu) => Some(*gpu),
            DeviceChoice::Auto | DeviceChoice::Cpu => Some(0),
        };
        Some((number, place(gpu?, visible)?))
    };
    devices.iter().enumerate().filter_map(gpu).collect()
}

/// Where NVML finds CUDA's device of this number, if the variable lists it.
fn place(number: usize, visible: Option<&str>) -> Option<Place> {
    let Some(visible) = visible else { return Some(Place::Number(u32::try_from(number).ok()?)) };
    let name = visible.split(',').nth(number)?.trim();
    match name.parse() {
        Ok(number) => Some(Place::Number(number)),
        Err(_) if name.starts_with("GPU-") => Some(Place::Uuid(name.to_owned())),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_found_as_cuda_numbers_it() {
        assert_eq!(place(2, None), Some(Place::Number(2)));
        assert_eq!(place(1, Some("3, 5")), Some(Place::Number(5)));
        assert_eq!(place(0, Some("GPU-12")), Some(Place::Uuid("GPU-12".to_owned())));
        assert_eq!((place(2, Some("3,5")), place(0, Some(""))), (None, None));
    }

    #[test]
    fn devices_have_their_numbers_among_all() {
        let devices = [DeviceChoice::Cuda(3), DeviceChoice::Cpu, DeviceChoice::Cuda(1)];
        let found = [(0, Place::Number(3)), (2, Place::Number(1))];
        assert_eq!(places(&devices, None), found);
        assert_eq!(places(&devices, Some("5,7")), [(2, Place::Number(7))]);
    }

    #[test]
    fn devices_have_names_of_bounded_length() {
        let names = |names: &[&str]| listed(names.iter().map(|name| (*name).to_owned()));
        assert_eq!(names(&["NVIDIA H200"; 4]), "4 x NVIDIA H200");
        assert_eq!(names(&["NVIDIA H200", "NVIDIA L4"]), "NVIDIA H200, NVIDIA L4");
        assert_eq!(names(&["a\u{1b}[2J\n\"é", "a"]), "a[2J\", a");
        assert_eq!(names(&["x".repeat(1000).as_str()]).len(), LONGEST);
    }

    #[test]
    fn the_processor_has_the_name_that_linux_gives_it() {
        let cpuinfo = "processor\t: 0\nmodel name\t: AMD EPYC 9R14\nmodel name\t: other\n";
        assert_eq!(processor(cpuinfo), Some("AMD EPYC 9R14"));
        assert_eq!((processor("model name\t: \n"), processor("")), (None, None));
        assert!(!super::names(&[DeviceChoice::Cpu]).is_empty());
    }
}
