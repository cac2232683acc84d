//! What the coordinator is told, and what it wants done.

use std::collections::BTreeSet;
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Era, Member, PeerId, Stage, StageSpan, Step, Term};
use shoal_protocol::message::{
    CommitRecord, FromCoordinator, LogRecord, MoveReason, RoundId, StoredFile, ToCoordinator,
};

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
    BecameCoordinator {
        /// Which term.
        term: Term,
        /// Claims that members hold.
        claims: u64,
    },
    /// A stage is lost: it is looked for who has the newest checkpoint. Until all of it is found the
    /// run pauses.
    StageLost {
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
    /// All-reduces came to nothing and are tried again from the beginning.
    RoundsAborted {
        /// Of which step.
        step: Step,
        /// How many.
        rounds: usize,
        /// Whether they took too long, and nobody who takes part is gone.
        late: bool,
    },
    /// What members of an all-reduce that are gone had counted is done by others: it goes on with what there is of
    /// it.
    RoundMended {
        /// Which.
        round: RoundId,
        /// How many members were gone.
        gone: usize,
        /// Those who are left whose sums changed.
        changed: usize,
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
    Reclaimed {
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
    /// It is about to leave.
    Leaves,
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
            Self::Leaves => "it is about to leave",
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
