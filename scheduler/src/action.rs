//! What goes into the state machines and what comes out of them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use shoal_protocol::ids::{
    ClaimKey, ContentHash, Era, Member, PeerId, Stage, StageSpan, Step, Term,
};
use shoal_protocol::message::{
    Between, CommitRecord, FixedLoss, FromCoordinator, LogRecord, MoveReason, RoundId,
    SnapshotPart, StoredFile, StoredStage, TensorTag, ToCoordinator, Way,
};
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
        /// The member's place in it.
        to: u16,
        /// Which piece of that member's part.
        piece: u32,
        /// Which elements of the stage's vector.
        range: Range<usize>,
    },
    /// Sum the accumulator's and the others' integers, convert the exact sum to the mean gradient
    /// and keep it as this piece of the round's result.
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
    /// Keep a piece that another member reduced.
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
        /// The receiver's place in it.
        to: u16,
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
    Between {
        /// Who speaks.
        from: Member,
        /// The word.
        message: Between,
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
    Links(BTreeMap<PeerId, Way>),
    /// What was found where this peer was to look: what it measured of its links to members.
    Looked(Vec<(PeerId, Way)>),
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
        message: Between,
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
    /// Measure the links to these members, then say so by `PeerInput::Looked`, whoever can be reached.
    LookRound {
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

/// What the coordinator is told.
#[derive(Debug, Clone, PartialEq)]
pub enum CoordinatorInput {
    /// A member, or who wants to be one, says.
    Message {
        /// Who.
        from: Member,
        /// What.
        message: ToCoordinator,
    },
    /// The connection to a member broke.
    Disconnected {
        /// The member.
        member: Member,
    },
    /// A record that was to be written down is down for good.
    Appended(LogRecord),
    /// It is later.
    Tick,
}

/// What the coordinator wants done, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum CoordinatorAction {
    /// Tell a member, or who wanted to be one; it may be this peer.
    Send {
        /// Whom.
        to: Member,
        /// What.
        message: FromCoordinator,
    },
    /// Have these peers keep the log from now on.
    Anchors(BTreeSet<PeerId>),
    /// Write this down for good, then say so by `CoordinatorInput::Appended`. Records are
    /// written in the order in which they were given.
    Append(LogRecord),
    /// Something that people and metrics want to know.
    Event(CoordinatorEvent),
}

/// What people and metrics want to know of the coordinator.
#[derive(Debug, Clone, PartialEq)]
pub enum CoordinatorEvent {
    /// A peer was admitted.
    Admitted {
        /// Who.
        member: Member,
        /// The stages it hosts.
        span: StageSpan,
    },
    /// A member's known answers differ from the first member's: the model's bits may differ from
    /// those of one process.
    Unlike {
        /// Who.
        member: Member,
    },
    /// Who wanted to be a member is none.
    NotAdmitted {
        /// Who.
        member: Member,
        /// Why.
        reason: String,
    },
    /// The run waits for more peers.
    Waiting {
        /// Stages that nobody hosts yet.
        stages: Vec<Stage>,
        /// Further members that were asked for.
        members: usize,
    },
    /// A new term began: the log and the members told how the run stands.
    TookOver {
        /// Which term.
        term: Term,
        /// Claims that members hold.
        claims: u64,
    },
    /// A stage is lost: it is looked for who has the newest checkpoint. Until all of it is found the
    /// run pauses.
    Stranded {
        /// The stages without a replica.
        stages: Vec<Stage>,
        /// The version of the newest checkpoint.
        version: Step,
    },
    /// A step began: the weights that it reads are there. Its work was given out before.
    Opened {
        /// Which.
        step: Step,
    },
    /// A step is committed.
    Committed {
        /// Its last word.
        record: CommitRecord,
        /// What befell its work.
        books: StepBooks,
    },
    /// All-reduces came to nothing and are tried again once what is missing is done.
    RoundsAborted {
        /// Of which step.
        step: Step,
        /// How many.
        rounds: usize,
        /// Whether they took too long, and nobody who takes part is gone.
        late: bool,
    },
    /// An expelled member's claims are anybody's again.
    Revoked {
        /// Who held them.
        member: Member,
        /// How many.
        claims: u64,
    },
    /// A member said of a claim that is not its own that it holds it, or has done its work: that
    /// changes nothing.
    ClaimRefused {
        /// Who.
        member: Member,
        /// The work.
        key: ClaimKey,
    },
    /// A member let go of a late claim, and others do the work.
    Recalled {
        /// Who held it.
        member: Member,
        /// The work.
        key: ClaimKey,
    },
    /// Every replica of a stage is gone: the run goes back to a version, and waits for whoever hosts
    /// the stage from now on.
    Rewound {
        /// The era that begins.
        era: Era,
        /// The version of the weights.
        version: Step,
        /// The steps that are computed again.
        steps: u64,
    },
    /// A checkpoint came to nothing, since a peer that had written a part of it is gone; the next
    /// version makes up for it.
    CheckpointAbandoned {
        /// The version.
        version: Step,
    },
    /// A checkpoint is complete.
    CheckpointStored {
        /// The version.
        version: Step,
        /// Each stage's files, in order of stages.
        stages: Vec<Vec<StoredFile>>,
        /// Whether the run ends with it.
        last: bool,
    },
    /// A member is to host another stage in place of its own, and fetches that first.
    MoveBegun {
        /// Who.
        member: Member,
        /// What it hosts.
        from: StageSpan,
        /// What it will.
        to: Stage,
        /// Why.
        reason: MoveReason,
    },
    /// It is decided from which step on a member hosts another stage.
    Moves {
        /// Who.
        member: Member,
        /// What it hosts until then.
        from: StageSpan,
        /// What it hosts then.
        to: Stage,
        /// The step.
        at: Step,
        /// Why.
        reason: MoveReason,
    },
    /// A member does not move after all.
    MoveCancelled {
        /// Who.
        member: Member,
        /// The stage that it does not go to.
        to: Stage,
        /// Why it was to.
        reason: MoveReason,
        /// What came between.
        obstacle: MoveObstacle,
    },
    /// A member is gone.
    Lost {
        /// Who.
        member: Member,
        /// What it hosted.
        span: StageSpan,
        /// How that showed.
        how: String,
    },
    /// The run is over.
    Finished,
    /// The run cannot go on.
    Stopped {
        /// Why, and what to do.
        reason: String,
    },
}

/// What kept a member from changing its stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveObstacle {
    /// It is needed where it is by now.
    Needed,
    /// It is gone itself.
    Gone,
    /// The run went back to a checkpoint.
    Rewound,
}

impl MoveObstacle {
    /// In words.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Needed => "it is needed where it is",
            Self::Gone => "it is gone",
            Self::Rewound => "the run goes back to a checkpoint",
        }
    }
}

/// What befell the work of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepBooks {
    /// Done reports that came again.
    pub repeated: u64,
    /// Claims that were taken back from members who were gone, whose work others did again.
    pub replayed: u64,
    /// From when everything was done until every replica held the step's gradient.
    pub all_reduce: Duration,
}
