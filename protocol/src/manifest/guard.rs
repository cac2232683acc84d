//! The guard: what becomes of a step whose loss or gradient is far from those before it.

use serde::{Deserialize, Serialize};

use super::{Manifest, ManifestError, within};

/// Steps that are remembered, at most.
const WINDOW: u32 = 1 << 12;

/// Judges each step by those before it.
///
/// A step is an outlier when its loss or the norm of its gradient exceeds `m + deviations · max(1.4826 · d, 0.01 · |m|)`:
/// `m` is the median of the last `window` steps and `d` the median of their distances from it, so that the first factor
/// makes of it the standard deviation of normal numbers. All that this depends on are the commits before, so every peer
/// comes to the same verdict, whoever dies.
#[derive(
    Debug, Clone, Copy, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(deny_unknown_fields)]
pub struct Guard {
    /// Deviations from the median, above it, from which on a step is an outlier.
    #[serde(default = "default_deviations")]
    pub deviations: f64,
    /// Steps whose median counts.
    #[serde(default = "default_window")]
    pub window: u32,
    /// Steps before the first that can be an outlier.
    #[serde(default = "default_least")]
    pub least: u32,
    /// What is left of the learning rate in an outlier; 0 skips it: weights and moments stay as they are.
    #[serde(default)]
    pub rate: f64,
    /// Steps after an outlier that have its rate too.
    #[serde(default)]
    pub steps: u32,
    /// Whether a step is skipped whose gradient is not finite, or beyond the range of the sums. Else the run stops.
    #[serde(default = "default_not_finite")]
    pub not_finite: bool,
    /// Outliers in a row. The next one counts like any step, and the run stops if its gradient is not finite.
    #[serde(default = "default_patience")]
    pub patience: u32,
}

fn default_deviations() -> f64 {
    Guard::default().deviations
}

fn default_window() -> u32 {
    Guard::default().window
}

fn default_least() -> u32 {
    Guard::default().least
}

fn default_not_finite() -> bool {
    Guard::default().not_finite
}

fn default_patience() -> u32 {
    Guard::default().patience
}

impl Default for Guard {
    fn default() -> Self {
        Self {
            deviations: 8.0,
            window: 128,
            least: 32,
            rate: 0.0,
            steps: 0,
            not_finite: true,
            patience: 16,
        }
    }
}

/// What becomes of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// The part of the learning rate that its update has; 0: there is none.
    pub rate: f64,
    /// What is wrong with it, if it is an outlier.
    pub outlier: Option<Outlier>,
}

impl Verdict {
    /// The step counts like any other.
    pub const WHOLE: Self = Self { rate: 1.0, outlier: None };

    /// Whether weights and moments stay as they are.
    #[must_use]
    pub fn is_skipped(&self) -> bool {
        self.rate == 0.0
    }
}

/// Why a step is an outlier.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Outlier {
    /// Gradients of stages and microbatches that are not finite, or beyond the range of the sums.
    #[error("{gradients} of its gradients are not finite, or beyond the range of the sums")]
    NotFinite {
        /// How many.
        gradients: u32,
    },
    /// The loss.
    #[error("its loss of {value:.4} is above {limit:.4}")]
    Loss {
        /// Mean over the targets.
        value: f64,
        /// The largest that would not be an outlier.
        limit: f64,
    },
    /// The norm of the gradient.
    #[error("its gradient's norm of {value:.4} is above {limit:.4}")]
    GradientNorm {
        /// The norm before clipping.
        value: f64,
        /// The largest that would not be an outlier.
        limit: f64,
    },
}

impl Outlier {
    /// A word for it, as label and in JSON.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::NotFinite { .. } => "not_finite",
            Self::Loss { .. } => "loss",
            Self::GradientNorm { .. } => "gradient_norm",
        }
    }
}

impl Manifest {
    /// Whether a step is skipped whose gradient is not finite.
    #[must_use]
    pub fn skips_not_finite(&self) -> bool {
        self.guard.is_some_and(|guard| guard.not_finite)
    }

    /// Checks the guard's numbers.
    pub(super) fn check_guard(&self) -> Result<(), ManifestError> {
        let Some(guard) = &self.guard else { return Ok(()) };
        within("guard.deviations", guard.deviations, 1.0..=1e6)?;
        within("guard.window", guard.window, 8..=WINDOW)?;
        within("guard.least", guard.least, 4..=guard.window)?;
        within("guard.rate", guard.rate, 0.0..=1.0)?;
        within("guard.steps", guard.steps, 0..=1 << 20)?;
        within("guard.patience", guard.patience, 1..=1 << 20)?;
        // The numbers of a worker's own updates are no peer's but its own.
        match self.inner.is_some() && guard.not_finite {
            true => Err(ManifestError::GuardOfWorkers),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::example::small;

    #[test]
    fn numbers_out_of_range_name_their_key() {
        let check = |change: &dyn Fn(&mut Guard)| {
            let mut guard = Guard::default();
            change(&mut guard);
            let manifest = Manifest { guard: Some(guard), ..small() };
            manifest.check_guard().map_err(|error| error.to_string())
        };
        assert_eq!(check(&|_| {}), Ok(()));
        let refused = |change: &dyn Fn(&mut Guard), start: &str| {
            let error = check(change).expect_err(start);
            assert!(error.starts_with(start), "{error}");
        };
        refused(&|guard| guard.deviations = f64::NAN, "guard.deviations = NaN");
        refused(&|guard| guard.window = 1 << 20, "guard.window = 1048576");
        refused(&|guard| guard.least = 200, "guard.least = 200");
        refused(&|guard| guard.rate = -0.5, "guard.rate = -0.5");
        refused(&|guard| guard.patience = 0, "guard.patience = 0");
    }
}
