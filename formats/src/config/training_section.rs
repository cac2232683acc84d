//! The section `[training]` of `run.toml`: that of a manifest, whose length may be given in epochs.

use serde::Deserialize;
use shoal_protocol::manifest::{Dtype, Manifest, Training};

use super::loss_section::{self, LossName};
use crate::epochs;

/// Most epochs: more than any run takes, and few enough to multiply with.
const MOST_EPOCHS: f64 = 1e6;

/// Most steps that epochs stand for: the manifest takes up to 2^40.
const MOST_STEPS: f64 = (1u64 << 39) as f64;

/// Passes over the data.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Epochs {
    /// The number of steps is given instead.
    None,
    /// So many, from which the steps follow.
    Of(f64),
    /// So many, which do not count beside the number of steps.
    Overruled(f64),
}

/// The section as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrainingSection {
    seed: u64,
    steps: Option<u64>,
    epochs: Option<f64>,
    stages: u16,
    microbatches: u32,
    microbatch_size: u32,
    dtype: Dtype,
    recompute: bool,
    gradient_fraction_bits: u8,
    #[serde(default)]
    staleness: u8,
    #[serde(default)]
    loss: LossName,
    beta: Option<f64>,
    gamma: Option<f64>,
}

impl TrainingSection {
    /// The manifest's section, and the epochs beside its steps. Steps overrule epochs, as `max_steps` does in
    /// transformers' trainer.
    pub(crate) fn resolve(self) -> Result<(Training, Epochs), String> {
        let (steps, epochs) = match (self.steps, self.epochs) {
            (Some(steps), None) => (steps, Epochs::None),
            (None, Some(epochs)) => (0, Epochs::Of(epochs)),
            (Some(steps), Some(epochs)) => (steps, Epochs::Overruled(epochs)),
            (None, None) => {
                return Err("missing key `steps`, or `epochs` in its place".to_owned());
            }
        };
        if let Some(epochs) = self.epochs
            && !(epochs > 0.0 && epochs <= MOST_EPOCHS)
        {
            return Err(format!(
                "training.epochs = {epochs} is out of range: it must be more than 0 and at most {MOST_EPOCHS}"
            ));
        }
        let training = Training {
            seed: self.seed,
            steps,
            stages: self.stages,
            microbatches: self.microbatches,
            microbatch_size: self.microbatch_size,
            dtype: self.dtype,
            recompute: self.recompute,
            gradient_fraction_bits: self.gradient_fraction_bits,
            staleness: self.staleness,
            loss: loss_section::resolve(self.loss, self.beta, self.gamma)?,
        };
        Ok((training, epochs))
    }
}

/// The steps that so many epochs take, from `done` on: those of a worker where there are `workers`, in a
/// multiple of `every`.
pub(crate) fn steps(
    epochs: f64,
    manifest: &Manifest,
    done: u64,
    (workers, every): (u32, u32),
) -> u64 {
    let training = &manifest.training;
    let per_step = u64::from(training.microbatches)
        .saturating_mul(training.microbatch_size.into())
        .saturating_mul(workers.into())
        .max(1);
    let samples = epochs * epochs::samples(manifest) as f64;
    let steps = (samples / per_step as f64).ceil().clamp(1.0, MOST_STEPS) as u64;
    let every = u64::from(every.max(1));
    done.saturating_add(steps).div_ceil(every).saturating_mul(every)
}

/// The keys of the length in TOML.
pub(crate) fn length_to_toml(steps: u64, epochs: Epochs) -> String {
    const STEPS: &str =
        "optimizer updates, those before a [start] included; 0 writes the initial checkpoint only";
    const INSTEAD: &str = "Passes over the training data instead, of which the steps follow.";
    const EPOCHS: &str = "instead of steps: passes over the training data, of which steps follow";
    match epochs {
        Epochs::None | Epochs::Overruled(_) => {
            format!("steps = {steps:<22} # {STEPS}\n# {INSTEAD}\n# epochs = 3")
        }
        Epochs::Of(epochs) => format!("epochs = {epochs:<21} # {EPOCHS}\n# steps = 300"),
    }
}
