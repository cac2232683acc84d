//! The keys of each family's `config.json`, as its class in `transformers` reads them: one table.
//!
//! A key that is in no row counts for nothing, as there. `scripts/family-keys.py` writes the fields of
//! the classes and their defaults into `transformers.json`, with which a test compares this table.

/// What a family does with a key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Rule {
    /// It counts; what it means where it is absent.
    Read(Absent),
    /// It changes nothing that a model computes.
    Ignored,
    /// A value that is on is refused, with what would do.
    Refused(&'static str),
}

/// The value of a key that is absent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Absent {
    /// None: such a file is refused.
    Missing,
    /// None, and it does without.
    Null,
    Number(u32),
    /// A number, but null has a meaning of its own.
    NumberOrNull(u32),
    Real(f64),
    Flag(bool),
    Text(&'static str),
}

/// The rows of a family: the first that has a key decides.
pub(super) type Keys = &'static [&'static [(&'static str, Rule)]];

/// The rule of a key, if it has a row.
pub(super) fn rule(keys: Keys, key: &str) -> Option<Rule> {
    keys.iter().copied().flatten().find(|(name, _)| *name == key).map(|(_, rule)| *rule)
}

const MISSING: Rule = Rule::Read(Absent::Missing);
const NULL: Rule = Rule::Read(Absent::Null);

const fn number(default: u32) -> Rule {
    Rule::Read(Absent::Number(default))
}

const fn number_or_null(default: u32) -> Rule {
    Rule::Read(Absent::NumberOrNull(default))
}

const fn real(default: f64) -> Rule {
    Rule::Read(Absent::Real(default))
}

const fn flag(default: bool) -> Rule {
    Rule::Read(Absent::Flag(default))
}

const fn text(default: &'static str) -> Rule {
    Rule::Read(Absent::Text(default))
}

type Rows = &'static [(&'static str, Rule)];

/// What every file has.
pub(super) const ANY: Keys = &[EVERY];

const EVERY: Rows = &[
    ("model_type", MISSING),
    ("vocab_size", MISSING),
    ("initializer_range", real(0.02)),
    ("tie_word_embeddings", flag(false)),
    (
        "quantization_config",
        Rule::Refused(
            "import the unquantised model, one that bitsandbytes has quantised to NF4 with double quantisation, or GPT-OSS in MXFP4",
        ),
    ),
    ("quantization", Rule::Refused("import the unquantised model")),
    ("per_layer_config", Rule::Refused("import a model whose layers are alike")),
    ("transformers_weights", Rule::Refused("name the file model.safetensors and take the key out")),
    ("layer_types", Rule::Ignored),
    ("use_cache", Rule::Ignored),
    ("pad_token_id", Rule::Ignored),
    ("bos_token_id", Rule::Ignored),
    ("eos_token_id", Rule::Ignored),
    // Dropout is not applied.
    ("attention_dropout", Rule::Ignored),
    ("hidden_dropout", Rule::Ignored),
    ("classifier_dropout", Rule::Ignored),
    ("resid_pdrop", Rule::Ignored),
    ("embd_pdrop", Rule::Ignored),
    ("attn_pdrop", Rule::Ignored),
];

/// Sizes, and what most families have.
const SIZES: Rows = &[
    ("hidden_size", MISSING),
    ("intermediate_size", MISSING),
    ("num_hidden_layers", MISSING),
    ("num_attention_heads", MISSING),
    ("num_key_value_heads", NULL),
    ("max_position_embeddings", MISSING),
    ("head_dim", NULL),
    ("hidden_act", text("silu")),
    ("rms_norm_eps", real(1e-6)),
];

const ROPE: Rows = &[
    ("rope_parameters", NULL),
    ("rope_scaling", NULL),
    ("rope_theta", real(10_000.0)),
    ("partial_rotary_factor", real(1.0)),
    ("original_max_position_embeddings", NULL),
];

const BIASED_ATTENTION: Rows = &[("attention_bias", flag(false))];

const QWEN: Rows = &[
    ("num_key_value_heads", number_or_null(32)),
    ("use_sliding_window", flag(false)),
    ("sliding_window", number_or_null(4096)),
    ("max_window_layers", number(28)),
    ("layer_types", NULL),
];

pub(super) const LLAMA: Keys = &[
    &[("mlp_bias", flag(false)), ("pretraining_tp", Rule::Ignored)],
    BIASED_ATTENTION,
    SIZES,
    ROPE,
    EVERY,
];

pub(super) const MISTRAL: Keys = &[
    &[
        ("num_key_value_heads", number(8)),
        ("sliding_window", number_or_null(4096)),
        // With it, `transformers` takes the class of Ministral.
        ("layer_types", NULL),
    ],
    SIZES,
    ROPE,
    EVERY,
];

pub(super) const QWEN2: Keys = &[QWEN, SIZES, ROPE, EVERY];

pub(super) const QWEN3: Keys =
    &[QWEN, &[("head_dim", number(128))], BIASED_ATTENTION, SIZES, ROPE, EVERY];

pub(super) const SMOLLM3: Keys = &[
    &[
        ("num_key_value_heads", number_or_null(4)),
        ("rope_theta", real(2_000_000.0)),
        ("tie_word_embeddings", flag(true)),
        ("use_sliding_window", flag(false)),
        ("sliding_window", NULL),
        ("layer_types", NULL),
        ("no_rope_layers", NULL),
        ("no_rope_layer_interval", number(4)),
        ("mlp_bias", flag(false)),
    ],
    BIASED_ATTENTION,
    SIZES,
    ROPE,
    EVERY,
];

pub(super) const PHI3: Keys = &[
    &[
        ("rms_norm_eps", real(1e-5)),
        ("sliding_window", NULL),
        ("original_max_position_embeddings", number(4096)),
    ],
    SIZES,
    ROPE,
    EVERY,
];

pub(super) const OLMO2: Keys =
    &[&[("rms_norm_eps", real(1e-5))], BIASED_ATTENTION, SIZES, ROPE, EVERY];

pub(super) const GEMMA3: Keys = &[
    &[
        ("num_key_value_heads", number(4)),
        ("head_dim", number(256)),
        ("hidden_act", Rule::Ignored),
        ("hidden_activation", text("gelu_pytorch_tanh")),
        ("tie_word_embeddings", flag(true)),
        ("query_pre_attn_scalar", number(256)),
        ("sliding_window", number_or_null(4096)),
        ("sliding_window_pattern", number(6)),
        ("layer_types", NULL),
        ("rope_theta", real(1_000_000.0)),
        ("rope_local_base_freq", real(10_000.0)),
        // Not for rotary embeddings by kind of layer.
        ("original_max_position_embeddings", Rule::Ignored),
        ("attn_logit_softcapping", Rule::Refused("import a model without soft caps")),
        ("final_logit_softcapping", Rule::Refused("import a model without soft caps")),
        ("use_bidirectional_attention", Rule::Refused("import a model that only reads backwards")),
    ],
    BIASED_ATTENTION,
    SIZES,
    ROPE,
    EVERY,
];

pub(super) const NEOX: Keys = &[
    &[
        ("num_key_value_heads", Rule::Ignored),
        ("hidden_act", text("gelu")),
        ("layer_norm_eps", real(1e-5)),
        ("use_parallel_residual", flag(true)),
        ("attention_bias", flag(true)),
        ("rotary_emb_base", real(10_000.0)),
        ("rotary_pct", real(0.25)),
        ("rope_theta", Rule::Ignored),
        ("partial_rotary_factor", Rule::Ignored),
        ("is_decoder", Rule::Ignored),
    ],
    SIZES,
    ROPE,
    EVERY,
];

pub(super) const GPT2: Keys = &[
    &[
        ("n_embd", MISSING),
        ("n_layer", MISSING),
        ("n_head", MISSING),
        ("n_positions", MISSING),
        ("n_inner", NULL),
        // Newer names of the same.
        ("hidden_size", NULL),
        ("num_hidden_layers", NULL),
        ("num_attention_heads", NULL),
        ("max_position_embeddings", NULL),
        ("activation_function", text("gelu_new")),
        ("layer_norm_epsilon", real(1e-5)),
        ("scale_attn_weights", flag(true)),
        ("tie_word_embeddings", flag(true)),
        (
            "scale_attn_by_inverse_layer_idx",
            Rule::Refused("import a model that scales all layers alike"),
        ),
        ("add_cross_attention", Rule::Refused("import a decoder without an encoder")),
        // The same numbers in f32.
        ("reorder_and_upcast_attn", Rule::Ignored),
        ("summary_type", Rule::Ignored),
        ("summary_use_proj", Rule::Ignored),
        ("summary_activation", Rule::Ignored),
        ("summary_proj_to_labels", Rule::Ignored),
        ("summary_first_dropout", Rule::Ignored),
        ("summary_last_dropout", Rule::Ignored),
    ],
    EVERY,
];

/// What all mixtures of experts have.
const EXPERTS: Rows =
    &[("output_router_logits", flag(false)), ("router_aux_loss_coef", real(0.001))];

pub(super) const MIXTRAL: Keys = &[
    EXPERTS,
    &[
        ("num_key_value_heads", number_or_null(8)),
        ("rms_norm_eps", real(1e-5)),
        ("rope_theta", real(1_000_000.0)),
        ("sliding_window", NULL),
        ("num_experts_per_tok", number(2)),
        ("num_local_experts", number(8)),
        ("num_experts", NULL),
        ("router_jitter_noise", Rule::Refused("set it to 0: inputs of experts get no noise here")),
    ],
    SIZES,
    ROPE,
    EVERY,
];

pub(super) const QWEN2_MOE: Keys = &[
    EXPERTS,
    &[
        ("num_key_value_heads", number_or_null(16)),
        ("qkv_bias", flag(true)),
        ("num_experts_per_tok", number(4)),
        ("num_experts", number(60)),
        ("norm_topk_prob", flag(false)),
        ("moe_intermediate_size", number(1408)),
        ("shared_expert_intermediate_size", number(5632)),
        ("decoder_sparse_step", number(1)),
        ("mlp_only_layers", NULL),
    ],
    QWEN,
    SIZES,
    ROPE,
    EVERY,
];

pub(super) const QWEN3_MOE: Keys = &[
    EXPERTS,
    &[
        ("num_key_value_heads", number(4)),
        ("use_sliding_window", flag(false)),
        ("sliding_window", number_or_null(4096)),
        ("num_experts_per_tok", number(8)),
        ("num_experts", number(128)),
        ("num_local_experts", NULL),
        ("norm_topk_prob", flag(false)),
        ("moe_intermediate_size", number(768)),
        ("decoder_sparse_step", number(1)),
        ("mlp_only_layers", NULL),
    ],
    BIASED_ATTENTION,
    SIZES,
    ROPE,
    EVERY,
];

pub(super) const OLMOE: Keys = &[
    &[("router_aux_loss_coef", real(0.01))],
    EXPERTS,
    &[
        ("rms_norm_eps", real(1e-5)),
        ("num_experts_per_tok", number(8)),
        ("num_experts", number(64)),
        ("num_local_experts", NULL),
        ("norm_topk_prob", flag(false)),
        // Flash attention reads it, and other attention does not.
        ("sliding_window", Rule::Refused("import a model without windows")),
        ("clip_qkv", Rule::Refused("import a model that clips no queries, keys and values")),
    ],
    BIASED_ATTENTION,
    SIZES,
    ROPE,
    EVERY,
];

pub(super) const GPT_OSS: Keys = &[
    EXPERTS,
    &[
        ("num_key_value_heads", number_or_null(8)),
        ("head_dim", number_or_null(64)),
        ("hidden_act", Rule::Ignored),
        ("rms_norm_eps", real(1e-5)),
        ("rope_theta", real(150_000.0)),
        ("sliding_window", number_or_null(128)),
        ("layer_types", NULL),
        ("num_experts_per_tok", number(4)),
        ("num_local_experts", number(128)),
        ("num_experts", NULL),
        ("swiglu_alpha", real(1.702)),
        ("swiglu_limit", real(7.0)),
        ("attention_bias", flag(true)),
    ],
    SIZES,
    ROPE,
    EVERY,
];

/// Of mixtures that no loss of their own balances.
const NO_LOSS: Rows = &[(
    "output_router_logits",
    Rule::Refused("set it to false: this family has no loss of experts"),
)];

const LATENT: Rows = &[
    ("q_lora_rank", number_or_null(1536)),
    ("kv_lora_rank", number(512)),
    ("qk_nope_head_dim", number(128)),
    ("qk_rope_head_dim", number(64)),
    ("v_head_dim", number(128)),
    ("rope_interleave", flag(true)),
    // Such a class has a width of its own.
    ("head_dim", Rule::Ignored),
    ("pretraining_tp", Rule::Ignored),
];

pub(super) const DEEPSEEK_V2: Keys = &[
    &[
        ("num_experts_per_tok", MISSING),
        ("n_routed_experts", number(64)),
        ("num_experts", NULL),
        ("n_shared_experts", number(2)),
        ("moe_intermediate_size", number(1407)),
        ("first_k_dense_replace", number(0)),
        ("routed_scaling_factor", real(1.0)),
        ("topk_method", text("greedy")),
        ("n_group", NULL),
        ("topk_group", NULL),
        (
            "norm_topk_prob",
            Rule::Refused("transformers ignores it in this family: set it to false"),
        ),
        // Its class has no such key, and rotates adjacent channels.
        ("rope_interleave", Rule::Ignored),
        ("mlp_bias", Rule::Refused("import a model whose feed-forward blocks have no biases")),
    ],
    NO_LOSS,
    LATENT,
    BIASED_ATTENTION,
    SIZES,
    ROPE,
    EVERY,
];

/// Sigmoids with biases, in DeepSeek-V3 and what follows it.
const SIGMOID: Rows = &[
    ("num_local_experts", NULL),
    ("norm_topk_prob", flag(true)),
    ("num_experts_per_tok", number(8)),
    ("n_shared_experts", number(1)),
    ("n_group", number(1)),
    ("topk_group", number(1)),
    // Layers after the last one, which predict further tokens, and which no forward pass reads.
    ("num_nextn_predict_layers", NULL),
    ("num_mtp_layers", number(1)),
];

pub(super) const DEEPSEEK_V3: Keys = &[
    &[
        ("num_key_value_heads", number_or_null(128)),
        ("n_routed_experts", number(256)),
        ("moe_intermediate_size", number(2048)),
        ("first_k_dense_replace", number(3)),
        ("routed_scaling_factor", real(2.5)),
        ("n_group", number(8)),
        ("topk_group", number(4)),
    ],
    SIGMOID,
    NO_LOSS,
    LATENT,
    BIASED_ATTENTION,
    SIZES,
    ROPE,
    EVERY,
];

pub(super) const GLM4_MOE: Keys = &[
    &[
        ("num_key_value_heads", number(8)),
        ("rms_norm_eps", real(1e-5)),
        ("partial_rotary_factor", real(0.5)),
        ("use_qk_norm", flag(false)),
        ("n_routed_experts", number(128)),
        ("moe_intermediate_size", number(1408)),
        ("first_k_dense_replace", number(1)),
        ("routed_scaling_factor", real(1.0)),
    ],
    SIGMOID,
    NO_LOSS,
    BIASED_ATTENTION,
    SIZES,
    ROPE,
    EVERY,
];

pub(super) const GLM4_MOE_LITE: Keys = &[
    &[
        ("num_key_value_heads", number(20)),
        ("rms_norm_eps", real(1e-5)),
        // Another spelling of `qk_rope_head_dim`.
        ("head_dim", NULL),
        ("num_experts_per_tok", number(4)),
        ("n_routed_experts", number(64)),
        ("moe_intermediate_size", number(1536)),
        ("mlp_layer_types", NULL),
        ("routed_scaling_factor", real(1.8)),
        ("q_lora_rank", number_or_null(768)),
        ("qk_nope_head_dim", number(192)),
        ("v_head_dim", number(256)),
    ],
    SIGMOID,
    NO_LOSS,
    LATENT,
    BIASED_ATTENTION,
    SIZES,
    ROPE,
    EVERY,
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::{Absent, Rule, rule};
    use crate::family::FAMILIES;

    /// The fields of a class with their defaults, and the other keys that it takes from a file.
    #[derive(serde::Deserialize)]
    struct Class {
        fields: BTreeMap<String, Value>,
        others: Vec<String>,
    }

    fn same(absent: Absent, theirs: &Value) -> bool {
        match absent {
            Absent::Missing => true,
            Absent::Null => theirs.is_null(),
            Absent::Number(number) | Absent::NumberOrNull(number) => *theirs == json!(number),
            Absent::Real(real) => theirs.as_f64() == Some(real),
            Absent::Flag(flag) => *theirs == json!(flag),
            Absent::Text(text) => *theirs == json!(text),
        }
    }

    #[test]
    fn the_table_has_every_key_of_every_class_with_its_default() {
        let classes: BTreeMap<String, Class> =
            serde_json::from_str(include_str!("transformers.json")).expect("the script's output");
        assert_eq!(classes.len(), FAMILIES.len());
        for family in &FAMILIES {
            let name = family.model_type;
            let class = &classes[name];
            for (key, default) in &class.fields {
                match rule(family.keys, key) {
                    Some(Rule::Read(absent)) => {
                        assert!(same(absent, default), "{name}: {key} is {default} by default");
                    }
                    Some(Rule::Ignored | Rule::Refused(_)) => {}
                    None => panic!("{name}: what does {key} = {default} do?"),
                }
            }
            for key in &class.others {
                assert!(rule(family.keys, key).is_some(), "{name}: what does {key} do?");
            }
            // A key of another family is not read. `rms_norm_eps` and `hidden_act` have rows that all
            // share, and are not asked for where a family has another norm or activation.
            for (key, _) in family.keys.iter().copied().flatten() {
                let rule = rule(family.keys, key);
                let known = class.fields.contains_key(*key)
                    || class.others.iter().any(|other| other == key)
                    || ["model_type", "rope_theta", "rms_norm_eps", "partial_rotary_factor"]
                        .contains(key)
                    // They say which tensors of a file no model reads; the classes list those of published files.
                    || ["num_nextn_predict_layers", "num_mtp_layers"].contains(key);
                assert!(
                    known || !matches!(rule, Some(Rule::Read(_))),
                    "{name} does not read {key}"
                );
            }
        }
    }
}
