//! A tokenizer is more than `tokenizer.json`.

use std::path::Path;

use serde_json::{Value, json};
use shoal_data::tokenizer::{TextTokenizer, TokenizerError};

use crate::common::{base, write};

/// The tokenizer of a folder with these files.
fn load(folder: &Path, files: &[(&str, Value)]) -> TextTokenizer {
    let base = base(folder);
    for name in ["added_tokens.json", "special_tokens_map.json"] {
        let _ = std::fs::remove_file(base.join(name));
    }
    for (name, content) in files {
        write(&base, name, content.to_string());
    }
    TextTokenizer::load(&base).expect("it loads")
}

/// `tokenizer_config.json` with these keys besides its own.
fn config(keys: Value) -> (&'static str, Value) {
    let mut config = json!({"eos_token": "<eos>", "pad_token": "<pad>"});
    for (key, value) in keys.as_object().expect("an object") {
        config[key] = value.clone();
    }
    ("tokenizer_config.json", config)
}

#[test]
fn added_tokens_are_those_of_all_files() {
    let folder = tempfile::tempdir().expect("writable");
    let new = json!({"content": "<n>", "lstrip": false, "rstrip": false, "normalized": false,
                     "single_word": false, "special": true});
    for files in [
        vec![config(json!({"added_tokens_decoder": {"259": new}}))],
        vec![("added_tokens.json", json!({"<n>": 259}))],
        vec![config(json!({"extra_special_tokens": ["<n>"]}))],
        vec![config(json!({"additional_special_tokens": ["<n>"]}))],
        vec![("special_tokens_map.json", json!({"additional_special_tokens": ["<n>"]}))],
        vec![config(json!({"image_token": "<n>"}))],
    ] {
        let tokenizer = load(folder.path(), &files);
        assert_eq!(tokenizer.encode("a<n>", false).expect("a text"), [97, 259], "{files:?}");
    }
    let tokenizer = load(folder.path(), &[config(json!({"eos_token": "<n>"}))]);
    assert_eq!(tokenizer.eos(), Some(259));
    // Without tokens of their own they change nothing.
    let tokenizer = load(folder.path(), &[]);
    assert_eq!(tokenizer.encode("<n>", false).expect("a text"), [60, 110, 62]);
}

#[test]
fn older_files_count_without_added_tokens_decoder() {
    let folder = tempfile::tempdir().expect("writable");
    let map = ("special_tokens_map.json", json!({"eos_token": {"content": "<bos>"}}));
    let tokenizer = load(folder.path(), &[config(json!({})), map.clone()]);
    assert_eq!(tokenizer.eos(), Some(258));
    let tokenizer = load(folder.path(), &[config(json!({"added_tokens_decoder": {}})), map]);
    assert_eq!(tokenizer.eos(), Some(256));
}

#[test]
fn flags_of_added_tokens_count() {
    let folder = tempfile::tempdir().expect("writable");
    let new = json!({"content": "<n>", "lstrip": true, "rstrip": true, "special": true});
    let files = [config(json!({"added_tokens_decoder": {"259": new}}))];
    let tokenizer = load(folder.path(), &files);
    assert_eq!(tokenizer.encode("a <n> b", false).expect("a text"), [97, 259, 98]);
}

#[test]
fn a_space_goes_before_a_text_where_the_class_says_so() {
    let folder = tempfile::tempdir().expect("writable");
    let first = |class: &str, model: &str| {
        let keys = json!({"tokenizer_class": class, "add_prefix_space": true});
        let model = ("config.json", json!({"vocab_size": 300, "model_type": model}));
        load(folder.path(), &[config(keys), model]).encode("a", false).expect("a text")[0]
    };
    assert_eq!(first("GPT2Tokenizer", "gpt2"), 32);
    assert_eq!(first("GPT2TokenizerFast", "llama"), 32);
    // Of these, transformers takes the file as it is.
    assert_eq!(first("PreTrainedTokenizerFast", "llama"), 97);
    assert_eq!(first("GPT2Tokenizer", "olmo2"), 97);
}

#[test]
fn a_pointer_and_other_kinds_of_tokenizers_are_named() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let error = |base: &Path| TextTokenizer::load(base).expect_err("no tokenizer");
    write(&base, "tokenizer.json", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n");
    assert!(matches!(error(&base), TokenizerError::Pointer { .. }));
    std::fs::remove_file(base.join("tokenizer.json")).expect("it is there");
    write(&base, "tokenizer.model", "sentencepiece");
    let error = error(&base).to_string();
    assert!(error.contains("has tokenizer.model and no tokenizer.json: load it with"), "{error}");
}
