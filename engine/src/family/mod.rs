//! The families of models that can be imported: one table, and what their `config.json` means.
//!
//! A row says how a family differs from Llama; keys of `config.json` decide the rest. What this
//! engine does not compute as `transformers` does is refused by its key and value.

mod config;
mod rope;
pub(crate) mod tensors;

use serde_json::Value;
use shoal_protocol::limits;
use shoal_protocol::manifest::{
    Activation, Biases, Block, LayerAttention, Model, Norm, Placement, QueryKeyNorm,
};

use self::config::Config;
use crate::base_error::ConfigJsonError;

/// A model as its `config.json` describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    /// The family, as in `model_type`.
    pub family: String,
    /// The shape; `context` is the longest position.
    pub model: Model,
}

/// Whether linear maps have biases.
#[derive(Debug, Clone, Copy)]
enum Biased {
    Never,
    Always,
    /// A key decides; it is false if absent.
    Key(&'static str),
}

/// How a family names its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    Llama,
    /// Llama's, with queries, keys and values in one matrix, and gate and up in another.
    Phi3,
    NeoX,
    Gpt2,
}

/// What a layer's attention depends on besides its weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layers {
    /// All layers alike; a window if `sliding_window` is not null.
    Alike,
    /// `layer_types`, or the last layers by `max_window_layers`, if `use_sliding_window`.
    Qwen,
    /// As Qwen, and no rotation where `no_rope_layers` has 0.
    SmolLm3,
    /// Windows with a rotary embedding of their own in all but every sixth layer.
    Gemma3,
}

/// A family of models.
struct Family {
    /// `model_type` in `config.json`.
    model_type: &'static str,
    norm: Norm,
    placement: Placement,
    query_key_norm: QueryKeyNorm,
    query_key_value_biased: Biased,
    attention_output_biased: Biased,
    feed_forward_biased: Biased,
    ungated: bool,
    layers: Layers,
    /// Base of the rotary embedding's wavelengths if `config.json` has none; `None` has no rotary
    /// embedding but a table of trained positions.
    theta: Option<f64>,
    /// Share of a head that is rotated if `config.json` has none.
    rotated: f64,
    /// Value of `tie_word_embeddings` if it is absent.
    tied: bool,
    /// Value of the norms' epsilon if it is absent.
    epsilon: f64,
    /// Width of a head if `head_dim` is absent; `None` is hidden / heads.
    head_size: Option<u32>,
    naming: Naming,
}

const LLAMA: Family = Family {
    model_type: "llama",
    norm: Norm::Rms,
    placement: Placement::Before,
    query_key_norm: QueryKeyNorm::None,
    query_key_value_biased: Biased::Key("attention_bias"),
    attention_output_biased: Biased::Key("attention_bias"),
    feed_forward_biased: Biased::Key("mlp_bias"),
    ungated: false,
    layers: Layers::Alike,
    theta: Some(10_000.0),
    rotated: 1.0,
    tied: false,
    epsilon: 1e-6,
    head_size: None,
    naming: Naming::Llama,
};

const FAMILIES: [Family; 10] = [
    LLAMA,
    Family {
        model_type: "mistral",
        query_key_value_biased: Biased::Never,
        attention_output_biased: Biased::Never,
        feed_forward_biased: Biased::Never,
        ..LLAMA
    },
    Family {
        model_type: "qwen2",
        query_key_value_biased: Biased::Always,
        attention_output_biased: Biased::Never,
        feed_forward_biased: Biased::Never,
        layers: Layers::Qwen,
        ..LLAMA
    },
    Family {
        model_type: "qwen3",
        query_key_norm: QueryKeyNorm::Head,
        feed_forward_biased: Biased::Never,
        layers: Layers::Qwen,
        head_size: Some(128),
        ..LLAMA
    },
    Family {
        model_type: "smollm3",
        layers: Layers::SmolLm3,
        theta: Some(2_000_000.0),
        tied: true,
        ..LLAMA
    },
    Family {
        model_type: "phi3",
        query_key_value_biased: Biased::Never,
        attention_output_biased: Biased::Never,
        feed_forward_biased: Biased::Never,
        epsilon: 1e-5,
        naming: Naming::Phi3,
        ..LLAMA
    },
    Family {
        model_type: "olmo2",
        placement: Placement::After,
        query_key_norm: QueryKeyNorm::All,
        feed_forward_biased: Biased::Never,
        epsilon: 1e-5,
        ..LLAMA
    },
    Family {
        model_type: "gemma3_text",
        norm: Norm::RmsPlusOne,
        placement: Placement::Both,
        query_key_norm: QueryKeyNorm::Head,
        feed_forward_biased: Biased::Never,
        layers: Layers::Gemma3,
        theta: Some(1_000_000.0),
        tied: true,
        head_size: Some(256),
        ..LLAMA
    },
    Family {
        model_type: "gpt_neox",
        norm: Norm::Layer,
        placement: Placement::Parallel,
        query_key_value_biased: Biased::Always,
        attention_output_biased: Biased::Always,
        feed_forward_biased: Biased::Always,
        ungated: true,
        rotated: 0.25,
        epsilon: 1e-5,
        naming: Naming::NeoX,
        ..LLAMA
    },
    Family {
        model_type: "gpt2",
        norm: Norm::Layer,
        query_key_value_biased: Biased::Always,
        attention_output_biased: Biased::Always,
        feed_forward_biased: Biased::Always,
        ungated: true,
        theta: None,
        tied: true,
        epsilon: 1e-5,
        naming: Naming::Gpt2,
        ..LLAMA
    },
];

/// The naming of a family.
pub(crate) fn naming(family: &str) -> Option<Naming> {
    FAMILIES.iter().find(|known| known.model_type == family).map(|known| known.naming)
}

/// Reads a `config.json`.
///
/// # Errors
/// If its family is not known, a key is missing, or a value asks for something that is not computed
/// here.
pub fn describe(config: &Value) -> Result<Described, ConfigJsonError> {
    let config = Config::new(config)?;
    let model_type = config.text("model_type")?;
    let known = FAMILIES.iter().find(|family| family.model_type == model_type);
    let family = known.ok_or_else(|| {
        let all: Vec<_> = FAMILIES.iter().map(|family| family.model_type).collect();
        let remedy = format!("the known ones are {}", all.join(", "));
        config.unsupported("model_type", &remedy)
    })?;
    refuse_unsupported(&config)?;
    let model = family.model(&config)?;
    Ok(Described { family: model_type, model })
}

/// Refuses what no family here computes.
fn refuse_unsupported(config: &Config<'_>) -> Result<(), ConfigJsonError> {
    let is_off = |value: &Value| {
        value.is_null() || *value == Value::Bool(false) || value.as_f64() == Some(0.0)
    };
    for (key, remedy) in [
        ("quantization_config", "import the unquantised model"),
        ("attn_logit_softcapping", "import a model without soft caps"),
        ("final_logit_softcapping", "import a model without soft caps"),
        ("use_bidirectional_attention", "import a model that only reads backwards"),
        ("scale_attn_by_inverse_layer_idx", "import a model that scales all layers alike"),
        ("add_cross_attention", "import a decoder without an encoder"),
    ] {
        if !config.get(key).is_none_or(is_off) {
            return Err(config.unsupported(key, remedy));
        }
    }
    Ok(())
}

impl Family {
    fn model(&self, config: &Config<'_>) -> Result<Model, ConfigJsonError> {
        // GPT-2 has names of its own for everything.
        let old = self.naming == Naming::Gpt2;
        let key = |new, older| if old { older } else { new };
        // Every size has a bound before anything is allocated for it.
        let hidden = config.size(key("hidden_size", "n_embd"), limits::HIDDEN)?;
        let heads = config.size(key("num_attention_heads", "n_head"), limits::HEADS)?;
        let layers = config.size(key("num_hidden_layers", "n_layer"), limits::LAYERS)?;
        let context = config.size(key("max_position_embeddings", "n_positions"), u32::MAX)?;
        let key_value_heads = config.size_or("num_key_value_heads", heads, limits::HEADS)?;
        let inner = key("intermediate_size", "n_inner");
        let intermediate = match config.get(inner).is_none_or(Value::is_null) && old {
            true => 4 * hidden,
            false => config.size(inner, limits::INTERMEDIATE)?,
        };
        if hidden % heads != 0 && self.head_size.is_none() {
            let key = key("num_attention_heads", "n_head");
            return Err(config.unsupported(key, "it must divide the hidden size"));
        }
        let default = self.head_size.unwrap_or(hidden / heads);
        let head_size = config.size_or("head_dim", default, limits::HEAD_SIZE)?;
        let epsilon = match self.norm {
            Norm::Layer => key("layer_norm_eps", "layer_norm_epsilon"),
            Norm::Rms | Norm::RmsPlusOne => "rms_norm_eps",
        };
        let mut block = self.block(config, head_size, hidden)?;
        self.fill_layers(config, &mut block, layers, head_size)?;
        block.learned_positions = self.theta.is_none().then_some(context);
        Ok(Model {
            vocabulary: config.size("vocab_size", limits::VOCABULARY)?,
            hidden,
            layers,
            heads,
            key_value_heads,
            intermediate,
            slices: 1,
            context,
            rope_theta: block.rotary.first().map_or(10_000.0, |rotary| rotary.theta),
            norm_epsilon: config.real_or(epsilon, self.epsilon)?,
            initializer_range: config.real_or("initializer_range", 0.02)?,
            boundary: None,
            block,
            base: None,
        })
    }

    /// The switches that are the same in all layers.
    fn block(
        &self,
        config: &Config<'_>,
        head_size: u32,
        hidden: u32,
    ) -> Result<Block, ConfigJsonError> {
        let biased = |rule| match rule {
            Biased::Never => Ok(false),
            Biased::Always => Ok(true),
            Biased::Key(key) => config.flag_or(key, false),
        };
        let sequential = self.placement == Placement::Parallel
            && !config.flag_or("use_parallel_residual", true)?;
        let gemma = self.layers == Layers::Gemma3;
        let unscaled = !config.flag_or("scale_attn_weights", true)?;
        let attention_scale = match gemma {
            true => Some(f64::from(config.number_or("query_pre_attn_scalar", 256)?).sqrt().recip()),
            false => unscaled.then_some(1.0),
        };
        Ok(Block {
            head_size: Some(head_size),
            norm: self.norm,
            placement: if sequential { Placement::Before } else { self.placement },
            query_key_norm: self.query_key_norm,
            biases: Biases {
                query_key_value: biased(self.query_key_value_biased)?,
                attention_output: biased(self.attention_output_biased)?,
                feed_forward: biased(self.feed_forward_biased)?,
            },
            activation: self.activation(config)?,
            ungated: self.ungated,
            attention_scale,
            embedding_scale: gemma.then_some(f64::from(hidden).sqrt()),
            learned_positions: None,
            tied: config.flag_or("tie_word_embeddings", self.tied)?,
            rotary: Vec::new(),
            layers: Vec::new(),
        })
    }

    fn activation(&self, config: &Config<'_>) -> Result<Activation, ConfigJsonError> {
        let (key, default) = match (self.layers, self.naming) {
            (Layers::Gemma3, _) => ("hidden_activation", "gelu_pytorch_tanh"),
            (_, Naming::Gpt2) => ("activation_function", "gelu_new"),
            (_, Naming::NeoX) => ("hidden_act", "gelu"),
            _ => ("hidden_act", "silu"),
        };
        match config.text_or(key, default)?.as_str() {
            "silu" | "swish" => Ok(Activation::Silu),
            "gelu" => Ok(Activation::Gelu),
            "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
            _ => {
                Err(config.unsupported(key, "the known ones are silu, gelu and gelu_pytorch_tanh"))
            }
        }
    }

    /// Rotary embeddings and windows of the layers.
    fn fill_layers(
        &self,
        config: &Config<'_>,
        block: &mut Block,
        layers: u32,
        head_size: u32,
    ) -> Result<(), ConfigJsonError> {
        let Some(theta) = self.theta else {
            // Trained positions instead of rotary ones.
            block.layers = vec![LayerAttention { rotary: None, window: None }; layers as usize];
            return Ok(());
        };
        let gemma = self.layers == Layers::Gemma3;
        block.rotary = rope::rotaries(config, theta, self.rotated, head_size, gemma)?;
        let windows = self.windows(config, layers)?;
        let rotates = match self.layers {
            Layers::SmolLm3 => config.rotating_layers(layers)?,
            _ => vec![true; layers as usize],
        };
        let layer = |(window, rotates): (Option<u32>, bool)| LayerAttention {
            rotary: rotates.then_some(u8::from(gemma && window.is_some())),
            window,
        };
        block.layers = windows.into_iter().zip(rotates).map(layer).collect();
        let plain = LayerAttention { rotary: Some(0), window: None };
        if block.layers.iter().all(|layer| *layer == plain) {
            block.layers.clear();
        }
        Ok(())
    }

    /// The window of each layer.
    fn windows(
        &self,
        config: &Config<'_>,
        layers: u32,
    ) -> Result<Vec<Option<u32>>, ConfigJsonError> {
        let window = config.optional_number("sliding_window")?;
        let from = config.number_or("max_window_layers", 28)?;
        let period = config.number_or("sliding_window_pattern", 6)?.max(1);
        let applies: Vec<bool> = match self.layers {
            Layers::Alike => vec![true; layers as usize],
            Layers::Qwen | Layers::SmolLm3 if !config.flag_or("use_sliding_window", false)? => {
                vec![false; layers as usize]
            }
            Layers::SmolLm3 => {
                let rotates = config.rotating_layers(layers)?;
                config.sliding_layers(layers, |layer| !rotates[layer as usize])?
            }
            Layers::Qwen => config.sliding_layers(layers, |layer| layer >= from)?,
            Layers::Gemma3 => {
                config.sliding_layers(layers, |layer| !(layer + 1).is_multiple_of(period))?
            }
        };
        Ok(applies.into_iter().map(|applies| window.filter(|_| applies)).collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::describe;

    fn config() -> Value {
        json!({
            "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
            "max_position_embeddings": 128, "intermediate_size": 128, "vocab_size": 300,
        })
    }

    #[test]
    fn sizes_have_bounds_before_anything_is_allocated() {
        describe(&config()).expect("a small model");
        for (key, most) in [
            ("num_hidden_layers", 1024),
            ("hidden_size", 65_536),
            ("num_attention_heads", 1024),
            ("num_key_value_heads", 1024),
            ("intermediate_size", 262_144),
            ("vocab_size", 1_048_576),
            ("head_dim", 4096),
        ] {
            for value in [0, 4_000_000_000u64] {
                let mut config = config();
                config[key] = value.into();
                let error = describe(&config).expect_err(key).to_string();
                assert!(error.contains(key) && error.contains(&value.to_string()), "{error}");
                assert!(error.contains(&format!("it must be from 1 to {most}")), "{error}");
            }
        }
        for family in ["gpt2", "gemma3_text", "smollm3", "qwen2"] {
            let mut config = config();
            config["model_type"] = family.into();
            config["n_embd"] = 64.into();
            config["n_head"] = 4.into();
            config["n_positions"] = 128.into();
            config["n_layer"] = 4_000_000_000u64.into();
            config["num_hidden_layers"] = 4_000_000_000u64.into();
            let error = describe(&config).expect_err(family).to_string();
            assert!(error.contains("it must be from 1 to 1024"), "{error}");
        }
    }
}
