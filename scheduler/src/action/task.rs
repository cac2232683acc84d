//! Tensor work: the engine's tasks and their results.

use std::ops::Range;

use shoal_protocol::ids::{ClaimKey, ContentHash, Exchange, Member, Stage, Step};
use shoal_protocol::manifest::Verdict;
use shoal_protocol::message::{
    FixedLoss, Handed, RoundCheck, RoundId, Seal, StoredFile, SumsPrint,
};
use shoal_protocol::units::Bytes;

/// Handle of a tensor that the driver holds: received over a link or produced by the engine. The
/// scheduler releases it when it is no longer needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PayloadId(pub u64);

/// A payload and its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Payload {
    /// The handle.
    pub id: PayloadId,
    /// Its size in memory.
    pub size: Bytes,
    /// Hash of an activation with its labels or of a gradient, in a run with audits.
    pub hash: Option<ContentHash>,
    /// The seal of its maker, once it is made or received, in such a run.
    pub seal: Option<Seal>,
}

impl Payload {
    /// The tensor as its maker signed it; `None` in a run without audits.
    #[must_use]
    pub fn handed(&self) -> Option<Handed> {
        Some(Handed { hash: self.hash?, seal: self.seal? })
    }
}

/// One of the devices of a peer, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, bincode::Encode)]
pub struct DeviceIndex(pub u16);

impl DeviceIndex {
    /// Its place in a list of all devices.
    #[must_use]
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// Elements of a round's vector, and who reduced them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owned {
    /// Elements of the weight group's vector.
    pub range: Range<usize>,
    /// The group of owners in which the reducer is.
    pub group: u16,
    /// Whether this member is the reducer.
    pub by_me: bool,
}

/// Tensor work. Each device runs the passes that it is given one at a time, in their order; work on a
/// microbatch goes to the device of its forward pass. Every other task begins when the tasks before it have
/// ended on all devices that it concerns, and ends before the tasks after it begin there.
#[derive(Debug, Clone, PartialEq)]
pub enum Task {
    /// Run a stage forward. Without an activation it is the first stage, which reads its samples. A
    /// held-out microbatch keeps no graph.
    Forward {
        /// The work item.
        key: ClaimKey,
        /// The exchange. Those of a work item come in order.
        exchange: Exchange,
        /// The input with its labels.
        activation: Option<PayloadId>,
        /// Whether there will be no backward pass.
        held_out: bool,
        /// The device.
        device: DeviceIndex,
    },
    /// Run a stage backward, from its own loss if there is no gradient. The weight gradient is kept
    /// for `Accumulate` or `Discard`; products that only it needs may be left to `Accumulate`, so that the gradient of the
    /// input is sent sooner.
    Backward {
        /// The work item.
        key: ClaimKey,
        /// The exchange. Those of a work item come in order.
        exchange: Exchange,
        /// Gradient of the stage's output.
        gradient: Option<PayloadId>,
        /// The device.
        device: DeviceIndex,
    },
    /// Add the kept weight gradient to the accumulator, once what is left of it is computed. Passes that the device was
    /// given before it go first.
    Accumulate {
        /// The work item.
        key: ClaimKey,
        /// The device.
        device: DeviceIndex,
    },
    /// Drop everything that the engine keeps of this work item.
    Discard {
        /// The work item.
        key: ClaimKey,
        /// The device.
        device: DeviceIndex,
    },
    /// Read integers of the accumulator for another member of the round, and add the given ones.
    Export {
        /// The round.
        round: RoundId,
        /// The member that adds them.
        to: Member,
        /// The number of the piece in the round.
        piece: u32,
        /// Elements of the weight group's vector.
        range: Range<usize>,
        /// Integers from other members of the same island; none if the codec rounds.
        parts: Vec<PayloadId>,
    },
    /// Sum this accumulator's and the others' integers, convert the exact sum to the mean gradient
    /// and keep it as this piece of the round's result, replacing an earlier one.
    Reduce {
        /// The round.
        round: RoundId,
        /// The number of the piece in the round.
        piece: u32,
        /// Elements of the weight group's vector.
        range: Range<usize>,
        /// Integers from the other members.
        parts: Vec<PayloadId>,
    },
    /// Keep a piece that another member reduced, replacing an earlier one.
    Install {
        /// The round.
        round: RoundId,
        /// Elements of the weight group's vector.
        range: Range<usize>,
        /// Mean gradient, f32.
        payload: PayloadId,
    },
    /// Compute hash and norm of the round's whole result, and project it and this member's sums.
    Summarise {
        /// The round.
        round: RoundId,
        /// What to project: all elements; empty for a member that gave nothing.
        owned: Vec<Owned>,
    },
    /// Set a step's sums of a stage aside, so that it has none until they are printed or put back.
    SetSumsAside {
        /// The step.
        step: Step,
        /// The stage.
        stage: Stage,
    },
    /// Take the prints of a step's sums of a stage at the challenges of its rounds, then put those back that were set
    /// aside.
    PrintSums {
        /// The step.
        step: Step,
        /// The stage.
        stage: Stage,
        /// The round of each of the stage's weight groups, in their order, with the hash of its result.
        rounds: Vec<(RoundId, ContentHash)>,
    },
    /// Put the sums back that were set aside.
    PutSumsBack {
        /// The step.
        step: Step,
        /// The stage.
        stage: Stage,
    },
    /// Update a stage's weights with the results of these rounds and clear the accumulator.
    Apply {
        /// The step.
        step: Step,
        /// The stage.
        stage: Stage,
        /// A round for each of the stage's weight groups, in their order.
        rounds: Vec<RoundId>,
        /// Norm of the gradient over all stages, for the mean over targets.
        gradient_norm: f64,
        /// The step's loss.
        loss: FixedLoss,
    },
    /// Load a stage's weights as fetched for this version, or its initial ones at the first version, and
    /// drop everything kept for microbatches. The stage may be new to this peer.
    Restore {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
    },
    /// Load a stage that is swapped beside the next pass, for the visit after it. It has no result.
    FetchAhead {
        /// The stage.
        stage: Stage,
        /// The step whose accumulator is needed too, if there are backward passes.
        sums: Option<Step>,
    },
    /// Drop a stage that this peer no longer hosts.
    Leave {
        /// The stage.
        stage: Stage,
    },
    /// Write the stage's part of a checkpoint from a copy. Later tasks do not wait for the disk,
    /// and the result may arrive after theirs.
    Store {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
    },
}

impl Task {
    /// The one device that the task concerns; `None` if it concerns all of them.
    #[must_use]
    pub fn device(&self) -> Option<DeviceIndex> {
        match self {
            Self::Forward { device, .. }
            | Self::Backward { device, .. }
            | Self::Accumulate { device, .. }
            | Self::Discard { device, .. } => Some(*device),
            _ => None,
        }
    }
}

/// The result of a task.
#[derive(Debug, Clone, PartialEq)]
pub enum TaskResult {
    /// `Forward`: the activation with its labels or, at the last stage, the loss, which comes with the last of several
    /// exchanges.
    Forwarded {
        /// The work item.
        key: ClaimKey,
        /// The output.
        output: Option<Payload>,
        /// The loss.
        loss: Option<FixedLoss>,
    },
    /// `Backward`: the gradient of the input; none at the first stage.
    Returned {
        /// The work item.
        key: ClaimKey,
        /// Gradient of the stage's input.
        gradient: Option<Payload>,
        /// Whether products of the weight gradient are left to `Accumulate`.
        leaves: bool,
    },
    /// `Accumulate`.
    Accumulated {
        /// The work item.
        key: ClaimKey,
        /// Whether its gradient is not finite or out of range, and the run's guard has it left out.
        broken: bool,
    },
    /// `Discard`.
    Discarded {
        /// The work item.
        key: ClaimKey,
    },
    /// `Export`.
    Exported {
        /// The round.
        round: RoundId,
        /// The receiver.
        to: Member,
        /// The number of the piece in the round.
        piece: u32,
        /// The integers.
        payload: Payload,
    },
    /// `Reduce`.
    Reduced {
        /// The round.
        round: RoundId,
        /// The number of the piece in the round.
        piece: u32,
        /// The mean gradient, for the others.
        payload: Payload,
    },
    /// `Install`.
    Installed {
        /// The round.
        round: RoundId,
        /// Elements of the weight group's vector.
        range: Range<usize>,
    },
    /// `Summarise`.
    Summarised {
        /// The round.
        round: RoundId,
        /// Hash of the mean gradient's bytes.
        hash: ContentHash,
        /// Sum of its squares.
        square_norm: f64,
        /// The projections, for each group of owners.
        checks: Vec<RoundCheck>,
        /// The prints of this member's sums at each hosted stage of the weights, in a run with audits.
        sums: Vec<(Stage, SumsPrint)>,
    },
    /// `SetSumsAside` or `PutSumsBack`.
    SumsMoved {
        /// The stage.
        stage: Stage,
    },
    /// `PrintSums`.
    SumsPrinted {
        /// The step.
        step: Step,
        /// The stage.
        stage: Stage,
        /// The print of each weight group's sums.
        sums: Vec<SumsPrint>,
    },
    /// `Apply`.
    Applied {
        /// The step.
        step: Step,
        /// The stage.
        stage: Stage,
        /// What became of the step.
        verdict: Verdict,
    },
    /// `Restore`.
    Restored {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
    },
    /// `Restore`: the fetched files are unusable.
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
        /// The files that were written.
        files: Vec<StoredFile>,
    },
    /// `Store`: writing to the disk failed.
    NotStored {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
    },
    /// The numbers of this work item are not finite or out of range: training diverged.
    Diverged {
        /// The work item.
        key: ClaimKey,
        /// The tensor and the problem.
        reason: String,
    },
}
