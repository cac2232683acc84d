//! Figures of the machine, read when Prometheus asks.

use std::fmt;
use std::sync::Arc;

use nix::unistd::{SysconfVar, sysconf};
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use shoal_engine::DeviceChoice;
use shoal_metrics::{Swap, groups};

use crate::memory::HostMemory;

/// Linux counts swapped pages here.
const VMSTAT: &str = "/proc/vmstat";

/// Selects and numbers the devices of a machine, as CUDA reads it.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Reads the machine's figures. Clones share the device.
#[derive(Clone)]
pub struct Machine(Arc<Option<Gpu>>);

struct Gpu {
    nvml: Nvml,
    place: Place,
}

/// How NVML finds a device.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Number(u32),
    Uuid(String),
}

impl Machine {
    /// Reads the figures of the device that this process computes on, if NVML knows it.
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
                tracing::info!(%error, "NVML is not available: there are no figures of the device");
                None
            }
        });
        Self(Arc::new(gpu))
    }

    /// Sets the metrics to the current figures.
    pub(super) fn update(&self, metrics: &groups::Machine) {
        if let Err(error) = update_memory(metrics) {
            tracing::debug!(%error, "cannot read the machine's figures");
        }
        if let Some(gpu) = &*self.0
            && let Err(error) = gpu.update(metrics)
        {
            tracing::debug!(%error, "cannot read the device's figures");
        }
    }
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine").finish_non_exhaustive()
    }
}

/// The machine's memory, and the bytes swapped out and in.
fn update_memory(metrics: &groups::Machine) -> anyhow::Result<()> {
    let memory = HostMemory::now()?;
    metrics.memory_bytes.set(memory.total.0 as f64);
    metrics.memory_available_bytes.set(memory.available.0 as f64);
    let counted = std::fs::read_to_string(VMSTAT)?;
    let page = sysconf(SysconfVar::PAGE_SIZE)?.unwrap_or_default().unsigned_abs();
    for (direction, name) in [(Swap::In, "pswpin"), (Swap::Out, "pswpout")] {
        let counter = metrics.swapped_bytes.of(direction);
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

    fn update(&self, metrics: &groups::Machine) -> Result<(), NvmlError> {
        let device = self.device()?;
        let memory = device.memory_info()?;
        metrics.device_memory_bytes.set(memory.total as f64);
        metrics.device_memory_used_bytes.set(memory.used as f64);
        metrics.device_utilization.set(f64::from(device.utilization_rates()?.gpu) / 100.0);
        metrics.device_power.set(f64::from(device.power_usage()?) / 1000.0);
        metrics.device_temperature.set(f64::from(device.temperature(TemperatureSensor::Gpu)?));
        Ok(())
    }
}

/// The counter of this name, in pages.
fn pages(vmstat: &str, name: &str) -> Option<u64> {
    vmstat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
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
    use shoal_metrics::Metrics;

    #[test]
    fn pages_are_found_by_their_whole_name() {
        let text = "pswpin_other 7\npswpin 3\npswpout 12\n";
        assert_eq!((pages(text, "pswpin"), pages(text, "pswpout")), (Some(3), Some(12)));
        assert_eq!(pages(text, "pswp"), None);
    }

    #[test]
    fn a_device_is_found_as_cuda_numbers_it() {
        assert_eq!(place(2, None), Some(Place::Number(2)));
        assert_eq!(place(1, Some("3, 5")), Some(Place::Number(5)));
        assert_eq!(place(0, Some("GPU-12")), Some(Place::Uuid("GPU-12".to_owned())));
        assert_eq!((place(2, Some("3,5")), place(0, Some(""))), (None, None));
    }

    #[test]
    fn the_machine_has_memory() {
        let metrics = Metrics::new().expect("the names are unique");
        Machine::new(DeviceChoice::Cpu).update(&metrics.machine);
        let [has, left] = [&metrics.machine.memory_bytes, &metrics.machine.memory_available_bytes]
            .map(|g| g.get());
        assert!(left > 0.0 && left <= has, "{left} of {has}");
        assert!(metrics.machine.device_memory_bytes.get().is_nan(), "there is no device");
    }
}
