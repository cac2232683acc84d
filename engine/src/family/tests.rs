//! Tests of what `config.json` means.

use serde_json::{Value, json};

use super::describe;
use crate::model::layer_table::share_of_tokens;
use crate::model::parameters::{Parameter, all_parameters};
use shoal_protocol::manifest::{Model, RotaryScaling};

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

#[test]
fn limits_of_training_are_none_of_a_model() {
    let mut config = config();
    config["max_position_embeddings"] = 10_485_760.into();
    config["initializer_range"] = 0.into();
    let model = describe(&config).expect("a model that is longer than any run").model;
    model.check().expect("within the limits of a run");
    assert_eq!(model.context, super::MOST_POSITIONS);
    // A table of trained positions cannot be cut.
    let gpt2 = json!({
        "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 300,
        "n_positions": 10_485_760,
    });
    let model = describe(&gpt2).expect("a model").model;
    assert!(model.check().is_err());
}

/// A small model of a family, with some keys.
fn of(family: &str, keys: &[(&str, Value)]) -> Result<Model, String> {
    let mut config = config();
    config["model_type"] = family.into();
    for (old, new) in [("n_embd", 64), ("n_head", 4), ("n_layer", 2), ("n_positions", 128)] {
        config[old] = new.into();
    }
    for key in ["num_key_value_heads", "head_dim"] {
        config[key] = if key == "head_dim" { 16.into() } else { 4.into() };
    }
    for (key, value) in keys {
        config[*key] = value.clone();
    }
    describe(&config).map(|found| found.model).map_err(|error| error.to_string())
}

#[test]
fn a_key_that_the_class_does_not_read_changes_nothing() {
    for (family, key, value) in [
        ("llama", "sliding_window", json!(4)),
        ("olmo2", "sliding_window", json!(4)),
        ("gpt_neox", "sliding_window", json!(4)),
        ("llama", "partial_rotary_factor", json!(0.5)),
        ("qwen2", "partial_rotary_factor", json!(0.5)),
        ("gemma3_text", "partial_rotary_factor", json!(0.5)),
        ("llama", "rotary_pct", json!(0.5)),
        ("llama", "rotary_emb_base", json!(77.0)),
        ("gpt_neox", "rope_theta", json!(77.0)),
        ("gpt_neox", "partial_rotary_factor", json!(1.0)),
        ("mistral", "use_sliding_window", json!(false)),
        ("mistral", "attention_bias", json!(true)),
        ("gpt2", "scale_attn_by_inverse_layer_idx", Value::Null),
        ("phi3", "layer_types", json!(["full_attention", "full_attention"])),
        ("llama", "final_logit_softcapping", json!(30.0)),
    ] {
        let plain = of(family, &[]).expect(family);
        assert_eq!(of(family, &[(key, value)]), Ok(plain), "{family}: {key}");
    }
}

#[test]
fn an_absent_window_is_that_of_the_class() {
    let window = |model: Model| model.layer_attention(0).window;
    for (family, absent) in [("mistral", Some(4096)), ("gemma3_text", Some(4096)), ("phi3", None)] {
        assert_eq!(window(of(family, &[]).expect(family)), absent, "{family}");
    }
    let none = ("sliding_window", Value::Null);
    assert_eq!(window(of("mistral", std::slice::from_ref(&none)).expect("no windows")), None);
    let error = of("gemma3_text", &[none]).expect_err("layers with a window of no length");
    assert!(error.contains("sliding_window = null"), "{error}");
    let qwen = [("use_sliding_window", json!(true)), ("max_window_layers", json!(0))];
    assert_eq!(window(of("qwen2", &qwen).expect("windows")), Some(4096));
    let types = json!(["sliding_attention", "full_attention"]);
    let error = of("qwen2", &[("layer_types", types)]).expect_err("windows that are off");
    assert!(error.contains("use_sliding_window"), "{error}");
}

#[test]
fn of_two_spellings_of_rotary_embeddings_one_counts() {
    let new = ("rope_parameters", json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}));
    let old = ("rope_scaling", json!({"type": "linear", "factor": 3.0}));
    let theta = ("rope_theta", json!(7.0));
    let rotary = |family, keys: &[(&str, Value)]| of(family, keys).expect(family).rotaries();
    let both = rotary("llama", &[new.clone(), old.clone(), theta.clone()]);
    assert_eq!(both[0].theta, 7.0);
    assert_eq!(both[0].scaling, RotaryScaling::Linear { factor: 3.0 });
    let empty = ("rope_scaling", json!({}));
    assert_eq!(rotary("llama", &[new, empty, theta.clone()])[0].theta, 5.0);
    // Gemma adds the one to the other.
    let nested =
        json!({"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 6.0}});
    let gemma = rotary("gemma3_text", &[("rope_parameters", nested), old, theta]);
    assert_eq!((gemma[0].theta, gemma[1].theta), (5.0, 6.0));
    assert_eq!(gemma[0].scaling, RotaryScaling::Linear { factor: 3.0 });
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    });
    let outer = ("original_max_position_embeddings", json!(32));
    let found = &rotary("llama", &[("rope_parameters", llama3), outer])[0].scaling;
    let RotaryScaling::Llama3 { original_positions, .. } = found else {
        panic!("{found:?}");
    };
    assert_eq!(*original_positions, 32);
    let partly = [
        ("rope_parameters", json!({"rope_type": "linear", "factor": 2.0})),
        ("partial_rotary_factor", json!(0.5)),
    ];
    let error = of("llama", &partly).expect_err("no such model");
    assert!(error.contains("partial_rotary_factor = 0.5"), "{error}");
}

/// A model with these parameters of its rotary embedding.
fn scaled(family: &str, rope: Value, keys: &[(&str, Value)]) -> Result<Model, String> {
    of(family, &[&[("rope_parameters", rope)], keys].concat())
}

#[test]
fn the_factor_of_yarn_on_attention_is_given_or_follows() {
    let found = |more: Value| {
        let mut rope =
            json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
        rope.as_object_mut().expect("keys").extend(more.as_object().expect("keys").clone());
        scaled("llama", rope, &[]).expect("yarn").rotaries()[0].scaling.attention_factor()
    };
    let of = |scale: f64| 0.1 * scale * 4f64.ln() + 1.0;
    assert_eq!(found(json!({})), of(1.0));
    assert_eq!(found(json!({"mscale": 0.7, "mscale_all_dim": 0})), of(1.0));
    assert_eq!(found(json!({"mscale": 0.7, "mscale_all_dim": 1.3})), of(0.7) / of(1.3));
    assert_eq!(found(json!({"mscale": 0.7, "attention_factor": 1.5})), 1.5);
    assert_eq!(found(json!({"factor": 0.5})), 1.0);
    let nested = json!({"full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": false}});
    let error = scaled("gemma3_text", nested, &[]).expect_err("not read there");
    assert!(error.contains("full_attention.truncate = false"), "{error}");
}

#[test]
fn dynamic_embeddings_stretch_the_positions_of_a_model() {
    let dynamic = json!({"rope_type": "dynamic", "factor": 2.5});
    let model = scaled("llama", dynamic, &[]).expect("dynamic");
    assert_eq!(model.context, 320);
    let scaling = &model.rotaries()[0].scaling;
    assert_eq!(*scaling, RotaryScaling::Dynamic { factor: 2.5, original_positions: 128 });
    let error = scaled("llama", json!({"rope_type": "dynamic"}), &[]).expect_err("no factor");
    assert!(error.contains("rope_parameters.factor"), "{error}");
}

#[test]
fn longrope_has_a_factor_for_each_pair_of_channels() {
    let rope = |name: &str, count: usize| json!({"rope_type": name, "short_factor": vec![1.0; count], "long_factor": vec![2.0; count]});
    let original = ("original_max_position_embeddings", json!(32));
    let error = scaled("llama", rope("longrope", 7), std::slice::from_ref(&original));
    let error = error.expect_err("heads have 16 channels");
    assert!(
        error.contains("rope_parameters.short_factor") && error.contains("8 numbers"),
        "{error}"
    );
    // Phi-3 has a number of positions where config.json has none, and older names.
    for (name, keys, expected) in [
        ("longrope", vec![original.clone()], 32),
        ("su", vec![original], 32),
        ("yarn", vec![], 4096),
    ] {
        let model = scaled("phi3", rope(name, 8), &keys).expect(name);
        let RotaryScaling::Longrope { original_positions, attention_factor, .. } =
            model.rotaries()[0].scaling
        else {
            panic!("{name}: {model:?}")
        };
        assert_eq!(original_positions, expected, "{name}");
        let stretched = if expected == 32 { (1.0 + 4f64.ln() / 32f64.ln()).sqrt() } else { 1.0 };
        assert_eq!(attention_factor, stretched, "{name}");
    }
    let error = scaled("phi3", json!({"rope_type": "linear", "factor": 2.0}), &[]);
    assert!(error.expect_err("not its class's").contains("default and longrope"));
}

/// Models as their own files describe them, and the numbers of weights that their authors state: 30.5, 20.9 and 15.7 billion.
/// 3.4, 4.2 and 2.7 billion work on a token, embedding and head included.
#[test]
fn published_mixtures_have_their_published_sizes() {
    let published: Value = serde_json::from_str(include_str!("published.json")).expect("JSON");
    for published in published.as_array().expect("a list") {
        let config = &published["config"];
        let stated = |key: &str| published[key].as_f64().expect("a number");
        let model = describe(config).expect("a model").model;
        model.check().expect("a run may have it");
        let all = all_parameters(&model);
        let sum = |part: &dyn Fn(&Parameter) -> f64| all.iter().map(part).sum::<f64>() / 1e9;
        let found = sum(&|one| one.len() as f64);
        assert!((found - stated("billions")).abs() < 0.05, "{}: {found}", config["model_type"]);
        let found = sum(&|one| one.len() as f64 * share_of_tokens(&model, &one.name));
        assert!(
            (found - stated("billions_of_token")).abs() < 0.06,
            "{}: {found} a token",
            config["model_type"]
        );
    }
}
