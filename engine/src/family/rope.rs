//! Rotary embeddings in `config.json`: `rope_parameters`, and the older `rope_theta` and
//! `rope_scaling`.

use serde_json::Value;
use shoal_protocol::manifest::{Rotary, RotaryScaling};

use super::config::{Config, shortened};
use super::rope_scaling::{Lengths, Scalings, magnitude};
use crate::base_error::ConfigJsonError;

/// How a family knows positions.
#[derive(Debug, Clone, Copy)]
pub(super) enum Positions {
    /// Rotary embeddings.
    Rotary(Rules),
    /// A table of trained positions.
    Trained,
}

/// How a family's class reads its rotary embeddings.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// The key beside `rope_parameters` with the base of the wavelengths.
    pub(super) theta: &'static str,
    /// The key beside `rope_parameters` with the share of a head that is rotated.
    pub(super) rotated: &'static str,
    /// Whether a head may be rotated in part.
    pub(super) partial: bool,
    /// How wavelengths may be scaled.
    pub(super) scalings: Scalings,
    /// Whether layers with windows have parameters of their own.
    pub(super) by_layer_type: bool,
}

/// The rules of most families.
pub(super) const PLAIN: Rules = Rules {
    theta: "rope_theta",
    rotated: "partial_rotary_factor",
    partial: false,
    scalings: Scalings::Any,
    by_layer_type: false,
};

const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

/// A key with parameters, and these, unless there are none.
fn there<'a>(config: &Config<'a>, key: &str) -> Option<(String, &'a Value)> {
    let is_empty = |value: &Value| value.as_object().is_some_and(serde_json::Map::is_empty);
    let value = config.get(key).filter(|value| !value.is_null() && !is_empty(value))?;
    Some((key.to_owned(), value))
}

/// The parameters that are the same in all layers.
fn one_for_all<'a>(config: &Config<'a>) -> Vec<(String, &'a Value)> {
    there(config, "rope_scaling").or_else(|| there(config, "rope_parameters")).into_iter().collect()
}

/// The rotary embeddings of a model: one, or those of full attention and of windows. Where both
/// spellings are there, `rope_scaling` takes the place of `rope_parameters`, as in `transformers`.
pub(super) fn rotaries(
    config: &Config<'_>,
    rules: Rules,
    head_size: u32,
    positions: u32,
) -> Result<Vec<Rotary>, ConfigJsonError> {
    let [scaling, parameters] = ["rope_scaling", "rope_parameters"].map(|key| there(config, key));
    let theta = config.real(rules.theta)?;
    let section = |values| Section { values, rules, head_size };
    if !rules.by_layer_type {
        let section = section(one_for_all(config));
        section.refuse_parts(&KINDS, "give one set of parameters for all layers")?;
        let rotated = config.optional_real(rules.rotated)?.unwrap_or(1.0);
        let original = config.optional_number("original_max_position_embeddings")?;
        return Ok(vec![section.rotary(theta, rotated, Lengths { original, positions })?]);
    }
    let whole = section(parameters.iter().cloned().collect());
    whole.refuse_parts(
        &["rope_type", "type", "rope_theta", "factor"],
        "give those of full_attention and sliding_attention, each in its object",
    )?;
    let of = |kind: &str| {
        let (key, value) = parameters.as_ref()?;
        let value = value.get(kind).filter(|value| !value.is_null())?;
        Some((format!("{key}.{kind}"), value))
    };
    let full = section(scaling.into_iter().chain(of(KINDS[0])).collect());
    let local = section(of(KINDS[1]).into_iter().collect());
    let rotated = config.optional_real(rules.rotated)?.unwrap_or(1.0);
    let local_theta = config.real("rope_local_base_freq")?;
    let lengths = Lengths { original: None, positions };
    Ok(vec![full.rotary(theta, rotated, lengths)?, local.rotary(local_theta, rotated, lengths)?])
}

/// What a family with latent attention multiplies the products of queries and keys by, beside the root of their width.
pub(super) fn factor_of_products(
    config: &Config<'_>,
    rules: Rules,
) -> Result<f64, ConfigJsonError> {
    let section = Section { values: one_for_all(config), rules, head_size: 0 };
    let kind = section.kind().and_then(|(_, kind)| kind.as_str());
    match (section.unless_zero("mscale_all_dim")?, kind) {
        (None, _) | (_, None | Some("default")) => Ok(1.0),
        (Some(of_all), _) => Ok(magnitude(section.needed("factor")?, of_all).powi(2)),
    }
}

/// The parameters of one rotary embedding: the objects that have them, the first that has one
/// before the others.
pub(super) struct Section<'a> {
    values: Vec<(String, &'a Value)>,
    pub(super) rules: Rules,
    head_size: u32,
}

impl Section<'_> {
    fn name(&self) -> &str {
        self.values.first().map_or("rope_parameters", |(key, _)| key)
    }

    /// The name of one of its parameters.
    pub(super) fn key(&self, part: &str) -> String {
        format!("{}.{part}", self.name())
    }

    pub(super) fn unsupported(&self, part: &str, value: &Value, remedy: &str) -> ConfigJsonError {
        ConfigJsonError::Unsupported {
            key: self.key(part),
            value: shortened(value),
            remedy: remedy.to_owned(),
        }
    }

    fn refuse_parts(&self, parts: &[&str], remedy: &str) -> Result<(), ConfigJsonError> {
        let found = parts.iter().find_map(|part| Some((part, self.get(part)?)));
        match found {
            Some((part, value)) => Err(self.unsupported(part, value, remedy)),
            None => Ok(()),
        }
    }

    pub(super) fn get(&self, part: &str) -> Option<&Value> {
        let values = self.values.iter();
        values.filter_map(|(_, value)| value.get(part)).find(|value| !value.is_null())
    }

    pub(super) fn real(&self, part: &str) -> Result<Option<f64>, ConfigJsonError> {
        let Some(value) = self.get(part) else { return Ok(None) };
        let number = value.as_f64();
        number.map(Some).ok_or_else(|| self.unsupported(part, value, "it must be a number"))
    }

    pub(super) fn needed(&self, part: &str) -> Result<f64, ConfigJsonError> {
        let missing = || ConfigJsonError::Missing { key: self.key(part) };
        self.real(part)?.ok_or_else(missing)
    }

    fn rotary(
        &self,
        theta: f64,
        rotated: f64,
        lengths: Lengths,
    ) -> Result<Rotary, ConfigJsonError> {
        let part = "partial_rotary_factor";
        let rotated = self.real(part)?.unwrap_or(rotated);
        let mut dimensions = (f64::from(self.head_size) * rotated) as u32;
        let is_whole = dimensions == self.head_size;
        if !self.rules.partial {
            dimensions = self.head_size;
        }
        let scaling = self.scaling(dimensions, lengths)?;
        // A plain embedding of these families has no partial rotation, whatever the key says, and a scaled one cannot have it.
        if !self.rules.partial && !is_whole && scaling != RotaryScaling::None {
            let remedy = "the heads of this family are rotated whole: take it out";
            return Err(self.unsupported(part, &Value::from(rotated), remedy));
        }
        Ok(Rotary { theta: self.real("rope_theta")?.unwrap_or(theta), dimensions, scaling })
    }
}
