//! Floating-point operations: the number that a pass requires, and the rate that a device achieves.

use std::time::{Duration, Instant};

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Dtype, Manifest};
use tch::{Cuda, Kind, Tensor};

use crate::device::Device;
use crate::error::Result;
use crate::parameters::{Parameter, model_parameters, parameters};

/// Minimum duration of the measurement.
const TIMED: Duration = Duration::from_millis(60);

/// Floating-point operations of a stage's forward pass over one microbatch, by the usual
/// convention: two for each matrix element and token, plus those of attention over the whole
/// context. A backward pass has twice as many.
#[must_use]
pub fn forward_flops(manifest: &Manifest, stage: Stage) -> f64 {
    let model = &manifest.model;
    let tokens = f64::from(manifest.training.microbatch_size) * f64::from(model.context);
    // Norms are vectors, and the embedding is a lookup.
    let multiplied =
        |parameter: &&Parameter| parameter.decays() && !parameter.name.contains("embed_");
    let mut list = model_parameters(manifest, stage);
    if manifest.lora.is_some() {
        list.extend(parameters(manifest, stage));
    }
    let mut weights: usize = list.iter().filter(multiplied).map(Parameter::len).sum();
    if model.block.tied && manifest.training.stages == 1 {
        weights += (model.vocabulary * model.hidden) as usize;
    }
    let layers = manifest.layers_of(stage).len() as f64;
    let attention = 4.0 * layers * f64::from(model.context) * f64::from(model.query_width());
    tokens * (2.0 * weights as f64 + attention)
}

/// Floating-point operations per second of a device in a product of large square matrices: the best
/// of several measurements, since other programs may use the machine.
///
/// # Errors
/// If the device has too little memory.
pub fn peak_flops(device: Device, dtype: Dtype) -> Result<f64> {
    let kind = match dtype {
        Dtype::F32 => Kind::Float,
        Dtype::Bf16 => Kind::BFloat16,
    };
    let side: i64 = if device.is_cuda() { 8192 } else { 1024 };
    let _guard = tch::no_grad_guard();
    let matrix = Tensor::f_ones([side, side], (kind, device.torch))?;
    let product = || -> Result<Duration> {
        let start = Instant::now();
        let _ = matrix.f_matmul(&matrix)?;
        if let tch::Device::Cuda(index) = device.torch {
            Cuda::synchronize(index as i64);
        }
        Ok(start.elapsed())
    };
    // The first product initialises libraries.
    let mut best = product()?;
    let start = Instant::now();
    while start.elapsed() < TIMED {
        best = best.min(product()?);
    }
    Ok(2.0 * (side as f64).powi(3) / best.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use shoal_protocol::manifest::example;

    use super::*;
    use crate::device::DeviceChoice;
    use crate::parameters::parameter_count;

    #[test]
    fn a_pass_has_two_operations_per_weight_and_token_plus_attention() {
        let mut manifest = example::small();
        manifest.training.stages = 1;
        let model = &manifest.model;
        let (hidden, vocabulary) = (model.hidden as usize, model.vocabulary as usize);
        let norms = hidden * (2 * model.layers as usize + 1);
        let weights = parameter_count(&manifest, Stage(0)) - norms - vocabulary * hidden;
        let attention = 2 * 2 * model.layers as usize * model.context as usize * hidden;
        let tokens = manifest.training.microbatch_size as usize * model.context as usize;
        let expected = tokens * (2 * weights + attention);
        assert_eq!(forward_flops(&manifest, Stage(0)), expected as f64);
    }

    #[test]
    fn the_parts_of_a_split_model_add_up() {
        let mut manifest = example::small();
        let of = |manifest: &Manifest| -> f64 {
            manifest.stages().map(|stage| forward_flops(manifest, stage)).sum()
        };
        manifest.training.stages = 1;
        let whole = of(&manifest);
        manifest.training.stages = 2;
        assert_eq!(of(&manifest), whole);
    }

    #[test]
    fn the_peak_of_a_processor_is_plausible() {
        let device = Device::open(DeviceChoice::Cpu, 1).expect("a processor");
        let peak = peak_flops(device, Dtype::F32).expect("memory");
        assert!((1e8..1e15).contains(&peak), "{peak}");
    }
}
