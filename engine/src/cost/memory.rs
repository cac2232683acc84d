//! The minimum memory of a peer.

use shoal_protocol::ids::{Stage, StageSpan};
use shoal_protocol::manifest::{Dtype, Manifest};
use shoal_protocol::units::Bytes;

use crate::cost::frozen_memory::{
    frozen_bytes, frozen_of_groups, frozen_parts, frozen_share, unpacked_bytes,
};
use crate::device::exchange::Seat;
use crate::model::boundary;
use crate::model::layer_table::{inner_width, latent_width, routed_bytes};
use crate::model::own_slices::OwnSlices;
use crate::model::parameters::{Parameter, WeightPart, parameter_count, parameters, range_of};
use crate::optimizer::{SlotLayout, carried_elements, layout, optimizer_elements};
use crate::weights::held::Held;
use crate::weights::pass_groups::PassGroups;
use crate::weights::share::Share;

/// Bytes per weight while a step is closed, without the optimizer's: weights 4, one microbatch's gradient 4,
/// accumulator 8, result of the all-reduce 4.
const PER_PARAMETER: u64 = 20;

/// The minimum memory of a peer with this span, without libtorch itself (about 300 MiB).
///
/// For every weight: 20 bytes, what the optimizer keeps ([`optimizer_elements`], 8 with AdamW), 2 for its bf16
/// copy if passes are computed in bf16, 8 for the rounding errors that a lossy all-reduce keeps, and 12 (14 with
/// its bf16 copy) for each earlier version that steps read. For every frozen weight, in a run that trains adapters, those of its number format; where
/// matrices are packed in four bits, 0.516 for each of theirs, and the values of the largest while a product reads them.
///
/// For every stage and every microbatch in flight in each step: with `recompute` its input,
/// otherwise the tensors that the backward pass reads. For each layer and token these are the
/// inputs of both norms and of the four matrix multiplications, the queries, keys, values and
/// attention output, and the inner values of the feed-forward block:
/// `5 · hidden + 2 · queries + 2 · keys + 3 · intermediate` numbers (with latent attention twice those from which queries, keys and
/// values follow, and the values, too), and `heads + 2` of f32: the logarithms of attention's
/// sums, and both norms' roots. Attention keeps nothing for pairs of tokens, so this grows as the tokens of a sample. Of
/// experts the inner values are those of a token's own, whose inputs and outputs are read too. A stage has the angles of
/// each token's place in its document. If activations are compressed, they also
/// include the inputs of two norms and of the compression between them at the end of a stage, and
/// the input of the expansion at the beginning of the next. With `recompute` one microbatch at a
/// time has these tensors as well. In a run with a subspace, every stage has its basis four times (as
/// numbers and as tensors, each with the transpose), and during a pass a row of the initial embedding for
/// each token, in f32.
///
/// A virtual worker has one microbatch in flight, and beside the run's weights those of its own: for each 16 bytes
/// (with its accumulator and gradient), 2 for its bf16 copy, and what its optimizer keeps. One whose passes are
/// exchanges has the microbatches of an update in flight, and 4 bytes more for each weight. Where workers carry that,
/// further 16 for each of these numbers.
#[must_use]
pub fn memory_floor(manifest: &Manifest, span: StageSpan, in_flight: u32) -> Bytes {
    let training = &manifest.training;
    let narrow = narrow_bytes(manifest);
    // The weights of earlier versions, and an accumulator for each.
    let stale = (manifest.steps_at_once() - 1) * (4 + narrow + 8);
    let input = manifest.boundary_bytes(manifest.codec.activations).0;
    let in_flight = graphs_at_once(manifest, in_flight);
    let stage_bytes = |stage| {
        let weights = parameter_count(manifest, stage) as u64
            * (PER_PARAMETER + narrow + stale + kept_errors(manifest));
        let graph = graph_bytes(manifest, stage);
        let activations =
            if training.recompute { in_flight * input + graph } else { in_flight * graph };
        let frozen = frozen_bytes(manifest, stage);
        let subspace = basis_bytes(manifest) + initial_bytes(manifest);
        // One worker's moments, their accumulator and their mean.
        let carried = (4 + 8 + 4) * carried_elements(manifest, stage) as u64;
        let inner = inner_bytes(manifest, stage) + carried;
        Bytes(weights + optimizer_bytes(manifest, stage) + frozen + activations + subspace + inner)
    };
    let unpacked = span.stages().map(|stage| unpacked_bytes(manifest, stage)).max();
    span.stages().map(stage_bytes).sum::<Bytes>() + Bytes(unpacked.unwrap_or(0))
}

/// What passes with so many microbatches in flight in each step take beyond [`memory_floor`] on several devices. Those
/// that compute slices of a pass together each have the ends of the stage whole. Where the floor has the graph of one pass,
/// there is one for each that runs at the same time. Each device has the basis of a subspace.
#[must_use]
pub fn pass_overhead(
    manifest: &Manifest,
    span: StageSpan,
    in_flight: u32,
    devices: usize,
) -> Bytes {
    let groups = PassGroups::of(manifest, devices);
    let in_flight = graphs_at_once(manifest, in_flight);
    let counted = if manifest.training.recompute { in_flight.min(1) } else { in_flight };
    let has_one = manifest.training.recompute || manifest.inner.is_some();
    let further = if has_one { groups.count - 1 } else { 0 };
    let basis = (devices as u64 - 1) * basis_bytes(manifest);
    let unpacked = span.stages().map(|stage| unpacked_bytes(manifest, stage)).max().unwrap_or(0);
    let of_stage = |stage| {
        let graph = graphs_bytes(manifest, stage, groups.each);
        let ends = graph - graph_bytes(manifest, stage);
        Bytes(counted * ends + further * graph + basis)
    };
    let unpacked = Bytes((devices as u64 - 1) * unpacked);
    span.stages().map(of_stage).sum::<Bytes>() + unpacked
}

/// The microbatches that a stage has in flight, of so many in each step.
pub(crate) fn graphs_at_once(manifest: &Manifest, in_flight: u32) -> u64 {
    match &manifest.inner {
        None => u64::from(in_flight) * manifest.steps_at_once(),
        Some(_) => u64::from(in_flight.min(1) * manifest.exchanges_at_once()),
    }
}

/// What several workers of the processor ([`crate::Island`]) take beyond [`memory_floor`]. They share accumulators and
/// weights, and divide what the optimizer keeps. Each further one has for every weight one microbatch's gradient, 4 bytes,
/// and a virtual worker of its own, with what workers carry.
///
/// Workers that compute slices of each pass together divide the weights in f32, a virtual worker, and gradients of
/// slices. Each has its slices of the matrices, and all other weights, trained or frozen, in the dtype of passes; its rows
/// of the embedding in f32; and the mean gradient of a virtual worker's updates. Groups of such workers divide the weights
/// in f32 and what the optimizer keeps, unless they train virtual workers; each has accumulators and all else.
#[must_use]
pub fn island_overhead(manifest: &Manifest, span: StageSpan, devices: usize) -> Bytes {
    let further = devices.saturating_sub(1) as u64;
    let groups = PassGroups::of(manifest, devices);
    let stage_bytes = |stage| {
        let weights = parameter_count(manifest, stage) as u64;
        let carried = carried_elements(manifest, stage) as u64;
        if manifest.model.slices == 1 {
            let inner = inner_bytes(manifest, stage) + (4 + 4) * carried;
            return Bytes(further * (4 * weights + inner));
        }
        let further_groups = groups.count - 1;
        let gradient = 4 * (groups.held(weights, sliced(manifest, stage)) - weights);
        let inner = manifest.of_worker().map_or(0, |of_worker| {
            let copies = further_copies(&of_worker, stage, PassGroups { count: 1, ..groups });
            // Each group has the run's state too.
            let state = 4 * manifest.steps_at_once() * weights + optimizer_bytes(manifest, stage);
            let of_group = inner_bytes(manifest, stage) + state;
            further_groups * of_group + groups.count * copies + further * 4 * (weights + carried)
        });
        let sums = 8 * manifest.steps_at_once() * further_groups * (weights + carried);
        let frozen = frozen_of_groups(manifest, stage, groups)
            - frozen_of_groups(manifest, stage, PassGroups { count: 1, each: 1 });
        let copies = manifest.steps_at_once() * further_copies(manifest, stage, groups);
        Bytes(gradient + sums + frozen + inner + copies)
    };
    if further == 0 { Bytes(0) } else { span.stages().map(stage_bytes).sum() }
}

/// Bytes of the weights of one version that several workers who share slices have beyond those of one.
fn further_copies(manifest: &Manifest, stage: Stage, groups: PassGroups) -> u64 {
    let weights = parameter_count(manifest, stage) as u64;
    let held = groups.held(weights, sliced(manifest, stage));
    match manifest.training.dtype {
        Dtype::F32 => 4 * held,
        // The workers of a group divide the embedding too.
        Dtype::Bf16 => {
            let wide = 4 * groups.count * embedding(manifest, stage);
            narrow_bytes(manifest) * (held - weights) + wide
        }
    }
}

/// Trained weights of which each worker has a part, where several compute passes together.
fn sliced(manifest: &Manifest, stage: Stage) -> u64 {
    sliced_of(manifest, &parameters(manifest, stage))
}

fn sliced_of(manifest: &Manifest, all: &[Parameter]) -> u64 {
    let is_together = manifest.model.slices > 1;
    let parts = all.iter().filter(|one| is_together && one.part_of_slice() != WeightPart::Whole);
    parts.map(|one| one.len() as u64).sum()
}

/// Weights of a trained embedding.
fn embedding(manifest: &Manifest, stage: Stage) -> u64 {
    let is_there = stage == Stage(0) && manifest.lora.is_none();
    let model = &manifest.model;
    if is_there { u64::from(model.vocabulary) * u64::from(model.hidden) } else { 0 }
}

/// The memory of a peer that swaps its stages ([`crate::LowerTier`]): of one device, or of several that compute slices of
/// each pass together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwappingFloor {
    /// What is always in memory: 8 bytes for every weight if the all-reduce is lossy; of the largest stage one
    /// microbatch's gradient, its graph with the ends that each device has, and a copy of weights and of the optimizer's
    /// state for a checkpoint; and the inputs of all microbatches in flight.
    pub resident: Bytes,
    /// The least for the rest: what an update of the largest stage touches, which is 8 bytes a weight
    /// (10 with a bf16 copy, and 4 or 6 more for each earlier version that steps read) and what the optimizer
    /// keeps; or its frozen weights; or its sums and their mean, 12 bytes a weight. Each of several devices has a copy of
    /// the weights of its slices as well, and of those that are not sliced.
    pub swapped: Bytes,
}

/// The minimum memory of a peer of so many devices that swaps these stages, without libtorch itself.
#[must_use]
pub fn swapping_floor(
    manifest: &Manifest,
    stages: &[Stage],
    in_flight: u32,
    devices: usize,
) -> SwappingFloor {
    let input = manifest.boundary_bytes(manifest.codec.activations).0;
    let all: u64 = stages.iter().map(|stage| parameter_count(manifest, *stage) as u64).sum();
    let inputs = stages.len() as u64 * u64::from(in_flight) * manifest.steps_at_once() * input;
    let subspace = stages.len() as u64 * basis_bytes(manifest) + initial_bytes(manifest);
    let each = devices as u64;
    let passing = |stage| {
        let weights = parameter_count(manifest, stage) as u64;
        let gradients = weights + (each - 1) * (weights - sliced(manifest, stage));
        let copy = 4 * manifest.steps_at_once() * weights + optimizer_bytes(manifest, stage);
        let unpacked = each * unpacked_bytes(manifest, stage);
        4 * gradients + copy + graphs_bytes(manifest, stage, each) + unpacked
    };
    let passing = stages.iter().copied().map(passing).max().unwrap_or(0);
    let shares = match devices {
        1 => vec![Share::WHOLE],
        _ => Share::all_together(Seat::all(devices)).collect(),
    };
    let of_share = |share| swapped_share(manifest, stages, share);
    // A single device's are part of its share.
    let means = if devices == 1 { Bytes(0) } else { swapped_means(manifest, stages) };
    let swapped = shares.iter().map(of_share).sum::<Bytes>() + means;
    let resident = all * kept_errors(manifest) + passing + inputs + each * subspace;
    SwappingFloor { resident: Bytes(resident), swapped }
}

/// The least memory for the tensors that a device with this share has of these stages: what an update, a pass or the
/// reading of sums touches of the largest.
pub(crate) fn swapped_share(manifest: &Manifest, stages: &[Stage], share: &Share) -> Bytes {
    let of_stage = |stage: &Stage| {
        let parameters = parameters(manifest, *stage);
        let own = OwnSlices::new(&manifest.model, share.seat());
        let updated = &parameters[share.of(&parameters)];
        let (kept, all) = (range_of(updated).len(), range_of(&parameters).len());
        let (copies, sums) = match share.is_whole() {
            true => (narrow_bytes(manifest) * all as u64, all),
            false => {
                let held = Held::of_passes(&parameters, &own).len();
                let copies = manifest.training.dtype.size() * held;
                let embedding = 4 * embedding_rows(manifest, *stage, &own);
                (copies as u64 + embedding, Held::of_gradients(&parameters, &own).len())
            }
        };
        let weights = manifest.steps_at_once() * (4 * kept as u64 + copies);
        let slots = layout(&manifest.optimizer.rule, updated);
        let slots: usize = slots.iter().map(SlotLayout::len).sum();
        let frozen = frozen_share(manifest, *stage, &own);
        // Means belong to no device, unless there is one.
        let mean = if share.is_whole() { 4 * all as u64 } else { 0 };
        let update = weights + 4 * slots as u64 + mean;
        let pass = weights + frozen;
        update.max(pass).max(8 * sums as u64 + mean)
    };
    Bytes(stages.iter().map(of_stage).max().unwrap_or(0))
}

/// Weights of the embedding's rows that a device with these slices has in f32 beside copies in bf16.
fn embedding_rows(manifest: &Manifest, stage: Stage, own: &OwnSlices) -> u64 {
    let is_wide = manifest.training.dtype == Dtype::F32;
    if is_wide || embedding(manifest, stage) == 0 {
        return 0;
    }
    let rows = own.rows(manifest.model.vocabulary as usize).len() as u64;
    rows * u64::from(manifest.model.hidden)
}

/// The least memory for the mean gradients of these stages.
pub(crate) fn swapped_means(manifest: &Manifest, stages: &[Stage]) -> Bytes {
    let largest = stages.iter().map(|stage| parameter_count(manifest, *stage) as u64).max();
    Bytes(4 * largest.unwrap_or(0))
}

/// Bytes on the disk of a stage that so many devices swap: everything but gradients and graphs.
#[must_use]
pub fn swapped_bytes(manifest: &Manifest, stage: Stage, devices: usize) -> Bytes {
    let (weights, versions) = (parameter_count(manifest, stage) as u64, manifest.steps_at_once());
    let held = weights * (versions * (4 + narrow_bytes(manifest) + 8) + 4);
    let group = PassGroups { count: 1, each: devices as u64 };
    // A single device reads what it updates.
    let copies = if devices == 1 { 0 } else { versions * further_copies(manifest, stage, group) };
    let frozen = frozen_of_groups(manifest, stage, group);
    Bytes(held + optimizer_bytes(manifest, stage) + copies + frozen)
}

/// The memory of a device that has the weights of stages only while their passes read them ([`crate::Tiers`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceFloor {
    /// One pass of any stage: its graph, the weight gradient, and what a subspace takes.
    pub passes: Bytes,
    /// The weights of any stage, in the dtype of passes and of each version that steps read. With twice as much the
    /// next stage's come while one is computed.
    pub weights: Bytes,
}

impl DeviceFloor {
    /// The stages, whichever, whose weights this memory has room for at once.
    #[must_use]
    pub fn stages_in(&self, memory: Bytes) -> usize {
        let left = memory.0.saturating_sub(self.passes.0);
        usize::try_from(left / self.weights.0.max(1)).unwrap_or(usize::MAX)
    }
}

/// The memory of each of so many devices, which compute slices of each pass together or are one, that has the weights
/// of a run's stages only while their passes read them.
#[must_use]
pub fn device_floor(manifest: &Manifest, devices: usize) -> DeviceFloor {
    let (size, devices) = (manifest.training.dtype.size() as u64, devices as u64);
    // What one device has of the slices, and all that is not sliced.
    let part = |all: u64, sliced: u64| all - sliced + sliced.div_ceil(devices);
    let count = |stage| part(parameter_count(manifest, stage) as u64, sliced(manifest, stage));
    let largest = |of: &dyn Fn(Stage) -> u64| manifest.stages().map(of).max().unwrap_or(0);
    let subspace = basis_bytes(manifest) + initial_bytes(manifest);
    let weights = |stage| {
        let is_narrow = manifest.training.dtype == Dtype::Bf16;
        let rows = embedding(manifest, stage).div_ceil(devices);
        let embedding = if is_narrow { 4 * rows } else { 0 };
        let trained = manifest.steps_at_once() * (size * count(stage) + embedding);
        let (count, sliced, packed) = frozen_parts(manifest, stage);
        trained + size * part(count, sliced) + packed
    };
    let graph = |stage| graphs_bytes(manifest, stage, devices).div_ceil(devices);
    let passes = |stage| 4 * count(stage) + graph(stage) + unpacked_bytes(manifest, stage);
    DeviceFloor { passes: Bytes(largest(&passes) + subspace), weights: Bytes(largest(&weights)) }
}

/// Bytes of what the optimizer keeps beside the weights of a stage.
fn optimizer_bytes(manifest: &Manifest, stage: Stage) -> u64 {
    4 * optimizer_elements(manifest, stage) as u64
}

/// Bytes of what a virtual worker has for itself.
fn inner_bytes(manifest: &Manifest, stage: Stage) -> u64 {
    let Some(of_worker) = manifest.of_worker() else { return 0 };
    let weights = parameter_count(manifest, stage) as u64;
    // A worker whose passes are exchanges has its mean gradient for a while.
    let mean = if manifest.workers_exchange() { 4 } else { 0 };
    let each = weights * (4 + 8 + 4 + mean + narrow_bytes(manifest));
    (each + optimizer_bytes(&of_worker, stage)) * workers_at_once(manifest)
}

/// Virtual workers that a stage may be training at the same time on one device: one of each step, if their passes are
/// exchanges.
fn workers_at_once(manifest: &Manifest) -> u64 {
    if manifest.workers_exchange() { manifest.steps_at_once() } else { 1 }
}

/// Bytes of a weight's copy in the dtype of passes.
fn narrow_bytes(manifest: &Manifest) -> u64 {
    if manifest.training.dtype == Dtype::Bf16 { 2 } else { 0 }
}

/// Bytes for each weight of the errors of this round and of earlier ones.
fn kept_errors(manifest: &Manifest) -> u64 {
    if manifest.codec.all_reduce.loses() { 8 } else { 0 }
}

/// Width of the subspace, 0 if there is none.
fn subspace_width(manifest: &Manifest) -> u64 {
    manifest.model.subspace().map_or(0, u64::from)
}

/// Bytes of a stage's copies of the subspace's basis.
fn basis_bytes(manifest: &Manifest) -> u64 {
    4 * 4 * u64::from(manifest.model.hidden) * subspace_width(manifest)
}

/// Bytes of the initial embedding's rows that a pass reads.
fn initial_bytes(manifest: &Manifest) -> u64 {
    let rows = manifest.model.subspace().map_or(0, |_| manifest.tokens_per_microbatch());
    4 * u64::from(manifest.model.hidden) * rows
}

/// The tensors that one microbatch's backward pass reads on so many devices, which divide the graph of the layers. Each of
/// several has the ends of the stage: its input and output, what compresses and expands these, and before the head the
/// normalised stream and its gradient. Together they have the stream once more, each the tokens that it took.
pub(crate) fn graphs_bytes(manifest: &Manifest, stage: Stage, devices: u64) -> u64 {
    if devices == 1 {
        return graph_bytes(manifest, stage);
    }
    let stream = 4 * manifest.tokens_per_microbatch() * u64::from(manifest.model.hidden);
    let streams = if stage == manifest.last_stage() { 4 } else { 2 };
    let each = streams * stream + boundary_bytes(manifest, stage);
    graph_bytes(manifest, stage) + devices * each + stream
}

/// The tensors that one microbatch's backward pass reads.
pub(crate) fn graph_bytes(manifest: &Manifest, stage: Stage) -> u64 {
    let model = &manifest.model;
    let size = manifest.training.dtype.size() as u64;
    let (queries, keys) = (u64::from(model.query_width()), u64::from(model.key_width()));
    let hidden = u64::from(model.hidden);
    let attention = 5 * hidden + 2 * queries + 2 * keys + 2 * latent_width(model);
    let wide = 4 * (u64::from(model.heads) + 2);
    let of_layer = |layer| {
        size * (attention + 3 * inner_width(model, layer)) + wide + routed_bytes(model, layer, size)
    };
    let layers: u64 = manifest.layers_of(stage).map(of_layer).sum();
    manifest.tokens_per_microbatch() * (layers + angles_bytes(manifest))
        + boundary_bytes(manifest, stage)
}

/// Bytes for each token of the angles by which heads are rotated, where documents decide them.
pub(crate) fn angles_bytes(manifest: &Manifest) -> u64 {
    let model = &manifest.model;
    4 * model.rotaries().iter().map(|rotary| u64::from(rotary.dimensions)).sum::<u64>()
}

/// The part of these tensors that compressed activations add.
pub(crate) fn boundary_bytes(manifest: &Manifest, stage: Stage) -> u64 {
    let (model, tokens) = (&manifest.model, manifest.tokens_per_microbatch());
    let (hidden, width) = (u64::from(model.hidden), u64::from(model.boundary_width()));
    let compressed = boundary::after(manifest, stage).map_or(0, |_| 2 * hidden + width);
    let expanded = boundary::before(manifest, stage).map_or(0, |_| width);
    let has_input = u64::from(stage > Stage(0));
    let has_output = u64::from(stage < manifest.last_stage());
    let coordinates = (has_input + has_output) * subspace_width(manifest);
    let size = manifest.training.dtype.size() as u64;
    4 * tokens * coordinates + size * tokens * (compressed + expanded)
}

#[cfg(test)]
mod tests {
    use shoal_protocol::manifest::{Boundary, BoundaryKind};

    use super::*;
    use crate::testing::manifest;

    #[test]
    fn it_counts_weights_once_and_graphs_as_often_as_they_are_kept() {
        let mut manifest = manifest();
        let span = StageSpan::one(Stage(0));
        let weights = Bytes(28 * parameter_count(&manifest, Stage(0)) as u64);
        assert_eq!(memory_floor(&manifest, span, 0), weights);
        // Two layers, eight tokens, 4 bytes: 7 · 8 + 2 · 4 + 3 · 12 numbers, 4 beside them, and 4 for a stage.
        let graph = 8 * 4 * (2 * 104 + 4);
        assert_eq!(memory_floor(&manifest, span, 3) - weights, Bytes(3 * graph));
        manifest.training.recompute = true;
        let kept = Bytes(graph + 3 * 8 * 8 * 4);
        assert_eq!(memory_floor(&manifest, span, 3) - weights, kept);
        manifest.training.staleness = 1;
        let weights = Bytes(40 * parameter_count(&manifest, Stage(0)) as u64);
        assert_eq!(memory_floor(&manifest, span, 0), weights + Bytes(graph));
    }

    #[test]
    fn further_workers_add_gradients() {
        let mut manifest = manifest();
        let span = StageSpan::one(Stage(0));
        let weights = parameter_count(&manifest, Stage(0)) as u64;
        assert_eq!(island_overhead(&manifest, span, 1), Bytes(0));
        assert_eq!(island_overhead(&manifest, span, 4), Bytes(weights * 3 * 4));
        manifest.training.staleness = 1;
        assert_eq!(island_overhead(&manifest, span, 2), Bytes(weights * 4));
    }

    #[test]
    fn passes_at_the_same_time_have_a_graph_each() {
        let mut manifest = manifest();
        let span = StageSpan::one(Stage(0));
        let of = |manifest: &Manifest, devices| pass_overhead(manifest, span, 4, devices);
        assert_eq!(of(&manifest, 4), Bytes(0), "those of all microbatches in flight are counted");
        manifest.training.recompute = true;
        let graph = graph_bytes(&manifest, Stage(0));
        assert_eq!([1, 4].map(|devices| of(&manifest, devices)), [Bytes(0), Bytes(3 * graph)]);
        manifest.model.slices = 2;
        let of_group = graphs_bytes(&manifest, Stage(0), 2);
        assert_eq!(of(&manifest, 2), Bytes(of_group - graph));
        assert_eq!(of(&manifest, 4), Bytes(of_group - graph + of_group));
    }

    #[test]
    fn a_narrow_boundary_keeps_less_of_what_is_recomputed() {
        let floor = |boundary| {
            let mut manifest = manifest();
            manifest.training.stages = 2;
            manifest.training.recompute = true;
            manifest.model.boundary = boundary;
            manifest.check().expect("valid");
            let each = |stage| {
                let span = StageSpan::one(Stage(stage));
                memory_floor(&manifest, span, 5) - memory_floor(&manifest, span, 4)
            };
            (each(0), each(1))
        };
        let tokens = 2 * 4 * 4;
        let (wide, narrow) = (Bytes(tokens * 8), Bytes(tokens * 2));
        assert_eq!(floor(None), (wide, wide));
        for kind in [BoundaryKind::Maxout, BoundaryKind::Subspace] {
            assert_eq!(floor(Some(Boundary { kind, width: 2 })), (narrow, narrow));
        }
    }
}
