//! Figures of the machine, read when Prometheus asks.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use nix::sys::statvfs::statvfs;
use nix::unistd::{SysconfVar, sysconf};
use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;
use shoal_engine::DeviceChoice;
use shoal_metrics::{Swap, groups};

use crate::gpus::Gpus;
use crate::memory::HostMemory;

/// Linux counts swapped pages here.
const VMSTAT: &str = "/proc/vmstat";

/// Reads the machine's figures. Clones share the devices.
#[derive(Clone)]
pub struct Machine {
    gpus: Arc<Option<Gpus>>,
    /// The folder whose disk is looked at.
    data_dir: Arc<Path>,
}

impl Machine {
    /// Reads the figures of the devices that this process computes on, as far as NVML knows them, and of the disk of
    /// its data directory.
    #[must_use]
    pub fn new(devices: &[DeviceChoice], data_dir: &Path) -> Self {
        let gpus = Gpus::of(devices);
        Self { gpus: Arc::new(gpus), data_dir: data_dir.into() }
    }

    /// Sets the metrics to the current figures.
    pub(super) fn update(&self, metrics: &groups::Machine) {
        if let Err(error) = update_memory(metrics) {
            tracing::debug!(%error, "cannot read the machine's figures");
        }
        if let Err(error) = update_disk(metrics, &self.data_dir) {
            tracing::debug!(%error, "cannot read the figures of the disk");
        }
        let Some(gpus) = &*self.gpus else { return };
        for (number, gpu) in gpus.all() {
            if let Err(error) = gpu.and_then(|gpu| update_device(metrics, number, &gpu)) {
                tracing::debug!(%error, "cannot read the figures of device {number}");
            }
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

/// The disk of a folder.
fn update_disk(metrics: &groups::Machine, folder: &Path) -> nix::Result<()> {
    let disk = statvfs(folder)?;
    let bytes = |blocks: u64| blocks as f64 * disk.fragment_size() as f64;
    metrics.disk_bytes.set(bytes(disk.blocks()));
    metrics.disk_available_bytes.set(bytes(disk.blocks_available()));
    Ok(())
}

/// The figures of the device of this number.
fn update_device(
    metrics: &groups::Machine,
    number: usize,
    gpu: &Device<'_>,
) -> Result<(), NvmlError> {
    let memory = gpu.memory_info()?;
    metrics.device_memory_bytes.set(number, memory.total as f64);
    metrics.device_memory_used_bytes.set(number, memory.used as f64);
    metrics.device_utilization.set(number, f64::from(gpu.utilization_rates()?.gpu) / 100.0);
    metrics.device_power.set(number, f64::from(gpu.power_usage()?) / 1000.0);
    metrics.device_temperature.set(number, f64::from(gpu.temperature(TemperatureSensor::Gpu)?));
    Ok(())
}

/// The counter of this name, in pages.
fn pages(vmstat: &str, name: &str) -> Option<u64> {
    vmstat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
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
    fn the_machine_has_memory_and_a_disk() {
        let metrics = Metrics::new().expect("the names are unique");
        let folder = tempfile::tempdir().expect("a folder");
        Machine::new(&[DeviceChoice::Cpu], folder.path()).update(&metrics.machine);
        let [has, left] = [&metrics.machine.memory_bytes, &metrics.machine.memory_available_bytes]
            .map(|g| g.get());
        assert!(left > 0.0 && left <= has, "{left} of {has}");
        let [has, left] =
            [&metrics.machine.disk_bytes, &metrics.machine.disk_available_bytes].map(|g| g.get());
        assert!(left >= 0.0 && left <= has && has > 0.0, "{left} of {has}");
        assert!(metrics.machine.device_memory_bytes.get(0).is_nan(), "there is no device");
    }
}
