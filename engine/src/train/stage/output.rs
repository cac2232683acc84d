//! The result of a forward pass.

use bytes::Bytes;

use crate::model::loss::Preferences;

/// The result of a forward pass.
#[derive(Debug, Clone, PartialEq)]
pub enum ForwardOutput {
    /// The input of the next stage: `Manifest::boundary_shape` in the manifest's codec.
    Activation(Bytes),
    /// From the last stage.
    Loss {
        /// Cross-entropy of the targets divided by all tokens of the microbatch, or the mean loss of its pairs, in nats.
        share: f32,
        /// Targets: tokens that count, or pairs.
        targets: u64,
        /// Tokens that are followed by padding.
        padded: u64,
        /// Which completions of pairs are preferred.
        preferences: Preferences,
    },
}
