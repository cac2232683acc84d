//! Inputs and actions of the coordinator's state machine.

use std::collections::BTreeSet;
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Era, Member, PeerId, Stage, StageSpan, Step, Term};
use shoal_protocol::message::{
    CommitRecord, Conviction, FromCoordinator, LogRecord, MoveReason, RoundId, StoredFile,
    ToCoordinator,
};
use shoal_protocol::plain_name::PeerName;

/// An input of the coordinator's state machine.
#[derive(Debug, Clone, PartialEq)]
pub enum CoordinatorInput {
    /// A message from a member, or from a peer that asks to join.
    Message {
        /// The sender.
        from: Member,
        /// The message.
        message: ToCoordinator,
    },
    /// The connection to a member broke.
    Disconnected {
        /// The member.
        member: Member,
    },
    /// A record of an earlier [`CoordinatorAction::Append`] is durable.
    Appended(LogRecord),
    /// Time has passed.
    Tick,
}

/// What the driver must do for the coordinator, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum CoordinatorAction {
    /// Send a message to a member or to a peer that asked to join. The receiver may be this peer.
    Send {
        /// The receiver.
        to: Member,
        /// The message.
        message: FromCoordinator,
    },
    /// Make these peers the anchors, which replicate the log.
    Anchors(BTreeSet<PeerId>),
    /// Append this record to the log; when it is durable, return it in
    /// `CoordinatorInput::Appended`. Records are appended in the order of these actions.
    Append(LogRecord),
    /// An event for logs, metrics and status readers.
    Event(CoordinatorEvent),
}

/// Events of the coordinator, for logs, metrics and status readers.
#[derive(Debug, Clone, PartialEq)]
pub enum CoordinatorEvent {
    /// A peer was admitted.
    Admitted {
        /// The new member.
        member: Member,
        /// The stages it hosts.
        span: StageSpan,
        /// Its name, if it has one.
        name: Option<PeerName>,
    },
    /// A member's known answers differ from the first member's: the model's bits may differ from
    /// those of a one-process run.
    Unlike {
        /// The member.
        member: Member,
    },
    /// The coordinator rejected a request to join.
    NotAdmitted {
        /// The rejected peer.
        member: Member,
        /// The reason.
        reason: String,
    },
    /// The run waits for more peers.
    Waiting {
        /// Stages without a replica.
        stages: Vec<Stage>,
        /// How many further members the run requires before it starts.
        members: usize,
    },
    /// A new term began: its state was rebuilt from the log and the members' reports.
    BecameCoordinator {
        /// The term.
        term: Term,
        /// Claims that members hold.
        claims: u64,
    },
    /// A stage has no replica: the coordinator searches for the newest checkpoint that can be
    /// found. The run pauses until all of it is found.
    StageLost {
        /// The stages without a replica.
        stages: Vec<Stage>,
        /// The version of the newest checkpoint.
        version: Step,
    },
    /// A step opened: the weights that it reads are committed. Its work may have been granted
    /// earlier.
    Opened {
        /// The step.
        step: Step,
    },
    /// A step is committed.
    Committed {
        /// The commit record.
        record: Box<CommitRecord>,
        /// Statistics of the step's work.
        counts: StepCounts,
    },
    /// All-reduces failed and restart from the beginning.
    RoundsAborted {
        /// Their step.
        step: Step,
        /// The number of all-reduces.
        rounds: usize,
        /// Whether they timed out although every member is present.
        late: bool,
    },
    /// The result of an all-reduce is not the sum of what its members say that they gave. It is made again.
    RoundForged {
        /// The round.
        round: RoundId,
        /// The members that reduced what is not the sum. They, or members that lie about what they gave, are at fault.
        owners: BTreeSet<Member>,
    },
    /// A member's work was computed again, or nobody could.
    Audited {
        /// The member.
        of: Member,
        /// The stage.
        stage: Stage,
        /// The step.
        step: Step,
        /// What it showed.
        outcome: AuditOutcome,
    },
    /// A peer's work was wrong: it is out of the run for good.
    Convicted(Box<Conviction>),
    /// Members of an all-reduce are gone. Other members recompute their contributions, and the
    /// round continues with the pieces that it has.
    RoundMended {
        /// The round.
        round: RoundId,
        /// Number of members that are gone.
        gone: usize,
        /// Number of remaining members whose sums changed.
        changed: usize,
    },
    /// An expelled member's claims are free again.
    Revoked {
        /// The expelled member.
        member: Member,
        /// The number of claims.
        claims: u64,
    },
    /// A member reported a claim that it does not hold as held or done. The report has no effect.
    ClaimRefused {
        /// The member.
        member: Member,
        /// The claim.
        key: ClaimKey,
    },
    /// A member released an overdue claim; other members do the work.
    Reclaimed {
        /// The former holder.
        member: Member,
        /// The claim.
        key: ClaimKey,
    },
    /// Every replica of a stage is gone: the run returns to a checkpoint and waits for new replicas
    /// of the stage.
    Rewound {
        /// The era that begins.
        era: Era,
        /// The version of the weights.
        version: Step,
        /// Number of steps that are computed again.
        steps: u64,
    },
    /// A checkpoint was abandoned because a peer that had written a part of it is gone. The next
    /// version is stored in its place.
    CheckpointAbandoned {
        /// The version.
        version: Step,
    },
    /// A checkpoint is complete.
    CheckpointStored {
        /// The version.
        version: Step,
        /// Each stage's files, in the order of the stages.
        stages: Vec<Vec<StoredFile>>,
        /// Whether the run ends with it.
        last: bool,
    },
    /// A member is to host another stage instead of its own and fetches its weights first.
    MoveBegun {
        /// The member.
        member: Member,
        /// The stages it hosts.
        from: StageSpan,
        /// The stages it will host.
        to: StageSpan,
        /// The reason.
        reason: MoveReason,
    },
    /// The step at which a member changes its stage is decided.
    Moves {
        /// The member.
        member: Member,
        /// The stages it hosts until then.
        from: StageSpan,
        /// The stages it hosts from then on.
        to: StageSpan,
        /// The first step there.
        at: Step,
        /// The reason.
        reason: MoveReason,
    },
    /// A planned move was cancelled.
    MoveCancelled {
        /// The member.
        member: Member,
        /// The stages that it would have moved to.
        to: StageSpan,
        /// The reason of the move.
        reason: MoveReason,
        /// The reason of the cancellation.
        obstacle: MoveObstacle,
    },
    /// A member was lost.
    Lost {
        /// The member.
        member: Member,
        /// The stages it hosted.
        span: StageSpan,
        /// How the loss was detected.
        how: LossCause,
    },
    /// The run is over.
    Finished,
    /// The run cannot continue.
    Stopped {
        /// The reason, and a remedy.
        reason: String,
    },
}

/// What an audit showed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuditOutcome {
    /// Another replica came to what the member stated.
    Sound,
    /// No like replica could compute the work again.
    NotAudited,
}

/// How the loss of a member was detected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossCause {
    /// Its connection to the coordinator broke.
    Disconnected,
    /// It does not answer when its work is asked back.
    Silent,
    /// Another member cannot reach it.
    Unreachable,
    /// It reported several times that it cannot reach another member.
    CannotReach,
    /// It reported that it lacks a result that it needs.
    LacksResult,
    /// It claims what it cannot hold.
    ImpossibleClaim,
    /// It raised an alarm that no other member has confirmed.
    Alarmed,
    /// It came to another result than most.
    Disproved,
    /// Its work was wrong, as most of those found that computed it again.
    Convicted,
    /// It keeps work or results back that others wait for.
    Withholds,
    /// It left in order.
    Left,
    /// A newer incarnation of the peer registered.
    Replaced,
    /// It is an earlier incarnation of the coordinator's own peer.
    ProcessEnded,
}

impl LossCause {
    /// A phrase for logs and reports.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Disconnected => "its connection broke",
            Self::Silent => "it does not answer when its work is asked back",
            Self::Unreachable => "another member cannot reach it",
            Self::CannotReach => "it cannot reach another member",
            Self::LacksResult => "it lacks a result",
            Self::ImpossibleClaim => "it claims what it cannot hold",
            Self::Alarmed => "it says that the run cannot go on, and no other has seen that",
            Self::Disproved => "it came to another result than most",
            Self::Convicted => "its work is wrong",
            Self::Withholds => "it keeps back what others wait for",
            Self::Left => "it left",
            Self::Replaced => "it started anew",
            Self::ProcessEnded => "its process ended",
        }
    }

    /// Whether a correct member would not have been lost so: it comes back after a while only.
    #[must_use]
    pub fn is_its_fault(self) -> bool {
        matches!(self, Self::ImpossibleClaim | Self::Alarmed | Self::Disproved | Self::Withholds)
    }

    /// Whether its own message showed the loss: its process lives, and comes back as a new incarnation.
    #[must_use]
    pub fn comes_back(self) -> bool {
        self.is_its_fault() || matches!(self, Self::LacksResult | Self::CannotReach)
    }
}

/// Why a move was cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveObstacle {
    /// The member's present stage needs it.
    Needed,
    /// The member is about to leave.
    Leaves,
    /// The member is gone.
    Gone,
    /// The run returned to a checkpoint.
    Rewound,
}

impl MoveObstacle {
    /// A phrase for logs and reports.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Needed => "it is needed where it is",
            Self::Leaves => "it is about to leave",
            Self::Gone => "it is gone",
            Self::Rewound => "the run goes back to a checkpoint",
        }
    }
}

/// Statistics of one step's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepCounts {
    /// Completion reports that arrived more than once.
    pub repeated: u64,
    /// Claims that were revoked from lost members and whose work other members repeated.
    pub replayed: u64,
    /// Time from the completion of all work until every replica held the step's gradient.
    pub all_reduce: Duration,
}
