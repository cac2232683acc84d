//! A small run for the tests of this crate.

use shoal_protocol::ids::{ClaimKey, Microbatch, Stage, Step};
use shoal_protocol::manifest::{Manifest, Model, Optimizer, Schedule, Training, example};

pub(crate) fn manifest() -> Manifest {
    let small = example::small();
    Manifest {
        model: Model {
            hidden: 8,
            layers: 2,
            heads: 2,
            key_value_heads: 1,
            intermediate: 12,
            context: 4,
            ..small.model
        },
        training: Training { seed: 7, steps: 6, stages: 1, microbatches: 6, ..small.training },
        optimizer: Optimizer {
            learning_rate: 3e-3,
            schedule: Schedule::Cosine { final_learning_rate: 3e-4 },
            ..small.optimizer
        },
        ..small
    }
}

pub(crate) fn key(microbatch: u32) -> ClaimKey {
    ClaimKey { step: Step(0), stage: Stage(0), microbatch: Microbatch(microbatch) }
}
