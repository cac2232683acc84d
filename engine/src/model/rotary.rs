//! Rotary embeddings (Su et al., arXiv 2104.09864): the angle of each position and pair of channels.

use std::f64::consts::TAU;

use shoal_protocol::manifest::{Model, Rotary, RotaryScaling};
use tch::{Device, Kind, Tensor};

use crate::device::tensor::elements;
use crate::error::Result;

/// Cosines and sines of the angles, f32 `[T, R / 2]` for R rotated channels of a head, times the factor on attention.
#[derive(Debug)]
pub(crate) struct Angles {
    pub(crate) cosine: Tensor,
    pub(crate) sine: Tensor,
}

impl Angles {
    /// Of `model.context` positions, for texts of `length` tokens.
    pub(crate) fn new(rotary: &Rotary, model: &Model, length: u32, device: Device) -> Result<Self> {
        let options = (Kind::Float, Device::Cpu);
        let frequencies = Tensor::f_from_slice(&frequencies(rotary, length)?)?.f_unsqueeze(0)?;
        let positions = Tensor::f_arange(i64::from(model.context), options)?.f_unsqueeze(1)?;
        let angles = positions.f_mul(&frequencies)?;
        let factor = rotary.scaling.attention_factor();
        let of = |values: Tensor| -> Result<Tensor> {
            let values = if factor == 1.0 { values } else { values.f_mul_scalar(factor)? };
            Ok(values.f_to(device)?)
        };
        Ok(Self { cosine: of(angles.f_cos()?)?, sine: of(angles.f_sin()?)? })
    }

    /// Those of tokens at these places, i64, one after the other.
    pub(crate) fn of(&self, places: &Tensor) -> Result<Self> {
        let places = places.f_flatten(0, -1)?;
        let of = |all: &Tensor| all.f_index_select(0, &places);
        Ok(Self { cosine: of(&self.cosine)?, sine: of(&self.sine)? })
    }

    /// Of no channel: nothing is rotated.
    pub(crate) fn none(model: &Model, device: Device) -> Result<Self> {
        let empty = || Tensor::f_zeros([i64::from(model.context), 0], (Kind::Float, device));
        Ok(Self { cosine: empty()?, sine: empty()? })
    }
}

/// The frequency of each pair of channels, in radians per position, in texts of `length` tokens.
fn frequencies(rotary: &Rotary, length: u32) -> Result<Vec<f32>> {
    let dimensions = i64::from(rotary.dimensions);
    let exponents = Tensor::f_arange_start_step(0, dimensions, 2, (Kind::Float, Device::Cpu))?
        .f_div_scalar(dimensions as f64)?;
    let periods = Tensor::f_pow_scalar(grown_theta(rotary, length), &exponents)?;
    let plain = elements::<f32>(&periods.f_reciprocal()?).to_vec();
    let periods = elements::<f32>(&periods);
    let each = |of: &dyn Fn(f32) -> f32| plain.iter().map(|plain| of(*plain)).collect();
    Ok(match &rotary.scaling {
        RotaryScaling::None | RotaryScaling::Dynamic { .. } => plain,
        RotaryScaling::Linear { factor } => each(&|plain| plain / *factor as f32),
        RotaryScaling::Llama3 {
            factor,
            low_frequency_factor,
            high_frequency_factor,
            original_positions,
        } => {
            let bounds = [*low_frequency_factor, *high_frequency_factor];
            each(&|plain| llama3(plain, *factor, bounds, *original_positions))
        }
        RotaryScaling::Longrope { short_factors, long_factors, original_positions, .. } => {
            let is_long = length > *original_positions;
            let factors = if is_long { long_factors } else { short_factors };
            let pairs = factors.iter().zip(periods);
            pairs.map(|(factor, period)| 1.0 / (*factor as f32 * period)).collect()
        }
        RotaryScaling::Yarn { factor, .. } => {
            let ramp = yarn_ramp(rotary);
            let pairs = plain.iter().zip(periods).zip(ramp);
            let blend = |((plain, period), ramp): ((&f32, &f32), f32)| {
                let unchanged = 1.0 - ramp;
                1.0 / (*factor as f32 * period) * (1.0 - unchanged) + plain * unchanged
            };
            pairs.map(blend).collect()
        }
    })
}

/// The base of the wavelengths in texts of `length` tokens.
fn grown_theta(rotary: &Rotary, length: u32) -> f64 {
    let RotaryScaling::Dynamic { factor, original_positions } = rotary.scaling else {
        return rotary.theta;
    };
    if length <= original_positions {
        return rotary.theta;
    }
    let dimensions = f64::from(rotary.dimensions);
    let longer = f64::from(length) / f64::from(original_positions);
    let growth = factor * longer - (factor - 1.0);
    rotary.theta * growth.powf(dimensions / (dimensions - 2.0))
}

fn llama3(frequency: f32, factor: f64, [low, high]: [f64; 2], original_positions: u32) -> f32 {
    let wavelength = TAU / f64::from(frequency);
    let positions = f64::from(original_positions);
    if wavelength < positions / high {
        frequency
    } else if wavelength > positions / low {
        frequency / factor as f32
    } else {
        let smooth = ((positions / wavelength - low) / (high - low)) as f32;
        (1.0 - smooth) * (frequency / factor as f32) + smooth * frequency
    }
}

/// How far YaRN stretches the wave of each pair of channels: 0 is not, 1 is by the whole factor.
///
/// # Panics
/// If the rotary embedding has another scaling.
fn yarn_ramp(rotary: &Rotary) -> Vec<f32> {
    let RotaryScaling::Yarn { beta_fast, beta_slow, original_positions, truncate, .. } =
        rotary.scaling
    else {
        unreachable!("the ramp is YaRN's")
    };
    let dimensions = f64::from(rotary.dimensions);
    // The channel whose wave has so many turns in the original positions.
    let channel = |turns: f64| {
        let turns = (f64::from(original_positions) / (turns * TAU)).ln();
        dimensions * turns / (2.0 * rotary.theta.ln())
    };
    let (low, high) = (channel(beta_fast), channel(beta_slow));
    let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
    let (low, mut high) = (low.max(0.0), high.min(dimensions - 1.0));
    if low == high {
        high += 1e-3;
    }
    let ramp = |pair: u32| ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
    (0..rotary.dimensions / 2).map(ramp).collect()
}
