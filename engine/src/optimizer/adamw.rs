//! AdamW (Loshchilov and Hutter, arXiv 1711.05101), in the order of unfused `torch.optim.AdamW`.

use shoal_protocol::manifest::Adam;
use tch::{Kind, Tensor};

use super::Terms;
use crate::device::cuda::{Argument, Kernels};
use crate::device::kernel::widest;
use crate::error::Result;

/// The scalars of an update, rounded once to f32.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scalars {
    pub(super) scale: f32,
    keep: f32,
    pub(super) one_minus_beta1: f32,
    pub(super) beta2: f32,
    pub(super) one_minus_beta2: f32,
    pub(super) root_correction2: f32,
    step_size: f32,
    pub(super) epsilon: f32,
}

impl Scalars {
    pub(super) fn new(adam: &Adam, terms: &Terms) -> Self {
        let count = terms.count as f64;
        let correction1 = 1.0 - libm::pow(adam.beta1, count);
        let correction2 = 1.0 - libm::pow(adam.beta2, count);
        Self {
            scale: terms.scale,
            keep: (1.0 - terms.rate * terms.decay) as f32,
            one_minus_beta1: (1.0 - adam.beta1) as f32,
            beta2: adam.beta2 as f32,
            one_minus_beta2: (1.0 - adam.beta2) as f32,
            root_correction2: libm::sqrt(correction2) as f32,
            step_size: (terms.rate / correction1) as f32,
            epsilon: adam.epsilon as f32,
        }
    }

    /// As the kernel has them.
    pub(super) fn in_order(self) -> [f32; 8] {
        [
            self.scale,
            self.keep,
            self.one_minus_beta1,
            self.beta2,
            self.one_minus_beta2,
            self.root_correction2,
            self.step_size,
            self.epsilon,
        ]
    }
}

widest! {
    /// One pass over weights, gradient and moments of equal length.
    pub(super) fn update(
        weights: &mut [f32],
        gradient: &[f32],
        moments: [&mut [f32]; 2],
        scalars: Scalars,
    ) {
        let [first, second] = moments;
        let moments = first.iter_mut().zip(second);
        for ((weight, gradient), (first, second)) in weights.iter_mut().zip(gradient).zip(moments) {
            let gradient = gradient * scalars.scale;
            let kept = *weight * scalars.keep;
            *first += (gradient - *first) * scalars.one_minus_beta1;
            *second = *second * scalars.beta2 + gradient * gradient * scalars.one_minus_beta2;
            let denominator = second.sqrt() / scalars.root_correction2 + scalars.epsilon;
            *weight = kept - *first / denominator * scalars.step_size;
        }
    }
}

/// The same operations in the same order as [`update`]: in one kernel of this crate, or in one of libtorch's each.
pub(super) fn update_on_device(
    weights: Tensor,
    gradient: &Tensor,
    moments: [Tensor; 2],
    scalars: Scalars,
) -> Result<()> {
    match Kernels::of(weights.device()) {
        Some(kernels) => update_at_once(kernels, &weights, gradient, &moments, scalars),
        None => update_by_parts(weights, gradient, moments, scalars),
    }
}

fn update_at_once(
    kernels: &Kernels,
    weights: &Tensor,
    gradient: &Tensor,
    [first, second]: &[Tensor; 2],
    scalars: Scalars,
) -> Result<()> {
    let count = weights.numel();
    for tensor in [weights, gradient, first, second] {
        let fits = tensor.numel() == count && tensor.is_contiguous();
        assert!(fits && tensor.kind() == Kind::Float, "a weight has a gradient and two moments");
        assert_eq!(tensor.device(), weights.device(), "they are beside each other");
    }
    let arguments = [
        Argument::of(gradient, 0),
        Argument::Count(count as u64),
        Argument::of(weights, 0),
        Argument::of(first, 0),
        Argument::of(second, 0),
        Argument::Numbers(scalars.in_order()),
    ];
    // SAFETY: all four have as many numbers of f32, one after the other.
    unsafe { kernels.launch("shoal_adamw", count as u64, arguments) }
}

fn update_by_parts(
    mut weights: Tensor,
    gradient: &Tensor,
    [mut first, mut second]: [Tensor; 2],
    scalars: Scalars,
) -> Result<()> {
    let gradient = gradient.f_mul_scalar(f64::from(scalars.scale))?;
    let _ = weights.f_mul_scalar_(f64::from(scalars.keep))?;
    let change = gradient.f_sub(&first)?.f_mul_scalar(f64::from(scalars.one_minus_beta1))?;
    let _ = first.f_add_(&change)?;
    let square = gradient.f_mul(&gradient)?.f_mul_scalar(f64::from(scalars.one_minus_beta2))?;
    let _ = second.f_mul_scalar_(f64::from(scalars.beta2))?.f_add_(&square)?;
    // By a tensor: on a GPU, libtorch multiplies by the reciprocal of a number, which may be another bit.
    let correction = f64::from(scalars.root_correction2);
    let correction = Tensor::f_full([1], correction, (Kind::Float, second.device()))?;
    let root = second.f_sqrt()?.f_div(&correction)?;
    let denominator = root.f_add_scalar(f64::from(scalars.epsilon))?;
    let change = first.f_div(&denominator)?.f_mul_scalar(f64::from(scalars.step_size))?;
    let _ = weights.f_sub_(&change)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::tests::{of, of_mut, on_processor};
    use crate::device::tensor::elements;

    #[test]
    fn all_ways_have_the_same_bits() {
        let numbers = |scale: f32| (1..200).map(|index| (index as f32).sin() * scale).collect();
        let (mut weights, gradient): (Vec<f32>, Vec<f32>) = (numbers(2.0), numbers(0.1));
        let mut moments: [Vec<f32>; 2] = [vec![0.0; weights.len()], vec![0.0; weights.len()]];
        let [on_device, first, second] =
            [&weights, &moments[0], &moments[1]].map(|values| Tensor::from_slice(values));
        let mut by_kernel = (weights.clone(), moments.clone());
        for count in 1..5 {
            let terms =
                Terms { scale: 0.7, rate: 1e-2, decay: 0.1, count, is_matrix: true, threads: 1 };
            let scalars = Scalars::new(&Adam { beta2: 0.95, ..Adam::DEFAULT }, &terms);
            update(&mut weights, &gradient, moments.each_mut().map(|one| &mut one[..]), scalars);
            let (weights, [first_moments, second_moments]) = &mut by_kernel;
            let arguments = [
                of(&gradient),
                Argument::Count(gradient.len() as u64),
                of_mut(weights),
                of_mut(first_moments),
                of_mut(second_moments),
                Argument::Numbers(scalars.in_order()),
            ];
            on_processor("shoal_adamw", arguments);
            let held = [&first, &second].map(Tensor::shallow_clone);
            let gradient = Tensor::from_slice(&gradient);
            update_on_device(on_device.shallow_clone(), &gradient, held, scalars).expect("a CPU");
        }
        assert_eq!(elements::<f32>(&on_device), weights);
        assert_eq!(by_kernel, (weights, moments.clone()));
        assert_eq!([&first, &second].map(elements::<f32>), moments.each_ref().map(|one| &one[..]));
    }
}
