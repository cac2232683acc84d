//! The latent attention of families that have it.

use shoal_protocol::limits;
use shoal_protocol::manifest::LatentAttention;

use super::config::{Config, Switch};
use crate::base_error::ConfigJsonError;

/// How a family has latent attention.
#[derive(Debug, Clone, Copy)]
pub(super) struct Latent {
    /// Whether adjacent channels are rotated with each other.
    pub(super) interleaved: Switch,
    /// The key of the rotated channels, and another spelling of it.
    pub(super) rotated: [&'static str; 2],
}

/// The key of the rotated channels, which has no other spelling in most families.
pub(super) const ROTATED: [&str; 2] = ["qk_rope_head_dim"; 2];

/// Latent attention, and the width of a head's queries and keys.
#[derive(Debug, Clone, Copy)]
pub(super) struct Described {
    pub(super) attention: LatentAttention,
    pub(super) head_size: u32,
}

impl Latent {
    pub(super) fn read(self, config: &Config<'_>) -> Result<Described, ConfigJsonError> {
        let rotated = config.size(config.spelling(self.rotated)?, limits::HEAD_SIZE)?;
        let plain = config.size("qk_nope_head_dim", limits::HEAD_SIZE)?;
        if rotated % 2 == 1 {
            return Err(config.unsupported("qk_rope_head_dim", "channels are rotated in pairs"));
        }
        let head_size = plain + rotated;
        let value_size = config.size("v_head_dim", limits::HEAD_SIZE)?;
        if value_size > head_size {
            let remedy =
                format!("values may be as wide as queries, which have {head_size} channels");
            return Err(config.unsupported("v_head_dim", &remedy));
        }
        let queries = match config.optional_number("q_lora_rank")? {
            Some(_) => Some(config.size("q_lora_rank", limits::HIDDEN)?),
            None => None,
        };
        if queries.is_none() && config.flag("attention_bias")? {
            let remedy =
                "without q_lora_rank queries have no biases, and keys would: set it to false";
            return Err(config.unsupported("attention_bias", remedy));
        }
        let keys_values = config.size("kv_lora_rank", limits::HIDDEN)?;
        let interleaved = config.switch(self.interleaved)?;
        let attention = LatentAttention { queries, keys_values, rotated, interleaved, value_size };
        Ok(Described { attention, head_size })
    }
}
