//! Inputs and actions of a peer's state machine.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Era, Member, PeerId, Stage, StageSpan, Step};
use shoal_protocol::manifest::Verdict;
use shoal_protocol::message::{
    CommitRecord, FromCoordinator, LinkEstimate, MoveReason, PeerMessage, RoundId, Seal,
    SnapshotPart, StoredStage, TensorTag, ToCoordinator,
};
use shoal_protocol::units::Bytes;

use super::{Payload, PayloadId, Task, TaskResult};
use crate::office::InOffice;

/// An input of a peer's state machine.
#[derive(Debug, Clone, PartialEq)]
pub enum PeerInput {
    /// A message from the coordinator.
    FromCoordinator {
        /// The sender.
        from: InOffice,
        /// The message.
        message: FromCoordinator,
    },
    /// A message from another member.
    PeerMessage {
        /// The sender.
        from: Member,
        /// The message.
        message: PeerMessage,
    },
    /// A tensor arrived.
    Tensor {
        /// The sender.
        from: Member,
        /// Identifies the tensor.
        tag: TensorTag,
        /// The tensor.
        payload: Payload,
    },
    /// The engine finished a task.
    Done {
        /// The outcome.
        result: TaskResult,
        /// How long the engine worked on it.
        busy: Duration,
    },
    /// The connection to a member broke. Data in transit may be lost.
    Disconnected {
        /// The member.
        member: Member,
    },
    /// No connection to a member could be made.
    Unreachable {
        /// The member.
        member: Member,
    },
    /// Estimates of the links to other peers, as far as measured. They replace all earlier ones.
    Links(BTreeMap<PeerId, LinkEstimate>),
    /// Measurements of the links that `PeerAction::ProbeLinks` asked for.
    LinksProbed(Vec<(PeerId, LinkEstimate)>),
    /// Leave the run in order.
    Drain,
    /// A fetch of files ended, successfully or not.
    Fetched {
        /// The version of the weights in them.
        version: Step,
        /// The stage.
        stage: Stage,
        /// Whether all files are here.
        whole: bool,
    },
    /// The replication of a checkpoint's files to this peer ended, successfully or not.
    Kept {
        /// The version of the weights in them.
        version: Step,
        /// The stage.
        stage: Stage,
        /// Whether all files are here.
        whole: bool,
    },
    /// All files of a complete checkpoint are in this peer's archive.
    Archived {
        /// The version of the weights.
        version: Step,
    },
    /// Time has passed.
    Tick,
}

/// What the driver must do for a peer, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum PeerAction {
    /// Send a message to the coordinator.
    ToCoordinator(ToCoordinator),
    /// Send a message to a member, which may be this peer.
    Send {
        /// The receiver.
        to: Member,
        /// The message.
        message: PeerMessage,
    },
    /// Send a tensor to a member, which may be this peer. The payload remains valid until it is
    /// released.
    SendTensor {
        /// The receiver.
        to: Member,
        /// Identifies the tensor.
        tag: TensorTag,
        /// The seal of its maker, in a run with audits.
        seal: Option<Seal>,
        /// The tensor.
        payload: PayloadId,
    },
    /// Measure the links to these members, then report those that were reachable in
    /// `PeerInput::LinksProbed`.
    ProbeLinks {
        /// The members and their addresses.
        at: Vec<(PeerId, Vec<SocketAddr>)>,
    },
    /// Keep the files of one stage of a checkpoint on this peer, fetching missing ones from others,
    /// then report it in `PeerInput::Kept`.
    Keep {
        /// The version of the weights.
        version: Step,
        /// The files, and the peers that have them.
        part: SnapshotPart,
    },
    /// Fetch the files of a stage, then report it in `PeerInput::Fetched`.
    Fetch {
        /// The version of the weights.
        version: Step,
        /// The files, and the peers that have them.
        part: SnapshotPart,
    },
    /// Give the engine a task.
    Compute(Task),
    /// Free a payload. Sends that were requested earlier are still carried out.
    Release(PayloadId),
    /// An event for logs, metrics and status readers.
    Event(PeerEvent),
}

impl PeerAction {
    /// Sends a tensor with its seal, if it has one.
    #[must_use]
    pub fn send_tensor(to: Member, tag: TensorTag, payload: &Payload) -> Self {
        Self::SendTensor { to, tag, seal: payload.seal, payload: payload.id }
    }
}

/// A violated invariant that a peer detected, and its response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The accumulators do not hold the microbatches that the coordinator expects: the peer
    /// leaves.
    #[error(
        "the accumulators lack {missing} microbatches of step {}, weight group {} and hold {surplus} \
         that they should not: leaving the run",
        round.step,
        round.weights
    )]
    AccumulatorDiffers {
        /// The round that reads it.
        round: RoundId,
        /// Number of microbatches that are expected but missing.
        missing: usize,
        /// Number of microbatches that are present but not expected.
        surplus: usize,
    },
    /// A round did not count every microbatch exactly once: its result is rejected.
    #[error(
        "the all-reduce of step {}, weight group {} proves {found:#018x} instead of {expected:#018x}: \
         some microbatch was lost or counted twice, the result is refused",
        round.step,
        round.weights
    )]
    ProofDiffers {
        /// The round.
        round: RoundId,
        /// Sum of the whole batch's tags.
        expected: u64,
        /// Sum of the tags that were counted.
        found: u64,
    },
    /// The commit names a different result than the one held here: the peer leaves.
    #[error("the commit of step {step} names a result that is not the one held here: leaving")]
    ResultDiffers {
        /// The step.
        step: Step,
    },
    /// A message that no correct member sends arrived; it was dropped.
    #[error("{from} sent {what}, which makes no sense here: dropped")]
    UnexpectedMessage {
        /// The sender.
        from: Member,
        /// The message.
        what: &'static str,
    },
}

/// Events of a peer, for logs, metrics and status readers.
#[derive(Debug, Clone, PartialEq)]
pub enum PeerEvent {
    /// The coordinator admitted this peer.
    Admitted {
        /// The stages it hosts.
        span: StageSpan,
        /// The version of the run's weights.
        version: Step,
    },
    /// The run returns to a version; this peer restarts from there.
    Rewound {
        /// The era that begins.
        era: Era,
        /// The version of the weights.
        version: Step,
    },
    /// A message was dropped because its sender is not what it must be for it.
    Unentitled {
        /// The sender.
        from: Member,
        /// The message.
        what: &'static str,
    },
    /// It takes part in the training.
    Serving {
        /// The version of its weights.
        version: Step,
    },
    /// It fetches what it lacks of another span, to host that instead of its own.
    MoveBegun {
        /// The new stages.
        to: StageSpan,
        /// The reason.
        reason: MoveReason,
    },
    /// It hosts another stage.
    Moved {
        /// The stages it hosted before.
        from: StageSpan,
        /// The stages it hosts.
        to: StageSpan,
        /// The first step there.
        at: Step,
    },
    /// Its move was cancelled.
    MoveCancelled {
        /// The stages that it would have moved to.
        to: StageSpan,
    },
    /// The coordinator rejected its request to join.
    Refused {
        /// The reason.
        reason: String,
    },
    /// It left in order.
    Drained,
    /// It is no longer a member. It may rejoin under a new incarnation.
    Expelled {
        /// The reason.
        reason: String,
    },
    /// The membership changed: [`Peer::view`] has it.
    ///
    /// [`Peer::view`]: crate::peer::Peer::view
    View,
    /// A checkpoint is complete.
    Checkpoint {
        /// The version of the weights.
        version: Step,
        /// Each stage's files, in the order of the stages.
        stages: Vec<StoredStage>,
        /// The oldest version whose files are still needed.
        oldest: Step,
    },
    /// It applied a step to its weights.
    Applied {
        /// The commit record of the step.
        record: CommitRecord,
    },
    /// The run's guard found the step that it applied far out.
    Judged {
        /// The step.
        step: Step,
        /// What became of it.
        verdict: Verdict,
    },
    /// The result of a committed step did not arrive: this peer restarts from a newer snapshot.
    ResultLost {
        /// The step.
        step: Step,
        /// The stages whose result is missing.
        span: StageSpan,
    },
    /// A microbatch's gradient was added to the accumulator here.
    Counted {
        /// The work item.
        key: ClaimKey,
    },
    /// An invariant was violated.
    Fault(Fault),
    /// The run is over.
    Finished,
    /// The run cannot continue.
    Stopped {
        /// The reason.
        reason: String,
    },
}

/// Resources that a peer uses, for metrics and the simulator's oracles.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PeerLoad {
    /// Largest number of microbatches of one step that are accepted at each stage and not yet
    /// returned.
    pub accepted: BTreeMap<Stage, usize>,
    /// Offers that wait for room at each stage.
    pub waiting: BTreeMap<Stage, usize>,
    /// Limit of accepted microbatches at each stage.
    pub window: BTreeMap<Stage, usize>,
    /// Tasks given to the engine and not finished.
    pub computing: usize,
    /// Bytes of activations and gradients that wait or are in use.
    pub in_flight: Bytes,
    /// Bytes in the output logs.
    pub logged: Bytes,
    /// Bytes of other members' round pieces that wait or are in use.
    pub rounds: Bytes,
    /// Bytes of round results that a newcomer or a moving member buffers until it has its weights.
    pub heard: Bytes,
}
