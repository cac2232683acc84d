//! The matrices of a product: as they are, or packed in few bits and unpacked for the product alone.

use std::ffi::c_char;
use std::ptr;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::device::shim::{new_tensor, pointer};
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
                [matrix] => Ok(x.f_linear(matrix, bias)?),
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
