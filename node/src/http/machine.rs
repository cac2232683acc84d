//! The machine's own figures, looked at when Prometheus asks.

use std::fmt;
use std::sync::Arc;

use nix::unistd::{SysconfVar, sysconf};
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use shoal_engine::DeviceChoice;
use shoal_metrics::{Swap, groups};

use crate::memory::HostMemory;

/// What the system counts moved pages in.
const VMSTAT: &str = "/proc/vmstat";

/// Numbers that choose among the devices of a machine, as CUDA itself reads them.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Looks at the machine; all clones are the same one.
#[derive(Clone)]
pub struct Machine(Arc<Option<Gpu>>);

struct Gpu {
    nvml: Nvml,
    place: Place,
}

/// How a device is found.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Number(u32),
    Uuid(String),
}

impl Machine {
    /// With the device that this process computes on, if NVML knows it.
    #[must_use]
    pub fn new(device: DeviceChoice) -> Self {
        let number = match device {
            _ if device.is_processor() => None,
            DeviceChoice::Cuda(number) => Some(number),
            DeviceChoice::Auto | DeviceChoice::Cpu => Some(0),
        };
        let visible = std::env::var(VISIBLE).ok();
        let place = number.and_then(|number| place(number, visible.as_deref()));
        let gpu = place.and_then(|place| match Nvml::init() {
            Ok(nvml) => Some(Gpu { nvml, place }),
            Err(error) => {
                tracing::info!(%error, "NVML says nothing: there are no figures of the device");
                None
            }
        });
        Self(Arc::new(gpu))
    }

    /// Tells how it is now.
    pub(super) fn look(&self, told: &groups::Machine) {
        if let Err(error) = look_at_memory(told) {
            tracing::debug!(%error, "the machine does not say how it is");
        }
        if let Some(gpu) = &*self.0
            && let Err(error) = gpu.look(told)
        {
            tracing::debug!(%error, "the device does not say how it is");
        }
    }
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine").finish_non_exhaustive()
    }
}

/// Memory that is there, and what of it went to the disk and came back.
fn look_at_memory(told: &groups::Machine) -> anyhow::Result<()> {
    let memory = HostMemory::now()?;
    told.memory_bytes.set(memory.total.0 as f64);
    told.memory_available_bytes.set(memory.available.0 as f64);
    let counted = std::fs::read_to_string(VMSTAT)?;
    let page = sysconf(SysconfVar::PAGE_SIZE)?.unwrap_or_default().unsigned_abs();
    for (direction, name) in [(Swap::In, "pswpin"), (Swap::Out, "pswpout")] {
        let counter = told.swapped_bytes.of(direction);
        let bytes = pages(&counted, name).unwrap_or_default() * page;
        counter.inc_by(bytes.saturating_sub(counter.get()));
    }
    Ok(())
}

impl Gpu {
    fn device(&self) -> Result<Device<'_>, NvmlError> {
        match &self.place {
            Place::Number(number) => self.nvml.device_by_index(*number),
            Place::Uuid(uuid) => self.nvml.device_by_uuid(uuid.as_str()),
        }
    }

    fn look(&self, told: &groups::Machine) -> Result<(), NvmlError> {
        let device = self.device()?;
        let memory = device.memory_info()?;
        told.device_memory_bytes.set(memory.total as f64);
        told.device_memory_used_bytes.set(memory.used as f64);
        told.device_utilization.set(f64::from(device.utilization_rates()?.gpu) / 100.0);
        told.device_power.set(f64::from(device.power_usage()?) / 1000.0);
        told.device_temperature.set(f64::from(device.temperature(TemperatureSensor::Gpu)?));
        Ok(())
    }
}

/// What the system counted under a name, in pages.
fn pages(vmstat: &str, name: &str) -> Option<u64> {
    vmstat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// Where CUDA finds the device of this number, if the variable has it at all.
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
    use shoal_metrics::Metrics;

    #[test]
    fn pages_are_found_by_their_whole_name() {
        let text = "pswpin_other 7\npswpin 3\npswpout 12\n";
        assert_eq!((pages(text, "pswpin"), pages(text, "pswpout")), (Some(3), Some(12)));
        assert_eq!(pages(text, "pswp"), None);
    }

    #[test]
    fn a_device_is_where_cuda_looks_for_it() {
        assert_eq!(place(2, None), Some(Place::Number(2)));
        assert_eq!(place(1, Some("3, 5")), Some(Place::Number(5)));
        assert_eq!(place(0, Some("GPU-12")), Some(Place::Uuid("GPU-12".to_owned())));
        assert_eq!((place(2, Some("3,5")), place(0, Some(""))), (None, None));
    }

    #[test]
    fn the_machine_has_memory() {
        let metrics = Metrics::new().expect("they do not clash");
        Machine::new(DeviceChoice::Cpu).look(&metrics.machine);
        let [has, left] = [&metrics.machine.memory_bytes, &metrics.machine.memory_available_bytes]
            .map(|g| g.get());
        assert!(left > 0.0 && left <= has, "{left} of {has}");
        assert!(metrics.machine.device_memory_bytes.get().is_nan(), "nobody knows");
    }
}
