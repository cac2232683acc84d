//! The packed matrices of a stage.

use std::collections::BTreeMap;

use tch::Tensor;

/// The sections of packed matrices ([`crate::numeric::nf4`]) by the names of their weights. Each has all of its matrix.
#[derive(Debug)]
pub(crate) struct Packed(pub(crate) BTreeMap<String, Tensor>);

impl Packed {
    /// The section of a matrix.
    ///
    /// # Panics
    /// If the stage has no such packed matrix.
    pub(crate) fn section(&self, name: &str) -> Tensor {
        self.0[name].shallow_clone()
    }
}
