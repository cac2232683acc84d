//! The ranges of a manifest's values, and what must fit together.

use super::{Manifest, ManifestError};
use crate::codec::Codec;
use crate::limits;

impl Manifest {
    /// Checks every value against its range.
    ///
    /// # Errors
    /// The first invalid value.
    pub fn check(&self) -> Result<(), ManifestError> {
        self.model.check()?;
        self.check_training()?;
        self.optimizer.check()?;
        self.check_evaluation()?;
        self.check_start()?;
        self.check_audit()?;
        self.check_guard()?;
        self.check_data()?;
        self.check_loss()
    }

    fn check_training(&self) -> Result<(), ManifestError> {
        let training = &self.training;
        within("training.steps", training.steps, 0..=1 << 40)?;
        within("training.stages", training.stages, 1..=limits::STAGES)?;
        let key = if self.inner.is_some() { "outer.workers" } else { "training.microbatches" };
        within(key, training.microbatches, 1..=limits::MICROBATCHES / 2)?;
        within("training.microbatch_size", training.microbatch_size, 1..=1 << 16)?;
        within("training.gradient_fraction_bits", training.gradient_fraction_bits, 16..=56)?;
        within("training.staleness", training.staleness, 0..=limits::STALENESS)?;
        if u32::from(training.stages) > self.model.layers {
            return Err(ManifestError::MoreStagesThanLayers {
                stages: training.stages,
                layers: self.model.layers,
            });
        }
        self.check_boundary()?;
        self.check_lora()?;
        self.check_inner()?;
        self.check_balance()?;
        // Cannot overflow a u64: the factors are within their ranges.
        let numbers = self.boundary_numbers();
        let bytes = |codec: Codec| codec.bytes_of(numbers).unwrap_or(u64::MAX);
        let cap = 1..=limits::TENSOR.0;
        within("bytes of one activation", bytes(self.codec.activations), cap.clone())?;
        within("bytes of an activation's gradient", bytes(self.codec.activation_gradients), cap)
    }

    fn check_evaluation(&self) -> Result<(), ManifestError> {
        let evaluation = &self.evaluation;
        within("evaluation.every", evaluation.every, 0..=1 << 40)?;
        within("checkpoint.every", self.checkpoint.every, 0..=1 << 40)?;
        within("checkpoint.interval", self.checkpoint.interval, 0..=1 << 24)?;
        within("checkpoint.keep", self.checkpoint.keep, 1..=limits::CHECKPOINTS)?;
        if evaluation.every > 0 {
            within("evaluation.held_out", evaluation.held_out, 1e-6..=0.9)?;
            within("evaluation.microbatches", evaluation.microbatches, 1..=4096)?;
        }
        Ok(())
    }
}

/// Checks a value against its range.
///
/// # Errors
/// If it is outside.
pub fn within<T: PartialOrd + std::fmt::Display>(
    key: &'static str,
    value: T,
    range: std::ops::RangeInclusive<T>,
) -> Result<(), ManifestError> {
    if range.contains(&value) {
        return Ok(());
    }
    let (first, last) = (range.start(), range.end());
    let range = if first == last { first.to_string() } else { format!("from {first} to {last}") };
    Err(ManifestError::OutOfRange { key, value: value.to_string(), range })
}

#[cfg(test)]
mod tests {
    use super::super::example::{self, small};
    use super::super::{Data, Tokens};
    use super::*;

    #[test]
    fn invalid_values_name_their_key() {
        let mut manifest = small();
        manifest.training.stages = 6;
        assert_eq!(
            manifest.check(),
            Err(ManifestError::MoreStagesThanLayers { stages: 6, layers: 5 })
        );
        let mut manifest = small();
        manifest.optimizer.weight_decay = f64::NAN;
        let error = manifest.check().expect_err("not a number is in no range").to_string();
        assert!(error.starts_with("optimizer.weight_decay = NaN"), "{error}");
        let mut manifest = small();
        manifest.data = Data::Text(Tokens { count: 16, ..example::tokens() });
        assert!(matches!(manifest.check(), Err(ManifestError::TextTooShort { .. })));
    }
}
