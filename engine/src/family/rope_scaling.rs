//! Scaled rotary embeddings in `config.json`, by their `rope_type`.

use serde_json::Value;
use shoal_protocol::manifest::{Rotary, RotaryScaling};

use super::rope::Section;
use crate::base_error::ConfigJsonError;

/// The values of `rope_type` that a family's class has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scalings {
    /// All.
    Any,
    /// As Phi-3: longrope, also by its older names.
    Longrope,
}

/// Lengths beside the parameters of a rotary embedding.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lengths {
    /// `original_max_position_embeddings`, which goes before that of the parameters.
    pub(super) original: Option<u32>,
    /// `max_position_embeddings`.
    pub(super) positions: u32,
}

/// What the logits of attention gain where wavelengths are stretched by a factor, times a scale of its own (Peng et al.,
/// arXiv 2309.00071).
pub(super) fn magnitude(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
}

/// The longest text that a model with these rotary embeddings reads. Dynamic ones stretch `max_position_embeddings` by
/// their factor; with others it has the stretched length.
pub(super) fn longest(rotaries: &[Rotary], positions: u32) -> u32 {
    let stretched = rotaries.iter().filter_map(|rotary| match rotary.scaling {
        RotaryScaling::Dynamic { factor, .. } => Some((f64::from(positions) * factor) as u32),
        _ => None,
    });
    stretched.max().unwrap_or(positions).max(positions)
}

impl Section<'_> {
    /// The kind of scaling, and its key.
    pub(super) fn kind(&self) -> Option<(&'static str, &Value)> {
        ["rope_type", "type"].into_iter().find_map(|part| Some((part, self.get(part)?)))
    }

    /// A number; 0 is the same as none, as in transformers.
    pub(super) fn unless_zero(&self, part: &str) -> Result<Option<f64>, ConfigJsonError> {
        Ok(self.real(part)?.filter(|value| *value != 0.0))
    }

    /// How the wavelengths of this many channels are scaled.
    pub(super) fn scaling(
        &self,
        dimensions: u32,
        lengths: Lengths,
    ) -> Result<RotaryScaling, ConfigJsonError> {
        let Some((part, value)) = self.kind() else { return Ok(RotaryScaling::None) };
        match (value.as_str().unwrap_or_default(), self.rules.scalings) {
            ("default", _) => Ok(RotaryScaling::None),
            ("longrope", Scalings::Any) | ("longrope" | "su" | "yarn", Scalings::Longrope) => {
                self.longrope(dimensions, lengths)
            }
            ("linear", Scalings::Any) => {
                Ok(RotaryScaling::Linear { factor: self.needed("factor")? })
            }
            ("llama3", Scalings::Any) => Ok(RotaryScaling::Llama3 {
                factor: self.needed("factor")?,
                low_frequency_factor: self.needed("low_freq_factor")?,
                high_frequency_factor: self.needed("high_freq_factor")?,
                original_positions: self.original_positions(lengths)?,
            }),
            ("yarn", Scalings::Any) => self.yarn(lengths),
            ("dynamic", Scalings::Any) => Ok(RotaryScaling::Dynamic {
                factor: self.needed("factor")?,
                original_positions: lengths.positions,
            }),
            (_, scalings) => {
                let known = match scalings {
                    Scalings::Any => "default, linear, dynamic, yarn, longrope and llama3",
                    Scalings::Longrope => "default and longrope",
                };
                let remedy = format!(
                    "the known ones are {known}; to train within the model's original context, take \
                     the scaling out of config.json"
                );
                Err(self.unsupported(part, value, &remedy))
            }
        }
    }

    fn original_positions(&self, lengths: Lengths) -> Result<u32, ConfigJsonError> {
        if let Some(original) = lengths.original {
            return Ok(original);
        }
        let original = self.real("original_max_position_embeddings")?;
        Ok(original.map_or(lengths.positions, |original| original as u32))
    }

    fn yarn(&self, lengths: Lengths) -> Result<RotaryScaling, ConfigJsonError> {
        let factor = self.needed("factor")?;
        let scales = (self.unless_zero("mscale")?, self.unless_zero("mscale_all_dim")?);
        let attention_factor = match (self.real("attention_factor")?, scales) {
            (Some(given), _) => given,
            (None, (Some(mscale), Some(of_all))) => {
                magnitude(factor, mscale) / magnitude(factor, of_all)
            }
            (None, _) => magnitude(factor, 1.0),
        };
        Ok(RotaryScaling::Yarn {
            factor,
            beta_fast: self.unless_zero("beta_fast")?.unwrap_or(32.0),
            beta_slow: self.unless_zero("beta_slow")?.unwrap_or(1.0),
            original_positions: self.original_positions(lengths)?,
            truncate: self.truncate()?,
            attention_factor,
        })
    }

    fn truncate(&self) -> Result<bool, ConfigJsonError> {
        let part = "truncate";
        match self.get(part) {
            None | Some(Value::Bool(true)) => Ok(true),
            Some(Value::Bool(false)) if !self.rules.by_layer_type => Ok(false),
            Some(value @ Value::Bool(_)) => {
                Err(self.unsupported(part, value, "the class of this family reads it as true"))
            }
            Some(value) => Err(self.unsupported(part, value, "it must be true or false")),
        }
    }

    fn longrope(
        &self,
        dimensions: u32,
        lengths: Lengths,
    ) -> Result<RotaryScaling, ConfigJsonError> {
        let original_positions = self.original_positions(lengths)?;
        let original = f64::from(original_positions);
        let factor = self.real("factor")?;
        let factor = factor.unwrap_or_else(|| f64::from(lengths.positions) / original);
        let attention_factor = match self.real("attention_factor")? {
            Some(given) => given,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / original.ln()).sqrt(),
        };
        Ok(RotaryScaling::Longrope {
            short_factors: self.factors("short_factor", dimensions)?,
            long_factors: self.factors("long_factor", dimensions)?,
            original_positions,
            attention_factor,
        })
    }

    /// A factor for each pair of channels.
    fn factors(&self, part: &str, dimensions: u32) -> Result<Vec<f64>, ConfigJsonError> {
        let missing = || ConfigJsonError::Missing { key: self.key(part) };
        let value = self.get(part).ok_or_else(missing)?;
        let count = dimensions as usize / 2;
        let wrong = || {
            let remedy = format!("it must have {count} numbers, one for each pair of channels");
            self.unsupported(part, value, &remedy)
        };
        let list = value.as_array().filter(|list| list.len() == count).ok_or_else(wrong)?;
        list.iter().map(|factor| factor.as_f64().ok_or_else(wrong)).collect()
    }
}
