//! The experts of families that have some.

use shoal_protocol::limits;
use shoal_protocol::manifest::{Balance, ExpertGroups, Experts, Router};

use super::config::{Config, Switch};
use crate::base_error::ConfigJsonError;

const COEFFICIENT: &str = "router_aux_loss_coef";

/// The keys of a family's experts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mixture {
    /// The number of experts, and another spelling of the key.
    count: [&'static str; 2],
    /// Width inside an expert.
    intermediate: &'static str,
    /// Whether the weights of the chosen are divided by their sum.
    renormalised: Switch,
    /// How the layers without experts are named.
    dense_layers: DenseLayers,
    /// The expert of all tokens, if the family has one.
    shared: Option<Shared>,
    /// Whether tokens choose by sigmoids and with biases, or by the softmax.
    by_sigmoid: bool,
    /// Whether logits are computed in f32.
    is_wide: bool,
    groups: Groups,
}

/// Whether experts may be chosen within groups. Where they may, weights have a factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Groups {
    None,
    /// By `topk_method`.
    ByMethod,
    /// Always, maybe within one that has all.
    Always,
}

/// How a family names its layers without experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DenseLayers {
    /// There are none.
    None,
    /// By `decoder_sparse_step` and `mlp_only_layers`.
    Listed,
    /// By `first_k_dense_replace`.
    First,
    /// By `mlp_layer_types`, or else the first one.
    Types,
}

/// An expert of all tokens.
#[derive(Debug, Clone, Copy)]
enum Shared {
    /// Of the width of this key, times the sigmoid of a product.
    Gated(&'static str),
    /// As wide as this key says, in widths of an expert.
    Experts(&'static str),
}

pub(super) const MIXTRAL: Mixture = Mixture {
    count: ["num_local_experts", "num_experts"],
    intermediate: "intermediate_size",
    renormalised: Switch::Always,
    dense_layers: DenseLayers::None,
    shared: None,
    by_sigmoid: false,
    is_wide: false,
    groups: Groups::None,
};

pub(super) const QWEN2_MOE: Mixture =
    Mixture { shared: Some(Shared::Gated("shared_expert_intermediate_size")), ..QWEN3_MOE };

pub(super) const QWEN3_MOE: Mixture = Mixture {
    count: ["num_experts", "num_local_experts"],
    intermediate: "moe_intermediate_size",
    renormalised: Switch::Key("norm_topk_prob"),
    dense_layers: DenseLayers::Listed,
    shared: None,
    by_sigmoid: false,
    is_wide: false,
    groups: Groups::None,
};

pub(super) const OLMOE: Mixture =
    Mixture { intermediate: "intermediate_size", dense_layers: DenseLayers::None, ..QWEN3_MOE };

pub(super) const GPT_OSS: Mixture = MIXTRAL;

pub(super) const DEEPSEEK_V2: Mixture = Mixture {
    count: ["n_routed_experts", "num_experts"],
    intermediate: "moe_intermediate_size",
    renormalised: Switch::Never,
    dense_layers: DenseLayers::First,
    shared: Some(Shared::Experts("n_shared_experts")),
    by_sigmoid: false,
    is_wide: true,
    groups: Groups::ByMethod,
};

pub(super) const DEEPSEEK_V3: Mixture = Mixture {
    count: ["n_routed_experts", "num_local_experts"],
    renormalised: Switch::Key("norm_topk_prob"),
    by_sigmoid: true,
    groups: Groups::Always,
    ..DEEPSEEK_V2
};

pub(super) const GLM4_MOE_LITE: Mixture =
    Mixture { dense_layers: DenseLayers::Types, ..DEEPSEEK_V3 };

impl Mixture {
    /// The experts of a model of so many layers; `None` if no layer has some.
    pub(super) fn read(
        &self,
        config: &Config<'_>,
        layers: u32,
    ) -> Result<Option<Experts>, ConfigJsonError> {
        let key = config.spelling(self.count)?;
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
        let intermediate = config.size(self.intermediate, limits::INTERMEDIATE)?;
        let mut experts = Experts::new(count, per_token, intermediate);
        let coefficient = config.optional_real(COEFFICIENT)?.unwrap_or(0.0);
        if coefficient != 0.0 && config.flag("output_router_logits")? {
            if coefficient < 0.0 {
                return Err(config.unsupported(COEFFICIENT, "it must be a number above 0"));
            }
            (experts.balance, experts.balance_coefficient) = (Balance::Loss, coefficient);
        }
        if self.groups != Groups::None {
            experts.scale = config.real("routed_scaling_factor")?;
        }
        Ok(Some(Experts {
            router: if self.by_sigmoid { Router::Sigmoid } else { Router::Softmax },
            wide_router: self.is_wide,
            biased: self.by_sigmoid,
            renormalise: config.switch(self.renormalised)?,
            groups: self.groups(config, [count, per_token])?,
            shared_intermediate: self.shared_width(config, intermediate)?,
            shared_gated: !matches!(self.shared, Some(Shared::Experts(_))),
            dense_layers,
            ..experts
        }))
    }

    /// Width inside the expert of all tokens.
    fn shared_width(
        &self,
        config: &Config<'_>,
        intermediate: u32,
    ) -> Result<Option<u32>, ConfigJsonError> {
        match self.shared {
            None => Ok(None),
            Some(Shared::Gated(key)) => config.size(key, limits::INTERMEDIATE).map(Some),
            Some(Shared::Experts(key)) => {
                let most = limits::INTERMEDIATE / intermediate;
                Ok(Some(config.size(key, most)? * intermediate))
            }
        }
    }

    /// The groups of so many experts from which a token chooses its own.
    fn groups(
        &self,
        config: &Config<'_>,
        [experts, per_token]: [u32; 2],
    ) -> Result<Option<ExpertGroups>, ConfigJsonError> {
        let key = "topk_method";
        let method = match self.groups {
            Groups::None => return Ok(None),
            Groups::ByMethod => config.text(key)?,
            Groups::Always => "group_limited_greedy".to_owned(),
        };
        match method.as_str() {
            "greedy" => Ok(None),
            "group_limited_greedy" => {
                let count = config.size("n_group", limits::EXPERTS)?;
                let chosen = config.size("topk_group", count)?;
                let size = experts / count;
                if chosen * size < per_token {
                    let remedy =
                        format!("these groups of {size} have fewer experts than a token chooses");
                    return Err(config.unsupported("topk_group", &remedy));
                }
                Ok((chosen < count).then_some(ExpertGroups { count, chosen }))
            }
            _ => Err(config.unsupported(key, "the known ones are greedy and group_limited_greedy")),
        }
    }

    fn dense_layers(&self, config: &Config<'_>, layers: u32) -> Result<Vec<u32>, ConfigJsonError> {
        match self.dense_layers {
            DenseLayers::None => return Ok(Vec::new()),
            DenseLayers::First => {
                let first = config.number("first_k_dense_replace")?;
                return Ok((0..first.min(layers)).collect());
            }
            DenseLayers::Types => return config.dense_layers(layers),
            DenseLayers::Listed => {}
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
    use shoal_protocol::manifest::{Balance, ExpertGroups, Experts, Router};

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
    fn deepseek_has_shared_experts_first_layers_and_groups() {
        let of = |keys: Value| {
            let mut all = json!({"n_routed_experts": 8, "kv_lora_rank": 8, "q_lora_rank": null});
            for (key, value) in keys.as_object().expect("keys") {
                all[key] = value.clone();
            }
            of("deepseek_v2", all)
        };
        let experts = of(json!({"first_k_dense_replace": 2})).expect("a model").expect("experts");
        assert_eq!((experts.count, experts.renormalise, experts.scale), (8, false, 1.0));
        assert_eq!((experts.shared_intermediate, experts.shared_gated), (Some(64), false));
        assert_eq!((experts.dense_layers, experts.groups), (vec![0, 1], None));
        let groups = json!({
            "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
            "routed_scaling_factor": 16.0,
        });
        let experts = of(groups).expect("a model").expect("experts");
        assert_eq!(experts.groups, Some(ExpertGroups { count: 4, chosen: 2 }));
        assert_eq!((experts.shared_intermediate, experts.scale), (Some(32), 16.0));
        assert_eq!(of(json!({"first_k_dense_replace": 6})), Ok(None));
        for (keys, named) in [
            (json!({"topk_method": "noaux_tc"}), "topk_method"),
            (json!({"norm_topk_prob": true}), "norm_topk_prob"),
            (json!({"attention_bias": true}), "attention_bias"),
            (json!({"num_key_value_heads": 2}), "num_key_value_heads"),
            (json!({"v_head_dim": 200}), "v_head_dim"),
            (
                json!({"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}),
                "groups",
            ),
            (json!({"n_shared_experts": 0}), "n_shared_experts"),
        ] {
            let error = of(keys).expect_err(named);
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn sigmoids_come_with_biases_and_groups() {
        let latent = |keys: Value| {
            let mut all = json!({"n_routed_experts": 16, "kv_lora_rank": 8, "q_lora_rank": null, "num_experts_per_tok": 2});
            all.as_object_mut().expect("keys").extend(keys.as_object().expect("keys").clone());
            all
        };
        let experts = of("deepseek_v3", latent(json!({}))).expect("a model").expect("experts");
        assert_eq!(
            (experts.router, experts.biased, experts.wide_router),
            (Router::Sigmoid, true, true)
        );
        assert_eq!(experts.groups, Some(ExpertGroups { count: 8, chosen: 4 }));
        assert_eq!((experts.renormalise, experts.scale, experts.shared_gated), (true, 2.5, false));
        let experts =
            of("glm4_moe", json!({"num_key_value_heads": 4})).expect("a model").expect("experts");
        assert_eq!((experts.count, experts.groups, &experts.dense_layers), (128, None, &vec![0]));
        let types = ["sparse", "dense", "sparse", "dense", "sparse", "dense"];
        let keys = latent(json!({"mlp_layer_types": types, "num_key_value_heads": 4}));
        let experts = of("glm4_moe_lite", keys).expect("a model").expect("experts");
        assert_eq!(experts.dense_layers, [1, 3, 5]);
        for (family, keys, named) in [
            ("deepseek_v3", json!({"n_group": 16, "topk_group": 4}), "groups"),
            ("deepseek_v3", json!({"topk_group": 9}), "topk_group"),
            ("deepseek_v3", json!({"output_router_logits": true}), "output_router_logits"),
            (
                "glm4_moe_lite",
                json!({"mlp_layer_types": ["dense"], "num_key_value_heads": 4}),
                "mlp_layer_types",
            ),
            (
                "glm4_moe_lite",
                json!({"mlp_layer_types": [1, 2, 3, 4, 5, 6], "num_key_value_heads": 4}),
                "mlp_layer_types",
            ),
        ] {
            let error = of(family, latent(keys)).expect_err(named);
            assert!(error.contains(named), "{error}");
        }
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
