//! A model's folder with a tokenizer of bytes, and functions that several tests use.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use shoal_data::pack::Row;
use shoal_data::prepared::{Index, Shard, ShardEntry};
use shoal_data::{PrepareError, PrepareOptions, prepare};

/// The token `<eos>`.
pub(crate) const EOS: u32 = 256;
/// The token `<pad>`.
pub(crate) const PAD: u32 = 257;
/// The token `<bos>`.
pub(crate) const BOS: u32 = 258;

/// A template that marks the assistant's text.
pub(crate) const TEMPLATE: &str = "{% for message in messages %}<{{ message.role }}>\
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<eos>{% endgeneration %}\
{% else %}{{ message.content }}{% endif %}{% endfor %}";

/// GPT-2's character for a byte.
fn printable(byte: u8) -> char {
    let own = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if own(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|other| !own(*other)).count();
    char::from_u32(0x100 + before as u32).expect("at most U+0143")
}

/// `tokenizer.json` of a tokenizer whose token `b` is the byte `b`.
pub(crate) fn tokenizer_json(adds_bos: bool) -> Value {
    let vocabulary: BTreeMap<String, u8> =
        (0..=u8::MAX).map(|byte| (printable(byte).to_string(), byte)).collect();
    let bytes = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
    });
    let added: Vec<Value> = [("<eos>", EOS), ("<pad>", PAD), ("<bos>", BOS)]
        .into_iter()
        .map(|(content, id)| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true,
            })
        })
        .collect();
    let processor = json!({
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}},
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": bytes,
        "post_processor": if adds_bos { processor } else { Value::Null },
        "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocabulary, "merges": [],
        },
    })
}

/// Writes a file and returns its path as a text.
pub(crate) fn write(folder: &Path, name: &str, content: impl AsRef<[u8]>) -> String {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().expect("it has a folder")).expect("writable");
    fs::write(&path, content).expect("writable");
    path.to_str().expect("UTF-8").to_owned()
}

/// Writes a model's folder.
pub(crate) fn base(folder: &Path) -> PathBuf {
    let base = folder.join("base");
    write(&base, "tokenizer.json", tokenizer_json(false).to_string());
    write(&base, "config.json", json!({"vocab_size": 300}).to_string());
    let config = json!({"eos_token": "<eos>", "pad_token": {"content": "<pad>"}});
    write(&base, "tokenizer_config.json", config.to_string());
    write(&base, "chat_template.jinja", TEMPLATE);
    base
}

/// Lines of JSON with the key `text`.
pub(crate) fn texts<T: AsRef<str>>(texts: impl IntoIterator<Item = T>) -> String {
    texts.into_iter().map(|text| json!({"text": text.as_ref()}).to_string() + "\n").collect()
}

/// Options for one source.
pub(crate) fn options(base: &Path, source: &str, context: u32) -> PrepareOptions {
    PrepareOptions::new(vec![source.to_owned()], base.to_owned(), context)
}

/// Prepares to the end.
pub(crate) fn run(options: &PrepareOptions, out: &Path) -> Result<Index, PrepareError> {
    prepare(options, out, |_| ControlFlow::Continue(()))
}

/// All rows of a list of shards, their hashes checked.
pub(crate) fn rows(out: &Path, index: &Index, list: &[ShardEntry]) -> Vec<Row> {
    let mut rows = Vec::new();
    for entry in list {
        let shard = Shard::open(&Shard::path_in(out, entry), index, entry).expect("it opens");
        shard.check_hash().expect("it has its hash");
        rows.extend((0..shard.rows()).map(|row| shard.row(row).expect("a valid row")));
    }
    rows
}
