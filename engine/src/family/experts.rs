//! The experts of families that have some.

use shoal_protocol::limits;
use shoal_protocol::manifest::{Balance, Experts, Router};

use super::config::Config;
use crate::base_error::ConfigJsonError;

const COEFFICIENT: &str = "router_aux_loss_coef";

/// The keys of a family's experts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mixture {
    /// The number of experts, and another spelling of the key.
    count: [&'static str; 2],
    /// Width inside an expert.
    intermediate: &'static str,
    /// Whether the weights of the chosen are divided by their sum; without a key they always are.
    renormalise: Option<&'static str>,
    /// Whether `decoder_sparse_step` and `mlp_only_layers` name layers without experts.
    has_dense_layers: bool,
    /// Width inside an expert of all tokens, if the family has one.
    shared: Option<&'static str>,
}

pub(super) const MIXTRAL: Mixture = Mixture {
    count: ["num_local_experts", "num_experts"],
    intermediate: "intermediate_size",
    renormalise: None,
    has_dense_layers: false,
    shared: None,
};

pub(super) const QWEN2_MOE: Mixture =
    Mixture { shared: Some("shared_expert_intermediate_size"), ..QWEN3_MOE };

pub(super) const QWEN3_MOE: Mixture = Mixture {
    count: ["num_experts", "num_local_experts"],
    intermediate: "moe_intermediate_size",
    renormalise: Some("norm_topk_prob"),
    has_dense_layers: true,
    shared: None,
};

pub(super) const OLMOE: Mixture =
    Mixture { intermediate: "intermediate_size", has_dense_layers: false, ..QWEN3_MOE };

pub(super) const GPT_OSS: Mixture = MIXTRAL;

impl Mixture {
    /// The experts of a model of so many layers; `None` if no layer has some.
    pub(super) fn read(
        &self,
        config: &Config<'_>,
        layers: u32,
    ) -> Result<Option<Experts>, ConfigJsonError> {
        let [key, other] = self.count;
        let key = match (config.has(key), config.has(other)) {
            (false, true) => other,
            (true, true) if config.get(key) != config.get(other) => {
                let remedy =
                    format!("{other} is another spelling of the key and has another value");
                return Err(config.unsupported(key, &remedy));
            }
            _ => key,
        };
        let count = config.size(key, limits::EXPERTS)?;
        let per_token = config.size("num_experts_per_tok", u32::MAX)?;
        if per_token > count {
            let remedy = format!("a token cannot choose more than the {count} experts of {key}");
            return Err(config.unsupported("num_experts_per_tok", &remedy));
        }
        let dense_layers = self.dense_layers(config, layers)?;
        if dense_layers.len() == layers as usize {
            return Ok(None);
        }
        let width = |key| config.size(key, limits::INTERMEDIATE);
        let coefficient = config.real(COEFFICIENT)?;
        let balanced = config.flag("output_router_logits")? && coefficient != 0.0;
        if balanced && coefficient < 0.0 {
            return Err(config.unsupported(COEFFICIENT, "it must be a number above 0"));
        }
        Ok(Some(Experts {
            count,
            per_token,
            intermediate: width(self.intermediate)?,
            router: Router::Softmax,
            renormalise: self.renormalise.map_or(Ok(true), |key| config.flag(key))?,
            shared_intermediate: self.shared.map(width).transpose()?,
            dense_layers,
            balance: if balanced { Balance::Loss } else { Balance::None },
            balance_rate: Experts::BALANCE_RATE,
            balance_coefficient: if balanced { coefficient } else { Experts::BALANCE_COEFFICIENT },
        }))
    }

    fn dense_layers(&self, config: &Config<'_>, layers: u32) -> Result<Vec<u32>, ConfigJsonError> {
        if !self.has_dense_layers {
            return Ok(Vec::new());
        }
        let step = config.size("decoder_sparse_step", u32::MAX)?;
        let named = config.layer_numbers("mlp_only_layers")?;
        let is_dense = |layer: &u32| named.contains(layer) || !(layer + 1).is_multiple_of(step);
        Ok((0..layers).filter(is_dense).collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use shoal_protocol::manifest::{Balance, Experts};

    use crate::family::describe;

    /// The experts of a small model of a family, with some keys.
    fn of(family: &str, keys: Value) -> Result<Option<Experts>, String> {
        let mut config = json!({
            "model_type": family, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6,
            "num_key_value_heads": 4, "max_position_embeddings": 128, "intermediate_size": 128,
            "vocab_size": 300, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
        });
        for (key, value) in keys.as_object().expect("keys") {
            config[key] = value.clone();
        }
        let described = describe(&config).map_err(|error| error.to_string())?;
        described.model.check().map_err(|error| error.to_string())?;
        Ok(described.model.block.experts)
    }

    const ALL: [&str; 4] = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"];

    #[test]
    fn both_spellings_of_the_number_of_experts_are_read() {
        for family in ["mixtral", "qwen3_moe", "olmoe"] {
            for keys in [json!({"num_experts": 5}), json!({"num_local_experts": 5})] {
                let experts = of(family, keys).expect(family).expect("experts");
                assert_eq!((experts.count, experts.per_token), (5, 2), "{family}");
            }
            let keys = json!({"num_experts": 5, "num_local_experts": 6});
            let error = of(family, keys).expect_err("two numbers");
            assert!(error.contains("num_") && error.contains("another spelling"), "{error}");
        }
        // A class that does not read the other spelling.
        let other = of("qwen2_moe", json!({"num_local_experts": 5})).expect("the default");
        assert_eq!(other.map(|experts| experts.count), Some(60));
    }

    #[test]
    fn each_family_has_its_widths_and_weights() {
        let facts = |family, keys| {
            let experts = of(family, keys).expect(family).expect("experts");
            (experts.intermediate, experts.renormalise, experts.shared_intermediate)
        };
        assert_eq!(facts("mixtral", json!({"norm_topk_prob": false})), (128, true, None));
        assert_eq!(facts("olmoe", json!({})), (128, false, None));
        assert_eq!(facts("qwen3_moe", json!({"norm_topk_prob": true})), (32, true, None));
        let shared = json!({"shared_expert_intermediate_size": 48});
        assert_eq!(facts("qwen2_moe", shared), (32, false, Some(48)));
    }

    #[test]
    fn layers_without_experts_are_those_of_transformers() {
        let dense = |keys| of("qwen3_moe", keys).expect("a model").map(|found| found.dense_layers);
        assert_eq!(dense(json!({"mlp_only_layers": null})), Some(vec![]));
        assert_eq!(dense(json!({"decoder_sparse_step": 2})), Some(vec![0, 2, 4]));
        assert_eq!(dense(json!({"mlp_only_layers": [3, 0, 9]})), Some(vec![0, 3]));
        let both = json!({"decoder_sparse_step": 3, "mlp_only_layers": [2]});
        assert_eq!(dense(both), Some(vec![0, 1, 2, 3, 4]));
        assert_eq!(dense(json!({"decoder_sparse_step": 7})), None);
        for wrong in [json!({"mlp_only_layers": [1.5]}), json!({"mlp_only_layers": 3})] {
            let error = of("qwen3_moe", wrong).expect_err("no numbers");
            assert!(error.contains("mlp_only_layers"), "{error}");
        }
        let error = of("qwen2_moe", json!({"decoder_sparse_step": 0})).expect_err("no step");
        assert!(error.contains("decoder_sparse_step = 0"), "{error}");
    }

    #[test]
    fn the_loss_that_balances_experts_is_that_of_the_keys() {
        let balance = |family, keys| {
            let experts = of(family, keys)?.expect("experts");
            Ok((experts.balance, experts.balance_coefficient))
        };
        for family in ALL {
            let none = (Balance::None, Experts::BALANCE_COEFFICIENT);
            for keys in [
                json!({}),
                json!({"router_aux_loss_coef": 0.5}),
                json!({"output_router_logits": true, "router_aux_loss_coef": 0.0}),
            ] {
                assert_eq!(balance(family, keys), Ok(none), "{family}");
            }
            let keys = json!({"output_router_logits": true, "router_aux_loss_coef": 0.5});
            assert_eq!(balance(family, keys), Ok((Balance::Loss, 0.5)), "{family}");
            let default = if family == "olmoe" { 0.01 } else { 0.001 };
            let keys = json!({"output_router_logits": true});
            assert_eq!(balance(family, keys), Ok((Balance::Loss, default)), "{family}");
            let keys = json!({"output_router_logits": true, "router_aux_loss_coef": -0.5});
            let error: Result<_, String> = balance(family, keys);
            let error = error.expect_err("it would unbalance");
            assert!(error.contains("coef"), "{error}");
        }
    }

    #[test]
    fn what_is_not_computed_is_refused() {
        for family in ALL {
            let count = if family == "mixtral" { "num_local_experts" } else { "num_experts" };
            let mut keys = json!({"num_experts_per_tok": 9});
            keys[count] = 8.into();
            let error = of(family, keys).expect_err("more than there are");
            let named = format!(
                "num_experts_per_tok = 9, which is not supported: a token cannot \
                                 choose more than the 8 experts of {count}"
            );
            assert!(error.contains(&named), "{error}");
        }
        let error = of("mixtral", json!({"router_jitter_noise": 0.1})).expect_err("noise");
        assert!(error.contains("router_jitter_noise = 0.1"), "{error}");
        let error = of("olmoe", json!({"clip_qkv": 8.0})).expect_err("a clip");
        assert!(error.contains("clip_qkv = 8.0"), "{error}");
    }
}
