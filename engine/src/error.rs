//! Why tensor work fails.

use shoal_protocol::ids::{ClaimKey, Stage, Step};

use crate::checkpoint_error::CheckpointError;

/// Why the engine could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// libtorch refused an operation; the first line of what it said.
    #[error("libtorch: {0}")]
    Torch(String),
    /// CUDA was asked for by number, and there is no such device.
    #[error("no device cuda:{index}: {reason}; use --device cpu or auto")]
    NoCuda {
        /// The number asked for.
        index: usize,
        /// What was found instead.
        reason: String,
    },
    /// A device that is none.
    #[error("{0:?} is no device: it must be auto, cpu or cuda:N")]
    UnknownDevice(String),
    /// Bytes that cannot be the tensor they should be.
    #[error("{what} must have {expected} bytes and has {found}")]
    WrongLength {
        /// What the bytes should be.
        what: &'static str,
        /// Bytes of such a tensor.
        expected: usize,
        /// Bytes there are.
        found: usize,
    },
    /// A token outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocabulary}")]
    UnknownToken {
        /// What was found.
        token: u32,
        /// Tokens there are.
        vocabulary: u32,
    },
    /// The last stage needs the tokens to predict.
    #[error("{0} has reached the last stage without its labels")]
    MissingLabels(ClaimKey),
    /// All stages but the last need the gradient of what they sent.
    #[error("{0} needs the gradient of its activation")]
    MissingGradient(ClaimKey),
    /// A stage outside this peer's span.
    #[error("stage {0} is not hosted here")]
    NotHosted(Stage),
    /// A backward pass or an addition for a microbatch without a forward or backward pass.
    #[error("nothing is in flight for {0}")]
    NotInFlight(ClaimKey),
    /// A second forward pass for a microbatch whose first is still in flight.
    #[error("{0} is already in flight")]
    AlreadyInFlight(ClaimKey),
    /// A pass that reads weights of a version that is not here.
    #[error("{key} reads other weights than those around version {version}, which are here")]
    WrongVersion {
        /// The work.
        key: ClaimKey,
        /// The newest version here.
        version: Step,
    },
    /// A weight gradient that fixed point cannot hold. A verdict on the run, not on the peer.
    #[error("the gradient of {tensor} for {key} {problem}")]
    BadGradient {
        /// Name of the weight.
        tensor: String,
        /// Whose gradient it is.
        key: ClaimKey,
        /// What is wrong with it.
        problem: GradientProblem,
    },
    /// Parts of an all-reduce that do not belong together.
    #[error(
        "the parts of an all-reduce have {first} and {other} bytes: they must be equal and whole sums"
    )]
    UnequalParts {
        /// Bytes of the first part.
        first: usize,
        /// Bytes of one that differs.
        other: usize,
    },
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// What is wrong with a weight gradient.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum GradientProblem {
    /// Infinite or not a number.
    #[error("is not finite: lower optimizer.learning_rate")]
    NotFinite,
    /// Too large for the accumulator.
    #[error(
        "reaches {largest:e}, over the accumulator's range of {limit:e}: lower training.gradient_fraction_bits"
    )]
    OutOfRange {
        /// Largest magnitude in the tensor.
        largest: f64,
        /// Largest magnitude that fits.
        limit: f64,
    },
}

impl From<tch::TchError> for EngineError {
    /// Keeps the first line: libtorch appends a C++ backtrace.
    fn from(error: tch::TchError) -> Self {
        let text = match error {
            tch::TchError::Torch(text) => text,
            other => other.to_string(),
        };
        Self::Torch(text.lines().next().unwrap_or_default().to_owned())
    }
}

/// Result of tensor work.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;
