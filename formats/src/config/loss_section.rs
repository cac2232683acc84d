//! The keys of `[training]` that choose the loss.

use std::fmt;

use serde::{Deserialize, Serialize};
use shoal_protocol::manifest::{Loss, Preference, PreferenceKind};

/// The loss by its name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossName {
    /// Cross-entropy of the next token.
    #[default]
    CrossEntropy,
    /// Direct preference optimisation, of pairs beside a reference.
    Dpo,
    /// Identity preference optimisation, of pairs beside a reference.
    Ipo,
    /// Simple preference optimisation, of pairs without a reference.
    Simpo,
    /// Odds ratio preference optimisation, of pairs without a reference.
    Orpo,
}

impl LossName {
    /// All losses.
    pub const ALL: [Self; 5] = [Self::CrossEntropy, Self::Dpo, Self::Ipo, Self::Simpo, Self::Orpo];

    const fn kind(self) -> Option<PreferenceKind> {
        match self {
            Self::CrossEntropy => None,
            Self::Dpo => Some(PreferenceKind::Dpo),
            Self::Ipo => Some(PreferenceKind::Ipo),
            Self::Simpo => Some(PreferenceKind::Simpo),
            Self::Orpo => Some(PreferenceKind::Orpo),
        }
    }

    /// Its name in files and flags.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.kind().map_or("cross_entropy", PreferenceKind::name)
    }

    /// Whether it is a loss of pairs.
    #[must_use]
    pub const fn is_of_pairs(self) -> bool {
        self.kind().is_some()
    }

    /// Whether it compares with the log-probabilities of a base.
    #[must_use]
    pub fn needs_reference(self) -> bool {
        self.kind().is_some_and(PreferenceKind::needs_reference)
    }

    /// The loss with the factors that most recipes take: those of the papers' main results.
    #[must_use]
    pub fn usual(self) -> Loss {
        let Some(kind) = self.kind() else { return Loss::CrossEntropy };
        let (beta, gamma) = match kind {
            PreferenceKind::Dpo | PreferenceKind::Ipo | PreferenceKind::Orpo => (0.1, 0.0),
            PreferenceKind::Simpo => (2.0, 1.0),
        };
        Loss::Preference(Preference { kind, beta, gamma })
    }
}

impl fmt::Display for LossName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The loss of these keys.
pub fn resolve(name: LossName, beta: Option<f64>, gamma: Option<f64>) -> Result<Loss, String> {
    match name.usual() {
        Loss::CrossEntropy => {
            let keys = [("beta", beta), ("gamma", gamma)];
            match keys.iter().find(|(_, value)| value.is_some()) {
                Some((key, _)) => Err(format!(
                    "training.{key} is of losses of pairs: set training.loss to \"dpo\", \"ipo\", \"simpo\" or \
                     \"orpo\", or remove it"
                )),
                None => Ok(Loss::CrossEntropy),
            }
        }
        Loss::Preference(usual) => Ok(Loss::Preference(Preference {
            beta: beta.unwrap_or(usual.beta),
            gamma: gamma.unwrap_or(usual.gamma),
            ..usual
        })),
    }
}

/// The keys in TOML.
pub fn to_toml(loss: &Loss) -> String {
    const NAMES: &str = "of the next token; of pairs: \"dpo\", \"ipo\", \"simpo\" or \"orpo\"";
    const BETA: &str = "factor on differences of log-probabilities";
    const GAMMA: &str = "the margin by which the rewards of a pair are to differ";
    let Some(Preference { kind, beta, gamma }) = loss.preference() else {
        return format!("loss = {:<23} # {NAMES}", "\"cross_entropy\"");
    };
    let name = format!("{:?}", kind.name());
    let mut text = format!(
        "loss = {name:<23} # of pairs: \"dpo\", \"ipo\", \"simpo\" or \"orpo\"\nbeta = {beta:<23?} # {BETA}"
    );
    if *kind == PreferenceKind::Simpo {
        text.push_str(&format!("\ngamma = {gamma:<22?} # {GAMMA}"));
    }
    text
}
