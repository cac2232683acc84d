//! A small run for the tests of this crate.

use shoal_protocol::ids::{ClaimKey, ContentHash, Microbatch, Stage, Step};
use shoal_protocol::manifest::{
    Checkpoint, Codecs, Dtype, Evaluation, Manifest, Model, Optimizer, TokenWidth, Tokenizer,
    Tokens, Training,
};

pub(crate) fn manifest() -> Manifest {
    Manifest {
        model: Model {
            vocabulary: 256,
            hidden: 8,
            layers: 2,
            heads: 2,
            key_value_heads: 1,
            intermediate: 12,
            context: 4,
            rope_theta: 10_000.0,
            norm_epsilon: 1e-5,
            initializer_range: 0.02,
            boundary: None,
        },
        training: Training {
            seed: 7,
            steps: 6,
            stages: 1,
            microbatches: 6,
            microbatch_size: 2,
            dtype: Dtype::F32,
            recompute: false,
            gradient_fraction_bits: 44,
            staleness: 0,
        },
        codec: Codecs::default(),
        optimizer: Optimizer {
            learning_rate: 3e-3,
            final_learning_rate: 3e-4,
            warmup_steps: 2,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            gradient_clip: 1.0,
        },
        evaluation: Evaluation { held_out: 0.1, every: 5, microbatches: 2 },
        checkpoint: Checkpoint { every: 0, keep: 2 },
        tokens: Tokens {
            hash: ContentHash([0; 32]),
            count: 1000,
            width: TokenWidth::U8,
            tokenizer: Tokenizer::Bytes,
        },
    }
}

pub(crate) fn key(microbatch: u32) -> ClaimKey {
    ClaimKey { step: Step(0), stage: Stage(0), microbatch: Microbatch(microbatch) }
}
