//! The loss of a run: of the next token, or of preferences between two completions of a prompt.

use serde::{Deserialize, Serialize};

use super::{Base, Manifest, ManifestError, within};
use crate::ids::ContentHash;

/// Words behind the labels of a row that bring the reference's log-probabilities of its pair.
const REFERENCE_WORDS: u32 = 2;

/// The loss that a run lowers.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Cross-entropy of the next token.
    #[default]
    CrossEntropy,
    /// A loss of pairs of completions.
    Preference(Preference),
}

/// A loss of pairs, of which one completion is preferred to the other.
#[derive(
    Debug, Clone, Copy, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(deny_unknown_fields)]
pub struct Preference {
    /// The loss.
    pub kind: PreferenceKind,
    /// Factor on differences of log-probabilities; of the odds ratio's part in ORPO.
    pub beta: f64,
    /// The margin by which SimPO's rewards are to differ; 0 for the other losses.
    #[serde(default)]
    pub gamma: f64,
}

/// A loss of pairs.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(rename_all = "lowercase")]
pub enum PreferenceKind {
    /// Direct preference optimisation (Rafailov et al., arXiv 2305.18290).
    Dpo,
    /// Identity preference optimisation (Azar et al., arXiv 2310.12036), of means over tokens.
    Ipo,
    /// Simple preference optimisation (Meng et al., arXiv 2405.14734).
    Simpo,
    /// Odds ratio preference optimisation (Hong et al., arXiv 2403.07691).
    Orpo,
}

impl PreferenceKind {
    /// Its name in `run.toml`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dpo => "dpo",
            Self::Ipo => "ipo",
            Self::Simpo => "simpo",
            Self::Orpo => "orpo",
        }
    }

    /// Whether the loss compares with the log-probabilities of a reference.
    #[must_use]
    pub const fn needs_reference(self) -> bool {
        matches!(self, Self::Dpo | Self::Ipo)
    }
}

/// That prepared data holds pairs: a row has one, the chosen sequence before the rejected one.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(deny_unknown_fields)]
pub struct Pairs {
    /// The index of the base whose log-probabilities the rows have, if they have any.
    #[serde(default)]
    pub reference: Option<ContentHash>,
}

/// Errors of losses of preferences.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PreferenceError {
    /// Pairs in a run that learns the next token.
    #[error(
        "the data holds pairs of a chosen and a rejected completion, and training.loss = \"cross_entropy\" learns \
         from texts: set training.loss to \"dpo\", \"ipo\", \"simpo\" or \"orpo\""
    )]
    PairsOfTexts,
    /// A loss of pairs on other data.
    #[error(
        "training.loss = {loss:?} learns from pairs, and the data holds none: prepare rows with `chosen` and \
         `rejected` by `shoal data prepare`"
    )]
    NoPairs {
        /// The loss.
        loss: &'static str,
    },
    /// A loss that compares with a reference that the data lacks.
    #[error(
        "training.loss = {loss:?} compares with the log-probabilities of the base, and the data has none: add them \
         with `shoal data reference DATA --model BASE -o OUT`, or set training.loss to \"simpo\" or \"orpo\""
    )]
    NoReference {
        /// The loss.
        loss: &'static str,
    },
    /// A reference that is not the run's base.
    #[error(
        "the log-probabilities beside the data are of the base {found}, and model.from is {base}: compute them again \
         with `shoal data reference` and the run's base"
    )]
    OtherReference {
        /// Index of the base that computed them.
        found: ContentHash,
        /// Index of the run's base.
        base: ContentHash,
    },
    /// A reference in a run that begins with random weights.
    #[error(
        "training.loss = {loss:?} compares with the weights of a base: set model.from, or training.loss to \"simpo\" \
         or \"orpo\""
    )]
    NoBase {
        /// The loss.
        loss: &'static str,
    },
}

impl Loss {
    /// The loss of pairs, if it is one.
    #[must_use]
    pub const fn preference(&self) -> Option<&Preference> {
        match self {
            Self::CrossEntropy => None,
            Self::Preference(preference) => Some(preference),
        }
    }

    /// Whether labels bring the log-probabilities of a reference.
    #[must_use]
    pub fn needs_reference(&self) -> bool {
        self.preference().is_some_and(|preference| preference.kind.needs_reference())
    }
}

impl Manifest {
    /// Words that travel beside the activation of each row: its labels, and a pair's log-probabilities.
    #[must_use]
    pub fn words_of_row(&self) -> u32 {
        let more = if self.training.loss.needs_reference() { REFERENCE_WORDS } else { 0 };
        self.model.context + more
    }

    /// The number of terms by which the loss of a microbatch is divided: its tokens, or its pairs.
    #[must_use]
    pub fn terms_per_microbatch(&self) -> u64 {
        match self.training.loss {
            Loss::CrossEntropy => self.tokens_per_microbatch(),
            Loss::Preference(_) => self.training.microbatch_size.into(),
        }
    }

    /// Terms of one step; see [`Manifest::terms_per_microbatch`].
    #[must_use]
    pub fn terms_per_step(&self) -> u64 {
        u64::from(self.training.microbatches) * self.passes() * self.terms_per_microbatch()
    }

    pub(super) fn check_loss(&self) -> Result<(), ManifestError> {
        let data = self.data.prepared();
        let mut pairs = data.iter().map(|data| data.pairs);
        let Loss::Preference(Preference { kind, beta, gamma }) = self.training.loss else {
            return match pairs.any(|pairs| pairs.is_some()) {
                true => Err(PreferenceError::PairsOfTexts.into()),
                false => Ok(()),
            };
        };
        within("training.beta", beta, 1e-6..=1e6)?;
        if kind == PreferenceKind::Simpo {
            within("training.gamma", gamma, 0.0..=1e6)?;
        } else if gamma != 0.0 {
            return Err(ManifestError::OutOfRange {
                key: "training.gamma",
                value: gamma.to_string(),
                range: "0, since only training.loss = \"simpo\" has a margin".to_owned(),
            });
        }
        if self.inner.is_some() {
            return Err(ManifestError::WorkersWith { other: "a training.loss of pairs" });
        }
        let loss = kind.name();
        if data.is_empty() {
            return Err(PreferenceError::NoPairs { loss }.into());
        }
        for pairs in pairs {
            let Some(Pairs { reference }) = pairs else {
                return Err(PreferenceError::NoPairs { loss }.into());
            };
            if kind.needs_reference() {
                self.check_reference(reference, loss)?;
            }
        }
        Ok(())
    }

    fn check_reference(
        &self,
        reference: Option<ContentHash>,
        loss: &'static str,
    ) -> Result<(), PreferenceError> {
        let found = reference.ok_or(PreferenceError::NoReference { loss })?;
        match self.model.base {
            Some(Base { index, loads_weights: true, .. }) if index == found => Ok(()),
            Some(Base { index, loads_weights: true, .. }) => {
                Err(PreferenceError::OtherReference { found, base: index })
            }
            _ => Err(PreferenceError::NoBase { loss }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::example::{mixture, small};
    use super::*;
    use crate::manifest::{Data, Prepared};

    /// A run with this loss on prepared data of this kind, from a base with the index 7.
    fn run(kind: PreferenceKind, pairs: Option<Pairs>) -> Manifest {
        let mut manifest = small();
        let base = Base { index: ContentHash([7; 32]), bytes: 10, loads_weights: true };
        manifest.model.base = Some(base);
        manifest.training.loss = Loss::Preference(Preference { kind, beta: 0.1, gamma: 0.0 });
        let prepared = Prepared { pairs, ..mixture().sources[0].data.clone() };
        manifest.data = Data::Prepared(prepared);
        manifest
    }

    fn refused(manifest: &Manifest) -> String {
        manifest.check().expect_err("refused").to_string()
    }

    const REFERENCE: Option<Pairs> = Some(Pairs { reference: Some(ContentHash([7; 32])) });
    const PLAIN: Option<Pairs> = Some(Pairs { reference: None });

    #[test]
    fn losses_need_their_data() {
        use PreferenceKind::{Dpo, Ipo, Orpo, Simpo};
        for kind in [Dpo, Ipo] {
            assert_eq!(run(kind, REFERENCE).check(), Ok(()));
            assert!(refused(&run(kind, PLAIN)).contains("shoal data reference"));
            let other = Pairs { reference: Some(ContentHash([8; 32])) };
            assert!(refused(&run(kind, Some(other))).contains("are of the base 0808"));
            let mut drawn = run(kind, REFERENCE);
            drawn.model.base = None;
            assert!(refused(&drawn).contains("set model.from"));
        }
        for kind in [Simpo, Orpo] {
            assert_eq!(run(kind, PLAIN).check(), Ok(()));
            assert_eq!(run(kind, REFERENCE).check(), Ok(()));
        }
        assert!(refused(&run(Orpo, None)).contains("the data holds none"));
        let mut text = run(Orpo, PLAIN);
        text.data = small().data;
        assert!(refused(&text).contains("the data holds none"));
        let mut plain = run(Orpo, PLAIN);
        plain.training.loss = Loss::CrossEntropy;
        assert!(refused(&plain).contains("holds pairs"));
    }

    #[test]
    fn factors_have_ranges() {
        for (beta, gamma, key) in [(0.0, 0.0, "beta"), (-0.1, 0.0, "beta"), (0.1, 0.5, "gamma")] {
            let mut manifest = run(PreferenceKind::Dpo, REFERENCE);
            let kind = PreferenceKind::Dpo;
            manifest.training.loss = Loss::Preference(Preference { kind, beta, gamma });
            assert!(refused(&manifest).starts_with(&format!("training.{key}")), "{key}");
        }
    }

    #[test]
    fn a_step_is_a_mean_over_its_pairs() {
        let manifest = run(PreferenceKind::Dpo, REFERENCE);
        let pairs = u64::from(manifest.training.microbatches * manifest.training.microbatch_size);
        assert_eq!((manifest.terms_per_step(), manifest.gradient_scale(pairs)), (pairs, 1.0));
        let [rows, words] = manifest.label_shape();
        assert_eq!((rows, words), (manifest.training.microbatch_size, manifest.model.context + 2));
    }
}
