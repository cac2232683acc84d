//! Data that crosses a stage boundary: its shape and its size in bytes.

use serde::{Deserialize, Serialize};

use super::{LABEL_BYTES, Manifest, ManifestError, Model, within};
use crate::codec::Codec;
use crate::units::Bytes;

/// Layers that compress each activation at the end of a stage and expand it at the beginning of the
/// next, trained with the rest (Ryabinin et al., arXiv 2301.11913, "compression-aware
/// architectures"). They are part of the model: it is narrow at stage boundaries.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(deny_unknown_fields)]
pub struct Boundary {
    /// The operation that narrows an activation.
    pub kind: BoundaryKind,
    /// Numbers per token that cross the boundary, instead of `model.hidden`.
    pub width: u32,
}

/// The operation that narrows an activation. The activation is normalised before and after it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(rename_all = "lowercase")]
pub enum BoundaryKind {
    /// Multiplication by a matrix.
    Bottleneck,
    /// The maximum of each `hidden / width` neighbours (Goodfellow et al., arXiv 1302.4389).
    Maxout,
}

impl Model {
    /// Numbers per token of an activation at a stage boundary.
    #[must_use]
    pub fn boundary_width(&self) -> u32 {
        self.boundary.map_or(self.hidden, |boundary| boundary.width)
    }
}

impl Manifest {
    /// Shape of a tensor that crosses a stage boundary in either direction: `[samples, tokens,
    /// width]`.
    #[must_use]
    pub fn boundary_shape(&self) -> [u32; 3] {
        [self.training.microbatch_size, self.model.context, self.model.boundary_width()]
    }

    /// Checks the boundary against the model and the number of stages.
    pub(super) fn check_boundary(&self) -> Result<(), ManifestError> {
        let Some(Boundary { kind, width }) = self.model.boundary else {
            return Ok(());
        };
        if self.training.stages == 1 {
            return Err(ManifestError::BoundaryOfOneStage);
        }
        let hidden = self.model.hidden;
        // The norm of a single number carries no information.
        within("model.boundary.width", width, 2..=hidden - 1)?;
        if kind == BoundaryKind::Maxout && !hidden.is_multiple_of(width) {
            return Err(ManifestError::OutOfRange {
                key: "model.boundary.width",
                value: width.to_string(),
                range: format!("a divisor of hidden = {hidden} for maxout"),
            });
        }
        Ok(())
    }

    /// Numbers that cross a stage boundary for one microbatch.
    pub(super) fn boundary_numbers(&self) -> u64 {
        self.boundary_shape().map(u64::from).iter().product()
    }

    /// Bytes that cross a stage boundary forward for one microbatch: the activation with its
    /// labels.
    #[must_use]
    pub fn activation_bytes(&self) -> Bytes {
        let tokens = self.tokens_per_microbatch();
        Bytes(self.boundary_bytes(self.codec.activations).0 + tokens * LABEL_BYTES)
    }

    /// Bytes that cross a stage boundary backward for one microbatch: the activation gradient.
    #[must_use]
    pub fn gradient_bytes(&self) -> Bytes {
        self.boundary_bytes(self.codec.activation_gradients)
    }

    /// Bytes of a microbatch's activation, or of its gradient, encoded with a codec.
    ///
    /// # Panics
    /// If the manifest was not checked and its number of elements overflows.
    #[must_use]
    pub fn boundary_bytes(&self, codec: Codec) -> Bytes {
        Bytes(
            codec.bytes_of(self.boundary_numbers()).expect("a checked manifest has fewer numbers"),
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::example::small;
    use super::*;

    fn with(kind: BoundaryKind, width: u32) -> Manifest {
        let mut manifest = small();
        manifest.model.boundary = Some(Boundary { kind, width });
        manifest
    }

    #[test]
    fn the_boundary_is_part_of_the_run_id_and_absent_by_default() {
        let names = [
            small(),
            with(BoundaryKind::Bottleneck, 8),
            with(BoundaryKind::Bottleneck, 4),
            with(BoundaryKind::Maxout, 8),
        ]
        .map(|manifest| {
            assert_eq!(Manifest::from_bytes(&manifest.to_bytes()).as_ref(), Ok(&manifest));
            manifest.run_id()
        });
        assert_eq!(std::collections::BTreeSet::from(names).len(), names.len());
    }

    #[test]
    fn an_invalid_boundary_names_its_key() {
        for (kind, width, message) in [
            (BoundaryKind::Bottleneck, 1, "model.boundary.width = 1 is out of range"),
            (BoundaryKind::Bottleneck, 32, "it must be from 2 to 31"),
            (BoundaryKind::Maxout, 12, "it must be a divisor of hidden = 32 for maxout"),
        ] {
            let error = with(kind, width).check().expect_err("impossible").to_string();
            assert!(error.contains(message), "{error}");
        }
        let mut uncut = with(BoundaryKind::Maxout, 8);
        uncut.training.stages = 1;
        assert_eq!(uncut.check(), Err(ManifestError::BoundaryOfOneStage));
        assert_eq!(with(BoundaryKind::Bottleneck, 31).check(), Ok(()));
    }

    proptest! {
        #[test]
        fn sizes_follow_the_width(width in 2u32..32) {
            let (wide, narrow) = (small(), with(BoundaryKind::Bottleneck, width));
            let tokens = wide.tokens_per_microbatch();
            let saved = 4 * tokens * u64::from(32 - width);
            prop_assert_eq!(narrow.boundary_shape(), [2, 16, width]);
            prop_assert_eq!(wide.activation_bytes() - narrow.activation_bytes(), Bytes(saved));
            prop_assert_eq!(wide.gradient_bytes() - narrow.gradient_bytes(), Bytes(saved));
        }
    }
}
