//! Virtual workers: the microbatch of a run whose peers meet only now and then.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Manifest, ManifestError, Optimizer, Rule, within};
use crate::ids::{Exchange, Microbatch, Step};
use crate::limits;

/// What a virtual worker does between two meetings, in a run of several (DiLoCo, arXiv 2311.08105).
///
/// A microbatch of such a run is all that one worker does in a step: from the weights of the step it makes
/// `steps` updates of its own, on its own samples, and its gradient is how far it came, from the last weights to
/// the first. The run's optimizer steps on the mean. What the worker's optimizer keeps begins with the same
/// values for all. So the result of a worker depends on the step's version, the seed and its number, and not on
/// the peer. With an `overlap` the sums of a step travel while the workers of the next one begin.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct InnerLoop {
    /// Updates of a worker in one step of the run.
    pub steps: u32,
    /// Microbatches of one of these updates.
    pub microbatches: u32,
    /// The worker's optimizer.
    pub optimizer: Optimizer,
    /// The precision of how far a worker came.
    pub codec: DistanceCodec,
    /// What the worker's optimizer begins with in each step of the run.
    pub moments: InnerMoments,
    /// Updates that a worker makes before it joins the weights of the newest meeting: it begins from those of the one
    /// before, and adds what that meeting changed after so many updates, as in Streaming DiLoCo (arXiv 2501.18512).
    /// A worker with as many as `steps` never does, and one with 0 begins from the newest.
    pub overlap: u32,
}

/// Bytes of the note that travels with each tensor of a virtual worker of several stages: up, the square of the norm
/// of the gradient of the update before; down, the sum of the squares of this update's gradients at the stages
/// that have all of them. A little-endian f64.
pub const NOTE: usize = 8;

/// What the optimizer of a virtual worker has kept when a step of the run begins: its moments, or what else its rule
/// keeps beside the weights.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Default,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(rename_all = "lowercase")]
pub enum InnerMoments {
    /// Nothing: zeros.
    #[default]
    Zero,
    /// The mean over all workers of what they had at the end of the step before. It is summed with how far they came,
    /// and belongs to the run's state as its weights do (local AdamW with synchronised states, as in DES-LOC, arXiv
    /// 2505.22549).
    Mean,
}

/// The precision of how far a virtual worker came. A number in few bits is an integer times a power of two, which a
/// block of numbers shares, rounded up or down at random; so rounded, they are summed exactly.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Default,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(rename_all = "lowercase")]
pub enum DistanceCodec {
    /// As it was computed.
    #[default]
    F32,
    /// 8 bits.
    Int8,
    /// 4 bits.
    Int4,
    /// 2 bits: -1, 0 or 1.
    Int2,
}

impl DistanceCodec {
    /// Bits of a rounded number.
    #[must_use]
    pub const fn bits(self) -> Option<u32> {
        match self {
            Self::F32 => None,
            Self::Int8 => Some(8),
            Self::Int4 => Some(4),
            Self::Int2 => Some(2),
        }
    }
}

impl InnerLoop {
    /// Passes of a worker in one step of the run.
    #[must_use]
    pub const fn passes(&self) -> u32 {
        self.steps * self.microbatches
    }

    /// The first exchange for which a worker has joined the newest meeting, if it does so on its way.
    const fn joins_at(&self) -> Option<Exchange> {
        let joins = 0 < self.overlap && self.overlap < self.steps;
        if joins { Some(Exchange(self.overlap.saturating_mul(self.microbatches))) } else { None }
    }
}

impl Manifest {
    /// Passes that make up one training microbatch: 1, or those of a virtual worker.
    #[must_use]
    pub fn passes(&self) -> u64 {
        self.inner.as_ref().map_or(1, |inner| inner.passes().into())
    }

    /// Passes of a microbatch, which is one to train on or is held out.
    #[must_use]
    pub fn passes_of(&self, microbatch: Microbatch) -> u64 {
        if microbatch.0 < self.training.microbatches { self.passes() } else { 1 }
    }

    /// Exchanges of a microbatch between neighbouring stages. A virtual worker that has them makes one for each of its
    /// passes, and a last one without a pass, which ends it.
    #[must_use]
    pub fn exchanges_of(&self, microbatch: Microbatch) -> u32 {
        match &self.inner {
            Some(inner) if self.workers_exchange() && microbatch.0 < self.training.microbatches => {
                inner.passes() + 1
            }
            _ => 1,
        }
    }

    /// The passes of a microbatch that an exchange is for, by their number in the microbatch.
    #[must_use]
    pub fn passes_of_exchange(&self, microbatch: Microbatch, exchange: Exchange) -> Range<u32> {
        let passes = u32::try_from(self.passes_of(microbatch)).expect("within a cap");
        if self.exchanges_of(microbatch) == 1 {
            return 0..passes;
        }
        exchange.0.min(passes)..exchange.0.saturating_add(1).min(passes)
    }

    /// Exchanges of one microbatch that may be under way at a time: those of one update of a virtual worker.
    #[must_use]
    pub fn exchanges_at_once(&self) -> u32 {
        match &self.inner {
            Some(inner) if self.workers_exchange() => inner.microbatches,
            _ => 1,
        }
    }

    /// Whether the passes of a virtual worker are exchanges, each of which waits for what it needs: the neighbours of a
    /// pipeline of several peers, or the newest meeting.
    #[must_use]
    pub fn workers_exchange(&self) -> bool {
        let exchange = |inner: &InnerLoop| self.training.stages > 1 || inner.joins_at().is_some();
        self.inner.as_ref().is_some_and(exchange)
    }

    /// The version of the weights that an exchange of a step reads: that of [`Manifest::reads`], or the step's own once a
    /// virtual worker has joined it.
    #[must_use]
    pub fn exchange_reads(&self, step: Step, exchange: Exchange) -> Step {
        let joins_at = self.inner.as_ref().and_then(InnerLoop::joins_at);
        let has_joined = joins_at.is_some_and(|first| first <= exchange);
        if has_joined { step } else { self.reads(step) }
    }

    /// Whether a virtual worker joins the newest meeting at this exchange.
    #[must_use]
    pub fn joins_at(&self, exchange: Exchange) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.joins_at() == Some(exchange))
    }

    /// Samples of a microbatch of the run.
    #[must_use]
    pub fn samples_of(&self, microbatch: Microbatch) -> u64 {
        u64::from(self.training.microbatch_size) * self.passes_of(microbatch)
    }

    /// The optimizer of the workers, if what it keeps is carried from one step of the run to the next.
    #[must_use]
    pub fn carried_rule(&self) -> Option<&Rule> {
        let inner = self.inner.as_ref()?;
        (inner.moments == InnerMoments::Mean).then_some(&inner.optimizer.rule)
    }

    /// The run of a single worker, whose steps are all of its updates; `None` without workers.
    #[must_use]
    pub fn of_worker(&self) -> Option<Self> {
        let inner = self.inner.as_ref()?;
        let mut manifest = Self { inner: None, start: None, guard: None, ..self.clone() };
        manifest.training.staleness = 0;
        manifest.training.steps = self.training.steps * u64::from(inner.steps);
        manifest.training.microbatches = inner.microbatches;
        manifest.optimizer = inner.optimizer.clone();
        Some(manifest)
    }

    pub(super) fn check_inner(&self) -> Result<(), ManifestError> {
        let Some(inner) = &self.inner else { return Ok(()) };
        within("outer.every", inner.steps, 1..=limits::INNER_PASSES)?;
        within("training.microbatches", inner.microbatches, 1..=limits::MICROBATCHES / 2)?;
        let passes = u64::from(inner.steps) * u64::from(inner.microbatches);
        let cap = 1..=u64::from(limits::INNER_PASSES);
        within("outer.every times training.microbatches", passes, cap)?;
        let samples = (4 * passes).saturating_mul(self.tokens_per_microbatch());
        within("bytes of a worker's samples in one outer step", samples, 1..=limits::TENSOR.0)?;
        inner.optimizer.check()?;
        let alone = |other, is_there: bool| match is_there {
            true => Err(ManifestError::WorkersWith { other }),
            false => Ok(()),
        };
        let in_stages = self.training.stages > 1;
        let tied = "tied embeddings that are trained and training.stages of more than 1";
        alone(tied, self.shared_weights().is_some())?;
        alone("model.boundary", self.model.boundary.is_some())?;
        let sliced = in_stages && self.model.slices > 1;
        alone("model.slices and training.stages of more than 1", sliced)?;
        within("outer.overlap", inner.overlap, 0..=inner.steps)?;
        let late = self.training.staleness != u8::from(inner.overlap > 0);
        alone("training.staleness, in place of which there is outer.overlap", late)?;
        let joins = inner.joins_at().is_some() && self.model.slices > 1;
        alone("model.slices and an outer.overlap of fewer than outer.every steps", joins)?;
        // Workers' means take the names of what the run's own rule keeps, but for sgd's.
        let is_sgd = matches!(self.optimizer.rule, Rule::Sgd(_));
        let keeps = self.carried_rule().is_some() && !is_sgd;
        alone("outer.moments = \"mean\" where the run's own rule is not sgd", keeps)?;
        let rounds = self.carried_rule().is_some() && self.codec.all_reduce.loses();
        alone("outer.moments = \"mean\" where codec.all_reduce rounds", rounds)?;
        let overlaps = self.carried_rule().is_some() && self.training.staleness > 0;
        alone("outer.moments = \"mean\" with outer.overlap", overlaps)
    }
}

#[cfg(test)]
mod tests {
    use super::super::example::small;
    use super::super::{Lion, Rule, Schedule, Sgd};
    use super::*;
    use crate::codec::{Codec, SumCodec};

    /// Three workers that meet after every five updates of two microbatches.
    fn workers() -> Manifest {
        let mut manifest = small();
        let optimizer = manifest.optimizer.clone();
        let (codec, moments) = (DistanceCodec::F32, InnerMoments::Zero);
        manifest.inner =
            Some(InnerLoop { steps: 5, microbatches: 2, optimizer, codec, moments, overlap: 0 });
        manifest.optimizer.rule = Rule::Sgd(Sgd { momentum: 0.9, nesterov: true });
        manifest.optimizer.schedule = Schedule::Constant;
        manifest.training.microbatches = 3;
        manifest.training.stages = 1;
        manifest
    }

    #[test]
    fn a_microbatch_is_all_that_a_worker_does_in_a_step() {
        let manifest = workers();
        assert_eq!(manifest.check(), Ok(()));
        let (size, context) = (2, 16);
        assert_eq!(manifest.samples_of(Microbatch(2)), 5 * 2 * size);
        assert_eq!(manifest.samples_of(Microbatch(3)), size, "held out");
        assert_eq!(manifest.tokens_per_step(), 3 * 5 * 2 * size * context);
        let numbers = manifest.sample_numbers();
        assert_eq!(numbers.first_of(Step(1), 1), 4 * 5 * 2 * size);
        let of_worker = manifest.of_worker().expect("there are workers");
        assert_eq!(of_worker.check(), Ok(()));
        assert_eq!((of_worker.training.steps, of_worker.training.microbatches), (50, 2));
        assert_eq!(of_worker.optimizer, small().optimizer);
        assert_eq!(of_worker.of_worker(), None);
        let overlaps = overlapping(5);
        assert_eq!(overlaps.check(), Ok(()));
        assert_eq!(overlaps.of_worker(), Some(of_worker), "a worker waits for its own updates");
        assert_eq!(overlaps.exchanges_of(Microbatch(0)), 1, "it never joins the newest meeting");
    }

    /// The run in which workers join the newest meeting after so many updates.
    fn overlapping(overlap: u32) -> Manifest {
        let mut manifest = workers();
        manifest.training.staleness = 1;
        manifest.inner.as_mut().expect("workers").overlap = overlap;
        manifest
    }

    #[test]
    fn a_worker_joins_the_newest_meeting_between_two_updates() {
        let manifest = overlapping(3);
        assert_eq!(manifest.check(), Ok(()));
        assert_eq!(manifest.exchanges_of(Microbatch(0)), 5 * 2 + 1);
        assert_eq!(manifest.exchanges_of(Microbatch(3)), 1, "held out");
        let reads = |exchange| manifest.exchange_reads(Step(7), Exchange(exchange)).0;
        assert_eq!([0, 5, 6, 10].map(reads), [6, 6, 7, 7]);
        let joins = (0..11).filter(|exchange| manifest.joins_at(Exchange(*exchange)));
        assert_eq!(joins.collect::<Vec<_>>(), [6]);
    }

    #[test]
    fn a_run_that_carries_moments_goes_on_from_one_that_does() {
        let zero = workers();
        let mut mean = workers();
        mean.inner.as_mut().expect("workers").moments = InnerMoments::Mean;
        let mut lion = mean.clone();
        lion.inner.as_mut().expect("workers").optimizer.rule =
            Rule::Lion(Lion { beta1: 0.9, beta2: 0.99 });
        assert_eq!(mean.check_goes_on_from(&mean), Ok(()));
        assert_eq!(zero.check_goes_on_from(&mean), Ok(()));
        assert_eq!(mean.check_goes_on_from(&zero), Err(ManifestError::StartWithoutMoments));
        let mut often = mean.clone();
        often.inner.as_mut().expect("there are workers").steps = 1;
        assert_eq!(often.version_after(&mean, Step(3)), Ok(Step(15)));
        assert_eq!(mean.version_after(&often, Step(15)), Ok(Step(3)));
        let error = mean.version_after(&often, Step(16)).expect_err("between two");
        assert!(error.to_string().contains("outer.every"), "{error}");
        let error = lion.check_goes_on_from(&mean).expect_err("refused").to_string();
        assert!(error.contains("workers' optimizer.kind = \"adamw\" keeps"), "{error}");
        let error = mean.check_goes_on_from(&small()).expect_err("refused").to_string();
        let named = "has what optimizer.kind = \"adamw\" keeps, and this run has [outer]";
        assert!(error.contains(named), "{error}");
    }

    #[test]
    fn what_workers_cannot_go_with_is_named() {
        let refusal = |change: &dyn Fn(&mut Manifest)| {
            let mut manifest = workers();
            change(&mut manifest);
            manifest.check().expect_err("refused").to_string()
        };
        let error = refusal(&|manifest| {
            manifest.training.stages = 2;
            manifest.model.block.tied = true;
        });
        assert!(error.contains("outer workers do not go with tied embeddings"), "{error}");
        let error = refusal(&|manifest| manifest.training.staleness = 1);
        assert!(error.contains("in place of which there is outer.overlap"), "{error}");
        let error = refusal(&|manifest| *manifest = overlapping(6));
        assert!(error.contains("outer.overlap = 6 is out of range"), "{error}");
        let error = refusal(&|manifest| {
            *manifest = overlapping(2);
            manifest.model.slices = 2;
        });
        assert!(error.contains("an outer.overlap of fewer than outer.every"), "{error}");
        let error = refusal(&|manifest| {
            *manifest = overlapping(5);
            manifest.inner.as_mut().expect("workers").moments = InnerMoments::Mean;
        });
        assert!(error.contains("with outer.overlap"), "{error}");
        let error = refusal(&|manifest| {
            manifest.inner.as_mut().expect("workers").moments = InnerMoments::Mean;
            manifest.codec.all_reduce = SumCodec::Rounded(Codec::Bf16);
        });
        assert!(error.contains("where codec.all_reduce rounds"), "{error}");
        let error = refusal(&|manifest| {
            manifest.inner.as_mut().expect("workers").steps = 1 << 17;
        });
        assert!(error.starts_with("outer.every = 131072 is out of range"), "{error}");
    }
}
