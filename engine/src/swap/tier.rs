//! The tier below a peer's memory.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::units::{Bytes, Rate};

use super::file::{SwapFile, read, write};
use super::region::Region;
use crate::cost::memory::{device_floor, swapped_means, swapped_share, swapping_floor};
use crate::error::{EngineError, Result};
use crate::weights::share::Share;

/// Bytes that a measurement writes and reads.
const MEASURED: usize = 16 << 20;

/// The tier for stages that memory does not hold: a file on a disk.
#[derive(Debug, Clone)]
pub struct LowerTier {
    /// The folder of the file.
    pub folder: PathBuf,
    /// The memory of the engine, for all that it holds.
    pub memory: Bytes,
    /// Stages that memory holds at once. Where more are hosted, they are swapped.
    pub resident: usize,
}

/// The memories through which stages go that one of them does not hold.
#[derive(Debug, Clone, Default)]
pub struct Tiers {
    /// Memory of each device for passes and the weights that they read; all else is then in the machine's memory.
    /// `None` where the devices have all.
    pub device: Option<Bytes>,
    /// The tier below the machine's memory.
    pub lower: Option<LowerTier>,
}

impl Tiers {
    /// Whether no stage is ever swapped.
    #[must_use]
    pub fn are_none(&self) -> bool {
        self.device.is_none() && self.lower.is_none()
    }

    /// The memory for weights of each of so many devices that compute a pass together; `None` where they have all.
    pub(crate) fn for_weights(&self, manifest: &Manifest, devices: usize) -> Option<Bytes> {
        let passes = device_floor(manifest, devices).passes;
        self.device.map(|memory| Bytes(memory.0.saturating_sub(passes.0)))
    }
}

impl LowerTier {
    /// Whether so many hosted stages are swapped.
    pub(crate) fn swaps(&self, hosted: usize) -> bool {
        hosted > self.resident
    }

    /// The memory for what a device with this share has of these stages; `None` where memory holds all of them.
    pub(crate) fn budget(
        &self,
        manifest: &Manifest,
        stages: &[Stage],
        share: &Share,
    ) -> Option<Bytes> {
        let own = || swapped_share(manifest, stages, share);
        self.swaps(stages.len()).then(|| self.part(manifest, stages, (share.count(), own())))
    }

    /// The memory for the mean gradients of these stages, beside so many devices that divide the rest; `None` where memory
    /// holds all of them.
    pub(crate) fn budget_of_means(
        &self,
        manifest: &Manifest,
        stages: &[Stage],
        devices: usize,
    ) -> Option<Bytes> {
        let own = || swapped_means(manifest, stages);
        self.swaps(stages.len()).then(|| self.part(manifest, stages, (devices, own())))
    }

    /// A part of the memory for all tensors of these stages, in proportion to the least that it must be.
    fn part(
        &self,
        manifest: &Manifest,
        stages: &[Stage],
        (devices, least): (usize, Bytes),
    ) -> Bytes {
        let microbatches = manifest.training.microbatches;
        let floor = swapping_floor(manifest, stages, microbatches, devices);
        let all = self.memory.0.saturating_sub(floor.resident.0);
        let part = u128::from(all) * u128::from(least.0) / u128::from(floor.swapped.0.max(1));
        Bytes(u64::try_from(part).expect("a part of the memory"))
    }
}

/// The rate at which a file in this folder is written or read, the lower of the two.
///
/// # Errors
/// If the disk has no room, or fails.
pub fn swap_rate(folder: &Path) -> Result<Rate> {
    let mut file = SwapFile::create(folder)?;
    let handle = file.handle().map_err(EngineError::SwapMemory)?;
    let extent = file.reserve(Stage(0), MEASURED)?;
    let mut region = Region::zeroed(MEASURED).map_err(EngineError::SwapMemory)?;
    region.bytes_mut().fill(1);
    let failed = |source| EngineError::SwapFile { folder: folder.to_owned(), source };
    let start = Instant::now();
    write(&handle, extent, region.bytes()).map_err(failed)?;
    let written = start.elapsed();
    read(&handle, extent, region.bytes_mut()).map_err(failed)?;
    let slower = written.max(start.elapsed().saturating_sub(written)).max(Duration::from_nanos(1));
    Ok(Rate((MEASURED as f64 / slower.as_secs_f64()) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_a_rate_and_keeps_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let rate = swap_rate(folder.path()).expect("a disk with room");
        assert!(rate > Rate(1 << 20), "{rate:?}");
        assert_eq!(std::fs::read_dir(folder.path()).expect("it is there").count(), 0);
        let missing = folder.path().join("missing");
        assert!(swap_rate(&missing).expect_err("no folder").to_string().contains("missing"));
    }
}
