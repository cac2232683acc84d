//! The matrices of a product: as they are, or packed in few bits and unpacked for the product alone.

use std::ffi::c_char;
use std::ptr;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::device::shim::{linear, new_tensor, pointer};
use crate::error::Result;
use crate::numeric::nf4::Window;

unsafe extern "C" {
    fn shoal_packed_linear(
        x: *mut C_tensor,
        sections: *const *mut C_tensor,
        windows: *const Window,
        count: usize,
        bias: *mut C_tensor,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
}

/// Matrices below each other.
#[derive(Debug)]
pub(crate) struct Factor {
    /// Views of weights, or sections of packed matrices.
    pub(crate) matrices: Vec<Tensor>,
    /// The part of each packed matrix; none of matrices that are not packed.
    pub(crate) windows: Vec<Window>,
}

impl Factor {
    /// One matrix, or adjacent ones, in the dtype of passes.
    pub(crate) fn plain(matrix: Tensor) -> Self {
        Self { matrices: vec![matrix], windows: Vec::new() }
    }

    /// The same matrices.
    pub(crate) fn alias(&self) -> Self {
        let matrices = self.matrices.iter().map(Tensor::shallow_clone).collect();
        Self { matrices, windows: self.windows.clone() }
    }

    /// The product of `x` with the matrices below each other, plus a bias.
    pub(crate) fn linear(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        if self.windows.is_empty() {
            return match &self.matrices[..] {
                [matrix] => linear(x, matrix, bias),
                several => Ok(x.f_linear(&Tensor::f_cat(several, 0)?, bias)?),
            };
        }
        let sections: Vec<*mut C_tensor> = self.matrices.iter().map(pointer).collect();
        let bias = bias.map_or(ptr::null_mut(), pointer);
        // SAFETY: the pointers are of live tensors or of the result, and there is a window for each section.
        new_tensor(|result| unsafe {
            let (sections, windows) = (sections.as_ptr(), self.windows.as_ptr());
            shoal_packed_linear(pointer(x), sections, windows, self.windows.len(), bias, result)
        })
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::device::shim::{gradients, gradients_or_factors};
    use crate::weights::gradient::Gradient;

    /// The bits of a weight's gradient depend neither on who computes the product, libtorch's autograd or this crate, nor
    /// on when.
    #[test]
    fn factors_give_the_bits_of_the_backward_pass() {
        let on = |kind| (kind, Device::Cpu);
        for kind in [Kind::Float, Kind::BFloat16] {
            for (shape, has_bias) in [
                (vec![2, 64, 96], false),
                (vec![3, 7, 96], true),
                (vec![41, 96], true),
                (vec![1, 96], false),
                (vec![0, 96], false),
            ] {
                let trained = |shape: &[i64]| {
                    Tensor::randn(shape, on(Kind::Float)).to_kind(kind).set_requires_grad(true)
                };
                let (x, weight, bias) = (trained(&shape), trained(&[200, 96]), trained(&[200]));
                let bias = Some(&bias).filter(|_| has_bias);
                let inputs: Vec<&Tensor> = [&x, &weight].into_iter().chain(bias).collect();
                let read = || &x * 2.0;
                let plain = read().linear(&weight, bias);
                let given = Tensor::randn_like(&plain);
                let expected = gradients(&plain, Some(&given), &inputs).expect("a graph");

                let factor = Factor::plain(weight.shallow_clone());
                let product = || factor.linear(&read(), bias).expect("a product");
                assert!(product() == plain, "{kind:?}, {shape:?}");
                let whole = gradients(&product(), Some(&given), &inputs).expect("a graph");
                assert!(whole == expected, "{kind:?}, {shape:?}: at once");
                let left = gradients_or_factors(&product(), &given, &inputs).expect("a graph");
                let left: Vec<Gradient> = left.into_iter().map(Gradient::from).collect();
                let are_left = left.iter().map(|one| matches!(one, Gradient::Factors { .. }));
                assert!(are_left.eq([false, true, false].into_iter().take(inputs.len())));
                let later: Vec<Tensor> =
                    left.into_iter().map(|one| one.into_whole().expect("a product")).collect();
                assert!(later == expected, "{kind:?}, {shape:?}: later");
            }
        }
    }
}
