//! What the class of a tokenizer changes of `tokenizer.json`, as in `transformers` 5.

use serde_json::{Value, json};
use tokenizers::Tokenizer;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;

use super::added::Files;

/// The classes whose spaces follow a key of `tokenizer_config.json` and not `tokenizer.json`.
const BYTE_LEVEL: [&str; 3] = ["GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer"];

/// The class that `AutoTokenizer` takes for a model, if it is one that changes anything.
///
/// It is the one that `tokenizer_config.json` names, apart from families of which `transformers` knows
/// that theirs is that of the file.
fn class<'a>(files: &'a Files, config: &'a Value) -> Option<&'a str> {
    let model = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let of = |file: &'a Value| file.get("tokenizer_class").and_then(Value::as_str);
    let declared = of(&files.config).or_else(|| of(config));
    let declared = declared.map(|class| class.strip_suffix("Fast").unwrap_or(class));
    match (model, declared) {
        ("mistral" | "olmo2" | "phi3", _) => None,
        ("qwen2", Some(_)) => Some("Qwen2Tokenizer"),
        ("gpt2", None) => Some("GPT2Tokenizer"),
        (_, declared) => declared,
    }
}

/// Whether `tokenizer.json` has to be changed before it is read.
pub(super) fn rebuilds(files: &Files, config: &Value, bytes: &[u8]) -> bool {
    let byte_level = b"\"ByteLevel\"";
    class(files, config) == Some("LlamaTokenizer")
        && !bytes.windows(byte_level.len()).any(|window| window == byte_level)
}

/// Changes the JSON of a tokenizer to that of `LlamaTokenizer`, whose spaces do not depend on the
/// file.
pub(super) fn rebuild(files: &Files, tokenizer: &mut Value) {
    let flag = |key: &str| files.config.get(key).and_then(Value::as_bool);
    let prefix = flag("add_prefix_space").unwrap_or(true);
    let scheme = match (prefix, flag("legacy").unwrap_or(false)) {
        (false, _) => "never",
        (true, false) => "first",
        (true, true) => "always",
    };
    tokenizer["normalizer"] = Value::Null;
    tokenizer["pre_tokenizer"] = json!({
        "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": false,
    });
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    tokenizer["decoder"] = json!({"type": "Sequence", "decoders": decoders});
    let model = &mut tokenizer["model"];
    if model.get("type").and_then(Value::as_str).is_none_or(|kind| kind == "BPE") {
        model["fuse_unk"] = Value::Bool(true);
        model["byte_fallback"] = Value::Bool(true);
        model["dropout"] = Value::Null;
    }
}

/// Sets whether a space goes before a text, where the class decides that.
pub(super) fn set_prefix(files: &Files, config: &Value, tokenizer: &mut Tokenizer) {
    let Some(class) = class(files, config) else { return };
    let prefix = files.config.get("add_prefix_space").and_then(Value::as_bool);
    if !BYTE_LEVEL.contains(&class) {
        return;
    }
    let Some(found) = tokenizer.get_pre_tokenizer() else { return };
    let mut found = found.clone();
    let set = |part: &mut PreTokenizerWrapper| {
        if let PreTokenizerWrapper::ByteLevel(level) = part {
            level.add_prefix_space = prefix.unwrap_or(false);
        }
    };
    match &mut found {
        PreTokenizerWrapper::Sequence(parts) => parts.as_mut().iter_mut().for_each(set),
        part => set(part),
    }
    tokenizer.with_pre_tokenizer(Some(found));
}
