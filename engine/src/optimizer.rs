//! AdamW (Loshchilov and Hutter, arXiv 1711.05101) on a stage's flat vector.
//!
//! Each element is updated by f32 IEEE operations in a fixed order, that of unfused
//! `torch.optim.AdamW`, so replicas on any processor get the same bits. Scalars (learning rate,
//! bias corrections, clip scale) are computed in f64 in Rust and rounded once to f32.

use std::borrow::Cow;
use std::ops::Range;

use shoal_protocol::ids::Step;
use shoal_protocol::manifest::{Manifest, Optimizer};
use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::kernel::widest;
use crate::parameters::Parameter;
use crate::tensor::elements_mut;

/// Learning rate of a step: linear warm-up from `learning_rate / warmup_steps`, then half a cosine
/// down to `final_learning_rate` at the run's last step.
#[must_use]
pub fn learning_rate(manifest: &Manifest, step: Step) -> f64 {
    let optimizer = &manifest.optimizer;
    if step.0 < optimizer.warmup_steps {
        return optimizer.learning_rate * (step.0 + 1) as f64 / optimizer.warmup_steps as f64;
    }
    let last = manifest.training.steps.saturating_sub(1);
    let length = last.saturating_sub(optimizer.warmup_steps);
    if length == 0 {
        return optimizer.learning_rate;
    }
    let progress = ((step.0 - optimizer.warmup_steps) as f64 / length as f64).min(1.0);
    let share = 0.5 * (1.0 + libm::cos(std::f64::consts::PI * progress));
    optimizer.final_learning_rate
        + (optimizer.learning_rate - optimizer.final_learning_rate) * share
}

/// Factor on the gradient that limits its global norm to `gradient_clip`: `min(1, clip / (norm +
/// 1e-6))`, as in `torch.nn.utils.clip_grad_norm_`.
#[must_use]
pub fn clip_scale(optimizer: &Optimizer, global_norm: f64) -> f64 {
    if optimizer.gradient_clip == 0.0 {
        return 1.0;
    }
    (optimizer.gradient_clip / (global_norm + 1e-6)).min(1.0)
}

/// One optimizer update.
#[derive(Debug, Clone, Copy)]
pub struct Update<'a> {
    /// The step that the gradient is of.
    pub step: Step,
    /// The mean over all tokens, for each of the stage's weight groups in their order: f32,
    /// little-endian.
    pub gradients: &'a [&'a [u8]],
    /// Norm over all stages of the mean over targets.
    pub gradient_norm: f64,
    /// Tokens of the step that count towards the loss.
    pub targets: u64,
}

/// The scalars of an update.
#[derive(Debug, Clone, Copy)]
struct Scalars {
    /// Factor on the gradient: of clipping, and of the mean over targets.
    clip: f32,
    keep: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    root_correction2: f32,
    step_size: f32,
    epsilon: f32,
}

impl Scalars {
    fn new(manifest: &Manifest, update: &Update<'_>, decays: bool) -> Self {
        let Update { step, gradient_norm, targets, .. } = *update;
        let optimizer = &manifest.optimizer;
        let rate = learning_rate(manifest, step);
        let count = (step.0 + 1) as f64;
        let correction1 = 1.0 - libm::pow(optimizer.beta1, count);
        let correction2 = 1.0 - libm::pow(optimizer.beta2, count);
        let decay = if decays { optimizer.weight_decay } else { 0.0 };
        Self {
            clip: (clip_scale(optimizer, gradient_norm) * manifest.gradient_scale(targets)) as f32,
            keep: (1.0 - rate * decay) as f32,
            one_minus_beta1: (1.0 - optimizer.beta1) as f32,
            beta2: optimizer.beta2 as f32,
            one_minus_beta2: (1.0 - optimizer.beta2) as f32,
            root_correction2: libm::sqrt(correction2) as f32,
            step_size: (rate / correction1) as f32,
            epsilon: optimizer.epsilon as f32,
        }
    }
}

/// The two moments of a stage's gradient, flat f32 on the device.
#[derive(Debug)]
pub(crate) struct Moments {
    pub(crate) first: Tensor,
    pub(crate) second: Tensor,
}

impl Moments {
    pub(crate) fn new(elements: usize, device: Device) -> Result<Self> {
        let options = (Kind::Float, device);
        let size = [elements as i64];
        Ok(Self { first: Tensor::f_zeros(size, options)?, second: Tensor::f_zeros(size, options)? })
    }

    /// Updates flat `weights` by the mean gradient of a step: ranges of the flat vector, none of which
    /// ends within a parameter.
    pub(crate) fn apply(
        &mut self,
        weights: &mut Tensor,
        gradients: &[(Range<usize>, Cow<'_, [f32]>)],
        parameters: &[Parameter],
        manifest: &Manifest,
        update: &Update<'_>,
    ) -> Result<()> {
        let _guard = tch::no_grad_guard();
        let scalars = [false, true].map(|decays| Scalars::new(manifest, update, decays));
        for (place, gradient) in gradients {
            let on_device = match weights.device() {
                Device::Cpu => None,
                device => Some(Tensor::f_from_slice(gradient)?.f_to(device)?),
            };
            for parameter in parameters.iter().filter(|one| place.contains(&one.offset)) {
                let scalars = scalars[usize::from(parameter.decays())];
                let (range, start) = (parameter.range(), parameter.offset - place.start);
                if let Some(gradient) = &on_device {
                    let gradient = gradient.f_narrow(0, start as i64, range.len() as i64)?;
                    self.update_on_device(weights, &gradient, parameter, scalars)?;
                    continue;
                }
                update_elements(
                    &mut elements_mut(weights)[range.clone()],
                    &gradient[start..start + range.len()],
                    &mut elements_mut(&mut self.first)[range.clone()],
                    &mut elements_mut(&mut self.second)[range],
                    scalars,
                );
            }
        }
        Ok(())
    }

    /// The same operations in the same order as [`update_elements`], one kernel each.
    fn update_on_device(
        &mut self,
        weights: &Tensor,
        gradient: &Tensor,
        parameter: &Parameter,
        scalars: Scalars,
    ) -> Result<()> {
        let (start, length) = (parameter.offset as i64, parameter.len() as i64);
        let narrow = |tensor: &Tensor| tensor.f_narrow(0, start, length);
        let mut weight = narrow(weights)?;
        let mut first = narrow(&self.first)?;
        let mut second = narrow(&self.second)?;
        let gradient = gradient.f_mul_scalar(f64::from(scalars.clip))?;
        let _ = weight.f_mul_scalar_(f64::from(scalars.keep))?;
        let change = gradient.f_sub(&first)?.f_mul_scalar(f64::from(scalars.one_minus_beta1))?;
        let _ = first.f_add_(&change)?;
        let square = gradient.f_mul(&gradient)?.f_mul_scalar(f64::from(scalars.one_minus_beta2))?;
        let _ = second.f_mul_scalar_(f64::from(scalars.beta2))?.f_add_(&square)?;
        let root = second.f_sqrt()?.f_div_scalar(f64::from(scalars.root_correction2))?;
        let denominator = root.f_add_scalar(f64::from(scalars.epsilon))?;
        let change = first.f_div(&denominator)?.f_mul_scalar(f64::from(scalars.step_size))?;
        let _ = weight.f_sub_(&change)?;
        Ok(())
    }
}

widest! {
    /// One pass over weights, gradient and moments of equal length.
    fn update_elements(
        weights: &mut [f32],
        gradient: &[f32],
        first: &mut [f32],
        second: &mut [f32],
        scalars: Scalars,
    ) {
        let moments = first.iter_mut().zip(second);
        for ((weight, gradient), (first, second)) in weights.iter_mut().zip(gradient).zip(moments) {
            let gradient = gradient * scalars.clip;
            let kept = *weight * scalars.keep;
            *first += (gradient - *first) * scalars.one_minus_beta1;
            *second = *second * scalars.beta2 + gradient * gradient * scalars.one_minus_beta2;
            let denominator = second.sqrt() / scalars.root_correction2 + scalars.epsilon;
            *weight = kept - *first / denominator * scalars.step_size;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::elements;
    use crate::testing::manifest;

    /// The result of `torch.optim.AdamW` 2.11 for the same weights, gradients, clipping and rates
    /// after six steps; the last two weights have no decay.
    const GOLDEN: [f64; 8] = [
        4.925125241e-1,
        -1.252880573,
        4.006404430e-2,
        2.001066685,
        -7.576274276e-1,
        -1.135982340e-3,
        1.007524014,
        1.000661731,
    ];

    #[test]
    fn six_steps_match_pytorch() {
        let manifest = manifest();
        let parameters = [
            Parameter { name: "matrix".to_owned(), shape: vec![2, 3], offset: 0 },
            Parameter { name: "vector".to_owned(), shape: vec![2], offset: 6 },
        ];
        let mut weights = Tensor::from_slice(&[0.5f32, -1.25, 0.031, 2.0, -0.75, 1e-3, 1.0, 1.0]);
        let mut moments = Moments::new(8, Device::Cpu).expect("small");
        for step in 0..6u32 {
            let value = |index: u32| {
                let size = if index % 2 == 1 { 0.3 } else { 2.0 };
                ((1.7 * f64::from(index) + f64::from(step)).sin() * size) as f32
            };
            let gradient: Vec<f32> = (0..8).map(value).collect();
            let norm = gradient.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
            let update = Update {
                step: Step(u64::from(step)),
                gradients: &[],
                gradient_norm: norm,
                targets: manifest.tokens_per_step(),
            };
            moments
                .apply(&mut weights, &[(0..8, gradient.into())], &parameters, &manifest, &update)
                .expect("matching lengths");
        }
        for (weight, golden) in elements::<f32>(&weights).iter().zip(GOLDEN) {
            let error = (f64::from(*weight) - golden).abs();
            assert!(error <= 1e-6 * golden.abs() + 2e-9, "{weight} is not {golden}");
        }
    }

    #[test]
    fn the_rate_warms_up_and_falls_to_its_end() {
        let manifest = manifest();
        let rates: Vec<f64> = (0..7).map(|step| learning_rate(&manifest, Step(step))).collect();
        assert_eq!(rates[..3], [1.5e-3, 3e-3, 3e-3]);
        assert!((rates[3] - 2.325e-3).abs() < 1e-12);
        assert!((rates[5] - 3e-4).abs() < 1e-12 && rates[6] == rates[5]);
    }

    #[test]
    fn only_a_norm_above_the_clip_is_scaled() {
        let mut optimizer = manifest().optimizer;
        assert_eq!(clip_scale(&optimizer, 0.5), 1.0);
        assert!((clip_scale(&optimizer, 4.0) - 0.25).abs() < 1e-6);
        optimizer.gradient_clip = 0.0;
        assert_eq!(clip_scale(&optimizer, 4.0), 1.0);
    }
}
