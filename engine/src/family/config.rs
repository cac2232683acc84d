//! Typed access to `config.json`, with errors that name key and value.

use serde_json::{Map, Value};

use super::keys::{Absent, Keys, Rule, rule};
use crate::base_error::ConfigJsonError;

/// Whether a family has something.
#[derive(Debug, Clone, Copy)]
pub(super) enum Switch {
    Never,
    Always,
    /// A key decides.
    Key(&'static str),
}

/// A parsed `config.json`, read by the table of its family.
pub(super) struct Config<'a> {
    object: &'a Map<String, Value>,
    keys: Keys,
}

impl<'a> Config<'a> {
    pub(super) fn new(value: &'a Value, keys: Keys) -> Result<Self, ConfigJsonError> {
        let object = value.as_object().ok_or(ConfigJsonError::NotAnObject)?;
        Ok(Self { object, keys })
    }

    /// Refuses what is not computed here.
    pub(super) fn refuse_unsupported(&self) -> Result<(), ConfigJsonError> {
        let is_off = |value: &Value| {
            value.is_null() || *value == Value::Bool(false) || value.as_f64() == Some(0.0)
        };
        for (key, rule) in self.keys.iter().copied().flatten() {
            if let Rule::Refused(remedy) = rule
                && !self.object.get(*key).is_none_or(is_off)
            {
                return Err(self.unsupported(key, remedy));
            }
        }
        Ok(())
    }

    /// The error of a value that cannot be used.
    pub(super) fn unsupported(&self, key: &str, remedy: &str) -> ConfigJsonError {
        let value = self.object.get(key).map_or_else(|| "nothing".to_owned(), shortened);
        ConfigJsonError::Unsupported { key: key.to_owned(), value, remedy: remedy.to_owned() }
    }

    /// What the family does with a key: the first row of its table that has it.
    fn rule(&self, key: &str) -> Rule {
        rule(self.keys, key).unwrap_or(Rule::Ignored)
    }

    /// The value of a key that the family reads, null included.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|_| matches!(self.rule(key), Rule::Read(_)))
    }

    /// Whether the family reads the key and it is there.
    pub(super) fn has(&self, key: &str) -> bool {
        self.present(key).is_some()
    }

    /// The value, unless it is absent or null.
    fn present(&self, key: &str) -> Option<&'a Value> {
        self.get(key).filter(|value| !value.is_null())
    }

    /// The value by its reader; where the key is absent, or null without a meaning of its own, the
    /// default of the family; and nothing where that is null.
    fn value<T>(
        &self,
        key: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
        of_default: impl FnOnce(Absent) -> Option<T>,
        kind: &str,
    ) -> Result<Option<T>, ConfigJsonError> {
        match (self.get(key), self.rule(key)) {
            (Some(Value::Null), Rule::Read(Absent::NumberOrNull(_))) => Ok(None),
            (Some(value), _) if !value.is_null() => match read(value) {
                Some(value) => Ok(Some(value)),
                None => Err(self.unsupported(key, &format!("it must be {kind}"))),
            },
            (_, Rule::Read(Absent::Missing)) => {
                Err(ConfigJsonError::Missing { key: key.to_owned() })
            }
            (_, Rule::Read(absent)) => Ok(of_default(absent)),
            (_, Rule::Ignored | Rule::Refused(_)) => Ok(None),
        }
    }

    /// The value, which must have a default.
    fn needed<T>(&self, key: &str, value: Option<T>) -> Result<T, ConfigJsonError> {
        value.ok_or_else(|| ConfigJsonError::Missing { key: key.to_owned() })
    }

    pub(super) fn optional_number(&self, key: &str) -> Result<Option<u32>, ConfigJsonError> {
        let read = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
        let of_default = |absent| match absent {
            Absent::Number(number) | Absent::NumberOrNull(number) => Some(number),
            _ => None,
        };
        self.value(key, read, of_default, "a whole number")
    }

    pub(super) fn number(&self, key: &str) -> Result<u32, ConfigJsonError> {
        self.needed(key, self.optional_number(key)?)
    }

    /// A number from 1 to `most`: what is allocated for it later has a bound.
    pub(super) fn size(&self, key: &str, most: u32) -> Result<u32, ConfigJsonError> {
        self.within(key, self.number(key)?, most)
    }

    /// As [`Config::size`], or a default where the family has none.
    pub(super) fn size_or(
        &self,
        key: &str,
        default: u32,
        most: u32,
    ) -> Result<u32, ConfigJsonError> {
        self.within(key, self.optional_number(key)?.unwrap_or(default), most)
    }

    fn within(&self, key: &str, number: u32, most: u32) -> Result<u32, ConfigJsonError> {
        match (1..=most).contains(&number) {
            true => Ok(number),
            false => Err(self.unsupported(key, &format!("it must be from 1 to {most}"))),
        }
    }

    pub(super) fn optional_real(&self, key: &str) -> Result<Option<f64>, ConfigJsonError> {
        let of_default = |absent| match absent {
            Absent::Real(real) => Some(real),
            _ => None,
        };
        self.value(key, Value::as_f64, of_default, "a number")
    }

    pub(super) fn real(&self, key: &str) -> Result<f64, ConfigJsonError> {
        self.needed(key, self.optional_real(key)?)
    }

    pub(super) fn flag(&self, key: &str) -> Result<bool, ConfigJsonError> {
        let of_default = |absent| match absent {
            Absent::Flag(flag) => Some(flag),
            _ => None,
        };
        let flag = self.value(key, Value::as_bool, of_default, "true or false")?;
        self.needed(key, flag)
    }

    pub(super) fn switch(&self, switch: Switch) -> Result<bool, ConfigJsonError> {
        match switch {
            Switch::Never => Ok(false),
            Switch::Always => Ok(true),
            Switch::Key(key) => self.flag(key),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<String, ConfigJsonError> {
        let of_default = |absent| match absent {
            Absent::Text(text) => Some(text),
            _ => None,
        };
        let text = self.value(key, Value::as_str, of_default, "a text")?;
        self.needed(key, text).map(str::to_owned)
    }

    /// A list of numbers of layers; none if the key is absent or null.
    pub(super) fn layer_numbers(&self, key: &str) -> Result<Vec<u32>, ConfigJsonError> {
        let Some(list) = self.present(key) else { return Ok(Vec::new()) };
        let wrong = || self.unsupported(key, "it must be a list of numbers of layers");
        let number = |value: &Value| {
            value.as_u64().and_then(|number| u32::try_from(number).ok()).ok_or_else(wrong)
        };
        list.as_array().ok_or_else(wrong)?.iter().map(number).collect()
    }

    /// The spelling in the file, of two of one key.
    pub(super) fn spelling(
        &self,
        [key, other]: [&'static str; 2],
    ) -> Result<&'static str, ConfigJsonError> {
        match (self.has(key), self.has(other)) {
            (false, true) => Ok(other),
            (true, true) if self.get(key) != self.get(other) => {
                let remedy =
                    format!("{other} is another spelling of the key and has another value");
                Err(self.unsupported(key, &remedy))
            }
            _ => Ok(key),
        }
    }

    /// Layers that `mlp_layer_types` calls dense; without the key, the first one.
    pub(super) fn dense_layers(&self, layers: u32) -> Result<Vec<u32>, ConfigJsonError> {
        let key = "mlp_layer_types";
        let Some(value) = self.get(key).filter(|value| !value.is_null()) else {
            return Ok(vec![0]);
        };
        let remedy = format!("give each of the {layers} layers dense or sparse");
        let types = value.as_array().filter(|types| types.len() == layers as usize);
        let types = types.ok_or_else(|| self.unsupported(key, &remedy))?;
        let mut dense = Vec::new();
        for (layer, kind) in (0..).zip(types) {
            match kind.as_str() {
                Some("dense") => dense.push(layer),
                Some("sparse") => {}
                _ => return Err(self.unsupported(key, &remedy)),
            }
        }
        Ok(dense)
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
            let interval = self.size("no_rope_layer_interval", u32::MAX)?;
            return Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect());
        };
        let wrong = || self.unsupported(key, "it must have 0 or 1 for each layer");
        // It may be longer, as that of a model that was cut.
        let list = list.as_array().and_then(|list| list.get(..layers as usize));
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
