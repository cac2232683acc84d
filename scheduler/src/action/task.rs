//! Tensor work: what the engine is given, and what came of it.

use std::ops::Range;

use shoal_protocol::ids::{ClaimKey, ContentHash, Member, Stage, Step};
use shoal_protocol::message::{FixedLoss, RoundId, StoredFile};
use shoal_protocol::units::Bytes;

/// Handle of tensors that the driver keeps: what came over a link or out of the engine. The
/// scheduler says when it is no longer needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PayloadId(pub u64);

/// A payload and what it weighs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Payload {
    /// The handle.
    pub id: PayloadId,
    /// Its bytes in memory.
    pub size: Bytes,
}

/// Tensor work. Tasks are carried out one at a time in the order in which they were given.
#[derive(Debug, Clone, PartialEq)]
pub enum Task {
    /// Run a stage forward. Without an activation it is the first stage, which reads its samples.
    /// A held-out microbatch keeps no graph.
    Forward {
        /// The work.
        key: ClaimKey,
        /// The input with its labels.
        activation: Option<PayloadId>,
        /// Whether there will be no backward pass.
        held_out: bool,
    },
    /// Run a stage backward, from its own loss where there is no gradient. The weight gradient
    /// waits for `Accumulate` or `Discard`.
    Backward {
        /// The work.
        key: ClaimKey,
        /// Gradient of the stage's output.
        gradient: Option<PayloadId>,
    },
    /// Add the waiting weight gradient to the accumulator.
    Accumulate {
        /// The work.
        key: ClaimKey,
    },
    /// Drop whatever the engine keeps of this work.
    Discard {
        /// The work.
        key: ClaimKey,
    },
    /// Read integers of the accumulator, for another member of the round.
    Export {
        /// Which round.
        round: RoundId,
        /// Which member.
        to: Member,
        /// Which piece of that member's part.
        piece: u32,
        /// Which elements of the stage's vector.
        range: Range<usize>,
    },
    /// Sum the accumulator's and the others' integers, convert the exact sum to the mean gradient
    /// and keep it as this piece of the round's result, also where one was kept before.
    Reduce {
        /// Which round.
        round: RoundId,
        /// Which piece of this member's part.
        piece: u32,
        /// Which elements of the stage's vector.
        range: Range<usize>,
        /// What the others sent.
        parts: Vec<PayloadId>,
    },
    /// Keep a piece that another member reduced, also where one was kept before.
    Install {
        /// Which round.
        round: RoundId,
        /// Which elements of the stage's vector.
        range: Range<usize>,
        /// Mean gradient, f32.
        payload: PayloadId,
    },
    /// Hash and measure the round's whole result.
    Summarise {
        /// Which round.
        round: RoundId,
    },
    /// Update the weights with the result of this round and empty the accumulator.
    Apply {
        /// Which round.
        round: RoundId,
        /// Norm of the gradient over all stages.
        gradient_norm: f64,
    },
    /// Take over a stage's weights as they were fetched at this version, or its initial ones at
    /// version 0, and drop whatever is kept for microbatches. The stage may be one that was not hosted
    /// before.
    Restore {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
    },
    /// Let go of a stage: this peer hosts it no more.
    Leave {
        /// The stage.
        stage: Stage,
    },
    /// Write the stage's part of a checkpoint from a copy: the tasks after this one do not wait for
    /// the disk, and the result may come after theirs.
    Store {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
    },
}

/// How a task ended.
#[derive(Debug, Clone, PartialEq)]
pub enum TaskResult {
    /// `Forward`: the activation with its labels or, at the last stage, the loss.
    Forwarded {
        /// The work.
        key: ClaimKey,
        /// The output.
        output: Option<Payload>,
        /// The mean loss per token.
        loss: Option<FixedLoss>,
    },
    /// `Backward`: the gradient of the input; none at the first stage.
    Returned {
        /// The work.
        key: ClaimKey,
        /// Gradient of the stage's input.
        gradient: Option<Payload>,
    },
    /// `Accumulate`.
    Accumulated {
        /// The work.
        key: ClaimKey,
    },
    /// `Discard`.
    Discarded {
        /// The work.
        key: ClaimKey,
    },
    /// `Export`.
    Exported {
        /// Which round.
        round: RoundId,
        /// The receiver.
        to: Member,
        /// Which piece.
        piece: u32,
        /// The integers.
        payload: Payload,
    },
    /// `Reduce`.
    Reduced {
        /// Which round.
        round: RoundId,
        /// Which piece.
        piece: u32,
        /// The mean gradient, for the others.
        payload: Payload,
    },
    /// `Install`.
    Installed {
        /// Which round.
        round: RoundId,
        /// Which elements.
        range: Range<usize>,
    },
    /// `Summarise`.
    Summarised {
        /// Which round.
        round: RoundId,
        /// Hash of the mean gradient's bytes.
        hash: ContentHash,
        /// Sum of its squares.
        square_norm: f64,
    },
    /// `Apply`.
    Applied {
        /// Which round.
        round: RoundId,
    },
    /// `Restore`.
    Restored {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
    },
    /// `Restore`: what was fetched cannot be used.
    NotRestored {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
    },
    /// `Leave`.
    Left {
        /// The stage.
        stage: Stage,
    },
    /// `Store`.
    Stored {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
        /// What was written.
        files: Vec<StoredFile>,
    },
    /// `Store`: the disk did not take it.
    NotStored {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
    },
    /// The numbers of this work are not finite or out of range: a verdict on the run.
    Diverged {
        /// The work.
        key: ClaimKey,
        /// Which tensor and what about it.
        reason: String,
    },
}
