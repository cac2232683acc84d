//! The devices of a peer that compute a pass: one each, all of them, or groups that have the slices of a layer.

use shoal_protocol::manifest::Manifest;

use crate::error::{EngineError, Result};

/// The passes that so many devices of one peer run at the same time: one each; or in a run with slices one together, or,
/// of more devices than slices, one by each group that has a device for each slice.
///
/// # Errors
/// If the devices cannot have equal parts of the slices.
pub fn passes_at_once(manifest: &Manifest, devices: usize) -> Result<usize> {
    match usize::from(manifest.model.slices) {
        slices if slices.is_multiple_of(devices) && slices > 1 => Ok(1),
        slices if devices.is_multiple_of(slices) => Ok(devices / slices),
        slices => Err(EngineError::SlicesOfDevices { slices, devices }),
    }
}

/// Groups of workers that compute the slices of a pass together, each of so many.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PassGroups {
    pub(crate) count: u64,
    pub(crate) each: u64,
}

impl PassGroups {
    /// Those of so many devices, which suit the run.
    pub(crate) fn of(manifest: &Manifest, devices: usize) -> Self {
        let count = passes_at_once(manifest, devices).unwrap_or(1).max(1);
        Self { count: count as u64, each: (devices / count) as u64 }
    }

    /// All that the devices have of so many weights, of which some are sliced: each group has those once, and each worker all
    /// others.
    pub(crate) fn held(self, weights: u64, sliced: u64) -> u64 {
        self.count * (sliced + self.each * (weights - sliced))
    }
}
