//! How often a run sees its data.

use shoal_protocol::manifest::{Data, Manifest};

/// Epochs from which on a run is warned about: small data is then learnt by heart.
pub const MANY: f64 = 20.0;

/// Training samples of one pass over a run's data; of a mixture, as many as its sources have rows.
#[must_use]
pub fn samples(manifest: &Manifest) -> u64 {
    match &manifest.data {
        Data::Prepared(prepared) => prepared.rows,
        Data::Mixture(mixture) => mixture.rows(),
        Data::Text(tokens) => {
            let trained = tokens.count.saturating_sub(manifest.held_out_tokens());
            // Each sample is followed by one more token.
            trained.saturating_sub(1) / u64::from(manifest.model.context).max(1)
        }
    }
}

/// How often a run sees its data, and how much is held out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Epochs {
    /// Training samples of one pass over the data.
    samples: u64,
    /// Samples of one step.
    per_step: u64,
    /// Steps of this run, without those before its start.
    steps: u64,
    /// Whether nothing is held out, so that no evaluation shows when the data is learnt by heart.
    is_blind: bool,
}

impl Epochs {
    /// Those of a run.
    #[must_use]
    pub fn of(manifest: &Manifest) -> Self {
        Self {
            samples: samples(manifest),
            per_step: manifest.sample_numbers().per_step(),
            steps: manifest.training.steps.saturating_sub(manifest.first_version().0),
            is_blind: manifest.evaluation.every == 0,
        }
    }

    /// Passes over the data.
    fn count(self) -> f64 {
        (self.steps as f64) * self.per_step as f64 / self.samples.max(1) as f64
    }

    /// A line with the numbers.
    #[must_use]
    pub fn line(self) -> String {
        let Self { samples, per_step, steps, .. } = self;
        let count = self.count();
        let digits = usize::from(count < 10.0);
        format!(
            "{samples} training samples, {per_step} a step: {steps} steps are {count:.digits$} epochs"
        )
    }

    /// What is likely not meant, if anything.
    #[must_use]
    pub fn warning(self) -> Option<String> {
        let Self { samples, per_step, .. } = self;
        if self.steps == 0 {
            return None;
        }
        if samples < per_step {
            return Some(format!(
                "an epoch is shorter than a step: the data has {samples} samples, and a step takes {per_step}, \
                 some of them more than once; set fewer training.microbatches, or prepare more data"
            ));
        }
        if self.count() >= MANY {
            let blind = match self.is_blind {
                true => ", and no evaluation on held-out data would show it",
                false => "",
            };
            return Some(format!(
                "the run sees its data {:.0} times, so a model learns it by heart{blind}: set training.epochs \
                 instead of training.steps (fine-tuning takes 1 to 5), or prepare more data",
                self.count()
            ));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epochs(samples: u64, steps: u64) -> Epochs {
        Epochs { samples, per_step: 16, steps, is_blind: true }
    }

    #[test]
    fn tiny_data_is_warned_about() {
        assert_eq!(
            epochs(12, 300).line(),
            "12 training samples, 16 a step: 300 steps are 400 epochs"
        );
        assert_eq!(
            epochs(1000, 100).line(),
            "1000 training samples, 16 a step: 100 steps are 1.6 epochs"
        );
        let warning = |samples, steps| epochs(samples, steps).warning().unwrap_or_default();
        assert!(warning(12, 300).contains("the data has 12 samples, and a step takes 16"));
        assert!(warning(100, 300).contains("sees its data 48 times"));
        assert!(warning(100, 300).contains("no evaluation on held-out data"));
        assert_eq!(warning(1000, 100), "");
        assert_eq!(warning(12, 0), "");
    }
}
