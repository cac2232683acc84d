//! Typed access to `config.json`, with errors that name key and value.

use serde_json::{Map, Value};

use crate::base_error::ConfigJsonError;

/// A parsed `config.json`.
pub(super) struct Config<'a>(&'a Map<String, Value>);

impl<'a> Config<'a> {
    pub(super) fn new(value: &'a Value) -> Result<Self, ConfigJsonError> {
        value.as_object().map(Self).ok_or(ConfigJsonError::NotAnObject)
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key)
    }

    /// The error of a value that cannot be used.
    pub(super) fn unsupported(&self, key: &str, remedy: &str) -> ConfigJsonError {
        let value = self.get(key).map_or_else(|| "nothing".to_owned(), shortened);
        ConfigJsonError::Unsupported { key: key.to_owned(), value, remedy: remedy.to_owned() }
    }

    /// The value, unless it is absent or null.
    fn present(&self, key: &str) -> Option<&'a Value> {
        self.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn optional_number(&self, key: &str) -> Result<Option<u32>, ConfigJsonError> {
        let Some(value) = self.present(key) else { return Ok(None) };
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        number.map(Some).ok_or_else(|| self.unsupported(key, "it must be a whole number"))
    }

    pub(super) fn number_or(&self, key: &str, default: u32) -> Result<u32, ConfigJsonError> {
        Ok(self.optional_number(key)?.unwrap_or(default))
    }

    pub(super) fn number(&self, key: &str) -> Result<u32, ConfigJsonError> {
        self.optional_number(key)?.ok_or_else(|| ConfigJsonError::Missing { key: key.to_owned() })
    }

    /// A number from 1 to `most`: what is allocated for it later has a bound.
    pub(super) fn size(&self, key: &str, most: u32) -> Result<u32, ConfigJsonError> {
        self.within(key, self.number(key)?, most)
    }

    /// As [`Config::size`], or a default where the key is absent.
    pub(super) fn size_or(
        &self,
        key: &str,
        default: u32,
        most: u32,
    ) -> Result<u32, ConfigJsonError> {
        self.within(key, self.number_or(key, default)?, most)
    }

    fn within(&self, key: &str, number: u32, most: u32) -> Result<u32, ConfigJsonError> {
        match (1..=most).contains(&number) {
            true => Ok(number),
            false => Err(self.unsupported(key, &format!("it must be from 1 to {most}"))),
        }
    }

    pub(super) fn real_or(&self, key: &str, default: f64) -> Result<f64, ConfigJsonError> {
        let Some(value) = self.present(key) else { return Ok(default) };
        value.as_f64().ok_or_else(|| self.unsupported(key, "it must be a number"))
    }

    pub(super) fn flag_or(&self, key: &str, default: bool) -> Result<bool, ConfigJsonError> {
        let Some(value) = self.present(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.unsupported(key, "it must be true or false"))
    }

    pub(super) fn text(&self, key: &str) -> Result<String, ConfigJsonError> {
        let value = self.present(key);
        let value = value.ok_or_else(|| ConfigJsonError::Missing { key: key.to_owned() })?;
        let text = value.as_str().ok_or_else(|| self.unsupported(key, "it must be a text"));
        text.map(str::to_owned)
    }

    pub(super) fn text_or(&self, key: &str, default: &str) -> Result<String, ConfigJsonError> {
        if self.present(key).is_none() { Ok(default.to_owned()) } else { self.text(key) }
    }

    /// Whether each layer has a window: by `layer_types`, or else by its number.
    pub(super) fn sliding_layers(
        &self,
        layers: u32,
        by_number: impl Fn(u32) -> bool,
    ) -> Result<Vec<bool>, ConfigJsonError> {
        let key = "layer_types";
        let Some(types) = self.present(key) else {
            return Ok((0..layers).map(by_number).collect());
        };
        let remedy = "it must have full_attention or sliding_attention for each layer";
        let wrong = || self.unsupported(key, remedy);
        let types = types.as_array().filter(|types| types.len() == layers as usize);
        let sliding = |kind: &Value| match kind.as_str() {
            Some("full_attention") => Ok(false),
            Some("sliding_attention") => Ok(true),
            _ => Err(wrong()),
        };
        types.ok_or_else(wrong)?.iter().map(sliding).collect()
    }

    /// Whether each layer rotates queries and keys: by `no_rope_layers`, which has 1 for those that
    /// do, or else all but each last of `no_rope_layer_interval`.
    pub(super) fn rotating_layers(&self, layers: u32) -> Result<Vec<bool>, ConfigJsonError> {
        let key = "no_rope_layers";
        let Some(list) = self.present(key) else {
            let interval = self.number_or("no_rope_layer_interval", 4)?.max(1);
            return Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect());
        };
        let wrong = || self.unsupported(key, "it must have 0 or 1 for each layer");
        let list = list.as_array().filter(|list| list.len() == layers as usize);
        let rotates = |value: &Value| match value.as_u64() {
            Some(0) => Ok(false),
            Some(1) => Ok(true),
            _ => Err(wrong()),
        };
        list.ok_or_else(wrong)?.iter().map(rotates).collect()
    }
}

/// A value in at most about a hundred characters.
pub(super) fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(100) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
