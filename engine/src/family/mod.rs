//! The families of models that can be imported: one table, and what their `config.json` means.
//!
//! A row says how a family differs from Llama; keys of `config.json` decide the rest, each with its
//! family's default (`keys.rs`). A key that the family's class in `transformers` does not read is not read
//! here either. What this engine does not compute as `transformers` does is refused by its key and value.

mod config;
mod experts;
mod keys;
mod latent;
mod rope;
mod rope_scaling;
pub(crate) mod tensors;
#[cfg(test)]
mod tests;

use serde_json::Value;
use shoal_protocol::limits;
use shoal_protocol::manifest::{
    Activation, Biases, Block, LayerAttention, Model, Norm, Placement, QueryKeyNorm,
};

use self::config::{Config, Switch};
use self::experts::Mixture;
use self::keys::Keys;
use self::latent::Latent;
use self::rope::{Positions, Rules};
use self::rope_scaling::Scalings;
use crate::base_error::ConfigJsonError;

/// The longest context, and the least deviation of random weights, that a run can have.
const MOST_POSITIONS: u32 = 1 << 20;
const LEAST_DEVIATION: f64 = 1e-6;

/// A model as its `config.json` describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    /// The family, as in `model_type`.
    pub family: String,
    /// The shape; `context` is the longest position.
    pub model: Model,
    /// Layers after the model's last one that files may have, and that no forward pass reads.
    pub(crate) more_layers: u32,
}

/// How a family names its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    Llama,
    /// Llama's, with queries, keys and values in one matrix, and gate and up in another.
    Phi3,
    NeoX,
    Gpt2,
    /// Llama's, with names of its own for experts.
    Mixtral,
    /// Llama's, with all experts of a layer in one tensor.
    GptOss,
    /// Llama's, with a name of its own for experts of all tokens.
    DeepSeek,
}

impl Naming {
    /// What stands before the names of the model's tensors in one with a head.
    pub(crate) fn prefix(self) -> &'static str {
        match self {
            Self::Llama | Self::Phi3 | Self::Mixtral | Self::GptOss | Self::DeepSeek => "model.",
            Self::NeoX => "gpt_neox.",
            Self::Gpt2 => "transformer.",
        }
    }
}

/// What a layer's attention depends on besides its weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layers {
    /// All layers see all positions before them.
    Full,
    /// `layer_types`, or else all layers have a window, if `sliding_window` is not null.
    Windowed,
    /// All layers have a window, if `use_sliding_window`.
    WindowedIf,
    /// `layer_types`, or the last layers by `max_window_layers`, if `use_sliding_window`.
    Qwen,
    /// As Qwen, but of the first layers by `max_window_layers` every other one.
    Qwen2Moe,
    /// As Qwen, and no rotation where `no_rope_layers` has 0.
    SmolLm3,
    /// Windows with a rotary embedding of their own in all but every sixth layer.
    Gemma3,
    /// `layer_types`, or else windows in every other layer, from the first.
    GptOss,
}

/// A family of models. What its `config.json` has, and what it means where a key is absent, is in
/// [`keys`].
struct Family {
    /// `model_type` in `config.json`.
    model_type: &'static str,
    /// The keys of `config.json` that count.
    keys: Keys,
    norm: Norm,
    placement: Placement,
    query_key_norm: QueryKeyNorm,
    /// Whether there is such a norm.
    normed: Switch,
    query_key_value_biased: Switch,
    attention_output_biased: Switch,
    feed_forward_biased: Switch,
    ungated: bool,
    experts: Option<Mixture>,
    /// Whether heads have sinks.
    sinks: bool,
    /// How keys and values are made from few numbers, if they are.
    latent: Option<Latent>,
    layers: Layers,
    /// Positions: a rotary embedding, or a table of trained ones.
    positions: Positions,
    naming: Naming,
}

const LLAMA: Family = Family {
    model_type: "llama",
    keys: keys::LLAMA,
    norm: Norm::Rms,
    placement: Placement::Before,
    query_key_norm: QueryKeyNorm::None,
    normed: Switch::Always,
    query_key_value_biased: Switch::Key("attention_bias"),
    attention_output_biased: Switch::Key("attention_bias"),
    feed_forward_biased: Switch::Key("mlp_bias"),
    ungated: false,
    experts: None,
    sinks: false,
    latent: None,
    layers: Layers::Full,
    positions: Positions::Rotary(rope::PLAIN),
    naming: Naming::Llama,
};

const FAMILIES: [Family; 19] = [
    LLAMA,
    Family {
        model_type: "mistral",
        keys: keys::MISTRAL,
        query_key_value_biased: Switch::Never,
        attention_output_biased: Switch::Never,
        feed_forward_biased: Switch::Never,
        layers: Layers::Windowed,
        ..LLAMA
    },
    Family {
        model_type: "qwen2",
        keys: keys::QWEN2,
        query_key_value_biased: Switch::Always,
        attention_output_biased: Switch::Never,
        feed_forward_biased: Switch::Never,
        layers: Layers::Qwen,
        ..LLAMA
    },
    Family {
        model_type: "qwen3",
        keys: keys::QWEN3,
        query_key_norm: QueryKeyNorm::Head,
        feed_forward_biased: Switch::Never,
        layers: Layers::Qwen,
        ..LLAMA
    },
    Family { model_type: "smollm3", keys: keys::SMOLLM3, layers: Layers::SmolLm3, ..LLAMA },
    Family {
        model_type: "phi3",
        keys: keys::PHI3,
        query_key_value_biased: Switch::Never,
        attention_output_biased: Switch::Never,
        feed_forward_biased: Switch::Never,
        layers: Layers::Windowed,
        positions: Positions::Rotary(Rules {
            partial: true,
            scalings: Scalings::Longrope,
            ..rope::PLAIN
        }),
        naming: Naming::Phi3,
        ..LLAMA
    },
    Family {
        model_type: "olmo2",
        keys: keys::OLMO2,
        placement: Placement::After,
        query_key_norm: QueryKeyNorm::All,
        feed_forward_biased: Switch::Never,
        ..LLAMA
    },
    Family {
        model_type: "gemma3_text",
        keys: keys::GEMMA3,
        norm: Norm::RmsPlusOne,
        placement: Placement::Both,
        query_key_norm: QueryKeyNorm::Head,
        feed_forward_biased: Switch::Never,
        layers: Layers::Gemma3,
        positions: Positions::Rotary(Rules { by_layer_type: true, ..rope::PLAIN }),
        ..LLAMA
    },
    Family {
        model_type: "gpt_neox",
        keys: keys::NEOX,
        norm: Norm::Layer,
        placement: Placement::Parallel,
        feed_forward_biased: Switch::Always,
        ungated: true,
        positions: Positions::Rotary(Rules {
            theta: "rotary_emb_base",
            rotated: "rotary_pct",
            partial: true,
            ..rope::PLAIN
        }),
        naming: Naming::NeoX,
        ..LLAMA
    },
    Family {
        model_type: "gpt2",
        keys: keys::GPT2,
        norm: Norm::Layer,
        query_key_value_biased: Switch::Always,
        attention_output_biased: Switch::Always,
        feed_forward_biased: Switch::Always,
        ungated: true,
        positions: Positions::Trained,
        naming: Naming::Gpt2,
        ..LLAMA
    },
    Family {
        model_type: "mixtral",
        keys: keys::MIXTRAL,
        query_key_value_biased: Switch::Never,
        attention_output_biased: Switch::Never,
        feed_forward_biased: Switch::Never,
        experts: Some(experts::MIXTRAL),
        layers: Layers::Windowed,
        naming: Naming::Mixtral,
        ..LLAMA
    },
    Family {
        model_type: "qwen2_moe",
        keys: keys::QWEN2_MOE,
        query_key_value_biased: Switch::Key("qkv_bias"),
        attention_output_biased: Switch::Never,
        feed_forward_biased: Switch::Never,
        experts: Some(experts::QWEN2_MOE),
        layers: Layers::Qwen2Moe,
        ..LLAMA
    },
    Family {
        model_type: "qwen3_moe",
        keys: keys::QWEN3_MOE,
        query_key_norm: QueryKeyNorm::Head,
        feed_forward_biased: Switch::Never,
        experts: Some(experts::QWEN3_MOE),
        layers: Layers::WindowedIf,
        ..LLAMA
    },
    Family {
        model_type: "olmoe",
        keys: keys::OLMOE,
        query_key_norm: QueryKeyNorm::All,
        feed_forward_biased: Switch::Never,
        experts: Some(experts::OLMOE),
        ..LLAMA
    },
    Family {
        model_type: "gpt_oss",
        keys: keys::GPT_OSS,
        feed_forward_biased: Switch::Always,
        experts: Some(experts::GPT_OSS),
        sinks: true,
        layers: Layers::GptOss,
        naming: Naming::GptOss,
        ..LLAMA
    },
    Family {
        model_type: "deepseek_v2",
        keys: keys::DEEPSEEK_V2,
        feed_forward_biased: Switch::Never,
        experts: Some(experts::DEEPSEEK_V2),
        latent: Some(Latent { interleaved: Switch::Always, rotated: latent::ROTATED }),
        naming: Naming::DeepSeek,
        ..LLAMA
    },
    DEEPSEEK_V3,
    Family {
        model_type: "glm4_moe",
        keys: keys::GLM4_MOE,
        query_key_norm: QueryKeyNorm::Head,
        normed: Switch::Key("use_qk_norm"),
        attention_output_biased: Switch::Never,
        latent: None,
        positions: Positions::Rotary(Rules { partial: true, ..rope::PLAIN }),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "glm4_moe_lite",
        keys: keys::GLM4_MOE_LITE,
        experts: Some(experts::GLM4_MOE_LITE),
        latent: Some(Latent {
            interleaved: Switch::Key("rope_interleave"),
            rotated: ["qk_rope_head_dim", "head_dim"],
        }),
        ..DEEPSEEK_V3
    },
];

const DEEPSEEK_V3: Family = Family {
    model_type: "deepseek_v3",
    keys: keys::DEEPSEEK_V3,
    feed_forward_biased: Switch::Never,
    experts: Some(experts::DEEPSEEK_V3),
    latent: Some(Latent { interleaved: Switch::Key("rope_interleave"), rotated: latent::ROTATED }),
    naming: Naming::DeepSeek,
    ..LLAMA
};

/// The families that can be imported, as in `model_type`.
pub fn families() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|family| family.model_type)
}

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
    let any = Config::new(config, keys::ANY)?;
    let model_type = any.text("model_type")?;
    let known = FAMILIES.iter().find(|family| family.model_type == model_type);
    let family = known.ok_or_else(|| {
        let all: Vec<_> = families().collect();
        let remedy = format!("the known ones are {}", all.join(", "));
        any.unsupported("model_type", &remedy)
    })?;
    let config = Config::new(config, family.keys)?;
    config.refuse_unsupported()?;
    let model = family.model(&config)?;
    let more_layers = match keys::rule(family.keys, "num_mtp_layers") {
        Some(_) => match config.optional_number("num_nextn_predict_layers")? {
            Some(layers) => layers,
            None => config.number("num_mtp_layers")?,
        },
        None => 0,
    };
    Ok(Described { family: model_type, model, more_layers })
}

impl Family {
    fn model(&self, config: &Config<'_>) -> Result<Model, ConfigJsonError> {
        // GPT-2 has names of its own for everything; the newer ones go before them.
        let old = self.naming == Naming::Gpt2;
        let key = |new, older| if old && !config.has(new) { older } else { new };
        // Every size has a bound before anything is allocated for it.
        let hidden = config.size(key("hidden_size", "n_embd"), limits::HIDDEN)?;
        let heads_key = key("num_attention_heads", "n_head");
        let heads = config.size(heads_key, limits::HEADS)?;
        let layers = config.size(key("num_hidden_layers", "n_layer"), limits::LAYERS)?;
        let positions = config.size(key("max_position_embeddings", "n_positions"), u32::MAX)?;
        let key_value_heads = config.size_or("num_key_value_heads", heads, limits::HEADS)?;
        let inner = if old { "n_inner" } else { "intermediate_size" };
        let four = hidden.saturating_mul(4);
        let intermediate = config.size_or(inner, four, limits::INTERMEDIATE)?;
        let is_divided = self.latent.is_none() && config.optional_number("head_dim")?.is_none();
        if is_divided && hidden % heads != 0 {
            return Err(config.unsupported(heads_key, "it must divide the hidden size"));
        }
        let latent = self.latent.map(|rule| rule.read(config)).transpose()?;
        let head_size = match &latent {
            Some(latent) => latent.head_size,
            None => config.size_or("head_dim", hidden / heads, limits::HEAD_SIZE)?,
        };
        if latent.is_some() && key_value_heads != heads {
            let remedy = "with latent attention it must be the number of heads";
            return Err(config.unsupported("num_key_value_heads", remedy));
        }
        if self.naming == Naming::NeoX && head_size != hidden / heads {
            let remedy = "in this family a head is the hidden size over the number of heads";
            return Err(config.unsupported("head_dim", remedy));
        }
        let epsilon = match self.norm {
            Norm::Layer if old => "layer_norm_epsilon",
            Norm::Layer => "layer_norm_eps",
            Norm::Rms | Norm::RmsPlusOne => "rms_norm_eps",
        };
        let mut block = self.block(config, head_size, hidden)?;
        block.experts = match self.experts {
            Some(mixture) => mixture.read(config, layers)?,
            None => None,
        };
        let rotated = latent.map_or(head_size, |latent| latent.attention.rotated);
        self.fill_layers(config, &mut block, layers, (rotated, positions))?;
        if let (Some(latent), Positions::Rotary(rules)) = (latent, self.positions) {
            let factor = rope::factor_of_products(config, rules)?;
            block.attention_scale = Some(factor / f64::from(head_size).sqrt());
            block.latent = Some(latent.attention);
        }
        let is_trained = matches!(self.positions, Positions::Trained);
        block.learned_positions = is_trained.then_some(positions);
        // A limit of training is none of a model that is longer, or was drawn in another way.
        let context = match is_trained {
            true => positions,
            false => rope_scaling::longest(&block.rotary, positions).min(MOST_POSITIONS),
        };
        let deviation = config.real("initializer_range")?;
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
            norm_epsilon: config.real(epsilon)?,
            initializer_range: deviation.clamp(LEAST_DEVIATION, 1.0),
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
        let sequential =
            self.placement == Placement::Parallel && !config.flag("use_parallel_residual")?;
        let gemma = self.layers == Layers::Gemma3;
        let unscaled = self.naming == Naming::Gpt2 && !config.flag("scale_attn_weights")?;
        let attention_scale = match gemma {
            true => Some(f64::from(config.number("query_pre_attn_scalar")?).sqrt().recip()),
            false => unscaled.then_some(1.0),
        };
        let is_normed = config.switch(self.normed)?;
        Ok(Block {
            head_size: Some(head_size),
            norm: self.norm,
            placement: if sequential { Placement::Before } else { self.placement },
            query_key_norm: if is_normed { self.query_key_norm } else { QueryKeyNorm::None },
            biases: Biases {
                query_key_value: config.switch(self.query_key_value_biased)?,
                attention_output: config.switch(self.attention_output_biased)?,
                feed_forward: config.switch(self.feed_forward_biased)?,
            },
            activation: self.activation(config)?,
            ungated: self.ungated,
            experts: None,
            latent: None,
            sinks: self.sinks,
            attention_scale,
            embedding_scale: gemma.then_some(f64::from(hidden).sqrt()),
            learned_positions: None,
            tied: config.flag("tie_word_embeddings")?,
            rotary: Vec::new(),
            layers: Vec::new(),
        })
    }

    fn activation(&self, config: &Config<'_>) -> Result<Activation, ConfigJsonError> {
        if self.naming == Naming::GptOss {
            for (key, needed) in [("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)] {
                if config.real(key)? != needed {
                    return Err(config.unsupported(key, &format!("it must be {needed}")));
                }
            }
            return Ok(Activation::ClampedSwiglu);
        }
        let key = match (self.layers, self.naming) {
            (Layers::Gemma3, _) => "hidden_activation",
            (_, Naming::Gpt2) => "activation_function",
            _ => "hidden_act",
        };
        match config.text(key)?.as_str() {
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
        (rotated, positions): (u32, u32),
    ) -> Result<(), ConfigJsonError> {
        let Positions::Rotary(rules) = self.positions else {
            block.layers = vec![LayerAttention { rotary: None, window: None }; layers as usize];
            return Ok(());
        };
        let has_rope = config.has("rope_parameters") || config.has("rope_scaling");
        if self.naming == Naming::GptOss && !has_rope {
            // The class has a yarn of its own then, which no file of a real model leaves to it.
            return Err(config.unsupported("rope_parameters", "name its rope_type in full"));
        }
        block.rotary = rope::rotaries(config, rules, rotated, positions)?;
        let windows = self.windows(config, layers)?;
        let rotates = match self.layers {
            Layers::SmolLm3 => config.rotating_layers(layers)?,
            _ => vec![true; layers as usize],
        };
        let layer = |(window, rotates): (Option<u32>, bool)| LayerAttention {
            rotary: rotates.then_some(u8::from(rules.by_layer_type && window.is_some())),
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
        let count = layers as usize;
        let mut window = config.optional_number("sliding_window")?;
        let is_off = match self.layers {
            Layers::Qwen | Layers::Qwen2Moe | Layers::SmolLm3 | Layers::WindowedIf => {
                !config.flag("use_sliding_window")?
            }
            Layers::Full | Layers::Windowed | Layers::Gemma3 | Layers::GptOss => false,
        };
        if is_off {
            window = None;
        }
        let applies: Vec<bool> = match self.layers {
            Layers::Full => return Ok(vec![None; count]),
            Layers::Windowed | Layers::WindowedIf => {
                config.sliding_layers(layers, |_| window.is_some())?
            }
            Layers::SmolLm3 => {
                let rotates = config.rotating_layers(layers)?;
                let unrotated = |layer| window.is_some() && !rotates[layer as usize];
                config.sliding_layers(layers, unrotated)?
            }
            Layers::Qwen => {
                let from = config.number("max_window_layers")?;
                config.sliding_layers(layers, |layer| window.is_some() && layer >= from)?
            }
            Layers::Qwen2Moe => {
                let end = config.number("max_window_layers")?;
                let has = |layer: u32| window.is_some() && layer.is_multiple_of(2) && layer < end;
                config.sliding_layers(layers, has)?
            }
            Layers::GptOss => config.sliding_layers(layers, |layer| layer.is_multiple_of(2))?,
            Layers::Gemma3 => {
                let period = config.size("sliding_window_pattern", u32::MAX)?;
                config.sliding_layers(layers, |layer| !(layer + 1).is_multiple_of(period))?
            }
        };
        if window.is_none() && applies.contains(&true) {
            let remedy = "layers with sliding_attention need a window: give its length, and \
                          use_sliding_window where the family has that key, or full_attention in \
                          layer_types";
            return Err(config.unsupported("sliding_window", remedy));
        }
        Ok(applies.into_iter().map(|applies| window.filter(|_| applies)).collect())
    }
}
