//! Conversion of text to tokens and back. All knowledge of tokenizers is here: a Hugging Face
//! `tokenizer.json` would be another variant of the manifest's `Tokenizer`.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use shoal_protocol::manifest::Tokenizer;

/// The tokens of a text.
#[must_use]
pub fn encode(tokenizer: Tokenizer, text: &[u8]) -> Vec<u32> {
    match tokenizer {
        Tokenizer::Bytes => text.iter().map(|byte| u32::from(*byte)).collect(),
    }
}

/// The text of tokens; a token outside the vocabulary is omitted.
#[must_use]
pub fn decode(tokenizer: Tokenizer, tokens: &[u32]) -> Vec<u8> {
    match tokenizer {
        Tokenizer::Bytes => tokens.iter().filter_map(|token| u8::try_from(*token).ok()).collect(),
    }
}

/// A `tokenizer.json` with which `transformers` produces the same tokens.
pub(crate) fn tokenizer_json(tokenizer: Tokenizer) -> Value {
    match tokenizer {
        Tokenizer::Bytes => {
            let vocabulary: BTreeMap<String, u8> =
                (0..=u8::MAX).map(|byte| (printable(byte).to_string(), byte)).collect();
            let bytes = json!({
                "type": "ByteLevel",
                "add_prefix_space": false,
                "trim_offsets": false,
                "use_regex": false,
            });
            json!({
                "version": "1.0",
                "truncation": null,
                "padding": null,
                "added_tokens": [],
                "normalizer": null,
                "pre_tokenizer": bytes,
                "post_processor": null,
                "decoder": bytes,
                "model": {
                    "type": "BPE",
                    "dropout": null,
                    "unk_token": null,
                    "continuing_subword_prefix": null,
                    "end_of_word_suffix": null,
                    "fuse_unk": false,
                    "byte_fallback": false,
                    "ignore_merges": false,
                    "vocab": vocabulary,
                    "merges": [],
                },
            })
        }
    }
}

/// The accompanying file for `AutoTokenizer`.
pub(crate) fn tokenizer_config_json(context: u32) -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": false,
        "model_max_length": context,
    })
}

/// GPT-2's character for a byte: printable bytes of Latin-1 stand for themselves, the others for
/// the characters from U+0100 on, in order.
fn printable(byte: u8) -> char {
    let stands_for_itself = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if stands_for_itself(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|other| !stands_for_itself(*other)).count();
    char::from_u32(0x100 + before as u32).expect("at most U+0143")
}
