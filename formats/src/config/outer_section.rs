//! The section `[outer]` of `run.toml`: virtual workers that sync now and then.

use serde::{Deserialize, Serialize};
use shoal_protocol::codec::SumCodec;
use shoal_protocol::limits;
use shoal_protocol::manifest::{
    DistanceCodec, InnerLoop, InnerMoments, Manifest, ManifestError, Optimizer, Rule, Schedule,
    Sgd, within,
};

/// Virtual workers, each of which makes `every` steps of its own before they sync, and the update of the weights
/// from how far they came on average: gradient descent with Nesterov's momentum.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outer {
    /// Workers.
    pub workers: u32,
    /// Steps of a worker from one sync to the next.
    pub every: u32,
    /// Factor on the workers' mean delta.
    #[serde(default = "default_rate")]
    pub rate: f64,
    /// Decay of the sum of these deltas.
    #[serde(default = "default_momentum")]
    pub momentum: f64,
    /// The precision of how far a worker came.
    #[serde(default)]
    pub codec: DistanceCodec,
    /// What a worker's optimizer begins with after a sync.
    #[serde(default)]
    pub moments: InnerMoments,
    /// Steps that workers make from the weights of the sync before, while the sums of this one travel.
    #[serde(default)]
    pub overlap: u32,
}

const fn default_rate() -> f64 {
    0.7
}

const fn default_momentum() -> f64 {
    0.6
}

impl Outer {
    /// Workers with the usual update.
    #[must_use]
    pub const fn new(workers: u32, every: u32) -> Self {
        let (rate, momentum) = (default_rate(), default_momentum());
        let (codec, moments) = (DistanceCodec::F32, InnerMoments::Zero);
        Self { workers, every, rate, momentum, codec, moments, overlap: 0 }
    }

    /// Makes of a run of one worker, whose steps are all of its updates, the run of all workers, whose steps
    /// are their syncs. One worker that syncs after every step changes nothing.
    ///
    /// # Errors
    /// If the run does not end with a sync.
    pub fn apply(&self, manifest: &mut Manifest) -> Result<(), ManifestError> {
        let Self { workers, every, rate, momentum, codec, moments, overlap } = *self;
        if manifest.training.staleness > 0 {
            return Err(ManifestError::WorkersWith {
                other: "training.staleness, in place of which there is outer.overlap",
            });
        }
        within("outer.every", every, 1..=limits::INNER_PASSES)?;
        within("outer.overlap", overlap, 0..=every)?;
        within("outer.rate", rate, 0.0..=10.0)?;
        within("outer.momentum", momentum, 0.0..=0.999_999)?;
        manifest.training.staleness = u8::from(overlap > 0);
        if (workers, every) == (1, 1) {
            return Ok(());
        }
        let syncs = |steps: u64| steps.div_ceil(every.into());
        let training = &mut manifest.training;
        if !training.steps.is_multiple_of(every.into()) {
            return Err(ManifestError::OutOfRange {
                key: "training.steps",
                value: training.steps.to_string(),
                range: format!("a multiple of outer.every = {every}"),
            });
        }
        training.steps = syncs(training.steps);
        manifest.count_phases_in_syncs(every)?;
        let training = &mut manifest.training;
        let microbatches = std::mem::replace(&mut training.microbatches, workers);
        manifest.evaluation.every = syncs(manifest.evaluation.every);
        manifest.checkpoint.every = syncs(manifest.checkpoint.every);
        let outer = Optimizer {
            rule: Rule::Sgd(Sgd { momentum, nesterov: true }),
            learning_rate: rate,
            warmup_steps: 0,
            schedule: Schedule::Constant,
            weight_decay: 0.0,
            gradient_clip: 0.0,
        };
        let optimizer = std::mem::replace(&mut manifest.optimizer, outer);
        let steps = every;
        manifest.inner =
            Some(InnerLoop { steps, microbatches, optimizer, codec, moments, overlap });
        if codec != DistanceCodec::F32 && manifest.codec.all_reduce == SumCodec::Exact {
            manifest.codec.all_reduce = SumCodec::Integers;
        }
        Ok(())
    }
}

/// The section in TOML, or a comment with an example if there is none.
pub(crate) fn to_toml(outer: Option<&Outer>) -> String {
    let Some(outer) = outer else {
        return "# [outer]\n# workers = 4\n# every = 30".to_owned();
    };
    let keys = toml::to_string(outer).expect("its numbers are within their ranges");
    format!("[outer]\n{}", keys.trim_end())
}
