//! The section `[optimizer]` of `run.toml`.

use shoal_protocol::manifest::Optimizer;
use toml::{Table, Value};

/// All keys in the order in which they are written, with what they mean.
const KEYS: [(&str, &str); 19] = [
    ("kind", "the update rule"),
    ("learning_rate", "the highest rate, after the warm-up"),
    ("rest_learning_rate", "the highest rate of weights that are no matrices of layers: AdamW's"),
    ("rate_scale", "factor by a matrix's extents: \"original\" or \"match_rms_adamw\""),
    ("schedule", "the rate after the warm-up: \"cosine\", \"linear\", \"wsd\" or \"constant\""),
    ("final_learning_rate", "the rate of the last step"),
    ("warmup_steps", "steps of the warm-up"),
    ("decay_steps", "steps at the end in which the rate falls"),
    ("momentum", "decay of the sum of gradients"),
    ("nesterov", "true looks ahead along the momentum"),
    ("beta1", "decay of the first moment"),
    ("beta2", "decay of the second moment"),
    ("decay_exponent", "step t takes t to the power of minus this of the newest squares"),
    ("epsilon", "added to the root of the second moment"),
    ("scale_epsilon", "the least size that weights are taken to have"),
    ("clip_threshold", "the largest root mean square of an update at a rate of 1"),
    ("trust_coefficient", "norm of an update over that of its weights"),
    ("weight_decay", "not applied to the norms' weights"),
    ("gradient_clip", "largest norm of the whole gradient; 0 turns clipping off"),
];

/// The section in TOML, without its heading: the keys of its rule and of its schedule.
pub(crate) fn to_toml(optimizer: &Optimizer) -> String {
    let values = Table::try_from(optimizer).expect("its numbers are within their ranges");
    let line = |(key, comment): (&str, &str)| {
        let text = match values.get(key)? {
            Value::Float(number) => format!("{key} = {number:?}"),
            other => format!("{key} = {other}"),
        };
        Some(format!("{text:<30} # {comment}"))
    };
    KEYS.into_iter().filter_map(line).collect::<Vec<_>>().join("\n")
}
