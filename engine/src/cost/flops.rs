//! Floating-point operations: the number that a pass requires, and the rate that a device achieves.

use std::time::{Duration, Instant};

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Dtype, Manifest};
use tch::{Cuda, Kind, Tensor};

use crate::device::setup::Device;
use crate::error::Result;
use crate::model::layer_table::share_of_tokens;
use crate::model::parameters::{Parameter, model_parameters, parameters};

/// Minimum duration of the measurement.
const TIMED: Duration = Duration::from_millis(60);

/// Floating-point operations of a stage's passes over one microbatch. A virtual worker makes all of its passes, in
/// both directions, in the forward pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PassFlops {
    /// Of the forward pass.
    pub forward: f64,
    /// Of the backward pass, without a repeated forward pass.
    pub backward: f64,
}

/// Floating-point operations of a stage's passes over one microbatch, by the usual convention: a
/// forward pass has two for each matrix element and token, plus those of attention over the whole
/// context. A backward pass has as many for the gradients of its inputs, and for those of the trained
/// weights.
#[must_use]
pub fn pass_flops(manifest: &Manifest, stage: Stage) -> PassFlops {
    let model = &manifest.model;
    let tokens = f64::from(manifest.training.microbatch_size) * f64::from(model.context);
    // Embedding and head are one matrix: the lookup costs nothing, the product does.
    let head = match model.block.tied && manifest.training.stages == 1 {
        true => f64::from(model.vocabulary) * f64::from(model.hidden),
        false => 0.0,
    };
    let whole = multiplied(manifest, &model_parameters(manifest, stage)) + head;
    let (trained, frozen) = match manifest.lora {
        Some(_) => (multiplied(manifest, &parameters(manifest, stage)), whole),
        None => (whole, 0.0),
    };
    let layers = manifest.layers_of(stage).len() as f64;
    let attention = 4.0 * layers * f64::from(model.context) * f64::from(model.query_width());
    let (trained, frozen) = (2.0 * trained, 2.0 * frozen);
    let forward = tokens * (trained + frozen + attention);
    let backward = tokens * (2.0 * (trained + attention) + frozen);
    match &manifest.inner {
        Some(inner) if !manifest.workers_exchange() => {
            PassFlops { forward: f64::from(inner.passes()) * (forward + backward), backward: 0.0 }
        }
        _ => PassFlops { forward, backward },
    }
}

/// Elements of the matrices that a token is multiplied by, on average. Norms are vectors, the embedding is a lookup, and
/// a token has a few of the experts.
fn multiplied(manifest: &Manifest, parameters: &[Parameter]) -> f64 {
    let is_matrix = |one: &&Parameter| one.decays() && !one.name.contains("embed_");
    let of_token = |one: &Parameter| share_of_tokens(&manifest.model, &one.name) * one.len() as f64;
    parameters.iter().filter(is_matrix).map(of_token).sum()
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
    let matrix = factor(side, kind, device.torch)?;
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

/// A square matrix of random numbers. A GPU multiplies constants faster: they need less power.
fn factor(side: i64, kind: Kind, device: tch::Device) -> Result<Tensor> {
    Ok(Tensor::f_empty([side, side], (kind, device))?.f_uniform_(-1.0, 1.0)?)
}

#[cfg(test)]
mod tests {
    use shoal_protocol::manifest::{Experts, Lora, LoraTarget, example};

    use super::*;
    use crate::device::setup::DeviceChoice;
    use crate::model::parameters::parameter_count;

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
        let PassFlops { forward, backward } = pass_flops(&manifest, Stage(0));
        assert_eq!((forward, backward), (expected as f64, 2.0 * expected as f64));
    }

    #[test]
    fn the_parts_of_a_split_model_add_up() {
        let mut manifest = example::small();
        let of = |manifest: &Manifest| -> f64 {
            manifest.stages().map(|stage| pass_flops(manifest, stage).forward).sum()
        };
        manifest.training.stages = 1;
        let whole = of(&manifest);
        manifest.training.stages = 2;
        assert_eq!(of(&manifest), whole);
    }

    #[test]
    fn frozen_weights_get_no_gradients() {
        let mut manifest = example::small();
        manifest.training.stages = 1;
        let whole = pass_flops(&manifest, Stage(0));
        let rank = 1;
        manifest.lora =
            Some(Lora { rank, alpha: 1.0, targets: LoraTarget::ALL.to_vec(), base: None });
        let adapted = pass_flops(&manifest, Stage(0));
        assert!(adapted.forward > whole.forward && adapted.backward < whole.backward);
    }

    #[test]
    fn a_token_is_multiplied_by_its_experts_alone() {
        let mut manifest = example::small();
        manifest.training.stages = 1;
        let of = |manifest: &Manifest| pass_flops(manifest, Stage(0)).forward;
        let dense = of(&manifest);
        let (hidden, layers) = (f64::from(manifest.model.hidden), f64::from(manifest.model.layers));
        let (count, per_token, width) = (8, 2, manifest.model.intermediate / 2);
        manifest.model.block.experts = Some(Experts::new(count, per_token, width));
        // Two experts of half the width have as many weights as the block, beside the router's.
        let tokens = manifest.tokens_per_microbatch() as f64;
        assert_eq!(of(&manifest) - dense, tokens * 2.0 * layers * hidden * f64::from(count));
        let total = parameter_count(&manifest, Stage(0));
        let block = 3.0 * hidden * f64::from(width * per_token);
        assert!(total as f64 > layers * 4.0 * block, "all experts are weights");
    }

    #[test]
    fn peaks_are_of_random_numbers() {
        let matrix = factor(16, Kind::Float, tch::Device::Cpu).expect("room");
        let spread = f64::try_from(matrix.std(true)).expect("a number");
        assert!((0.4..0.8).contains(&spread), "{spread}");
    }

    #[test]
    fn the_peak_of_a_processor_is_plausible() {
        let device = Device::open(DeviceChoice::Cpu, 1).expect("a processor");
        let peak = peak_flops(device, Dtype::F32).expect("memory");
        assert!((1e8..1e15).contains(&peak), "{peak}");
    }
}
