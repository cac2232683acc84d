//! Data that crosses a stage boundary: its shape and its size in bytes.

use serde::{Deserialize, Serialize};

use bytes::Bytes as Buffer;

use super::{LABEL_BYTES, Manifest, ManifestError, Model, NOTE, Placement, within};
use crate::codec::Codec;
use crate::units::Bytes;

/// How each activation is compressed at the end of a stage and expanded at the beginning of the next.
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

/// The operation that narrows an activation.
///
/// `Bottleneck` and `Maxout` are layers trained with the rest (Ryabinin et al., arXiv 2301.11913,
/// "compression-aware architectures"), with a norm before and after. They are part of the model: it is
/// narrow at stage boundaries. `Subspace` constrains the weights instead, and adds none.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(rename_all = "lowercase")]
pub enum BoundaryKind {
    /// Multiplication by a matrix.
    Bottleneck,
    /// The maximum of each `hidden / width` neighbours (Goodfellow et al., arXiv 1302.4389).
    Maxout,
    /// The coordinates in a fixed subspace, which all that layers before the last stage add to the residual
    /// stream stays in (Ramasinghe et al., arXiv 2506.01260). The rest of an activation is the initial
    /// embedding of its token.
    Subspace,
}

impl BoundaryKind {
    /// Whether a boundary has weights of its own.
    #[must_use]
    pub fn has_weights(self) -> bool {
        match self {
            Self::Bottleneck | Self::Maxout => true,
            Self::Subspace => false,
        }
    }
}

impl Model {
    /// Numbers per token of an activation at a stage boundary.
    #[must_use]
    pub fn boundary_width(&self) -> u32 {
        self.boundary.map_or(self.hidden, |boundary| boundary.width)
    }

    /// The width of the subspace that boundaries send coordinates in, if they do.
    #[must_use]
    pub fn subspace(&self) -> Option<u32> {
        let boundary = self.boundary.filter(|boundary| boundary.kind == BoundaryKind::Subspace);
        boundary.map(|boundary| boundary.width)
    }

    /// The boundary's layers, if it has some.
    #[must_use]
    pub fn trained_boundary(&self) -> Option<Boundary> {
        self.boundary.filter(|boundary| boundary.kind.has_weights())
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
        if kind == BoundaryKind::Subspace { self.check_subspace() } else { Ok(()) }
    }

    /// Checks that all that a layer adds to the residual stream is the output of a matrix, and that the
    /// initial embedding follows from the seed.
    fn check_subspace(&self) -> Result<(), ManifestError> {
        let model = &self.model;
        if !model.hidden.is_multiple_of(2) {
            return Err(ManifestError::OutOfRange {
                key: "model.hidden",
                value: model.hidden.to_string(),
                range: "even for a boundary of kind subspace".to_owned(),
            });
        }
        if model.loads_weights() {
            return Err(ManifestError::SubspaceOfBase);
        }
        match model.block.placement {
            Placement::Before | Placement::Parallel => {}
            Placement::After | Placement::Both => return Err(ManifestError::SubspaceWithNorm),
        }
        match model.block.learned_positions {
            Some(_) => Err(ManifestError::SubspaceWithPositions),
            None => Ok(()),
        }
    }

    /// Checks that the boundaries of an `earlier` run, with the same `model.boundary`, are at the same places
    /// and in the same subspace.
    pub(super) fn check_same_boundary(&self, earlier: &Self) -> Result<(), ManifestError> {
        let [old, new] = [earlier, self].map(|manifest| manifest.training.stages);
        if self.model.boundary.is_some() && old != new {
            return Err(ManifestError::StartWithBoundary { earlier: old, here: new });
        }
        if self.model.subspace().is_none() {
            return Ok(());
        }
        let [old, new] = [earlier, self].map(|manifest| manifest.training.seed);
        if old != new {
            return Err(ManifestError::StartWithOtherSubspace { earlier: old, here: new });
        }
        let [old, new] = [earlier, self].map(|manifest| manifest.model.initializer_range);
        if old != new {
            return Err(ManifestError::StartOfAnotherModel {
                key: "initializer_range",
                earlier: old.to_string(),
                here: new.to_string(),
            });
        }
        Ok(())
    }

    /// Shape of the words that travel beside an activation: [`Manifest::words_of_row`] for each sample, then as many
    /// token ids if the next stage needs them.
    #[must_use]
    pub fn label_shape(&self) -> [u32; 2] {
        let rows = if self.model.subspace().is_some() { 2 } else { 1 };
        [rows * self.training.microbatch_size, self.words_of_row()]
    }

    /// The words that travel beside a microbatch's activation, in [`Manifest::label_shape`], from its token
    /// ids and its labels.
    #[must_use]
    pub fn with_tokens(&self, tokens: &Buffer, labels: Buffer) -> Buffer {
        match self.model.subspace() {
            Some(_) => [labels, tokens.clone()].concat().into(),
            None => labels,
        }
    }

    /// Numbers that cross a stage boundary for one microbatch.
    pub(super) fn boundary_numbers(&self) -> u64 {
        self.boundary_shape().map(u64::from).iter().product()
    }

    /// Bytes that cross a stage boundary forward for one microbatch: the activation with its
    /// labels and, if the next stage needs them, its token ids and a note.
    #[must_use]
    pub fn activation_bytes(&self) -> Bytes {
        let words: u64 = self.label_shape().map(u64::from).iter().product();
        self.boundary_bytes(self.codec.activations) + Bytes(words * LABEL_BYTES) + self.note_bytes()
    }

    /// Bytes that cross a stage boundary backward for one microbatch: the activation gradient, and a note if there is
    /// one.
    #[must_use]
    pub fn gradient_bytes(&self) -> Bytes {
        self.boundary_bytes(self.codec.activation_gradients) + self.note_bytes()
    }

    /// Bytes of the note beside a tensor of a virtual worker of several stages.
    fn note_bytes(&self) -> Bytes {
        Bytes(if self.workers_exchange() { NOTE as u64 } else { 0 })
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

    use super::super::Base;
    use super::super::example::small;
    use super::*;
    use crate::ids::ContentHash;

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
            with(BoundaryKind::Subspace, 8),
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

    #[test]
    fn a_subspace_is_refused_where_layers_add_more_than_a_matrix() {
        let refusal = |change: &dyn Fn(&mut Manifest)| {
            let mut manifest = with(BoundaryKind::Subspace, 8);
            change(&mut manifest);
            manifest.check()
        };
        assert_eq!(refusal(&|_| {}), Ok(()));
        assert_eq!(
            refusal(&|manifest| manifest.model.block.placement = Placement::Parallel),
            Ok(())
        );
        assert_eq!(refusal(&|manifest| manifest.model.block.tied = true), Ok(()));
        for placement in [Placement::After, Placement::Both] {
            let error = refusal(&|manifest| manifest.model.block.placement = placement);
            assert_eq!(error, Err(ManifestError::SubspaceWithNorm));
        }
        let error = refusal(&|manifest| manifest.model.block.learned_positions = Some(16));
        assert_eq!(error, Err(ManifestError::SubspaceWithPositions));
        let base =
            |loads_weights| Some(Base { index: ContentHash([1; 32]), bytes: 1, loads_weights });
        assert_eq!(refusal(&|manifest| manifest.model.base = base(false)), Ok(()));
        let error = refusal(&|manifest| manifest.model.base = base(true));
        assert_eq!(error, Err(ManifestError::SubspaceOfBase));
        let error = refusal(&|manifest| {
            manifest.model.hidden = 33;
            manifest.model.block.head_size = Some(8);
        });
        assert!(error.expect_err("odd").to_string().starts_with("model.hidden = 33"));
    }

    #[test]
    fn a_run_goes_on_in_the_same_subspace_alone() {
        let earlier = with(BoundaryKind::Subspace, 8);
        let refusal = |change: &dyn Fn(&mut Manifest)| {
            let mut later = earlier.clone();
            change(&mut later);
            later.check_goes_on_from(&earlier).map_err(|error| error.to_string())
        };
        assert_eq!(refusal(&|later| later.training.microbatches = 1), Ok(()));
        let error = refusal(&|later| later.training.seed = 9).expect_err("refused");
        assert!(error.contains("this run has 9"), "{error}");
        let error = refusal(&|later| later.model.initializer_range = 0.5).expect_err("refused");
        assert!(error.contains("model.initializer_range"), "{error}");
        let error = refusal(&|later| later.training.stages = 3).expect_err("refused");
        assert!(error.contains("between 2 stages, and this run has 3"), "{error}");
    }

    #[test]
    fn token_ids_follow_the_labels_in_a_subspace_alone() {
        let (tokens, labels) = (Buffer::from_static(b"ids"), Buffer::from_static(b"labels"));
        let mut manifest = with(BoundaryKind::Subspace, 8);
        assert_eq!(manifest.label_shape(), [4, 16]);
        assert_eq!(manifest.with_tokens(&tokens, labels.clone()), &b"labelsids"[..]);
        let narrow = manifest.activation_bytes();
        assert_eq!(narrow, Bytes(2 * 16 * (4 * 8 + 2 * LABEL_BYTES)));
        manifest.model.boundary = None;
        assert_eq!(manifest.label_shape(), [2, 16]);
        assert_eq!(manifest.with_tokens(&tokens, labels.clone()), labels);
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
