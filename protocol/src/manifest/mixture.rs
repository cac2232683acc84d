//! Several prepared data sets in one run, by weights that may change from a step on.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Data, Manifest, ManifestError, Prepared};
use crate::ids::Step;
use crate::limits;

/// Prepared data sets that a run draws its samples from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct Mixture {
    /// The data sets, two at least.
    pub sources: Vec<MixedSource>,
    /// Later weights, in the order of their steps.
    #[serde(default)]
    pub phases: Vec<Phase>,
}

/// One data set of a mixture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct MixedSource {
    /// Its name in numbers and messages.
    pub name: String,
    /// Its rows, by content.
    pub data: Prepared,
    /// Its weight until the first phase.
    pub weight: Weight,
}

/// Weights from a step on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// The first step with these weights.
    pub from: Step,
    /// A weight for each source, in the order of the sources.
    pub weights: Vec<Weight>,
}

/// The weight of a source, in millionths. Only the ratios of weights count.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(transparent)]
pub struct Weight(pub u64);

impl Weight {
    /// Millionths of 1.
    const UNIT: f64 = 1e6;
    /// The largest weight: a million.
    pub const MOST: Self = Self(1_000_000_000_000);

    /// The nearest weight to a number; `None` if it is negative, more than a million, or so small that it would be 0.
    #[must_use]
    pub fn of(number: f64) -> Option<Self> {
        if !(0.0..=1e6).contains(&number) {
            return None;
        }
        let weight = Self((number * Self::UNIT).round() as u64);
        (weight.0 > 0 || number == 0.0).then_some(weight)
    }

    /// The weight as a number.
    #[must_use]
    pub fn number(self) -> f64 {
        self.0 as f64 / Self::UNIT
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number().fmt(formatter)
    }
}

/// Errors of mixtures.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MixtureError {
    /// Too few or too many sources.
    #[error("data.sources has {0} sources: give 2 to {most}", most = limits::MIXTURE_SOURCES)]
    Sources(usize),
    /// Too many phases.
    #[error("data.phases has {0} phases: give {most} at most", most = limits::MIXTURE_PHASES)]
    Phases(usize),
    /// A name that is not usable in labels and paths.
    #[error(
        "data.sources has the name {0:?}: set a name of 1 to 64 letters, digits, `-`, `_` and `.`, the first of them a \
         letter or a digit"
    )]
    Name(String),
    /// Two sources of one name.
    #[error("data.sources has the name {0:?} twice: give each source a name of its own")]
    SameName(String),
    /// Two sources with the same rows.
    #[error(
        "data.sources {one:?} and {other:?} are the same data: take one out, and give the other both weights"
    )]
    SameData {
        /// The first source.
        one: String,
        /// The second.
        other: String,
    },
    /// Two sources whose rows do not go into one batch.
    #[error(
        "data.sources do not go together: {key} = {first} in {one:?} and {second} in {other:?}; prepare both with the same"
    )]
    Differs {
        /// The key of the index.
        key: &'static str,
        /// The first source.
        one: String,
        /// Its value.
        first: String,
        /// Another source.
        other: String,
        /// Its value.
        second: String,
    },
    /// A source that is never drawn.
    #[error("data.sources {0:?} has weight 0 in every phase: take it out")]
    NeverDrawn(String),
    /// A weight above the largest.
    #[error("the weight {0} of a source is out of range: it must be from 0 to 1000000")]
    Weight(Weight),
    /// A part of the run that draws nothing.
    #[error("data.{0} gives every source weight 0: one needs a weight")]
    NoWeight(String),
    /// A phase with more or fewer weights than there are sources.
    #[error("data.phases from step {from} has {found} weights for {sources} sources")]
    Weights {
        /// Its first step.
        from: Step,
        /// Its weights.
        found: usize,
        /// Sources of the mixture.
        sources: usize,
    },
    /// Phases out of order.
    #[error(
        "data.phases has from = {0} after a later one, twice, or at step 0: order phases by their first step, from 1 on"
    )]
    Order(Step),
    /// A phase behind the end of the run.
    #[error(
        "data.phases has from = {from}, and the run ends at step {steps}: begin the phase earlier"
    )]
    BehindEnd {
        /// Its first step.
        from: Step,
        /// Steps of the run.
        steps: u64,
    },
    /// A phase between two syncs of virtual workers.
    #[error("data.phases has from = {from}, which is no multiple of outer.every = {every}")]
    BetweenSyncs {
        /// Its first step.
        from: Step,
        /// Steps of a worker from one sync to the next.
        every: u32,
    },
}

impl From<MixtureError> for ManifestError {
    fn from(error: MixtureError) -> Self {
        Self::Mixture(Box::new(error))
    }
}

impl Mixture {
    /// The weights of the first phase.
    #[must_use]
    pub fn weights(&self) -> Vec<Weight> {
        self.sources.iter().map(|source| source.weight).collect()
    }

    /// Rows of all sources to train on: an epoch.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.sources.iter().fold(0, |rows, source| rows.saturating_add(source.data.rows))
    }

    /// The weights of evaluations: those of the first phase, of sources that hold rows out.
    #[must_use]
    pub fn held_out_weights(&self) -> Vec<Weight> {
        let weight = |source: &MixedSource| match source.data.held_out_rows {
            0 => Weight(0),
            _ => source.weight,
        };
        self.sources.iter().map(weight).collect()
    }

    /// Refuses sources of which two differ in a fact of their indexes.
    ///
    /// # Errors
    /// The first two that differ.
    pub fn agree<T: PartialEq + ToString>(
        &self,
        key: &'static str,
        facts: impl IntoIterator<Item = T>,
    ) -> Result<(), MixtureError> {
        let mut facts = self.sources.iter().zip(facts);
        let Some((one, first)) = facts.next() else { return Ok(()) };
        match facts.find(|(_, fact)| *fact != first) {
            None => Ok(()),
            Some((other, second)) => Err(MixtureError::Differs {
                key,
                one: one.name.clone(),
                first: first.to_string(),
                other: other.name.clone(),
                second: second.to_string(),
            }),
        }
    }

    /// Checks everything that does not depend on the rest of the run.
    ///
    /// # Errors
    /// The first defect.
    pub fn check(&self) -> Result<(), MixtureError> {
        let Self { sources, phases } = self;
        if !(2..=limits::MIXTURE_SOURCES).contains(&sources.len()) {
            return Err(MixtureError::Sources(sources.len()));
        }
        if phases.len() > limits::MIXTURE_PHASES {
            return Err(MixtureError::Phases(phases.len()));
        }
        for (place, source) in sources.iter().enumerate() {
            let name = || source.name.clone();
            if !is_name(&source.name) {
                return Err(MixtureError::Name(name()));
            }
            for earlier in &sources[..place] {
                if earlier.name == source.name {
                    return Err(MixtureError::SameName(name()));
                }
                if earlier.data.index == source.data.index {
                    let one = earlier.name.clone();
                    return Err(MixtureError::SameData { one, other: name() });
                }
            }
            let weights = phases.iter().map(|phase| phase.weights.get(place));
            if weights.chain([Some(&source.weight)]).all(|weight| weight == Some(&Weight(0))) {
                return Err(MixtureError::NeverDrawn(name()));
            }
        }
        self.agree("context", sources.iter().map(|source| source.data.context))?;
        self.agree("vocabulary", sources.iter().map(|source| source.data.vocabulary))?;
        check_weights(&self.weights(), || "sources".to_owned())?;
        self.check_phases()
    }

    fn check_phases(&self) -> Result<(), MixtureError> {
        let mut before = Step(0);
        for Phase { from, weights } in &self.phases {
            if *from <= before {
                return Err(MixtureError::Order(*from));
            }
            before = *from;
            let (found, sources) = (weights.len(), self.sources.len());
            if found != sources {
                return Err(MixtureError::Weights { from: *from, found, sources });
            }
            check_weights(weights, || format!("phases from step {from}"))?;
        }
        Ok(())
    }
}

fn check_weights(weights: &[Weight], place: impl Fn() -> String) -> Result<(), MixtureError> {
    if let Some(weight) = weights.iter().find(|weight| **weight > Weight::MOST) {
        return Err(MixtureError::Weight(*weight));
    }
    if weights.iter().all(|weight| *weight == Weight(0)) {
        return Err(MixtureError::NoWeight(place()));
    }
    Ok(())
}

fn is_name(name: &str) -> bool {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric();
    (1..=64).contains(&name.len())
        && name.starts_with(is_plain)
        && name.chars().all(|letter| is_plain(letter) || "-_.".contains(letter))
}

impl Data {
    /// The mixture, if the run has one.
    #[must_use]
    pub const fn mixture(&self) -> Option<&Mixture> {
        match self {
            Self::Mixture(mixture) => Some(mixture),
            Self::Text(_) | Self::Prepared(_) => None,
        }
    }

    /// The prepared data sets of the run: none of a text, one, or those of a mixture.
    #[must_use]
    pub fn prepared(&self) -> Vec<&Prepared> {
        match self {
            Self::Text(_) => Vec::new(),
            Self::Prepared(prepared) => vec![prepared],
            Self::Mixture(mixture) => mixture.sources.iter().map(|source| &source.data).collect(),
        }
    }
}

impl Manifest {
    pub(super) fn check_mixture(&self, mixture: &Mixture) -> Result<(), ManifestError> {
        mixture.check()?;
        let steps = self.training.steps;
        if let Some(&Phase { from, .. }) = mixture.phases.last()
            && from.0 >= steps
        {
            return Err(MixtureError::BehindEnd { from, steps }.into());
        }
        mixture.sources.iter().try_for_each(|source| self.check_rows(&source.data))?;
        let every = self.evaluation.every;
        if every > 0 && mixture.held_out_weights().iter().all(|weight| *weight == Weight(0)) {
            return Err(ManifestError::NothingHeldOut { every });
        }
        Ok(())
    }

    /// Makes of the phases of one worker's steps those of syncs.
    ///
    /// # Errors
    /// If a phase begins between two syncs.
    pub fn count_phases_in_syncs(&mut self, every: u32) -> Result<(), MixtureError> {
        let Data::Mixture(mixture) = &mut self.data else { return Ok(()) };
        for Phase { from, .. } in &mut mixture.phases {
            if !from.0.is_multiple_of(every.into()) {
                return Err(MixtureError::BetweenSyncs { from: *from, every });
            }
            from.0 /= u64::from(every);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::example::{mixture, small};
    use super::*;

    /// The refusal of a run on a mixture that a change made invalid.
    fn refusal(change: impl Fn(&mut Mixture)) -> String {
        let mut mixture = mixture();
        change(&mut mixture);
        let manifest = Manifest { data: Data::Mixture(mixture), ..small() };
        manifest.check().expect_err("refused").to_string()
    }

    #[test]
    fn a_mixture_reads_back() {
        let manifest = Manifest { data: Data::Mixture(mixture()), ..small() };
        assert_eq!(Manifest::from_bytes(&manifest.to_bytes()), Ok(manifest.clone()));
        assert_eq!(manifest.data.prepared().len(), 2);
    }

    #[test]
    fn weights_are_millionths() {
        assert_eq!(Weight::of(0.7), Some(Weight(700_000)));
        assert_eq!(Weight::of(1e6), Some(Weight::MOST));
        assert_eq!(Weight(250_000).to_string(), "0.25");
        assert_eq!([-0.1, 1e-9, 2e6, f64::NAN].map(Weight::of), [None; 4]);
    }

    #[test]
    fn sources_that_do_not_go_together_are_refused() {
        let error = refusal(|mixture| mixture.sources[1].data.vocabulary = 200);
        assert!(error.contains("vocabulary = 256 in \"web\" and 200 in \"code\""), "{error}");
        let error = refusal(|mixture| mixture.sources[1].data.context = 4);
        assert!(error.contains("context = 16 in \"web\" and 4 in \"code\""), "{error}");
        let error = refusal(|mixture| mixture.sources[1].name = "web".to_owned());
        assert!(error.contains("\"web\" twice"), "{error}");
        let error = refusal(|mixture| mixture.sources[1].name = "../web".to_owned());
        assert!(error.contains("\"../web\""), "{error}");
        let error = refusal(|mixture| {
            mixture.sources[1].data.index = mixture.sources[0].data.index;
        });
        assert!(error.contains("\"web\" and \"code\" are the same data"), "{error}");
        let error = refusal(|mixture| mixture.sources.truncate(1));
        assert!(error.contains("has 1 sources"), "{error}");
        let error = refusal(|mixture| {
            mixture.sources.iter_mut().for_each(|source| source.data.held_out_rows = 0);
        });
        assert!(error.contains("holds nothing out"), "{error}");
    }

    #[test]
    fn phases_that_draw_nothing_or_never_begin_are_refused() {
        let error = refusal(|mixture| mixture.phases[0].weights = vec![Weight(0); 2]);
        assert!(error.contains("phases from step 6 gives every source weight 0"), "{error}");
        let error = refusal(|mixture| mixture.phases[0].from = Step(0));
        assert!(error.contains("from = 0"), "{error}");
        let error = refusal(|mixture| mixture.phases[0].from = Step(1000));
        assert!(error.contains("from = 1000, and the run ends at step"), "{error}");
        let error = refusal(|mixture| mixture.phases[0].weights = vec![Weight(1)]);
        assert!(error.contains("1 weights for 2 sources"), "{error}");
        let error = refusal(|mixture| {
            mixture.sources[0].weight = Weight(0);
            mixture.phases[0].weights[0] = Weight(0);
        });
        assert!(error.contains("\"web\" has weight 0 in every phase"), "{error}");
    }

    #[test]
    fn phases_of_workers_begin_at_syncs() {
        let mut manifest = Manifest { data: Data::Mixture(mixture()), ..small() };
        assert_eq!(manifest.count_phases_in_syncs(3), Ok(()));
        assert_eq!(manifest.data.mixture().expect("one").phases[0].from, Step(2));
        let error = manifest.count_phases_in_syncs(4).expect_err("between two");
        assert_eq!(error, MixtureError::BetweenSyncs { from: Step(2), every: 4 });
    }
}
