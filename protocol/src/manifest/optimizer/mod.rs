//! The optimizer of a run: its update rule, and the learning rate of each step.

mod keys;

use serde::{Deserialize, Serialize};

use super::{ManifestError, within};
pub use keys::UnknownKey;

/// The optimizer that turns weight gradients into weights.
///
/// In text all keys are in one section: those here, and those of the rule and of the schedule that it names
/// (`kind`, `schedule`). A key of another rule or schedule is refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(try_from = "keys::Section", into = "keys::Section")]
pub struct Optimizer {
    /// How weights follow from gradients.
    pub rule: Rule,
    /// Learning rate after the warm-up.
    pub learning_rate: f64,
    /// Steps of linear warm-up.
    pub warmup_steps: u64,
    /// The learning rate after the warm-up.
    pub schedule: Schedule,
    /// Weight decay; vectors (norms and biases) have none.
    pub weight_decay: f64,
    /// The largest global gradient norm that is not scaled down; 0 disables clipping.
    pub gradient_clip: f64,
}

/// An update rule with its constants.
#[derive(Debug, Clone, Copy, PartialEq, bincode::Encode, bincode::Decode)]
pub enum Rule {
    /// AdamW (Loshchilov and Hutter, arXiv 1711.05101).
    Adamw(Adam),
    /// Stochastic gradient descent with momentum.
    Sgd(Sgd),
    /// Lion (Chen et al., arXiv 2302.06675).
    Lion(Lion),
    /// Muon (Jordan et al., kellerjordan.github.io/posts/muon) for the matrices of the layers, AdamW for all
    /// other weights.
    Muon(Muon),
    /// LAMB (You et al., arXiv 1904.00962).
    Lamb(Adam),
    /// LARS (You et al., arXiv 1708.03888).
    Lars(Lars),
    /// Adafactor (Shazeer and Stern, arXiv 1804.04235), as in `torch.optim`.
    Adafactor(Adafactor),
}

/// Constants of the two moments of Adam.
#[derive(Debug, Clone, Copy, PartialEq, bincode::Encode, bincode::Decode)]
pub struct Adam {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
}

impl Adam {
    /// The constants of Adam's paper.
    pub const DEFAULT: Self = Self { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
}

/// Constants of gradient descent. The decay is added to the gradient, as in `torch.optim.SGD`.
#[derive(Debug, Clone, Copy, PartialEq, bincode::Encode, bincode::Decode)]
pub struct Sgd {
    /// Decay of the sum of gradients; 0 keeps none.
    pub momentum: f64,
    /// Whether the step looks ahead along the momentum.
    pub nesterov: bool,
}

/// Constants of Lion.
#[derive(Debug, Clone, Copy, PartialEq, bincode::Encode, bincode::Decode)]
pub struct Lion {
    /// Share of the momentum in the step's direction.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
}

/// Constants of Muon. It takes five Newton-Schulz steps with the coefficients of its authors.
#[derive(Debug, Clone, Copy, PartialEq, bincode::Encode, bincode::Decode)]
pub struct Muon {
    /// Decay of the momentum.
    pub momentum: f64,
    /// Whether the step looks ahead along the momentum.
    pub nesterov: bool,
    /// Factor on the learning rate by a matrix's extents.
    pub rate_scale: RateScale,
    /// Learning rate after the warm-up of all weights but the matrices of the layers.
    pub rest_learning_rate: f64,
    /// AdamW's constants for them.
    pub rest: Adam,
}

/// Factor on Muon's learning rate for a matrix of m outputs and n inputs.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(rename_all = "snake_case")]
pub enum RateScale {
    /// `√max(1, m / n)`, as its author has it.
    Original,
    /// `0.2 · √max(m, n)`, with which updates are as large as AdamW's (Liu et al., arXiv 2502.16982).
    MatchRmsAdamw,
}

/// Constants of LARS.
#[derive(Debug, Clone, Copy, PartialEq, bincode::Encode, bincode::Decode)]
pub struct Lars {
    /// Decay of the sum of scaled gradients.
    pub momentum: f64,
    /// Norm of an update over that of its weights, at a learning rate of 1.
    pub trust_coefficient: f64,
    /// Added to the gradient's norm.
    pub epsilon: f64,
}

/// Constants of Adafactor.
#[derive(Debug, Clone, Copy, PartialEq, bincode::Encode, bincode::Decode)]
pub struct Adafactor {
    /// The second moment of step t, from 1, takes the share `t^-decay_exponent` of the newest gradient.
    pub decay_exponent: f64,
    /// The least root of the second moment.
    pub epsilon: f64,
    /// The least root mean square that weights are taken to have; the rate is relative to it.
    pub scale_epsilon: f64,
    /// The largest root mean square of an update at a rate of 1.
    pub clip_threshold: f64,
}

/// The learning rate after the warm-up, up to the run's last step.
#[derive(Debug, Clone, Copy, PartialEq, bincode::Encode, bincode::Decode)]
pub enum Schedule {
    /// Half a cosine.
    Cosine {
        /// The rate of the last step.
        final_learning_rate: f64,
    },
    /// A line.
    Linear {
        /// The rate of the last step.
        final_learning_rate: f64,
    },
    /// Warm-up, stable, decay: constant, then a line.
    Wsd {
        /// The rate of the last step.
        final_learning_rate: f64,
        /// Length of the decay.
        decay_steps: u64,
    },
    /// The same rate in all steps.
    Constant,
}

impl Schedule {
    /// The rate of the last step, unless the rate is constant.
    #[must_use]
    pub const fn final_learning_rate(&self) -> Option<f64> {
        match *self {
            Self::Cosine { final_learning_rate }
            | Self::Linear { final_learning_rate }
            | Self::Wsd { final_learning_rate, .. } => Some(final_learning_rate),
            Self::Constant => None,
        }
    }
}

impl Rule {
    /// The name in `run.toml`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Adamw(_) => "adamw",
            Self::Sgd(_) => "sgd",
            Self::Lion(_) => "lion",
            Self::Muon(_) => "muon",
            Self::Lamb(_) => "lamb",
            Self::Lars(_) => "lars",
            Self::Adafactor(_) => "adafactor",
        }
    }

    /// The constants of Adam, in rules that have them.
    #[must_use]
    pub const fn adam(&self) -> Option<&Adam> {
        match self {
            Self::Adamw(adam) | Self::Lamb(adam) | Self::Muon(Muon { rest: adam, .. }) => {
                Some(adam)
            }
            _ => None,
        }
    }

    /// [`Self::adam`], to change them.
    #[must_use]
    pub const fn adam_mut(&mut self) -> Option<&mut Adam> {
        match self {
            Self::Adamw(adam) | Self::Lamb(adam) | Self::Muon(Muon { rest: adam, .. }) => {
                Some(adam)
            }
            _ => None,
        }
    }

    /// Whether a run with this rule can go on with what another rule keeps beside the weights.
    #[must_use]
    pub fn takes_state_of(&self, other: &Self) -> bool {
        let keeps = |rule: &Self| match rule {
            Self::Sgd(Sgd { momentum, .. }) | Self::Lars(Lars { momentum, .. }) => *momentum > 0.0,
            _ => true,
        };
        self.name() == other.name() && keeps(self) == keeps(other)
    }

    fn check(&self) -> Result<(), ManifestError> {
        match self {
            Self::Adamw(adam) | Self::Lamb(adam) => adam.check(),
            Self::Sgd(sgd) => check_momentum(sgd.momentum),
            Self::Lion(lion) => check_betas(lion.beta1, lion.beta2),
            Self::Muon(muon) => {
                check_momentum(muon.momentum)?;
                let rate = muon.rest_learning_rate;
                within("optimizer.rest_learning_rate", rate, 0.0..=10.0)?;
                muon.rest.check()
            }
            Self::Lars(lars) => {
                check_momentum(lars.momentum)?;
                let trust = lars.trust_coefficient;
                within("optimizer.trust_coefficient", trust, 1e-9..=10.0)?;
                within("optimizer.epsilon", lars.epsilon, 0.0..=1.0)
            }
            Self::Adafactor(one) => {
                within("optimizer.decay_exponent", one.decay_exponent, 0.0..=2.0)?;
                // Its square is a normal f32.
                within("optimizer.epsilon", one.epsilon, 1e-18..=1.0)?;
                within("optimizer.scale_epsilon", one.scale_epsilon, 0.0..=1.0)?;
                within("optimizer.clip_threshold", one.clip_threshold, 1e-6..=1e6)
            }
        }
    }
}

impl Adam {
    fn check(&self) -> Result<(), ManifestError> {
        check_betas(self.beta1, self.beta2)?;
        within("optimizer.epsilon", self.epsilon, 1e-20..=1.0)
    }
}

fn check_betas(beta1: f64, beta2: f64) -> Result<(), ManifestError> {
    within("optimizer.beta1", beta1, 0.0..=0.999_999)?;
    within("optimizer.beta2", beta2, 0.0..=0.999_999_9)
}

fn check_momentum(momentum: f64) -> Result<(), ManifestError> {
    within("optimizer.momentum", momentum, 0.0..=0.999_999)
}

impl Optimizer {
    /// Checks every value against its range.
    ///
    /// # Errors
    /// The first invalid value.
    pub(super) fn check(&self) -> Result<(), ManifestError> {
        within("optimizer.learning_rate", self.learning_rate, 0.0..=10.0)?;
        if let Some(rate) = self.schedule.final_learning_rate() {
            within("optimizer.final_learning_rate", rate, 0.0..=self.learning_rate)?;
        }
        if let Schedule::Wsd { decay_steps, .. } = self.schedule {
            within("optimizer.decay_steps", decay_steps, 0..=1 << 40)?;
        }
        within("optimizer.warmup_steps", self.warmup_steps, 0..=1 << 40)?;
        within("optimizer.weight_decay", self.weight_decay, 0.0..=10.0)?;
        within("optimizer.gradient_clip", self.gradient_clip, 0.0..=1e9)?;
        self.rule.check()
    }
}
