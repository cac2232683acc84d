//! What passes read of some weights, on a device that has it only while it is used.

use tch::{Device, Tensor};

use crate::error::Result;

/// Copies of tensors on a device. Passes read the copies through views that never change; [`crate::swap::Images`] gives
/// the copies memory while they are used.
#[derive(Debug)]
pub(crate) struct Image(Vec<Copied>);

/// A tensor, and its image.
#[derive(Debug)]
pub(crate) struct Copied {
    /// Where the values are kept.
    pub(crate) kept: Tensor,
    /// All of its storage.
    pub(crate) image: Tensor,
}

impl Image {
    /// Images of these tensors, without their values yet: the weights in the dtype of passes, and an embedding that
    /// is read in f32 beside them.
    pub(crate) fn of<'a>(
        kept: impl IntoIterator<Item = &'a Tensor>,
        device: Device,
    ) -> Result<Self> {
        let copied = |kept: &Tensor| {
            let image = Tensor::f_empty(kept.size(), (kept.kind(), device))?;
            Ok(Copied { kept: kept.shallow_clone(), image })
        };
        Ok(Self(kept.into_iter().map(copied).collect::<Result<_>>()?))
    }

    /// The weights in the dtype of passes.
    pub(crate) fn values(&self) -> &Tensor {
        &self.0[0].image
    }

    /// The embedding in f32, where passes read it beside them.
    pub(crate) fn embedding(&self) -> Option<&Tensor> {
        self.0.get(1).map(|copied| &copied.image)
    }

    /// Handles of all tensors.
    pub(crate) fn handles(&self) -> impl Iterator<Item = Copied> {
        self.0.iter().map(|Copied { kept, image }| Copied {
            kept: kept.shallow_clone(),
            image: image.shallow_clone(),
        })
    }
}
