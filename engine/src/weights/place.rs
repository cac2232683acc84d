//! What a device has of a stage's weights.

use std::ops::Range;

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Dtype, Manifest};

use crate::device::setup::Device;
use crate::model::own_slices::OwnSlices;
use crate::model::parameters::{Parameter, parameters, range_of};
use crate::weights::held::Held;
use crate::weights::share::Share;

/// A device, and what it has of a stage's weights.
#[derive(Debug, Clone)]
pub(crate) struct WeightsPlace {
    pub(crate) device: Device,
    /// The range of the flat vector that is here as f32: all, or what this device updates.
    pub(crate) kept: Range<usize>,
    /// What passes read here.
    pub(crate) held: Held,
    pub(crate) own: OwnSlices,
}

impl WeightsPlace {
    /// All weights of a stage.
    pub(crate) fn whole(manifest: &Manifest, stage: Stage, device: Device) -> Self {
        Self::of_share(manifest, &parameters(manifest, stage), device, &Share::WHOLE)
    }

    /// What a device has that updates this share of a stage's weights.
    pub(crate) fn of_share(
        manifest: &Manifest,
        parameters: &[Parameter],
        device: Device,
        share: &Share,
    ) -> Self {
        let own = OwnSlices::new(&manifest.model, share.seat());
        let held = Held::of_passes(parameters, &own);
        let has_all = share.is_whole() || !share.is_apart();
        let kept = match has_all || own.are_all() && keeps_all(manifest) {
            true => parameters,
            false => &parameters[share.of(parameters)],
        };
        Self { device, kept: range_of(kept), held, own }
    }
}

/// Whether each device of several that compute passes of their own keeps all weights in f32, because passes, or
/// something else, read them as f32. Otherwise it keeps its share.
fn keeps_all(manifest: &Manifest) -> bool {
    manifest.training.dtype == Dtype::F32
        || manifest.inner.is_some()
        || manifest.model.subspace().is_some()
}
