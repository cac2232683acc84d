//! What `shoal plan --for` knows of a run: the work, the bytes and the memory of a step of its whole model.

use shoal_engine::{memory_floor, parameter_count, pass_flops};
use shoal_lab::plan_work::RunWork;
use shoal_protocol::ids::{Stage, StageSpan};
use shoal_protocol::manifest::Manifest;

/// The work of the run of a manifest.
pub(super) fn run_work(manifest: &Manifest) -> RunWork {
    let mut whole = manifest.clone();
    whole.training.stages = 1;
    let training = &whole.training;
    let microbatch = u64::from(training.microbatch_size) * u64::from(whole.model.context);
    let microbatches = u64::from(training.microbatches);
    let flops = pass_flops(&whole, Stage(0));
    let span = StageSpan::one(Stage(0));
    let floor = |in_flight| memory_floor(&whole, span, in_flight).0 as f64;
    let boundary = manifest.boundary_bytes(manifest.codec.activations).0;
    RunWork {
        tokens: microbatches * microbatch,
        sequence: u64::from(whole.model.context),
        forward: flops.forward / microbatch as f64,
        backward: flops.backward / microbatch as f64,
        activations: (boundary * microbatches) as f64,
        gradient: 4.0 * parameter_count(&whole, Stage(0)) as f64,
        state: floor(0),
        kept: (floor(2) - floor(1)) / microbatch as f64,
        layers: whole.model.layers as usize,
        staleness: training.staleness,
        is_adapted: whole.lora.is_some(),
    }
}
