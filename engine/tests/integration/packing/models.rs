//! Random tiny models of a family: sizes, windows and rotary embeddings as its `config.json` can have them.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::{Value, json};
use shoal_engine::family;
use shoal_protocol::ids::ContentHash;
use shoal_protocol::manifest::{Model, RotaryScaling};

/// Tokens that the models know: all bytes.
pub(super) const VOCABULARY: u32 = 256;

/// Number of kinds of positions that [`kinds`] tells apart.
pub(super) const KINDS: usize = 9;

const LAYERS: usize = 3;

/// Random numbers that follow from a family and a seed.
pub(super) struct Dice(ChaCha8Rng);

impl Dice {
    pub(super) fn new(family: &str, seed: u64) -> Self {
        let hash = ContentHash::of(format!("{family} {seed}").as_bytes());
        Self(ChaCha8Rng::from_seed(hash.0))
    }

    /// A number below `end`.
    pub(super) fn below(&mut self, end: u32) -> u32 {
        self.0.next_u32() % end
    }

    /// One of some values.
    pub(super) fn from<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len() as u32) as usize]
    }
}

/// A model of the family. Seeds take its rotary embeddings in turn, of those that the family has.
pub(super) fn draw(family: &str, seed: u64, positions: usize, dice: &mut Dice) -> Model {
    let heads = dice.from(&[[4, 4], [4, 2], [8, 2]]);
    let sliding = dice.from(&["sliding_attention", "full_attention"]);
    let mut config = json!({
        "model_type": family, "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": LAYERS, "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "max_position_embeddings": positions, "n_embd": 32, "n_layer": LAYERS, "n_head": heads[0],
        "n_positions": positions, "initializer_range": 0.3,
        "sliding_window": dice.from(&[1, 2, 3, 5, 9]), "use_sliding_window": true, "max_window_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", sliding],
        "no_rope_layers": [1, 0, dice.from(&[0, 1])],
        "use_parallel_residual": dice.from(&[true, false]),
        "query_pre_attn_scalar": dice.from(&[8, 13]),
        "tie_word_embeddings": dice.from(&[true, false]),
        "rotary_pct": dice.from(&[0.5, 1.0]),
        "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    });
    // After the others, whose numbers stay.
    config["num_experts_per_tok"] = dice.from(&[1, 2, 4]).into();
    config["mlp_only_layers"] = json!([dice.below(4)]);
    config["norm_topk_prob"] = dice.from(&[true, false]).into();
    if !["gpt_neox", "gpt2"].contains(&family) {
        config["head_dim"] = dice.from(&[8, 12]).into();
    }
    if family == "olmoe" {
        // Windows of it are refused.
        config["sliding_window"] = Value::Null;
    }
    let is_latent = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"].contains(&family);
    if is_latent || family == "glm4_moe" {
        let grouped = json!({
            "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": dice.from(&[1, 2]),
            "num_experts_per_tok": dice.from(&[1, 2]), "use_qk_norm": dice.from(&[true, false]),
        });
        config.as_object_mut().expect("keys").extend(grouped.as_object().expect("keys").clone());
    }
    if is_latent {
        let latent = json!({
            "num_key_value_heads": heads[0], "norm_topk_prob": false, "rope_interleave": dice.from(&[true, false]),
            "kv_lora_rank": 12, "q_lora_rank": dice.from(&[None, Some(14)]), "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": dice.from(&[10, 14]),
        });
        config.as_object_mut().expect("keys").extend(latent.as_object().expect("keys").clone());
    }
    let mut ropes = ropes(positions);
    let count = ropes.len();
    ropes.rotate_left((seed as usize + family.len()) % count);
    let described = ropes.into_iter().find_map(|rope| {
        config["rope_parameters"] = rope;
        family::describe(&config).ok()
    });
    described.unwrap_or_else(|| panic!("{family}: no rotary embedding fits {config}")).model
}

/// Ways to write rotary embeddings. Each family has some of them. The wavelengths of a document would differ from those of
/// its row where the length of a text decides them, so rows have no more than the original positions.
fn ropes(positions: usize) -> Vec<Value> {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16, "rope_theta": 500.0,
    });
    let nested = json!({
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
    });
    vec![
        nested,
        json!({"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0}),
        llama3,
        json!({"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5}),
        json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20, "rope_theta": 300.0,
        }),
        json!({
            "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [9.0, 9.0, 9.0, 9.0],
            "original_max_position_embeddings": positions, "attention_factor": 1.2,
        }),
        Value::Null,
    ]
}

/// What the model's layers know of positions.
pub(super) fn kinds(model: &Model) -> Vec<&'static str> {
    let mut kinds = Vec::new();
    if model.block.learned_positions.is_some() {
        kinds.push("trained positions");
    }
    for layer in (0..model.layers).map(|layer| model.layer_attention(layer)) {
        kinds.push(if layer.window.is_some() { "window" } else { "no window" });
        let Some(rotary) = layer.rotary else { continue };
        let rotary = &model.rotaries()[usize::from(rotary)];
        kinds.push(match &rotary.scaling {
            RotaryScaling::None if rotary.dimensions < model.head_size() => "partial",
            RotaryScaling::None => "plain",
            RotaryScaling::Linear { .. } => "linear",
            RotaryScaling::Llama3 { .. } => "llama3",
            RotaryScaling::Yarn { .. } => "yarn",
            RotaryScaling::Longrope { .. } => "longrope",
            RotaryScaling::Dynamic { .. } => "dynamic",
        });
    }
    kinds
}
