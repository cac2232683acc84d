//! Random values of `config.json` mean the same here as in transformers, or are refused.

use std::env;

use shoal_engine::base::{self, BaseError};
use shoal_engine::{Device, DeviceChoice, Generator};

use crate::common::{numbers, python};

/// Models a family, unless `SHOAL_CONFIGS` says otherwise; `SHOAL_SEED` chooses others.
const MODELS: &str = "3";

#[test]
fn a_random_config_means_what_it_means_in_transformers_or_is_refused() {
    let of = |name, default: &str| env::var(name).unwrap_or_else(|_| default.to_owned());
    let (count, seed) = (of("SHOAL_CONFIGS", MODELS), of("SHOAL_SEED", "1"));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let place = folder.path().to_str().expect("a plain path");
    let made = python("configs.py", &["make", place, &seed, &count]);
    let tokens: Vec<u32> = serde_json::from_value(made["tokens"].clone()).expect("tokens");
    let models = made["models"].as_object().expect("models");
    let (mut refused, mut differ) = (Vec::new(), Vec::new());
    for (name, model) in models {
        let config = &model["config"];
        let out = folder.path().join(format!("{name}-base"));
        match base::import(&folder.path().join(name), &out, false) {
            Ok(_) => {}
            Err(BaseError::Config { error, .. }) => {
                refused.push(format!("{name}: {error}"));
                continue;
            }
            Err(error) => panic!("{name}: {error}: {config}"),
        }
        let device = Device::open(DeviceChoice::Cpu, 1).expect("a CPU");
        let ours = Generator::open(&out, device).expect("a base").logits(&tokens).expect("logits");
        let theirs = numbers(&model["logits"]);
        assert_eq!(ours.len(), theirs.len(), "{name}");
        let pairs = ours.iter().zip(&theirs);
        let off = pairs.map(|(ours, theirs)| (f64::from(*ours) - theirs).abs()).fold(0.0, f64::max);
        let most = theirs.iter().fold(1.0, |most: f64, one| most.max(one.abs()));
        if off >= 1e-4 * most {
            differ.push(format!("{name}: the logits differ by {off}: {config}"));
        }
    }
    assert!(differ.is_empty(), "{differ:#?}");
    println!("{} configurations, {} refused: {refused:#?}", models.len(), refused.len());
    assert!(refused.len() * 3 < models.len(), "too many are refused: {refused:#?}");
    let has_name = |text: &String| text.contains(" = ");
    assert!(refused.iter().all(has_name), "each names its key: {refused:#?}");
}
