//! The records of the run's log: terms, membership changes, commits, rewinds and checkpoints.

use std::net::SocketAddr;

use super::{Conviction, FixedLoss, RoundOutcome, ViewChange};
use crate::ids::{Attempt, ContentHash, Era, PeerId, Stage, Step, Term};
use crate::units::Bytes;

/// A record that the coordinator appends to the log before it announces the decision.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub enum LogRecord {
    /// A coordinator's term began.
    Term(Term),
    /// A change of membership, of at most [`limits::CHANGED_MEMBERS`] members.
    ///
    /// [`limits::CHANGED_MEMBERS`]: crate::limits::CHANGED_MEMBERS
    View(ViewChange),
    /// The results of a step.
    Commit(CommitRecord),
    /// A new era began at this version of the weights.
    Rewind {
        /// The era.
        era: Era,
        /// The version of the weights that the era begins at.
        version: Step,
    },
    /// Every stage of this version is stored by as many peers as are available for it.
    Checkpoint {
        /// The version of the weights.
        version: Step,
        /// The stored stages, in order.
        stages: Vec<StoredStage>,
        /// The oldest checkpoint that is still kept.
        oldest: Step,
    },
    /// A member's work was wrong: its peer is out for good.
    Convicted(Box<Conviction>),
    /// All steps are trained and an archive has the result: the run is over.
    Completed,
    /// The run continues from an archive, because the log before this one is lost. Only the first record of a log.
    Founded(Founding),
}

/// The beginning of a history that continues an earlier one from a checkpoint.
///
/// Eras and terms of each history are above all those of the ones before it, so no message of an earlier history is
/// obeyed in a later one.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Founding {
    /// The number of the history: 1 for the first that continues another.
    pub number: u16,
    /// The version of the weights that the history begins at.
    pub version: Step,
    /// The stages of that version, in order, and the peers that hold them.
    pub stages: Vec<StoredStage>,
}

impl Founding {
    /// The era that the history begins with. A history has 65536 of them.
    #[must_use]
    pub fn era(&self) -> Era {
        Era(u32::from(self.number) << 16)
    }

    /// The term before the history's first one.
    #[must_use]
    pub fn term(&self) -> Term {
        Self::term_of(self.number, 0)
    }

    /// The coordinator's term that follows from an election of the anchors, in the history with this number.
    #[must_use]
    pub fn term_of(number: u16, election: u64) -> Term {
        Term((u64::from(number) << 32).saturating_add(election))
    }
}

/// The final results of one step.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub struct CommitRecord {
    /// The era of the step.
    pub era: Era,
    /// The term of the coordinator that ordered its rounds.
    pub term: Term,
    /// The step; the weights become version `step + 1`.
    pub step: Step,
    /// Attempt and outcome of each weight group's round, in order.
    pub rounds: Vec<(Attempt, RoundOutcome)>,
    /// Norm of the gradient over all stages, for the mean over targets.
    pub gradient_norm: f64,
    /// Sum of the training microbatches' losses.
    pub loss: FixedLoss,
    /// Sum of the held-out microbatches' losses, where the step has any.
    pub held_out_loss: Option<FixedLoss>,
}

/// A stage of a snapshot and its location.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct SnapshotPart {
    /// The stage.
    pub stage: Stage,
    /// The holders and files of the stage.
    pub stored: StoredStage,
}

/// A complete checkpoint and its location.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct SavedCheckpoint {
    /// The version of the weights.
    pub version: Step,
    /// The stored stages, in order.
    pub stages: Vec<StoredStage>,
    /// The peers that hold it, with the addresses of their data planes.
    pub holders: Vec<(PeerId, Vec<SocketAddr>)>,
}

/// The weights of one stage at one version, and the peers that hold them.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct StoredStage {
    /// The peers that hold the files.
    pub holders: Vec<PeerId>,
    /// The files, by content.
    pub files: Vec<StoredFile>,
}

/// A file that can be fetched by its hash.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct StoredFile {
    /// The file name in the checkpoint's folder.
    pub name: String,
    /// The hash of the content.
    pub hash: ContentHash,
    /// The size of the file.
    pub size: Bytes,
}
