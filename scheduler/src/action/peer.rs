//! What a peer is told, and what it wants done.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Era, Member, PeerId, Stage, StageSpan, Step};
use shoal_protocol::message::{
    CommitRecord, FromCoordinator, LinkEstimate, MoveReason, PeerMessage, RoundId, SnapshotPart,
    StoredStage, TensorTag, ToCoordinator,
};
use shoal_protocol::units::Bytes;

use super::{Payload, PayloadId, Task, TaskResult};

/// What a peer is told.
#[derive(Debug, Clone, PartialEq)]
pub enum PeerInput {
    /// A word of the coordinator.
    FromCoordinator {
        /// Who speaks.
        from: Member,
        /// The word.
        message: FromCoordinator,
    },
    /// A word of another member.
    PeerMessage {
        /// Who speaks.
        from: Member,
        /// The word.
        message: PeerMessage,
    },
    /// A tensor arrived.
    Tensor {
        /// From whom.
        from: Member,
        /// What it is.
        tag: TensorTag,
        /// The tensor.
        payload: Payload,
    },
    /// A task ended.
    Done {
        /// How.
        result: TaskResult,
        /// How long the engine worked on it.
        busy: Duration,
    },
    /// The connection to a member broke. What was on its way may be lost.
    Disconnected {
        /// The member.
        member: Member,
    },
    /// No connection to a member can be made.
    Unreachable {
        /// The member.
        member: Member,
    },
    /// What the links to other peers carry, as far as it was measured; in place of what was said
    /// before.
    Links(BTreeMap<PeerId, LinkEstimate>),
    /// What was found where this peer was to look: what it measured of its links to members.
    LinksProbed(Vec<(PeerId, LinkEstimate)>),
    /// This peer is to leave in order.
    Drain,
    /// Files that were to be fetched are here, or cannot be had.
    Fetched {
        /// The version of the weights in them.
        version: Step,
        /// The stage.
        stage: Stage,
        /// Whether all are here.
        whole: bool,
    },
    /// Files that were to be kept are here, or cannot be had.
    Kept {
        /// The version of the weights in them.
        version: Step,
        /// The stage.
        stage: Stage,
        /// Whether all are here.
        whole: bool,
    },
    /// A complete checkpoint is whole where this peer archives.
    Archived {
        /// The version of the weights.
        version: Step,
    },
    /// It is later.
    Tick,
}

/// What a peer wants done, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum PeerAction {
    /// Tell the coordinator.
    ToCoordinator(ToCoordinator),
    /// Tell a member; it may be this one.
    Send {
        /// Whom.
        to: Member,
        /// What.
        message: PeerMessage,
    },
    /// Send a tensor to a member; it may be this one. The payload stays this peer's until released.
    SendTensor {
        /// To whom.
        to: Member,
        /// What it is.
        tag: TensorTag,
        /// The tensor.
        payload: PayloadId,
    },
    /// Measure the links to these members, then say so by `PeerInput::LinksProbed`, whoever can be reached.
    ProbeLinks {
        /// Who, and where they listen.
        at: Vec<(PeerId, Vec<SocketAddr>)>,
    },
    /// Have the files of a stage of a checkpoint kept here, fetched from others if need be, then say
    /// so by `PeerInput::Kept`.
    Keep {
        /// The version of the weights.
        version: Step,
        /// What to keep, and who has it.
        part: SnapshotPart,
    },
    /// Fetch the files of a stage, then say so by `PeerInput::Fetched`.
    Fetch {
        /// The version of the weights.
        version: Step,
        /// What to fetch, and from whom.
        part: SnapshotPart,
    },
    /// Give the engine a task.
    Compute(Task),
    /// Nothing needs this payload any more (sends already given are carried out all the same).
    Release(PayloadId),
    /// Something that people and metrics want to know.
    Event(PeerEvent),
}

/// What a peer found that must not be, and what it did about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The accumulator does not hold what the coordinator counts on: the peer leaves.
    #[error(
        "the accumulator lacks {missing} microbatches of step {}, stage {} and holds {surplus} \
         that it should not: leaving the run",
        round.step,
        round.stage
    )]
    AccumulatorDiffers {
        /// For which round.
        round: RoundId,
        /// Counted on, but not there.
        missing: usize,
        /// There, but not counted on.
        surplus: usize,
    },
    /// A round did not count every microbatch once: its result is refused.
    #[error(
        "the all-reduce of step {}, stage {} proves {found:#018x} instead of {expected:#018x}: \
         some microbatch was lost or counted twice, the result is refused",
        round.step,
        round.stage
    )]
    ProofDiffers {
        /// Which round.
        round: RoundId,
        /// The sum of the whole batch's tags.
        expected: u64,
        /// What was there.
        found: u64,
    },
    /// The commit names another result than the one held here: the peer leaves.
    #[error("the commit of step {step} names a result that is not the one held here: leaving")]
    ResultDiffers {
        /// Which step.
        step: Step,
    },
    /// Something came that no member would send; it was dropped.
    #[error("{from} sent {what}, which makes no sense here: dropped")]
    Nonsense {
        /// Who.
        from: Member,
        /// What.
        what: &'static str,
    },
}

/// What people and metrics want to know of a peer.
#[derive(Debug, Clone, PartialEq)]
pub enum PeerEvent {
    /// It is a member.
    Admitted {
        /// The stages it hosts.
        span: StageSpan,
    },
    /// The run goes back to a version; this peer begins again from there.
    Rewound {
        /// The era that begins.
        era: Era,
        /// The version of the weights.
        version: Step,
    },
    /// It takes part from now on.
    Serving {
        /// The version of its weights.
        version: Step,
    },
    /// It fetches another stage, to host it in place of its own.
    MoveBegun {
        /// Which.
        to: Stage,
        /// Why.
        reason: MoveReason,
    },
    /// It hosts another stage from now on.
    Moved {
        /// What it hosted.
        from: StageSpan,
        /// What it hosts.
        to: Stage,
        /// The first step.
        at: Step,
    },
    /// It does not move after all.
    MoveCancelled {
        /// The stage that it does not go to.
        to: Stage,
    },
    /// It is not.
    Refused {
        /// Why.
        reason: String,
    },
    /// It left in order.
    Drained,
    /// It is a member no more, and may come back as a new life.
    Expelled {
        /// Why.
        reason: String,
    },
    /// A new membership: [`Peer::view`] has it.
    ///
    /// [`Peer::view`]: crate::peer::Peer::view
    View,
    /// A checkpoint is complete.
    Checkpoint {
        /// The version of the weights.
        version: Step,
        /// Each stage, in order.
        stages: Vec<StoredStage>,
        /// The oldest version whose files are still of use.
        oldest: Step,
    },
    /// It applied a step.
    Applied {
        /// The step's last word.
        record: CommitRecord,
    },
    /// Nothing more came of the result of a step that is committed: this peer begins anew from a
    /// newer snapshot.
    ResultLost {
        /// Which step.
        step: Step,
        /// At which stages.
        span: StageSpan,
    },
    /// A microbatch's work was counted here.
    Counted {
        /// The work.
        key: ClaimKey,
    },
    /// Something that must not be.
    Fault(Fault),
    /// The run is over.
    Finished,
    /// The run cannot go on.
    Stopped {
        /// Why.
        reason: String,
    },
}

/// How much a peer holds, for metrics and the simulator's oracles.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PeerLoad {
    /// Microbatches of one step accepted at each stage and not yet given back, at most.
    pub accepted: BTreeMap<Stage, usize>,
    /// Offers waiting for room at each stage.
    pub waiting: BTreeMap<Stage, usize>,
    /// Microbatches that may be accepted at each stage.
    pub window: BTreeMap<Stage, usize>,
    /// Tasks given to the engine and not yet done.
    pub computing: usize,
    /// Bytes of activations and gradients waiting or in use.
    pub in_flight: Bytes,
    /// Bytes of the output logs.
    pub logged: Bytes,
    /// Bytes of other members' pieces of rounds, waiting or in use.
    pub rounds: Bytes,
    /// Bytes of results that a newcomer, or who is to move, keeps until it has its weights.
    pub heard: Bytes,
}
