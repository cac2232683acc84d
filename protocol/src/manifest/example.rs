//! An example manifest for tests, the simulator and fuzzing.

use super::{
    Adam, Admission, Audit, Block, Checkpoint, Codecs, Data, Dtype, Evaluation, Loss, Manifest,
    MixedSource, Mixture, Model, Optimizer, Phase, Prepared, Rule, Schedule, TokenWidth, Tokenizer,
    Tokens, Training, Weight,
};
use crate::ids::{ContentHash, Step};

/// A small run. Its token file does not exist.
#[must_use]
pub fn small() -> Manifest {
    Manifest {
        model: Model {
            vocabulary: 256,
            hidden: 32,
            layers: 5,
            heads: 4,
            key_value_heads: 2,
            intermediate: 64,
            slices: 1,
            context: 16,
            rope_theta: 10_000.0,
            norm_epsilon: 1e-5,
            initializer_range: 0.02,
            boundary: None,
            block: Block::default(),
            base: None,
        },
        training: Training {
            seed: 1,
            steps: 10,
            stages: 2,
            microbatches: 8,
            microbatch_size: 2,
            dtype: Dtype::F32,
            recompute: false,
            gradient_fraction_bits: 44,
            staleness: 0,
            loss: Loss::CrossEntropy,
        },
        codec: Codecs::default(),
        optimizer: Optimizer {
            learning_rate: 1e-3,
            schedule: Schedule::Cosine { final_learning_rate: 1e-4 },
            warmup_steps: 2,
            weight_decay: 0.1,
            gradient_clip: 1.0,
            rule: Rule::Adamw(Adam { beta2: 0.95, ..Adam::DEFAULT }),
        },
        evaluation: Evaluation { held_out: 0.1, every: 5, microbatches: 2 },
        checkpoint: Checkpoint { every: 0, interval: 0, keep: 2 },
        data: Data::Text(tokens()),
        admission: Admission::default(),
        lora: None,
        start: None,
        inner: None,
        audit: Audit::NONE,
        guard: None,
    }
}

/// Two prepared data sets that do not exist, mixed in another way from step 6 on.
#[must_use]
pub fn mixture() -> Mixture {
    let source = |(name, number, weight): (&str, u8, u64)| MixedSource {
        name: name.to_owned(),
        data: Prepared {
            index: ContentHash([number; 32]),
            bytes: 900,
            rows: 1000,
            held_out_rows: 20,
            context: 16,
            vocabulary: 256,
            pairs: None,
        },
        weight: Weight(weight),
    };
    Mixture {
        sources: [("web", 1, 700_000), ("code", 2, 300_000)].map(source).to_vec(),
        phases: vec![Phase { from: Step(6), weights: vec![Weight(1), Weight(3)] }],
    }
}

/// A token file that does not exist.
#[must_use]
pub fn tokens() -> Tokens {
    Tokens {
        hash: ContentHash([0; 32]),
        count: 1000,
        width: TokenWidth::U8,
        tokenizer: Tokenizer::Bytes,
    }
}
