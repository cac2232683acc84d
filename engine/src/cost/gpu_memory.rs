//! What a GPU needs beyond the memory of [`crate::memory_floor`].
//!
//! Where there are kernels of this crate ([`crate::DeviceChoice::lacks_kernels`]), norms, rotations and gates leave what they
//! leave on a processor. Otherwise several of libtorch's compute them, each of which leaves a tensor.

use shoal_protocol::ids::{Stage, StageSpan};
use shoal_protocol::manifest::{Activation, Dtype, Manifest, Norm};
use shoal_protocol::units::Bytes;

use crate::cost::memory::{angles_bytes, boundary_bytes, graph_bytes, graphs_at_once};
use crate::model::layer_table::{inner_width, largest_product, latent_width, routed_bytes};
use crate::model::loss::chunk_rows;
use crate::model::parameters::{Parameter, parameters};

/// Bytes per element that libtorch's addition of a gradient to the sums takes for a while: three numbers of f64.
const ADDITION: u64 = 24;

/// Bytes for each inner value and token of the feed-forward block's gradients by libtorch: three in f32, and both products'
/// own. A kernel leaves that of the product, of both and what it reads.
const BACKWARD: u64 = 16;

/// The memory of a GPU beyond [`memory_floor`](crate::memory_floor), with this number of microbatches in flight: the rest of
/// their graphs, and the largest of the tensors that live for one operation.
///
/// The formula is of the tensors that libtorch keeps; fragments between them and CUDA itself are not counted.
#[must_use]
pub fn gpu_overhead(
    manifest: &Manifest,
    span: StageSpan,
    in_flight: u32,
    has_kernels: bool,
) -> Bytes {
    let recomputes = manifest.training.recompute || manifest.inner.is_some();
    let in_flight = graphs_at_once(manifest, in_flight);
    let kept = if recomputes { in_flight.min(1) } else { in_flight };
    let graphs: u64 =
        span.stages().map(|stage| kept * further_graph(manifest, stage, has_kernels)).sum();
    let brief = span.stages().map(|stage| brief_bytes(manifest, stage, has_kernels)).max();
    Bytes(graphs + brief.unwrap_or(0))
}

/// What a graph on a GPU has beyond one on a processor.
fn further_graph(manifest: &Manifest, stage: Stage, has_kernels: bool) -> u64 {
    let on_processor = graph_bytes(manifest, stage) - boundary_bytes(manifest, stage);
    layers_bytes(manifest, stage, has_kernels).saturating_sub(on_processor)
}

/// The tensors that one microbatch's backward pass reads on a GPU. For each layer and token these are: of each norm its
/// input and its result, and of libtorch's the input in f32 and its quotient by the root; what attention read and gave,
/// with the sums of its exponentials in f32, and of libtorch's rotation the products of queries, keys and values and the
/// rotated ones; of the feed-forward block both products and what is made of them, and of libtorch's what the activation
/// reads and writes in f32. In f32 keys and values of groups are repeated for each head, and attention's results are joined.
fn layers_bytes(manifest: &Manifest, stage: Stage, has_kernels: bool) -> u64 {
    let model = &manifest.model;
    let size = manifest.training.dtype.size() as u64;
    let (queries, keys) = (u64::from(model.query_width()), u64::from(model.key_width()));
    let hidden = u64::from(model.hidden);
    let has_norms = has_kernels && model.block.norm != Norm::Layer;
    let norms = if has_norms { 2 * (2 * size * hidden + 4) } else { 2 * (8 + size) * hidden };
    // Flash attention takes groups as they are, and documents together. Otherwise what documents gave is joined.
    let lacks_flash = manifest.training.dtype == Dtype::F32;
    let repeated = match (lacks_flash, queries == keys) {
        (false, _) => 0,
        (true, true) => queries,
        (true, false) => 3 * queries,
    };
    let rotated = if has_kernels { 2 * (queries + keys) } else { 3 * (queries + keys) };
    let latent = 2 * latent_width(model);
    let attention = size * (rotated + repeated + latent) + 4 * u64::from(model.heads);
    let has_gates = has_kernels && model.block.activation == Activation::Silu;
    let activated = match (has_gates, manifest.training.dtype) {
        (true, _) => 0,
        (false, Dtype::F32) => 4,
        (false, Dtype::Bf16) => 8,
    };
    let of_layer = |layer| {
        let inner = (3 * size + activated) * inner_width(model, layer);
        norms + attention + inner + routed_bytes(model, layer, size)
    };
    let layers: u64 = manifest.layers_of(stage).map(of_layer).sum();
    // The rows of the embedding in f32, and the last norm with the gradient of its result.
    let first = if stage == Stage(0) { (4 + size) * hidden } else { 0 };
    let last = if stage == manifest.last_stage() { (12 + size) * hidden } else { 0 };
    manifest.tokens_per_microbatch() * (layers + angles_bytes(manifest) + first + last)
}

/// The most that tensors of one operation take: of the addition of the largest gradient, of the backward pass of a
/// feed-forward block, or of the loss.
fn brief_bytes(manifest: &Manifest, stage: Stage, has_kernels: bool) -> u64 {
    let model = &manifest.model;
    let hidden = u64::from(model.hidden);
    let layers = || manifest.layers_of(stage);
    let inner = layers().map(|layer| inner_width(model, layer)).max().unwrap_or(0);
    // Matrices with the same input have one gradient.
    let mixed = (u64::from(model.query_width()) + 2 * u64::from(model.key_width())) * hidden;
    let matrices = parameters(manifest, stage).iter().map(Parameter::len).max().unwrap_or(0);
    let largest = match manifest.lora {
        Some(_) => matrices as u64,
        None => {
            let products = layers().map(|layer| largest_product(model, layer)).max();
            (matrices as u64).max(mixed).max(products.unwrap_or(0))
        }
    };
    let size = manifest.training.dtype.size() as u64;
    let (addition, of_inner) = if has_kernels { (0, 4 * size) } else { (ADDITION, BACKWARD) };
    let backward = manifest.tokens_per_microbatch() * (of_inner * inner + 8 * hidden);
    let loss = if stage == manifest.last_stage() { loss_bytes(manifest, has_kernels) } else { 0 };
    (addition * largest).max(backward).max(loss)
}

/// A chunk of logits, and in f32 itself, its exponentials and its gradient; with the sum of the head's gradients.
fn loss_bytes(manifest: &Manifest, has_kernels: bool) -> u64 {
    let (vocabulary, size) = (u64::from(manifest.model.vocabulary), manifest.training.dtype.size());
    let rows = manifest.tokens_per_microbatch() as usize;
    let rows = chunk_rows(rows, vocabulary as usize * size) as u64;
    if has_kernels {
        // The gradient takes the place of the logits.
        return rows * vocabulary * size as u64;
    }
    let wide = if manifest.training.dtype == Dtype::F32 { 2 } else { 3 };
    rows * vocabulary * (size as u64 + 4 * wide)
}
