//! The memory of frozen weights.

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::Manifest;

use crate::model::layer_table::largest_packed;
use crate::model::own_slices::OwnSlices;
use crate::model::parameters::{Parameter, WeightPart, model_parameters};
use crate::numeric::nf4;
use crate::train::frozen::layout_bytes;
use crate::weights::pass_groups::PassGroups;

/// The frozen weights of a stage that are in the dtype of passes, and the packed ones.
fn divided(manifest: &Manifest, stage: Stage) -> [Vec<Parameter>; 2] {
    if manifest.lora.is_none() {
        return [Vec::new(), Vec::new()];
    }
    let packs = manifest.packs_base();
    let is_packed = |parameter: &Parameter| packs && parameter.is_packable();
    let (packed, plain) = model_parameters(manifest, stage).into_iter().partition(is_packed);
    [plain, packed]
}

/// Bytes that a device with these slices has of a stage's frozen weights.
pub(crate) fn frozen_share(manifest: &Manifest, stage: Stage, own: &OwnSlices) -> u64 {
    match manifest.lora {
        Some(_) => layout_bytes(manifest, &model_parameters(manifest, stage), own) as u64,
        None => 0,
    }
}

/// Bytes of a stage's frozen weights on a device that has all of them.
pub(crate) fn frozen_bytes(manifest: &Manifest, stage: Stage) -> u64 {
    frozen_share(manifest, stage, &OwnSlices::new(&manifest.model, None))
}

/// Bytes that all devices of these groups have of a stage's frozen weights, of which each group divides those in slices
/// that are not packed.
pub(crate) fn frozen_of_groups(manifest: &Manifest, stage: Stage, groups: PassGroups) -> u64 {
    let (count, sliced, packed) = frozen_parts(manifest, stage);
    let size = manifest.training.dtype.size() as u64;
    size * groups.held(count, sliced) + groups.held(packed, 0)
}

/// Frozen weights of a stage in the dtype of passes, how many of these are in slices, and bytes of the packed ones.
pub(crate) fn frozen_parts(manifest: &Manifest, stage: Stage) -> (u64, u64, u64) {
    let [plain, packed] = divided(manifest, stage);
    let is_together = manifest.model.slices > 1;
    let is_sliced = |one: &&Parameter| is_together && one.part_of_slice() != WeightPart::Whole;
    let count = plain.iter().map(|one| one.len() as u64).sum();
    let sliced = plain.iter().filter(is_sliced).map(|one| one.len() as u64).sum();
    let packed: u64 = packed.iter().map(|one| nf4::section_bytes(one.len()) as u64).sum();
    // The first section begins where it may.
    let gap = if packed > 0 { nf4::ALIGNMENT as u64 - 1 } else { 0 };
    (count, sliced, packed + gap)
}

/// Bytes of the values of the largest packed factor of a product, which exist while that is computed.
pub(crate) fn unpacked_bytes(manifest: &Manifest, stage: Stage) -> u64 {
    if !manifest.packs_base() {
        return 0;
    }
    let of_layer = |layer| largest_packed(&manifest.model, layer);
    let largest = manifest.layers_of(stage).map(of_layer).max().unwrap_or(0);
    manifest.training.dtype.size() as u64 * largest
}
