//! Reads `tokenizer.json` once without building it, and refuses what would cost its reader far more
//! memory or time than the file has bytes.
//!
//! The library that builds a tokenizer has no limits of its own: an added token of five megabytes
//! takes gigabytes of automaton, a piece of as many bytes overflows the stack, and a normalizer that
//! replaces one letter by ten, ten times in a row, makes gigabytes of one letter.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use shoal_protocol::limits;

use super::steps;

/// Most bytes of a token. The longest of known models have about two hundred.
const TOKEN_BYTES: u64 = 1024;
/// Most bytes of all added tokens.
const ADDED_BYTES: u64 = 4 << 20;
/// Most bytes of all pieces of a Unigram model, each of which may be a node of a tree.
const UNIGRAM_BYTES: u64 = 6 << 20;
/// Most merges of a BPE model. Vocabularies of 262,144 tokens have half a million.
const MERGES: u64 = 2 * limits::VOCABULARY as u64;
/// Most values in the description of a normalizer, pre-tokenizer, post-processor or decoder.
const VALUES: u64 = 100_000;

/// A key of `tokenizer.json` whose value is out of range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key} is {value}, and must be {range}")]
pub struct OutOfRange {
    /// The key, with dots between levels.
    pub key: String,
    /// The value.
    pub value: String,
    /// The range.
    pub range: String,
}

impl OutOfRange {
    pub(super) fn above(key: &str, value: impl fmt::Display, most: impl fmt::Display) -> Self {
        let (value, range) = (value.to_string(), format!("at most {most}"));
        Self { key: key.to_owned(), value, range }
    }
}

/// Reads a file.
///
/// # Errors
/// The first value that is out of range. A file that is not JSON is left to its parser.
pub(super) fn scan(bytes: &[u8]) -> Result<(), OutOfRange> {
    let mut found = None;
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    // An error is either the one that is found, or of JSON.
    let _ = Part { place: Place::Top, found: &mut found }.deserialize(&mut deserializer);
    found.map_or(Ok(()), Err)
}

/// A place in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Top,
    AddedTokens,
    AddedToken,
    Model,
    Vocabulary,
    Piece,
    Merges,
    /// A text that is a token, and its key.
    Token(&'static str),
    Other,
}

/// A value at a place.
struct Part<'a> {
    place: Place,
    found: &'a mut Option<OutOfRange>,
}

impl Part<'_> {
    fn at(&mut self, place: Place) -> Part<'_> {
        Part { place, found: self.found }
    }

    fn check<E: Error>(&mut self, key: &str, value: u64, most: u64) -> Result<(), E> {
        if value <= most {
            return Ok(());
        }
        *self.found = Some(OutOfRange::above(key, value, most));
        Err(E::custom("out of range"))
    }
}

impl<'de> DeserializeSeed<'de> for Part<'_> {
    /// Bytes of the tokens in the value.
    type Value = u64;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<u64, D::Error> {
        match self.place {
            Place::Other => deserializer.deserialize_ignored_any(IgnoredAny).map(|_| 0),
            _ => deserializer.deserialize_any(self),
        }
    }
}

impl<'de> Visitor<'de> for Part<'_> {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a part of a tokenizer")
    }

    fn visit_unit<E>(self) -> Result<u64, E> {
        Ok(0)
    }

    fn visit_bool<E>(self, _: bool) -> Result<u64, E> {
        Ok(0)
    }

    fn visit_i64<E>(self, _: i64) -> Result<u64, E> {
        Ok(0)
    }

    fn visit_u64<E>(self, _: u64) -> Result<u64, E> {
        Ok(0)
    }

    fn visit_f64<E>(self, _: f64) -> Result<u64, E> {
        Ok(0)
    }

    fn visit_str<E: Error>(mut self, text: &str) -> Result<u64, E> {
        let bytes = text.len() as u64;
        if let Place::Token(key) = self.place {
            self.check(key, bytes, TOKEN_BYTES)?;
        }
        Ok(bytes)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<u64, A::Error> {
        let (mut bytes, mut count) = (0, 0);
        loop {
            let place = match self.place {
                Place::AddedTokens => Place::AddedToken,
                // The vocabulary of a Unigram model is a list of pieces with their scores.
                Place::Vocabulary => Place::Piece,
                Place::Piece if count == 0 => Place::Token("model.vocab (bytes of a token)"),
                _ => Place::Other,
            };
            let Some(more) = items.next_element_seed(self.at(place))? else { return Ok(bytes) };
            (bytes, count) = (bytes + more, count + 1);
            match self.place {
                Place::AddedTokens => {
                    self.check("added_tokens", count, u64::from(limits::VOCABULARY))?;
                    self.check("added_tokens (bytes of all)", bytes, ADDED_BYTES)?;
                }
                Place::Vocabulary => {
                    self.check("model.vocab", count, u64::from(limits::VOCABULARY))?;
                    self.check("model.vocab (bytes of all tokens)", bytes, UNIGRAM_BYTES)?;
                }
                Place::Merges => self.check("model.merges", count, MERGES)?,
                _ => {}
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut pairs: A) -> Result<u64, A::Error> {
        let (mut bytes, mut count) = (0, 0);
        while let Some(key) = pairs.next_key::<String>()? {
            count += 1;
            let place = match (self.place, key.as_str()) {
                (Place::Top, "added_tokens") => Place::AddedTokens,
                (Place::Top, "model") => Place::Model,
                (Place::Top, "normalizer" | "pre_tokenizer" | "post_processor" | "decoder") => {
                    let mut left = VALUES;
                    let value = pairs.next_value_seed(Small { left: &mut left });
                    if left == 0 {
                        self.check(&format!("{key} (values)"), VALUES + 1, VALUES)?;
                    }
                    steps::check(&key, &value?).map_err(|error| {
                        *self.found = Some(error);
                        Error::custom("out of range")
                    })?;
                    continue;
                }
                (Place::Model, "vocab") => Place::Vocabulary,
                (Place::Model, "merges") => Place::Merges,
                (Place::AddedToken, "content") => Place::Token("added_tokens.content (bytes)"),
                _ => Place::Other,
            };
            if self.place == Place::Vocabulary {
                self.check("model.vocab", count, u64::from(limits::VOCABULARY))?;
                self.check("model.vocab (bytes of a token)", key.len() as u64, TOKEN_BYTES)?;
            }
            bytes += pairs.next_value_seed(self.at(place))?;
        }
        Ok(bytes)
    }
}

/// A value of JSON with at most `left` values in it; `left` is 0 if it has more.
struct Small<'a> {
    left: &'a mut u64,
}

impl<'de> DeserializeSeed<'de> for Small<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        *self.left -= 1;
        if *self.left == 0 {
            return Err(Error::custom("too many values"));
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Small<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(Small { left: &mut *self.left })? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut pairs: A) -> Result<Value, A::Error> {
        let mut map = serde_json::Map::new();
        while let Some(key) = pairs.next_key::<String>()? {
            map.insert(key, pairs.next_value_seed(Small { left: &mut *self.left })?);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// The key that is refused in a tokenizer with one changed value.
    fn refused(pointer: &str, value: Value) -> String {
        let mut file = json!({
            "added_tokens": [{"id": 3, "content": "<s>"}],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
        });
        assert_eq!(scan(file.to_string().as_bytes()), Ok(()));
        *file.pointer_mut(pointer).expect("a key") = value;
        let error = scan(file.to_string().as_bytes()).expect_err(pointer);
        assert!(error.range.starts_with("at most "), "{error:?}");
        error.key
    }

    #[test]
    fn what_a_small_file_makes_large_is_refused_by_its_key() {
        let long = "x".repeat(200_000);
        assert_eq!(refused("/added_tokens/0/content", json!(long)), "added_tokens.content (bytes)");
        let key = refused("/model/vocab", json!({long.clone(): 0}));
        assert_eq!(key, "model.vocab (bytes of a token)");
        // A piece of a Unigram model overflowed the stack.
        let key = refused("/model/vocab", json!([["<unk>", 0.0], [long, -1.0]]));
        assert_eq!(key, "model.vocab (bytes of a token)");
        let pieces: Vec<_> =
            (0..7000).map(|place| json!([format!("{place:01000}"), 0.0])).collect();
        assert_eq!(refused("/model/vocab", json!(pieces)), "model.vocab (bytes of all tokens)");
        let merges = vec![json!([]); MERGES as usize + 1];
        assert_eq!(refused("/model/merges", json!(merges)), "model.merges");
        let values = vec![json!(0); VALUES as usize];
        assert_eq!(refused("/decoder", json!(values)), "decoder (values)");
    }

    #[test]
    fn steps_that_multiply_a_text_are_refused() {
        let replace =
            json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"});
        let steps = json!({"type": "Sequence", "normalizers": vec![replace; 10]});
        let key = refused("/normalizer", steps);
        assert_eq!(key, "normalizer (bytes that its steps make of one)");
        let split = json!({"type": "Split", "pattern": {"Regex": "((?:ab){1000}){1000}"}});
        let key = refused("/pre_tokenizer", split);
        assert_eq!(key, "pre_tokenizer.pattern.Regex (bytes times repetitions)");
        let bytes =
            json!({"type": "Sequence", "pretokenizers": vec![json!({"type": "ByteLevel"}); 30]});
        let key = refused("/pre_tokenizer", bytes);
        assert_eq!(key, "pre_tokenizer (bytes that its steps make of one)");
        let steps = json!({"type": "Sequence", "decoders": vec![json!({"type": "Fuse"}); 65]});
        assert_eq!(refused("/decoder", steps), "decoder (steps)");
        let parts = vec![json!({"Sequence": {"id": "A", "type_id": 0}}); 65];
        let template = json!({"type": "TemplateProcessing", "single": parts});
        assert_eq!(refused("/post_processor", template), "post_processor.single (parts)");
    }
}
