//! Rotary embeddings in `config.json`: `rope_parameters`, and the older `rope_theta` and
//! `rope_scaling`.

use serde_json::Value;
use shoal_protocol::manifest::{Rotary, RotaryScaling};

use super::config::{Config, shortened};
use crate::base_error::ConfigJsonError;

/// The rotary embeddings of a model: one, or with `by_layer_type` those of full attention and of
/// windows.
pub(super) fn rotaries(
    config: &Config<'_>,
    theta: f64,
    rotated: f64,
    head_size: u32,
    by_layer_type: bool,
) -> Result<Vec<Rotary>, ConfigJsonError> {
    let rotated = config.real_or("partial_rotary_factor", rotated)?;
    let rotated = config.real_or("rotary_pct", rotated)?;
    let theta = config.real_or("rope_theta", theta)?;
    let theta = config.real_or("rotary_emb_base", theta)?;
    let parameters = config.get("rope_parameters").filter(|value| !value.is_null());
    let scaling = config.get("rope_scaling").filter(|value| !value.is_null());
    let full = Section { key: "rope_parameters", value: parameters.or(scaling) };
    if !by_layer_type {
        return Ok(vec![full.rotary(theta, rotated, head_size)?]);
    }
    let of = |kind| parameters.and_then(|parameters| parameters.get(kind));
    let full = Section { key: "rope_parameters", value: of("full_attention").or(scaling) };
    let local = Section { key: "rope_parameters", value: of("sliding_attention") };
    let local_theta = config.real_or("rope_local_base_freq", 10_000.0)?;
    Ok(vec![
        full.rotary(theta, rotated, head_size)?,
        local.rotary(local_theta, rotated, head_size)?,
    ])
}

/// The parameters of one rotary embedding.
struct Section<'a> {
    key: &'static str,
    value: Option<&'a Value>,
}

impl Section<'_> {
    fn unsupported(&self, part: &str, value: &Value, remedy: &str) -> ConfigJsonError {
        ConfigJsonError::Unsupported {
            key: format!("{}.{part}", self.key),
            value: shortened(value),
            remedy: remedy.to_owned(),
        }
    }

    fn get(&self, part: &str) -> Option<&Value> {
        self.value?.get(part).filter(|value| !value.is_null())
    }

    fn real(&self, part: &str) -> Result<Option<f64>, ConfigJsonError> {
        let Some(value) = self.get(part) else { return Ok(None) };
        let number = value.as_f64();
        number.map(Some).ok_or_else(|| self.unsupported(part, value, "it must be a number"))
    }

    fn needed(&self, part: &str) -> Result<f64, ConfigJsonError> {
        let missing = || ConfigJsonError::Missing { key: format!("{}.{part}", self.key) };
        self.real(part)?.ok_or_else(missing)
    }

    fn rotary(&self, theta: f64, rotated: f64, head_size: u32) -> Result<Rotary, ConfigJsonError> {
        let rotated = self.real("partial_rotary_factor")?.unwrap_or(rotated);
        Ok(Rotary {
            theta: self.real("rope_theta")?.unwrap_or(theta),
            dimensions: (f64::from(head_size) * rotated) as u32,
            scaling: self.scaling()?,
        })
    }

    fn scaling(&self) -> Result<RotaryScaling, ConfigJsonError> {
        let (part, value) = match (self.get("rope_type"), self.get("type")) {
            (Some(value), _) => ("rope_type", value),
            (None, Some(value)) => ("type", value),
            (None, None) => return Ok(RotaryScaling::None),
        };
        match value.as_str() {
            Some("default") => Ok(RotaryScaling::None),
            Some("linear") => Ok(RotaryScaling::Linear { factor: self.needed("factor")? }),
            Some("llama3") => Ok(RotaryScaling::Llama3 {
                factor: self.needed("factor")?,
                low_frequency_factor: self.needed("low_freq_factor")?,
                high_frequency_factor: self.needed("high_freq_factor")?,
                original_positions: self.needed("original_max_position_embeddings")? as u32,
            }),
            _ => {
                let remedy = "the known ones are default, linear and llama3; to train within the \
                              model's original context, take the scaling out of config.json";
                Err(self.unsupported(part, value, remedy))
            }
        }
    }
}
