//! Rotary embeddings (Su et al., arXiv 2104.09864): the angle of each position and pair of channels.

use shoal_protocol::manifest::{Model, Rotary, RotaryScaling};
use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::tensor::elements;

/// Cosines and sines of the angles, f32 `[T, R / 2]` for R rotated channels of a head.
#[derive(Debug)]
pub(crate) struct Angles {
    pub(crate) cosine: Tensor,
    pub(crate) sine: Tensor,
}

impl Angles {
    /// For samples of at most `model.context` tokens.
    pub(crate) fn new(rotary: &Rotary, model: &Model, device: Device) -> Result<Self> {
        let options = (Kind::Float, Device::Cpu);
        let dimensions = i64::from(rotary.dimensions);
        let exponents = Tensor::f_arange_start_step(0, dimensions, 2, options)?
            .f_div_scalar(dimensions as f64)?;
        let frequencies = Tensor::f_pow_scalar(rotary.theta, &exponents)?.f_reciprocal()?;
        let scaled: Vec<f32> = elements::<f32>(&frequencies)
            .iter()
            .map(|frequency| scale(*frequency, rotary.scaling))
            .collect();
        let frequencies = Tensor::f_from_slice(&scaled)?.f_unsqueeze(0)?;
        let positions = Tensor::f_arange(i64::from(model.context), options)?.f_unsqueeze(1)?;
        let angles = positions.f_mul(&frequencies)?;
        Ok(Self { cosine: angles.f_cos()?.f_to(device)?, sine: angles.f_sin()?.f_to(device)? })
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

/// A frequency, in radians per position, after scaling.
fn scale(frequency: f32, scaling: RotaryScaling) -> f32 {
    match scaling {
        RotaryScaling::None => frequency,
        RotaryScaling::Linear { factor } => frequency / factor as f32,
        RotaryScaling::Llama3 {
            factor,
            low_frequency_factor: low,
            high_frequency_factor: high,
            original_positions,
        } => {
            let wavelength = 2.0 * std::f64::consts::PI / f64::from(frequency);
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
    }
}
