//! The tokens that a model's folder adds to those of `tokenizer.json`, as `AutoTokenizer` adds them.

use std::collections::BTreeMap;

use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

use super::OutOfRange;

/// Most tokens that are added. The library compares each with all others.
const MOST_ADDED: usize = 1 << 14;

/// The tokens with a name of their own in every tokenizer.
pub(super) const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The files beside `tokenizer.json` that name tokens; null where there is none.
pub(super) struct Files {
    /// `tokenizer_config.json`.
    pub(super) config: Value,
    /// `special_tokens_map.json`.
    pub(super) map: Value,
    /// `added_tokens.json`.
    pub(super) added: Value,
}

impl Files {
    /// The values of a key that names special tokens, the one that counts first. With
    /// `added_tokens_decoder`, `tokenizer_config.json` says everything; without, the older files go
    /// before it.
    fn value(&self, key: &str) -> Option<&Value> {
        let of = |file: &'_ Value| file.get(key).is_some_and(|value| !value.is_null());
        let files = match self.config.get("added_tokens_decoder") {
            Some(_) => [&self.config, &Value::Null],
            None => [&self.map, &self.config],
        };
        files.into_iter().find(|file| of(file)).and_then(|file| file.get(key))
    }

    /// All special tokens with a name, such as `eos_token`: their texts and how they are found.
    fn named(&self) -> Vec<(String, AddedToken)> {
        let mut names: Vec<&str> = NAMED.to_vec();
        for file in [&self.config, &self.map] {
            let keys = file.as_object().into_iter().flat_map(|file| file.keys());
            names.extend(keys.map(String::as_str).filter(|key| key.ends_with("_token")));
        }
        names.dedup();
        let mut seen = Vec::new();
        for name in names {
            if !seen.iter().any(|(known, _)| known == name)
                && let Some(token) = self.value(name).and_then(special)
            {
                seen.push((name.to_owned(), token));
            }
        }
        // As a dictionary, extra tokens have names too.
        if let Some(Value::Object(extra)) = self.value("extra_special_tokens") {
            let tokens = extra.iter().filter_map(|(name, token)| Some((name, special(token)?)));
            seen.extend(tokens.map(|(name, token)| (name.clone(), token)));
        }
        seen
    }

    /// The texts of the special tokens by their names.
    pub(super) fn special(&self) -> BTreeMap<String, String> {
        self.named().into_iter().map(|(name, token)| (name, token.content)).collect()
    }

    /// Tokens without a name that are special nevertheless.
    fn extra(&self) -> Vec<AddedToken> {
        let keys = ["extra_special_tokens", "additional_special_tokens"];
        let lists = keys.map(|key| self.value(key).and_then(Value::as_array));
        let list = lists.into_iter().flatten().find(|list| !list.is_empty());
        list.into_iter().flatten().filter_map(special).collect()
    }

    /// The tokens with ids, by `added_tokens_decoder` or else `added_tokens.json`, in their order.
    fn listed(&self) -> Vec<(u64, AddedToken)> {
        let mut listed: Vec<(u64, AddedToken)> = match self.config.get("added_tokens_decoder") {
            Some(decoder) => {
                let entries = decoder.as_object().into_iter().flatten();
                entries
                    .filter_map(|(id, token)| Some((id.parse().ok()?, with_flags(token)?)))
                    .collect()
            }
            None => {
                let special: Vec<String> = self
                    .named()
                    .into_iter()
                    .map(|(_, token)| token)
                    .chain(self.extra())
                    .map(|token| token.content)
                    .collect();
                let entries = self.added.as_object().into_iter().flatten();
                let token = |text: &String| {
                    let is_special = special.contains(text);
                    AddedToken::from(text.clone(), is_special).normalized(!is_special)
                };
                entries.filter_map(|(text, id)| Some((id.as_u64()?, token(text)))).collect()
            }
        };
        listed.sort_by_key(|(id, _)| *id);
        listed
    }
}

/// A token with its flags, as `added_tokens_decoder` has it.
fn with_flags(value: &Value) -> Option<AddedToken> {
    let content = value.get("content")?.as_str()?;
    let flag = |key: &str, default| value.get(key).and_then(Value::as_bool).unwrap_or(default);
    let special = flag("special", false);
    Some(
        AddedToken::from(content, special)
            .single_word(flag("single_word", false))
            .lstrip(flag("lstrip", false))
            .rstrip(flag("rstrip", false))
            .normalized(flag("normalized", !special)),
    )
}

/// A special token: a text, or an object with flags.
fn special(value: &Value) -> Option<AddedToken> {
    match value {
        Value::String(text) => Some(AddedToken::from(text.as_str(), true)),
        other => with_flags(other).map(|token| token.special(true)),
    }
}

/// Adds the tokens of the files to a tokenizer.
///
/// # Errors
/// If there are too many.
pub(super) fn complete(tokenizer: &mut Tokenizer, files: &Files) -> Result<(), Failure> {
    let known: BTreeMap<String, AddedToken> = tokenizer
        .get_added_tokens_decoder()
        .into_values()
        .map(|token| (token.content.clone(), token))
        .collect();
    let is_same = |token: &AddedToken| {
        known.get(&token.content).is_some_and(|own| {
            let flags = |token: &AddedToken| {
                (token.single_word, token.lstrip, token.rstrip, token.normalized, token.special)
            };
            flags(own) == flags(token)
        })
    };
    let (named, extra) = (files.named(), files.extra());
    let mut new: Vec<AddedToken> = Vec::new();
    let listed = files.listed().into_iter().filter(|(_, token)| !is_same(token));
    new.extend(listed.map(|(_, token)| token));
    let unnamed = named.into_iter().map(|(_, token)| token).chain(extra);
    let mut special: Vec<AddedToken> = Vec::new();
    for token in unnamed {
        if !known.contains_key(&token.content)
            && !new.iter().any(|own| own.content == token.content)
        {
            new.push(token.clone());
        }
        special.push(token);
    }
    special.retain(|token| !known.get(&token.content).is_some_and(|own| own.special));
    if new.len() + special.len() > MOST_ADDED {
        let found = (new.len() + special.len()) as u64;
        return Err(Failure::Range(OutOfRange::above("added tokens", found, MOST_ADDED as u64)));
    }
    let failed = |error: tokenizers::Error| Failure::Library(error.to_string());
    if !new.is_empty() {
        tokenizer.add_tokens(new).map_err(failed)?;
    }
    if !special.is_empty() {
        tokenizer.add_special_tokens(special).map_err(failed)?;
    }
    Ok(())
}

/// Why tokens cannot be added.
#[derive(Debug)]
pub(super) enum Failure {
    /// There are too many.
    Range(OutOfRange),
    /// The library refuses them.
    Library(String),
}
