//! Rotary embeddings, and how their wavelengths change for long contexts.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::{ManifestError, within};

/// A rotary embedding (Su et al., arXiv 2104.09864).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct Rotary {
    /// Base of the wavelengths.
    pub theta: f64,
    /// Leading channels of a head that are rotated.
    pub dimensions: u32,
    /// Change of the wavelengths for long contexts.
    pub scaling: RotaryScaling,
}

/// Change of a rotary embedding's wavelengths for long contexts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(rename_all = "kebab-case")]
pub enum RotaryScaling {
    /// None.
    None,
    /// All wavelengths times a factor (Chen et al., arXiv 2306.15595).
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Long wavelengths times a factor, short ones unchanged, a blend between (Llama 3.1).
    Llama3 {
        /// The factor.
        factor: f64,
        /// `original_positions` over this is the length from which waves are long.
        low_frequency_factor: f64,
        /// `original_positions` over this is the length up to which waves are short.
        high_frequency_factor: f64,
        /// Positions of the unscaled model.
        original_positions: u32,
    },
    /// Long wavelengths times a factor, short ones unchanged, a ramp over channels between (Peng et al., arXiv 2309.00071).
    Yarn {
        /// The factor.
        factor: f64,
        /// Waves with at least this many turns in `original_positions` are unchanged.
        beta_fast: f64,
        /// Waves with at most this many turns are long.
        beta_slow: f64,
        /// Positions of the unscaled model.
        original_positions: u32,
        /// Whether the ramp begins and ends at whole channels.
        truncate: bool,
        /// Factor on rotated queries and keys.
        attention_factor: f64,
    },
    /// Each wavelength times a factor of its own, by the length of the text (Ding et al., arXiv 2402.13753).
    Longrope {
        /// For texts of at most `original_positions` tokens, one for each pair of channels.
        short_factors: Vec<f64>,
        /// For longer texts.
        long_factors: Vec<f64>,
        /// Positions of the unscaled model.
        original_positions: u32,
        /// Factor on rotated queries and keys, whatever the text's length.
        attention_factor: f64,
    },
    /// A base that grows with the length of texts of more than `original_positions` tokens (NTK).
    Dynamic {
        /// The factor.
        factor: f64,
        /// Positions of the unscaled model.
        original_positions: u32,
    },
}

const FACTORS: RangeInclusive<f64> = 1e-3..=1e6;

impl RotaryScaling {
    /// The length that decides a text's wavelengths: texts of `length` tokens with equal ones have equal wavelengths.
    #[must_use]
    pub fn deciding_length(&self, length: u32) -> u32 {
        match self {
            Self::Longrope { original_positions, .. } => {
                original_positions + u32::from(length > *original_positions)
            }
            Self::Dynamic { original_positions, .. } => length.max(*original_positions),
            Self::None | Self::Linear { .. } | Self::Llama3 { .. } | Self::Yarn { .. } => 0,
        }
    }

    /// Factor on rotated queries and keys.
    #[must_use]
    pub fn attention_factor(&self) -> f64 {
        match self {
            Self::Yarn { attention_factor, .. } | Self::Longrope { attention_factor, .. } => {
                *attention_factor
            }
            _ => 1.0,
        }
    }

    /// Positions of the unscaled model, where it has them.
    fn original_positions(&self) -> Option<u32> {
        match self {
            Self::None | Self::Linear { .. } => None,
            Self::Llama3 { original_positions, .. }
            | Self::Yarn { original_positions, .. }
            | Self::Longrope { original_positions, .. }
            | Self::Dynamic { original_positions, .. } => Some(*original_positions),
        }
    }
}

impl Rotary {
    /// Checks every value against its range.
    pub(super) fn check(&self, head_size: u32) -> Result<(), ManifestError> {
        within("model.block.rotary.theta", self.theta, 1.0..=1e12)?;
        within("model.block.rotary.dimensions", self.dimensions, 2..=head_size)?;
        if !self.dimensions.is_multiple_of(2) {
            return Err(ManifestError::OutOfRange {
                key: "model.block.rotary.dimensions",
                value: self.dimensions.to_string(),
                range: format!("even and at most the head size of {head_size}"),
            });
        }
        let positions = "model.block.rotary.scaling.original_positions";
        within(positions, self.scaling.original_positions().unwrap_or(1), 1..=1 << 24)?;
        let attention = "model.block.rotary.scaling.attention_factor";
        within(attention, self.scaling.attention_factor(), 1e-3..=1e3)?;
        self.check_scaling()
    }

    fn check_scaling(&self) -> Result<(), ManifestError> {
        let key = "model.block.rotary.scaling.factor";
        match &self.scaling {
            RotaryScaling::None => Ok(()),
            RotaryScaling::Linear { factor } => within(key, *factor, FACTORS),
            RotaryScaling::Llama3 {
                factor,
                low_frequency_factor: low,
                high_frequency_factor: high,
                ..
            } => {
                within(key, *factor, FACTORS)?;
                within("model.block.rotary.scaling.low_frequency_factor", *low, FACTORS)?;
                let least = low * (1.0 + 1e-9);
                within("model.block.rotary.scaling.high_frequency_factor", *high, least..=1e6)
            }
            RotaryScaling::Yarn { factor, beta_fast, beta_slow, .. } => {
                within(key, *factor, FACTORS)?;
                within("model.block.rotary.scaling.beta_fast", *beta_fast, FACTORS)?;
                within("model.block.rotary.scaling.beta_slow", *beta_slow, FACTORS)?;
                // The channel of a wave is a logarithm to this base.
                within("model.block.rotary.theta", self.theta, 1.001..=1e12)
            }
            RotaryScaling::Longrope { short_factors, long_factors, .. } => {
                let count = self.dimensions as usize / 2;
                for (of_list, of_factor, factors) in [
                    (
                        "model.block.rotary.scaling.short_factors (number)",
                        "model.block.rotary.scaling.short_factors",
                        short_factors,
                    ),
                    (
                        "model.block.rotary.scaling.long_factors (number)",
                        "model.block.rotary.scaling.long_factors",
                        long_factors,
                    ),
                ] {
                    within(of_list, factors.len(), count..=count)?;
                    factors.iter().try_for_each(|factor| within(of_factor, *factor, FACTORS))?;
                }
                Ok(())
            }
            RotaryScaling::Dynamic { factor, .. } => {
                within(key, *factor, 1.0..=1e6)?;
                // The base grows by the power of n / (n - 2).
                within("model.block.rotary.dimensions", self.dimensions, 4..=u32::MAX)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yarn() -> RotaryScaling {
        RotaryScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_positions: 64,
            truncate: true,
            attention_factor: 1.1,
        }
    }

    fn longrope(factors: usize) -> RotaryScaling {
        RotaryScaling::Longrope {
            short_factors: vec![1.0; factors],
            long_factors: vec![2.5; factors],
            original_positions: 64,
            attention_factor: 1.2,
        }
    }

    fn check(theta: f64, dimensions: u32, scaling: RotaryScaling) -> Result<(), String> {
        let rotary = Rotary { theta, dimensions, scaling };
        rotary.check(8).map_err(|error| error.to_string())
    }

    #[test]
    fn scalings_out_of_range_name_their_key() {
        let dynamic = |factor| RotaryScaling::Dynamic { factor, original_positions: 64 };
        for scaling in [yarn(), longrope(4), dynamic(2.0)] {
            assert_eq!(check(1e4, 8, scaling), Ok(()));
        }
        let refusals = [
            (check(1.0, 8, yarn()), "model.block.rotary.theta = 1"),
            (check(1e4, 8, longrope(3)), "short_factors (number) = 3"),
            (check(1e4, 6, longrope(4)), "it must be 3"),
            (check(1e4, 2, dynamic(2.0)), "model.block.rotary.dimensions = 2"),
            (check(1e4, 8, dynamic(0.5)), "model.block.rotary.scaling.factor = 0.5"),
        ];
        for (refusal, part) in refusals {
            let error = refusal.expect_err(part);
            assert!(error.contains(part), "{error}");
        }
        let RotaryScaling::Longrope { long_factors, short_factors, original_positions, .. } =
            longrope(4)
        else {
            unreachable!("it is")
        };
        let [silent, unbounded] = [(0.0, 64), (1.0, u32::MAX)].map(|(factor, positions)| {
            check(
                1e4,
                8,
                RotaryScaling::Longrope {
                    short_factors: short_factors.clone(),
                    long_factors: long_factors.clone(),
                    original_positions: original_positions.max(positions),
                    attention_factor: factor,
                },
            )
            .expect_err("refused")
        });
        assert!(silent.contains("attention_factor = 0"), "{silent}");
        assert!(unbounded.contains("original_positions = 4294967295"), "{unbounded}");
    }

    #[test]
    fn the_length_of_a_text_decides_some_wavelengths() {
        let lengths = |scaling: RotaryScaling| [1, 64, 65, 66].map(|n| scaling.deciding_length(n));
        assert_eq!(lengths(yarn()), [0; 4]);
        assert_eq!(lengths(longrope(4)), [64, 64, 65, 65]);
        let dynamic = RotaryScaling::Dynamic { factor: 2.0, original_positions: 64 };
        assert_eq!(lengths(dynamic), [64, 64, 65, 66]);
    }
}
