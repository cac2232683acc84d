//! The beginning of a run: its first version, and the checkpoint of an earlier run that it goes on
//! from.

use serde::{Deserialize, Serialize};

use super::{Manifest, ManifestError, Model, Rule, within};
use crate::ids::{ContentHash, Step};
use crate::limits;

/// The checkpoint of another run that a run goes on from, by content.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// Hash of the checkpoint's description, which names the files of every stage.
    pub checkpoint: ContentHash,
    /// Bytes of its description.
    pub bytes: u64,
    /// Its version: the first step of this run.
    pub step: Step,
    /// Number of the first training sample of this run, in the order of samples.
    pub samples: u64,
}

/// The numbers of training samples: a step trains on as many as the one before, and begins where that
/// one ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleNumbers {
    first_step: Step,
    first_sample: u64,
    per_microbatch: u64,
    per_step: u64,
}

impl SampleNumbers {
    /// Number of the first sample of a training microbatch.
    #[must_use]
    pub fn first_of(&self, step: Step, microbatch: u64) -> u64 {
        let steps = step.0.saturating_sub(self.first_step.0);
        let within_step = microbatch.saturating_mul(self.per_microbatch);
        let before = steps.saturating_mul(self.per_step).saturating_add(within_step);
        self.first_sample.saturating_add(before)
    }

    /// Number of the first sample of a step that may be before the run's first: of an earlier run, which had as many
    /// samples a step, or 0 if the samples count anew since.
    #[must_use]
    pub fn first_of_step(&self, step: Step) -> u64 {
        match self.first_step.0.checked_sub(step.0) {
            None => self.first_of(step, 0),
            Some(steps) => self.first_sample.saturating_sub(steps.saturating_mul(self.per_step)),
        }
    }

    /// Samples of one step.
    #[must_use]
    pub const fn per_step(&self) -> u64 {
        self.per_step
    }
}

impl Manifest {
    /// The version of the weights that the run begins with: that of the checkpoint that it goes on
    /// from, or 0. It is also the number of the first step.
    #[must_use]
    pub fn first_version(&self) -> Step {
        self.start.map_or(Step(0), |start| start.step)
    }

    /// Whether a version is the first. Every peer can make its weights from the files that the
    /// manifest names, and no checkpoint of the run has them.
    #[must_use]
    pub fn is_initial(&self, version: Step) -> bool {
        version == self.first_version()
    }

    /// Whether a stage takes weights from the base at a version: in a run that trains adapters at
    /// every one, otherwise at the first, unless a checkpoint has all weights.
    #[must_use]
    pub fn needs_base(&self, version: Step) -> bool {
        let trained = self.start.is_none() && self.is_initial(version);
        self.model.loads_weights() && (self.lora.is_some() || trained)
    }

    /// The numbers of the run's training samples.
    #[must_use]
    pub fn sample_numbers(&self) -> SampleNumbers {
        let per_microbatch = u64::from(self.training.microbatch_size) * self.passes();
        SampleNumbers {
            first_step: self.first_version(),
            first_sample: self.start.map_or(0, |start| start.samples),
            per_microbatch,
            per_step: u64::from(self.training.microbatches) * per_microbatch,
        }
    }

    /// Number of the first sample of a run that goes on from version `step` of an `earlier` run: the
    /// one after the last that was trained on, or 0 if the order of samples is another one.
    #[must_use]
    pub fn samples_after(&self, earlier: &Self, step: Step) -> u64 {
        let order = |manifest: &Self| {
            let held_out = manifest.held_out_tokens();
            // A phase begins at a step, so the samples before it depend on the samples of a step.
            let phases = manifest.data.mixture().is_some_and(|mixture| !mixture.phases.is_empty());
            let per_step = phases.then(|| manifest.sample_numbers().per_step());
            let (seed, data) = (manifest.training.seed, manifest.data.clone());
            (seed, data, manifest.model.context, held_out, per_step)
        };
        match order(self) == order(earlier) {
            true => earlier.sample_numbers().first_of(step, 0),
            false => 0,
        }
    }

    /// The first version of a run that goes on from version `step` of an `earlier` run. Steps of workers count one by one,
    /// so the number is another one if their meetings are.
    ///
    /// # Errors
    /// If it would be between two versions.
    pub fn version_after(&self, earlier: &Self, step: Step) -> Result<Step, ManifestError> {
        let every = self.updates_of_step();
        let done = step.0.saturating_mul(earlier.updates_of_step());
        match done.is_multiple_of(every) {
            true => Ok(Step(done / every)),
            false => Err(ManifestError::StartBetweenMeetings { done, every }),
        }
    }

    /// Checks that the trained weights of an `earlier` run are those of this one, in name, shape and
    /// meaning, and that the optimizer keeps the same beside them. Stages, batch, number formats, the
    /// optimizer's constants, data and context may differ.
    ///
    /// # Errors
    /// The first difference.
    pub fn check_goes_on_from(&self, earlier: &Self) -> Result<(), ManifestError> {
        let differs = |key: &'static str, earlier: String, here: String| {
            Err(ManifestError::StartOfAnotherModel { key, earlier, here })
        };
        match (&earlier.lora, &self.lora) {
            (None, Some(_)) => return Err(ManifestError::StartWithoutAdapters),
            (Some(_), None) => return Err(ManifestError::StartWithAdapters),
            (Some(old), Some(new)) if old != new => {
                return differs("lora", format!("{old:?}"), format!("{new:?}"));
            }
            _ => {}
        }
        let facts = earlier.model.facts().into_iter().zip(self.model.facts());
        if let Some(((key, old), (_, new))) = { facts }.find(|(old, new)| old != new) {
            return differs(key, old, new);
        }
        self.check_same_boundary(earlier)?;
        let differs = |earlier, here| ManifestError::StartOfAnotherOptimizer { earlier, here };
        if !self.optimizer.rule.takes_state_of(&earlier.optimizer.rule) {
            return Err(differs(earlier.updates(), self.updates()));
        }
        let kind = |rule: &Rule| format!("workers' optimizer.kind = {:?}", rule.name());
        match (earlier.carried_rule(), self.carried_rule()) {
            (Some(old), Some(new)) if !new.takes_state_of(old) => {
                Err(differs(kind(old), kind(new)))
            }
            (None, Some(_)) => Err(ManifestError::StartWithoutMoments),
            _ => Ok(()),
        }
    }

    /// The updates of a step, those of a worker one by one.
    fn updates_of_step(&self) -> u64 {
        self.inner.as_ref().map_or(1, |inner| inner.steps.into())
    }

    /// What updates the weights that a checkpoint has, by the name of its section.
    fn updates(&self) -> String {
        match &self.inner {
            Some(_) => "[outer]".to_owned(),
            None => format!("optimizer.kind = {:?}", self.optimizer.rule.name()),
        }
    }

    pub(super) fn check_start(&self) -> Result<(), ManifestError> {
        let Some(Start { bytes, step, samples, .. }) = self.start else { return Ok(()) };
        within("bytes of the start's description", bytes, 1..=limits::CHECKPOINT_DESCRIPTION.0)?;
        within("start.step", step.0, 0..=1 << 40)?;
        within("start.samples", samples, 0..=1 << 60)?;
        if step.0 < self.training.steps {
            return Ok(());
        }
        let every = self.updates_of_step();
        let [steps, done] = [self.training.steps, step.0].map(|steps| steps.saturating_mul(every));
        Err(ManifestError::StepsAreDone { steps, done })
    }
}

impl Model {
    /// The settings that decide which weights there are and what is computed with them, by key.
    fn facts(&self) -> [(&'static str, String); 11] {
        [
            ("vocabulary", self.vocabulary.to_string()),
            ("hidden", self.hidden.to_string()),
            ("layers", self.layers.to_string()),
            ("heads", self.heads.to_string()),
            ("key_value_heads", self.key_value_heads.to_string()),
            ("intermediate", self.intermediate.to_string()),
            ("rope_theta", self.rope_theta.to_string()),
            ("norm_epsilon", self.norm_epsilon.to_string()),
            ("boundary", format!("{:?}", self.boundary)),
            ("block", format!("{:?}", self.block)),
            ("base", self.base.map_or("none".to_owned(), |base| base.index.to_string())),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::super::example::{mixture, small};
    use super::super::{Data, Lion, Lora, LoraTarget};
    use super::*;

    fn start(step: u64, samples: u64) -> Option<Start> {
        Some(Start { checkpoint: ContentHash([3; 32]), bytes: 900, step: Step(step), samples })
    }

    #[test]
    fn a_start_gives_the_first_version_and_what_steps_read() {
        let mut manifest = small();
        assert_eq!((manifest.first_version(), manifest.is_initial(Step(0))), (Step(0), true));
        (manifest.start, manifest.training.staleness) = (start(6, 0), 1);
        assert_eq!(manifest.check(), Ok(()));
        assert_eq!(manifest.first_version(), Step(6));
        // The first step finds no older weights than those that the run begins with.
        assert_eq!([6, 7, 8].map(|step| manifest.reads(Step(step)).0), [6, 6, 7]);
    }

    #[test]
    fn samples_go_on_after_those_of_the_earlier_run() {
        let earlier = small();
        let mut later = Manifest { start: start(6, 0), ..earlier.clone() };
        later.training.microbatches = 3;
        let samples = later.samples_after(&earlier, Step(6));
        assert_eq!(samples, 6 * 8 * 2);
        later.start = start(6, samples);
        let numbers = later.sample_numbers();
        assert_eq!(numbers.first_of(Step(6), 0), samples);
        assert_eq!(numbers.first_of(Step(8), 2), samples + 2 * 3 * 2 + 2 * 2);
        // A third run counts on from both.
        let third = Manifest { start: start(8, 0), ..earlier };
        assert_eq!(third.samples_after(&later, Step(8)), samples + 2 * 3 * 2);
    }

    #[test]
    fn another_order_of_samples_begins_anew() {
        let earlier = small();
        let mut later = earlier.clone();
        later.training.seed += 1;
        assert_eq!(later.samples_after(&earlier, Step(6)), 0);
        let earlier = Manifest { data: Data::Mixture(mixture()), ..earlier };
        let mut later = earlier.clone();
        assert_eq!(later.samples_after(&earlier, Step(8)), 8 * 16);
        later.start = start(8, 8 * 16);
        assert_eq!(later.sample_numbers().first_of_step(Step(6)), 6 * 16, "a phase of before");
        // With other samples a step, the phases of before begin at other samples.
        later.training.microbatches = 3;
        assert_eq!(later.samples_after(&earlier, Step(8)), 0);
        later.start = start(8, 0);
        assert_eq!(later.sample_numbers().first_of_step(Step(6)), 0);
        let earlier = small();
        let mut later = earlier.clone();
        later.evaluation.held_out = 0.2;
        assert_eq!(later.samples_after(&earlier, Step(6)), 0);
    }

    #[test]
    fn steps_must_go_beyond_the_start() {
        let manifest = Manifest { start: start(10, 0), ..small() };
        let error = manifest.check().expect_err("refused").to_string();
        assert!(error.starts_with("training.steps = 10"), "{error}");
    }

    #[test]
    fn a_checkpoint_of_another_model_is_refused() {
        let earlier = small();
        let refusal = |change: &dyn Fn(&mut Manifest)| {
            let mut later = small();
            change(&mut later);
            later.check_goes_on_from(&earlier).map_err(|error| error.to_string())
        };
        let free = |later: &mut Manifest| {
            later.training.stages = 5;
            later.training.microbatches = 1;
            later.model.context = 8;
            later.optimizer.weight_decay = 0.0;
        };
        assert_eq!(refusal(&free), Ok(()));
        let error = refusal(&|later| later.model.hidden = 64).expect_err("refused");
        assert!(error.contains("model.hidden = 32 there and 64 here"), "{error}");
        let lion = Rule::Lion(Lion { beta1: 0.9, beta2: 0.99 });
        let error = refusal(&|later| later.optimizer.rule = lion).expect_err("refused");
        let named =
            "has what optimizer.kind = \"adamw\" keeps, and this run has optimizer.kind = \"lion\"";
        assert!(error.contains(named), "{error}");
        let lora = Lora { rank: 4, alpha: 8.0, targets: vec![LoraTarget::QProj], base: None };
        let error = refusal(&|later| later.lora = Some(lora.clone())).expect_err("refused");
        assert!(error.contains("has no adapters"), "{error}");
        let error = Manifest { lora: Some(lora), ..small() };
        let error = small().check_goes_on_from(&error).expect_err("refused").to_string();
        assert!(error.contains("has adapters alone"), "{error}");
    }
}
