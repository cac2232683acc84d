//! Errors of tensor work.

use std::path::PathBuf;

use shoal_protocol::ids::{ClaimKey, Stage, Step};
use shoal_protocol::units::Bytes;

use crate::base_error::BaseError;
use crate::checkpoint_error::CheckpointError;

/// Why the engine failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// libtorch failed; the first line of its message.
    #[error("libtorch: {0}")]
    Torch(String),
    /// A CUDA device was requested by index but does not exist.
    #[error("no device cuda:{index}: {reason}; use --device cpu or auto")]
    NoCuda {
        /// The requested index.
        index: usize,
        /// The cause.
        reason: String,
    },
    /// The driver of a GPU failed; the function that did.
    #[error(
        "NVIDIA's driver does not say which GPU this is: {0} failed; check it with `nvidia-smi`, or use --device cpu"
    )]
    Driver(String),
    /// A GPU lacks the kernel that unpacks a base.
    #[error(
        "this GPU has no kernel that unpacks the base of `lora.base = \"nf4\"` ({reason}): compute on another device \
         (--device), or mend that"
    )]
    PackedBase {
        /// Why it has no kernels.
        reason: String,
    },
    /// The kernels of this crate cannot be compiled for a GPU, or its driver refused one.
    #[error("the kernels for GPUs: {0}")]
    Kernels(String),
    /// The name of a device is invalid.
    #[error(
        "{0:?} is no device: auto, cpu, cuda:N, several as cuda:0,cuda:1 or cpu:N, or all for every GPU"
    )]
    UnknownDevice(String),
    /// A list names a device twice.
    #[error("{0} is named twice: two workers on one GPU would only take turns")]
    SameDeviceTwice(String),
    /// Devices that cannot have equal parts of the slices.
    #[error(
        "model.slices = {slices} cannot be divided among {devices} devices: start this peer with --device for a \
         number of devices that divides {slices} or is a multiple of it"
    )]
    SlicesOfDevices {
        /// Slices of the run.
        slices: usize,
        /// Devices of this peer.
        devices: usize,
    },
    /// GPUs that began to exchange a sum by NCCL, and did not end.
    #[error(
        "NCCL did not end a first sum of the devices within {} s: its log says more (NCCL_DEBUG=INFO); try \
         NCCL_P2P_DISABLE=1, or start one peer for each GPU", .patience.as_secs()
    )]
    SilentCollectives {
        /// How long it had.
        patience: std::time::Duration,
    },
    /// The thread of one of several devices has ended.
    #[error("the work on {device} has stopped, since an error ended its thread")]
    DeviceStopped {
        /// The device.
        device: String,
    },
    /// Bytes have the wrong length for a tensor.
    #[error("{what} must have {expected} bytes and has {found}")]
    WrongLength {
        /// The tensor.
        what: &'static str,
        /// The expected number of bytes.
        expected: usize,
        /// The actual number of bytes.
        found: usize,
    },
    /// A token outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocabulary}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// The size of the vocabulary.
        vocabulary: u32,
    },
    /// A text that does not fit the model.
    #[error("the text has {tokens} tokens, and the model reads at most {positions}: shorten it")]
    TextTooLong {
        /// Tokens of the text.
        tokens: usize,
        /// Positions of the model.
        positions: usize,
    },
    /// The folder has no model.
    #[error(
        "{path} has no model: name a checkpoint's folder, or a base that `shoal import` wrote",
        path = path.display()
    )]
    NotAModel {
        /// The folder.
        path: PathBuf,
    },
    /// A checkpoint of adapters, without the model that they were trained beside.
    #[error(
        "{path} has adapters and not the model that they were trained beside: name its base with --base",
        path = path.display()
    )]
    NeedsBase {
        /// The checkpoint.
        path: PathBuf,
    },
    /// A base that the run did not start from.
    #[error("{path} is not the base that the adapters were trained beside", path = path.display())]
    OtherBase {
        /// The base.
        path: PathBuf,
    },
    /// The last stage needs the tokens to predict, and every stage after a boundary in a subspace the tokens. With
    /// a loss that balances experts every stage needs them.
    #[error("{0} has come without its labels")]
    MissingLabels(ClaimKey),
    /// A sample that is no pair, in a run on pairs.
    #[error(
        "sample {sample} is no pair of a chosen and a rejected sequence with finite log-probabilities: prepare the data \
         again"
    )]
    NotAPair {
        /// Number of the sample in its microbatch.
        sample: usize,
    },
    /// All stages but the last need the gradient of their output.
    #[error("{0} needs the gradient of its activation")]
    MissingGradient(ClaimKey),
    /// The stage is outside this peer's span.
    #[error("stage {0} is not hosted here")]
    NotHosted(Stage),
    /// A backward pass or an addition without an earlier forward or backward pass.
    #[error("nothing is in flight for {0}")]
    NotInFlight(ClaimKey),
    /// A second forward pass of a microbatch whose first is still in flight.
    #[error("{0} is already in flight")]
    AlreadyInFlight(ClaimKey),
    /// A pass that reads weights of a missing version.
    #[error("{key} reads weights of a missing version; the newest one here is {version}")]
    WrongVersion {
        /// The work item.
        key: ClaimKey,
        /// The newest version here.
        version: Step,
    },
    /// Fixed point cannot represent a weight gradient. The fault lies with the run, not with the
    /// peer.
    #[error("the gradient of {tensor} for {key} {problem}")]
    BadGradient {
        /// Name of the weight.
        tensor: String,
        /// The work item of the gradient.
        key: ClaimKey,
        /// The problem.
        problem: GradientProblem,
    },
    /// Parts of an all-reduce that do not match.
    #[error(
        "the parts of an all-reduce have {first} and {other} bytes: they must be equal and whole sums"
    )]
    UnequalParts {
        /// Bytes of the first part.
        first: usize,
        /// Bytes of a part that differs.
        other: usize,
    },
    /// A stage whose first weights have not been loaded.
    #[error("stage {0} has no weights: the run starts from files that were not loaded")]
    NoWeights(Stage),
    /// The file of swapped weights could not be made.
    #[error(
        "no swap file can be made in {folder}: {source}; free room there, or name a folder on another disk \
         (--data-dir; --out of shoal local)", folder = folder.display()
    )]
    SwapFile {
        /// The folder of the file.
        folder: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The disk has no room for a stage.
    #[error(
        "the disk of {folder} has no room for {needs} of stage {stage} in the swap file: {source}; free room \
         there, or name a folder on another disk (--data-dir; --out of shoal local)", folder = folder.display()
    )]
    SwapRoom {
        /// The stage.
        stage: Stage,
        /// The bytes that have no room.
        needs: Bytes,
        /// The folder of the file.
        folder: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A stage could not be read back.
    #[error(
        "stage {stage} cannot be read from the swap file on the disk of {folder}: {source}; check that disk, and \
         start again there or on another one (--data-dir; --out of shoal local)", folder = folder.display()
    )]
    SwapRead {
        /// The stage.
        stage: Stage,
        /// The folder of the file.
        folder: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A stage could not be written.
    #[error(
        "stage {stage} cannot be written to the swap file on the disk of {folder}: {source}; check that disk, and \
         start again there or on another one (--data-dir; --out of shoal local)", folder = folder.display()
    )]
    SwapWrite {
        /// The stage.
        stage: Stage,
        /// The folder of the file.
        folder: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The system gave no memory, or no thread, for swapped weights.
    #[error("the system has no memory or thread for swapped weights: {0}; lower --memory")]
    SwapMemory(#[source] std::io::Error),
    /// What is needed at once is larger than the memory for it.
    #[error(
        "{needs} must be in memory at once and {has} may be used: give more --memory, or cut the model into more stages"
    )]
    SwapBudget {
        /// What is needed.
        needs: Bytes,
        /// What may be used.
        has: Bytes,
    },
    /// What passes of a stage read is larger than the memory for it.
    #[error(
        "a stage's weights take {needs} of the device's memory and {has} may be used: give more --device-memory, or \
         cut the model into more stages"
    )]
    DeviceBudget {
        /// What is needed.
        needs: Bytes,
        /// What may be used.
        has: Bytes,
    },
    /// A model whose numbers overflow.
    #[error(
        "the model computes logits that are NaN or infinite behind {token} tokens: take an earlier checkpoint, or one of a run in f32"
    )]
    BrokenLogits {
        /// Tokens of the text.
        token: usize,
    },
    /// A base could not be read.
    #[error(transparent)]
    Base(#[from] BaseError),
    /// The checkpoint that the run goes on from could not be read.
    #[error("the checkpoint to go on from: {0}")]
    Start(#[source] CheckpointError),
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// The problem with a weight gradient.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum GradientProblem {
    /// Infinite or NaN.
    #[error("is not finite: lower optimizer.learning_rate")]
    NotFinite,
    /// Too large for the accumulator.
    #[error(
        "reaches {largest:e}, over the accumulator's range of {limit:e}: lower training.gradient_fraction_bits"
    )]
    OutOfRange {
        /// Largest magnitude in the tensor.
        largest: f64,
        /// Largest magnitude that is allowed.
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
